"""Long random legal scripts, and what is left of one that fails.

Reaches what is out of bounds for a breadth-first search: more and larger nodes, parts of pages,
requests that grow token by token, tail allocations. The same seed gives the same script and the
same result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from random import Random

from msgspec.structs import replace

from swaleak.checker.compare import compare
from swaleak.checker.run import Execution, Run, is_refusal, run_script
from swaleak.checker.shadow import Shadow
from swaleak.checker.snapshot import marks
from swaleak.errors import RAISED, ScriptError
from swaleak.explorer.breadth_first import Failure
from swaleak.explorer.canonical import Keys, Make
from swaleak.explorer.shrink import Script, shrink
from swaleak.scenario import steps
from swaleak.scenario.calls import PoolExhausted
from swaleak.scenario.contract import Rules, in_production, legal, pages_needed
from swaleak.scenario.steps import FreeStep, Step
from swaleak.targets.driver import Driver


@dataclass(slots=True)
class Walks:
    """What has been tried. ``scripts``: how many, from seed ``seed`` on, this shard has run."""

    seed: int
    scripts: int = 0
    steps: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``index`` (from 1) of ``count``: every ``count``-th seed."""

    index: int = 1
    count: int = 1

    def seeds(self, first: int, scripts: int) -> range:
        """Return its seeds of ``scripts``, the first of which is ``first``."""
        return range(first + self.index - 1, first + scripts, self.count)


class RandomWalk:
    """Runs ``scripts`` scripts of ``length`` steps each, the first from ``seed``, and so on.

    Stops at the first that fails, and shrinks it. ``coverage`` and ``failures`` are up to date at
    any time, also when ``run`` was interrupted.
    """

    def __init__(
        self,
        make: Make,
        rules: Rules,
        length: int,
        seed: int,
        scripts: int,
        shard: Shard | None = None,
    ) -> None:
        self.rules = rules
        self.length = length
        self.seeds = (shard or Shard()).seeds(seed, scripts)
        self.coverage = Walks(seed)
        self.failures: list[Failure] = []
        self.pages = room(rules)
        self.fresh: Callable[[], Driver] = lambda: make(self.pages, self.pages)

    def run(self) -> Iterator[Walks]:
        """Run, and report on the way."""
        started = time.perf_counter()
        coverage = self.coverage
        for seed in self.seeds:
            script, run = self.script(seed)
            coverage.scripts += 1
            coverage.steps += len(script)
            coverage.seconds = time.perf_counter() - started
            yield coverage
            if not self._passes(run):
                self.failures = [Failure(script, run, seed, len(script))]  # if interrupted now
                order = shrink(script, partial(self._fails, signature=run.signature))
                shrunk = run_script(self.fresh(), order)
                self.failures = [Failure(order, shrunk, seed, len(script))]
                return

    def script(self, seed: int) -> tuple[Script, Run]:
        """Return the script of a seed as far as it goes, and what comes of it."""
        random = Random(seed)
        execution = Execution(self.fresh())
        keys = Keys(execution.driver, {}, latent=True) if self.rules.latent else None
        script: list[Step] = []
        for turn in count():
            ending = turn >= self.length
            if ending and not execution.shadow.in_group:
                break
            step = steps.Group("end") if ending else self._choose(random, execution, keys)
            before = marks(execution.driver)
            try:
                execution.make(step)
            except RAISED as error:  # of SGLang's code: a result
                refused = is_refusal(step, error, before, marks(execution.driver))
                if self.rules.latent and refused and not ending:
                    continue  # nothing has happened
                script.append(step)
                break
            script.append(step)
            if compare(execution.driver.state(), execution.shadow).violations:
                break
        return tuple(script), run_script(self.fresh(), script)

    def _choose(self, random: Random, execution: Execution, keys: Keys | None) -> Step:
        """Choose a kind of step, then one of that kind for which there is room."""
        shadow, state = execution.shadow, execution.driver.state()
        kept: Mapping[str, int] = keys.kept(shadow) if keys else {}
        kinds: dict[str, list[Step]] = {}
        for step in legal(shadow, self.rules, kept):
            full, swa = pages_needed(step, shadow)
            if full <= len(state.full_free) and swa <= len(state.swa_free):
                kinds.setdefault(step.key, []).append(step)
        step = random.choice(kinds[random.choice(list(kinds))])
        plain = (steps.Free, steps.FreeSwa, steps.FreeFull)
        if isinstance(step, plain) and random.random() < 0.5:
            return _by_slots(random, step, shadow)
        return step

    def _passes(self, run: Run) -> bool:
        return run.verdict == "clean" or (self.rules.latent and run.verdict == "refused")

    def _fails(self, script: Script, signature: object) -> bool:
        """Whether a script is legal and fails in this way."""
        if not self.rules.latent and not self._is_legal(script):
            return False
        try:
            return run_script(self.fresh(), script).signature == signature
        except ScriptError:
            return False

    def _is_legal(self, script: Script) -> bool:
        execution = Execution(self.fresh())
        for step in script:
            try:
                if not execution.is_legal(step) or not in_production(step, execution.shadow):
                    return False
                execution.make(step)
            except (ScriptError, PoolExhausted):
                return False
            except RAISED:  # what the allocator raises is for the run to judge
                return True
        return True


def room(rules: Rules) -> int:
    """Return a pool size, in pages, that random scripts seldom use up."""
    return 2 * rules.nodes * (rules.pages + 1)


def _by_slots(random: Random, step: FreeStep, shadow: Shadow) -> Step:
    """Pass some slots of the pages that a free passes whole: the pages go all the same."""
    size = shadow.page_size
    node = shadow.nodes.get(step.node)
    if size == 1 or node is None:
        return step
    pages = step.touched(shadow, node)
    start = random.randrange(pages.start * size, min((pages.start + 1) * size, node.slots))
    first = max(start, (pages.stop - 1) * size)
    stop = random.randrange(first, min(pages.stop * size, node.slots)) + 1
    return replace(step, pages=None, slots=f"{start}:{stop}")
