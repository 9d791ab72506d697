"""Whose allocator a command drives, under which strategies, and what a report says of it.

Torch, and whatever imports it, is imported inside the functions: ``--help`` comes this way too.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from typing import TYPE_CHECKING

from swaleak import __version__
from swaleak.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from swaleak.report.model import About
    from swaleak.target import Target


def driving() -> AbstractContextManager[object]:
    """Return what a target is loaded and driven in: what its own code prints is no report."""
    return redirect_stdout(sys.stderr)


@contextmanager
def interruptible(where: str) -> Iterator[None]:
    """Let Ctrl-C say what it has stopped: code of a target may hang. Raises ``Interrupted``."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(where) from None


def open_targets(on: str, device: str, patches: list[str] | None = None) -> list[Target]:
    """Return the target, and after it the same one patched if there are patches.

    Raises as ``open_one``, and ``UsageError`` for a device that is not there.
    """
    start_torch()
    from swaleak.device import choose_device

    on_device = choose_device(device)
    shipped = open_one(on, on_device)
    return [shipped, open_one(on, on_device, patches)] if patches else [shipped]


def open_one(name: str, on_device: str, patches: list[str] | None = None) -> Target:
    """Return one target, patched if there are patches. ``on_device``: a torch device name.

    Raises ``UsageError`` for a name that means nothing, ``TargetError`` for a target that cannot
    be loaded.
    """
    from swaleak.target import open_target

    if not name.strip():
        raise UsageError("a target without a name; name one, such as builtin, 0.5.18 or a path")
    return open_target(name, on_device, patches)


def start_torch() -> None:
    """Import torch, and set it up for what happens here: many calls on small tensors."""
    gc.disable()  # it would walk torch's modules again and again while they load
    import torch

    gc.freeze()
    gc.enable()
    # threads bring nothing to small tensors, and on a busy machine they wait for each other
    torch.set_num_threads(1)


def strategies_of(target: Target, asked: list[str] | None) -> list[str]:
    """Return short names. Without any asked for: all four, one of which may be the target's own.

    Raises ``UsageError`` for a name that nobody knows.
    """
    from swaleak.target import strategy_of

    if asked:
        return list(dict.fromkeys(strategy_of(name) for name in asked))
    return [name for name in target.strategies() if name != "shipped"]


def trace_strategies(target: Target, asked: list[str] | None, fix: str | None) -> list[str]:
    """Return short names. Without any asked for: the one it was recorded under, or 0.5.18's."""
    if asked or fix:
        return strategies_of(target, asked or [str(fix)])
    return [target.ships or "deferred"]


def about(targets: list[Target]) -> About:
    """Return what a report says of its targets: what was driven, on which device.

    A patch ships nothing; whatever strategy its code looks like, the scenarios are what judges it.
    """
    import torch

    from swaleak.device import describe
    from swaleak.report.model import About

    device = targets[0].device
    driven = [
        ("the built-in model" if target.name == "builtin" else target.name)
        + (f" (ships {target.ships})" if target.ships and not is_patched(target) else "")
        for target in targets
    ]
    where = f"{describe(device)}, torch {torch.__version__}"
    header = f"swaleak {__version__}: {', '.join(driven)} on {where}"
    notes = tuple(note for target in targets for note in target.notes)
    patched = frozenset(target.name for target in targets if is_patched(target))
    return About(header, notes, str(torch.__version__), device, patched)


def is_patched(target: Target) -> bool:
    """Whether ``--patch`` has changed it."""
    from swaleak.target import SHIPPED

    return target.origin(SHIPPED) == "patched"
