"""Watches a live allocator from outside: which calls reach it, and from where.

``watched`` makes a subclass whose instances tell hooks of every outermost call that a hook asked
for, to the hybrid allocator or to one of its two pools. Hooks cannot disturb the server: whatever
one raises is logged once, and then none is called any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import Tensor

from swaleak.scenario.calls import CALLS, FreeCall

logger = logging.getLogger("swaleak")

Before = Callable[[tuple[Any, ...], dict[str, Any]], None]
After = Callable[[tuple[Any, ...], dict[str, Any], Any], None]

FREES = tuple(call.op for call in CALLS if issubclass(call, FreeCall))
PEER_FREES = tuple(c.op for c in CALLS if issubclass(c, FreeCall) and c.swa_side)
# the allocator's call -> its name in a trace
GROWS = {"alloc_extend": "extend", "alloc_decode": "decode", "alloc_extend_swa_tail": "tail"}
# calls of the hybrid allocator by what they do; a release that lacks one is not told of it
ALLOCS = ("alloc", *GROWS)
POINTS = ("set_full_to_swa_mapping", "clear_full_to_swa_mapping")
RESETS = ("clear", "resize")
EDGES = ("free_group_begin", "free_group_end")
EVERY_CALL = (*ALLOCS, *FREES, *POINTS, *RESETS, *EDGES)
# frees that stand for others, such as free_page_ids, are made inside a call of the allocator
POOL_CALLS = ("full.alloc", "full.free", "swa.alloc", "swa.free")


class Place(NamedTuple):
    """Where a call came from: the first caller outside SGLang's allocator package.

    ``at``: the instruction; which line that is, is worked out when somebody asks.
    """

    code: CodeType
    at: int

    def __str__(self) -> str:
        lines = [line for start, _, line in self.code.co_lines() if start <= self.at and line]
        return f"{self.code.co_filename}:{lines[-1]} ({self.code.co_qualname})"


class Hooks:
    """Which hooks to call for which call, ``free_swa`` or ``full.free``.

    Tensors in ``args`` are the caller's: they may be overwritten when the call has returned.
    ``inside``: a call is under way; what it calls in turn is not told.
    """

    def __init__(self) -> None:
        self.calls: dict[str, tuple[list[Before], list[After]]] = {}
        self.inside = False

    def add(self, names: Iterable[str], before: Before | None, after: After | None = None) -> None:
        """Call ``before``, ``after`` or both for these calls."""
        for name in names:
            befores, afters = self.calls.setdefault(name, ([], []))
            befores += [before] if before else []
            afters += [after] if after else []

    def fail(self) -> None:
        """Give up, and leave the server alone."""
        for befores, afters in self.calls.values():
            befores.clear()
            afters.clear()
        self.calls.clear()
        logger.exception("swaleak: watching failed and has stopped; the server is not affected")


def watched(
    base: type[Any], connect: Callable[[Any, Hooks], None], calls: Iterable[str] | None = None
) -> type[Any]:
    """Return a subclass of ``base``; ``connect(instance, hooks)`` is called for each instance.

    ``connect`` runs when the pools exist, and adds the hooks. ``calls``: the allocator's calls that
    hooks may be added for, by default all; the others stay as they are, and cost nothing.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self.swaleak = Hooks()
        base.__init__(self, *args, **kwargs)
        try:
            connect(self, self.swaleak)
            for name in POOL_CALLS:
                if name in self.swaleak.calls:
                    _tap(self, name)
        except Exception:
            self.swaleak.fail()

    members: dict[str, Any] = {"__init__": __init__, "__doc__": base.__doc__}
    for name in EVERY_CALL if calls is None else calls:
        if hasattr(base, name):
            members[name] = _told(name, getattr(base, name))
    return type(f"Watched{base.__name__}", (base,), members)


def _told(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls ``original``, and the hooks around it."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        hooks: Hooks = self.swaleak
        asked = hooks.calls.get(name)
        if asked is None or hooks.inside:
            return original(self, *args, **kwargs)
        try:
            for before in asked[0]:
                before(args, kwargs)
        except Exception:
            hooks.fail()
        hooks.inside = True
        try:
            result = original(self, *args, **kwargs)
        finally:
            hooks.inside = False
        try:
            for after in asked[1]:
                after(args, kwargs, result)
        except Exception:
            hooks.fail()
        return result

    return method


def _tap(allocator: Any, name: str) -> None:
    """Let a pool of this instance tell of a call, as ``_told`` does."""
    owner, _, call = name.partition(".")
    pool = getattr(allocator, f"{owner}_attn_allocator")
    bound = getattr(pool, call)
    told = _told(name, lambda _, *args, **kwargs: bound(*args, **kwargs))
    setattr(pool, call, told.__get__(allocator))


def slots_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the slots a call is about, int32[n] or int64[n]: its first argument."""
    if args:
        slots: Tensor = args[0]
    else:
        slots = kwargs["free_index" if "free_index" in kwargs else "full_indices"]
    return slots


def pair_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the full and the SWA slots, int64[n] each, of ``set_full_to_swa_mapping``."""
    full: Tensor = args[0] if args else kwargs["full_indices"]
    swa: Tensor = args[1] if len(args) > 1 else kwargs["swa_indices"]
    return full, swa


def place_of(frame: FrameType) -> tuple[CodeType, int]:
    """Return where a call came from, as ``Place`` takes it; ``frame``: of its caller."""
    code = frame.f_code
    while _INSIDE.get(code.co_filename) is not False:  # unknown, or inside
        if not _inside(code.co_filename) or frame.f_back is None:
            break
        frame = frame.f_back
        code = frame.f_code
    return code, frame.f_lasti


_INSIDE: dict[str, bool] = {}


def _inside(filename: str) -> bool:
    known = _INSIDE.get(filename)
    if known is None:
        known = filename == __file__ or "/mem_cache/allocator/" in filename.replace("\\", "/")
        _INSIDE[filename] = known
    return known
