"""The shadow: what an allocator that carried out every call at once would hold.

A free group is batching only, so outside a group an allocator has to agree with its shadow, page
by page and owner by owner. The shadow never looks into an allocator: a call tells it which slots
were handed out, and it works out the rest.

Everything is on the host. Slots are kept as runs: consecutive ones of one page are one entry.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from swaleak.errors import ScriptError
from swaleak.scenario.calls import Slots, cut

MISSING = -1  # the peer of a slot that should have been handed out with one and was not
TORN = -1  # the peer of a full page whose slots do not map to one SWA page in order
SWEEP = 1024  # allocations after which those that cannot be referred to are forgotten
FEW = 32  # slots that are copied one by one, which is faster than a kernel

Run = tuple[int, int]  # (first slot, count): consecutive, and in one page


class Cells:
    """int64[n], 0 at first. ``cells`` (for Python) and ``tensor`` are the same memory."""

    def __init__(self, count: int) -> None:
        self.cells = array("q", (0,)) * count
        self.tensor = torch.frombuffer(self.cells, dtype=torch.int64)


class Span:
    """Slots of one pool, as runs. ``[(0, n)]`` stands for n times no slot."""

    __slots__ = ("_pages", "count", "runs", "table")

    def __init__(
        self, runs: Sequence[Run], count: int, table: SlotTable, pages: list[int] | None = None
    ) -> None:
        self.runs, self.count, self.table, self._pages = runs, count, table, pages

    @property
    def pages(self) -> list[int]:
        """The pages that they lie in, each once, in order."""
        if self._pages is None:
            size = self.table.page_size
            self._pages = list(dict.fromkeys([slot // size for slot, _ in self.runs]))
        return self._pages

    @property
    def slots(self) -> Tensor:
        """The slots, int64[n] on the host, in a tensor that nobody else has."""
        if not self.count:
            return torch.zeros(0, dtype=torch.int64)
        if len(self.runs) == self.count:
            cells = array("q", [slot for slot, _ in self.runs])
        else:
            cells, consecutive = array("q"), self.table.consecutive
            for slot, count in self.runs:
                cells += consecutive[slot : slot + count] if slot else array("q", (0,) * count)
        return torch.frombuffer(cells, dtype=torch.int64)


class Node(NamedTuple):
    """An owner with a name: the numbers of its full slots, their pages, how many slots."""

    numbers: Slots
    pages: tuple[int, ...]
    slots: int


class SlotTable:
    """The slots of one pool, found by their numbers.

    ``taken``: per page, the number with which the allocation began that took the page into use.
    ``in_use(page)``: whether somebody still has it. Earlier owners of a page may not refer to it.
    """

    def __init__(self, pages: int, page_size: int, in_use: Callable[[int], bool]) -> None:
        self.pages = pages
        self.page_size = page_size
        self.in_use = in_use
        self.consecutive = array("q", range((pages + 1) * page_size if page_size > 1 else 0))
        self.taken = array("q", (0,)) * (pages + 1)
        self.spans: dict[int, Span] = {}  # by first number
        self.firsts: list[int] = []  # ascending; some are forgotten
        self.next = 1
        self.limit = SWEEP

    def add(self, first: int, slots: array[int]) -> Span:
        """Enter what was handed out, numbered from ``first``, before its pages are in use.

        Raises ``ScriptError`` for a number that was given before, ``IndexError`` for a slot that
        is not in the pool.
        """
        if first < self.next:
            raise ScriptError(f"slot number {first} was handed out before")
        span = self.span(slots)
        pages, in_use = span.pages, self.in_use
        for page in pages:
            if not 0 <= page <= self.pages:
                raise IndexError(f"handed out page {page} of {self.pages}")
            if not in_use(page):
                self.taken[page] = first
        self.next = first + span.count
        if span.count:
            if len(self.firsts) >= self.limit:
                self._sweep()
            self.spans[first] = span
            self.firsts.append(first)
        return span

    def find(self, ranges: Slots) -> Span:
        """Return slots by their numbers.

        Raises ``ScriptError`` for a number that refers to no slot.
        """
        if len(ranges) == 1:
            first, count = ranges[0]
            if (whole := self.spans.get(first)) is not None and count == whole.count:
                self._check(first, whole.pages)
                return whole
        runs: list[Run] = []
        total = 0
        for first, count in ranges:
            span = self.spans.get(first)
            if span is not None and count == span.count:
                self._check(first, span.pages)
                runs += span.runs
            else:
                self._find(first, count, runs)
            total += count
        return Span(runs, total, self)

    def span(self, slots: array[int]) -> Span:
        """Return slots as runs."""
        size, total = self.page_size, len(slots)
        if size == 1:
            return Span([(slot, 1) for slot in slots], total, self, slots.tolist())
        runs: list[Run] = []
        at = 0
        while at < total:
            slot, count = slots[at], 1
            if slot and at + 1 < total and slots[at + 1] == slot + 1:
                found = slots[at : at + size - slot % size]
                count = len(found)
                if found != (row := self.row(slot, count)):
                    count = next(i for i in range(count) if found[i] != row[i])
            runs.append((slot, count))
            at += count
        return Span(runs, total, self)

    def row(self, slot: int, count: int) -> array[int]:
        """Return the slots of a run."""
        if 0 < slot <= len(self.consecutive) - count:
            return self.consecutive[slot : slot + count]
        return array("q", range(slot, slot + count) if slot else (0,) * count)

    def _find(self, first: int, count: int, runs: list[Run]) -> None:
        """Append the slots of one range, allocation by allocation."""
        if first == 0:
            if count > (self.pages + 1) * self.page_size:  # before anything of that size is made
                raise ScriptError("more slots than the pool has")
            runs.append((0, count))
            return
        stop, size = first + count, self.page_size
        while first < stop:
            start = first
            if first not in self.spans:
                at = bisect_right(self.firsts, first) - 1
                start = self.firsts[at] if at >= 0 else 0
            span = self.spans.get(start)
            if span is None or first - start >= span.count:
                raise ScriptError(f"nobody holds the slot with number {first}")
            low, high = first - start, min(stop - start, span.count)
            each, rest = divmod(span.count, len(span.runs))
            if not rest and each in (1, size) and not low % each and not high % each:
                part = span.runs[low // each : high // each]  # single slots, or whole pages
            else:
                part = cut(span.runs, low, high)
            self._check(first, [slot // size for slot, _ in part])
            runs += part
            first = start + high

    def _check(self, first: int, pages: Iterable[int]) -> None:
        taken, in_use = self.taken, self.in_use
        for page in pages:
            if taken[page] > first or not in_use(page):
                raise ScriptError(f"nobody holds the slots numbered from {first} any more")

    def _sweep(self) -> None:
        self.spans = {
            first: span
            for first, span in self.spans.items()
            if any(self.in_use(page) and self.taken[page] <= first for page in span.pages)
        }
        self.firsts = list(self.spans)
        self.limit = max(SWEEP, 2 * len(self.firsts))


def cells_of(slots: Tensor) -> array[int]:
    """Return slots, integers [n] on any device."""
    count = slots.numel()
    if count <= FEW:
        return array("q", slots.tolist())
    cells = array("q", bytes(8 * count))
    torch.frombuffer(cells, dtype=torch.int64).copy_(slots)
    return cells


class Shadow:
    """The shadow of one allocator. Pages are numbered as in its pools, page 0 is padding.

    ``mapping``: by full slot, its SWA slot, 0 for none. ``peer``: by full page, the one SWA page
    that its slots map to, 0 for none, ``TORN`` if they do not map to one page in order.
    ``mapped``: by SWA page, how many full pages map to it. ``owned``: by full page, whether it is
    allocated. ``unmapped``: SWA pages that were handed out and that nothing mapped to yet.
    ``nodes``: owners with names. ``freed``: those that were freed in the open group, or whose SWA
    side was taken over afterwards. ``buffers``: index tensors that callers passed to frees.
    """

    def __init__(self, full_pages: int, swa_pages: int, page_size: int) -> None:
        self.full_pages, self.swa_pages, self.page_size = full_pages, swa_pages, page_size
        self.mapping = Cells((full_pages + 1) * page_size)
        self.peer = self.mapping if page_size == 1 else Cells(full_pages + 1)
        self.mapped = Cells(swa_pages + 1)
        self.owned = Cells(full_pages + 1)
        self.unmapped: set[int] = set()
        self.torn: set[int] = set()
        self.shared = 0  # SWA pages that more than one full page maps to
        self.in_group = False
        self.released: set[int] = set()  # full pages that were freed in the open group
        self.nodes: dict[str, Node] = {}
        self.freed: dict[str, Node] = {}
        self.buffers: dict[str, Tensor] = {}
        self.full = SlotTable(full_pages, page_size, self._full_in_use)
        self.swa = SlotTable(swa_pages, page_size, self.swa_in_use)
        self._blank = array("q", (0,)) * page_size

    # what the calls do

    def allocate(
        self, first: int, full: Tensor, swa_first: int = 0, swa: Tensor | None = None, tail: int = 0
    ) -> None:
        """Full slots, int64[n], were handed out, numbered from ``first``, perhaps with peers.

        The last ``tail`` of them have to have a peer.
        """
        span = self.full.add(first, cells_of(full))
        owned = self.owned.cells
        for page in span.pages:
            owned[page] = 1
        if self.released:
            self.released.difference_update(span.pages)
        if swa is None:
            self.clear_mapping(span)
            return
        cells, head = cells_of(swa), span.count - tail
        peers = self.swa.add(swa_first, cells)
        if 0 in cells[head:]:
            due = array("q", [peer or MISSING for peer in cells[head:]])
            peers = self.swa.span(cells[:head] + due)
        self.point(span, peers)

    def allocate_swa(self, first: int, swa: Tensor) -> None:
        """SWA slots, int64[n], were handed out that nothing maps to yet."""
        self.unmapped.update(self.swa.add(first, cells_of(swa)).pages)

    def point(self, full: Span, swa: Span) -> None:
        """Full slots map to SWA slots, one each, from now on."""
        ours, theirs = full.runs, swa.runs
        if self.page_size == 1 and len(ours) == len(theirs):
            for (slot, _), (peer, _) in zip(ours, theirs, strict=True):
                self._set_page(slot, peer)
        else:
            for slot, peer, count in _pairs(ours, theirs):
                self._set_run(slot, peer, count)
        if self.unmapped:
            self.unmapped.difference_update(swa.pages)

    def clear_mapping(self, full: Span) -> None:
        """These full slots, and no others of their pages, map to nothing any more."""
        for slot, count in full.runs:
            self._set_run(slot, 0, count)

    def free(self, full: Span, *, full_side: bool, swa_side: bool) -> None:
        """The pages of full slots lose their owners, their SWA peers, or both."""
        pages, owned = full.pages, self.owned.cells
        if swa_side:
            for page in pages:
                self._set_page(page, 0)
        if full_side:
            for page in pages:
                owned[page] = 0
            if self.in_group:
                self.released.update(pages)

    def free_swa_pool(self, swa: Span) -> None:
        """SWA slots went back into their pool, past the hybrid allocator."""
        self.unmapped.difference_update(swa.pages)

    def overwrite(self, buffer: str, source: Span) -> None:
        """A caller overwrites an index tensor that it has passed to a free."""
        if buffer not in self.buffers:
            raise ScriptError(f"overwrite {buffer}: it was not passed to any free yet")
        there = self.buffers[buffer]
        if len(there) != source.count:
            counts = f"{len(there)} and {source.count} slots"
            raise ScriptError(f"overwrite: lengths differ, {counts}")
        there.copy_(source.slots)

    def group(self, *, opens: bool) -> None:
        """A free group begins or ends."""
        self.in_group = opens
        if not opens:
            self.released.clear()
            self.freed = self.orphans()

    # names

    def name(self, node: str, numbers: Slots) -> None:
        """Call the owner of these full slots ``node``."""
        pages = tuple(self.full.find(numbers).pages)
        self.nodes[node] = Node(numbers, pages, sum(count for _, count in numbers))
        if self.freed:  # what was freed and is handed out again is nobody's to adopt
            taken = set(pages)
            self.freed = {
                other: old
                for other, old in self.freed.items()
                if other != node and taken.isdisjoint(old.pages)
            }

    def drop(self, node: str) -> None:
        """Its owner has freed it."""
        gone = self.nodes.pop(node)
        if self.in_group:
            self.freed[node] = gone

    def orphans(self) -> dict[str, Node]:
        """Return freed nodes whose full pages map to SWA pages again."""
        return {name: node for name, node in self.freed.items() if any(self.peers(node))}

    # what there is

    def peers(self, node: Node) -> list[int]:
        """Return the SWA page of each of its pages, 0 for none."""
        return [self.peer.cells[page] for page in node.pages]

    def peers_of(self, full: Span) -> Span:
        """Return the SWA slots that full slots map to."""
        cells = array("q")
        for slot, count in full.runs:
            cells += self.mapping.cells[slot : slot + count] if slot else array("q", (0,) * count)
        if MISSING in cells:
            cells = array("q", [max(peer, 0) for peer in cells])
        return self.swa.span(cells)

    def maps(self, full: Span) -> bool:
        """Whether any page of these full slots maps to something."""
        return any(self.peer.cells[page] for page in full.pages)

    def swa_in_use(self, page: int) -> bool:
        """Whether anything maps to an SWA page, or is about to."""
        return self.mapped.cells[page] > 0 or page in self.unmapped

    def pages_in_use(self) -> tuple[int, int]:
        """Return how many full and SWA pages are in use."""
        full, swa = self.owned.cells, self.mapped.cells
        return len(full) - full.count(0), len(swa) - swa.count(0) + len(self.unmapped)

    def check_lengths(self, one: Span, other: Span) -> None:
        """Raise ``ScriptError`` unless they have as many slots."""
        if one.count != other.count:
            counts = f"{one.count} and {other.count} slots"
            raise ScriptError(f"point: lengths differ, {counts}")

    def _full_in_use(self, page: int) -> bool:
        return bool(self.owned.cells[page] or self.peer.cells[page] or page in self.released)

    # one page, one run, one slot

    def _set_page(self, page: int, peer: int) -> None:
        """A full page maps to an SWA page, whole, or to none."""
        peers, mapped, size = self.peer.cells, self.mapped.cells, self.page_size
        old = peers[page]
        if old != peer:
            if old:
                self._forget(page, old)
            if peer > 0:
                mapped[peer] = times = mapped[peer] + 1
                if times == 2:
                    self.shared += 1
            peers[page] = peer
        elif not peer:
            return
        if size > 1:
            row = self.swa.consecutive[peer * size : (peer + 1) * size] if peer else self._blank
            self.mapping.cells[page * size : (page + 1) * size] = row

    def _set_run(self, slot: int, peer: int, count: int) -> None:
        """Consecutive full slots of one page map to consecutive SWA slots, or to none."""
        size, mapping = self.page_size, self.mapping.cells
        page, at = divmod(slot, size)
        if count == size and not at and not peer % size:
            self._set_page(page, peer // size)
            return
        there, old = peer // size, self.peer.cells[page]
        if slot and peer > 0 and peer % size == at and old in (0, there):
            if mapping[slot : slot + count] == self._blank[:count]:  # a request grows
                mapping[slot : slot + count] = self.swa.row(peer, count)
                if not old:
                    self.peer.cells[page] = there
                    self._count(there, 1)
                return
        for i in range(count):
            self._set_slot(slot and slot + i, peer and peer + i)

    def _set_slot(self, slot: int, peer: int) -> None:
        """A full slot maps to an SWA slot, or to none."""
        page, size, mapping = slot // self.page_size, self.page_size, self.mapping.cells
        if mapping[slot] == peer:
            return
        if size == 1:
            self._set_page(slot, peer)
            return
        if old := self.peer.cells[page]:
            self._forget(page, old)
        mapping[slot] = peer
        row = mapping[page * size : (page + 1) * size]
        used = {there // size for there in row if there > 0}
        if len(used) <= 1 and all(
            not there or (there > 0 and there % size == at) for at, there in enumerate(row)
        ):
            self.peer.cells[page] = next(iter(used), 0)
        else:
            self.peer.cells[page] = TORN
            self.torn.add(page)
        for there in used:
            self._count(there, 1)

    def _forget(self, page: int, old: int) -> None:
        """A full page maps to nothing for the moment."""
        if old > 0:
            mapped = self.mapped.cells
            mapped[old] = times = mapped[old] - 1
            if times == 1:
                self.shared -= 1
        elif page in self.torn:
            self.torn.discard(page)
            size = self.page_size
            row = self.mapping.cells[page * size : (page + 1) * size]
            for there in {there // size for there in row if there > 0}:
                self._count(there, -1)

    def _count(self, swa_page: int, by: int) -> None:
        mapped = self.mapped.cells
        before = mapped[swa_page]
        mapped[swa_page] = before + by
        self.shared += (before + by > 1) - (before > 1)


def _pairs(full: Sequence[Run], swa: Sequence[Run]) -> Iterable[tuple[int, int, int]]:
    """Yield full slot, SWA slot and count of what is a run on both sides."""
    peers = iter(swa)
    peer = left = 0
    for slot, count in full:
        while count:
            if not left:
                peer, left = next(peers)
            both = min(count, left)
            yield slot, peer, both
            count, left = count - both, left - both
            slot, peer = slot and slot + both, peer and peer + both
