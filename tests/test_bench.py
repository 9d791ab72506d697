"""`swaleak bench`: what is measured, in what state, and what the figures say."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import MethodType
from typing import Any, cast

import pytest
import torch

from swaleak.allocator.hybrid import HybridAllocator
from swaleak.allocator.strategies import STRATEGIES
from swaleak.benchmark import measure
from swaleak.benchmark.measure import (
    Case,
    Contestant,
    CudaClock,
    Round,
    Sample,
    Settings,
    cases,
    clock_for,
    host_clock,
    judge,
    run,
)
from swaleak.benchmark.statistics import Result, Timing, compare
from swaleak.benchmark.statistics import results as results_of
from swaleak.errors import UsageError
from swaleak.report.bench import bench_report
from swaleak.report.render import as_json, as_markdown
from swaleak.targets.open import Builtin, open_target
from tests.conftest import USER_CLASS, Answer, Cli, wheel

BUILTIN = Builtin("cpu")
ALL = tuple(Contestant(name, BUILTIN, name) for name in STRATEGIES)
QUICK = Settings(warmup=0, samples=20)


class FakeClock:
    """Runs the work and says it took ``costs[strategy]`` nanoseconds; can stop in the middle."""

    def __init__(self, costs: dict[str, int], gpu: bool = False, stop_after: int = -1) -> None:
        self.costs, self.gpu, self.stop_after = costs, gpu, stop_after
        self.seen: list[tuple[Any, ...]] = []

    def __call__(self, work: Callable[[], None]) -> Sample:
        if len(self.seen) == self.stop_after:
            raise KeyboardInterrupt
        group: Any = cast(MethodType, work).__self__
        name = group.driver.allocator.strategy.name
        before = facts(group)
        work()
        self.seen.append((name, *before, *facts(group)))
        cost = self.costs.get(name, 1000)
        return Sample(cost, 2 * cost if self.gpu else None)


def facts(group: Any) -> tuple[tuple[int, ...], int]:
    """Full pages that have a peer, and the length of the SWA free list."""
    state = group.driver.state()
    slots = (state.mapping > 0).nonzero().reshape(-1)
    return tuple(torch.unique(slots // state.page_size).tolist()), len(state.swa_free)


PUBLISHED = [
    (256, 1, 1),
    (256, 8, 1),
    (256, 8, 16),
    (256, 64, 1),
    (1, 1, 1),
    (1, 8, 1),
    (1, 64, 1),
]


@pytest.mark.parametrize(
    ("asked", "shapes"),
    [
        ((None, None, None), PUBLISHED),
        (([4], None, None), [(4, 1, 1), (4, 8, 1), (4, 64, 1)]),
        ((None, [2], None), [(256, 2, 1), (1, 2, 1)]),
        (([4, 4], [2], [3, 5]), [(4, 2, 3), (4, 2, 5)]),
    ],
)
@pytest.mark.parametrize(
    ("recover", "recoveries"), [(None, [False, True]), (False, [False]), (True, [True])]
)
def test_which_cases_are_measured(
    asked: tuple[Any, Any, Any],
    shapes: list[tuple[int, int, int]],
    recover: bool | None,
    recoveries: list[bool],
) -> None:
    expected = tuple(Case(*shape, recovery) for shape in shapes for recovery in recoveries)
    assert cases(*asked, recover) == expected


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (([5000], None, None), "page size 5000: must be from 1 to 4096"),
        (
            ([4096], [64], [100000]),
            "page size 4096, calls 64, pages 100000: over the limit of 2147483648 slots per pool",
        ),
    ],
)
def test_sizes_over_the_limits_are_refused(asked: tuple[Any, Any, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        cases(*asked, False)


def test_a_case_that_no_memory_holds_is_refused_before_it_is_tried() -> None:
    with pytest.raises(UsageError, match="ask for fewer pages"):
        next(run(ALL, [Case(4096, 64, 4000)], QUICK, FakeClock({})))


def open_on_cpu(name: str) -> Any:
    return open_target(name, "cpu")


def contestants(baseline: str, *candidates: str) -> list[tuple[str, str]]:
    chosen = measure.contestants(baseline, candidates, lambda: BUILTIN, open_on_cpu, open_on_cpu)
    return [(one.label, one.strategy) for one in chosen]


@pytest.mark.parametrize(
    ("named", "meant"),
    [
        (("deferred",), ["deferred", "enqueue", "barrier"]),
        (("barrier-snapshot",), ["barrier", "deferred", "enqueue"]),
        (("eager", "enqueue-snapshot"), ["eager", "enqueue"]),
    ],
)
def test_who_is_measured(named: tuple[str, ...], meant: list[str]) -> None:
    assert contestants(*named) == [(name, name) for name in meant]


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (("deferred", "barier"), "unknown strategy 'barier'; did you mean 'barrier'?"),
        (("deferred", "nobody"), "unknown target 'nobody'"),
        (("deferred", "deferred-resolve"), "deferred-resolve is given twice; the A/A row"),
        (("builtin", "barrier"), "builtin ships no strategy of its own; use one of eager, defer"),
        (("shipped", "barrier"), "builtin ships no strategy of its own"),
    ],
)
def test_names_that_mean_nothing_are_refused(named: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("?", r"\?")):
        contestants(*named)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(
    ("whole", "recover", "mapped_after", "freed"),
    [
        (False, False, (1, 2), 0),
        (True, False, (1, 2), 6),
        (False, True, (3, 4), 0),
        (True, True, (3, 4), 6),
    ],
)
def test_every_group_starts_from_the_same_state(
    page_size: int, whole: bool, recover: bool, mapped_after: tuple[int, ...], freed: int
) -> None:
    """Pages 1 and 2 are there to recover from; three calls free two each; 8 more are free."""
    clock = FakeClock({})
    fixed = tuple(one for one in ALL if one.label != "deferred")  # which frees others' pages
    settings = Settings(warmup=0, samples=60, whole=whole)
    list(run(fixed, [Case(page_size, 3, 2, recover)], settings, clock))
    before = tuple(range(1, 9)), 8
    expected = {(one.label, *before, mapped_after, 8 + freed) for one in fixed}
    assert set(clock.seen) == expected


def test_a_round_gives_each_a_turn_and_the_baseline_two_in_random_order() -> None:
    clock = FakeClock({})
    list(run(ALL, [Case(1, 2, 1)], QUICK, clock))
    names = [name for name, *_ in clock.seen]
    rounds = [tuple(names[i : i + 5]) for i in range(0, len(names), 5)]
    everyone = sorted([*STRATEGIES, ALL[0].label])
    assert ([sorted(r) for r in rounds], len(set(rounds)) > 10) == ([everyone] * 20, True)


def test_samples_stand_where_their_contestant_does() -> None:
    costs = {"eager": 4000, "deferred": 1000, "enqueue": 3000, "barrier": 2000}
    shape = Case(4, 2, 1)
    steps = list(run(ALL, [shape], Settings(warmup=2, samples=20), FakeClock(costs)))
    clean = ("clean",) * 4
    samples = tuple(Sample(cost) for cost in (4000, 1000, 3000, 2000, 4000))
    assert steps == [Round(shape, clean, samples, n >= 2, n + 1, 22) for n in range(22)]


def test_nothing_is_collected_while_measuring() -> None:
    during = set()

    def clock(work: Callable[[], None]) -> Sample:
        during.add(gc.isenabled())
        return Sample(1)

    list(run(ALL, [Case(1, 1, 1)], QUICK, clock))
    assert (during, gc.isenabled()) == ({False}, True)


@pytest.mark.parametrize("segment", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(
    ("recover", "verdicts"),
    [(False, ["clean"] * 4), (True, ["clean", "leak", "clean", "clean"])],
)
def test_who_loses_pages_is_found_out(
    page_size: int, recover: bool, verdicts: list[str], segment: bool
) -> None:
    case, settings = Case(page_size, 3, 2, recover), Settings(segment=segment)
    assert [judge(one, case, settings) for one in ALL] == verdicts


def test_releases_that_cannot_be_left_out_are_refused() -> None:
    class Own(HybridAllocator):
        def release(self, swa: torch.Tensor) -> None:
            pool = self.swa_attn_allocator
            pool.free_pages = torch.cat((swa, pool.free_pages))

    class Target(Builtin):
        def make(self, strategy: str, sizes: Any) -> Any:
            driver = super().make(strategy, sizes)
            driver.allocator.__class__ = Own
            return driver

    one = (Contestant("mine", Target("cpu"), "enqueue"),)
    with pytest.raises(
        UsageError, match="mine releases pages past its pool's own methods; use --whole"
    ):
        list(run(one, [Case(1, 1, 1)], QUICK, FakeClock({})))


def test_what_an_allocator_raises_is_one_line() -> None:
    class Target(Builtin):
        def make(self, strategy: str, sizes: Any) -> Any:
            raise RuntimeError("out of\n memory")

    one = (Contestant("mine", Target("cpu"), "enqueue"),)
    said = r"mine cannot be measured \(page size 1, calls 1, pages 1\): out of memory"
    with pytest.raises(UsageError, match=said):
        next(run(one, [Case(1, 1, 1)], QUICK, FakeClock({})))


class FakeCuda:
    """What ``CudaClock`` needs of ``torch.cuda``; writes down what is called."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def device(self, name: str) -> Any:
        return nullcontext()

    def synchronize(self, device: str) -> None:
        self.called.append(f"synchronize {device}")

    def current_stream(self, device: str) -> str:
        return f"stream of {device}"

    def Event(self, enable_timing: bool) -> Any:
        return FakeEvent(self, enable_timing)


