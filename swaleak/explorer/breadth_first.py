"""Every legal order of steps up to a bound, the shortest that fails first.

Breadth first, so that the first failure is a shortest one. States are told apart up to renaming
of nodes and pages (``canonical.py``). Only a key, a parent and a step are kept for a state; what
it looks like is found again by making the steps from the last state that both paths share.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from swaleak.checker.compare import Comparison, agree, compare
from swaleak.checker.run import Execution, Run, is_refusal, run_script
from swaleak.checker.snapshot import Snapshot, marks
from swaleak.errors import RAISED, ScriptError, TargetError
from swaleak.explorer.canonical import Keys, Make, queue_kinds
from swaleak.scenario.calls import PoolExhausted
from swaleak.scenario.contract import ALLOCATES, Rules, check_room, legal
from swaleak.scenario.steps import Step
from swaleak.targets.driver import Driver

REPORT_EVERY = 512  # transitions between two reports of progress
CHECKED = 16  # states per depth that are reached again from the start, to be sure of ``Snapshot``
CHUNK = 32  # states that a process expands before it reports
WORTH_FORKING = 256  # states; fewer are expanded before another process has begun


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a search is. ``depth``: the steps in the orders being tried."""

    states: int
    transitions: int
    depth: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Failure:
    """An order that fails, and what comes of it on a fresh allocator.

    Of a random walk, ``seed`` gives the script, of ``length`` steps, that it was shrunk from.
    """

    order: tuple[Step, ...]
    run: Run
    seed: int | None = None
    length: int | None = None


@dataclass(slots=True)
class Coverage:
    """What has been tried. ``states`` are distinct; ``transitions`` are steps made on them.

    ``depth``: all orders of so many steps have been tried. ``exhausted``: there are no further
    states at any depth. ``refused``: steps that the allocator refused without changing anything.
    ``dry``: steps left out because a pool had no room.
    """

    states: int = 0
    transitions: int = 0
    depth: int = 0
    exhausted: bool = False
    refused: int = 0
    dry: int = 0
    seconds: float = 0.0
    bytes_per_state: float = 0.0


Way = tuple[str, frozenset[tuple[str, str | None]]]  # verdict, kind and pool of each violation


@dataclass(slots=True)
class Expansion:
    """What the legal steps of one state lead to.

    ``found``: steps to new states, each with the state's key, and how it fails if it does; no key
    if the allocator raised.
    """

    found: list[tuple[Step, bytes | None, Way | None]] = field(default_factory=list)
    transitions: int = 0
    refused: int = 0
    dry: int = 0

    @property
    def fails(self) -> bool:
        """Whether the last step failed."""
        return any(key is None or way for _, key, way in self.found[-1:])


