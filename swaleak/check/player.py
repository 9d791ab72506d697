"""What each operation of a script calls on an allocator, and enters in the ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from swaleak.check.audit import Audited
from swaleak.check.ledger import Ledger, Node
from swaleak.errors import ScriptError
from swaleak.script import ops
from swaleak.script.ops import Op, describe


class Allocator(Audited, Protocol):
    """What a script drives. Slots are int64[n] tensors on the allocator's device."""

    page_size: int

    def alloc(self, pages: int) -> Tensor | None:
        """Allocate whole pages from both pools; full slots, or None if a pool is too small."""

    def alloc_tail(self, pages: int, tail: int) -> Tensor | None:
        """Allocate full pages, with peers for the last ``tail`` of them only."""

    def extend(self, prefix: int, last: Tensor | None, tokens: int) -> Tensor | None:
        """Grow a request of ``prefix`` tokens, the last of them in slot ``last``; new slots."""

    def decode(self, prefix: int, last: Tensor) -> Tensor | None:
        """Grow it by one token."""

    def alloc_swa(self, pages: int) -> Tensor | None:
        """Allocate SWA pages only; SWA slots."""

    def free(self, full: Tensor) -> None:
        """Free full slots and their peers."""

    def free_swa(self, full: Tensor) -> None:
        """Free the peers of full slots."""

    def free_full(self, full: Tensor) -> None:
        """Free full slots that have no peers."""

    def free_segment(self, full: Tensor) -> None:
        """As ``free``, through the call for the slots of one request."""

    def free_swa_segment(self, full: Tensor) -> None:
        """As ``free_swa``, through the call for the slots of one request."""

    def free_full_pool(self, full: Tensor) -> None:
        """Free full slots straight in the full pool, past the hybrid allocator."""

    def translate(self, full: Tensor) -> Tensor:
        """Return the SWA slots of full slots, 0 for none."""

    def point(self, full: Tensor, swa: Tensor) -> None:
        """Point full slots at SWA slots."""

    def clear_mapping(self, full: Tensor) -> None:
        """Clear mapping entries by writing the tensor directly, as SGLang's caches do."""

    def group_begin(self) -> None:
        """Open a free group."""

    def group_end(self) -> None:
        """End it."""

    def parts(self) -> tuple[object, ...]:
        """Return the objects whose attributes are the allocator's state."""

    @property
    def substituted(self) -> dict[str, str]:
        """Which calls were made in place of ones that this allocator lacks, so far."""


class Starved(Exception):
    """A pool ran dry although, by the ledger, it should not have."""


class Withheld(RuntimeError):
    """An allocator has handed out nothing although it has room, or not what was asked for."""