class FakeEvent:
    def __init__(self, cuda: FakeCuda, timing: bool) -> None:
        self.cuda, self.timing = cuda, timing

    def record(self, stream: str) -> None:
        self.cuda.called.append(f"record on {stream}")

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.timing and other.timing and self is not other
        return 0.1174  # milliseconds


def test_gpu_time_is_taken_between_two_events_on_an_idle_device() -> None:
    cuda = FakeCuda()
    sample = CudaClock("cuda:1", cuda)(lambda: cuda.called.append("work"))
    assert (cuda.called, sample.gpu, sample.wall > 0) == (
        [
            "synchronize cuda:1",
            "record on stream of cuda:1",
            "work",
            "record on stream of cuda:1",
            "synchronize cuda:1",
        ],
        117_400,
        True,
    )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
def test_a_gpu_is_measured_by_both_clocks() -> None:
    chosen = [Contestant(name, Builtin("cuda"), name) for name in ("deferred", "barrier")]
    steps = run(chosen, [Case(256, 2, 1)], QUICK, clock_for("cuda"))
    (result,) = results_of(steps, seed=0)
    assert {clock: len(times) for clock, times in result.timings.items()} == {"gpu": 3, "wall": 3}


def test_medians_are_compared_with_an_interval() -> None:
    """The third is twice the first, round by round; the second is the first, shuffled."""
    generator = torch.Generator().manual_seed(1)
    first = 100 + torch.rand(301, generator=generator, dtype=torch.float64)
    again = first[torch.randperm(301, generator=generator)]
    baseline, double, control = compare(torch.stack((first, 2 * first, again)), seed=0)
    median = first.median().item()
    assert (baseline, double, control.us, control.ratio, control.low < 1 < control.high) == (
        Timing(median, 1, 1, 1),
        Timing(2 * median, 2, 2, 2),
        median,
        1,
        True,
    )


