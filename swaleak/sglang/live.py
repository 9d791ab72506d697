"""What runs inside a live server: the auditor and the recorder, as hooks of ``watch``.

A server waits for neither: they keep what they hear and work it off when the group ends. Nothing
here looks at every slot of a pool; pages are looked at through their first slot.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from swaleak.script.trace import PEER_FREES
from swaleak.sglang.watch import EDGES, POINTS, RESETS, Hooks, Place, place_of, slots_of

logger = logging.getLogger("swaleak")


class Gauge:
    """Physical and mapped SWA pages of one allocator, at page granularity.

    A page counts as mapped through the first slot of a full page; ``lost`` looks at all slots.
    """

    def __init__(self, allocator: Any) -> None:
        self.allocator = allocator
        self.page_size: int = allocator.page_size
        self.pool = allocator.swa_attn_allocator
        self.resized()

    def resized(self) -> None:
        """Take note of the sizes and the mapping as they are now."""
        self.mapping = self.allocator.full_to_swa_index_mapping.as_subclass(Tensor)
        self.heads = self.mapping[: -1 : self.page_size]  # a view: it follows the mapping
        self.pages = int(self.pool.size) // self.page_size
        self.marks = self._marks(self.heads)
        self.before = self.marks

    def physical(self) -> int:
        """Return the number of SWA pages that are not in the free list."""
        free: int = self.pool.available_size() // self.page_size
        return self.pages - free

    def mapped(self) -> int:
        """Count the distinct SWA pages that the mapping points at, and remember which."""
        self.before, self.marks = self.marks, self._marks(self.heads)
        return int(self.marks.count_nonzero()) - 1

    def lost(self, also: list[Tensor]) -> list[int]:
        """Return SWA pages that are in use, that nothing maps to, and that were mapped to.

        That is, at the count before the last one, or by ``also``: int64[n] each, SWA slots. Pages
        that were taken and never mapped yet are not lost: HiCache is about to load into them.
        """
        had = self.before.clone()
        for slots in also:
            had[slots // self.page_size] = True
        now = self._marks(self.mapping[:-1])
        now[self.pool.free_pages] = True
        if getattr(self.pool, "release_pages", None) is not None:
            now[self.pool.release_pages] = True
        had[0] = False
        pages: list[int] = (had & ~now).nonzero().reshape(-1).tolist()
        return pages

    def _marks(self, slots: Tensor) -> Tensor:
        """Return bool[pages + 1], true for the pages of ``slots`` (SWA slots), page 0 with them.

        The first head is the padding page's, so page 0 is always among them.
        """
        marks = torch.zeros(self.pages + 1, dtype=torch.bool, device=slots.device)
        pages = slots if self.page_size == 1 else slots // self.page_size
        return marks.index_fill_(0, pages, True)


class Auditor:
    """Compares physical and mapped after each group, and reports the first page that is lost.

    ``fix``: the strategy that is grafted on the class, if any.
    """

    CALLS = (*PEER_FREES, *POINTS, *RESETS, *EDGES)  # those it wants to hear of

    def __init__(self, gauge: Gauge, fix: str | None) -> None:
        self.gauge = gauge
        self.fix = fix
        self.in_group = False
        self.groups = 0
        self.excess = 0
        self.reported = False
        self.calls: list[tuple[str, Tensor, CodeType, int]] = []
        self.overwritten: list[Tensor] = []

    def connect(self, hooks: Hooks) -> None:
        """Ask for what happens inside groups."""
        for name in PEER_FREES:
            hooks.add([name], self._freed(name))
        for name in POINTS:
            hooks.add([name], self._pointed(name))
        hooks.add(["free_group_begin"], self._begin)
        hooks.add(RESETS, None, self._reset)

    def _begin(self, _args: Any, _kwargs: Any) -> None:
        self.in_group = True
        self.calls = []
        self.overwritten = []

    def _reset(self, *_: Any) -> None:
        self.in_group = False
        self.excess = 0

    def _freed(self, name: str) -> Callable[..., None]:
        def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.in_group:
                code, at = place_of(sys._getframe(2))
                self.calls.append((name, args[0] if args else slots_of(args, kwargs), code, at))

        return before

    def _pointed(self, name: str) -> Callable[..., None]:
        def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.in_group:
                slots = slots_of(args, kwargs)
                self.overwritten.append(self.gauge.mapping[slots])
                self.calls.append((name, slots, *place_of(sys._getframe(2))))

        return before

    def ended(self, physical: int, mapped: int) -> None:
        """A group has ended; these are the SWA pages in use and mapped."""
        self.in_group = False
        self.groups += 1
        logger.debug("swaleak: group %d: physical %d, mapped %d", self.groups, physical, mapped)
        more, self.excess = physical - mapped > self.excess, physical - mapped
        if more and not self.reported:
            pages = self.gauge.lost(self.overwritten)
            if pages:
                self.reported = True
                self._report(pages, physical, mapped)

    def _report(self, pages: list[int], physical: int, mapped: int) -> None:
        page, size = pages[0], self.gauge.page_size
        others = f"; {len(pages) - 1} more with it" if len(pages) > 1 else ""
        told = [
            f"SWA page {page} is lost: it is in use and nothing maps to it any more "
            f"(physical {physical}, mapped {mapped}{others})",
            *self._culprits(page),
            "fix: SGLang 0.5.19 or later (sgl-project/sglang #36381), or start the server with "
            "SWALEAK=fix:barrier"
            if self.fix is None
            else f"fix:{self.fix} is in force and did not prevent this: please report it",
        ]
        logger.error("swaleak: %s [page size %d, group %d]", "; ".join(told), size, self.groups)

    def _culprits(self, page: int) -> list[str]:
        """Say who pointed the page's full slots elsewhere in this group, and who freed them."""
        size = self.gauge.page_size
        writes = (call for call in self.calls if call[0] in POINTS)
        for (name, slots, code, at), old in zip(writes, self.overwritten, strict=True):
            mine = slots[old // size == page]
            if len(mine):
                freed = (
                    f"its free was queued by {how} at {Place(where, instruction)}"
                    for how, freed, where, instruction in self.calls
                    if how in PEER_FREES and torch.isin(freed // size, mine // size).any()
                )
                return [
                    next(freed, "nobody had freed it"),
                    f"before the group ended its full slots were re-pointed by {name} at "
                    f"{Place(code, at)}",
                ]
        return ["its mapping was cleared without a free that this process was told of"]


def connect(gauge: Gauge, hooks: Hooks, ended: list[Callable[[int, int], None]]) -> None:
    """Count once when a group ends, and tell everybody in ``ended``."""

    def after(*_: Any) -> None:
        physical, mapped = gauge.physical(), gauge.mapped()
        for tell in ended:
            tell(physical, mapped)

    hooks.add(["free_group_end"], None, after)
    hooks.add(RESETS, None, lambda *_: gauge.resized())
