"""Recording, auditing, following and shrinking, on the built-in model: no SGLang needed."""

from __future__ import annotations

import gc
import json
import logging
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swaleak.allocator.hybrid import HybridAllocator
from swaleak.allocator.strategies import STRATEGIES
from swaleak.checker.case import run_case
from swaleak.checker.run import Execution
from swaleak.errors import ScriptError, UsageError
from swaleak.live import plugin
from swaleak.live.auditor import Gauge, Release
from swaleak.live.instrument import watched
from swaleak.scenario import catalogue as scenarios
from swaleak.scenario import steps
from swaleak.scenario.calls import GroupEnd, Header
from swaleak.scenario.steps import Step
from swaleak.scenario.toml import parse, to_toml
from swaleak.targets.driver import Driver, Sizes, graft, shipped_strategy
from swaleak.targets.open import Builtin, kv_pool_for
from swaleak.trace.format import TraceReader
from swaleak.trace.replay import TraceRun, run_trace
from swaleak.trace.to_scenario import reduce, sizes_of
from tests.conftest import sglang
from tests.request_table import TableDriver

PAGES = 16
PRODUCTION = [s.name for s in scenarios.catalogue() if s.reach == "production" and not s.caches]


def follow(trace, make, until=lambda _: False) -> TraceRun:
    return run_trace(trace, lambda header: make(sizes_of(header)), until)


def alloc(driver: Driver, pages: int = 1) -> Tensor:
    slots = pages * driver.page_size
    full = driver.alloc(slots) if driver.page_size == 1 else driver.alloc_pages(slots)
    assert full is not None
    return full


def watched_driver(
    settings: str, strategy: str, page_size: int, view=None, release: Release | None = None
) -> Driver:
    """``view``: how slots are passed, see ``tests/request_table.py``."""
    asked = plugin.read_settings(settings)
    class_ = plugin.watched_by(HybridAllocator, asked, asked.fix, release)
    slots = PAGES * page_size
    allocator = class_(slots, slots, page_size, "cpu", STRATEGIES[strategy])
    return TableDriver(allocator, view) if view else Driver(allocator)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


def play(driver: Driver, script: tuple[Step, ...]) -> list[tuple[int, int]]:
    """Make the steps; SWA pages in use and mapped after each group, counted in full."""
    execution, counts = Execution(driver), []
    for step in script:
        execution.step(step)
        if step == steps.Group("end"):
            state = driver.state()
            mapped = state.mapping[state.mapping > 0] // state.page_size
            counts.append((state.swa_pages - len(state.swa_free), len(torch.unique(mapped))))
    return counts


def recorded(tmp_path: Path, name: str, strategy: str, page_size: int) -> tuple[Path, list]:
    driver = watched_driver(f"record:{tmp_path}/t.jsonl", strategy, page_size)
    counts = play(driver, scenarios.load(name).steps)
    (path,) = tmp_path.glob("t.*.jsonl")
    return path, counts


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("strategy", ["deferred", "enqueue", "barrier"])
@pytest.mark.parametrize("name", PRODUCTION)
def test_a_trace_replays_to_the_same_counts(name, strategy, page_size, tmp_path):
    if page_size not in scenarios.load(name).page_sizes:
        pytest.skip(f"{name} has no page size {page_size}")
    path, counts = recorded(tmp_path, name, strategy, page_size)
    target = Builtin("cpu")
    ends = []
    followed = follow(
        TraceReader(path),
        lambda sizes: target.make(strategy, sizes),
        lambda seen: ends.append((seen.last.physical, seen.last.mapped)) or False,
    )
    leaks = name == "tombstone-recovery" and strategy == "deferred"
    assert (ends, followed.differ, followed.verdict) == (counts, 0, "leak" if leaks else "clean")


@pytest.mark.parametrize("other", ["eager", "enqueue", "barrier"])
def test_a_trace_that_leaks_is_clean_under_the_fixes(other, tmp_path):
    path, _ = recorded(tmp_path, "tombstone-recovery", "deferred", 4)
    target = Builtin("cpu")
    followed = follow(TraceReader(path), lambda sizes: target.make(other, sizes))
    assert (followed.verdict, followed.last.physical, followed.last.mapped) == ("clean", 2, 2)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_trace_shrinks_to_a_scenario_that_still_leaks(page_size, tmp_path):
    path, _ = recorded(tmp_path, "tombstone-recovery", "deferred", page_size)
    target = Builtin("cpu")
    small = reduce(path, target, "deferred").scenario
    again = parse(to_toml(small), name=small.name, source="")
    verdicts = [run_case(again, target, name, page_size).verdict for name in STRATEGIES]
    assert (again.steps, len(again.steps) <= 8, verdicts) == (
        small.steps,
        True,
        ["clean", "leak", "clean", "clean"],
    )


