"""What each strategy costs: one free group, all contestants interleaved, round after round.

What is timed is the bookkeeping of one free group: begin, some ``free_swa`` calls, in some cases a
recovery, end. The physical release, the same for everybody, is left out unless asked for: the
pools' own frees do nothing. Nothing is printed here: ``run`` yields rounds, ``statistics.py``
turns them into medians, intervals and ratios.
"""

from __future__ import annotations

import difflib
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from swaleak.checker.compare import compare
from swaleak.checker.run import Execution
from swaleak.checker.snapshot import Snapshot
from swaleak.errors import RAISED, SwaleakError, UsageError, unknown
from swaleak.scenario import steps
from swaleak.scenario.calls import MAX_SLOTS
from swaleak.scenario.steps import Step
from swaleak.scenario.toml import check_page_size
from swaleak.targets.driver import Sizes
from swaleak.targets.open import SHIPPED, STRATEGY_NAMES, Target, free_memory, strategy_of

ROUNDS_PER_ALLOCATOR = 25  # where in memory an allocator lies is worth up to 2 %
UNTIMED_GROUPS = 3  # that a new allocator runs first
RELEASES = ("free", "free_page_ids", "free_segment")  # how a pool is given pages back


@dataclass(frozen=True, slots=True)
class Case:
    """A free group of ``calls`` calls of ``free_swa``, each with ``pages`` whole pages.

    ``recovery``: at its end, the first tombstone of this group is recovered.
    """

    page_size: int
    calls: int
    pages: int
    recovery: bool = False

    def __str__(self) -> str:
        recovery = ", with a recovery" if self.recovery else ""
        return f"page size {self.page_size}, calls {self.calls}, pages {self.pages}{recovery}"

    @property
    def sizes(self) -> Sizes:
        """Pools that hold the group's pages, a recovery's, and as many free ones."""
        pages = 2 * (self.calls + 1) * self.pages
        return Sizes(pages, pages, self.page_size)

    def script(self, *, segment: bool) -> Iterator[Step]:
        """Yield the steps that the verdict is about: all allocations, then the group."""
        names = [f"node {i}" for i in range(self.calls)]
        free = steps.FreeSwaSegment if segment else steps.FreeSwa
        yield from (steps.Alloc(name, self.pages) for name in ("incoming", *names))
        yield steps.Group("begin")
        yield from map(free, names)
        if self.recovery:
            yield steps.Recover(names[0], "incoming")
        yield steps.Group("end")


