"""Every legal order of operations up to a bound, the shortest that fails first.

Breadth first, so that the first failure is a shortest one. States are told apart up to renaming
of nodes and pages (``Stage.key``). Only a hash, a parent and an operation are kept for a state;
what it looks like is found again by playing on from the last state of the path that both share.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from swaleak.check.audit import judge, read
from swaleak.check.player import Allocator, Starved
from swaleak.check.refusal import fingerprint, is_refusal
from swaleak.check.replay import Run, replay
from swaleak.errors import RAISED, ScriptError, TargetError
from swaleak.script.ops import Op
from swaleak.search.legal import Rules, legal
from swaleak.search.queues import queue_kinds
from swaleak.search.stage import Saved, Stage

Make = Callable[[int, int], Allocator]  # full pages, SWA pages -> a fresh allocator
REPORT_EVERY = 512  # transitions between two reports of progress
CHECKED = 16  # states a depth that are played again from the start, to be sure of ``Stage``


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``index`` (from 1) of ``count``."""

    index: int = 1
    count: int = 1

    def takes(self, number: int) -> bool:
        """Whether this part does the ``number``-th piece of work, from 0."""
        return number % self.count == self.index - 1


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a search is. ``depth``: the operations in the orders being tried."""

    states: int
    transitions: int
    depth: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Failure:
    """An order that fails, and what comes out when it is replayed from the start."""

    order: tuple[Op, ...]
    run: Run


@dataclass(slots=True)
class Coverage:
    """What has been tried. ``states`` are distinct; ``transitions`` are operations played on them.

    ``depth``: all orders of so many operations have been tried. ``exhausted``: there are no
    further states at any depth. ``refused``: operations that the allocator refused without
    changing anything. ``dry``: operations left out because a pool had no room. ``split_at``: the
    depth from which on the shard did its own part only.
    """

    states: int = 0
    transitions: int = 0
    depth: int = 0
    exhausted: bool = False
    refused: int = 0
    dry: int = 0
    split_at: int | None = None
    seconds: float = 0.0
    bytes_per_state: float = 0.0
    failures: list[Failure] = field(default_factory=list)


class Explorer:
    """Tries orders of at most ``depth`` operations.

    ``every``: go on after a failure, and collect a shortest order for each way of failing (the
    same verdict, violations and kinds of operations). What was covered is in ``coverage`` at any
    time, also when ``run`` was interrupted.
    """

    def __init__(
        self, make: Make, rules: Rules, depth: int, shard: Shard | None = None, every: bool = False
    ) -> None:
        self.rules = rules
        self.depth = depth
        self.shard = shard or Shard()
        self.every = every
        self.coverage = Coverage()
        pages = room(rules, depth)
        self._fresh: Callable[[], Allocator] = lambda: make(pages, pages)
        allocator = self._fresh()
        self._kinds = queue_kinds(make, allocator.page_size)
        self._stage = self._new_stage(allocator)
        self._seen: set[bytes] = set()
        self._parents = array("I")
        self._moves = array("I")
        self._ops: list[Op] = []
        self._numbers: dict[Op, int] = {}
        self._path: list[int] = []  # states on the way to where the stage is
        self._points: list[Saved] = []
        self._ways: set[object] = set()

    def run(self) -> Iterator[Progress]:
        """Search, and report on the way. Raises ``TargetError`` for a target it cannot follow."""
        started = time.perf_counter()
        coverage = self.coverage
        self._seen.add(self._stage.key())
        self._enter(0, 0)
        self._path, self._points = [0], [self._stage.save()]
        frontier = range(1)
        reported = 0
        for depth in range(1, self.depth + 1):
            begin = len(self._parents)
            split = coverage.split_at is None and len(frontier) >= 4 * self.shard.count > 4
            if split:
                coverage.split_at = depth - 1
            step = max(1, len(frontier) // CHECKED)
            for number, state in enumerate(frontier):
                if split and not self.shard.takes(number):
                    continue
                self._go_to(state)
                if number % step == 0:
                    self._check(state)
                self._expand(state)
                self._measure(started)
                if coverage.transitions - reported >= REPORT_EVERY:
                    reported = coverage.transitions
                    yield Progress(coverage.states, reported, depth, coverage.seconds)
                if coverage.failures and not self.every:
                    return
            coverage.depth = depth
            frontier = range(begin, len(self._parents))
            if not frontier:
                coverage.exhausted = True
                return

    def _expand(self, state: int) -> None:
        """Play every legal operation on a state, and go back after each."""
        stage, coverage, here = self._stage, self.coverage, self._points[-1]
        for op in tuple(legal(stage.player.ledger, self.rules, here.kept)):
            try:
                stage.play(op)
            except (ScriptError, Starved):
                coverage.dry += 1
            except RAISED:  # whatever SGLang's code raises is a result
                coverage.transitions += 1
                if self._refuses(op):
                    coverage.refused += 1
                else:
                    self._fail(state, op)
            else:
                coverage.transitions += 1
                key = stage.key()
                if key not in self._seen:
                    self._seen.add(key)
                    coverage.states += 1
                    ledger = stage.player.ledger
                    if not ledger.in_group and judge(read(stage.allocator.state()), ledger):
                        self._fail(state, op)
                    else:
                        self._enter(state, self._number(op))
            stage.restore(here)
            if coverage.failures and not self.every:
                return

    def _refuses(self, op: Op) -> bool:
        """Whether an operation that has just raised was refused, as only misuse may be."""
        if not self.rules.latent:
            return False
        self._stage.restore(self._points[-1])
        before = fingerprint(self._stage.allocator)
        try:
            self._stage.play(op)
        except RAISED as error:
            return is_refusal(op, error, before, fingerprint(self._stage.allocator))
        return False

    def _fail(self, state: int, op: Op) -> None:
        """Replay an order that fails from the start, and keep it if it fails in a new way."""
        order = (*self._order(state), op)
        run = replay(self._fresh(), order, keep_steps=True)
        if run.verdict == "clean" or (run.verdict == "refused" and self.rules.latent):
            raise _cannot_follow()
        way = (
            run.verdict,
            frozenset((v.kind, v.pool) for v in run.audit.violations),
            frozenset(op.key for op in order),
        )
        if way not in self._ways:
            self._ways.add(way)
            self.coverage.failures.append(Failure(order, run))

    def _go_to(self, state: int) -> None:
        """Bring the stage to a state, from the last one on the way there that it has been to."""
        path = self._states_to(state)
        shared = 0
        while shared < len(path) and path[: shared + 1] == self._path[: shared + 1]:
            shared += 1
        del self._path[shared:], self._points[shared:]
        self._stage.restore(self._points[-1])
        for nearer in path[shared:]:
            self._stage.play(self._ops[self._moves[nearer]])
            self._path.append(nearer)
            self._points.append(self._stage.save())

    def _check(self, state: int) -> None:
        """Play an order from the start: it has to end where going back and forth has ended."""
        stage = self._new_stage(self._fresh())
        for op in self._order(state):
            stage.play(op)
        if stage.key() != self._stage.key():
            raise _cannot_follow()

    def _new_stage(self, allocator: Allocator) -> Stage:
        return Stage(allocator, self._kinds, latent=self.rules.latent)

    def _states_to(self, state: int) -> list[int]:
        path = [state]
        while path[-1]:
            path.append(self._parents[path[-1]])
        return path[::-1]

    def _order(self, state: int) -> tuple[Op, ...]:
        return tuple(self._ops[self._moves[nearer]] for nearer in self._states_to(state)[1:])

    def _enter(self, parent: int, move: int) -> None:
        self._parents.append(parent)
        self._moves.append(move)

    def _number(self, op: Op) -> int:
        if op not in self._numbers:
            self._numbers[op] = len(self._ops)
            self._ops.append(op)
        return self._numbers[op]

    def _measure(self, started: float) -> None:
        self.coverage.seconds = time.perf_counter() - started

    def failing(self) -> list[tuple[Op, ...]]:
        """Return the orders that fail, shortest first."""
        return [failure.order for failure in self.coverage.failures]

    def covered(self) -> Coverage:
        """Return what has been tried so far."""
        self.coverage.bytes_per_state = self._memory()
        return self.coverage

    def _memory(self) -> float:
        """Return how many bytes a state costs."""
        if not self._seen:
            return 0.0
        key = sys.getsizeof(next(iter(self._seen)))
        arrays = sys.getsizeof(self._parents) + sys.getsizeof(self._moves)
        return key + (sys.getsizeof(self._seen) + arrays) / len(self._seen)


def room(rules: Rules, depth: int) -> int:
    """Return a pool size, in pages, that no order of ``depth`` operations can use up.

    All nodes at their largest, and as much again for every two operations more: one gives pages
    back that have to wait for the end of a group, the next one takes new ones.
    """
    return rules.pages * (rules.nodes + max(0, depth - rules.nodes) // 2 + 1)


def _cannot_follow() -> TargetError:
    return TargetError(
        "this allocator comes out differently when an order is played again from the start: it "
        "keeps state where explore cannot put it back"
    )
