"""What each strategy costs: grouped ``free_swa``, all contestants interleaved, medians a group.

What is timed is the bookkeeping of one free group: begin, ``calls`` frees, end. The physical
release, the same for everybody, is left out unless asked for: the pools' own frees do nothing.
Every sample starts from the same state, which is put back outside the timed part. Nothing is
printed here: ``measure`` yields rounds, ``summarise`` turns them into figures.
"""

from __future__ import annotations

import difflib
import gc
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from swaleak.allocator.mapping import plain
from swaleak.allocator.strategy import STRATEGIES
from swaleak.check.audit import audit
from swaleak.check.replay import Player
from swaleak.device import free_memory
from swaleak.errors import RAISED, SwaleakError, UsageError, unknown
from swaleak.script import ops
from swaleak.script.ops import Op
from swaleak.script.scenario import MAX_SLOTS, MAX_STEPS, check_page_size
from swaleak.sglang.adapter import Driver
from swaleak.target import SHIPPED, STRATEGY_NAMES, Sizes, Target, strategy_of

MIN_SAMPLES = 20  # fewer say nothing about a median
BLOCK = 25  # rounds, then new allocators: where in memory they lie is worth up to 2 %
RUN_IN = 3  # groups that a new allocator does before it is timed
RESAMPLES = 2000  # of the bootstrap
CHUNK = 2**21  # resampled values looked at together
SOURCE = "incoming"  # the node that a tombstone is recovered from
RELEASES = ("free", "free_page_ids", "free_segment")  # how a pool is given pages back


@dataclass(frozen=True, slots=True)
class Shape:
    """One case: a group of ``calls`` calls of ``free_swa``, each naming ``pages`` whole pages."""

    page_size: int
    calls: int
    pages: int

    def __str__(self) -> str:
        return f"page size {self.page_size}, calls {self.calls}, pages {self.pages}"

    @property
    def sizes(self) -> Sizes:
        """Pools that hold the group's pages, a recovery's, and as many free ones."""
        pages = 2 * (self.calls + 1) * self.pages
        return Sizes(pages, pages, self.page_size)


PUBLISHED = tuple(
    Shape(*numbers)
    for numbers in (
        (256, 1, 1),
        (256, 8, 1),
        (256, 8, 16),
        (256, 64, 1),
        (1, 1, 1),
        (1, 8, 1),
        (1, 64, 1),
    )
)


@dataclass(frozen=True, slots=True)
class Contestant:
    """Who is measured: a strategy on a target."""

    label: str
    target: Target
    strategy: str

    @property
    def origin(self) -> str:
        """``builtin``, ``shipped``, ``grafted`` or ``patched``."""
        return self.target.origin(self.strategy)


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure.

    ``whole``: with the physical release. ``recover``: with a recovery a group. ``segment``: through
    ``free_swa_segment``, as SGLang's caches do from 0.5.20 on; ``free_swa`` where there is none.
    """

    warmup: int = 50
    samples: int = 500
    whole: bool = False
    recover: bool = False
    segment: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < MIN_SAMPLES:
            raise UsageError(f"{self.samples} samples say nothing, {MIN_SAMPLES} are the least")


class Sample(NamedTuple):
    """The time of one group, in nanoseconds. ``gpu``: None where there is no GPU."""

    wall: int
    gpu: int | None = None


NOT_YET = Sample(0)


@dataclass(frozen=True, slots=True)
class Step:
    """One round. ``samples``: of each contestant, last the baseline's second one.

    ``audits``: what the audit says of each contestant's group. ``counted``: not a warm-up.
    ``done`` and ``total``: rounds, over all cases.
    """

    shape: Shape
    audits: tuple[str, ...]
    samples: tuple[Sample, ...]
    counted: bool
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Timing:
    """A median, in microseconds, and its ratio to the baseline's with a 95 % interval."""

    us: float
    ratio: float
    low: float
    high: float

    @property
    def noise(self) -> float:
        """Of the baseline against itself: the largest difference that may be there, as a part."""
        return max(abs(self.low - 1), abs(self.high - 1))

    def verdict(self, noise: float) -> str:
        """``within noise``, or the difference in per cent."""
        if self.low <= 1 + noise and self.high >= 1 - noise:
            return "within noise"
        return f"{self.ratio - 1:+.1%}".replace("%", " %")


