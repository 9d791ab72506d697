"""What somebody types -> a target, or one of its strategies."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from swaleak.allocator.strategy import STRATEGIES
from swaleak.errors import TargetError, UsageError, told, unknown
from swaleak.sglang import release, source
from swaleak.sglang.loader import load
from swaleak.sglang.patch import patched
from swaleak.target.kinds import SHIPPED, Builtin, OfClass, Target

# every name that is understood -> the short one
STRATEGY_NAMES = {
    **{name: s.name for s in STRATEGIES.values() for name in (s.name, s.long_name)},
    SHIPPED: SHIPPED,
}


def open_target(name: str, device: str, patches: list[str] | None = None) -> Target:
    """Return the target that ``name`` means on ``device`` (a torch device name).

    ``patches``: files with diffs to apply to its sources first, "-" for standard input. Raises
    ``UsageError`` for a name that means nothing, ``TargetError`` for one that cannot be loaded.
    """
    if name == "auto":
        name = "installed" if source.is_installed() else "builtin"
    if name == "builtin" or _is_class(name):
        if patches:
            raise UsageError(f"--patch needs SGLang's sources to apply to, not {name}")
        return Builtin(device) if name == "builtin" else _user_class(name, device)
    return of_tree(_tree_named(name), device, patches, installed=name == "installed")


def of_tree(
    tree: source.SourceTree,
    device: str,
    patches: list[str] | None = None,
    *,
    installed: bool = False,
) -> OfClass:
    """Return the allocator of a source tree, patched if there are ``patches``.

    ``installed``: it is the tree that ``import sglang`` imports. Raises as ``open_target``.
    """
    notes: tuple[str, ...] = ()
    if patches:
        tree, left_out = patched(tree, patches)
        notes = tuple(f"left out, not in the allocator package: {path}" for path in left_out)
    return OfClass(
        load(tree, device),
        tree.label,
        device,
        version=tree.version,
        patched=bool(patches),
        installed=installed,
        notes=notes,
    )


def _tree_named(name: str) -> source.SourceTree:
    if name == "installed":
        return source.from_installed()
    path = Path(name)
    try:
        if name and path.is_dir():
            return source.from_folder(path)
        if path.is_file():
            return source.from_wheel(path)
    except OSError as error:  # such as a name too long for any file
        raise UsageError(f"{name[:60]}: {error.strerror or error}") from None
    if release.is_version(name):
        return release.from_release(name)
    if "/" in name or name.endswith(".whl"):
        raise UsageError(f"{name}: no such file or folder")
    # no list of releases: which there are beyond those that this swaleak was tried on, pip knows
    first = release.FIRST.partition(".post")[0]
    known = ("auto", "builtin", "installed", f"a release from {first} on", "a path", "module:Class")
    raise UsageError(unknown("target", name, known))


def _is_class(name: str) -> bool:
    module, _, class_ = name.partition(":")
    return class_.isidentifier() and all(part.isidentifier() for part in module.split("."))


def _user_class(name: str, device: str) -> OfClass:
    module, _, attribute = name.partition(":")
    if "" not in sys.path:  # a console script does not look in the folder it is called from
        sys.path.insert(0, "")
    try:
        class_ = getattr(importlib.import_module(module), attribute)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may raise whatever it likes
        raise TargetError(f"{name}: {told(error)}") from None
    if not isinstance(class_, type):
        raise TargetError(f"{name}: is no class")
    return OfClass(class_, name, device)


def strategy_of(name: str) -> str:
    """Return the short name of a strategy, or ``shipped``; raises ``UsageError``."""
    if name not in STRATEGY_NAMES:
        raise UsageError(unknown("strategy", name, STRATEGY_NAMES))
    return STRATEGY_NAMES[name]