PUBLISHED = ((256, 1, 1), (256, 8, 1), (256, 8, 16), (256, 64, 1), (1, 1, 1), (1, 8, 1), (1, 64, 1))


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure.

    ``whole``: with the physical release. ``recover``: only groups with a recovery, only groups
    without (False), or both (None). ``segment``: through ``free_swa_segment``, as SGLang's caches
    do from 0.5.20 on; ``free_swa`` where there is none.
    """

    warmup: int = 50
    samples: int = 500
    whole: bool = False
    recover: bool | None = None
    segment: bool = False
    seed: int = 0


def cases(
    page_sizes: Sequence[int] | None,
    calls: Sequence[int] | None,
    pages: Sequence[int] | None,
    recover: bool | None,
) -> tuple[Case, ...]:
    """Return the published shapes or, if any size is asked for, every combination.

    A size that is not asked for is then 256 and 1 slots per page, 1, 8 and 64 calls, 1 page per
    call. ``recover``: as in ``Settings``. Raises ``UsageError`` for a size over the limits.
    """
    shapes: Sequence[tuple[int, int, int]] = PUBLISHED
    if page_sizes or calls or pages:
        shapes = list(product(page_sizes or (256, 1), calls or (1, 8, 64), pages or (1,)))
    recoveries = (False, True) if recover is None else (recover,)
    chosen = tuple(dict.fromkeys(Case(*shape, there) for shape in shapes for there in recoveries))
    for case in chosen:
        check_page_size(case.page_size)
        if case.sizes.full_pages * case.page_size > MAX_SLOTS:
            raise UsageError(f"{case}: over the limit of {MAX_SLOTS} slots per pool")
    return chosen


@dataclass(frozen=True, slots=True)
class Contestant:
    """Who is measured: a strategy on a target."""

    label: str
    target: Target
    strategy: str


def contestants(
    baseline: str,
    candidates: Sequence[str] | None,
    on: Callable[[], Target],
    open_: Callable[[str], Target],
    open_candidate: Callable[[str], Target],
) -> tuple[Contestant, ...]:
    """Return the baseline, then the candidates.

    A strategy's name means that strategy on ``on()``; any other is a target, as shipped or, for
    candidates, as ``open_candidate`` patches it. A strategy without candidates is compared with the
    others that batch. Raises ``UsageError`` for a name that is neither, and for a duplicate.
    """
    found = [_contestant(baseline, on, open_)]
    if not candidates and found[0].strategy == SHIPPED:
        raise UsageError(f"nothing to compare {baseline} with; use --candidate")
    batching = ("deferred", "enqueue", "barrier")
    candidates = candidates or [name for name in batching if name != found[0].strategy]
    for name in candidates:
        one = _contestant(name, on, open_candidate)
        if any((one.target, one.strategy) == (other.target, other.strategy) for other in found):
            raise UsageError(
                f"{name} is given twice; the A/A row measures the baseline against itself"
            )
        found.append(one)
    labels = [one.label for one in found]
    return tuple(  # two checkouts of one version are labelled as asked for
        replace(one, label=name) if labels.count(one.label) > 1 else one
        for one, name in zip(found, (baseline, *candidates), strict=True)
    )


def _contestant(name: str, on: Callable[[], Target], open_: Callable[[str], Target]) -> Contestant:
    if name in STRATEGY_NAMES:
        strategy, target = strategy_of(name), on()
        if strategy != SHIPPED:
            return Contestant(strategy, target, strategy)
    else:
        try:
            target = open_(name)
        except UsageError:
            if difflib.get_close_matches(name, STRATEGY_NAMES):
                raise UsageError(unknown("strategy", name, STRATEGY_NAMES)) from None
            raise
    if SHIPPED not in target.strategies():
        others = ", ".join(target.strategies())
        raise UsageError(f"{target.name} ships no strategy of its own; use one of {others}")
    short = target.name.removeprefix("sglang ")
    return Contestant(short if short[:1].isdigit() else target.name, target, SHIPPED)


class Sample(NamedTuple):
    """The time of one group, in nanoseconds. ``gpu``: None where there is no GPU."""

    wall: int
    gpu: int | None = None


Clock = Callable[[Callable[[], None]], Sample]  # runs a piece of work to its end, on the device too


def host_clock(work: Callable[[], None]) -> Sample:
    """Return wall time, where everything runs on the CPU."""
    start = time.perf_counter_ns()
    work()
    return Sample(time.perf_counter_ns() - start)


class CudaClock:
    """GPU time by two events on the current stream, wall time until the device is done.

    ``cuda``: ``torch.cuda``, or a stand-in for it.
    """

    def __init__(self, device: str, cuda: Any = torch.cuda) -> None:
        self.device, self.cuda = device, cuda
        with cuda.device(device):
            self.start, self.end = (cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, work: Callable[[], None]) -> Sample:
        """Run ``work`` between two events, on a device that was idle before."""
        self.cuda.synchronize(self.device)
        stream = self.cuda.current_stream(self.device)
        start = time.perf_counter_ns()
        self.start.record(stream)
        work()
        self.end.record(stream)
        self.cuda.synchronize(self.device)
        wall = time.perf_counter_ns() - start
        return Sample(wall, round(self.start.elapsed_time(self.end) * 1e6))  # from milliseconds


def clock_for(device: str) -> Clock:
    """Return the clock for a torch device."""
    return CudaClock(device) if device.startswith("cuda") else host_clock


class PreparedGroup:
    """A contestant's allocator before a group: ``run`` is timed, ``reset`` puts the state back."""

    def __init__(self, contestant: Contestant, case: Case, settings: Settings) -> None:
        self.driver = contestant.target.make(contestant.strategy, case.sizes)
        allocate = self.driver.alloc if case.page_size == 1 else self.driver.alloc_pages
        slots = [allocate(case.pages * case.page_size) for _ in range(case.calls + 1)]
        source, *self.freed = cast(list[Tensor], slots)  # None fails in the first run
        self.source = source if case.recovery else None
        # a method of the allocator where there is one: the driver's own frame would be timed too
        self.free_swa: Callable[[Tensor], None] = (
            self.driver.free_swa_segment if settings.segment else self.driver.allocator.free_swa
        )
        if not settings.whole:
            for pool, name in product((self.driver.full_pool, self.driver.swa_pool), RELEASES):
                if hasattr(pool, name):
                    setattr(pool, name, lambda *_, **__: None)
        self.reset = Snapshot(self.driver, Execution(self.driver).shadow).restore
        free = len(self.driver.state().swa_free)
        for _ in range(UNTIMED_GROUPS):
            self.run()
            if not settings.whole and len(self.driver.state().swa_free) != free:
                raise UsageError(
                    f"{contestant.label} releases pages past its pool's own methods; use --whole"
                )
            self.reset()

    def run(self) -> None:
        """Run the group: the calls of ``Case.script``."""
        driver, free_swa = self.driver, self.free_swa
        driver.allocator.free_group_begin()
        for full in self.freed:
            free_swa(full)
        if self.source is not None:
            driver.point(self.freed[0], driver.translate(self.source))
            driver.clear_mapping(self.source)
            driver.free_full_pool(self.source)
        driver.allocator.free_group_end()