@dataclass(frozen=True, slots=True)
class Result:
    """One case, measured. ``audits``: a verdict for each contestant.

    ``wall``, ``gpu``: for each contestant, and last for the baseline's second self.
    """

    shape: Shape
    samples: int
    audits: tuple[str, ...]
    wall: tuple[Timing, ...]
    gpu: tuple[Timing, ...] | None


class Clock(Protocol):
    """Measures one piece of work."""

    def measure(self, work: Callable[[], None]) -> Sample:
        """Run ``work`` to its end, on the device too, and return what it took."""


class HostClock:
    """Wall time where everything runs on the CPU."""

    def measure(self, work: Callable[[], None]) -> Sample:
        """Run ``work`` between two looks at the clock."""
        start = time.perf_counter_ns()
        work()
        return Sample(time.perf_counter_ns() - start)


class CudaClock:
    """GPU time by two events on the current stream, wall time until the device is done.

    ``cuda``: ``torch.cuda``, or what stands in for it.
    """

    def __init__(self, device: str, cuda: Any = torch.cuda) -> None:
        self.device = device
        self.cuda = cuda
        with cuda.device(device):
            self.start = cuda.Event(enable_timing=True)
            self.end = cuda.Event(enable_timing=True)

    def measure(self, work: Callable[[], None]) -> Sample:
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
    return CudaClock(device) if device.startswith("cuda") else HostClock()


def shapes(
    page_sizes: Sequence[int] | None, calls: Sequence[int] | None, pages: Sequence[int] | None
) -> tuple[Shape, ...]:
    """Return the published cases or, if anything is asked for, every combination.

    What is not asked for is then 256 and 1 slots a page, 1, 8 and 64 calls, 1 page a call. Raises
    ``UsageError`` for a size over the limits.
    """
    if not (page_sizes or calls or pages):
        return PUBLISHED
    asked = product(page_sizes or (256, 1), calls or (1, 8, 64), pages or (1,))
    chosen = tuple(dict.fromkeys(Shape(*numbers) for numbers in asked))
    for shape in chosen:
        if shape.calls > MAX_STEPS:
            raise UsageError(f"{shape.calls} calls: at most {MAX_STEPS} in a group")
        check_page_size(shape.page_size)
        if shape.sizes.full_pages * shape.page_size > MAX_SLOTS:
            raise UsageError(
                f"{shape.calls} calls of {shape.pages} pages of {shape.page_size} slots are over "
                f"the limit of {MAX_SLOTS} slots a pool"
            )
    return chosen


def contestants(
    baseline: str,
    candidates: Sequence[str] | None,
    on: Callable[[], Target],
    open_: Callable[[str], Target],
    open_candidate: Callable[[str], Target],
) -> tuple[Contestant, ...]:
    """Return the baseline, then the candidates.

    A strategy's name means that strategy on ``on()``; any other is a target, as shipped or, for
    candidates, as ``open_candidate`` patches it. A strategy without candidates is held against the
    others that batch. Raises ``UsageError`` for a name that is neither, and for one that is there
    already.
    """
    found = [_contestant(baseline, on, open_)]
    if not candidates:
        if found[0].strategy == SHIPPED:
            raise UsageError(f"{baseline} against what? name it with --candidate")
        names = (s.name for s in STRATEGIES.values() if s.batches)
        candidates = [name for name in names if name != found[0].strategy]
    found += [_contestant(name, on, open_candidate) for name in candidates]
    asked = (baseline, *candidates)
    labels = [one.label for one in found]
    for i, one in enumerate(found):
        if labels.count(one.label) > 1:  # two checkouts of one version: call them what they asked
            found[i] = Contestant(asked[i], one.target, one.strategy)
            if one.strategy != SHIPPED or asked.count(asked[i]) > 1:
                raise UsageError(
                    f"{asked[i]} is named twice; the A/A row measures the baseline against itself"
                )
    return tuple(found)


def _contestant(name: str, on: Callable[[], Target], open_: Callable[[str], Target]) -> Contestant:
    if name in STRATEGY_NAMES:
        strategy, target = strategy_of(name), on()
        return Contestant(_short(target) if strategy == SHIPPED else strategy, target, strategy)
    try:
        target = open_(name)
    except UsageError:
        if difflib.get_close_matches(name, STRATEGY_NAMES):
            raise UsageError(unknown("strategy", name, STRATEGY_NAMES)) from None
        raise
    if SHIPPED not in target.strategies():
        raise UsageError(f"{name} ships no strategy of its own; name {', '.join(STRATEGIES)}")
    return Contestant(_short(target), target, SHIPPED)


