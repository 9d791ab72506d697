"""What runs inside a live server: the gauge and the auditor, as hooks of ``instrument``.

A server waits for neither: they keep what they hear and work it off when the group ends. Pages are
looked at through their first slot; all slots, only where that leaves a page unaccounted for.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swaleak.live.instrument import (
    ALLOCS,
    EDGES,
    PEER_FREES,
    POINTS,
    RESETS,
    Hooks,
    Place,
    pair_of,
    place_of,
    slots_of,
)

logger = logging.getLogger("swaleak")

MANY = 4096  # calls that are kept at most


class Look(NamedTuple):
    """SWA pages at the end of a group.

    ``physical``: how many are not in the free list. ``lost``: those in use that nothing reaches,
    since this group; ``twice``: those that are in the free list twice, since this group.
    """

    physical: int
    lost: list[int]
    twice: list[int]


class Gauge:
    """Which SWA pages of one allocator are free, and which are mapped.

    A page that was taken straight from the pool and not mapped yet is not lost: HiCache is about to
    load into it. Every other call that takes pages maps them.
    """

    def __init__(self, allocator: Any) -> None:
        self.allocator = allocator
        self.page_size: int = allocator.page_size
        self.pool = allocator.swa_attn_allocator
        self.resized()

    def connect(self, hooks: Hooks) -> None:
        """Ask for what takes SWA pages without mapping them, and what maps them later."""
        hooks.add(["swa.alloc"], None, self._took)
        hooks.add(["swa.free"], self._gave_back)
        hooks.add(["set_full_to_swa_mapping"], self._pointed)
        hooks.add(ALLOCS, None)  # what they take they map; what they call in turn is not told
        hooks.add(RESETS, None, lambda *_: self.resized())

    def resized(self) -> None:
        """Take note of the sizes and the mapping as they are now."""
        self.mapping: Tensor = self.allocator.full_to_swa_index_mapping.as_subclass(Tensor)
        self.heads = self.mapping[: -1 : self.page_size]  # a view: it follows the mapping
        self.pages = int(self.pool.size) // self.page_size
        self.lost = self._marks()
        self.reached = ~self.lost  # all others
        self.twice: set[int] = set()
        self.later = self._marks()  # taken, and not mapped yet, but for what ``heard`` says
        self.any_later = False
        self.heard: list[tuple[bool, Tensor]] = []  # for later, or not any more; SWA slots
        self.more = 0  # pages that are not lost, although no first slot reaches them

    def peers(self, full: Tensor) -> Tensor:
        """Return a copy of the SWA slots, int64[n], that full slots map to now."""
        return self.mapping.take(full.long())

    def _took(self, _args: Any, _kwargs: Any, result: Tensor | None) -> None:
        if result is not None:
            self._hear(True, result)

    def _gave_back(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._hear(False, slots_of(args, kwargs))

    def _pointed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        swa = pair_of(args, kwargs)[1]
        if self.heard and self.heard[-1][1] is swa:  # taken and mapped at once
            self.heard.pop()
        else:
            self._hear(False, swa.clone())

    def _hear(self, later: bool, swa: Tensor) -> None:
        if later or self.heard or self.any_later:
            self.heard.append((later, swa))
            if len(self.heard) > MANY:
                self._settle()

    def _settle(self) -> None:
        for later, swa in self.heard:
            self.later[swa // self.page_size] = later
        self.heard = []

    def look(self) -> Look:
        """Compare the pages in use with those that are mapped. Waits for the device."""
        waiting = getattr(self.pool, "release_pages", None)
        lists = [self.pool.free_pages, *([] if waiting is None or not len(waiting) else [waiting])]
        reached = self._marks(*lists)
        free = int(reached[1:].count_nonzero())
        reached.index_fill_(0, self._pages_of(self.heads), True)
        lost: list[int] = []
        if self.any_later or not torch.equal(reached, self.reached):
            lost = self._unreached(~reached)
        else:
            self.heard, self.more = [], 0
        twice: list[int] = []
        if self.twice or sum(map(len, lists)) > free:
            before, self.twice = self.twice, _repeated(torch.cat(lists))
            twice = sorted(self.twice - before)
        return Look(self.pages - free, lost, twice)

    def mapped(self) -> int:
        """Return how many pages the mapping reached, or HiCache was loading into, at that look."""
        return int(self._marks(self._pages_of(self.heads)).count_nonzero()) - 1 + self.more

    def _unreached(self, pages: Tensor) -> list[int]:
        """Return the pages that are lost since the last look.

        ``pages``: bool[pages + 1], in use, and no first slot of a full page maps to them.
        """
        self._settle()
        self.later &= pages
        self.any_later = bool(self.later.any())
        lost = pages & ~self.later
        old = self.lost & lost
        if self.page_size > 1 and not torch.equal(old, lost):  # another slot may map to them
            lost &= old | ~self._marks(self._pages_of(self.mapping[:-1]))
        self.lost, self.reached = lost, ~lost
        self.more = int((pages & ~lost).count_nonzero())
        new: list[int] = (lost & ~old).nonzero().reshape(-1).tolist()
        return new

    def _pages_of(self, slots: Tensor) -> Tensor:
        """Return the pages of SWA slots.

        Page 0 is among them wherever the mapping is looked at: it is the padding page's peer.
        """
        return slots if self.page_size == 1 else slots // self.page_size

    def _marks(self, *lists: Tensor) -> Tensor:
        """Return bool[pages + 1], true for the pages listed, int64[n] each."""
        marks = torch.zeros(self.pages + 1, dtype=torch.bool, device=self.mapping.device)
        for pages in lists:
            marks.index_fill_(0, pages, True)
        return marks


def _repeated(pages: Tensor) -> set[int]:
    """Return those of ``pages``, int64[n], that come more than once."""
    listed, times = torch.unique(pages, return_counts=True)
    return set(listed[times > 1].tolist())


# the first release in which a grouped call decides in time
FIXED = {
    "free_swa": "0.5.19 or later (sgl-project/sglang #36381)",
    "free": "0.5.20 or later (sgl-project/sglang #36646)",
}


@dataclass(frozen=True, slots=True)
class Release:
    """The SGLang that is running, as it is without a fix.

    ``ships``: by ``free_swa`` and ``free``, the strategy that a grouped call of it follows.
    """

    version: str | None
    ships: Mapping[str, str]

    @property
    def needs_fix(self) -> bool:
        """Whether a grouped free decides too late whose page it frees."""
        return "deferred" in self.ships.values()


class Call(NamedTuple):
    """A call of the allocator. ``peers``: int64[n], SWA slots that its full slots mapped to."""

    name: str
    peers: Tensor
    code: CodeType
    at: int

    def __str__(self) -> str:
        return f"{self.name} at {Place(self.code, self.at)}"


class Auditor:
    """Reports, after each group, every SWA page that is lost or twice in the free list.

    ``fix``: the strategy that is grafted on the class, if any. ``release``: what it is without.
    """

    CALLS = (*ALLOCS, *PEER_FREES, *POINTS, *RESETS, *EDGES)  # those it or the gauge wants to hear

    def __init__(self, gauge: Gauge, fix: str | None, release: Release | None) -> None:
        self.gauge = gauge
        self.fix = fix
        self.release = release
        self.in_group = False
        self.groups = 0
        self.calls: deque[tuple[str, Tensor, CodeType, int]] = deque(maxlen=MANY)

    def connect(self, hooks: Hooks) -> None:
        """Ask for what happens inside groups; outside, a free is carried out at once."""
        for name in (*PEER_FREES, *POINTS):
            hooks.add([name], self._called(name))
        hooks.add(["free_group_begin"], self._begin)
        hooks.add(RESETS, None, self._reset)

    def _begin(self, _args: Any, _kwargs: Any) -> None:
        self.in_group = True
        self.calls.clear()

    def _reset(self, *_: Any) -> None:
        self.in_group = False
        self.calls.clear()

    def _called(self, name: str) -> Callable[..., None]:
        def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.in_group:
                peers = self.gauge.peers(slots_of(args, kwargs))
                self.calls.append((name, peers, *place_of(sys._getframe(2))))

        return before

    def ended(self, look: Look) -> None:
        """A group has ended."""
        self.in_group = False
        self.groups += 1
        if look.lost or look.twice:
            self._report(look)

    def _report(self, look: Look) -> None:
        size = self.gauge.page_size
        counts = f"(physical {look.physical}, mapped {self.gauge.mapped()})"
        heard = [Call(*call) for call in self.calls]
        calls = [(call, {*(call.peers // size).reshape(-1).tolist()}) for call in heard]
        facts = [
            f"SWA page {page} is lost: it is in use and nothing maps to it any more {counts}; "
            + self._cause([call for call, pages in calls if page in pages])
            for page in look.lost
        ]
        facts += [
            f"SWA page {page} is in the free list twice: two requests will be given it {counts}"
            for page in look.twice
        ]
        for fact in facts:
            logger.error("swaleak: %s [page size %d, group %d]", fact, size, self.groups)

    def _cause(self, calls: list[Call]) -> str:
        """Say who lost a page, and what helps. ``calls``: those that found it mapped, in order."""
        writes = [i for i, call in enumerate(calls) if call.name in POINTS]
        last = writes[-1] if writes else len(calls)
        freed = next((call for call in calls[:last] if call.name in PEER_FREES), None)
        if freed is None:
            how = (
                f"{calls[last]} re-pointed its full slots"
                if writes
                else "its mapping was overwritten outside a group, or past the allocator's methods,"
            )
            return (
                f"nobody had freed it: {how} while it was live, which is the caller's fault; "
                "neither fix, nor another release of the allocator, can help"
            )
        how = f"re-pointed by {calls[last]}" if writes else "written past the allocator's methods"
        return (
            f"its free was queued by {freed}; before the group ended its full slots were {how}; "
            + self._advice("free" if freed.name in ("free", "free_segment") else "free_swa")
        )

    def _advice(self, free: str) -> str:
        """Say what helps where a queued ``free`` or ``free_swa`` has freed another page."""
        if self.fix:
            return f"fix:{self.fix} is in force and did not prevent this: please report it"
        running = f"SGLang {(self.release and self.release.version) or ''}".strip()
        if self.release and (has := self.release.ships[free]) != "deferred":
            return f"this {running} frees by {has} and did not prevent it: please report it"
        return f"fix: SGLang {FIXED[free]}, or start this {running} with SWALEAK=fix:barrier"


def connect(gauge: Gauge, hooks: Hooks, ended: list[Callable[[Look], None]]) -> None:
    """Look once when a group ends, and tell everybody in ``ended``."""

    def after(*_: Any) -> None:
        look = gauge.look()
        for tell in ended:
            tell(look)

    hooks.add(["free_group_end"], None, after)
    gauge.connect(hooks)
