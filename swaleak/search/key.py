"""A state told apart up to renaming: of nodes, and of pages."""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import Any

from swaleak.check.ledger import Node
from swaleak.check.player import Allocator, Player
from swaleak.search.queues import (
    FULL_PAGE,
    FULL_SLOT,
    SWA_PAGE,
    SWA_SLOT,
    Entry,
    Kind,
    Kinds,
    Queues,
    storage,
)

Held = list[tuple[int, str, list[Entry]]]  # what is queued, see ``Queues.held``
Places = tuple[dict[int, int], dict[int, int]]  # full and SWA page -> where it is queued first


class Keys:
    """Keys of one allocator's states.

    ``kinds``: see ``queue_kinds``. ``latent``: whether nodes freed in a group may still be named;
    where they may not, states that differ in them only are the same.
    """

    def __init__(self, allocator: Allocator, queues: Queues, kinds: Kinds, *, latent: bool) -> None:
        self.allocator = allocator
        self.queues = queues
        self.kinds = kinds
        self.latent = latent
        state, size = allocator.state(), allocator.page_size
        self.size = size
        self.full_pages = frozenset(range(1, state.full_pages + 1))
        self.swa_pages = frozenset(range(1, state.swa_pages + 1))
        self.whole_rows = {p: [*range(p * size, p * size + size)] for p in self.swa_pages}
        self.whole_rows[0] = [0] * size

    def key(self, player: Player) -> bytes:
        """Return 16 bytes that are equal for states that differ in names and page numbers only.

        The state is written out with nodes in an order of their own (by what they hold and where
        it is queued), and pages numbered in the order in which they are met on the way; the bytes
        are a hash of that text. Equal texts mean equal states up to renaming; states that are
        the same may have two texts, which costs time and nothing else.

        *Which* pages are free does not matter, nor the order in which they will be handed out, as
        long as nothing else names them: to hand out another one is a renaming. Once a free page
        is also named by a node, a queue or the mapping, or twice in its list, the list's order is
        written out. What a queue holds is written out in order, item by item. One thing is taken
        on trust: where an allocator sorts pages by their numbers before it puts them back, two
        states that differ in numbers only end up with differently ordered lists; that can only
        matter to an allocator which frees pages that are still named, and then at worst hides an
        order behind another that reaches the same state.
        """
        ledger, state = player.ledger, self.allocator.state()
        mapping: list[int] = state.mapping.tolist()
        no_location = mapping.pop()
        held = list(self.queues.held())
        text = _Text(self.size, *self._rows(mapping))
        text.numbers += (ledger.in_group, no_location, *self.queues.flags())
        named = [
            (rank, name, node)
            for rank, nodes in enumerate(
                (ledger.nodes, ledger.freed if self.latent else {}, ledger.ghosts)
            )
            for name, node in nodes.items()
        ]
        if len(named) > 1:
            places = self._places(held)
            named.sort(key=lambda entry: _signature(entry, text.peers, places))
        for rank, _, node in named:
            text.node(rank, node)
        order = [name for _, name, _ in named]
        buffers = [(name, storage(buffer)) for name, buffer in player.buffers.items()]
        for i, name, entries in held:
            text.numbers += (-3, i, len(name))
            kind = self.kinds.get((i, name))
            for values, item in entries:
                text.entry(values, kind)
                if item is not None and buffers:
                    place = storage(item)
                    for other, at in buffers:
                        if at == place:
                            text.numbers += (-5, order.index(other))
        text.rows_of_nobody()
        text.free_list(state.full_free.tolist(), text.full, self.full_pages)
        text.free_list(state.swa_free.tolist(), text.swa, self.swa_pages)
        return blake2b(array("q", text.numbers).tobytes(), digest_size=16).digest()

    def _rows(self, mapping: list[int]) -> tuple[list[int], dict[int, list[int]]]:
        """Return which SWA page each full page maps to, 0 for none, and the rows that are torn.

        Torn is a row that does not name one SWA page whole and in order; nearly always none is.
        """
        size = self.size
        if size == 1:
            return mapping, {}
        peers = [slot // size for slot in mapping[::size]]
        torn = {}
        for page, peer in enumerate(peers):
            row = mapping[page * size : page * size + size]
            if row != self.whole_rows.get(peer):
                torn[page] = row
        return peers, torn

    def _places(self, held: Held) -> Places:
        """Return where full and SWA pages are first queued; of slots, one a page is looked at."""
        full: dict[int, int] = {}
        swa: dict[int, int] = {}
        place = 0
        for i, name, entries in held:
            kind = self.kinds.get((i, name))
            for values, _ in entries:
                place += 1
                if kind in (FULL_SLOT, FULL_PAGE):
                    for page in _pages(values, kind == FULL_SLOT, self.size):
                        full.setdefault(page, place)
                elif kind in (SWA_SLOT, SWA_PAGE):
                    for page in _pages(values, kind == SWA_SLOT, self.size):
                        swa.setdefault(page, place)
        return full, swa


class _Text:
    """A state that is being written out, as numbers. Negative ones below -1 say what follows.

    ``peers``, ``torn``: see ``Keys._rows``. ``full``, ``swa``: page number -> number in the text.
    """

    def __init__(self, size: int, peers: list[int], torn: dict[int, list[int]]) -> None:
        self.size = size
        self.peers = peers
        self.torn = torn
        self.numbers: list[int] = []
        self.full, self.swa = {0: 0}, {0: 0}  # page 0 is padding
        self.rows: set[int] = set()  # full pages whose mapping is in the text
        self.mapped = 0  # how many of these map to anything

    def node(self, rank: int, node: Node) -> None:
        """Write what a node holds, and what its full pages map to."""
        full, swa, numbers = self.full, self.swa, self.numbers
        numbers += (-2, rank, node.slots)
        for page, peer in zip(node.full, node.swa, strict=True):
            numbers.append(full.setdefault(page, len(full)))
            numbers.append(-1 if peer is None else swa.setdefault(peer, len(swa)))
            there = self.peers[page]
            if page in self.torn:
                numbers.append(-9)
                numbers += _renamed(self.torn[page], swa, self.size)
            else:
                numbers.append(swa.setdefault(there, len(swa)))
            if page not in self.rows:
                self.rows.add(page)
                self.mapped += there != 0

    def entry(self, values: list[int], kind: Kind | None) -> None:
        """Write what is queued; numbers of an unknown kind as all they may be."""
        full, swa, size = self.full, self.swa, self.size
        self.numbers.append(-4)
        if kind == FULL_SLOT:
            self.numbers += _renamed(values, full, size)
        elif kind == SWA_SLOT:
            self.numbers += _renamed(values, swa, size)
        elif kind == FULL_PAGE:
            self.numbers += [full.setdefault(v, len(full)) for v in values]
        elif kind == SWA_PAGE:
            self.numbers += [swa.setdefault(v, len(swa)) for v in values]
        else:
            for v in values:
                for names, page in ((full, v // size), (swa, v // size), (full, v), (swa, v)):
                    self.numbers.append(names.setdefault(page, len(names)))
                self.numbers.append(v % size)

    def rows_of_nobody(self) -> None:
        """Write what full pages map to that no node holds, if any do."""
        peers, swa = self.peers, self.swa
        if not self.torn and len(peers) - peers.count(0) == self.mapped:
            return
        for page, there in enumerate(peers):
            if page in self.rows:
                continue
            if page in self.torn:
                self.numbers += (-6, self.full.get(page, ~page), -9)
                self.numbers += _renamed(self.torn[page], swa, self.size)
            elif there:
                self.numbers += (-6, self.full.get(page, ~page), swa.setdefault(there, len(swa)))

    def free_list(self, pages: list[int], names: dict[int, int], every: frozenset[int]) -> None:
        """Write how many pages are free, and which, if that matters."""
        self.numbers += (-7, len(pages))
        free = set(pages)
        if len(free) != len(pages) or not (free <= every and names.keys().isdisjoint(free)):
            self.numbers += [names.get(page, 0 if page in every else ~page) for page in pages]


def _signature(
    entry: tuple[int, str, Node],
    peers: list[int],
    places: Places,
) -> tuple[Any, ...]:
    """Return what a node looks like without its name and its pages' numbers."""
    rank, _, node = entry
    full, swa = places
    return (
        rank,
        node.slots,
        [
            (
                peer is None,
                full.get(page, 0),
                swa.get(peer or 0, 0),
                peers[page] > 0,
                swa.get(peers[page], 0),
            )
            for page, peer in zip(node.full, node.swa, strict=True)
        ],
    )


def _pages(values: list[int], slots: bool, size: int) -> list[int]:
    return [value // size for value in values[::size]] if slots else values


def _renamed(values: list[int], names: dict[int, int], size: int) -> list[int]:
    """Return slots as numbers in the text: a page that is named whole and in order as one number.

    That is a negative number, so that it is no slot's.
    """
    if size == 1:
        return [names.setdefault(v, len(names)) for v in values]
    if len(values) % size == 0:
        starts = values[::size]
        if all(
            start % size == 0 and values[at : at + size] == [*range(start, start + size)]
            for at, start in zip(range(0, len(values), size), starts, strict=True)
        ):
            return [-10 - names.setdefault(start // size, len(names)) for start in starts]
        if not any(values):
            return [-9]
    return [names.setdefault(v // size, len(names)) * size + v % size for v in values]
