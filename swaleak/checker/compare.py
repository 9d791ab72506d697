"""The comparison: an allocator's state against its shadow.

``compare`` first asks whether they agree, which takes a few kernels however large the pools are.
Only where they do not, the pages that differ are looked at one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from swaleak.checker.shadow import Shadow
from swaleak.scenario.toml import ALLOCATOR, CALLER, KINDS
from swaleak.targets.driver import State


@dataclass(frozen=True, slots=True)
class Violation:
    """One difference between an allocator and its shadow.

    ``pages``: page numbers of ``pool``; with ``owner``, that node's own 0th, 1st, … page.
    ``fault``: whose it is, ``allocator``, ``cache`` or ``caller``.
    """

    kind: str
    pages: tuple[int, ...]
    pool: str | None = None
    owner: str | None = None
    fault: str = ALLOCATOR

    def __str__(self) -> str:
        where = " ".join(filter(None, (self.owner and f"{self.owner}'s", self.pool)))
        plural = "s" if len(self.pages) > 1 else ""
        return f"{self.kind}: {where} page{plural} {', '.join(map(str, self.pages))}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a look at an allocator found.

    Counts are pages. ``physical``: SWA pages not in the free list; ``mapped``: distinct SWA pages
    that the mapping reaches; ``full``: full pages not in the free list.
    """

    physical: int
    mapped: int
    full: int
    violations: tuple[Violation, ...] = ()

    @property
    def verdict(self) -> str:
        """``clean``, ``leak`` (with or without more) or ``corrupt``."""
        if any(violation.kind == "leak" for violation in self.violations):
            return "leak"
        return "corrupt" if self.violations else "clean"


class Reading(NamedTuple):
    """An allocator's state on the host.

    ``full_times``, ``swa_times``: int8[pages + 1], how often a page is in its free list, at most 2.
    ``full_reserved``, ``swa_reserved``: numbers in the free lists that are no page to hand out.
    ``reached``: bool[pages + 1], SWA pages that the mapping reaches.
    """

    page_size: int
    mapping: Tensor
    full_times: Tensor
    swa_times: Tensor
    full_reserved: list[int]
    swa_reserved: list[int]
    reached: Tensor


def compare(state: State, shadow: Shadow) -> Comparison:
    """Compare an allocator with its shadow, in the middle of a group too.

    While a group is open, pages wait for its end: only counts are given.
    """
    if not shadow.in_group and agree(state, shadow):
        physical = state.swa_pages - state.swa_free.numel()
        mapped = physical - len(shadow.unmapped)
        return Comparison(physical, mapped, state.full_pages - state.full_free.numel())
    return compare_pages(read(state, shadow.orphaned), shadow)


def agree(state: State, shadow: Shadow) -> bool:
    """Whether an allocator holds exactly what its shadow holds, and nothing is wrong with that."""
    return (
        not shadow.torn
        and not shadow.shared
        and torch.equal(_on_host(state.mapping)[:-1], shadow.mapping.tensor)
        and _complementary(shadow.mapped.tensor, state.swa_free, shadow.unmapped)
        and _complementary(shadow.owned.tensor, state.full_free)
    )


def read(state: State, orphaned: Collection[int] = ()) -> Reading:
    """Bring a state to the host, and look at every page.

    ``orphaned``: full pages of which it does not matter what the mapping says.
    """
    mapping = _on_host(state.mapping)[:-1]
    if orphaned:
        mapping = mapping.clone()
        mapping.view(-1, state.page_size)[list(orphaned)] = 0
    full_times, full_reserved = _times(state.full_free, state.full_pages)
    swa_times, swa_reserved = _times(state.swa_free, state.swa_pages)
    pages = mapping[mapping > 0] // state.page_size
    reached = torch.zeros(state.swa_pages + 1, dtype=torch.bool, device="cpu")
    reached[pages[pages <= state.swa_pages]] = True
    reached[0] = False
    return Reading(
        state.page_size, mapping, full_times, swa_times, full_reserved, swa_reserved, reached
    )


def compare_pages(reading: Reading, shadow: Shadow) -> Comparison:
    """Compare page by page, whether they agree or not."""
    return Comparison(
        int((reading.swa_times[1:] == 0).sum()),
        int(reading.reached.sum()),
        int((reading.full_times[1:] == 0).sum()),
        () if shadow.in_group else tuple(_violations(reading, shadow)),
    )


