"""Slots by their numbers: what the calls of a script or a trace refer to.

Everything is on the host. A whole page is entered at once, other slots one by one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cache
from mmap import ACCESS_COPY, mmap
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from swaleak.errors import ScriptError
from swaleak.scenario.calls import Slots

FEW = 64  # slots of an allocation
MANY = 256  # slots of several allocations together
SWEEP = 1024  # allocations after which those that cannot be referred to are forgotten
LARGE = 2**16  # cells


Numbers: TypeAlias = "array[int] | memoryview[int]"


class Cells:
    """int64[n] or int8[n], 0 at first. ``cells`` (for Python) and ``tensor`` share their memory."""

    def __init__(self, count: int, dtype: torch.dtype = torch.int64) -> None:
        self.code: Literal["q", "b"] = "q" if dtype == torch.int64 else "b"
        self.cells: Numbers
        if count < LARGE:
            self.cells = array(self.code, (0,)) * count
        else:  # takes memory only where it is written, and gives it back at once
            memory = mmap(-1, count * dtype.itemsize, access=ACCESS_COPY)
            self.cells = memoryview(memory).cast(self.code)
        self.tensor = torch.frombuffer(self.cells, dtype=dtype)

    def copy(self) -> array[int]:
        """Return the content; ``cells[:] =`` it puts it back."""
        return array(self.code, self.cells)


class Span(NamedTuple):
    """Slots, int64[n], on the host. ``pages``: those that they lie in, in order.

    ``whole``: the slots are these pages, whole and in order. ``few``: the slots once more, for
    Python; None if they are many.
    """

    slots: Tensor
    pages: Sequence[int]
    whole: bool
    few: list[int] | None

    def numbers(self) -> list[int]:
        """Return the slots."""
        return self.slots.tolist() if self.few is None else self.few


Cut = tuple[Span, int, int]  # an allocation, the first and the stop of those of its slots


class SlotTable:
    """The slots of one pool, found by their numbers.

    A page is in use if one of ``uses`` is not 0 there, or if it is among ``more()``. ``taken``: per
    page, the number with which the allocation began that took the page into use; earlier owners of
    a page may not refer to it.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        uses: tuple[Numbers, ...],
        more: Callable[[], Container[int]],
    ) -> None:
        self.pages = pages
        self.page_size = page_size
        self.uses = uses
        self.more = more
        self.taken = Cells(pages + 1)
        self.spans: dict[int, Span] = {}  # by first number
        self.firsts: list[int] = []  # ascending; some are forgotten
        self.next = 1
        self.limit = SWEEP

    def add(self, first: int, slots: Tensor) -> Span:
        """Enter what was handed out, numbered from ``first``, before its pages are in use.

        Raises ``ScriptError`` for a number that was given before, ``IndexError`` for a slot that
        is not in the pool.
        """
        if first < self.next:
            raise ScriptError(f"slot number {first} was handed out before")
        span = span_of(slots, self.page_size)
        taken, last = self.taken.cells, self.pages
        pages = span.pages
        if pages and not 0 <= min(pages) <= max(pages) <= last:
            page = next(page for page in pages if not 0 <= page <= last)
            raise IndexError(f"handed out page {page} of {last}")
        # most pages are new, and asking a list of them at once is faster than one by one
        new = not self.more()
        for use in self.uses:
            new = new and not any(map(use.__getitem__, pages))
        for page in pages:
            if new or not self.in_use(page):
                taken[page] = first
        count = slots.numel()
        self.next = first + count
        if count:
            if len(self.firsts) >= self.limit:
                self._sweep()
            self.spans[first] = span
            self.firsts.append(first)
        return span

    def in_use(self, page: int) -> bool:
        """Whether somebody has a page."""
        for use in self.uses:
            if use[page]:
                return True
        return page in self.more()

    def find(self, ranges: Slots, *, held: bool = True) -> Span:
        """Return slots by their numbers, in a tensor that nobody else has.

        ``held``: those whom they were handed out to have to hold them still. Raises
        ``ScriptError`` for a number that refers to no slot.
        """
        cuts = self._cuts(ranges, held)
        if len(cuts) == 1:
            return self._copy(*cuts[0])
        count, few = 0, True
        for span, low, high in cuts:
            count += high - low
            few = few and span.few is not None
        if few and count <= MANY:
            numbers = [n for span, low, high in cuts for n in (span.few or ())[low:high]]
            slots = torch.tensor(numbers, dtype=torch.int64, device="cpu")
            return _span_of_few(slots, numbers, self.page_size)
        slots = torch.cat([span.slots[low:high] for span, low, high in cuts])
        if all(self._is_whole(*cut) for cut in cuts):
            return Span(slots, [page for cut in cuts for page in self._pages(*cut)], True, None)
        return span_of(slots, self.page_size)

    def _copy(self, span: Span, low: int, high: int) -> Span:
        slots = span.slots[low:high].clone()
        few = None if span.few is None else span.few[low:high]
        if self._is_whole(span, low, high):
            return Span(slots, self._pages(span, low, high), True, few)
        if few is None:
            return span_of(slots, self.page_size)
        return _span_of_few(slots, few, self.page_size)

    def slot(self, number: int) -> int:
        """Return one slot of the last allocation by its number, whoever has it now."""
        first = self.firsts[-1]
        return int(self.spans[first].slots[number - first])

    def pages_of(self, ranges: Slots) -> tuple[int, ...]:
        """Return the pages of slots, each once, in order."""
        cuts = self._cuts(ranges, held=True)
        return tuple(dict.fromkeys(page for cut in cuts for page in self._pages(*cut)))

    def taken_since(self, ranges: Slots) -> list[int]:
        """Return the pages of slots that have been handed out again since."""
        taken, pages = self.taken.cells, []
        for first, count in ranges:
            there = dict.fromkeys(self.find(((first, count),), held=False).pages)
            pages += [page for page in there if taken[page] >= first + count and self.in_use(page)]
        return pages

    def _cuts(self, ranges: Slots, held: bool) -> list[Cut]:
        """Return where slots are, allocation by allocation."""
        cuts: list[Cut] = []
        for first, count in ranges:
            span = self.spans.get(first)
            if span is not None and count <= span.slots.numel():  # most are such a head, or whole
                if held:
                    self._check(first, self._pages(span, 0, count))
                cuts.append((span, 0, count))
            else:
                cuts += self._cut(first, count, held)
        return cuts

    def _cut(self, first: int, count: int, held: bool) -> Iterable[Cut]:
        if first == 0:
            if count > (self.pages + 1) * self.page_size:  # before anything of that size is made
                raise ScriptError("more slots than the pool has")
            slots = torch.zeros(count, dtype=torch.int64, device="cpu")
            yield Span(slots, [0], False, [0] * count if count <= FEW else None), 0, count
            return
        stop = first + count
        while first < stop:
            at = bisect_right(self.firsts, first) - 1
            start = self.firsts[at] if at >= 0 else 0
            span = self.spans.get(start)
            total = 0 if span is None else span.slots.numel()
            if span is None or first - start >= total:
                raise ScriptError(f"nobody holds the slot with number {first}")
            low, high = first - start, min(stop - start, total)
            if held:
                self._check(start, self._pages(span, low, high))
            yield span, low, high
            first = start + high

    def _is_whole(self, span: Span, low: int, high: int) -> bool:
        return span.whole and low % self.page_size == high % self.page_size == 0

    def _pages(self, span: Span, low: int, high: int) -> Sequence[int]:
        """Return the pages of some of an allocation's slots, perhaps some of them twice."""
        size = self.page_size
        if span.whole:
            return span.pages[low // size : -(-high // size)]
        if span.few is not None:
            return [slot // size for slot in span.few[low:high]]
        pages: list[int] = torch.unique_consecutive(span.slots[low:high] // size).tolist()
        return pages

    def _check(self, first: int, pages: Sequence[int]) -> None:
        taken = self.taken.cells
        used = all(map(self.uses[0].__getitem__, pages)) or all(map(self.in_use, pages))
        if not used or max(map(taken.__getitem__, pages), default=0) > first:
            raise ScriptError(f"nobody holds the slots numbered from {first} any more")

    def _sweep(self) -> None:
        taken, in_use = self.taken.cells, self.in_use
        self.spans = {
            first: span
            for first, span in self.spans.items()
            if any(taken[page] <= first and in_use(page) for page in span.pages)
        }
        self.firsts = list(self.spans)
        self.limit = max(SWEEP, 2 * len(self.firsts))


@cache
def _offsets(page_size: int) -> Tensor:
    return torch.arange(page_size, device="cpu")


def span_of(slots: Tensor, page_size: int) -> Span:
    """Return slots, int64[n] on the host, with the pages that they lie in."""
    count = slots.numel()
    if page_size == 1 or count <= FEW:  # kernels would take longer
        return _span_of_few(slots, slots.tolist(), page_size)
    if count % page_size == 0:
        rows = slots.view(-1, page_size)
        firsts = rows[:, 0].tolist()
        if not any(first % page_size for first in firsts) and torch.equal(
            rows, rows[:, :1] + _offsets(page_size)
        ):
            return Span(slots, [first // page_size for first in firsts], True, None)
    pages = (slots // page_size).tolist()
    return Span(slots, list(dict.fromkeys(pages)), False, None)


def _span_of_few(slots: Tensor, few: list[int], page_size: int) -> Span:
    if page_size == 1:
        return Span(slots, few, True, few)
    if len(few) % page_size == 0:
        pages = [first // page_size for first in few[::page_size]]
        if few == [page * page_size + at for page in pages for at in range(page_size)]:
            return Span(slots, pages, True, few)
    return Span(slots, list(dict.fromkeys([slot // page_size for slot in few])), False, few)
