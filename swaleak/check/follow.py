"""Follows a recorded trace on another allocator, and judges it group by group.

The ledger here is one of slots, not of names: a trace has millions of them. It knows what each full
slot should map to, applies every call at once, and is compared with the allocator when a group has
ended. Memory depends on the pools and on what is allocated, not on the length of the trace.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from swaleak.check.audit import Violation
from swaleak.errors import ScriptError
from swaleak.script.trace import FREES, HANDS_OUT, Header, Line, Ranges, TraceReader
from swaleak.sglang.adapter import Driver
from swaleak.target import Sizes

MOST_NAMED = 16  # pages that a violation lists


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
        followed.calls += 1
        try:
            follower.play(item)
        except ScriptError as error:
            file = f"{trace.path}: " if isinstance(trace, TraceReader) else ""
            raise ScriptError(f"{file}line {item.number}: {error}") from None
        except _Starved:
            followed.starved = item.number
            break
        except Exception as error:  # whatever SGLang's code raises is a result, not a crash
            text = " ".join(str(error).split())
            followed.raised = (item.number, f"{type(error).__name__}: {text}")
            break
        if item.op == "end":
            _judge(follower, item, followed)
            if until(followed):
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


class _Starved(Exception):
    """A pool has no room for what the trace allocates."""


class _Held:
    """Allocations of one pool that somebody still holds, found by the numbers of their slots."""

    def __init__(self, most: int) -> None:
        self.most = most  # slots that a call can be about
        self.firsts: list[int] = []  # of live allocations, ascending
        self.slots: dict[int, Tensor] = {}
        self.left: dict[int, int] = {}

    def add(self, first: int, slots: Tensor, holds: int) -> None:
        """Enter an allocation: int64[n] slots, numbered from ``first``."""
        if self.firsts and first <= self.firsts[-1]:
            raise ScriptError(f"slot number {first} was handed out before")
        self.firsts.append(first)
        self.slots[first] = slots
        self.left[first] = holds

    def find(self, ranges: Ranges) -> tuple[Tensor, Tensor]:
        """Return the slots that ranges of numbers name, and the number of each."""
        parts: list[Tensor] = []
        numbers: list[Tensor] = []
        if (asked := sum(count for _, count in ranges)) > self.most:
            raise ScriptError(f"names {asked} slots, more than the pool has")
        for first, count in ranges:
            if first == 0:
                parts.append(torch.zeros(count, dtype=torch.int64))
                numbers.append(parts[-1])
                continue
            stop = first + count
            while first < stop:
                at = bisect_right(self.firsts, first) - 1
                start = self.firsts[at] if at >= 0 else 0
                slots = self.slots.get(start)
                if slots is None or first >= start + len(slots):
                    raise ScriptError(f"nobody holds the slot with number {first}")
                upto = min(stop, start + len(slots))
                parts.append(slots[first - start : upto - start])
                numbers.append(torch.arange(first, upto))
                first = upto
        none = torch.zeros(0, dtype=torch.int64)
        return torch.cat(parts or [none]), torch.cat(numbers or [none])

    def release(self, numbers: Tensor) -> None:
        """Somebody lets go of the slots with these numbers; forget allocations nobody holds."""
        numbers = numbers[numbers > 0]
        if not len(numbers) or not self.firsts:
            return
        at = torch.searchsorted(torch.tensor(self.firsts), numbers, right=True) - 1
        for index, count in zip(
            *(t.tolist() for t in torch.unique(at, return_counts=True)), strict=True
        ):
            first = self.firsts[index]
            self.left[first] -= count
        for index in reversed(torch.unique(at).tolist()):
            first = self.firsts[index]
            if self.left[first] <= 0:
                del self.firsts[index], self.slots[first], self.left[first]

    def hold(self, numbers: Tensor) -> None:
        """Somebody more holds the slots with these numbers."""
        numbers = numbers[numbers > 0]
        if len(numbers):
            at = torch.searchsorted(torch.tensor(self.firsts), numbers, right=True) - 1
            pairs = zip(*(t.tolist() for t in torch.unique(at, return_counts=True)), strict=True)
            for index, count in pairs:
                self.left[self.firsts[index]] += count


class _Follower:
    """One allocator, and what each of its full slots should map to. All tensors on the host."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.size = driver.page_size
        state = driver.state()
        self.device = state.mapping.device
        slots = len(state.mapping)
        self.want = torch.zeros(slots, dtype=torch.int64)  # SWA slot, 0 for none
        self.want_number = torch.zeros(slots, dtype=torch.int64)  # its number
        self.number = torch.zeros(slots, dtype=torch.int64)  # of the full slot, when last taken
        self.owned = torch.zeros(slots, dtype=torch.bool)
        self.most = max(slots, (state.swa_pages + 1) * self.size)
        self.full = _Held(self.most)
        self.swa = _Held(self.most)
        self.unmapped: dict[int, int] = {}  # alloc_swa: first number -> slots never mapped yet

    def play(self, line: Line) -> None:
        """Make one call, and enter it."""
        op, data = line.op, line.data
        if op in HANDS_OUT:
            self._hand_out(op, data)
        elif op == "begin":
            self.driver.group_begin()
        elif op == "end":
            self.driver.group_end()
        elif op == "free_swa_pool":
            slots, numbers = self.swa.find(data["swa"])
            self.driver.free_swa_pool(self._there(slots))
            self.swa.release(numbers)
        elif op == "point":
            self._point(data)
        else:
            self._free(op, data)

    def _there(self, slots: Tensor) -> Tensor:
        return slots.to(self.device)

    def _hand_out(self, op: str, data: dict[str, Any]) -> None:
        if data["n"] > self.most:  # before anything of that size is made
            raise _Starved
        match op:
            case "alloc":
                full = self.driver.allocator.alloc(data["n"])
            case "alloc_both":
                full = self.driver.alloc(data["n"] // self.size)
            case "alloc_full":
                full = self.driver.full_pool.alloc(data["n"])
            case "alloc_swa":
                self._took_swa(data, self.driver.swa_pool.alloc(data["n"]))
                return
            case _:
                full = self._grow(op, data)
        if full is None:
            raise _Starved
        full = full.clone()
        peers = self.driver.translate(full).cpu() if "swa" in data else torch.zeros_like(full).cpu()
        full = full.cpu()
        if len(full) != data["n"]:
            raise ScriptError(f"{op}: {data['n']} slots were recorded, there are {len(full)}")
        self._forget(full)
        # a slot is held by its owner, and by its peer: a cache may free the full side first
        self.full.add(data["full"], full, len(full))
        self.number[full] = torch.arange(data["full"], data["full"] + len(full))
        self.owned[full] = True
        if "swa" in data:
            self.full.hold(self.number[full[peers > 0]])
            numbers = torch.where(peers > 0, torch.arange(len(full)) + data["swa"], 0)
            self.swa.add(data["swa"], peers, int((peers > 0).sum()))
            self.want[full], self.want_number[full] = peers, numbers

    def _took_swa(self, data: dict[str, Any], swa: Tensor | None) -> None:
        if swa is None:
            raise _Starved
        self.swa.add(data["swa"], swa.cpu().clone(), len(swa))
        self.unmapped[data["swa"]] = len(swa)

    def _grow(self, op: str, data: dict[str, Any]) -> Tensor | None:
        seq = torch.tensor(data["seq"])
        last, numbers = self.full.find(data["last"])
        last = self._there(torch.where(numbers > 0, last, -1))
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

    def _point(self, data: dict[str, Any]) -> None:
        full, _ = self.full.find(data["full"])
        swa, numbers = self.swa.find(data["swa"])
        if len(full) != len(swa):
            raise ScriptError(f"point: lengths differ, {len(full)} and {len(swa)} slots")
        self.driver.point(self._there(full), self._there(swa))
        self.swa.hold(numbers)
        self._forget(full)
        self.full.hold(self.number[full[swa > 0]])
        self.want[full], self.want_number[full] = swa, numbers
        for first, count in data["swa"]:
            if first in self.unmapped:  # whoever took them holds them through the mapping now
                held = self.unmapped.pop(first)
                self.swa.release(torch.arange(first, first + min(count, held)))

    def _free(self, op: str, data: dict[str, Any]) -> None:
        slots, _ = self.full.find(data["full"])
        there = self._there(slots)
        if op == "free_full_pool":
            if data["cleared"] and bool(self.want[slots].any()):
                self.driver.clear_mapping(there)  # the cache did, before it freed them
                self._forget(slots)
            self.driver.free_full_pool(there)
        elif op == "clear":
            self.driver.clear_mapping(there)
            self._forget(slots)
            return
        else:
            assert op in FREES
            getattr(self.driver, op)(there)
        touched = self._whole_pages(slots)
        if op not in ("free_swa", "free_swa_segment"):
            self.full.release(self.number[touched[self.owned[touched]]])
            self.owned[touched] = False
        if op not in ("free_full", "free_full_segment", "free_full_pool"):
            self._forget(touched)

    def _whole_pages(self, slots: Tensor) -> Tensor:
        if self.size == 1:
            return slots
        pages: Tensor = torch.unique(slots // self.size)
        return (pages[:, None] * self.size + torch.arange(self.size)).reshape(-1)

    def _forget(self, full: Tensor) -> None:
        """These full slots should map to nothing any more."""
        self.swa.release(self.want_number[full])
        self.full.release(self.number[full[self.want[full] > 0]])
        self.want[full] = 0
        self.want_number[full] = 0

    def audit(self) -> tuple[int, int, tuple[Violation, ...]]:
        """Return physical, mapped, and how the allocator differs from what it should be."""
        state = self.driver.state()
        mapping = state.mapping[:-1].cpu()
        want = self.want[:-1]
        size = self.size
        free = torch.zeros(state.swa_pages + 1, dtype=torch.bool)
        inside = state.swa_free[(state.swa_free > 0) & (state.swa_free <= state.swa_pages)].cpu()
        free[inside] = True
        mapped = torch.zeros(state.swa_pages + 1, dtype=torch.bool)
        mapped[mapping // size] = True
        for first, count in self.unmapped.items():  # HiCache is loading into them
            mapped[self.swa.slots[first][:count] // size] = True
        mapped[0] = free[0] = True
        owned = torch.unique(self.owned.nonzero().reshape(-1) // size)
        held = state.full_pages - len(torch.unique(state.full_free))
        found = (
            _pages("leak", "swa", (~mapped & ~free).nonzero()),
            _pages("leak", "full", torch.zeros(max(0, held - len(owned)))),
            _pages(
                "lost", "full", torch.unique(((want > 0) & (mapping != want)).nonzero() // size)
            ),
            _pages(
                "stale",
                "full",
                torch.unique(((mapping > 0) & (mapping != want)).nonzero() // size),
            ),
            _pages("dangling", "swa", (mapped & free)[1:].nonzero() + 1),
            _twice("swa", state.swa_free),
            _twice("full", state.full_free),
            _outside("swa", state.swa_free, state.swa_pages),
            _outside("full", state.full_free, state.full_pages),
        )
        physical = state.swa_pages - int(free.sum()) + 1
        return physical, int(mapped.sum()) - 1, tuple(v for v in found if v is not None)


def _twice(pool: str, free: Tensor) -> Violation | None:
    pages, times = torch.unique(free, return_counts=True)
    return _pages("double-free", pool, pages[times > 1])


def _outside(pool: str, free: Tensor, pages: int) -> Violation | None:
    return _pages("reserved", pool, torch.unique(free[(free < 1) | (free > pages)]))


def _pages(kind: str, pool: str, pages: Tensor) -> Violation | None:
    if not len(pages):
        return None
    return Violation(kind, tuple(pages.reshape(-1)[:MOST_NAMED].long().tolist()), pool)