def test_intervals_cover_what_they_should() -> None:
    """Of 100 experiments without a difference, about 95 have none in their interval."""
    generator = torch.Generator().manual_seed(2)
    hits = 0
    for seed in range(100):
        times = 100 + torch.randn((2, 50), generator=generator, dtype=torch.float64)
        _, control = compare(times, seed)
        hits += control.low <= 1 <= control.high
    assert 90 <= hits < 100


@pytest.mark.parametrize(
    ("low", "ratio", "high", "noise", "verdict"),
    [
        (0.99, 1.0, 1.01, 0.0, "within noise"),
        (1.001, 1.002, 1.003, 0.002, "within noise"),
        (1.003, 1.004, 1.005, 0.002, "+0.4 %"),
        (0.95, 0.96, 0.97, 0.01, "-4.0 %"),
        (2.9, 3.0, 3.1, 0.01, "+200.0 %"),
    ],
)
def test_the_verdict_is_plain(
    low: float, ratio: float, high: float, noise: float, verdict: str
) -> None:
    assert Timing(1, ratio, low, high).verdict(noise) == verdict


def test_noise_is_the_largest_difference_that_may_be_there() -> None:
    assert Timing(1, 1, 0.996, 1.002).noise == pytest.approx(0.004)


def test_only_cases_with_samples_enough_become_results() -> None:
    chosen = [Case(1, 1, 1), Case(1, 1, 1, recovery=True)]
    steps = list(run(ALL[:2], chosen, Settings(warmup=3, samples=25), FakeClock({})))
    found = results_of(steps[: 28 + 3 + 19], seed=0), results_of(steps[: 28 + 3 + 20], seed=0)
    assert [[(r.case, r.samples) for r in results] for results in found] == [
        [(chosen[0], 25)],
        [(chosen[0], 25), (chosen[1], 20)],
    ]


