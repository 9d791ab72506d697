"""Long random legal scripts, and what is left of one that fails.

Reaches what is out of bounds for ``explore``: more and larger nodes, parts of pages, requests
that grow token by token, tail allocations. The same seed gives the same script and the same
result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from random import Random

from swaleak.check.audit import audit
from swaleak.check.player import Allocator, Player, Starved
from swaleak.check.refusal import fingerprint, is_refusal
from swaleak.check.replay import Run, replay
from swaleak.errors import RAISED, ScriptError
from swaleak.script import ops
from swaleak.script.ops import Op, Part
from swaleak.search.explore import Make, Shard
from swaleak.search.legal import Rules, in_production, legal, needs
from swaleak.search.shrink import Script, shrink
from swaleak.search.stage import Stage


@dataclass(frozen=True, slots=True)
class Played:
    """How far a search is: scripts and operations so far."""

    scripts: int
    operations: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A failing script of ``length`` operations from ``seed``, what is left of it, its outcome."""

    seed: int
    length: int
    order: Script
    run: Run


@dataclass(slots=True)
class Tried:
    """What has been tried. ``scripts`` is how many, from seed ``seed`` on, this part has done."""

    seed: int
    scripts: int = 0
    operations: int = 0
    seconds: float = 0.0
    failure: Shrunk | None = None


class Fuzzer:
    """Plays ``scripts`` scripts of ``steps`` operations each, the first from ``seed``, and so on.

    Stops at the first that fails, and shrinks it. ``tried`` holds what was covered, also when
    ``run`` was interrupted.
    """

    def __init__(
        self,
        make: Make,
        rules: Rules,
        steps: int,
        seed: int,
        scripts: int,
        shard: Shard | None = None,
    ) -> None:
        self.rules = rules
        self.steps = steps
        self.shard = shard or Shard()
        self.seeds = range(seed, seed + scripts)
        self.tried = Tried(seed)
        pages = room(rules)
        self._make: Callable[[], Allocator] = lambda: make(pages, pages)

    def run(self) -> Iterator[Played]:
        """Play, and report on the way."""
        started = time.perf_counter()
        tried = self.tried
        for number, seed in enumerate(self.seeds):
            if not self.shard.takes(number):
                continue
            script, failed = self.script(seed)
            tried.scripts += 1
            tried.operations += len(script)
            tried.seconds = time.perf_counter() - started
            yield Played(tried.scripts, tried.operations, tried.seconds)
            if failed:
                tried.failure = self._unshrunk(seed, script)  # whoever interrupts has this
                tried.failure = self._shrink(seed, script)
                return

    def failing(self) -> list[Script]:
        """Return what is left of the script that failed, if one did."""
        return [self.tried.failure.order] if self.tried.failure else []

    def covered(self) -> Tried:
        """Return what has been tried so far."""
        return self.tried

    def script(self, seed: int) -> tuple[Script, bool]:
        """Return the script of a seed as far as it goes, and whether it fails."""
        random = Random(seed)
        stage = Stage(self._make(), {}, latent=self.rules.latent)
        player = stage.player
        script: list[Op] = []
        for turn in count():
            ending = turn >= self.steps
            if ending and not player.ledger.in_group:
                break
            op = ops.Group("end") if ending else self._choose(random, stage)
            before = fingerprint(player.allocator)
            try:
                player.play(op)
            except RAISED as error:  # of SGLang's code: a result
                after = fingerprint(player.allocator)
                if self.rules.latent and is_refusal(op, error, before, after) and not ending:
                    continue  # it refused, and nothing has happened
                script.append(op)
                break
            script.append(op)
            if audit(player.allocator, player.ledger).violations:
                break
        run = replay(self._make(), script)
        fine = ("clean", "refused") if self.rules.latent else ("clean",)
        return tuple(script), run.verdict not in fine

    def _choose(self, random: Random, stage: Stage) -> Op:
        """Choose a kind of operation, then one of that kind for which there is room."""
        player = stage.player
        state = player.allocator.state()
        kinds: dict[str, list[Op]] = {}
        for op in legal(player.ledger, self.rules, stage.kept()):
            full, swa = needs(op, player.ledger)
            if full <= len(state.full_free) and swa <= len(state.swa_free):
                kinds.setdefault(op.key, []).append(op)
        op = random.choice(kinds[random.choice(list(kinds))])
        if type(op) in (ops.Free, ops.FreeSwa, ops.FreeFull) and random.random() < 0.5:
            return _by_slots(random, op, player)
        return op

    def _unshrunk(self, seed: int, script: Script) -> Shrunk:
        return Shrunk(seed, len(script), script, replay(self._make(), script, keep_steps=True))

    def _shrink(self, seed: int, script: Script) -> Shrunk:
        way = _way(replay(self._make(), script))
        order = shrink(script, lambda shorter: self._fails(shorter, way))
        return Shrunk(seed, len(script), order, replay(self._make(), order, keep_steps=True))

    def _fails(self, script: Script, way: object) -> bool:
        """Whether a script is legal and fails in this way."""
        if not self.rules.latent and not self._is_legal(script):
            return False
        try:
            return _way(replay(self._make(), script)) == way
        except ScriptError:
            return False

    def _is_legal(self, script: Script) -> bool:
        player = Player(self._make())
        for op in script:
            try:
                player.ledger.check(op)
                if not in_production(op, player.ledger):
                    return False
                player.play(op)
            except (ScriptError, Starved):
                return False
            except RAISED:  # what the allocator raises is for the replay to judge
                return True
        return True


def room(rules: Rules) -> int:
    """Return a pool size, in pages, that random scripts seldom use up."""
    return 2 * rules.nodes * (rules.pages + 1)


def _way(run: Run) -> object:
    return run.verdict, frozenset(violation.kind for violation in run.audit.violations)


def _by_slots(random: Random, op: Op, player: Player) -> Op:
    """Name some slots of the pages that a free names, instead of all: the pages go all the same."""
    assert isinstance(op, ops.FreeOp)
    size = player.ledger.page_size
    node = player.ledger.nodes.get(op.node)
    if size == 1 or node is None:
        return op
    pages = player.ledger.pages_of(node, op.part)
    start = random.randrange(pages.start * size, min((pages.start + 1) * size, node.slots))
    first = max(start, (pages.stop - 1) * size)
    stop = random.randrange(first, min(pages.stop * size, node.slots)) + 1
    return replace(op, part=Part("slots", start, stop))