def _violations(reading: Reading, shadow: Shadow) -> list[Violation]:
    """Return every difference, by kind."""
    found: dict[tuple[str, str | None, str | None, str], list[int]] = {}

    def add(kind: str, page: int, pool: str | None, owner: str | None = None, at: int = 0) -> None:
        caused = (pool or "full", page) in shadow.mistaken
        key = kind, pool, owner, CALLER if caused else ALLOCATOR
        found.setdefault(key, []).append(at if owner else page)

    _compare_mapping(reading, shadow, add)
    reached = reading.reached.clone()
    reached[list(shadow.unmapped)] = True
    for pool, times, used, reserved in (
        ("swa", reading.swa_times, reached, reading.swa_reserved),
        ("full", reading.full_times, shadow.owned.tensor > 0, reading.full_reserved),
    ):
        free = times > 0
        for kind, pages in (
            ("leak", marked(~used & ~free)),
            ("dangling", marked(used & free)),
            ("double-free", marked(times > 1)),
            ("reserved", reserved),
        ):
            for page in sorted(pages):
                add(kind, page, pool)
    for page in _shared(reading):
        add("shared", page, "swa")
    return [
        Violation(kind, tuple(pages), pool, owner, fault)
        for (kind, pool, owner, fault), pages in sorted(
            found.items(), key=lambda item: KINDS.index(item[0][0])
        )
    ]


def _compare_mapping(reading: Reading, shadow: Shadow, add: Callable[..., None]) -> None:
    """Compare what full pages map to, where it differs or is torn."""
    size = reading.page_size
    wanted = shadow.mapping.tensor
    differ = (reading.mapping != wanted).view(-1, size).any(1).nonzero().view(-1).tolist()
    owners = {
        page: (name, at)
        for name, node in (*shadow.nodes.items(), *shadow.orphans().items())
        for at, page in enumerate(node.pages)
    }
    order = {page: at for at, page in enumerate(owners)}
    for page in sorted(
        {*differ, *shadow.torn}, key=lambda page: (order.get(page, len(order)), page)
    ):
        slots = slice(page * size, (page + 1) * size)
        row, want = reading.mapping[slots].tolist(), wanted[slots].tolist()
        pairs = list(zip(row, want, strict=True))
        kinds = [
            *(["lost"] if any(there != want and want for there, want in pairs) else []),
            *(["stale"] if any(there != want and there for there, want in pairs) else []),
        ]
        if any(row) and any(want) and not _regular(row):
            kinds = ["misaligned"]
        owner, at = owners.get(page, (None, page))
        for kind in kinds:
            add(kind, page, None if owner else "full", owner, at)


def _regular(row: list[int]) -> bool:
    """Whether slots of a full page map to the same places of one SWA page, as far as they map."""
    size = len(row)
    there = {slot - at for at, slot in enumerate(row) if slot}
    return len(there) == 1 and min(there) > 0 and min(there) % size == 0


def _shared(reading: Reading) -> list[int]:
    """Return the SWA pages that more than one full page maps to."""
    slots = (reading.mapping > 0).nonzero().view(-1)
    pairs = torch.stack((slots, reading.mapping[slots])) // reading.page_size
    pages = torch.unique(pairs, dim=1)[1].tolist()
    return sorted(page for page, times in Counter(pages).items() if times > 1)


def _times(free: Tensor, pages: int) -> tuple[Tensor, list[int]]:
    """Return how often each page is in a free list, int8[n], and what must not be in it."""
    free = _on_host(free)
    bad = (free < 1) | (free > pages)
    reserved = torch.unique(free[bad]).tolist()
    free = free[~bad] if reserved else free
    return torch.bincount(free, minlength=pages + 1).clamp_(max=2).to(torch.int8), reserved


def marked(marks: Tensor) -> set[int]:
    """Return the pages that are marked, bool[pages + 1]; page 0 is padding."""
    return set((marks[1:].nonzero().view(-1) + 1).tolist())


def _complementary(uses: Tensor, free: Tensor, also: Collection[int] = ()) -> bool:
    """Whether each page either has uses (int64[pages + 1]) or is free (int64[n]), once.

    ``also``: further pages that are in use.
    """
    free, pages = _on_host(free), uses.numel()
    if free.numel() and int(free.max()) >= pages:  # ``bincount`` would make room for it
        return False
    unused = uses.eq(0).long()
    unused[0] = 0
    if also:
        unused[list(also)] = 0
    try:
        return torch.equal(torch.bincount(free, minlength=pages), unused)
    except RuntimeError:  # a negative number
        return False


def _on_host(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type == "cpu" else tensor.cpu()