def report(gpu: bool) -> Any:
    wall = (Timing(100, 1, 1, 1), Timing(110, 1.1, 1.09, 1.11), Timing(100, 1, 0.999, 1.002))
    events = (Timing(90, 1, 1, 1), Timing(90.1, 1.001, 1, 1.002), Timing(90, 1, 0.998, 1.002))
    timings = {"gpu": events, "wall": wall} if gpu else {"wall": wall}
    results = [
        Result(Case(256, 8, 1), 500, ("clean", "clean"), timings),
        Result(Case(256, 8, 1, recovery=True), 500, ("leak", "clean"), timings),
    ]
    return bench_report((ALL[1], ALL[3]), results, Settings(), "cpu", asked=2)


def test_the_json_says_everything() -> None:
    found = json.loads(as_json(report(gpu=True)))
    without, case = found["cases"]
    assert (without["recovery"], without["strategies"]["deferred"]["audit"]) == (False, "clean")
    assert (found["schema"], found["command"], found["complete"], case) == (
        "swaleak/1",
        "bench",
        True,
        {
            "page_size": 256,
            "calls": 8,
            "pages": 1,
            "recovery": True,
            "samples": 500,
            "strategies": {
                "deferred": {
                    "target": "builtin",
                    "origin": "builtin",
                    "audit": "leak",
                    "wall_us": 100,
                    "gpu_us": 90,
                    "ratio": 1,
                    "low": 1,
                    "high": 1,
                    "verdict": "within noise",
                    "gpu": {"ratio": 1, "low": 1, "high": 1, "verdict": "within noise"},
                },
                "barrier": {
                    "target": "builtin",
                    "origin": "builtin",
                    "audit": "clean",
                    "wall_us": 110,
                    "gpu_us": 90.1,
                    "ratio": 1.1,
                    "low": 1.09,
                    "high": 1.11,
                    "verdict": "+10.0 %",
                    "gpu": {"ratio": 1.001, "low": 1, "high": 1.002, "verdict": "within noise"},
                },
            },
            "a_a": {
                "wall_us": 100,
                "gpu_us": 90,
                "ratio": 1,
                "low": 0.999,
                "high": 1.002,
                "verdict": "within noise",
                "gpu": {"ratio": 1, "low": 0.998, "high": 1.002, "verdict": "within noise"},
            },
            "noise": pytest.approx(0.002),
            "gpu_noise": pytest.approx(0.002),
        },
    )


def test_without_a_gpu_there_is_no_gpu_time() -> None:
    case = json.loads(as_json(report(gpu=False)))["cases"][0]
    figures = case["gpu_noise"], case["a_a"]["gpu_us"], case["a_a"]["gpu"]
    assert (figures, "GPU time" in as_markdown(report(gpu=False))) == ((None,) * 3, False)


@pytest.mark.parametrize(
    "line",
    [
        "**GPU time, us per group**",
        "**wall time, us per group**",
        "| size | calls | pages | recovery | strategy | median | 95 % interval | verdict |",
        "| 256 | 8 | 1 | no | deferred | 100.0 |  | baseline |",
        "| 256 | 8 | 1 | yes | deferred | 100.0 |  | baseline, leak |",
        "|  |  |  |  | barrier | 110.0 | +9.0..+11.0 % | +10.0 % |",
        "|  |  |  |  | A/A | 100.0 | -0.1..+0.2 % | within noise |",
        "- noise: A/A, the baseline against itself, differs by at most 0.2 %",
        "- INCORRECT: deferred loses pages in groups with a recovery; its timings there are not "
        "comparable",
        "- 2 of 2 cases, 500 samples each, 50 warm-ups, seed 0",
        "- timed: one free group, without the physical release",
    ],
)
def test_the_markdown_can_be_pasted(line: str) -> None:
    assert line in as_markdown(report(gpu=True)).splitlines()


BENCH = ("bench", "--on", "builtin")


