"""Each strategy's own code decides what a grouped free does."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from swaleak.allocator.hybrid import HybridAllocator
from swaleak.allocator.strategies import STRATEGIES, Barrier, Deferred, Eager, Enqueue, Strategy
from swaleak.checker.run import Run, run_script
from swaleak.scenario import catalogue
from swaleak.targets.driver import Driver

RECOVERY = catalogue.load("tombstone-recovery")
HOOKS = [
    (Eager, "on_free"),
    (Eager, "on_flush"),
    (Deferred, "on_free"),
    (Deferred, "on_flush"),
    (Enqueue, "on_free"),
    (Enqueue, "on_flush"),
    (Barrier, "on_free"),
    (Barrier, "before_write"),
    (Barrier, "on_flush"),
]


class Reached(Exception):
    """Raised by a hook that is run."""


def run(strategy: type[Strategy], page_size: int = 1) -> Run:
    slots = 8 * page_size
    allocator = HybridAllocator(slots, slots, page_size, "cpu", strategy)
    return run_script(Driver(allocator), RECOVERY.steps)


@pytest.mark.parametrize(("strategy", "hook"), HOOKS)
def test_a_grouped_free_runs_the_hooks_of_its_strategy(strategy: type[Strategy], hook: str) -> None:
    with mock.patch.object(strategy, hook, side_effect=Reached("here")):
        found = run(strategy)
    assert found.raised == "Reached: here"


OTHERS = [
    (one, two)
    for one in STRATEGIES
    for two in STRATEGIES
    if not issubclass(STRATEGIES[one], STRATEGIES[two])  # barrier is deferred with a guard
]


@pytest.mark.parametrize(("strategy", "other"), OTHERS)
def test_no_strategy_runs_the_code_of_another(strategy: str, other: str) -> None:
    with mock.patch.object(STRATEGIES[other], "on_flush", side_effect=Reached):
        assert run(STRATEGIES[strategy]).raised is None


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(
    ("strategy", "queued", "freed"),
    [("eager", 0, 1), ("deferred", 1, 0), ("enqueue", 1, 0), ("barrier", 1, 0)],
)
def test_what_waits_for_the_end_of_the_group(
    strategy: str, queued: int, freed: int, page_size: int
) -> None:
    slots = 4 * page_size
    allocator = HybridAllocator(slots, slots, page_size, "cpu", STRATEGIES[strategy])
    full = Driver(allocator).alloc_pages(page_size)
    allocator.free_group_begin()
    allocator.free(full)
    free = (allocator.swa_available_size() // page_size, allocator.full_available_size())
    assert (len(allocator.strategy.queue), len(allocator.strategy.full_queue)) == (queued, queued)
    assert free == (3 + freed, (3 + freed) * page_size)
    allocator.free_group_end()
    assert (allocator.swa_available_size(), allocator.full_available_size()) == (slots, slots)
    assert not allocator.full_to_swa_index_mapping[:-1].any()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_frees_take_int32_slices_and_views(strategy: str, page_size: int) -> None:
    slots = 8 * page_size
    allocator = HybridAllocator(slots, slots, page_size, "cpu", STRATEGIES[strategy])
    full = Driver(allocator).alloc_pages(4 * page_size)
    table = torch.zeros((2, 2 * len(full)), dtype=torch.int32)
    table[1, ::2] = full
    passed = table[1, ::2]  # not contiguous, as a column of a table would be
    assert not passed.is_contiguous()
    allocator.free_swa(passed[:page_size])
    allocator.free_group_begin()
    allocator.free_swa(passed[page_size : 2 * page_size])
    allocator.free(passed[2 * page_size :])
    allocator.free_group_end()
    allocator.free_full(passed[: 2 * page_size])
    assert (allocator.swa_available_size(), allocator.full_available_size()) == (slots, slots)