class BreadthFirst:
    """Tries orders of at most ``depth`` steps.

    ``every``: go on after a failure, and collect a shortest order for each way of failing (the
    same verdict, violations and kinds of steps). ``jobs``: processes to do it in; the result is
    that of one. ``coverage`` and ``failures`` are up to date at any time, also when ``run`` was
    interrupted.
    """

    def __init__(
        self, make: Make, rules: Rules, depth: int, *, every: bool = False, jobs: int = 1
    ) -> None:
        self.rules = rules
        self.depth = depth
        self.every = every
        self.jobs = jobs
        self.coverage = Coverage()
        self.failures: list[Failure] = []
        self.pages = room(rules, depth)
        self.fresh: Callable[[], Driver] = lambda: make(self.pages, self.pages)
        driver = self.fresh()
        self._kinds = queue_kinds(make, driver.page_size)
        self._execution = Execution(driver)
        self._keys = self._keys_of(driver)
        self._seen: set[bytes] = set()
        self._parents = array("I")
        self._moves = array("I")
        self._steps: list[Step] = []
        self._numbers: dict[Step, int] = {}
        self._path: list[int] = []  # states on the way to the one that the execution is at
        self._points: list[Snapshot] = []
        self._ways: set[tuple[Way, frozenset[str]]] = set()

    def run(self) -> Iterator[Progress]:
        """Search, and report on the way. Raises ``TargetError`` for a target it cannot follow."""
        started, reported, coverage = time.perf_counter(), 0, self.coverage
        self._seen.add(self._keys.key(self._execution.shadow))
        self._enter(0, 0)
        self._path, self._points = [0], [self._snapshot()]
        frontier = range(1)
        for depth in range(1, self.depth + 1):
            begin = len(self._parents)
            for state, expansion in zip(frontier, self._expand_all(frontier), strict=True):
                self._merge(state, expansion)
                coverage.seconds = time.perf_counter() - started
                if coverage.transitions - reported >= REPORT_EVERY:
                    reported = coverage.transitions
                    yield Progress(coverage.states, reported, depth, coverage.seconds)
                if self.failures and not self.every:
                    return
            coverage.depth = depth
            frontier = range(begin, len(self._parents))
            coverage.bytes_per_state = self._memory()
            if not frontier:
                coverage.exhausted = True
                return

    def _merge(self, state: int, expansion: Expansion) -> None:
        """Enter what an expansion has found."""
        coverage = self.coverage
        coverage.transitions += expansion.transitions
        coverage.refused += expansion.refused
        coverage.dry += expansion.dry
        for step, key, way in expansion.found:
            if key is None:
                self._fail(state, step, None)
            elif key not in self._seen:
                self._seen.add(key)
                coverage.states += 1
                if way:
                    self._fail(state, step, way)
                else:
                    self._enter(state, self._number(step))

    def _fail(self, state: int, step: Step, way: Way | None) -> None:
        """Run an order that fails from the start, and keep it if it fails in a new way."""
        order = (*self._order(state), step)
        kinds = frozenset(step.key for step in order)
        if way and (way, kinds) in self._ways:
            return
        run = run_script(self.fresh(), order)
        if run.verdict == "clean" or (run.verdict == "refused" and self.rules.latent):
            raise _cannot_follow()
        way = _way(run.verdict, run.comparison)
        if (way, kinds) not in self._ways:
            self._ways.add((way, kinds))
            self.failures.append(Failure(order, run))

    # one process: expand states

    def _expand_all(self, frontier: range) -> Iterable[Expansion]:
        """Yield the expansion of each state of a frontier, in order."""
        if self.jobs > 1 and len(frontier) >= WORTH_FORKING:
            return self._expand_in_processes(frontier)
        return map(self._expansions_of(frontier), frontier)

    def _expansions_of(self, frontier: range) -> Callable[[int], Expansion]:
        every = max(1, len(frontier) // CHECKED)
        return lambda state: self._expand(state, check=(state - frontier.start) % every == 0)

    def _expand(self, state: int, *, check: bool) -> Expansion:
        """Make every legal step on a state, and go back after each."""
        self._go_to(state)
        if check:
            self._check(state)
        execution, here, expansion = self._execution, self._points[-1], Expansion()
        shadow, new = execution.shadow, set()
        kept = self._keys.kept(shadow) if self.rules.latent else {}
        for step in tuple(legal(shadow, self.rules, kept)):
            try:
                if isinstance(step, ALLOCATES):
                    check_room(step, shadow)
                self._make(execution, step)
            except (ScriptError, PoolExhausted):
                expansion.dry += 1
            except RAISED:  # whatever SGLang's code raises is a result
                expansion.transitions += 1
                if self._refuses(step):
                    expansion.refused += 1
                else:
                    expansion.found.append((step, None, None))
            else:
                expansion.transitions += 1
                key = self._keys.key(shadow)
                if key not in self._seen and key not in new:
                    new.add(key)
                    expansion.found.append((step, key, self._failing()))
            here.restore()
            if not self.every and expansion.fails:
                break
        return expansion

    def _failing(self) -> Way | None:
        """Return how the state fails that the execution is at, None if it does not."""
        state, shadow = self._execution.driver.state(), self._execution.shadow
        if shadow.in_group or agree(state, shadow):
            return None
        comparison = compare(state, shadow)
        return _way(comparison.verdict, comparison)

    def _refuses(self, step: Step) -> bool:
        """Whether a step that has just raised was refused, as only misuse may be."""
        if not self.rules.latent:
            return False
        execution = self._execution
        self._points[-1].restore()
        before = marks(execution.driver)
        try:
            execution.make(step)
        except RAISED as error:
            return is_refusal(step, error, before, marks(execution.driver))
        return False

    def _go_to(self, state: int) -> None:
        """Bring the execution to a state, from the last one on the way that it has been to."""
        path, before = self._states_to(state), self._path
        shared = 0
        while shared < min(len(path), len(before)) and path[shared] == before[shared]:
            shared += 1
        del self._path[shared:], self._points[shared:]
        self._points[-1].restore()
        for nearer in path[shared:]:
            self._make(self._execution, self._steps[self._moves[nearer]])
            self._path.append(nearer)
            self._points.append(self._snapshot())

    def _make(self, execution: Execution, step: Step) -> None:
        """Make a step, and forget index buffers that no step overwrites."""
        execution.make(step)
        shadow = execution.shadow
        if not self.rules.latent:
            shadow.buffers.clear()
        for name in list(shadow.buffers):
            if name not in shadow.nodes and name not in shadow.freed:
                del shadow.buffers[name]

    def _check(self, state: int) -> None:
        """Make an order's steps from the start: they have to end where going back has ended."""
        execution = Execution(self.fresh())
        keys = self._keys_of(execution.driver)
        for step in self._order(state):
            self._make(execution, step)
        if keys.key(execution.shadow) != self._keys.key(self._execution.shadow):
            raise _cannot_follow()

    # several processes

    def _expand_in_processes(self, frontier: range) -> Iterator[Expansion]:
        """Yield the expansions of a frontier, made by processes that share it chunk by chunk.

        They are forked here, so that they know what has been seen so far.
        """
        context = multiprocessing.get_context("fork")
        chunks = [frontier[at : at + CHUNK] for at in range(0, len(frontier), CHUNK)]
        ends, processes = [], []
        try:
            for job in range(self.jobs):
                ours, theirs = context.Pipe(duplex=False)
                mine = chunks[job :: self.jobs]
                process = context.Process(
                    target=self._work, args=(mine, frontier, theirs), daemon=True
                )
                process.start()
                theirs.close()
                ends.append(ours)
                processes.append(process)
            for number, _ in enumerate(chunks):
                try:
                    answer = ends[number % self.jobs].recv()
                except EOFError:
                    raise TargetError("a process of the search has died") from None
                if isinstance(answer, Exception):
                    raise answer
                yield from answer
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.join()

    def _work(self, chunks: Sequence[range], frontier: range, parent: Any) -> None:
        """Expand chunks of a frontier in a process of its own."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent will end this process
        expand = self._expansions_of(frontier)
        try:
            for chunk in chunks:
                expansions = []
                for state in chunk:
                    expansion = expand(state)
                    self._seen.update(key for _, key, _ in expansion.found if key)
                    expansions.append(expansion)
                parent.send(expansions)
        except Exception as error:
            parent.send(error)

    # states

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._execution.driver, self._execution.shadow)

    def _keys_of(self, driver: Driver) -> Keys:
        return Keys(driver, self._kinds, latent=self.rules.latent)

    def _states_to(self, state: int) -> list[int]:
        path = [state]
        while path[-1]:
            path.append(self._parents[path[-1]])
        return path[::-1]

    def _order(self, state: int) -> tuple[Step, ...]:
        return tuple(self._steps[self._moves[nearer]] for nearer in self._states_to(state)[1:])

    def _enter(self, parent: int, move: int) -> None:
        self._parents.append(parent)
        self._moves.append(move)

    def _number(self, step: Step) -> int:
        if step not in self._numbers:
            self._numbers[step] = len(self._steps)
            self._steps.append(step)
        return self._numbers[step]

    def _memory(self) -> float:
        """Return how many bytes a state costs."""
        key = sys.getsizeof(next(iter(self._seen)))
        arrays = sys.getsizeof(self._parents) + sys.getsizeof(self._moves)
        return key + (sys.getsizeof(self._seen) + arrays) / len(self._seen)


def room(rules: Rules, depth: int) -> int:
    """Return a pool size, in pages, that no order of ``depth`` steps can use up.

    All nodes at their largest, and as much again for every two steps more: one gives pages back
    that have to wait for the end of a group, the next one takes new ones.
    """
    return rules.pages * (rules.nodes + max(0, depth - rules.nodes) // 2 + 1)


def _way(verdict: str, comparison: Comparison) -> Way:
    return verdict, frozenset((v.kind, v.pool) for v in comparison.violations)


def _cannot_follow() -> TargetError:
    return TargetError(
        "this allocator comes out differently when the same steps are made again from the start: "
        "it keeps state where explore cannot put it back"
    )
