"""A ledger of slots: what each full slot should map to, and who can still name which slots.

Most calls are about a few slots. Those are entered one by one, which is faster than a dozen
kernels; many, by kernels. Both see the same memory: every column is an array with a tensor on it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import repeat

import torch
from torch import Tensor

from swaleak.errors import ScriptError
from swaleak.script.trace import Ranges

FEW = 64  # slots that are entered one by one
SHORT_PAGE = 16  # slots of a page up to which that pays
SWEEP = 1024  # allocations after which it is worth asking who is gone


class Column:
    """A number a slot, 0 at first. ``cells`` and ``tensor`` are the same memory."""

    def __init__(self, slots: int, kind: torch.dtype = torch.int64) -> None:
        self.cells = array("q" if kind == torch.int64 else "b", bytes(kind.itemsize * slots))
        self.tensor = torch.frombuffer(self.cells, dtype=kind)


class Allocations:
    """Allocations of one pool, found by the numbers of their slots. All tensors on the host."""

    def __init__(self) -> None:
        self.firsts: list[int] = []  # ascending
        self.slots: list[Tensor] = []
        self.beside: list[Tensor | None] = []
        self.last = 0
        self.fresh = self.fresh_slots = self.stayed = 0
        self.pinned: set[int] = set()

    def add(self, first: int, slots: Tensor, beside: Tensor | None = None) -> None:
        """Enter int64[n] slots, numbered from ``first``. ``beside``: the full slots they serve."""
        if first <= self.last:
            raise ScriptError(f"slot number {first} was handed out before")
        length = slots.numel()
        self.last = first + length - 1
        if length:
            self.firsts.append(first)
            self.slots.append(slots)
            self.beside.append(beside)
            self.fresh += 1
            self.fresh_slots += length

    def place(self, number: int) -> tuple[int, int]:
        """Return which allocation has the slot with this number, and where in it."""
        index = bisect_right(self.firsts, number) - 1
        if index < 0 or number - self.firsts[index] >= self.slots[index].numel():
            raise _nobody(number)
        return index, number - self.firsts[index]

    def due(self, slots: int) -> bool:
        """Whether so much came since the last ``keep`` that a look at ``slots`` slots pays."""
        return self.fresh >= max(SWEEP, self.stayed) or self.fresh_slots >= max(SWEEP, slots)

    def keep(self, numbers: Tensor) -> None:
        """Forget allocations that have none of these numbers (int64[n]) and none that is pinned."""
        pinned = torch.tensor(sorted(self.pinned), dtype=torch.int64)
        at = torch.searchsorted(
            torch.tensor(self.firsts, dtype=torch.int64), torch.cat((numbers, pinned)), right=True
        )
        stay = [index - 1 for index in torch.unique(at).tolist() if index]
        self.firsts = [self.firsts[index] for index in stay]
        self.slots = [self.slots[index] for index in stay]
        self.beside = [self.beside[index] for index in stay]
        self.fresh, self.fresh_slots, self.stayed = 0, 0, len(stay)


class SlotLedger:
    """What each full slot should map to, who owns it, and the numbers of both sides.

    ``want``: its SWA slot, 0 for none; ``want_number``: that one's number. ``number``: its own
    number, as it was last handed out. ``owned``: 1 while somebody has it. ``pointed``: by SWA
    page, how many full slots want one of its slots (page 0 stands for none and is no count).

    An allocation is alive while one of its slots is: a full slot while it is owned or wants a
    peer, an SWA slot while it is wanted or was taken for later (``later``: first number -> slots).
    """

    def __init__(self, slots: int, swa_pages: int, page_size: int) -> None:
        self.size = page_size
        power_of_two = page_size & (page_size - 1) == 0
        self.shift = page_size.bit_length() - 1 if power_of_two else None
        self.few = FEW if page_size <= SHORT_PAGE else 0
        self.want = Column(slots)
        self.want_number = Column(slots)
        self.number = Column(slots)
        self.owned = Column(slots, torch.int8)
        self.pointed = Column(swa_pages + 1)
        self.full = Allocations()
        self.swa = Allocations()
        self.later: dict[int, int] = {}
        self.most = max(slots, (swa_pages + 1) * page_size)  # slots that a call can be about
        self.offsets = torch.arange(page_size)
        self.ones = torch.ones(1, dtype=torch.int64)

    def full_slots(self, ranges: Ranges) -> Tensor:
        """Return the full slots, int64[n], that ranges of numbers name, in a tensor of its own."""
        return self._find(self.full, ranges)

    def swa_slots(self, ranges: Ranges) -> Tensor:
        """Return the SWA slots, int64[n], that ranges of numbers name, in a tensor of its own."""
        return self._find(self.swa, ranges)

    def took(self, full: Tensor, first: int, peers: Tensor | None, swa_first: int) -> None:
        """Full slots (int64[n]) were handed out, numbered from ``first``, perhaps with peers."""
        self.full.add(first, full)
        if peers is not None:
            self.swa.add(swa_first, peers, full)
        if full.numel() <= self.few:
            self._took_few(full, first, peers, swa_first)
        else:
            self._took_many(full, first, peers, swa_first)
        if self.full.due(len(self.want.cells)) or self.swa.due(len(self.want.cells)):
            self._sweep()

    def _took_few(self, full: Tensor, first: int, peers: Tensor | None, swa_first: int) -> None:
        number, owned, size = self.number.cells, self.owned.cells, self.size
        want, want_number, pointed = self.want.cells, self.want_number.cells, self.pointed.cells
        both = zip(full.tolist(), repeat(0) if peers is None else peers.tolist(), strict=False)
        for slot, peer in both:
            if want[slot]:
                self._forget_one(slot)
            if owned[slot]:  # it was somebody's: that one can still name it
                self.full.pinned.add(number[slot])
            number[slot] = first
            owned[slot] = 1
            if peer:
                want[slot] = peer
                want_number[slot] = swa_first
                pointed[peer // size] += 1
            first += 1
            swa_first += 1

    def _took_many(self, full: Tensor, first: int, peers: Tensor | None, swa_first: int) -> None:
        if self.wants(full):
            self.forget(full)
        number = self.number.tensor
        taken = self.owned.tensor[full]
        if bool(taken.any()):
            self.full.pinned.update(number[full[taken > 0]].tolist())
        numbers = torch.arange(first, first + full.numel())
        number[full] = numbers
        self.owned.tensor.index_fill_(0, full, 1)
        if peers is not None:
            self._aim(full, peers, [[swa_first, peers.numel()]])
            if not torch.equal(number[full], numbers):  # a slot came twice
                self._recount()

    def took_swa(self, swa: Tensor, first: int) -> None:
        """SWA slots (int64[n]) were handed out that nothing maps to yet."""
        self.swa.add(first, swa)
        self.later[first] = swa.numel()

    def point(self, full: Tensor, swa: Tensor, ranges: Ranges) -> None:
        """Full slots should map to SWA slots from now on, int64[n] each; ``ranges`` name those."""
        self.forget(full)
        self._aim(full, swa, ranges)
        if full.numel() > self.few and torch.unique(full).numel() < full.numel():
            self._recount()
        for first, length in ranges:
            if length < self._not_later(first):
                self.swa.pinned.add(first)  # the rest of it was never mapped

    def gave_back_swa(self, ranges: Ranges) -> None:
        """SWA slots went back into their pool, past the allocator."""
        for first, _ in ranges:
            self._not_later(first)

    def release(self, full: Tensor, *, owner: bool, peers: bool) -> None:
        """The whole pages of full slots (int64[n]) lose their owners, their peers, or both."""
        if full.numel() > self.few:
            touched = self._whole_pages(full)
            if owner:
                self.owned.tensor.index_fill_(0, touched, 0)
            if peers:
                self._forget_many(touched)
            return
        slots, size = full.tolist(), self.size
        if size > 1:
            pages = {slot // size: None for slot in slots}
            slots = [slot for page in pages for slot in range(page * size, page * size + size)]
        if owner:
            owned = self.owned.cells
            for slot in slots:
                owned[slot] = 0
        if peers:
            self._forget_few(slots)

    def forget(self, full: Tensor) -> None:
        """These full slots, int64[n], should map to nothing any more."""
        if full.numel() <= self.few:
            self._forget_few(full.tolist())
        else:
            self._forget_many(torch.unique(full))

    def wants(self, full: Tensor) -> bool:
        """Whether any of these full slots, int64[n], should map to something."""
        return bool(self.want.tensor[full].any())

    def taken_for_later(self) -> Iterator[Tensor]:
        """Yield SWA slots, int64[n], that were handed out and never mapped yet."""
        for first, length in self.later.items():
            index, at = self.swa.place(first)
            yield self.swa.slots[index][at : at + length]

    def owned_pages(self, pages: int) -> Tensor:
        """Return bool[pages + 1], true for full pages that have an owner, and for page 0."""
        owned = self.owned.tensor[: (pages + 1) * self.size].view(-1, self.size)
        marks: Tensor = owned.any(1)
        marks[0] = True
        return marks

    def _find(self, pool: Allocations, ranges: Ranges) -> Tensor:
        parts: list[Tensor] = []
        room = self.most
        for first, length in ranges:
            room -= length
            if room < 0:  # before anything of that size is made
                raise ScriptError("names more slots than the pool has")
            if first == 0:
                parts.append(torch.zeros(length, dtype=torch.int64))
                continue
            stop = first + length
            while first < stop:
                index, at = pool.place(first)
                slots = pool.slots[index]
                if not self._alive(pool, index, at, first):
                    raise _nobody(first)
                whole = slots.numel()
                upto = min(stop - first + at, whole)
                parts.append(slots if upto - at == whole else slots[at:upto])
                first += upto - at
        if len(parts) == 1:
            return parts[0].clone()  # whoever is called may keep it, or write into it
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    def _alive(self, pool: Allocations, index: int, at: int, number: int) -> bool:
        """Whether an allocation is; the slot that is named, its ``at``-th, mostly proves it."""
        first, slots = pool.firsts[index], pool.slots[index]
        if pool is self.full:
            slot = int(slots[at])
            if self.number.cells[slot] == number and (
                self.owned.cells[slot] or self.want.cells[slot]
            ):
                return True
            live = self._live_full(slots)
        else:
            beside = pool.beside[index]
            if beside is not None and self.want_number.cells[int(beside[at])] == number:
                return True
            live = self.want_number.tensor
        last = first + slots.numel() - 1
        if bool(((live >= first) & (live <= last)).any()):
            return True
        others = pool.pinned if pool is self.full else {*pool.pinned, *self.later}
        return any(first <= other <= last for other in others)

    def _live_full(self, slots: Tensor) -> Tensor:
        """Return the numbers, int64[m], of those full slots (int64[n]) that are alive."""
        alive = (self.owned.tensor[slots] > 0) | (self.want.tensor[slots] > 0)
        return self.number.tensor[slots[alive]]

    def _sweep(self) -> None:
        live = self._live_full(torch.arange(len(self.want.cells)))
        self.full.keep(live)
        later = torch.tensor(list(self.later), dtype=torch.int64)
        wanted = self.want_number.tensor
        self.swa.keep(torch.cat((wanted[wanted > 0], later)))

    def _not_later(self, first: int) -> int:
        """These are mapped now, or gone. Return how many slots were taken for later with them."""
        return self.later.pop(first, 0)

    def _aim(self, full: Tensor, swa: Tensor, ranges: Ranges) -> None:
        """Full slots that want nothing want these SWA slots, int64[n] each, named by ranges."""
        size = self.size
        if full.numel() <= self.few:
            want, numbers, pointed = self.want.cells, self.want_number.cells, self.pointed.cells
            named = (number for pair in ranges for number in _numbers(*pair))
            for slot, peer, number in zip(full.tolist(), swa.tolist(), named, strict=True):
                if want[slot]:  # the call names it twice: the last one counts
                    self._forget_one(slot)
                if peer:
                    want[slot] = peer
                    numbers[slot] = number
                    pointed[peer // size] += 1
            return
        parts = [
            torch.arange(f, f + n) if f else torch.zeros(n, dtype=torch.int64) for f, n in ranges
        ]
        named_all = parts[0] if len(parts) == 1 else torch.cat(parts)
        self.want.tensor[full] = swa
        self.want_number.tensor[full] = named_all * (swa > 0)
        self.pointed.tensor.index_add_(0, self._pages(swa), self.ones.expand(swa.numel()))

    def _recount(self) -> None:
        pages = self._pages(self.want.tensor)
        self.pointed.tensor.zero_().index_add_(0, pages, self.ones.expand(pages.numel()))

    def _forget_one(self, slot: int) -> None:
        self.pointed.cells[self.want.cells[slot] // self.size] -= 1
        self.want.cells[slot] = self.want_number.cells[slot] = 0

    def _forget_few(self, slots: list[int]) -> None:
        want, numbers, pointed, size = (
            self.want.cells,
            self.want_number.cells,
            self.pointed.cells,
            self.size,
        )
        for slot in slots:
            if want[slot]:
                pointed[want[slot] // size] -= 1
                want[slot] = numbers[slot] = 0

    def _forget_many(self, slots: Tensor) -> None:
        """As ``forget``, for slots of which none comes twice."""
        pages = self._pages(self.want.tensor[slots])
        self.pointed.tensor.index_add_(0, pages, self.ones.expand(pages.numel()), alpha=-1)
        self.want.tensor.index_fill_(0, slots, 0)
        self.want_number.tensor.index_fill_(0, slots, 0)

    def _pages(self, slots: Tensor) -> Tensor:
        """Return the pages of slots; a shift takes a third of the time of a division."""
        return slots // self.size if self.shift is None else slots >> self.shift

    def _whole_pages(self, slots: Tensor) -> Tensor:
        if self.size == 1:
            once: Tensor = torch.unique(slots)
            return once
        pages: Tensor = torch.unique(torch.unique_consecutive(self._pages(slots)))
        return (pages[:, None] * self.size + self.offsets).reshape(-1)


def _numbers(first: int, length: int) -> Iterable[int]:
    return range(first, first + length) if first else repeat(0, length)


def _nobody(number: int) -> ScriptError:
    return ScriptError(f"nobody holds the slot with number {number}")
