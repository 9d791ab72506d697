"""What an allocator keeps beside its pools: queues, and of what kind the numbers in them are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from torch import Tensor

from swaleak.check.player import Allocator
from swaleak.errors import RAISED

Kind = str  # what the numbers in a queue are: one of the four below
FULL_SLOT, SWA_SLOT, FULL_PAGE, SWA_PAGE = "full slots", "SWA slots", "full pages", "SWA pages"
Kinds = dict[tuple[int, str], Kind]
CONTAINERS = (list, tuple, dict, set, deque)
Entry = tuple[list[int], Tensor | None]  # numbers, and the tensor that they are in, if any
# looked at as pages, not as attributes
ENCODED = frozenset({"full_to_swa_index_mapping", "free_pages", "release_pages"})


class Queues:
    """The attributes of an allocator's parts that are neither pools nor mapping."""

    def __init__(self, allocator: Allocator) -> None:
        parts = [(vars(part), i) for i, part in enumerate(allocator.parts())]
        self._attributes = [
            (live, i, name)
            for live, i in parts
            for name, value in live.items()
            if name not in ENCODED
            and (value is None or isinstance(value, (bool, int, *CONTAINERS)))
        ]
        mapping = storage(allocator.state().mapping)  # other views of it are not attributes either
        self._constants = [
            (live, i, name, value.tolist())
            for live, i in parts
            for name, value in live.items()
            if name not in ENCODED and isinstance(value, Tensor) and storage(value) != mapping
        ]

    def flags(self) -> Iterator[int]:
        """Yield a number for each attribute: its own, or one that says what else it is."""
        for live, _, name in self._attributes:
            value = live[name]
            yield -1 if value is None else value if isinstance(value, int) else -8

    def held(self) -> Iterator[tuple[int, str, list[Entry]]]:
        """Yield what is queued: which part, which attribute, its entries."""
        for live, i, name in self._attributes:
            value = live[name]
            kind = type(value)
            if kind is bool or kind is int or value is None:
                continue
            if kind not in CONTAINERS or value:
                yield i, name, entries(value)
        for live, i, name, start in self._constants:
            if live[name].tolist() != start:
                yield i, name, entries(live[name])


def entries(value: Any) -> list[Entry]:
    """Return the numbers in an attribute, entry by entry, however it holds them."""
    if type(value) is list:
        return [entry for item in value for entry in entries(item)]
    if isinstance(value, Tensor):
        return [(value.tolist() if value.dim() == 1 else value.reshape(-1).tolist(), value)]
    if isinstance(value, int):
        return [([value], None)]
    if isinstance(value, dict):
        value = [item for pair in value.items() for item in pair]
    if isinstance(value, CONTAINERS):
        return [([len(value)], None), *(entry for item in value for entry in entries(item))]
    return []


def storage(tensor: Tensor) -> int:
    """Return what tensors have in common that share memory."""
    return tensor.untyped_storage().data_ptr()


def queue_kinds(make: Callable[[int, int], Allocator], page_size: int) -> Kinds:
    """Find out what the numbers in an allocator's queues are, by queueing numbers that differ.

    ``make(full_pages, swa_pages)`` returns a fresh allocator. A queue in which two kinds were
    seen, or none, is left out: its numbers are then told apart by all they may be.
    """
    seen: dict[tuple[int, str], set[Kind]] = {}
    for attempt in _ATTEMPTS:
        with suppress(*RAISED):  # the search will come across it, and tell
            _queue(make(4, 3 * page_size + 5), page_size, attempt, seen)
    return {queue: kinds.pop() for queue, kinds in seen.items() if len(kinds) == 1}


def _queue(
    allocator: Allocator, page_size: int, attempt: str, seen: dict[tuple[int, str], set[Kind]]
) -> None:
    """Free a node in a group, and enter the kinds of what is queued then."""
    allocator.alloc_swa(3 * page_size)  # from here on SWA numbers are out of reach of full ones
    node, other = allocator.alloc(1), allocator.alloc(1)
    if node is None or other is None:
        return
    peers, others = allocator.translate(node).clone(), allocator.translate(other).clone()
    ranges = {
        FULL_SLOT: set(node.tolist()),
        SWA_SLOT: set(peers.tolist()),
        FULL_PAGE: {int(node[0]) // page_size},
        SWA_PAGE: {int(peers[0]) // page_size},
    }
    if attempt == "free_full":
        allocator.free_swa(node)
    allocator.group_begin()
    getattr(allocator, attempt)(node)
    for _ in range(2):  # before and after a write to the mapping
        for i, part in enumerate(allocator.parts()):
            for name, value in vars(part).items():
                for numbers, item in entries(value) if isinstance(value, list) else ():
                    if item is not None and numbers:
                        found = _kind_of(set(numbers), ranges)
                        seen.setdefault((i, name), set()).add(found)
        allocator.point(node, others)


_ATTEMPTS = ("free", "free_swa", "free_full", "free_segment", "free_swa_segment")


def _kind_of(numbers: set[int], ranges: dict[Kind, set[int]]) -> Kind:
    """Return the kind whose numbers these are; at page size 1, slots and pages are the same."""
    return next((kind for kind, those in ranges.items() if numbers <= those), "")
