"""What a trace's numbers stand for: the allocations of one pool that can still be named."""

from __future__ import annotations

from bisect import bisect_right
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from swaleak.column import Column
from swaleak.errors import ScriptError
from swaleak.script.trace import Ranges

FEW = 64  # pages that are entered one by one, which is faster than a dozen kernels
NEVER = 2**62  # the padding is nobody's
SWEEP = 1024  # allocations after which it is worth asking who is gone


class Named(NamedTuple):
    """Slots, int64[n], on the host, in the order of their numbers.

    ``cells``: the same slots, where these are few. ``pages``: those that they touch, where these
    are few. ``whole``: the slots are these pages, whole and in this order.
    """

    slots: Tensor
    cells: list[int] | None
    pages: list[int] | None
    whole: bool


class Names:
    """The allocations of one pool, found by the numbers of their slots.

    A page is in use while one of ``used`` is not 0. ``born``: the first number of the allocation
    that took it into use; who had it in an earlier life cannot name it any more. An allocation
    can be named while it can name one of its pages.
    """

    def __init__(self, pages: int, page_size: int, *used: Column) -> None:
        self.pages = pages
        self.size = page_size
        self.used = used
        self.born = Column(pages + 1)
        self.born.cells[0] = NEVER
        self.scratch = Column(pages + 1)
        self.held: dict[int, Named] = {}  # by first number
        self.firsts: list[int] = []  # ascending; some are gone
        self.pinned: set[int] = set()
        self.last = 0
        self.fresh = self.fresh_slots = 0  # allocations and slots since the last sweep
        self.enough = SWEEP
        self.enough_slots = max(SWEEP, pages * page_size)

    def add(self, first: int, named: Named) -> None:
        """Enter what was handed out, numbered from ``first``, before its pages are in use.

        Raises ``ScriptError`` if the trace gives a number twice, ``IndexError`` if the allocator
        handed out what is not in the pool.
        """
        if first <= self.last:
            raise ScriptError(f"slot number {first} was handed out before")
        if self.fresh >= self.enough or self.fresh_slots >= self.enough_slots:
            self._sweep()
        length = named.slots.numel()
        self.last = first + length - 1
        if length:
            self._open(first, named)
            self.held[first] = named
            self.firsts.append(first)
            self.fresh += 1
            self.fresh_slots += length

    def find(self, ranges: Ranges) -> Named:
        """Return what ranges of numbers name, in a tensor of its own: who is called may write it.

        Number 0 is nobody's, and slot 0. Raises ``ScriptError`` if a slot cannot be named.
        """
        if len(ranges) == 1:
            [[first, length]] = ranges
            if first and length:
                start, named = self._holding(first)
                slots, cells, pages, whole = named
                at, there = first - start, slots.numel()
                if at == 0 and length == there:
                    return Named(slots.clone(), cells, pages, whole)
                if at + length <= there:
                    part = self._part(named, at, at + length)
                    return Named(slots.narrow_copy(0, at, length), *part)
        return self._find_all(ranges)

    def find_last(self, ranges: Ranges) -> Named:
        """As ``find``, for the last time: the pages of what is found go out of use."""
        if len(ranges) == 1:
            [[first, length]] = ranges
            named = self.held.get(first)
            if named is not None and length == named.slots.numel() and self._alive(first, named):
                del self.held[first]
                return named
        return self.find(ranges)

    def touched(self, slots: Tensor) -> Tensor:
        """Return the pages of slots (int64[n]), int64[m], each once."""
        pages = self._pages(slots)
        order = torch.arange(len(pages))
        kept = self.scratch.tensor.index_copy_(0, pages, order).index_select(0, pages) == order
        return pages if bool(kept.all()) else pages[kept]

    def _find_all(self, ranges: Ranges) -> Named:
        parts: list[Tensor] = []
        run: list[int] = []  # slots of allocations that are few, until one of many comes
        pages: list[int] | None = []
        all_whole = True
        room = (self.pages + 1) * self.size
        for first, length in ranges:
            room -= length
            if room < 0:  # before anything of that size is made
                raise ScriptError("names more slots than the pool has")
            if first == 0:
                run += [0] * length
                pages = None
                continue
            stop = first + length
            while first < stop:
                start, named = self._holding(first)
                at, upto = first - start, min(stop - start, named.slots.numel())
                cells, touched, whole = self._part(named, at, upto)
                if cells is None:
                    parts += (torch.tensor(run, dtype=torch.int64), named.slots[at:upto])
                    run = []
                else:
                    run += cells
                if touched is None or pages is None:
                    pages = None
                else:
                    pages += touched
                all_whole = all_whole and whole
                first = start + upto
        last = torch.tensor(run, dtype=torch.int64)
        if not parts:
            return Named(last, run, pages, all_whole)
        return Named(torch.cat((*parts, last)), None, pages, all_whole)

    def _part(
        self, named: Named, at: int, upto: int
    ) -> tuple[list[int] | None, list[int] | None, bool]:
        """Return what a ``Named`` says of some of the slots."""
        _, cells, pages, whole = named
        cells = cells and cells[at:upto]
        if pages is None or not whole:
            return cells, pages and pages[at:upto], False
        size = self.size
        if size == 1:
            return cells, cells, True
        return cells, pages[at // size : -(-upto // size)], at % size == upto % size == 0

    def _holding(self, number: int) -> tuple[int, Named]:
        """Return the allocation that has the slot with this number, and its first number."""
        first = number
        named = self.held.get(first)
        if named is None:
            index = bisect_right(self.firsts, number) - 1
            if index < 0:
                raise _nobody(number)
            first = self.firsts[index]
            named = self.held.get(first)
        at = number - first
        if named is None or at >= named.slots.numel():
            raise _nobody(number)
        if named.pages is not None:  # the page that is named proves it, mostly
            page = named.pages[at // self.size if named.whole else at]
            if self.born.cells[page] <= first and (
                self.used[0].cells[page] or self.used[-1].cells[page]
            ):
                return first, named
        if not self._alive(first, named):
            raise _nobody(number)
        return first, named

    def _alive(self, first: int, named: Named) -> bool:
        one, other, born = self.used[0].cells, self.used[-1].cells, self.born.cells
        pages = named.pages
        if pages is None:  # its first one proves it, mostly
            pages = [int(named.slots[0]) // self.size]
        for page in pages:
            if (one[page] or other[page]) and born[page] <= first:
                return True
        if named.pages is None:
            every = self._pages(named.slots)
            mine = self.born.tensor.index_select(0, every) <= first
            if bool((mine & self._in_use(every)).any()):
                return True
        return first in self.pinned

    def _open(self, first: int, named: Named) -> None:
        """Take what was not in use before into use."""
        born = self.born
        if named.pages is None:
            pages = self._pages(named.slots)
            low, high = (int(page) for page in pages.aminmax())
            if low < 0 or high > self.pages:
                raise self._outside(low if low < 0 else high)
            used = self._in_use(pages)
            born.tensor.index_fill_(0, pages[~used] if bool(used.any()) else pages, first)
            return
        one, other = self.used[0].cells, self.used[-1].cells
        for page in named.pages:
            if page < 0 or page > self.pages:
                raise self._outside(page)
            if not one[page] and not other[page]:
                born.cells[page] = first

    def _pages(self, slots: Tensor) -> Tensor:
        """Return the pages of slots (int64[n]), int64[m], some perhaps more than once."""
        if self.size == 1:
            return slots
        pages: Tensor = torch.unique_consecutive(slots // self.size)
        return pages

    def _outside(self, page: int) -> IndexError:
        return IndexError(f"handed out page {page} of {self.pages}")

    def _in_use(self, pages: Tensor) -> Tensor:
        """Return bool[n] for int64[n] pages."""
        use = self.used[0].tensor.index_select(0, pages)
        for other in self.used[1:]:
            use |= other.tensor.index_select(0, pages)
        return use != 0

    def _sweep(self) -> None:
        """Forget what cannot be named any more."""
        self.held = {first: one for first, one in self.held.items() if self._alive(first, one)}
        self.firsts = list(self.held)
        self.fresh = self.fresh_slots = 0
        self.enough = max(SWEEP, len(self.firsts))


def listed(slots: Tensor, page_size: int) -> Named:
    """Return slots, int64[n], with their pages, if these are few."""
    if slots.numel() > FEW:
        whole = _whole_pages(slots, page_size)
        return Named(slots, None, whole, whole is not None)
    cells = slots.tolist()
    if page_size == 1:
        return Named(slots, cells, cells, True)
    if len(cells) % page_size == 0:
        pages = [slot // page_size for slot in cells[::page_size]]
        if cells == [s for p in pages for s in range(p * page_size, (p + 1) * page_size)]:
            return Named(slots, cells, pages, True)
    return Named(slots, cells, [slot // page_size for slot in cells], False)


def listed_pair(full: Tensor, swa: Tensor, page_size: int) -> tuple[Named, Named]:
    """Return slots and their peers, int64[n] each, with their pages, if these are few."""
    if full.numel() <= FEW or page_size == 1:
        return listed(full, page_size), listed(swa, page_size)
    pages = _whole_pages(torch.cat((full, swa)), page_size)  # one look at both
    if pages is None:
        return Named(full, None, None, False), Named(swa, None, None, False)
    half = len(pages) // 2
    return Named(full, None, pages[:half], True), Named(swa, None, pages[half:], True)


def _whole_pages(slots: Tensor, page_size: int) -> list[int] | None:
    """Return the pages that int64[n] slots are, whole and in order, if such they are, and few."""
    if slots.numel() % page_size or slots.numel() > FEW * page_size:
        return None
    rows = slots.view(-1, page_size)
    leads = rows[:, :1]
    if not torch.equal(rows, leads + _offsets(page_size)):
        return None
    firsts = leads.flatten().tolist()
    pages = [slot // page_size for slot in firsts]
    return pages if firsts == [page * page_size for page in pages] else None


@cache
def _offsets(page_size: int) -> Tensor:
    return torch.arange(page_size)


def _nobody(number: int) -> ScriptError:
    return ScriptError(f"nobody holds the slot with number {number}")
