"""The audit: what an allocator says about itself, held against the ledger.

Reading and judging are apart. ``read`` looks at the device once and brings page numbers back to
the host, as many as are in use, however large the pools are; ``audit`` is plain Python over them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from swaleak.allocator.state import State
from swaleak.check.ledger import Ledger
from swaleak.errors import page_list
from swaleak.script.scenario import KINDS

Add = Callable[..., None]  # kind, page, pool, owner


class Audited(Protocol):
    """Whatever can show its state."""

    def state(self) -> State:
        """Return the state as it is now; nothing is copied."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One disagreement. ``pages``: of ``pool``; with ``owner``, the node's own 0th, 1st, … page."""

    kind: str
    pages: tuple[int, ...]
    pool: str | None = None
    owner: str | None = None

    def __str__(self) -> str:
        where = f"{self.owner}'s" if self.owner else str(self.pool)
        return f"{self.kind}: {where} {page_list(self.pages)}"


@dataclass(frozen=True, slots=True)
class Audit:
    """What a look at an allocator found.

    Counts are pages. ``physical``: SWA pages not in the free list; ``mapped``: distinct SWA pages
    the mapping points at; ``full``: full pages not in the free list.
    """

    physical: int
    mapped: int
    full: int
    violations: tuple[Violation, ...]

    @property
    def verdict(self) -> str:
        """``clean``, ``leak`` (with or without more) or ``corrupt``."""
        if any(violation.kind == "leak" for violation in self.violations):
            return "leak"
        return "corrupt" if self.violations else "clean"


class FreeList(NamedTuple):
    """A free list, seen from the other side."""

    held: set[int]
    twice: list[int]
    reserved: list[int]


class Reading(NamedTuple):
    """A state on the host.

    ``peers``: per full page that maps anything, the SWA page it maps to and from how many slots;
    page -1 where its slots disagree, and then ``ragged`` holds all SWA pages they map to.
    ``pointed``: all SWA pages that are mapped to.
    """

    full: FreeList
    swa: FreeList
    peers: dict[int, tuple[int, int]]
    ragged: dict[int, set[int]]
    pointed: set[int]


SMALL = 4096  # slots; below this, lists are faster than kernels on a CPU
CHUNK = 2**18  # slots looked at together, so that temporaries stay small


def read(state: State) -> Reading:
    """Bring the page-granular state to the host, with one synchronisation."""
    if len(state.mapping) <= SMALL and state.mapping.device.type == "cpu":
        peers, ragged, pointed = _peers_of_lists(state)
        full = _free_list(state.full_free.tolist(), state.full_pages)
        swa = _free_list(state.swa_free.tolist(), state.swa_pages)
        return Reading(full, swa, peers, ragged, pointed)
    return _read_tensors(state)


def counts(reading: Reading) -> tuple[int, int]:
    """Return physical and mapped SWA pages."""
    return len(reading.swa.held), len(reading.pointed)


def audit(allocator: Audited, ledger: Ledger) -> Audit:
    """Read the allocator's state and hold it against the ledger; see ``audit_of``."""
    return audit_of(read(allocator.state()), ledger)


def audit_of(reading: Reading, ledger: Ledger) -> Audit:
    """Hold a reading against the ledger, in the middle of a group too.

    While a group is open, pages that wait for its end are nobody's fault: only counts are given.
    """
    physical, mapped = counts(reading)
    found = () if ledger.in_group else tuple(judge(reading, ledger))
    return Audit(physical, mapped, len(reading.full.held), found)


def judge(reading: Reading, ledger: Ledger) -> list[Violation]:
    """Return every disagreement between a reading and the ledger, by kind."""
    found: dict[tuple[str, str | None, str | None], list[int]] = {}

    def add(kind: str, page: int, pool: str | None = None, owner: str | None = None) -> None:
        found.setdefault((kind, pool, owner), []).append(page)

    _judge_nodes(reading, ledger, add)
    full_owned = {page for node in ledger.nodes.values() for page in node.full}
    _judge_pool("swa", reading.swa, reading.pointed, add)
    _judge_pool("full", reading.full, full_owned, add)
    sharers = Counter(swa for swa, _ in reading.peers.values() if swa >= 0)
    sharers.update(swa for pages in reading.ragged.values() for swa in pages)
    for page in sorted(page for page, owners in sharers.items() if owners > 1):
        add("shared", page, "swa")
    return [
        Violation(kind, tuple(pages), pool, owner)
        for (kind, pool, owner), pages in sorted(found.items(), key=lambda f: KINDS.index(f[0][0]))
    ]


def _judge_nodes(reading: Reading, ledger: Ledger, add: Add) -> None:
    """Hold what full pages map to against what their owners should have."""
    unclaimed = dict(reading.peers)
    for name, node in (*ledger.nodes.items(), *ledger.ghosts.items()):
        left = node.slots
        for i, (full, swa) in enumerate(zip(node.full, node.swa, strict=True)):
            there = unclaimed.pop(full, None)
            slots = min(left, ledger.page_size)
            left -= slots
            if there is None:
                if swa is not None:
                    add("lost", i, owner=name)
            elif there[0] < 0:
                add("misaligned" if swa is not None else "stale", i, owner=name)
            elif swa is None:
                add("stale", i, owner=name)
            elif there != (swa, slots):
                add("lost", i, owner=name)
                add("stale", i, owner=name)
    for full in unclaimed:
        add("stale", full, "full")


def _judge_pool(pool: str, listed: FreeList, used: set[int], add: Add) -> None:
    """Hold a free list against the pages that are somebody's."""
    for kind, pages in (
        ("leak", sorted(listed.held - used)),
        ("dangling", sorted(used - listed.held)),
        ("double-free", listed.twice),
        ("reserved", listed.reserved),
    ):
        for page in pages:
            add(kind, page, pool)


