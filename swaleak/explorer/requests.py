"""Every order of what requests do on a radix cache, and random ones: which takes a page from whom.

The cache makes the calls; after every step outside a free group its allocator and its nodes are
judged as a scenario of requests is. States are told apart up to renaming of pages and requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from random import Random
from typing import Any

from swaleak.checker.conservation import judge, run_cache_script, shadow_of
from swaleak.checker.run import Run
from swaleak.checker.snapshot import Graph
from swaleak.errors import RAISED, ScriptError, StandInError, TargetError
from swaleak.explorer.breadth_first import Coverage, Failure, Progress
from swaleak.explorer.random_walk import Shard, Walks
from swaleak.explorer.shrink import Script, shrink
from swaleak.scenario.calls import PoolExhausted
from swaleak.scenario.contract import RequestRules, legal_requests
from swaleak.scenario.request_steps import Admit, Grow
from swaleak.scenario.steps import Group, Step
from swaleak.targets.radix_cache import Caches, Look, RadixCache

MakeCache = Callable[[str, int, int], RadixCache]  # strategy, full and SWA pages -> empty
REPORT_EVERY = 512  # transitions
FURTHER = 20  # scripts that are run when one has failed, besides as many as that took


class RequestOrders:
    """Tries orders of at most ``depth`` steps, breadth first, until one fails.

    ``coverage`` and ``failures`` are up to date at any time. A state is a key, and the graph of
    objects that brings the cache back to it.
    """

    def __init__(self, make: MakeCache, strategy: str, rules: RequestRules, depth: int) -> None:
        self.rules = rules
        self.depth = depth
        self.pages = self.swa_pages = rules.requests * (rules.pages + depth) + 2
        self.make: Callable[[str], RadixCache]
        self.make = lambda strategy: make(strategy, self.pages, self.swa_pages)
        self.fresh: Callable[[], RadixCache] = lambda: self.make(strategy)
        self.coverage = Coverage()
        self.failures: list[Failure] = []

    def run(self) -> Iterator[Progress]:
        """Search, and report on the way."""
        started, coverage, tree = time.perf_counter(), self.coverage, self.fresh()
        seen = {state_key(tree, tree.look())}
        frontier: list[tuple[Script, Graph, int]] = [((), Graph(tree, (Caches,)), 0)]
        for depth in range(1, self.depth + 1):
            ahead: list[tuple[Script, Graph, int]] = []
            new = False
            for order, here, grouped in frontier:
                here.restore()
                for step in list(legal_requests(tree, self.rules, grouped)):
                    made = _make(tree, step)
                    there = tree.look() if made else None
                    coverage.transitions += 1
                    coverage.seconds = time.perf_counter() - started
                    if made is None:
                        coverage.dry += 1
                    elif there is None or fails(tree, there):
                        self.failures.append(_smallest(self.fresh, (*order, step)))
                        return
                    elif (key := state_key(tree, there)) not in seen or tree.in_group:
                        seen.add(key)
                        new = True
                        if depth < self.depth:
                            now = _grouped(step, grouped)
                            ahead.append(((*order, step), Graph(tree, (Caches,)), now))
                    if coverage.transitions % REPORT_EVERY == 0:
                        coverage.states = len(seen)
                        yield Progress(len(seen), coverage.transitions, depth, coverage.seconds)
                    here.restore()
            coverage.states, coverage.depth = len(seen), depth
            frontier = ahead
            if not new:
                coverage.exhausted = True
                return


class RandomRequests:
    """Runs ``scripts`` scripts of ``length`` steps, the first from ``seed``.

    When one has failed, as many again are run, and that which shrinks to the fewest steps is kept.
    ``coverage`` and ``failures`` are up to date at any time.
    """

    def __init__(
        self,
        make: MakeCache,
        strategy: str,
        rules: RequestRules,
        length: int,
        seed: int,
        scripts: int,
        shard: Shard | None = None,
    ) -> None:
        self.rules = rules
        self.length = length
        self.seeds = (shard or Shard()).seeds(seed, scripts)
        self.pages = 2 * rules.requests * rules.pages
        self.swa_pages = self.pages * 2 // 3  # runs dry first
        self.make: Callable[[str], RadixCache]
        self.make = lambda strategy: make(strategy, self.pages, self.swa_pages)
        self.fresh: Callable[[], RadixCache] = lambda: self.make(strategy)
        self.coverage = Walks(seed)
        self.failures: list[Failure] = []

    def run(self) -> Iterator[Walks]:
        """Run, and report on the way."""
        started, coverage = time.perf_counter(), self.coverage
        first: int | None = None  # scripts until one has failed
        for seed in self.seeds:
            if first is not None and coverage.scripts >= 2 * first + FURTHER:
                return
            script, failed = self.script(seed)
            coverage.scripts += 1
            coverage.steps += len(script)
            coverage.seconds = time.perf_counter() - started
            yield coverage
            if failed:
                first = first or coverage.scripts
                self._keep(seed, script)

    def _keep(self, seed: int, script: Script) -> None:
        """Keep a script that fails, as small as it gets, if it is the smallest so far."""
        if not self.failures:  # if interrupted now
            run = run_cache_script(self.fresh(), script)
            self.failures = [Failure(script, run, seed, len(script))]
        found, kept = _smallest(self.fresh, script), self.failures[0]
        if len(found.order) < len(kept.order) or kept.seed == seed:
            self.failures = [replace(found, seed=seed, length=len(script))]

    def script(self, seed: int) -> tuple[Script, bool]:
        """Return the script of a seed as far as it goes, and whether it fails."""
        random, tree = Random(seed), self.fresh()
        script: list[Step] = []
        grouped = 0
        while len(script) < self.length or tree.in_group:
            step = self._choose(random, tree, grouped, ending=len(script) >= self.length)
            script.append(step)
            made = _make(tree, step)
            if made is None:
                return tuple(script[:-1]), False
            if not made:
                return tuple(script), True
            grouped = _grouped(step, grouped)
            if not tree.in_group and fails(tree, tree.look()):
                return tuple(script), True
        return tuple(script), False

    def _choose(self, random: Random, tree: RadixCache, grouped: int, *, ending: bool) -> Step:
        """Choose a kind of step, then one of that kind for which there is room."""
        if ending:
            return Group("end")
        kinds: dict[str, list[Step]] = {}
        room = _room(tree)
        for step in legal_requests(tree, self.rules, grouped):
            if not isinstance(step, Admit | Grow) or _tokens(step, tree.page_size) <= room:
                kinds.setdefault(step.key, []).append(step)
        chosen = kinds[random.choice(list(kinds))]
        if isinstance(chosen[0], Admit):  # short prompts are few, and what most share
            length = random.randint(1, self.rules.pages)
            chosen = [s for s in chosen if len(getattr(s, "prompt", "")) <= length] or chosen
        return random.choice(chosen)


def _make(tree: RadixCache, step: Step) -> bool | None:
    """Make a step. Return whether it was made: False if SGLang raised, None without room."""
    try:
        tree.play(step)
    except PoolExhausted:
        return None
    except StandInError as error:
        raise TargetError(str(error)) from None
    except RAISED:
        return False
    return True


def _smallest(fresh: Callable[[], RadixCache], script: Script) -> Failure:
    """Return a script that fails, made as small as it gets."""
    run = run_cache_script(fresh(), script)
    if run.verdict == "clean":
        raise TargetError("what has failed does not when it is run again from the start")
    order = shrink(script, partial(same_failure, fresh, signature=run.signature))
    return Failure(order, run_cache_script(fresh(), order))


def _grouped(step: Step, before: int) -> int:
    """Return how many steps have been made in the open group."""
    return 0 if isinstance(step, Group) else before + 1


def _room(tree: RadixCache) -> int:
    """Return how many tokens a request may ask for, as the scheduler reckons before it admits."""
    allocator, cache = tree.driver.allocator, tree.cache
    full = allocator.full_available_size() + cache.full_evictable_size()
    swa = allocator.swa_available_size() + cache.swa_evictable_size()
    return int(min(full, swa))


def _tokens(step: Admit | Grow, page_size: int) -> int:
    """Return what a step asks for at most: its prefix gets locked, too, and a page is rounded."""
    pages = 1 if isinstance(step, Grow) else 2 * len(step.prompt)
    return (pages + 1) * page_size


def fails(tree: RadixCache, there: Look) -> bool:
    """Whether something is wrong now; in a group nothing is due yet."""
    if tree.in_group:
        return False
    return bool(judge(tree, tree.state(), shadow_of(tree, there), there).violations)


def same_failure(fresh: Callable[[], RadixCache], script: Script, signature: Any) -> bool:
    """Whether a script is one of a scheduler's, and fails in this way."""
    try:
        run: Run = run_cache_script(fresh(), script)
    except (ScriptError, TargetError):
        return False
    return bool(run.signature == signature)