def _short(target: Target) -> str:
    short = target.name.removeprefix("sglang ")
    return short if short[:1].isdigit() else target.name


class Stand:
    """One contestant at the start line: an allocator in the state before a group.

    ``group()`` is the work to be timed; ``reset()`` puts the state back.
    """

    def __init__(self, contestant: Contestant, shape: Shape, settings: Settings) -> None:
        player = _ready(contestant, shape)
        self.driver = cast(Driver, player.allocator)
        self.free_swa: Callable[[Tensor], None] = (
            self.driver.free_swa_segment if settings.segment else self.driver.allocator.free_swa
        )
        self.freed = [player.slots[_node(i)] for i in range(shape.calls)]
        self.source = player.slots[SOURCE] if settings.recover else None
        if not settings.whole:
            for pool in (self.driver.full_pool, self.driver.swa_pool):
                _leave_out_releases(pool)
        self.attributes, self.tensors = _save(self.driver)
        if not settings.whole:
            self._check_left_out(contestant.label)

    def group(self) -> None:
        """One free group."""
        allocator, free_swa = self.driver.allocator, self.free_swa
        allocator.free_group_begin()
        for full in self.freed:
            free_swa(full)
        if self.source is not None:
            self.driver.point(self.freed[0], self.driver.translate(self.source))
            self.driver.clear_mapping(self.source)
            self.driver.free_full_pool(self.source)
        allocator.free_group_end()

    def reset(self) -> None:
        """Put back every attribute, and what is in the tensors."""
        for part, name, value in self.attributes:
            setattr(part, name, list(value) if isinstance(value, list) else value)
        for tensor, content in self.tensors:
            tensor.copy_(content)

    def _check_left_out(self, label: str) -> None:
        free = len(self.driver.state().swa_free)
        self.group()
        if len(self.driver.state().swa_free) != free:
            raise UsageError(f"{label} has a way of its own to release pages; measure with --whole")
        self.reset()


def run(
    contestants: Sequence[Contestant], shapes: Sequence[Shape], settings: Settings, clock: Clock
) -> Iterator[Step]:
    """Measure case after case, and yield every round, those that warm up too.

    In a round each contestant has one turn, the baseline two, in random order; all get new
    allocators every ``BLOCK`` rounds. Garbage collection is off and torch uses one thread while
    this runs. Raises ``UsageError`` for a contestant that cannot be measured.
    """
    rounds = settings.warmup + settings.samples
    order = list(range(len(contestants) + 1))
    shuffle = random.Random(settings.seed).shuffle
    with _quiet():
        for number, shape in enumerate(shapes):
            _check_room(shape, len(order), contestants[0].target.device)
            audits = tuple(judge(one, shape, settings) for one in contestants)
            stands: list[Stand] = []
            for turn in range(rounds):
                shuffle(order)
                if turn % BLOCK == 0:
                    stands.clear()
                    stands = _line_up(contestants, shape, settings, order)
                samples = [NOT_YET] * len(stands)
                for i in order:
                    stands[i].reset()
                    samples[i] = clock.measure(stands[i].group)
                yield Step(
                    shape,
                    audits,
                    tuple(samples),
                    counted=turn >= settings.warmup,
                    done=number * rounds + turn + 1,
                    total=len(shapes) * rounds,
                )


def _check_room(shape: Shape, stands: int, device: str) -> None:
    """Raise ``UsageError`` if the mappings and their copies are over the device's free memory."""
    needed = 3 * stands * 8 * shape.sizes.full_pages * shape.page_size  # bytes
    free = free_memory(device)
    if free is not None and needed > free:
        raise UsageError(
            f"{shape}: takes {needed >> 30} GiB, {free >> 30} are free on {device}; "
            f"ask for fewer pages"
        )


def _line_up(
    contestants: Sequence[Contestant], shape: Shape, settings: Settings, order: Sequence[int]
) -> list[Stand]:
    """Return a stand for each contestant and one more for the first, made in ``order``, run in."""
    lined = (*contestants, contestants[0])
    stands = {}
    for i in order:
        with _explained(lined[i], shape):
            stands[i] = Stand(lined[i], shape, settings)
            for _ in range(RUN_IN):
                stands[i].group()
                stands[i].reset()
    return [stands[i] for i in range(len(lined))]


def judge(contestant: Contestant, shape: Shape, settings: Settings) -> str:
    """Return the audit's verdict on one whole group: a time is worth nothing if pages are lost.

    Raises ``UsageError`` if the allocator raises.
    """
    with _explained(contestant, shape):
        player = _ready(contestant, shape)
        for op in _group_ops(shape, settings):
            player.play(op)
    return audit(player.allocator, player.ledger).verdict


