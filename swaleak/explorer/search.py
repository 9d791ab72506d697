"""One search on one target at one page size, from its start to what there is to say about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swaleak.errors import UsageError
from swaleak.explorer.breadth_first import BreadthFirst, Coverage, Failure, Progress
from swaleak.explorer.counterexample import (
    Counterexample,
    cache_counterexample,
    counterexample,
    scenario_of,
)
from swaleak.explorer.random_walk import RandomWalk, Shard, Walks
from swaleak.explorer.requests import RandomRequests, RequestOrders
from swaleak.scenario import catalogue
from swaleak.scenario.contract import RequestRules, Rules
from swaleak.scenario.toml import Scenario, check_page_size
from swaleak.targets.driver import Driver, Sizes
from swaleak.targets.open import Target
from swaleak.targets.radix_cache import RadixCache


@dataclass(frozen=True, slots=True)
class Exhaustive:
    """Try every order of ``depth`` steps; ``every``: go on after a failure; ``jobs``: processes."""

    depth: int
    every: bool = False
    jobs: int = 1


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class AtRandom:
    """Run ``scripts`` scripts of ``steps`` steps, the first from ``seed``."""

    steps: int
    seed: int
    scripts: int
    shard: Shard = WHOLE


@dataclass(frozen=True, slots=True)
class Place:
    """What is searched, and by which rules; ``cache``: the one that requests run on."""

    target: Target
    strategy: str
    page_size: int
    rules: Rules | RequestRules
    cache: str | None = None


@dataclass(frozen=True, slots=True)
class Search:
    """What a search has come to. ``interrupted``: it was stopped; ``coverage`` says how far it was.

    ``sizes``: of the pools.
    """

    place: Place
    plan: Exhaustive | AtRandom
    coverage: Coverage | Walks
    failures: tuple[Failure, ...]
    counterexamples: tuple[Counterexample, ...]
    interrupted: bool
    sizes: Sizes

    def scenario(self) -> Scenario:
        """Return the first counterexample as a scenario."""
        place = self.place
        return scenario_of(
            self.counterexamples[0],
            place.target,
            place.strategy,
            self.sizes,
            place.rules.contract,
            place.cache,
        )


def search(
    place: Place, plan: Exhaustive | AtRandom, watch: Callable[[Progress | Walks], None]
) -> Search:
    """Search, and tell ``watch`` how far it is. ``KeyboardInterrupt`` ends it early.

    Raises ``UsageError`` for a page size out of range, ``TargetError`` for a target whose state
    cannot be followed.
    """
    check_page_size(place.page_size)

    def make(full_pages: int, swa_pages: int) -> Driver:
        return place.target.make(place.strategy, Sizes(full_pages, swa_pages, place.page_size))

    engine: BreadthFirst | RandomWalk | RequestOrders | RandomRequests
    if isinstance(place.rules, RequestRules):
        engine = _of_requests(place, place.rules, plan)
    elif isinstance(plan, Exhaustive):
        engine = BreadthFirst(make, place.rules, plan.depth, every=plan.every, jobs=plan.jobs)
    else:
        engine = RandomWalk(make, place.rules, plan.steps, plan.seed, plan.scripts, plan.shard)
    interrupted = False
    try:
        for progress in engine.run():
            watch(progress)
    except KeyboardInterrupt:
        interrupted = True
    known = catalogue.catalogue()
    orders = [failure.order for failure in engine.failures]
    if isinstance(engine, RequestOrders | RandomRequests):
        of, swa = place.strategy, engine.swa_pages
        shown = [cache_counterexample(engine.make, of, order, known) for order in orders]
    else:
        swa = engine.pages
        shown = [counterexample(engine.fresh, order, known) for order in orders]
    return Search(
        place,
        plan,
        engine.coverage,
        tuple(engine.failures),
        tuple(shown),
        interrupted,
        Sizes(engine.pages, swa, place.page_size),
    )


def _of_requests(
    place: Place, rules: RequestRules, plan: Exhaustive | AtRandom
) -> RequestOrders | RandomRequests:
    """Return a search over requests."""
    caches, cache, size = place.target.caches, str(place.cache), place.page_size

    def make(strategy: str, full_pages: int, swa_pages: int) -> RadixCache:
        return caches.make(cache, strategy, Sizes(full_pages, swa_pages, size), 1)

    if isinstance(plan, Exhaustive):
        return RequestOrders(make, place.strategy, rules, plan.depth)
    bounds = (plan.steps, plan.seed, plan.scripts, plan.shard)
    return RandomRequests(make, place.strategy, rules, *bounds)


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