def _peers_of_lists(
    state: State,
) -> tuple[dict[int, tuple[int, int]], dict[int, set[int]], set[int]]:
    size = state.page_size
    flat: list[int] = state.mapping.tolist()
    del flat[-1]
    ragged: dict[int, set[int]]
    if size == 1:
        peers = {full: (swa, 1) if swa > 0 else (-1, 0) for full, swa in enumerate(flat) if swa}
        ragged = {full: set() for full, (swa, _) in peers.items() if swa < 0}
        return peers, ragged, {swa for swa in flat if swa > 0}
    peers, ragged = {}, {}
    pointed: set[int] = set()
    for page in range(len(flat) // size):
        row = flat[page * size : (page + 1) * size]
        if not any(row):
            continue
        base = row[0]
        filled = row.index(0) if 0 in row else size
        ordered = [*range(base, base + filled), *[0] * (size - filled)]
        if filled and base > 0 and base % size == 0 and row == ordered:
            peers[page] = (base // size, filled)
            pointed.add(base // size)
        else:
            peers[page] = (-1, 0)
            ragged[page] = {slot // size for slot in row if slot > 0}
            pointed |= ragged[page]
    return peers, ragged, pointed


def _free_list(listed: list[int], pages: int) -> FreeList:
    distinct = set(listed)
    twice: list[int] = []
    if len(distinct) < len(listed):
        counted = Counter(listed).items()
        twice = sorted(page for page, times in counted if times > 1 and 1 <= page <= pages)
    reserved = sorted(page for page in distinct if not 1 <= page <= pages)
    return FreeList(set(range(1, pages + 1)) - distinct, twice, reserved)


def _read_tensors(state: State) -> Reading:
    """Read large pools, and GPUs: shapes that depend on no data, one copy to the host."""
    rows = state.mapping[:-1].view(-1, state.page_size)
    on_cpu = rows.device.type == "cpu"
    swa = torch.zeros(len(rows), dtype=torch.int32, device=rows.device)
    filled = torch.zeros_like(swa)
    pointed = torch.zeros(state.swa_pages + 3, dtype=torch.int32, device=rows.device)
    step = max(1, CHUNK // state.page_size)
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step]
        if on_cpu and not chunk.any():
            continue
        _read_rows(chunk, swa[start : start + step], filled[start : start + step], pointed)
    full_times = _times(state.full_free, state.full_pages)
    swa_times = _times(state.swa_free, state.swa_pages)
    if not on_cpu:
        parts = (swa, filled, pointed, full_times, swa_times)
        host = torch.cat(parts).cpu()
        swa, filled, pointed, full_times, swa_times = torch.split(host, [len(p) for p in parts])
    used = swa.nonzero().reshape(-1)
    pairs = zip(swa[used].tolist(), filled[used].tolist(), strict=True)
    torn = used[swa[used] < 0].tolist()
    torn_rows = rows[torn].tolist() if torn else []  # worth a second look at the device
    return Reading(
        _free_list_of_times(full_times, state.full_free),
        _free_list_of_times(swa_times, state.swa_free),
        dict(zip(used.tolist(), pairs, strict=True)),
        {
            page: {slot // state.page_size for slot in row if slot > 0}
            for page, row in zip(torn, torn_rows, strict=True)
        },
        set(pointed[1:].nonzero().reshape(-1).tolist()),
    )


def _read_rows(rows: Tensor, swa: Tensor, filled: Tensor, pointed: Tensor) -> None:
    """Fill in, per page of ``rows`` (int64[pages, page size]), what it maps to.

    ``swa``: the SWA page, -1 where its slots disagree. ``filled``: the number of slots that map.
    ``pointed``: a mark for each SWA page (shifted by one) that any slot points at.
    """
    size = rows.shape[1]
    base = rows[:, 0]
    used = rows != 0
    filled.copy_(used.sum(1))
    place = torch.arange(size, device=rows.device)
    ordered = (rows - place == base[:, None]) | ~used
    dense = used == (place < filled[:, None])
    aligned = ordered.all(1) & dense.all(1) & (base % size == 0) & (base >= 0)
    swa.copy_(torch.where(aligned, base // size, -1))
    filled.mul_(aligned)
    pages = torch.where(rows > 0, rows // size, -1).clamp_(max=len(pointed) - 2)
    pointed.index_fill_(0, pages.add_(1).reshape(-1), 1)  # place 0: slots that map nowhere


def _times(free: Tensor, pages: int) -> Tensor:
    """Return int32[pages + 3]: how often page -1, 0, 1, … is in a free list (int64[n]).

    The first and the last place stand for everything outside.
    """
    times = torch.zeros(pages + 3, dtype=torch.int32, device=free.device)
    step = CHUNK if free.device.type == "cpu" else max(1, len(free))
    once = torch.ones(1, dtype=torch.int32, device=free.device).expand(step)
    for part in torch.split(free, step):
        times.index_add_(0, (part + 1).clamp_(0, pages + 2), once[: len(part)])
    return times


def _free_list_of_times(times: Tensor, free: Tensor) -> FreeList:
    inside = times[2:-1]
    below, zero, above = times[[0, 1, -1]].tolist()
    reserved = [0] if zero else []
    if below or above:  # worth a second look at the device
        reserved += torch.unique(free[(free < 0) | (free > len(inside))]).tolist()
    return FreeList(
        set((inside.eq(0).nonzero().reshape(-1) + 1).tolist()),
        (inside.gt(1).nonzero().reshape(-1) + 1).tolist(),
        sorted(reserved),
    )
