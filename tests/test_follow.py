"""A trace is followed call by call, and judged as the script that it was recorded from."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings

from swaleak.allocator.hybrid import HybridAllocator
from swaleak.allocator.strategies import STRATEGIES
from swaleak.checker import slot_table
from swaleak.checker.compare import _complementary
from swaleak.checker.run import Execution, run_script
from swaleak.live import plugin
from swaleak.scenario import steps
from swaleak.scenario.calls import (
    AllocPages,
    AllocSwa,
    FreeSwaPool,
    GroupBegin,
    GroupEnd,
    Header,
    Line,
)
from swaleak.scenario.steps import Step
from swaleak.targets.driver import Driver
from swaleak.targets.open import Builtin
from swaleak.trace.format import TraceReader
from swaleak.trace.replay import TraceRun, run_trace
from swaleak.trace.to_scenario import sizes_of
from tests.test_property import SIZES, scripts

BUILTIN = Builtin("cpu")


def recorded(folder: str, page_size: int, script: tuple[Step, ...]) -> list[Header | Line]:
    class_ = plugin.watched_by(
        HybridAllocator, plugin.read_settings(f"record:{folder}/t.jsonl"), None
    )
    pages = SIZES[page_size].full_pages * page_size
    execution = Execution(Driver(class_(pages, pages, page_size, "cpu", STRATEGIES["eager"])))
    for step in script:
        execution.step(step)
    [path] = Path(folder).glob("t.*.jsonl")
    return list(TraceReader(path))


def followed(trace: list[Header | Line], strategy: str, sweep: int) -> TraceRun:
    with mock.patch.object(slot_table, "SWEEP", sweep):
        return run_trace(trace, lambda header: BUILTIN.make(strategy, sizes_of(header)))


# an adoption clears the giver's mapping by a direct write with no call after it, which no recorder
# hears: such a script is not what its trace says (SGLang's caches free the giver's slots next)
RECORDABLE = scripts().filter(lambda drawn: not any(type(s) is steps.Adopt for s in drawn[1]))


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(drawn=RECORDABLE)
@settings(deadline=None, max_examples=60)
def test_a_trace_comes_out_as_its_script(
    strategy: str, drawn: tuple[int, tuple[Step, ...]]
) -> None:
    page_size, script = drawn
    script = (*script, steps.Group("begin"), steps.Group("end"))  # whatever came last is judged too
    with tempfile.TemporaryDirectory() as folder:
        trace = recorded(folder, page_size, script)
    run = run_script(BUILTIN.make(strategy, SIZES[page_size]), script)
    ways = [followed(trace, strategy, sweep) for sweep in (1024, 1)]
    seen = run.comparison
    assert [(f.verdict, f.last.physical, f.last.mapped) for f in ways if f.last] == [
        (run.verdict, seen.physical, seen.mapped)
    ] * len(ways)
    found = [v.kind for v in seen.violations if v.owner is None]
    for way in ways:
        assert way.last is not None
        kinds = [v.kind for v in way.last.violations]
        assert set(found) <= set(kinds)  # what has an owner in a script is a page in a trace
    assert ways == [ways[0]] * len(ways)


def test_one_state_is_judged_alike_by_repro_and_replay() -> None:
    """Two full pages that map to one SWA page: `shared`, whichever way it is come by."""

    class Sharing(HybridAllocator):
        def free_group_end(self) -> None:
            super().free_group_end()
            self.full_to_swa_index_mapping[8:12] = self.full_to_swa_index_mapping[4:8]

    def make() -> Driver:
        return Driver(Sharing(16, 16, 4, "cpu", STRATEGIES["eager"]))

    script = [steps.Alloc("a"), steps.Alloc("b"), steps.Group("begin"), steps.Group("end")]
    trace = [
        Header(4, 4, 4),
        *(Line(at + 2, AllocPages(first, first, 4)) for at, first in enumerate((1, 5))),
        Line(4, GroupBegin()),
        Line(5, GroupEnd()),
    ]
    by_script = {v.kind for v in run_script(make(), script).comparison.violations}
    last = run_trace(trace, lambda _: make()).last
    assert last is not None
    assert by_script == {v.kind for v in last.violations} == {"leak", "lost", "stale", "shared"}


PARTS = [
    ([3, 1], True),
    ([1, 3], True),
    ([1], False),
    ([1, 3, 2], False),
    ([1, 3, 3], False),
    ([1, 0], False),
    ([1, -1], False),
    ([1, 4], False),
    ([], False),
]


@pytest.mark.parametrize(("free", "whole"), PARTS)
def test_a_pool_is_used_and_free_pages_and_each_once(free: list[int], whole: bool) -> None:
    used = torch.tensor([1, 0, 2, 0])  # page 0, and page 2 of three
    assert _complementary(used, torch.tensor(free, dtype=torch.int64)) is whole


HICACHE = [Header(1, 4, 4), Line(2, GroupBegin()), Line(3, AllocSwa(1, 2))]
GONE = Line(4, FreeSwaPool(((1, 2),)))
END = Line(5, GroupEnd(0, 0))


def test_slots_for_a_load_that_never_came_are_nobodys_when_they_are_given_back() -> None:
    seen = run_trace(
        [*HICACHE, GONE, END], lambda header: BUILTIN.make("barrier", sizes_of(header))
    )
    assert (seen.verdict, seen.differ, seen.last.physical, seen.last.mapped) == ("clean", 0, 0, 0)


def tampered(tamper: Callable[[HybridAllocator], None]) -> TraceRun:
    """Two nodes of one page each, 1 and 2; somebody has tampered when a group ends."""

    class Tampered(HybridAllocator):
        def free_group_end(self) -> None:
            super().free_group_end()
            tamper(self)

    def make(header: Header) -> Driver:
        slots = header.full_pages * header.page_size
        return Driver(Tampered(slots, slots, header.page_size, "cpu", STRATEGIES["barrier"]))

    node, other = (AllocPages(first, first, 4) for first in (1, 5))
    trace = [Line(2, node), Line(3, other), Line(4, GroupBegin())]
    return run_trace([Header(4, 4, 4), *trace, Line(5, GroupEnd(2, 2))], make)


def list_(pool: str, pages: list[int]) -> Callable[[HybridAllocator], None]:
    def tamper(allocator: HybridAllocator) -> None:
        getattr(allocator, f"{pool}_attn_allocator").free_pages = torch.tensor(pages)

    return tamper


def write(slot: int, peer: int) -> Callable[[HybridAllocator], None]:
    def tamper(allocator: HybridAllocator) -> None:
        allocator.full_to_swa_index_mapping[slot] = peer

    return tamper


TAMPERED = [
    (list_("swa", [3, 4]), 2, 2, []),
    (list_("full", [4, 3]), 2, 2, []),
    (list_("swa", [4]), 3, 2, [("leak", "swa", (3,))]),
    (list_("full", [4]), 2, 2, [("leak", "full", (3,))]),
    (list_("swa", [1, 3, 4]), 1, 2, [("dangling", "swa", (1,))]),
    (list_("full", [1, 3, 4]), 2, 2, [("dangling", "full", (1,))]),
    (list_("swa", [3, 4, 3]), 2, 2, [("double-free", "swa", (3,))]),
    (list_("full", [3, 4, 0]), 2, 2, [("reserved", "full", (0,))]),
    (list_("full", [3, 4, -1]), 2, 2, [("reserved", "full", (-1,))]),
    (list_("swa", [3, 4, 10**12]), 2, 2, [("reserved", "swa", (10**12,))]),
    (write(4, 0), 2, 2, [("lost", "full", (1,))]),
    (write(4, 8), 2, 2, [("shared", "swa", (2,)), ("misaligned", "full", (1,))]),
    (write(12, 8), 2, 2, [("stale", "full", (3,)), ("shared", "swa", (2,))]),
    (write(12, -5), 2, 2, [("stale", "full", (3,))]),
    (write(12, 10**12), 2, 2, [("stale", "full", (3,))]),
    (write(12, 13), 2, 3, [("stale", "full", (3,)), ("dangling", "swa", (3,))]),
]


@pytest.mark.parametrize(("tamper", "physical", "mapped", "found"), TAMPERED)
def test_whatever_is_tampered_with_is_told(
    tamper: Callable[[HybridAllocator], None],
    physical: int,
    mapped: int,
    found: list[tuple[str, str, tuple[int, ...]]],
) -> None:
    seen = tampered(tamper)
    assert seen.raised is None
    assert seen.last is not None
    assert (seen.last.physical, seen.last.mapped) == (physical, mapped)
    assert [(v.kind, v.pool, v.pages) for v in seen.last.violations] == found


def test_a_state_that_cannot_be_read_is_an_error() -> None:
    seen = tampered(lambda allocator: delattr(allocator.swa_attn_allocator, "free_pages"))
    assert (seen.verdict, seen.raised) == (
        "error",
        (5, "AttributeError: 'PagePool' object has no attribute 'free_pages'"),
    )


def test_a_long_list_of_pages_is_told_whole() -> None:
    def tamper(allocator: HybridAllocator) -> None:
        allocator.swa_attn_allocator.free_pages = torch.arange(0)

    class Tampered(HybridAllocator):
        def free_group_end(self) -> None:
            super().free_group_end()
            tamper(self)

    def make(header: Header) -> Driver:
        return Driver(Tampered(100, 100, 1, "cpu", STRATEGIES["barrier"]))

    end = Line(3, GroupEnd(0, 0))
    seen = run_trace([Header(1, 100, 100), Line(2, GroupBegin()), end], make)
    assert seen.last is not None
    assert [v.pages for v in seen.last.violations] == [tuple(range(1, 101))]
