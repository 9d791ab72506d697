"""One search on one target at one page size, from its start to what there is to say about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swaleak.check.player import Allocator
from swaleak.errors import UsageError
from swaleak.script import catalogue as scenarios
from swaleak.script.scenario import Scenario, check_page_size
from swaleak.search.explore import Coverage, Explorer, Progress, Shard, room
from swaleak.search.fuzz import Fuzzer, Played, Tried
from swaleak.search.fuzz import room as fuzz_room
from swaleak.search.legal import Rules
from swaleak.search.witness import Witness, described_by, scenario_of, witness
from swaleak.target import Sizes, Target

Watch = Callable[[Progress | Played], None]


@dataclass(frozen=True, slots=True)
class Exhaustive:
    """Try every order of ``depth`` operations; ``every``: go on after a failure."""

    depth: int
    every: bool = False


@dataclass(frozen=True, slots=True)
class AtRandom:
    """Play ``scripts`` scripts of ``steps`` operations, the first from ``seed``."""

    steps: int
    seed: int
    scripts: int


@dataclass(frozen=True, slots=True)
class Where:
    """What is searched, and by which rules."""

    target: Target
    strategy: str
    page_size: int
    rules: Rules
    shard: Shard


@dataclass(frozen=True, slots=True)
class Survey:
    """What a search has come to.

    ``known``: per witness, the scenario that it is, if any. ``interrupted``: somebody stopped it
    before its end; ``covered`` says how far it was.
    """

    where: Where
    plan: Exhaustive | AtRandom
    covered: Coverage | Tried
    witnesses: tuple[Witness, ...]
    known: tuple[str | None, ...]
    interrupted: bool

    def scenario(self) -> Scenario:
        """Return the first witness as a scenario."""
        where = self.where
        return scenario_of(
            self.witnesses[0],
            where.target,
            where.strategy,
            where.page_size,
            _pages(where, self.plan),
            where.rules.contract,
            f"swaleak explore on {where.target.name} ({where.strategy})",
        )


def survey(where: Where, plan: Exhaustive | AtRandom, watch: Watch) -> Survey:
    """Search, and tell ``watch`` how far it is. ``KeyboardInterrupt`` ends it early.

    Raises ``UsageError`` for a page size out of range, ``TargetError`` for a target whose state
    cannot be followed.
    """
    check_page_size(where.page_size)

    def make(full_pages: int, swa_pages: int) -> Allocator:
        return where.target.make(where.strategy, Sizes(full_pages, swa_pages, where.page_size))

    search: Explorer | Fuzzer
    if isinstance(plan, Exhaustive):
        search = Explorer(make, where.rules, plan.depth, where.shard, plan.every)
    else:
        search = Fuzzer(make, where.rules, plan.steps, plan.seed, plan.scripts, where.shard)
    interrupted = False
    try:
        for progress in search.run():
            watch(progress)
    except KeyboardInterrupt:
        interrupted = True
    pages = _pages(where, plan)
    witnesses = tuple(witness(lambda: make(pages, pages), order) for order in search.failing())
    catalogue = scenarios.catalogue()
    known = tuple(described_by(found.order, catalogue) for found in witnesses)
    return Survey(where, plan, search.covered(), witnesses, known, interrupted)


def has_segments(target: Target, strategy: str) -> bool:
    """Whether a target has code of its own for the slots of one request.

    A grafted strategy and the built-in model do there what they do for any slots.
    """
    if target.origin(strategy) in ("builtin", "grafted"):
        return False
    return hasattr(target.make(strategy, Sizes(2, 2, 1)).allocator, "free_swa_segment")


def shard_of(text: str) -> Shard:
    """Return what ``I/N`` means. Raises ``UsageError``."""
    index, _, count = text.partition("/")
    if index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count) <= 10_000:
        return Shard(int(index), int(count))
    raise UsageError(f"--shard {text}: must be I/N, such as 2/8, with I from 1 to N")


def _pages(where: Where, plan: Exhaustive | AtRandom) -> int:
    return room(where.rules, plan.depth) if isinstance(plan, Exhaustive) else fuzz_room(where.rules)
