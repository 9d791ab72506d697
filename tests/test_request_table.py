"""Whatever SGLang passes for slots is taken: int32 and int64, slices, not contiguous."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swaleak.allocator.strategies import STRATEGIES
from swaleak.checker.case import run_case
from swaleak.checker.run import run_script
from swaleak.explorer.breadth_first import BreadthFirst
from swaleak.scenario import catalogue, steps
from swaleak.scenario.contract import Rules
from swaleak.targets.driver import Sizes
from swaleak.targets.open import Builtin
from swaleak.trace.format import TraceReader
from swaleak.trace.replay import run_trace
from swaleak.trace.to_scenario import sizes_of
from tests.conftest import sglang
from tests.request_table import VIEWS, TableTarget, row
from tests.test_property import BUILTIN, SIZES, ends, scripts
from tests.test_traces import play, watched_driver

# where a script writes to the buffer that it has passed, there must be no other in between
SCENARIOS = [
    s
    for s in catalogue.catalogue()
    if not s.caches and not any(isinstance(step, steps.Overwrite) for step in s.steps)
]
TARGETS = ["builtin", pytest.param("0.5.18", marks=pytest.mark.wheels)]
TARGETS += [pytest.param(v, marks=pytest.mark.wheels) for v in ("0.5.19", "0.5.20", "0.5.23")]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("on", TARGETS)
def test_every_scenario_ends_as_with_slots_as_they_were_handed_out(on, view) -> None:
    target = Builtin("cpu") if on == "builtin" else sglang(on)
    table = TableTarget(target, view)
    cases = [
        (scenario, strategy, size)
        for scenario in SCENARIOS
        for strategy in target.strategies()
        for size in scenario.page_sizes
        if size <= 4
    ]

    def came_out(where) -> list[tuple[object, ...]]:
        found = [(run_case(scenario, where, *how), how) for scenario, *how in cases]
        return [
            (case.scenario.name, *how, case.verdict, case.physical, case.mapped, case.run.raised)
            for case, how in found
        ]

    assert len(cases) > 100 and came_out(table) == came_out(target)


@pytest.mark.parametrize("on", ["builtin", pytest.param("0.5.18", marks=pytest.mark.wheels)])
@given(drawn=scripts(), view=st.sampled_from(VIEWS))
@settings(deadline=None, max_examples=100)
def test_the_fixes_end_where_eager_ends(on, drawn, view) -> None:
    table = TableTarget(BUILTIN if on == "builtin" else sglang(on), view)
    eager = ends(BUILTIN, "eager", *drawn)
    assert [ends(table, fix, *drawn) for fix in ("eager", "enqueue", "barrier")] == [eager] * 3


@pytest.mark.parametrize("on", ["builtin", pytest.param("0.5.18", marks=pytest.mark.wheels)])
@pytest.mark.parametrize(("strategy", "fails"), [("barrier", 0), ("enqueue", 0), ("deferred", 1)])
def test_a_search_finds_the_same(on, strategy, fails) -> None:
    target = Builtin("cpu") if on == "builtin" else sglang(on)
    searches = []
    for where in (target, TableTarget(target, row)):
        search = BreadthFirst(lambda f, s, on=where: on.make(strategy, Sizes(f, s, 4)), Rules(), 6)
        for _ in search.run():
            pass
        tried = search.coverage
        searches.append((tried.states, tried.transitions, [f.order for f in search.failures]))
    assert searches[0] == searches[1] and len(searches[1][2]) == fails


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_the_recorder_and_the_audit_take_them(view, strategy, page_size, tmp_path) -> None:
    driver = watched_driver(f"audit,record:{tmp_path}/t.jsonl", strategy, page_size, view)
    counts = play(driver, catalogue.load("tombstone-recovery").steps)
    (path,) = tmp_path.glob("t.*.jsonl")
    followed = run_trace(
        TraceReader(path), lambda header: Builtin("cpu").make(strategy, sizes_of(header))
    )
    assert (followed.groups, followed.differ) == (len(counts), 0)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("page_size", SIZES)
def test_a_script_grows_and_shrinks_a_request(view, page_size) -> None:
    table = TableTarget(BUILTIN, view)
    script = (
        steps.Extend("a", 6),
        steps.Decode("a"),
        steps.Decode("a"),
        steps.Alloc("b"),
        steps.Group("begin"),
        steps.FreeSwa("a", pages="0:1"),
        steps.FreeSegment("b"),
        steps.Group("end"),
        steps.Free("a"),
    )
    for strategy in STRATEGIES:
        assert run_script(table.make(strategy, SIZES[page_size]), script).verdict == "clean"
