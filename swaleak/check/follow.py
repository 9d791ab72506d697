"""Follows a recorded trace on another allocator, and judges it group by group.

The ledger here is one of slots, not of names: a trace has millions of them. It knows what each full
slot should map to, applies every call at once, and is compared with the allocator when a group has
ended. Memory depends on the pools and on what is allocated, not on the length of the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from swaleak.allocator.mapping import plain
from swaleak.allocator.state import State
from swaleak.check.audit import Violation
from swaleak.check.player import Starved
from swaleak.check.slots import SlotLedger
from swaleak.errors import RAISED, ScriptError, told
from swaleak.script.trace import FREES, HANDS_OUT, PEER_FREES, Header, Line, TraceReader
from swaleak.sglang.adapter import Driver
from swaleak.target import Sizes

SWA_FREES = frozenset({"free_swa", "free_swa_segment"})  # the full side keeps its owner


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """A free group has ended. Counts are SWA pages; ``recorded``: physical and mapped, then."""

    group: int
    line: int
    physical: int
    mapped: int
    recorded: tuple[int, int]
    violations: tuple[Violation, ...]


@dataclass(slots=True)
class Followed:
    """What came out so far. ``first_bad``: the first group after which something was wrong.

    ``differ``: groups after which the counts were not as recorded. ``raised``: what the allocator
    raised, and at which line. ``starved``: the line at which a pool ran dry.
    """

    groups: int = 0
    calls: int = 0
    last: GroupEnd | None = None
    first_bad: GroupEnd | None = None
    differ: int = 0
    kinds: set[str] = field(default_factory=set)
    raised: tuple[int, str] | None = None
    starved: int | None = None

    @property
    def verdict(self) -> str:
        """``clean``, ``leak``, ``corrupt`` or ``error``."""
        if "leak" in self.kinds:
            return "leak"
        if self.kinds:
            return "corrupt"
        return "error" if self.raised or self.starved else "clean"


def follow(
    trace: Iterable[Header | Line],
    make: Callable[[Sizes], Driver],
    until: Callable[[Followed], bool] = lambda _: False,
) -> Followed:
    """Make every call of ``trace`` on an allocator from ``make``, and judge after each group.

    Stops early where the allocator raises, where a pool runs dry, or when ``until`` says so after
    a group. Raises ``ScriptError`` for a trace that makes no sense.
    """
    followed = Followed()
    follower: _Follower | None = None
    for item in trace:
        if isinstance(item, Header):
            follower = _Follower(make(Sizes(item.full_pages, item.swa_pages, item.page_size)))
            continue
        assert follower is not None  # a reader yields a header first
        number, op, data = item
        followed.calls += 1
        try:
            follower.calls[op](op, data)
            if op == "end":
                _judge(follower, item, followed)
        except ScriptError as error:
            file = f"{trace.path}: " if isinstance(trace, TraceReader) else ""
            raise ScriptError(f"{file}line {number}: {error}") from None
        except Starved:
            followed.starved = number
            break
        except RAISED as error:  # whatever SGLang's code raises is a result, not a crash
            followed.raised = (number, told(error))
            break
        if op == "end" and until(followed):
            break
    return followed


def _judge(follower: _Follower, end: Line, followed: Followed) -> None:
    followed.groups += 1
    physical, mapped, violations = follower.audit()
    recorded = (end.data["physical"], end.data["mapped"])
    seen = GroupEnd(followed.groups, end.number, physical, mapped, recorded, violations)
    followed.last = seen
    followed.differ += (physical, mapped) != recorded
    followed.kinds.update(violation.kind for violation in violations)
    if violations and followed.first_bad is None:
        followed.first_bad = seen


class _Follower:
    """One allocator, and the ledger of its slots, which is on the host."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.size = driver.page_size
        state = driver.state()
        self.device = state.mapping.device
        self.guarded = self.unguarded = state.mapping
        self.on_host = self.device.type == "cpu"
        self.ledger = SlotLedger(len(state.mapping), state.full_pages, state.swa_pages, self.size)
        self.calls: dict[str, Callable[[str, dict[str, Any]], None]] = {
            **dict.fromkeys(FREES, self._free),
            **dict.fromkeys(HANDS_OUT, self._hand_out),
            "alloc_swa": self._hand_out_swa,
            "begin": lambda op, data: driver.group_begin(),
            "end": lambda op, data: driver.group_end(),
            "point": self._point,
            "clear": self._clear,
            "free_full_pool": self._free_full_pool,
            "free_swa_pool": self._free_swa_pool,
        }
        self.frees = {
            name: (getattr(driver, name), name not in SWA_FREES, name in PEER_FREES)
            for name in FREES
        }

    def _there(self, slots: Tensor) -> Tensor:
        return slots if self.on_host else slots.to(self.device)

    def _here(self, slots: Tensor) -> Tensor:
        return slots if self.on_host else slots.cpu()

    def _free(self, op: str, data: dict[str, Any]) -> None:
        call, owner, peers = self.frees[op]
        names = self.ledger.full
        full = names.find_last(data["full"]) if owner and peers else names.find(data["full"])
        call(full.slots if self.on_host else full.slots.to(self.device))
        self.ledger.release(full, owner=owner, peers=peers)

    def _mapping(self) -> Tensor:
        mapping = self.driver.allocator.full_to_swa_index_mapping
        if mapping is not self.guarded:
            self.guarded, self.unguarded = mapping, plain(mapping)
        return self.unguarded

    def _hand_out(self, op: str, data: dict[str, Any]) -> None:
        count = data["n"]
        if count > self.ledger.most:  # before anything of that size is made
            raise Starved
        if op == "alloc":
            full = self.driver.allocator.alloc(count)
        elif op == "alloc_both":
            full = self.driver.alloc(count // self.size)
        elif op == "alloc_full":
            full = self.driver.full_pool.alloc(count)
        else:
            full = self._grow(op, data)
        if full is None:
            raise Starved
        if full.numel() != count:
            raise ScriptError(f"{op}: {count} slots were recorded, there are {full.numel()}")
        peers, swa = None, data.get("swa")
        if swa is not None:
            peers = self._here(self._mapping().index_select(0, full))
        mine = full.clone() if self.on_host else full.cpu()
        self.ledger.took(mine, data["full"], peers, swa or 0)

    def _hand_out_swa(self, op: str, data: dict[str, Any]) -> None:
        if data["n"] > self.ledger.most:
            raise Starved
        swa = self.driver.swa_pool.alloc(data["n"])
        if swa is None:
            raise Starved
        self.ledger.took_swa(self._here(swa).clone(), data["swa"])

    def _grow(self, op: str, data: dict[str, Any]) -> Tensor | None:
        seq = torch.tensor(data["seq"])
        last = self.ledger.full.find(data["last"]).slots
        last = self._there(torch.where(last > 0, last, -1))
        allocator = self.driver.allocator
        if op == "decode":
            found: Tensor | None = allocator.alloc_decode(self._there(seq), seq, last)
            return found
        prefix = torch.tensor(data["prefix"])
        args = (self._there(prefix), prefix, self._there(seq), seq, last, data["n"])
        if op == "tail":
            found = allocator.alloc_extend_swa_tail(*args, data["tail"])
        else:
            found = allocator.alloc_extend(*args)
        return found

    def _point(self, op: str, data: dict[str, Any]) -> None:
        full = self.ledger.full.find(data["full"])
        swa = self.ledger.swa.find(data["swa"])
        if len(full.slots) != len(swa.slots):
            counts = f"{len(full.slots)} and {len(swa.slots)} slots"
            raise ScriptError(f"point: lengths differ, {counts}")
        self.driver.point(self._there(full.slots), self._there(swa.slots))
        self.ledger.point(full, swa, data["swa"])

    def _clear(self, op: str, data: dict[str, Any]) -> None:
        full = self.ledger.full.find(data["full"])
        self.driver.clear_mapping(self._there(full.slots))
        self.ledger.forget(full)

    def _free_full_pool(self, op: str, data: dict[str, Any]) -> None:
        full = self.ledger.full.find(data["full"])
        there = self._there(full.slots)
        if data["cleared"] and self.ledger.wants(full):  # by the cache, before, without any call
            self.driver.clear_mapping(there)
            self.ledger.forget(full)
        self.driver.free_full_pool(there)
        self.ledger.release(full, owner=True, peers=False)

    def _free_swa_pool(self, op: str, data: dict[str, Any]) -> None:
        swa = self.ledger.swa.find(data["swa"])
        self.driver.free_swa_pool(self._there(swa.slots))
        self.ledger.gave_back_swa(data["swa"])

    def audit(self) -> tuple[int, int, tuple[Violation, ...]]:
        """Return physical, mapped, and how the allocator differs from what it should be."""
        state = self.driver.state()
        mapping, swa_free, full_free = (
            self._here(part) for part in (state.mapping[:-1], state.swa_free, state.full_free)
        )
        want = self.ledger.want.tensor[:-1]
        as_wanted = torch.equal(mapping, want)
        pointed, owned = self.ledger.pointed.tensor, self.ledger.owned.tensor
        if as_wanted and _parted(pointed, swa_free) and _parted(owned, full_free):
            pages = state.swa_pages - swa_free.numel()
            return pages, pages, ()
        mapped = pointed > 0  # or taken for later: HiCache is loading into them
        if not as_wanted:
            slots = torch.cat((mapping, *self.ledger.taken_for_later()))
            mapped = _marks(slots[slots > 0] // self.size, state.swa_pages)
        return _differences(state, mapping, want, mapped, owned > 0)


def _parted(uses: Tensor, free: Tensor) -> bool:
    """Whether each page either has uses (int64[pages + 1]) or is free (int64[n]), once."""
    pages = uses.numel()
    if free.numel():
        low, high = free.aminmax()
        if int(low) < 1 or int(high) >= pages:
            return False
    spare = uses.eq(0).long()
    return torch.equal(torch.bincount(free, minlength=pages), spare)


def _differences(
    state: State, mapping: Tensor, want: Tensor, mapped: Tensor, owned: Tensor
) -> tuple[int, int, tuple[Violation, ...]]:
    """Return counts and violations. ``mapped``, ``owned``: bool[pages + 1], pages in use."""
    size = state.page_size
    swa_free = _marks(state.swa_free, state.swa_pages)
    full_free = _marks(state.full_free, state.full_pages)
    lost, stale = (want > 0) & (mapping != want), (mapping != 0) & (mapping != want)
    found = [
        _pages("leak", "swa", ~mapped & ~swa_free),
        _pages("leak", "full", ~owned & ~full_free),
        *(
            _violation(kind, "full", torch.unique(slots.nonzero() // size))
            for kind, slots in (("lost", lost), ("stale", stale))
        ),
        _pages("dangling", "swa", mapped & swa_free),
        _pages("dangling", "full", owned & full_free),
    ]
    for pool, free, pages in (
        ("swa", state.swa_free, state.swa_pages),
        ("full", state.full_free, state.full_pages),
    ):
        listed, times = torch.unique(free, return_counts=True)
        found.append(_violation("double-free", pool, listed[times > 1]))
        found.append(_violation("reserved", pool, listed[(listed < 1) | (listed > pages)]))
    physical = state.swa_pages - int(swa_free.sum())
    return physical, int(mapped[1:].sum()), tuple(v for v in found if v is not None)


def _marks(named: Tensor, pages: int) -> Tensor:
    """Return bool[pages + 1] on the host: which pages are named, int64[n]."""
    marks = torch.zeros(pages + 1, dtype=torch.bool)
    marks[named[(named > 0) & (named <= pages)].cpu()] = True
    return marks


def _pages(kind: str, pool: str, marks: Tensor) -> Violation | None:
    """Return a violation of the pages that are marked, bool[pages + 1]; page 0 is padding."""
    return _violation(kind, pool, marks[1:].nonzero() + 1)


def _violation(kind: str, pool: str, pages: Tensor) -> Violation | None:
    if not len(pages):
        return None
    return Violation(kind, tuple(pages.reshape(-1).tolist()), pool)