@pytest.mark.wheels
def test_what_was_shrunk_on_a_release_is_as_declared_there(tmp_path):
    path, _ = recorded(tmp_path, "tombstone-recovery", "deferred", 4)
    target = sglang("0.5.18")
    small = reduce(path, target, "deferred").scenario
    strategies = ("shipped", *STRATEGIES)
    again = [run_case(small, target, strategy, 4) for strategy in strategies]
    assert [(case.verdict, case.as_declared) for case in again] == [
        ("leak", True),
        ("clean", True),
        ("leak", True),
        ("clean", True),
        ("clean", True),
    ]


def test_shrinking_a_clean_trace_is_refused(tmp_path):
    path, _ = recorded(tmp_path, "steady-group", "deferred", 4)
    with pytest.raises(UsageError, match="nothing to shrink"):
        reduce(path, Builtin("cpu"), "deferred")


HEADER = {"schema": "swaleak-trace/1", "page_size": 4, "full_pages": 8, "swa_pages": 8}
ALLOC = {"op": "alloc_both", "full": 1, "swa": 1, "n": 4}
BROKEN = [
    ("", "holds no complete line"),
    ("nonsense\n", "line 1: not a line of JSON"),
    ('{"op":"begin"}\n', "line 1: not a swaleak-trace/1 header"),
    (
        json.dumps(HEADER | {"page_size": 0}) + "\n",
        "line 1: header: page_size: expected a whole number >= 1",
    ),
    (
        json.dumps(HEADER | {"page_size": 8192}) + "\n",
        "line 1: header: page_size: expected a whole number <= 4096",
    ),
    (json.dumps(HEADER | {"more": 1}) + "\n", "line 1: header: object contains unknown field more"),
    (json.dumps(HEADER) + '\n{"op":"fly"}\n', "line 2: unknown operation 'fly'"),
    (json.dumps(HEADER) + '\n{"op":"free"}\n', "line 2: free: needs full"),
    (json.dumps(HEADER) + '\n{"op":"free","full":[[1]]}\n', "line 2: free: full"),
    (json.dumps(HEADER) + '\n{"op":"free","full":[[1,4]]}\n', "line 2: nobody holds the slot"),
    ("\n".join(map(json.dumps, (HEADER, ALLOC, ALLOC))) + "\n", "line 3: slot number 1 was handed"),
]


