"""States up to renaming: where only names of nodes and page numbers differ, the key is the same."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from swaleak.checker.shadow import Node, Shadow
from swaleak.checker.slot_table import span_of
from swaleak.checker.snapshot import CONTAINERS, SCALARS, Length, entries
from swaleak.errors import RAISED
from swaleak.targets.driver import Driver

Make = Callable[[int, int], Driver]  # full pages, SWA pages -> a fresh allocator

Kind = str  # what the numbers in a queue are: one of the four below
FULL_SLOT, SWA_SLOT, FULL_PAGE, SWA_PAGE = "full slots", "SWA slots", "full pages", "SWA pages"
Kinds = dict[tuple[int, str], Kind]  # by part of the allocator and attribute
Held = list[tuple[int, str, list[object]]]  # part, attribute, its entries
Places = tuple[dict[int, int], dict[int, int]]  # full and SWA page -> where it is queued first

# the free lists and the mapping, which are written page by page
POOLS = frozenset({"full_to_swa_index_mapping", "free_pages", "release_pages"})
_ABSENT, _OTHER = object(), object()


class Keys:
    """Keys of one allocator's states.

    ``kinds``: see ``queue_kinds``. ``latent``: whether steps may still refer to nodes that were
    freed in a group; where they may not, states that differ in them only are the same.
    """

    def __init__(self, driver: Driver, kinds: Kinds, *, latent: bool) -> None:
        self.driver = driver
        self.kinds = kinds
        self.latent = latent
        state, size = driver.state(), driver.page_size
        self.size = size
        self.full_pages = frozenset(range(1, state.full_pages + 1))
        self.swa_pages = frozenset(range(1, state.swa_pages + 1))
        self.whole_rows = torch.arange((state.swa_pages + 1) * size, device="cpu").view(-1, size)
        self.whole_rows[0] = 0
        mapping = _storage(state.mapping)
        self.parts = []  # attributes now, at the start, and those of the start that may change
        for live in map(vars, driver.parts()):
            start = dict(live)
            watched = [
                (name, value if isinstance(value, SCALARS) else _OTHER, _Content(value))
                for name, value in live.items()
                if name not in POOLS
                and isinstance(value, (Tensor, *CONTAINERS, *SCALARS))
                and not (isinstance(value, Tensor) and _storage(value) == mapping)
            ]
            self.parts.append((live, start, watched))

    def key(self, shadow: Shadow) -> bytes:
        """Return 16 bytes that are equal for states that differ in names and page numbers only.

        The state is written out with nodes in an order of their own (by what they hold and where
        it is queued), and pages numbered in the order in which they are met on the way; the bytes
        are a hash of that text. Equal texts mean equal states up to renaming; states that are
        the same may have two texts, which costs time and nothing else.

        *Which* pages are free does not matter, nor the order in which they will be handed out, as
        long as nothing else refers to them: to hand out another one is a renaming. Once a free page
        is also referred to by a node, a queue or the mapping, or is twice in its list, the list's
        order is written out. What a queue holds is written out in order, item by item. One thing
        is assumed: where an allocator sorts pages by their numbers before it puts them back, two
        states that differ in numbers only end up with differently ordered lists; that can only
        matter to an allocator which frees pages that something still refers to, and then at worst
        hides an order behind another that reaches the same state.
        """
        state = self.driver.state()
        held = self.held()
        peers, torn, no_location = self._mapped(state.mapping, shadow)
        text = _Text(self.size, peers, torn)
        text.numbers += (shadow.in_group, no_location)
        nodes = self._nodes(shadow)
        if len(nodes) > 1:
            full, swa = self._places(held)
            nodes.sort(key=lambda entry: _signature(entry, peers, full, swa))
        for rank, _, node, node_peers in nodes:
            text.node(rank, node, node_peers)
        buffers = {}
        if self.latent and shadow.buffers:
            order = {name: at for at, (_, name, _, _) in enumerate(nodes)}
            buffers = {
                order[name]: _storage(buffer)
                for name, buffer in shadow.buffers.items()
                if name in order
            }
        for part, name, items in held:
            text.attribute(part, name, items, self.kinds.get((part, name)), buffers)
        text.rows_of_nobody()
        text.free_list(state.full_free.tolist(), text.full, self.full_pages)
        text.free_list(state.swa_free.tolist(), text.swa, self.swa_pages)
        return blake2b(array("q", text.numbers).tobytes(), digest_size=16).digest()

    def held(self) -> Held:
        """Return what the allocator keeps beside pools and mapping, where it is not as it began."""
        held: Held = []
        for part, (live, start, watched) in enumerate(self.parts):
            missing = len(start) - len(live)
            for name, scalar, before in watched:
                value = live.get(name, _ABSENT)
                if value is scalar:
                    continue
                if isinstance(value, list):  # as most queues are, and empty
                    if value or not before.empty:
                        held.append((part, name, [*entries(value)]))
                elif value is _ABSENT:
                    missing = 1
                elif not before.is_as(value):
                    held.append((part, name, [*entries(value)]))
            if missing:
                late = [(part, n, [*entries(v)]) for n, v in live.items() if n not in start]
                held += sorted(late + [(part, n, []) for n in start if n not in live])
        return held

    def kept(self, shadow: Shadow) -> dict[str, int]:
        """Return the nodes whose index buffer the allocator still holds, with its length."""
        if not shadow.buffers:
            return {}
        held = {
            _storage(item)
            for _, _, items in self.held()
            for item in items
            if isinstance(item, Tensor)
        }
        return {
            name: len(buffer)
            for name, buffer in shadow.buffers.items()
            if _storage(buffer) in held and (name in shadow.nodes or name in shadow.freed)
        }

    def _nodes(self, shadow: Shadow) -> list[tuple[int, str, Node, list[int]]]:
        """Return what a step may refer to: nodes, freed ones, and freed ones with SWA pages."""
        peers = shadow.peers
        nodes = [(0, name, node, peers(node)) for name, node in shadow.nodes.items()]
        if self.latent:
            for name, node in shadow.freed.items():
                theirs = peers(node)
                nodes.append((2 if any(theirs) else 1, name, node, theirs))
        return nodes

    def _mapped(self, mapping: Tensor, shadow: Shadow) -> tuple[list[int], dict[int, Tensor], int]:
        """Return which SWA page each full page maps to, the rows that are torn, the last entry.

        A row is torn that does not refer to one SWA page whole and in order; hardly any ever is.
        """
        if self.size == 1:
            peers: list[int] = mapping.tolist()
            return peers, {}, peers.pop()
        mapping = mapping if mapping.device.type == "cpu" else mapping.cpu()
        last, mapping = int(mapping[-1]), mapping[:-1]
        if not shadow.torn and torch.equal(mapping, shadow.mapping.tensor):
            return shadow.peer.cells.tolist(), {}, last
        rows = mapping.view(-1, self.size)
        pages = rows[:, 0] // self.size
        whole, torn = self.whole_rows[pages.clamp(0, len(self.swa_pages))], {}
        if not torch.equal(rows, whole):
            differ = (rows != whole).any(1).nonzero().view(-1).tolist()
            torn = {page: rows[page] for page in differ}
        return pages.tolist(), torn, last

    def _places(self, held: Held) -> Places:
        """Return where full and SWA pages are first queued."""
        full: dict[int, int] = {}
        swa: dict[int, int] = {}
        place = 0
        for part, name, items in held:
            kind = self.kinds.get((part, name))
            if kind is None:
                continue
            places = full if kind in (FULL_SLOT, FULL_PAGE) else swa
            step = self.size if kind in (FULL_SLOT, SWA_SLOT) else 1
            for item in items:
                if isinstance(item, Tensor):
                    place += 1
                    for number in _numbers(item[::step] if step > 1 else item):  # one slot per page
                        places.setdefault(number // step, place)
        return full, swa


class _Content:
    """An attribute as it was at the start."""

    def __init__(self, value: Any) -> None:
        self.tensor = value if isinstance(value, Tensor) else None
        self.version = value._version if isinstance(value, Tensor) else 0
        self.empty = isinstance(value, CONTAINERS) and not value
        self.items = _plain(value)

    def is_as(self, value: Any) -> bool:
        """Whether a value has the same content."""
        if type(value) is bool:
            return self.items == [value]
        if self.empty and isinstance(value, CONTAINERS):
            return not value
        if isinstance(value, Tensor) and value is self.tensor and value._version == self.version:
            return True
        return _plain(value) == self.items


class _Text:
    """A state that is being written out, as numbers. Negative ones below -1 say what follows.

    ``peers``, ``torn``: see ``Keys._mapped``. ``full``, ``swa``: page number -> number in the text.
    """

    def __init__(self, size: int, peers: list[int], torn: dict[int, Tensor]) -> None:
        self.size = size
        self.peers = peers
        self.torn = torn
        self.numbers: list[int] = []
        self.full, self.swa = {0: 0}, {0: 0}  # page 0 is padding
        self.rows: set[int] = set()  # full pages whose mapping is in the text
        self.mapped = 0  # how many of these map to anything

    def node(self, rank: int, node: Node, peers: list[int]) -> None:
        """Write what a node should have, and what its full pages map to."""
        full, swa, numbers = self.full, self.swa, self.numbers
        numbers += (-2, rank, node.slots)
        for page, peer in zip(node.pages, peers, strict=True):
            there = self.peers[page]
            numbers.append(full.setdefault(page, len(full)))
            numbers.append(swa.setdefault(peer, len(swa)))
            if page in self.torn:
                numbers.append(-9)
                numbers += _renamed(self.torn[page], swa, self.size)
            elif there != peer:
                numbers += (-12, swa.setdefault(there, len(swa)))
            if page not in self.rows:
                self.rows.add(page)
                self.mapped += there != 0

    def attribute(
        self, part: int, name: str, items: list[object], kind: Kind | None, buffers: dict[int, int]
    ) -> None:
        """Write what an attribute holds. ``buffers``: nodes' index buffers, by storage."""
        self.numbers += (-3, part, _code(name))
        nested = False  # a number of its own is none that pages have
        for item in items:
            if type(item) is bool:
                self.numbers.append(item)
            elif isinstance(item, Tensor):
                self.numbers.append(-4)
                self.slots(item, kind)
                for node, storage in buffers.items():
                    if storage == _storage(item):
                        self.numbers += (-5, node)
            elif isinstance(item, Length):
                self.numbers += (-11, item)
                nested = True
            elif isinstance(item, int) and nested:
                self.numbers.append(-4)
                self.slots(torch.tensor([item], device="cpu"), kind)
            else:
                self.numbers.append(item if type(item) is int else _code(repr(item)))

    def slots(self, values: Tensor, kind: Kind | None) -> None:
        """Write slots or pages; numbers of an unknown kind as all they may be."""
        full, swa, size = self.full, self.swa, self.size
        if kind == FULL_SLOT:
            self.numbers += _renamed(values, full, size)
        elif kind == SWA_SLOT:
            self.numbers += _renamed(values, swa, size)
        elif kind == FULL_PAGE:
            self.numbers += [full.setdefault(v, len(full)) for v in _numbers(values)]
        elif kind == SWA_PAGE:
            self.numbers += [swa.setdefault(v, len(swa)) for v in _numbers(values)]
        else:
            for v in _numbers(values):
                for names, page in ((full, v // size), (swa, v // size), (full, v), (swa, v)):
                    self.numbers.append(names.setdefault(page, len(names)))
                self.numbers.append(v % size)

    def rows_of_nobody(self) -> None:
        """Write what full pages map to that no node has, if any do."""
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


def queue_kinds(make: Make, page_size: int) -> Kinds:
    """Find out what the numbers in an allocator's queues are, by queueing numbers that differ.

    A queue in which two kinds were seen, or none, is left out: its numbers are then written as
    all they may be.
    """
    seen: dict[tuple[int, str], set[Kind]] = {}
    for method in ("free", "free_swa", "free_full", "free_segment", "free_swa_segment"):
        with suppress(*RAISED):  # the search will come across it, and report it
            for queue, kind in _queued_by(method, make(4, 3 * page_size + 5), page_size):
                seen.setdefault(queue, set()).add(kind)
    return {queue: kinds.pop() for queue, kinds in seen.items() if len(kinds) == 1}


def _queued_by(
    method: str, driver: Driver, page_size: int
) -> Iterator[tuple[tuple[int, str], Kind]]:
    """Free a node in a group, and yield the kinds of numbers in each queue then."""
    # from here on the numbers of SWA pages are out of reach of full slots
    driver.alloc_swa(3 * page_size * page_size)
    alloc = driver.alloc if page_size == 1 else driver.alloc_pages
    node, other = alloc(page_size), alloc(page_size)
    if node is None or other is None:
        return
    peers, others = driver.translate(node).clone(), driver.translate(other).clone()
    numbers = {
        FULL_SLOT: set(node.tolist()),
        SWA_SLOT: set(peers.tolist()),
        FULL_PAGE: {int(node[0]) // page_size},
        SWA_PAGE: {int(peers[0]) // page_size},
    }
    if method == "free_full":
        driver.free_swa(node)
    driver.group_begin()
    getattr(driver, method)(node)
    for _ in range(2):  # before and after a write to the mapping
        for part, attributes in enumerate(map(vars, driver.parts())):
            for name, value in attributes.items():
                for item in entries(value) if isinstance(value, list) else ():
                    if isinstance(item, Tensor) and item.numel():
                        queued = set(_numbers(item))
                        fits = (kind for kind, those in numbers.items() if queued <= those)
                        # at page size 1, slots and pages are the same
                        yield (part, name), next(fits, "")
        driver.point(node, others)


def _signature(
    entry: tuple[int, str, Node, list[int]],
    mapped: list[int],
    full: dict[int, int],
    swa: dict[int, int],
) -> list[int]:
    """Return what a node looks like without its name and its pages' numbers.

    ``mapped``: SWA pages by full page. ``full``, ``swa``: see ``Keys._places``.
    """
    rank, _, node, peers = entry
    look = [rank, node.slots]
    for page, peer in zip(node.pages, peers, strict=True):
        there = mapped[page]
        look += (peer != 0, full.get(page, 0), swa.get(peer, 0), there != 0, swa.get(there, 0))
    return look


def _renamed(slots: Tensor, names: dict[int, int], size: int) -> list[int]:
    """Return slots as numbers in the text: a page that is whole and in order as one number.

    That is a negative number, so that it is no slot's.
    """
    if size > 1:
        pages = span_of(slots.reshape(-1).to("cpu", torch.int64), size)
        if pages.whole:
            return [-10 - names.setdefault(page, len(names)) for page in pages.pages]
    numbers = _numbers(slots)
    if size > 1 and not any(numbers):
        return [-9]  # no slots, however many
    if size == 1:
        return [names.setdefault(v, len(names)) for v in numbers]
    return [names.setdefault(v // size, len(names)) * size + v % size for v in numbers]


@cache
def _code(text: str) -> int:
    return crc32(text.encode())


def _numbers(tensor: Tensor) -> list[int]:
    numbers: list[int] = (tensor if tensor.dim() == 1 else tensor.reshape(-1)).tolist()
    return numbers


def _storage(tensor: Tensor) -> int:
    """Return what tensors have in common that share memory."""
    return tensor.untyped_storage().data_ptr()


def _plain(value: object) -> list[object]:
    """Return what an attribute holds, tensors as lists."""
    return [_numbers(item) if isinstance(item, Tensor) else item for item in entries(value)]
