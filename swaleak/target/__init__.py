"""Whose allocator is driven: ``kinds`` has the targets, ``names`` what they are called by."""

from swaleak.target.kinds import SHIPPED, Builtin, OfClass, Sizes, Target
from swaleak.target.names import STRATEGY_NAMES, of_tree, open_target, strategy_of

__all__ = [
    "SHIPPED",
    "STRATEGY_NAMES",
    "Builtin",
    "OfClass",
    "Sizes",
    "Target",
    "of_tree",
    "open_target",
    "strategy_of",
]