@pytest.mark.parametrize(("text", "reason"), BROKEN, ids=[reason for _, reason in BROKEN])
def test_a_broken_trace_is_one_sentence(text, reason, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    target = Builtin("cpu")
    with pytest.raises(ScriptError, match=reason):
        follow(TraceReader(path), lambda sizes: target.make("barrier", sizes))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("written", ["in a group", "between groups", "before a free", "a view"])
def test_a_write_that_no_call_explains_is_no_verdict(written, strategy, tmp_path):
    driver = watched_driver(f"record:{tmp_path}/t.jsonl", strategy, 4)
    node, other = alloc(driver), alloc(driver)
    if written == "in a group":
        driver.group_begin()
        driver.clear_mapping(node)
        driver.group_end()
    elif written == "before a free":
        driver.clear_mapping(node)
        driver.free_full_pool(other)  # whose own entries are still there
    else:
        mapping = driver.allocator.full_to_swa_index_mapping
        driver.clear_mapping(node) if written == "between groups" else mapping[:-1].fill_(0)
        driver.group_begin()
    driver.allocator.clear()  # writes what it has kept
    (path,) = tmp_path.glob("t.*.jsonl")
    line = 5 if written == "in a group" else 4
    reason = f"line {line}: the trace is incomplete from here on: somebody wrote the mapping past"
    with pytest.raises(ScriptError, match=reason):
        follow(TraceReader(path), lambda sizes: Builtin("cpu").make(strategy, sizes))


def test_calls_that_raise_and_mappings_that_count_no_writes_are_no_unheard_ones(tmp_path):
    driver = watched_driver(f"record:{tmp_path}/t.jsonl", "deferred", 4)
    alloc(driver)
    with pytest.raises(RuntimeError):
        driver.group_end()
    driver.group_begin()
    driver.group_end()
    with torch.inference_mode():
        other = watched_driver(f"record:{tmp_path}/t.jsonl", "deferred", 4)
        alloc(other)
        other.group_begin()
        other.group_end()
    paths = sorted(tmp_path.glob("t.*.jsonl"))
    lines = [path.read_text() for path in paths]
    assert (len(paths), [text.count('"end"') for text in lines], "unheard" in "".join(lines)) == (
        2,
        [1, 1],
        False,
    )


def test_a_torn_last_line_is_left_out(tmp_path):
    path, counts = recorded(tmp_path, "tombstone-recovery", "deferred", 4)
    whole = path.read_text()
    path.write_text(whole + '{"op":"free","full":[[1')
    reader, target = TraceReader(path), Builtin("cpu")
    followed = follow(reader, lambda sizes: target.make("deferred", sizes))
    assert (followed.groups, "is torn" in reader.torn) == (len(counts), True)


def test_a_header_further_down_starts_again(tmp_path):
    driver = watched_driver(f"record:{tmp_path}/t.jsonl", "deferred", 4)
    script = scenarios.load("tombstone-recovery").steps
    play(driver, script)
    driver.allocator.clear()
    play(driver, script)
    (path,) = tmp_path.glob("t.*.jsonl")
    items = list(TraceReader(path))
    target = Builtin("cpu")
    followed = follow(items, lambda sizes: target.make("deferred", sizes))
    headers = sum(isinstance(item, Header) for item in items)
    assert (headers, followed.groups, followed.differ) == (2, 2, 0)


def test_the_auditor_names_the_page_the_calls_and_the_fix(caplog):
    driver = watched_driver("audit", "deferred", 4)
    play(driver, scenarios.load("tombstone-recovery").steps)
    (record,) = errors(caplog)
    parts = (
        "SWA page 2 is lost",
        "(physical 2, mapped 1)",
        "queued by free_swa at ",
        "re-pointed by set_full_to_swa_mapping at ",
        "driver.py:",
        "SWALEAK=fix:barrier",
    )
    assert [part for part in parts if part not in record] == []


@pytest.mark.parametrize("strategy", ["enqueue", "barrier"])
@pytest.mark.parametrize("name", PRODUCTION)
def test_the_auditor_is_silent_about_what_is_right(name, strategy, caplog):
    driver = watched_driver("audit", strategy, 4)
    play(driver, scenarios.load(name).steps)
    assert errors(caplog) == []


def test_the_gauge_counts_what_a_full_look_counts():
    driver = watched_driver("audit", "deferred", 4)
    gauge = Gauge(driver.allocator)
    counts = play(driver, scenarios.load("tombstone-recovery").steps)
    assert [(gauge.look().physical, gauge.mapped())] == counts


def test_a_hook_that_raises_stops_the_watching_and_nothing_else(caplog):
    def connect(_allocator, hooks):
        def broken(*_):
            raise RuntimeError("a bug of ours")

        hooks.add(["free_swa", "full.free"], broken, broken)

    class_ = watched(HybridAllocator, connect)
    driver = Driver(class_(64, 64, 4, "cpu", STRATEGIES["barrier"]))
    counts = play(driver, scenarios.load("tombstone-recovery").steps)
    assert (counts, errors(caplog)) == (
        [(2, 2)],
        ["swaleak: watching failed and has stopped; the server is not affected"],
    )


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_double_free_in_the_same_group_hides_no_leak(page_size, caplog, tmp_path):
    driver = watched_driver(f"audit,record:{tmp_path}/t.jsonl", "deferred", page_size)
    free = driver.state().swa_free
    node, other = alloc(driver), alloc(driver)
    driver.group_begin()
    driver.free_swa(node)
    driver.point(node, driver.translate(other))
    driver.clear_mapping(other)
    driver.free_full_pool(other)
    driver.free_swa(node)
    # the built-in model takes a page back once, SGLang's token pool as often as it is told to
    driver.swa_pool.free_pages = torch.cat((free[1:2], driver.swa_pool.free_pages))
    driver.group_end()
    driver.group_begin()
    driver.group_end()
    assert [text.split(";")[0] for text in errors(caplog)] == [
        "swaleak: SWA page 1 is lost: it is in use and nothing maps to it any more "
        "(physical 1, mapped 0)",
        "swaleak: SWA page 2 is in the free list twice: two requests will be given it "
        f"(physical 1, mapped 0) [page size {page_size}, group 1]",
    ]
    (path,) = tmp_path.glob("t.*.jsonl")
    calls = [getattr(item, "call", None) for item in TraceReader(path)]
    assert [c for c in calls if isinstance(c, GroupEnd)] == [GroupEnd(1, 0)] * 2


@pytest.mark.wheels
def test_what_0_5_18_frees_twice_at_page_size_1_hides_no_leak(caplog):
    base = sglang("0.5.18")._class
    class_ = plugin.watched_by(base, plugin.read_settings("audit"), None)
    driver = Driver(class_(4, 4, 1, torch.bfloat16, "cpu", kv_pool_for(base), False))
    node, other = alloc(driver), alloc(driver)
    driver.group_begin()
    driver.free_swa(node)
    driver.point(node, driver.translate(other))
    driver.clear_mapping(other)
    driver.free_full_pool(other)
    driver.free_swa(node)
    driver.group_end()
    assert sorted(driver.state().swa_free.tolist()) == [2, 2, 3, 4]
    lost, twice = errors(caplog)
    assert "SWA page 1 is lost" in lost and "queued by free_swa at " in lost
    assert "SWA page 2 is in the free list twice" in twice


def lose(driver: Driver) -> None:
    """Lose a page in a group as tombstone recovery does."""
    node, other = alloc(driver), alloc(driver)
    driver.group_begin()
    driver.free_swa(node)
    driver.point(node, driver.translate(other))
    driver.clear_mapping(other)
    driver.free_full_pool(other)
    driver.group_end()


@pytest.mark.parametrize("page_size", [1, 4])
def test_every_lost_page_is_reported_in_its_group_and_only_there(page_size, caplog):
    driver = watched_driver("audit", "deferred", page_size)
    for _ in range(3):
        lose(driver)
        driver.group_begin()
        driver.group_end()
    reported = [(text.split(" is lost")[0], text.split("group ")[-1]) for text in errors(caplog)]
    assert reported == [
        ("swaleak: SWA page 1", "1]"),
        ("swaleak: SWA page 2", "3]"),
        ("swaleak: SWA page 3", "5]"),
    ]


def test_a_lost_page_that_comes_back_and_is_lost_again_is_reported_again(caplog):
    driver = watched_driver("audit", "deferred", 4)
    lose(driver)
    driver.free_swa_pool(torch.arange(4, 8))  # by hand
    driver.group_begin()
    driver.group_end()
    lose(driver)
    assert [text[: text.index(" is lost")] for text in errors(caplog)] == [
        "swaleak: SWA page 1",
        "swaleak: SWA page 1",
    ]


@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_taken_for_later_are_lost_when_they_were_mapped_in_between(page_size, caplog):
    driver = watched_driver("audit", "deferred", page_size)
    node = alloc(driver)
    driver.free_swa(node)
    driver.group_begin()
    taken = driver.alloc_swa(
        2 * page_size
    )  # the first is mapped and unmapped again, the second waits
    driver.group_end()
    driver.group_begin()
    driver.point(node, taken[:page_size].clone())
    driver.clear_mapping(node)
    driver.group_end()
    driver.group_begin()
    driver.group_end()
    (text,) = errors(caplog)
    assert f"SWA page {int(taken[0]) // page_size} is lost" in text
    assert "(physical 2, mapped 1)" in text


@pytest.mark.parametrize("page_size", [4, 8])
def test_a_page_that_is_mapped_from_the_middle_of_another_is_not_lost(page_size, caplog):
    driver = watched_driver("audit", "deferred", page_size)
    node = alloc(driver)
    driver.clear_mapping(node)
    driver.point(node[1:], torch.arange(page_size, 2 * page_size - 1))
    driver.group_begin()
    driver.group_end()
    assert errors(caplog) == []
    driver.clear_mapping(node)
    driver.group_begin()
    driver.group_end()
    (text,) = errors(caplog)
    assert "SWA page 1 is lost" in text


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_alloc_handed_out_may_be_overwritten_by_its_caller(strategy, page_size, tmp_path):
    driver = watched_driver(f"record:{tmp_path}/t.jsonl", strategy, page_size)
    handed_out = []
    for _ in range(2):
        full = alloc(driver)
        handed_out.append(full.clone())
        full.fill_(0)
    swa = driver.alloc_swa(page_size)
    driver.free_swa(handed_out[0])
    driver.point(handed_out[0], swa.clone())
    swa.fill_(0)
    if page_size > 1:
        more = driver.alloc_extend([0], [2], torch.zeros(1, dtype=torch.int64), 2)
        handed_out.append(more.clone())
        more.fill_(0)
    driver.group_begin()
    for slots in handed_out:
        driver.free(slots)
    driver.group_end()
    (path,) = tmp_path.glob("t.*.jsonl")
    ends = []
    followed = follow(
        TraceReader(path),
        lambda sizes: Builtin("cpu").make(strategy, sizes),
        lambda seen: ends.append((seen.last.physical, seen.last.mapped)) or False,
    )
    assert (ends, followed.differ, followed.verdict) == ([(0, 0)], 0, "clean")


@pytest.mark.parametrize(
    "settings",
    ["audit", "record:{}", "fix:barrier", "fix:barrier,audit", "fix:barrier,audit,record:{}"],
)
@pytest.mark.parametrize("on", ["builtin", pytest.param("0.5.18", marks=pytest.mark.wheels)])
def test_an_allocator_that_nobody_has_any_more_is_freed(on, settings, tmp_path):
    asked = plugin.read_settings(settings.format(tmp_path / "t.jsonl"))
    strategy = asked.fix or "deferred"
    alive = []
    for _ in range(10):
        if on == "builtin":
            class_ = plugin.watched_by(HybridAllocator, asked, asked.fix)
            driver = Driver(class_(16, 16, 4, "cpu", STRATEGIES[strategy]))
            parts = [driver.allocator, driver.swa_pool]
        else:
            base = sglang(on)._class
            class_ = plugin.watched_by(graft(base, STRATEGIES[strategy]), asked, asked.fix)
            pool = kv_pool_for(base)
            driver = Driver(class_(16, 16, 4, torch.bfloat16, "cpu", pool, False))
            parts = [driver.allocator, pool]
        lose(driver)
        alive += map(weakref.ref, parts)
        del driver, parts
    pool = None
    gc.collect()
    assert [there() for there in alive if there() is not None] == []


DEFERRED = {"free_swa": "deferred", "free": "deferred"}
SHIPPED = {
    "0.5.18": DEFERRED,
    "0.5.19": DEFERRED | {"free_swa": "enqueue"},
    "0.5.23": {"free_swa": "enqueue", "free": "enqueue"},
}
ADVICE = [
    ("free_swa", "0.5.18", "", "fix: SGLang 0.5.19 or later (sgl-project/sglang #36381), or start"),
    ("free", "0.5.18", "", "fix: SGLang 0.5.20 or later (sgl-project/sglang #36646), or start"),
    ("free", "0.5.19", "", "this SGLang 0.5.19 with SWALEAK=fix:barrier"),
    ("free_swa", "0.5.23", "", "SGLang 0.5.23 frees by enqueue and did not prevent it"),
    ("free", "0.5.18", ",fix:enqueue", "fix:enqueue is in force and did not prevent this"),
    *(
        (None, version, fix, "neither fix, nor another release of the allocator, can help")
        for version in SHIPPED
        for fix in ("", ",fix:barrier")
    ),
]


@pytest.mark.parametrize("in_group", [True, False])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(("free", "version", "fix", "advice"), ADVICE)
def test_the_advice_is_for_the_release_and_for_who_is_at_fault(
    free, version, fix, advice, page_size, in_group, caplog
):
    release = Release(version, SHIPPED[version])
    driver = watched_driver(f"audit{fix}", "deferred", page_size, release=release)
    node, other = alloc(driver), alloc(driver)
    if in_group or free:
        driver.group_begin()
    if free:
        getattr(driver, free)(node)
    driver.point(node, driver.translate(other))
    driver.clear_mapping(other)
    if free is None:
        driver.free_swa(node) if in_group else None  # too late: what it frees is the other page
    if not in_group and not free:
        driver.group_begin()
    driver.group_end()
    text = errors(caplog)[0]
    assert advice in text
    assert ("nobody had freed it" in text, "the caller's fault" in text) == (free is None,) * 2
    assert ("0.5.19 or later" in text) == (free == "free_swa" and version == "0.5.18")
    assert ("set_full_to_swa_mapping at " in text) == bool(in_group or free)


@pytest.mark.wheels
@pytest.mark.parametrize("version", SHIPPED)
def test_a_release_is_tried_for_both_kinds_of_free(version):
    target = sglang(version)
    tried = {
        free: shipped_strategy(target.make("shipped", Sizes(4, 4, 1)), free) for free in DEFERRED
    }
    assert tried == SHIPPED[version]


@pytest.mark.parametrize("settings", ["audit", "audit,fix:enqueue", "fix:barrier", "record:{}"])
def test_an_allocator_that_is_attached_is_one_line(settings, caplog, tmp_path):
    settings = settings.format(tmp_path / "t.jsonl")
    watched_driver(settings, "deferred", 4)
    assert [record.getMessage() for record in caplog.records] == [
        "swaleak: attached to a HybridAllocator of 64 full and 64 SWA slots, page size 4: "
        + settings
    ]


SETTINGS = [
    ("audit", plugin.Settings(audit=True)),
    ("record:/a/b.jsonl", plugin.Settings(record="/a/b.jsonl")),
    ("audit, fix:barrier", plugin.Settings(audit=True, fix="barrier")),
    ("record:f,audit,fix:enqueue", plugin.Settings("f", True, "enqueue")),
]


@pytest.mark.parametrize(("text", "settings"), SETTINGS)
def test_settings_are_read(text, settings):
    assert plugin.read_settings(text) == settings


LACKING = [
    ("record", "record needs a file, as in record:run.jsonl"),
    ("record:", "record needs a file, as in record:run.jsonl"),
    ("audit,record", "record needs a file, as in record:run.jsonl"),
    (",", "it asks for nothing; it takes record:FILE, audit, fix:barrier, fix:enqueue"),
    (" , ", "it asks for nothing; it takes record:FILE, audit, fix:barrier, fix:enqueue"),
]


@pytest.mark.parametrize(("text", "said"), LACKING)
def test_settings_that_lack_something_says_what(text, said, monkeypatch, caplog):
    monkeypatch.setenv(plugin.VARIABLE, text)
    plugin.activate()
    (record,) = caplog.records
    assert record.getMessage() == f"swaleak does nothing: SWALEAK={text}: {said}"


TWICE = ["audit,fix:barrier,fix:enqueue", "record:a.jsonl,record:b.jsonl"]


@pytest.mark.parametrize(
    "text",
    ["fix", "fix:eager", "audit:x", "barrier", *TWICE],
)
def test_settings_that_make_no_sense_are_logged_and_nothing_happens(text, monkeypatch, caplog):
    monkeypatch.setenv(plugin.VARIABLE, text)
    plugin.activate()
    (record,) = caplog.records
    assert record.getMessage().startswith("swaleak does nothing: SWALEAK=")


def test_a_trace_that_cannot_be_made_is_one_line_in_the_log(monkeypatch, caplog, tmp_path):
    path = tmp_path / "nope" / "x.jsonl"
    monkeypatch.setenv(plugin.VARIABLE, f"audit,record:{path}")
    plugin.activate()
    (record,) = caplog.records
    said = f"swaleak does nothing: SWALEAK: record:{path}: there is no folder {path.parent}"
    assert (record.getMessage(), record.exc_info) == (said, None)


def test_a_trace_without_a_group_says_that_nothing_was_judged(cli, tmp_path):
    trace = tmp_path / "empty.jsonl"
    trace.write_text(
        '{"schema": "swaleak-trace/1", "page_size": 1, "full_pages": 8, "swa_pages": 8}\n'
        '{"op": "alloc", "full": 1, "swa": 1, "n": 1}\n'
    )
    answer = cli("replay", trace, "-s", "barrier", "--on", "builtin")
    said = " ".join(answer.out.split())
    assert (answer.code, "not judged" in said) == (1, True)
    assert "barrier: no free group ends in this trace, so nothing was judged" in said
