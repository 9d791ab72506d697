"""Has an allocator that raised refused: on purpose, and with nothing changed?"""

from __future__ import annotations

from collections import deque

from torch import Tensor

from swaleak.check.player import Allocator, Withheld
from swaleak.script import ops
from swaleak.script.ops import Op

Fingerprint = list[tuple[object, int]]


def fingerprint(allocator: Allocator) -> Fingerprint:
    """Return something that is the same as long as nothing in the allocator has been written.

    Costs no copy and no synchronisation: tensors are told by identity and version counter, and
    whatever a part keeps in lists, dicts or sets is looked at one by one.
    """
    marks: Fingerprint = []
    for part in allocator.parts():
        for name, value in vars(part).items():
            marks.append((name, 0))
            _mark(value, marks)
    return marks


def _mark(value: object, marks: Fingerprint) -> None:
    if isinstance(value, Tensor):
        marks.append((value, value._version))
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        marks.append((None, len(value)))
        for item in value:
            _mark(item, marks)
    elif isinstance(value, dict):
        marks.append((None, len(value)))
        for key, item in value.items():
            marks.append((key, 0))
            _mark(item, marks)
    elif value is None or isinstance(value, (bool, int, float, str)):
        marks.append((value, 0))


def unchanged(before: Fingerprint, after: Fingerprint) -> bool:
    """Whether two fingerprints are of one state."""
    return len(before) == len(after) and all(
        (a is b or (not isinstance(a, Tensor) and a == b)) and m == n
        for (a, m), (b, n) in zip(before, after, strict=True)
    )


# what a mistake in the code raises, and no author of a check
MISTAKES = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    RecursionError,
    SystemExit,
    TypeError,
    Withheld,
)


HANDS_OUT = (ops.Alloc, ops.AllocTail, ops.Extend, ops.Decode, ops.LoadBack)


def is_refusal(op: Op, error: BaseException, before: Fingerprint, after: Fingerprint) -> bool:
    """Whether an allocator that raised has refused: on purpose, and with nothing changed.

    To refuse an allocation is no answer: a script asks for no more than there is.
    """
    on_purpose = not isinstance(error, MISTAKES) and not isinstance(op, HANDS_OUT)
    return on_purpose and unchanged(before, after)