def results(steps: Iterable[Step], seed: int) -> tuple[Result, ...]:
    """Return figures for every case of which there are ``MIN_SAMPLES`` rounds or more."""
    by_shape: dict[Shape, list[Step]] = {}
    for step in steps:
        if step.counted:
            by_shape.setdefault(step.shape, []).append(step)
    return tuple(
        _result(shape, same, seed) for shape, same in by_shape.items() if len(same) >= MIN_SAMPLES
    )


def _result(shape: Shape, steps: Sequence[Step], seed: int) -> Result:
    def times(read: Callable[[Sample], int | None]) -> Tensor:
        table = [[read(sample) for sample in step.samples] for step in steps]
        return torch.tensor(table, dtype=torch.float64).T / 1000  # to microseconds

    on_gpu = steps[0].samples[0].gpu is not None
    return Result(
        shape,
        len(steps),
        steps[0].audits,
        compare(times(lambda sample: sample.wall), seed),
        compare(times(lambda sample: sample.gpu), seed) if on_gpu else None,
    )


def compare(times: Tensor, seed: int) -> tuple[Timing, ...]:
    """Compare medians. ``times``: float64[contestants, rounds], microseconds, baseline first.

    The intervals are bootstrapped, 95 %, by drawing whole rounds: contestants that stood side by
    side in a slow moment stay side by side.
    """
    count, rounds = times.shape
    generator = torch.Generator().manual_seed(seed)
    drawn = times.new_empty(count, RESAMPLES)
    step = max(1, CHUNK // rounds)
    for start in range(0, RESAMPLES, step):
        size = (min(step, RESAMPLES - start), rounds)
        chosen = torch.randint(rounds, size, generator=generator)
        for i in range(count):
            drawn[i, start : start + step] = times[i][chosen].median(dim=1).values
    medians = times.median(dim=1).values
    bounds = torch.quantile(drawn / drawn[0], times.new_tensor([0.025, 0.975]), dim=1)
    return tuple(
        Timing(median, median / medians[0].item(), low, high)
        for median, low, high in zip(medians.tolist(), *bounds.tolist(), strict=True)
    )


def _ready(contestant: Contestant, shape: Shape) -> Player:
    """Return a player with everything allocated, and a node to recover from."""
    player = Player(contestant.target.make(contestant.strategy, shape.sizes))
    for name in (SOURCE, *(_node(i) for i in range(shape.calls))):
        player.play(ops.Alloc(name, shape.pages))
    return player


def _group_ops(shape: Shape, settings: Settings) -> Iterator[Op]:
    free = ops.FreeSwaSegment if settings.segment else ops.FreeSwa
    yield ops.Group("begin")
    for i in range(shape.calls):
        yield free(_node(i))
    if settings.recover:
        yield ops.Recover(_node(0), SOURCE)
    yield ops.Group("end")


def _node(i: int) -> str:
    return f"node {i}"


def _leave_out_releases(pool: Any) -> None:
    for name in RELEASES:
        if hasattr(pool, name):
            setattr(pool, name, _nothing)


def _nothing(*_args: object, **_kwargs: object) -> None:
    """Stand in for a physical release."""


def _save(driver: Driver) -> tuple[list[tuple[object, str, object]], list[tuple[Tensor, Tensor]]]:
    """Return the allocator's state: (owner, name, value) of attributes, (tensor, its copy)."""
    attributes: list[tuple[object, str, object]] = []
    tensors: list[tuple[Tensor, Tensor]] = []
    for part in driver.parts():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                tensors.append((plain(value), plain(value).clone()))
            if value is None or isinstance(value, (bool, int, float, str, list, Tensor)):
                attributes.append((part, name, list(value) if isinstance(value, list) else value))
    return attributes, tensors


@contextmanager
def _quiet() -> Iterator[None]:
    """No garbage collection, and one thread: what is timed is small."""
    collecting, threads = gc.isenabled(), torch.get_num_threads()
    gc.collect()
    gc.disable()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()


@contextmanager
def _explained(contestant: Contestant, shape: Shape) -> Iterator[None]:
    """Turn whatever an allocator raises, or a device that is full, into one line."""
    try:
        yield
    except SwaleakError:
        raise
    except RAISED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"{contestant.label} cannot be measured ({shape}): {reason}") from None
