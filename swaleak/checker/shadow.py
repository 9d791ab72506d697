"""The shadow: what an allocator that carried out every call at once would hold.

A free group is batching only, so outside a group an allocator has to agree with its shadow, page
by page and owner by owner. The shadow never looks into an allocator: a call tells it which slots
were handed out, and it works out the rest.

Everything is on the host. A whole page is entered at once, other slots one by one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from swaleak.checker.slot_table import Cells, Numbers, SlotTable, Span, span_of
from swaleak.errors import ScriptError
from swaleak.scenario.calls import Slots

MISSING = -1  # the peer of a slot that should have been handed out with one and was not
TORN = -1  # the peer of a full page whose slots do not map to one SWA page in order


class Node(NamedTuple):
    """An owner with a name: the numbers of its full slots, their pages, how many slots."""

    numbers: Slots
    pages: tuple[int, ...]
    slots: int


class Mistake(NamedTuple):
    """A call that should not have been made, and the pages of ``pool`` that it is wrong about."""

    kind: str
    pool: str
    pages: tuple[int, ...]


class Shadow:
    """The shadow of one allocator. Pages are numbered as in its pools, page 0 is padding.

    ``mapping``: by full slot, its SWA slot, 0 for none. ``peer``: by full page, the one SWA page
    that its slots map to, 0 for none, ``TORN`` if they do not map to one page in order.
    ``mapped``: by SWA page, how many full pages map to it. ``owned``: by full page, whether it is
    allocated. ``unmapped``: SWA pages that were handed out and that nothing mapped to yet.
    ``nodes``: owners with names. ``freed``: those that were freed in the open group, or whose SWA
    side was taken over afterwards; ``gone``: all that were ever freed. ``buffers``: index tensors
    that callers passed to frees. ``mistakes``: of the callers, in order. ``mistaken``: the pages,
    by pool, that one was about. ``orphaned``: full pages that were freed by mistake, their SWA
    peers in use; what the mapping says of them is nobody's.
    """

    def __init__(self, full_pages: int, swa_pages: int, page_size: int) -> None:
        self.full_pages, self.swa_pages, self.page_size = full_pages, swa_pages, page_size
        self.mapping = Cells((full_pages + 1) * page_size)
        self.peer = self.mapping if page_size == 1 else Cells(full_pages + 1)
        self.mapped = Cells(swa_pages + 1)
        self.owned = Cells(full_pages + 1, torch.int8)
        self.full_used = self.swa_mapped = 0  # pages
        self.unmapped: set[int] = set()
        self.torn: set[int] = set()
        self.shared = 0  # SWA pages that more than one full page maps to
        self.in_group = False
        self.released: set[int] = set()  # full pages that were freed in the open group
        self.nodes: dict[str, Node] = {}
        self.freed: dict[str, Node] = {}
        self.gone: dict[str, Node] = {}
        self.buffers: dict[str, Tensor] = {}
        self.mistakes: list[Mistake] = []
        self.mistaken: set[tuple[str, int]] = set()
        self.orphaned: set[int] = set()
        uses: tuple[Numbers, ...] = (self.owned.cells, self.peer.cells)
        self.full = SlotTable(full_pages, page_size, uses, lambda: self.released)
        uses = (self.mapped.cells,)
        self.swa = SlotTable(swa_pages, page_size, uses, lambda: self.unmapped)
        self._blank = array("q", (0,)) * page_size
        self._identity = array("q", range((swa_pages + 1) * page_size if page_size > 1 else 0))

    # what the calls do

    def allocate(
        self, first: int, full: Tensor, swa_first: int = 0, swa: Tensor | None = None, tail: int = 0
    ) -> None:
        """Full slots, int64[n], were handed out, numbered from ``first``, perhaps with peers.

        The last ``tail`` of them have to have a peer.
        """
        span = self.full.add(first, full.to("cpu", torch.int64))
        self._own(span.pages)
        self.released.difference_update(span.pages)
        if swa is None:
            self._clear(span)
            return
        peers = self.swa.add(swa_first, swa.to("cpu", torch.int64))
        if not (peers.whole and all(peers.pages)) and not peers.slots[len(full) - tail :].all():
            missing = (peers.slots == 0) & (
                torch.arange(len(full), device="cpu") >= len(full) - tail
            )
            peers = span_of(torch.where(missing, MISSING, peers.slots), self.page_size)
        self._point(span, peers)

    def allocate_swa(self, first: int, swa: Tensor) -> None:
        """SWA slots, int64[n], were handed out that nothing maps to yet."""
        self.unmapped.update(self.swa.add(first, swa.to("cpu", torch.int64)).pages)

    def point(self, full: Span, swa: Span) -> None:
        """Full slots map to SWA slots, one each, from now on."""
        before = self._mapped_by(full)
        self._point(full, swa)
        self._overwritten(before)

    def _point(self, full: Span, swa: Span) -> None:
        if full.whole and swa.whole:
            self._set_pages(zip(full.pages, swa.pages, strict=True))
        else:
            for slot, peer in zip(full.numbers(), swa.numbers(), strict=True):
                self._set_slot(slot, peer)
        self.unmapped.difference_update(swa.pages)

    def point_at_peers(self, full: Span, source: Span) -> None:
        """Full slots map to what ``source`` maps to, from now on."""
        before = self._mapped_by(full)
        peers = [self.peer.cells[page] for page in source.pages]
        if full.whole and source.whole and TORN not in peers:
            self._set_pages(zip(full.pages, peers, strict=True))
        else:
            slots = self.mapping.tensor[source.slots].clamp(min=0)
            self._point(full, span_of(slots, self.page_size))
        self._overwritten(before)

    def clear_mapping(self, full: Span) -> None:
        """These full slots, and no others of their pages, map to nothing any more."""
        before = self._mapped_by(full)
        self._clear(full)
        self._overwritten(before)

    def _clear(self, full: Span) -> None:
        if full.whole:
            self._set_pages(zip(full.pages, repeat(0)))
        else:
            for slot in full.numbers():
                self._set_slot(slot, 0)

    def free(self, full: Span, *, full_side: bool, swa_side: bool) -> None:
        """The pages of full slots lose their owners, their SWA peers, or both."""
        if not swa_side:
            orphaned = self._with_peers(full)
            self.orphaned.update(orphaned)
            swa_side = bool(orphaned)  # nobody can reach their peers any more
        if swa_side:
            self._set_pages(zip(full.pages, repeat(0)))
        if full_side:
            owned = self.owned.cells
            for page in full.pages:
                self.full_used -= owned[page]
                owned[page] = 0
            if self.in_group:
                self.released.update(full.pages)

    def free_swa_pool(self, swa: Span) -> None:
        """SWA slots went back into their pool, past the hybrid allocator."""
        mapped = self.mapped.cells
        if any(map(mapped.__getitem__, swa.pages)):
            self._mistake("not-owned", "swa", (page for page in swa.pages if mapped[page]))
        self.unmapped.difference_update(swa.pages)

    def overwrite(self, buffer: str, source: Span) -> None:
        """A caller overwrites an index tensor that it has passed to a free."""
        if buffer not in self.buffers:
            raise ScriptError(f"overwrite {buffer}: it was not passed to any free yet")
        there = self.buffers[buffer]
        if len(there) != len(source.slots):
            counts = f"{len(there)} and {len(source.slots)} slots"
            raise ScriptError(f"overwrite: lengths differ, {counts}")
        there.copy_(source.slots)

    def group(self, *, opens: bool) -> None:
        """A free group begins or ends."""
        self.in_group = opens
        if not opens:
            self.released.clear()
            self.freed = self.orphans()

    # what should not have been called

    def to_free(self, ranges: Slots) -> Span:
        """Return full slots that somebody is going to free, whoever holds them now.

        Raises ``ScriptError`` for a number that refers to no slot.
        """
        try:
            return self.full.find(ranges)
        except ScriptError:
            full = self.full.find(ranges, held=False)
            if others := self.full.taken_since(ranges):
                self._mistake("not-owned", "full", others)
            return full

    def about_to_free(self, full: Span, *, full_side: bool, swa_side: bool) -> None:
        """Somebody is going to call ``free``: should they?"""
        owned, peers = self.owned.cells, self.peer.cells
        if not all(map(owned.__getitem__, full.pages)):
            unowned = [page for page in dict.fromkeys(full.pages) if not owned[page]]
            self._freed_again(page for page in unowned if full_side or not peers[page])
        if not swa_side and (pages := self._with_peers(full)):
            self._mistake("orphaned", "swa", self._mapped_by(full))
            self.mistaken.update(("full", page) for page in pages)

    def _mistake(self, kind: str, pool: str, pages: Iterable[int]) -> None:
        mistake = Mistake(kind, pool, tuple(dict.fromkeys(pages)))
        self.mistakes.append(mistake)
        self.mistaken.update((pool, page) for page in mistake.pages)

    def _freed_again(self, unowned: Iterable[int]) -> None:
        """Full pages are freed that nobody has: they have been freed, or were never handed out."""
        taken = self.full.taken.cells
        kinds: dict[str, list[int]] = {}
        for page in unowned:
            kinds.setdefault("freed-twice" if taken[page] else "not-owned", []).append(page)
        for kind, pages in kinds.items():
            self._mistake(kind, "full", pages)

    def _with_peers(self, full: Span) -> list[int]:
        """Return the full pages that map to something."""
        cells = self.peer.cells
        return [page for page in full.pages if cells[page]]

    def _mapped_by(self, full: Span) -> list[int]:
        """Return the SWA pages that full slots map to, before the mapping is written."""
        cells = self.peer.cells
        return [peer for page in full.pages if (peer := cells[page]) > 0]

    def _overwritten(self, before: Iterable[int]) -> None:
        """The mapping was written: of what was mapped before, nothing maps to some any more."""
        mapped = self.mapped.cells
        if lost := [page for page in before if not mapped[page]]:
            self._mistake("overwritten", "swa", lost)

    # names

    def name(self, node: str, numbers: Slots, pages: tuple[int, ...] | None = None) -> None:
        """Call the owner of these full slots ``node``. ``pages``: those of the slots, if known."""
        if pages is None:
            pages = self.full.pages_of(numbers)
        self.nodes[node] = Node(numbers, pages, sum(count for _, count in numbers))
        if self.freed:  # what was freed and is handed out again is nobody's to adopt
            taken = set(pages)
            self.freed = {
                other: old
                for other, old in self.freed.items()
                if other != node and taken.isdisjoint(old.pages)
            }

    def own(self, node: str, full: Sequence[int], swa: Sequence[int | None], slots: int) -> None:
        """Enter an owner: its full pages, beside each its SWA page, how many slots it has.

        The SWA page is None for a tombstone, ``MISSING`` where there should be one.
        """
        size = self.page_size
        self._own(full)
        for at, (page, peer) in enumerate(zip(full, swa, strict=True)):
            filled = min(size, slots - at * size)
            if peer is not None and peer > 0 and filled == size:
                self._set_pages([(page, peer)])
            elif peer is not None:
                for offset in range(filled):
                    there = peer * size + offset if peer > 0 else MISSING
                    self._set_slot(page * size + offset, there)
        self.nodes[node] = Node((), tuple(full), slots)

    def drop(self, node: str) -> None:
        """Its owner has freed it."""
        self.gone[node] = gone = self.nodes.pop(node)
        if self.in_group:
            self.freed[node] = gone

    def orphans(self) -> dict[str, Node]:
        """Return freed nodes whose full pages map to SWA pages again."""
        return {name: node for name, node in self.freed.items() if any(self.peers(node))}

    # what there is

    def peers(self, node: Node) -> list[int]:
        """Return the SWA page of each of its pages, 0 for none."""
        cells = self.peer.cells
        return [cells[page] for page in node.pages]

    def maps(self, full: Span) -> bool:
        """Whether any of these full slots maps to something."""
        if full.whole:
            return any(self.peer.cells[page] for page in full.pages)
        return bool(self.mapping.tensor[full.slots].any())

    def pages_in_use(self) -> tuple[int, int]:
        """Return how many full and SWA pages are in use."""
        return self.full_used, self.swa_mapped + len(self.unmapped)

    def check_lengths(self, one: Span, other: Span) -> None:
        """Raise ``ScriptError`` unless they have as many slots."""
        if one.slots.numel() != other.slots.numel():
            counts = f"{len(one.slots)} and {len(other.slots)} slots"
            raise ScriptError(f"point: lengths differ, {counts}")

    # one page, one slot

    def _own(self, pages: Sequence[int]) -> None:
        """Full pages are allocated."""
        owned = self.owned.cells
        for page in pages:
            self.full_used += not owned[page]
            owned[page] = 1
        self.orphaned.difference_update(pages)

    def _set_pages(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Full pages map to SWA pages, each whole, or to none."""
        peers, size, mapping = self.peer.cells, self.page_size, self.mapping.cells
        mapped = self.mapped.cells
        for page, peer in pairs:
            old = peers[page]
            if old != peer:
                if old > 0 and mapped[old] == 1:  # by far most pages have one peer, and are one's
                    mapped[old] = 0
                    self.swa_mapped -= 1
                elif old:
                    self._forget(page, old)
                if peer > 0 and not mapped[peer]:
                    mapped[peer] = 1
                    self.swa_mapped += 1
                elif peer > 0:
                    self._count(peer, 1)
                peers[page] = peer
            elif not peer:
                continue
            if size > 1:
                row = self._identity[peer * size : (peer + 1) * size] if peer else self._blank
                mapping[page * size : (page + 1) * size] = row

    def _set_slot(self, slot: int, peer: int) -> None:
        """A full slot maps to an SWA slot, or to none."""
        page, size, mapping = slot // self.page_size, self.page_size, self.mapping.cells
        if mapping[slot] == peer:
            return
        if size == 1:
            self._set_pages([(slot, peer)])
            return
        old = self.peer.cells[page]
        aligned = not mapping[slot] and peer > 0 and peer % size == slot % size
        if aligned and old in (0, peer // size):  # a request grows into its last page
            mapping[slot] = peer
            if not old:
                self.peer.cells[page] = peer // size
                self._count(peer // size, 1)
            return
        if old:
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
            self._count(old, -1)
        elif page in self.torn:
            self.torn.discard(page)
            size = self.page_size
            row = self.mapping.cells[page * size : (page + 1) * size]
            for there in {there // size for there in row if there > 0}:
                self._count(there, -1)

    def _count(self, swa_page: int, by: int) -> None:
        mapped = self.mapped.cells
        before = mapped[swa_page]
        mapped[swa_page] = after = before + by
        if before + after == 1:  # the first one, or the last
            self.swa_mapped += by
        elif before + after == 3:
            self.shared += by