@dataclass(frozen=True, slots=True)
class Round:
    """One round. ``samples``: one per contestant, and last the baseline's second one.

    ``verdicts``: of each contestant's group. ``counted``: not a warm-up. ``done`` and ``total``:
    rounds, over all cases.
    """

    case: Case
    verdicts: tuple[str, ...]
    samples: tuple[Sample, ...]
    counted: bool
    done: int
    total: int


def run(
    contestants: Sequence[Contestant], cases: Sequence[Case], settings: Settings, clock: Clock
) -> Iterator[Round]:
    """Measure case after case, and yield every round, warm-ups too.

    In a round each contestant has one turn, the baseline two, in random order; all get new
    allocators every ``ROUNDS_PER_ALLOCATOR`` rounds. Garbage collection is off meanwhile.
    Raises ``UsageError`` for a contestant that cannot be measured.
    """
    rounds = settings.warmup + settings.samples
    turns = (*contestants, contestants[0])
    order = list(range(len(turns)))
    shuffle = random.Random(settings.seed).shuffle
    with _no_garbage_collection():
        for number, case in enumerate(cases):
            _check_room(case, len(turns), contestants[0].target.device)
            verdicts = tuple(judge(one, case, settings) for one in contestants)
            groups: dict[int, PreparedGroup] = {}
            for turn in range(rounds):
                shuffle(order)
                if turn % ROUNDS_PER_ALLOCATOR == 0:
                    groups.clear()
                    for i in order:
                        with _explained(turns[i], case):
                            groups[i] = PreparedGroup(turns[i], case, settings)
                samples = {}
                for i in order:
                    groups[i].reset()
                    samples[i] = clock(groups[i].run)
                yield Round(
                    case,
                    verdicts,
                    tuple(samples[i] for i in range(len(turns))),
                    counted=turn >= settings.warmup,
                    done=number * rounds + turn + 1,
                    total=len(cases) * rounds,
                )


def _check_room(case: Case, allocators: int, device: str) -> None:
    """Raise ``UsageError`` if the mappings and their copies are over the device's free memory."""
    needed = 3 * allocators * 8 * case.sizes.full_pages * case.page_size  # bytes
    free = free_memory(device)
    if free is not None and needed > free:
        raise UsageError(
            f"{case}: takes {needed >> 30} GiB, {free >> 30} are free on {device}; "
            f"ask for fewer pages"
        )


def judge(contestant: Contestant, case: Case, settings: Settings) -> str:
    """Return the verdict on one whole group: a time is worth nothing if pages are lost.

    Raises ``UsageError`` if the allocator raises.
    """
    with _explained(contestant, case):
        driver = contestant.target.make(contestant.strategy, case.sizes)
        execution = Execution(driver)
        for step in case.script(segment=settings.segment):
            execution.step(step)
        return compare(driver.state(), execution.shadow).verdict


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def _explained(contestant: Contestant, case: Case) -> Iterator[None]:
    """Turn whatever an allocator raises, or a device that is full, into one line."""
    try:
        yield
    except SwaleakError:
        raise
    except RAISED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"{contestant.label} cannot be measured ({case}): {reason}") from None