class Player:
    """Carries out operations on an allocator and enters them in a ledger.

    Holds, per node, the tensor of its full slots (int64[n]). ``overwritten``: nodes for which the
    caller's buffer has to be a tensor of its own, because the script overwrites it later.
    """

    def __init__(self, allocator: Allocator, overwritten: Iterable[str] = ()) -> None:
        self.allocator = allocator
        self.ledger = Ledger(allocator.page_size)
        self.slots: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.overwritten = frozenset(overwritten)
        state = allocator.state()
        self.full_pages, self.swa_pages = state.full_pages, state.swa_pages

    def play(self, op: Op) -> None:
        """Check, call, enter. Raises ``ScriptError``, ``Starved``, or what the allocator raises."""
        self.ledger.check(op)
        fresh = _CALLS[type(op)](self, op)
        gone = [getattr(op, "node", ""), getattr(op, "source", ""), *self.ledger.freed]
        self.ledger.apply(op, fresh)
        for name in gone:
            if not self.ledger.knows(name):
                self.slots.pop(name, None)
                self.buffers.pop(name, None)

    def leftovers(self) -> Iterator[Op]:
        """Yield what frees every node that is left, group and all."""
        if self.ledger.in_group:
            yield ops.Group("end")
        for name in list(self.ledger.ghosts):
            yield ops.FreeSwa(name)
        for name, node in list(self.ledger.nodes.items()):
            yield ops.FreeFull(name) if node.tombstone else ops.Free(name)

    def _room(self, op: Op, full: int, swa: int) -> None:
        """Raise ``ScriptError`` if, by the ledger, the pools are too small for ``op``."""
        for pool, has, owned, asked in (
            ("full", self.full_pages, self.ledger.full_pages(), full),
            ("SWA", self.swa_pages, self.ledger.swa_pages(), swa),
        ):
            if owned + asked > has:
                raise ScriptError(
                    f"{describe(op)}: the {pool} pool is too small, "
                    f"{asked} pages asked for, {has - owned} of {has} free"
                )

    def _alloc(self, op: ops.Alloc) -> None:
        self._room(op, op.pages, op.pages)
        self._enter(op, self.allocator.alloc(op.pages), op.pages)

    def _alloc_tail(self, op: ops.AllocTail) -> None:
        self._room(op, op.pages, op.tail)
        self._enter(op, self.allocator.alloc_tail(op.pages, op.tail), op.tail)

    def _enter(self, op: ops.Alloc | ops.AllocTail, full: Tensor | None, swa_pages: int) -> None:
        size = self.allocator.page_size
        full = self._given(op, full, op.pages * size, op.pages, swa_pages)
        self.slots[op.node] = full
        first = full[::size]
        self.ledger.allocated(op.node, Node(self._pages(first), self._peers(first), full.numel()))

    def _given(self, op: Op, slots: Tensor | None, count: int, full: int, swa: int) -> Tensor:
        """Return the slots that were handed out for ``op``, which are to be ``count``.

        ``full``, ``swa``: pages with which there is certainly room for it. Raises ``Starved`` if
        there was nothing to hand out, ``Withheld`` if there was.
        """
        if slots is None:
            state = self.allocator.state()
            has_full, has_swa = len(state.full_free), len(state.swa_free)
            if has_full < full or has_swa < swa:
                raise Starved
            pages = f"{has_full} full and {has_swa} SWA pages free"
            raise Withheld(f"{describe(op)} was given nothing, with {pages}")
        if slots.numel() != count:
            raise Withheld(f"{describe(op)} was given {slots.numel()} slots, not {count}")
        return slots

    def _extend(self, op: ops.Extend | ops.Decode) -> None:
        size = self.ledger.page_size
        node = self.ledger.nodes.get(op.node) or Node([], [], 0)
        tokens = op.tokens if isinstance(op, ops.Extend) else 1
        pages = -(-(node.slots + tokens) // size) - len(node.full)
        self._room(op, pages, pages)
        before = self.slots.get(op.node) if node.slots else None
        last = None if before is None else before[-1:]
        if isinstance(op, ops.Decode):
            assert last is not None
            more = self.allocator.decode(node.slots, last)
        else:
            more = self.allocator.extend(node.slots, last, tokens)
        # SGLang's estimate of what it takes may be a page too high
        more = self._given(op, more, tokens, pages + 1, pages + 1)
        slots = self.slots[op.node] = more if before is None else torch.cat((before, more))
        first = slots[len(node.full) * size :: size]
        full, swa = node.full + self._pages(first), node.swa + self._peers(first)
        self.ledger.allocated(op.node, Node(full, swa, node.slots + tokens))

    def _pages(self, slots: Tensor) -> list[int]:
        pages: list[int] = (slots // self.allocator.page_size).tolist()
        return pages

    def _peers(self, first: Tensor) -> list[int | None]:
        swa = self.allocator.translate(first)
        pages = self._pages(swa)
        return [page if slot else None for page, slot in zip(pages, swa.tolist(), strict=True)]

    def _free(self, op: ops.FreeOp) -> None:
        call: Callable[[Tensor], None] = getattr(self.allocator, op.key)
        slots = self.slots[op.node]
        part = slots if op.part is None else slots[op.part.slots(len(slots), self.ledger.page_size)]
        if op.node in self.overwritten:
            self.buffers[op.node] = part = part.clone()
        call(part)
        if op.part is not None and not isinstance(op, ops.FreeSwa):
            self._keep_rest(op)

    def _keep_rest(self, op: ops.FreeOp) -> None:
        size, slots = self.ledger.page_size, self.slots[op.node]
        gone = self.ledger.pages_of(self.ledger.nodes[op.node], op.part)
        rest = torch.cat((slots[: gone.start * size], slots[gone.stop * size :]))
        if rest.numel():  # a node that is gone altogether may still be adopted in this group
            self.slots[op.node] = rest

    def _recover(self, op: ops.Recover) -> None:
        source = self.slots[op.source]
        self.allocator.point(self.slots[op.node], self.allocator.translate(source))
        self.allocator.clear_mapping(source)
        self.allocator.free_full_pool(source)

    def _adopt(self, op: ops.Adopt) -> None:
        source = self.slots[op.source]
        self.allocator.point(self.slots[op.node], self.allocator.translate(source))
        self.allocator.clear_mapping(source)

    def _replace(self, op: ops.Replace) -> None:
        tombstone = self.ledger.nodes[op.node].tombstone
        (self.allocator.free_full if tombstone else self.allocator.free)(self.slots[op.node])
        self.slots[op.node] = self.slots.pop(op.source)

    def _load_back(self, op: ops.LoadBack) -> list[int | None]:
        node = self.ledger.nodes[op.node]
        self._room(op, 0, len(node.full))
        pages = len(node.full)
        handed_out = self.allocator.alloc_swa(pages)
        swa = self._given(op, handed_out, pages * self.ledger.page_size, 0, pages)
        slots = self.slots[op.node]
        self.allocator.point(slots, swa[: len(slots)])
        return list(self._pages(swa[:: self.ledger.page_size]))

    def _overwrite(self, op: ops.Overwrite) -> None:
        buffer, source = self.buffers.get(op.node), self.slots[op.source]
        if buffer is None:
            raise ScriptError(f"overwrite {op.node}: it was not passed to any free yet")
        if buffer.shape != source.shape:
            raise ScriptError(f"overwrite: lengths differ, {len(buffer)} and {len(source)} slots")
        buffer.copy_(source)

    def _group(self, op: ops.Group) -> None:
        (self.allocator.group_begin if op.edge == "begin" else self.allocator.group_end)()

    def _expect(self, op: ops.Expect) -> None:
        """Nothing to call: the judge looks."""


_CALLS: dict[type[Any], Callable[[Player, Any], list[int | None] | None]] = {
    ops.Alloc: Player._alloc,
    ops.AllocTail: Player._alloc_tail,
    ops.Extend: Player._extend,
    ops.Decode: Player._extend,
    **dict.fromkeys(ops.FREES, Player._free),
    ops.Recover: Player._recover,
    ops.Adopt: Player._adopt,
    ops.Replace: Player._replace,
    ops.LoadBack: Player._load_back,
    ops.Overwrite: Player._overwrite,
    ops.Group: Player._group,
    ops.Expect: Player._expect,
}
