"""An allocator that can be put back to an earlier point, and told apart up to renaming.

Going back costs a few microseconds where playing the script again costs hundreds. What is put
back is what ``Allocator.parts`` shows: attributes are put back by reference, lists and other
containers as fresh ones, and a tensor's content only if its version counter says that somebody
wrote it. Tensors keep their identity, so that who shares storage with whom stays true. State in
objects of other kinds is not seen here; ``Explorer`` finds that out by playing from the start.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from torch import Tensor

from swaleak.allocator.mapping import plain
from swaleak.check.ledger import Node
from swaleak.check.player import Allocator, Player
from swaleak.errors import RAISED, TargetError
from swaleak.script.ops import Op

Kind = str  # what the numbers in a queue are: one of the four below
FULL_SLOT, SWA_SLOT, FULL_PAGE, SWA_PAGE = "full slots", "SWA slots", "full pages", "SWA pages"
Kinds = dict[tuple[int, str], Kind]


class _Everyone(frozenset[str]):
    """The set that every name is in: each node's buffer is a tensor of its own."""

    def __contains__(self, name: object) -> bool:
        """Return True."""
        return True


@dataclass(slots=True)
class _Written:
    """A tensor (int64[n]), its content when it was saved, and its version counter by then."""

    tensor: Tensor
    content: Tensor
    version: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A point to go back to. ``kept``: see ``Stage.kept``."""

    parts: tuple[tuple[dict[str, Any], dict[str, Any], tuple[tuple[str, Any], ...]], ...]
    tensors: tuple[_Written, ...]
    nodes: tuple[tuple[str, Node], ...]
    freed: tuple[tuple[str, Node], ...]
    ghosts: tuple[tuple[str, Node], ...]
    in_group: bool
    slots: dict[str, Tensor]
    buffers: dict[str, Tensor]
    kept: dict[str, int]


class Stage:
    """A player and its allocator.

    ``kinds``: what the numbers in the allocator's queues are, see ``queue_kinds``. ``latent``:
    whether nodes freed in a group, and callers' index buffers, may still be named: in the
    production contract neither is, and states that differ in them only are the same.
    """

    def __init__(self, allocator: Allocator, kinds: Kinds, *, latent: bool) -> None:
        self.allocator = allocator
        self.player = Player(allocator)
        self._latent = latent
        if latent:
            self.player.overwritten = _Everyone()
        self.kinds = kinds
        self._attributes = [
            (vars(part), i, name)
            for i, part in enumerate(allocator.parts())
            for name, value in vars(part).items()
            if name not in _ENCODED
            and (value is None or isinstance(value, (bool, int, *_CONTAINERS)))
        ]
        state = allocator.state()
        mapping = _storage(state.mapping)  # other views of it are written out with it
        self._constants = [
            (vars(part), i, name, value.tolist())
            for i, part in enumerate(allocator.parts())
            for name, value in vars(part).items()
            if name not in _ENCODED and isinstance(value, Tensor) and _storage(value) != mapping
        ]
        self._names = [frozenset(vars(part)) for part in allocator.parts()]
        self._full_pages = frozenset(range(1, state.full_pages + 1))
        self._swa_pages = frozenset(range(1, state.swa_pages + 1))
        size = allocator.page_size
        self._whole_rows = {p: [*range(p * size, p * size + size)] for p in self._swa_pages}
        self._whole_rows[0] = [0] * size

    def play(self, op: Op) -> None:
        """Play one operation; raises what ``Player.play`` raises."""
        self.player.play(op)

    def save(self) -> Saved:
        """Return a point to go back to. Its cost is paid here, so that going back is cheap.

        Raises ``TargetError`` for an allocator that has grown an attribute since the start.
        """
        parts = []
        tensors: dict[int, Tensor] = {}
        for part, names in zip(self.allocator.parts(), self._names, strict=True):
            live = vars(part)
            for name in live.keys() - names:
                raise TargetError(
                    f"explore cannot follow {type(part).__name__}.{name}, which is not there from "
                    f"the start"
                )
            held = tuple((n, copy(v)) for n, v in live.items() if isinstance(v, _CONTAINERS))
            parts.append((live, dict(live), held))
            for value in live.values():
                for _, item in _entries(value):
                    if item is not None:
                        tensors[id(item)] = item
        player, ledger = self.player, self.player.ledger
        for mine in (player.slots, player.buffers):
            tensors.update((id(tensor), tensor) for tensor in mine.values())
        plains = [plain(tensor) for tensor in tensors.values()]
        return Saved(
            tuple(parts),
            tuple(_Written(tensor, tensor.clone(), tensor._version) for tensor in plains),
            _copies(ledger.nodes.items()),
            _copies(ledger.freed.items()),
            _copies(ledger.ghosts.items()),
            ledger.in_group,
            dict(player.slots),
            dict(player.buffers),
            self.kept(),
        )

    def restore(self, saved: Saved) -> None:
        """Go back."""
        for live, attributes, held in saved.parts:
            if len(live) != len(attributes):
                for name in live.keys() - attributes.keys():
                    del live[name]
            live.update(attributes)
            for name, items in held:
                live[name] = items[:] if type(items) is list else copy(items)
        written = [w for w in saved.tensors if w.tensor._version != w.version]
        for w in written:
            w.tensor.copy_(w.content)
        for w in written:  # views share a counter: read it when all have been written
            w.version = w.tensor._version
        player, ledger = self.player, self.player.ledger
        ledger.nodes = dict(_copies(saved.nodes))
        ledger.freed = dict(_copies(saved.freed)) if saved.freed else {}
        ledger.ghosts = dict(_copies(saved.ghosts)) if saved.ghosts else {}
        ledger.in_group = saved.in_group
        player.slots = dict(saved.slots)
        player.buffers = dict(saved.buffers)

    def kept(self) -> dict[str, int]:
        """Return the nodes whose buffer shares storage with what the allocator holds: lengths."""
        buffers = self.player.buffers
        if not buffers:
            return {}
        entries = (entry for _, _, entries in self._queues() for entry in entries)
        held = {_storage(item) for _, item in entries if item is not None}
        return {name: len(b) for name, b in buffers.items() if _storage(b) in held}

    def _queues(self) -> Iterator[tuple[int, str, list[_Entry]]]:
        """Yield what is queued: which part, which attribute, its entries."""
        for live, i, name in self._attributes:
            value = live[name]
            kind = type(value)
            if kind is bool or kind is int or value is None:
                continue
            if kind not in _CONTAINERS or value:
                yield i, name, _entries(value)
        for live, i, name, start in self._constants:
            if live[name].tolist() != start:
                yield i, name, _entries(live[name])

    def key(self) -> bytes:
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
        player, ledger = self.player, self.player.ledger
        size = self.allocator.page_size
        state = self.allocator.state()
        mapping: list[int] = state.mapping.tolist()
        no_location = mapping.pop()
        peers, torn = (mapping, {}) if size == 1 else self._rows(mapping)
        queues = list(self._queues())
        text: list[int] = [ledger.in_group, no_location]
        for live, _, name in self._attributes:
            value = live[name]
            text.append(-1 if value is None else value if isinstance(value, int) else -8)
        full, swa = {0: 0}, {0: 0}  # page number -> number in the text; page 0 is padding
        rows: set[int] = set()  # full pages whose mapping is in the text
        mapped = 0
        named = [
            (rank, name, node)
            for rank, nodes in enumerate(
                (ledger.nodes, ledger.freed if self._latent else {}, ledger.ghosts)
            )
            for name, node in nodes.items()
        ]
        if len(named) > 1:
            places = self._places(queues, size)
            named.sort(key=lambda entry: _signature(entry, peers, places))
        order = [name for _, name, _ in named]
        for rank, _, node in named:
            text += (-2, rank, node.slots)
            for page, peer in zip(node.full, node.swa, strict=True):
                text.append(full.setdefault(page, len(full)))
                text.append(-1 if peer is None else swa.setdefault(peer, len(swa)))
                there = peers[page]
                if page in torn:
                    text.append(-9)
                    text += _renamed_slots(torn[page], swa, size)
                else:
                    text.append(swa.setdefault(there, len(swa)))
                if page not in rows:
                    rows.add(page)
                    mapped += there != 0
        for i, name, entries in queues:
            text += (-3, i, len(name))
            kind = self.kinds.get((i, name))
            for values, item in entries:
                text.append(-4)
                text += _renamed(values, kind, full, swa, size)
                for other, buffer in player.buffers.items():
                    if item is not None and _storage(buffer) == _storage(item):
                        text += (-5, order.index(other))
        if torn or len(peers) - peers.count(0) != mapped:
            for page, there in enumerate(peers):  # of pages that nobody holds
                if page in rows:
                    continue
                if page in torn:
                    text += (-6, full.get(page, ~page), -9)
                    text += _renamed_slots(torn[page], swa, size)
                elif there:
                    text += (-6, full.get(page, ~page), swa.setdefault(there, len(swa)))
        for pages, names, all_ in (
            (state.full_free.tolist(), full, self._full_pages),
            (state.swa_free.tolist(), swa, self._swa_pages),
        ):
            text += (-7, len(pages))
            free = set(pages)
            if len(free) != len(pages) or not (free <= all_ and names.keys().isdisjoint(free)):
                text += [names.get(page, 0 if page in all_ else ~page) for page in pages]
        return blake2b(array("q", text).tobytes(), digest_size=16).digest()

    def _rows(self, mapping: list[int]) -> tuple[list[int], dict[int, list[int]]]:
        """Return which SWA page each full page maps to, 0 for none, and the rows that are torn.

        Torn is a row that does not name one SWA page whole and in order; nearly always none is.
        """
        size = self.allocator.page_size
        peers = [slot // size for slot in mapping[::size]]
        torn = {}
        for page, peer in enumerate(peers):
            row = mapping[page * size : page * size + size]
            if row != self._whole_rows.get(peer):
                torn[page] = row
        return peers, torn

    def _places(self, queues: list[Any], size: int) -> tuple[dict[int, int], dict[int, int]]:
        """Return where full and SWA pages are first queued; of slots, one a page is looked at."""
        full: dict[int, int] = {}
        swa: dict[int, int] = {}
        place = 0
        for i, name, entries in queues:
            kind = self.kinds.get((i, name))
            for values, _ in entries:
                place += 1
                if kind in (FULL_SLOT, FULL_PAGE):
                    for page in _pages(values, kind == FULL_SLOT, size):
                        full.setdefault(page, place)
                elif kind in (SWA_SLOT, SWA_PAGE):
                    for page in _pages(values, kind == SWA_SLOT, size):
                        swa.setdefault(page, place)
        return full, swa


_CONTAINERS = (list, tuple, dict, set, deque)
_Entry = tuple[list[int], Tensor | None]  # numbers, and the tensor that they are in, if any
# written out as pages, not as attributes
_ENCODED = frozenset({"full_to_swa_index_mapping", "free_pages", "release_pages"})


def _entries(value: Any) -> list[_Entry]:
    """Return the numbers in an attribute, entry by entry, however it holds them."""
    if type(value) is list:
        return [entry for item in value for entry in _entries(item)]
    if isinstance(value, Tensor):
        return [(value.tolist() if value.dim() == 1 else value.reshape(-1).tolist(), value)]
    if isinstance(value, int):
        return [([value], None)]
    if isinstance(value, dict):
        value = [item for pair in value.items() for item in pair]
    if isinstance(value, _CONTAINERS):
        return [([len(value)], None), *(entry for item in value for entry in _entries(item))]
    return []


def _copies(nodes: Any) -> tuple[tuple[str, Node], ...]:
    return tuple([(name, Node(node.full[:], node.swa[:], node.slots)) for name, node in nodes])


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _signature(
    entry: tuple[int, str, Node],
    peers: list[int],
    places: tuple[dict[int, int], dict[int, int]],
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


def _renamed(
    values: list[int], kind: Kind | None, full: dict[int, int], swa: dict[int, int], size: int
) -> list[int]:
    """Return queued numbers as numbers in the text; of an unknown kind, as all they may be."""
    if kind == FULL_SLOT:
        return _renamed_slots(values, full, size)
    if kind == SWA_SLOT:
        return _renamed_slots(values, swa, size)
    if kind == FULL_PAGE:
        return [full.setdefault(v, len(full)) for v in values]
    if kind == SWA_PAGE:
        return [swa.setdefault(v, len(swa)) for v in values]
    return [
        number
        for v in values
        for number in (
            full.setdefault(v // size, len(full)),
            swa.setdefault(v // size, len(swa)),
            full.setdefault(v, len(full)),
            swa.setdefault(v, len(swa)),
            v % size,
        )
    ]


def _renamed_slots(values: list[int], names: dict[int, int], size: int) -> list[int]:
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


def queue_kinds(make: Callable[[int, int], Allocator], page_size: int) -> Kinds:
    """Find out what the numbers in an allocator's queues are, by queueing numbers that differ.

    ``make(full_pages, swa_pages)`` returns a fresh allocator. A queue in which two kinds were
    seen, or none, is left out: its numbers are then told apart by all they may be.
    """
    seen: dict[tuple[int, str], set[Kind]] = {}
    for attempt in _ATTEMPTS:
        allocator = make(4, 3 * page_size + 5)
        allocator.alloc_swa(3 * page_size)  # from here on SWA numbers are out of reach of full ones
        node, other = allocator.alloc(1), allocator.alloc(1)
        assert node is not None and other is not None
        peers, others = allocator.translate(node).clone(), allocator.translate(other).clone()
        ranges = {
            FULL_SLOT: set(node.tolist()),
            SWA_SLOT: set(peers.tolist()),
            FULL_PAGE: {int(node[0]) // page_size},
            SWA_PAGE: {int(peers[0]) // page_size},
        }
        try:
            if attempt == "free_full":
                allocator.free_swa(node)
            allocator.group_begin()
            getattr(allocator, attempt)(node)
        except RAISED:  # the search will come across it, and tell
            continue
        for _ in range(2):  # before and after a write to the mapping
            for i, part in enumerate(allocator.parts()):
                for name, value in vars(part).items():
                    for numbers, item in _entries(value) if isinstance(value, list) else ():
                        if item is not None and numbers:
                            found = _kind_of(set(numbers), ranges)
                            seen.setdefault((i, name), set()).add(found)
            allocator.point(node, others)
    return {queue: kinds.pop() for queue, kinds in seen.items() if len(kinds) == 1}


_ATTEMPTS = ("free", "free_swa", "free_full", "free_segment", "free_swa_segment")


def _kind_of(numbers: set[int], ranges: dict[Kind, set[int]]) -> Kind:
    """Return the kind whose numbers these are; at page size 1, slots and pages are the same."""
    return next((kind for kind, those in ranges.items() if numbers <= those), "")
