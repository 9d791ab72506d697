"""Slots by their numbers: what the calls of a script or a trace refer to.

Everything is on the host. A whole page is entered at once, other slots one by one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from mmap import ACCESS_COPY, mmap
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from swaleak.errors import ScriptError
from swaleak.scenario.calls import Slots

FEW = 64  # slots
SWEEP = 1024  # allocations after which those that cannot be referred to are forgotten
LARGE = 2**16  # cells


class Cells:
    """int64[n] or int8[n], 0 at first. ``cells`` (for Python) and ``tensor`` share their memory."""

    def __init__(self, count: int, dtype: torch.dtype = torch.int64) -> None:
        self.code: Literal["q", "b"] = "q" if dtype == torch.int64 else "b"
        self.cells: array[int] | memoryview[int]
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

    ``whole``: the slots are these pages, whole and in order.
    """

    slots: Tensor
    pages: Sequence[int]
    whole: bool


class SlotTable:
    """The slots of one pool, found by their numbers.

    ``taken``: per page, the number with which the allocation began that took the page into use.
    ``in_use(page)``: whether somebody still has it. Earlier owners of a page may not refer to it.
    """

    def __init__(self, pages: int, page_size: int, in_use: Callable[[int], bool]) -> None:
        self.pages = pages
        self.page_size = page_size
        self.in_use = in_use
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
        for page in span.pages:
            if not 0 <= page <= self.pages:
                raise IndexError(f"handed out page {page} of {self.pages}")
            if not self.in_use(page):
                self.taken.cells[page] = first
        self.next = first + len(slots)
        if len(slots):
            if len(self.firsts) >= self.limit:
                self._sweep()
            self.spans[first] = span
            self.firsts.append(first)
        return span

    def find(self, ranges: Slots) -> Span:
        """Return slots by their numbers, in a tensor that nobody else has.

        Raises ``ScriptError`` for a number that refers to no slot.
        """
        spans = self._spans(ranges)
        if not spans:
            return span_of(torch.zeros(0, dtype=torch.int64, device="cpu"), self.page_size)
        if len(spans) == 1 and spans[0].whole:
            slots, pages, _ = spans[0]
            return Span(slots.clone(), pages, True)
        slots = torch.cat([span.slots for span in spans])
        if all(span.whole for span in spans):
            return Span(slots, [page for span in spans for page in span.pages], True)
        return span_of(slots, self.page_size)

    def slot(self, number: int) -> int:
        """Return one slot of the last allocation by its number, whoever has it now."""
        first = self.firsts[-1]
        return int(self.spans[first].slots[number - first])

    def pages_of(self, ranges: Slots) -> tuple[int, ...]:
        """Return the pages of slots, each once, in order."""
        return tuple(dict.fromkeys(page for span in self._spans(ranges) for page in span.pages))

    def _spans(self, ranges: Slots) -> list[Span]:
        if len(ranges) == 1:
            first, count = ranges[0]
            span = self.spans.get(first)
            if span is not None and count == span.slots.numel():
                self._check(first, span.pages)
                return [span]
        return [part for first, count in ranges for part in self._parts(first, count)]

    def _parts(self, first: int, count: int) -> Iterable[Span]:
        """Yield the slots of one range, allocation by allocation."""
        if first == 0:
            if count > (self.pages + 1) * self.page_size:  # before anything of that size is made
                raise ScriptError("more slots than the pool has")
            yield Span(torch.zeros(count, dtype=torch.int64, device="cpu"), [0], False)
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
            part = span if high - low == total else self._slice(span, low, high)
            self._check(start, part.pages)
            yield part
            first = start + high

    def _slice(self, span: Span, low: int, high: int) -> Span:
        size = self.page_size
        slots = span.slots[low:high]
        if span.whole and low % size == high % size == 0:
            return Span(slots, span.pages[low // size : high // size], True)
        return span_of(slots, size)

    def _check(self, first: int, pages: Iterable[int]) -> None:
        for page in pages:
            if self.taken.cells[page] > first or not self.in_use(page):
                raise ScriptError(f"nobody holds the slots numbered from {first} any more")

    def _sweep(self) -> None:
        self.spans = {
            first: span
            for first, span in self.spans.items()
            if any(self.in_use(page) and self.taken.cells[page] <= first for page in span.pages)
        }
        self.firsts = list(self.spans)
        self.limit = max(SWEEP, 2 * len(self.firsts))


@cache
def _offsets(page_size: int) -> Tensor:
    return torch.arange(page_size, device="cpu")


def span_of(slots: Tensor, page_size: int) -> Span:
    """Return slots, int64[n] on the host, with the pages that they lie in."""
    if page_size == 1:
        return Span(slots, slots.tolist(), True)
    count = slots.numel()
    if count <= FEW:  # kernels would take longer
        numbers = slots.tolist()
        pages = [first // page_size for first in numbers[::page_size]]
        if numbers == [page * page_size + at for page in pages for at in range(page_size)]:
            return Span(slots, pages, True)
        return Span(slots, list(dict.fromkeys(number // page_size for number in numbers)), False)
    if count % page_size == 0:
        rows = slots.view(-1, page_size)
        firsts = rows[:, 0].tolist()
        if not any(first % page_size for first in firsts) and torch.equal(
            rows, rows[:, :1] + _offsets(page_size)
        ):
            return Span(slots, [first // page_size for first in firsts], True)
    pages = (slots // page_size).tolist()
    return Span(slots, list(dict.fromkeys(pages)), False)