def test_the_command_measures(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    costs = {"deferred": 1000, "enqueue": 3000, "barrier": 1000}
    monkeypatch.setattr(measure, "clock_for", lambda device: FakeClock(costs))
    options = f"--page-size 4 --calls 2 --samples 20 --format json -o {tmp_path}/bench.md"
    answer = cli(*BENCH, *options.split())
    verdicts = {
        (case["recovery"], name): (one["verdict"], one["audit"])
        for case in json.loads(answer.out)["cases"]
        for name, one in case["strategies"].items()
    }
    assert (answer.code, verdicts, "200.0 %" in (tmp_path / "bench.md").read_text()) == (
        0,
        {
            (False, "deferred"): ("within noise", "clean"),
            (False, "enqueue"): ("+200.0 %", "clean"),
            (False, "barrier"): ("within noise", "clean"),
            (True, "deferred"): ("within noise", "leak"),
            (True, "enqueue"): ("+200.0 %", "clean"),
            (True, "barrier"): ("within noise", "clean"),
        },
        True,
    )


@pytest.mark.parametrize(
    ("options", "measured"),
    [
        ("", [(*shape, recovery) for shape in PUBLISHED for recovery in (False, True)]),
        ("--no-recover", [(*shape, False) for shape in PUBLISHED]),
        ("--recover", [(*shape, True) for shape in PUBLISHED]),
    ],
)
def test_the_published_cases_are_measured_without_and_with_a_recovery(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, options: str, measured: list[tuple[Any, ...]]
) -> None:
    """By default ``barrier`` has a mapping write to work for in half of the groups."""
    monkeypatch.setattr(measure, "clock_for", lambda device: FakeClock({}))
    options = f"{options} --samples 20 --warmup 0 --format json"
    answer = cli(*BENCH, *options.split())
    found = json.loads(answer.out)["cases"]
    keys = ("page_size", "calls", "pages", "recovery")
    assert [tuple(case[key] for key in keys) for case in found] == measured
    leaks = [case["strategies"]["deferred"]["audit"] == "leak" for case in found]
    assert (answer.code, leaks) == (0, [recovery for *_, recovery in measured])


def test_a_strategy_that_loses_pages_in_the_last_case_only_is_marked() -> None:
    timing = Timing(1, 1, 1, 1)
    results = [
        Result(Case(256, 1, 1), 20, ("clean", "clean"), {"wall": (timing,) * 3}),
        Result(Case(1, 1, 1), 20, ("clean", "corrupt"), {"wall": (timing,) * 3}),
    ]
    report = bench_report(ALL[1:3], results, Settings(), "cpu", asked=2)
    lines = as_markdown(report).splitlines()
    assert [line for line in lines if "INCORRECT" in line] == [
        "- INCORRECT: enqueue corrupts pages in groups without a recovery; its timings there are "
        "not comparable"
    ]


def test_the_table_fits_80_characters(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {"deferred": 100_000, "enqueue": 1_234_567, "barrier": 2_000_000}
    monkeypatch.setattr(measure, "clock_for", lambda device: FakeClock(costs))
    options = "--page-size 4096 --calls 64 --samples 20"
    answer = cli(*BENCH, *options.split())
    [row] = [line.split() for line in answer.out.splitlines() if "baseline, leak" in line]
    assert row == ["4096", "64", "1", "yes", "deferred", "100.0", "baseline,", "leak"]


def test_a_module_that_sets_a_default_device_is_measured(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = "import torch\ntorch.set_default_device('meta')\n" + USER_CLASS
    (tmp_path / "elsewhere.py").write_text(code.format(strategy="Barrier"))
    monkeypatch.syspath_prepend(str(tmp_path))
    options = "--candidate elsewhere:Mine --page-size 4 --calls 2 --samples 20 --format json"
    try:
        answer = cli(*BENCH, *options.split())
    finally:
        torch.set_default_device(None)
    audits = [
        case["strategies"]["elsewhere:Mine"]["audit"] for case in json.loads(answer.out)["cases"]
    ]
    assert (answer.code, audits) == (0, ["clean", "clean"])


def test_an_interrupt_prints_what_was_measured(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shapes of 20 rounds with four turns each; stopped in the second one's 12th round."""
    monkeypatch.setattr(measure, "clock_for", lambda device: FakeClock({}, stop_after=4 * 32))
    options = "--page-size 4 --calls 1 --calls 2 --no-recover --samples 20 --warmup 0 -f json"
    answer = cli(*BENCH, *options.split())
    found = json.loads(answer.out)
    assert (answer.code, answer.err) == (130, "")
    assert (found["complete"], [case["calls"] for case in found["cases"]]) == (False, [1])


def test_an_interrupt_before_anything_was_measured_prints_no_report(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "clock_for", lambda device: FakeClock({}, stop_after=5))
    assert cli(*BENCH, "--samples", 20) == Answer(
        130, "", "swaleak: interrupted: the first case of deferred, enqueue, barrier\n"
    )


@pytest.mark.parametrize(
    "options", ["--samples 3", "--calls 0", "--calls 100001", "--baseline nobody", "-o x.txt"]
)
def test_bad_usage_is_one_line_and_2(cli: Cli, options: str) -> None:
    answer = cli(*BENCH, *options.split())
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1)


class FakeOwner:
    """Writes down what a strategy asks of its allocator."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[int]]] = []

    def resolve(self, full: torch.Tensor) -> torch.Tensor:
        self.asked.append(("resolve", full.tolist()))
        return full + 100

    def release(self, swa: torch.Tensor) -> None:
        self.asked.append(("release", swa.tolist()))


@pytest.mark.parametrize(
    ("strategy", "asked"),
    [
        ("deferred", [("resolve", [1, 2, 3]), ("release", [101, 102, 103])]),
        ("barrier", [("resolve", [1, 2, 3]), ("release", [101, 102, 103])]),
        (
            "enqueue",
            [("resolve", [1, 2]), ("resolve", [3]), ("release", [101, 102, 103])],
        ),
    ],
)
def test_what_a_group_without_a_write_asks_for(
    strategy: str, asked: list[tuple[str, list[int]]]
) -> None:
    owner = FakeOwner()
    one = STRATEGIES[strategy](owner)
    one.on_free(torch.tensor([1, 2]))
    one.on_free(torch.tensor([3]))
    one.on_flush()
    one.on_flush()
    assert owner.asked == asked


def test_a_barrier_resolves_before_each_write_and_releases_once() -> None:
    owner = FakeOwner()
    one = STRATEGIES["barrier"](owner)
    for slot in (1, 2):
        one.on_free(torch.tensor([slot]))
        one.before_write()
        one.before_write()
    one.on_free(torch.tensor([3]))
    one.on_flush()
    assert owner.asked == [
        ("resolve", [1]),
        ("resolve", [2]),
        ("resolve", [3]),
        ("release", [101, 102, 103]),
    ]


@pytest.mark.parametrize("page_size", [1, 4, 6])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("grouped", [False, True])
def test_slots_in_any_order_and_twice_free_each_page_once(
    page_size: int, strategy: str, grouped: bool
) -> None:
    """Three pages of four, slots mixed up and one part named twice; the fourth is left alone.

    The pools end in slots that make no whole page.
    """
    slots = 9 * page_size - 1 if page_size > 1 else 8
    allocator = HybridAllocator(slots, slots, page_size, "cpu", STRATEGIES[strategy])
    full, swa = (
        pool.alloc(4 * page_size)
        for pool in (allocator.full_attn_allocator, allocator.swa_attn_allocator)
    )
    assert full is not None and swa is not None
    allocator.set_full_to_swa_mapping(full, swa)
    mixed = full[: 3 * page_size][torch.randperm(3 * page_size)]
    if grouped:
        allocator.free_group_begin()
    allocator.free_swa(torch.cat((mixed, mixed[: page_size + 1])))
    if grouped:
        allocator.free_swa(mixed[:1])
        allocator.free_group_end()
    free = allocator.swa_attn_allocator.free_pages
    mapping = allocator.full_to_swa_index_mapping.tolist()
    assert (sorted(free.tolist()), [s for s in mapping if s > 0]) == (
        [1, 2, 3, 5, 6, 7, 8],
        swa[3 * page_size :].tolist(),
    )


@pytest.mark.wheels
@pytest.mark.parametrize("segment", [False, True])
@pytest.mark.parametrize(
    ("version", "recover", "verdict"),
    [
        ("0.5.18", False, "clean"),
        ("0.5.18", True, "leak"),
        ("0.5.19", True, "clean"),
        ("0.5.23", True, "clean"),
    ],
)
def test_sglangs_own_code_is_measured_and_judged(
    version: str, recover: bool, verdict: str, segment: bool
) -> None:
    chosen = measure.contestants(
        str(wheel(version)), ["barrier"], lambda: BUILTIN, open_on_cpu, open_on_cpu
    )
    settings = Settings(warmup=0, samples=30, segment=segment)
    measured = [Case(1, 2, 1, recover), Case(4, 2, 2, recover)]
    steps = list(run(chosen, measured, settings, host_clock))
    results = results_of(steps, seed=0)
    labels = [one.label for one in chosen]
    assert (labels, [result.verdicts for result in results]) == (
        [version, "barrier"],
        [(verdict, "clean")] * 2,
    )