def state_key(tree: RadixCache, there: Look) -> bytes:
    """Return 16 bytes that are equal for states that differ in page numbers and names only.

    Nodes are written out by their tokens, with locks and the order of their last use; requests by
    what they hold. Pages are numbered in the order in which they are met. Which pages are free does
    not matter, nor their order. In a free group, what is queued is written out as it was freed.
    """
    size, full, swa = tree.page_size, {0: 0}, {0: 0}
    nodes = sorted(there.nodes, key=lambda held: held.tokens)
    used = sorted(held.node.last_access_time for held in nodes)
    ranks = {when: rank for rank, when in enumerate(used)}
    text: list[Any] = []
    for held in nodes:
        owned = there.owners[held.name]
        text += (tuple(held.tokens), len(held.full), held.full_locks, held.swa_locks)
        text += (held.tombstone, ranks[held.node.last_access_time])
        text += [full.setdefault(page, len(full)) for page in owned.full]
        text += [None if p is None else swa.setdefault(p, len(swa)) for p in owned.swa]
    requests = []
    for reader in there.readers:
        request = reader.request
        if request is not None:
            owned = there.owners[reader.name]
            numbers = [full.setdefault(slot // size, len(full)) for slot in reader.slots[::size]]
            peers = [None if p is None else swa.setdefault(p, len(swa)) for p in owned.swa]
            decoded = min(request.decode_batch_idx, tree.requests.window)
            state = (request.state, decoded, reader.prefix, request.swa_evicted_seqlen)
            slots = (len(reader.slots), request.swa_released, numbers, peers)
            requests.append((reader.tokens, state, slots))
    text += sorted(map(repr, requests))
    if tree.in_group:
        for part in tree.driver.parts():
            for name, value in vars(part).items():
                if isinstance(value, list):
                    text.append((name, [getattr(item, "tolist", lambda: 0)() for item in value]))
    return blake2b(repr(text).encode(), digest_size=16).digest()
