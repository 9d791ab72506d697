"""A run and its verdict: what is a result, what is a mistake of the script's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from swaleak.allocator.hybrid import HybridAllocator
from swaleak.allocator.strategies import Eager
from swaleak.checker.run import run_script
from swaleak.errors import ScriptError
from swaleak.scenario import steps
from swaleak.scenario.steps import Step
from swaleak.targets.driver import Driver, Sizes
from swaleak.targets.open import Builtin

A, B = steps.Alloc("a"), steps.Alloc("b")
BEGIN, END = steps.Group("begin"), steps.Group("end")


class Raises(HybridAllocator):
    """An allocator whose free_swa raises, after it has done ``damage``."""

    def __init__(self, damage: Callable[[Raises], None]) -> None:
        super().__init__(16, 16, 4, "cpu", Eager)
        self.kept: dict[str, list[int]] = {"queue": []}
        self.seen: set[int] = set()
        self.damage = damage

    def free_swa(self, free_index: torch.Tensor) -> None:
        self.damage(self)
        raise RuntimeError("no\nmore")


def nothing(_: Raises) -> None: ...


def write_the_mapping(a: Raises) -> None:
    a.full_to_swa_index_mapping[4] = 0


def hand_out_a_page(a: Raises) -> None:
    a.swa_attn_allocator.alloc(4)


def queue_in_a_list(a: Raises) -> None:
    a.strategy.full_queue.append(torch.tensor([4]))


def queue_in_a_dict(a: Raises) -> None:
    a.kept["queue"].append(1)


def note_in_a_set(a: Raises) -> None:
    a.seen.add(1)


def open_a_group(a: Raises) -> None:
    a.group_open = True


@pytest.mark.parametrize(
    ("damage", "verdict"),
    [
        (nothing, "refused"),
        (write_the_mapping, "error"),
        (hand_out_a_page, "error"),
        (queue_in_a_list, "error"),
        (queue_in_a_dict, "error"),
        (note_in_a_set, "error"),
        (open_a_group, "error"),
    ],
)
def test_refused_is_what_changes_nothing(damage: Callable[[Raises], None], verdict: str) -> None:
    run = run_script(Driver(Raises(damage)), [A, steps.FreeSwa("a"), B])
    assert (run.verdict, run.failed_at, run.raised) == (verdict, 2, "RuntimeError: no more")


@pytest.mark.parametrize(
    ("full_pages", "script", "message"),
    [
        (2, [A, BEGIN, steps.Free("a"), steps.Alloc("c"), B, steps.Adopt("a", "b")], "no node 'a'"),
        (8, [A, B, BEGIN, steps.Free("a"), END, steps.Adopt("a", "b")], "no node 'a'"),
        (
            8,
            [A, B, BEGIN, steps.Free("a"), steps.Adopt("a", "b"), END, steps.Alloc("c")],
            "the SWA pages of 'a' belong to full slots that are free",
        ),
    ],
)
def test_a_script_that_is_at_fault(full_pages: int, script: list[Step], message: str) -> None:
    with pytest.raises(ScriptError, match=message):
        run_script(Builtin("cpu").make("eager", Sizes(full_pages, 8, 1)), script)


def test_a_pool_that_runs_dry_by_its_own_leak_is_a_leak() -> None:
    sizes = Sizes(8, 3, 4)
    leaky = [A, B, BEGIN, steps.FreeSwa("a"), steps.Recover("a", "b"), END]
    more = [*leaky, steps.Alloc("c"), steps.Alloc("d"), steps.Alloc("e")]
    with pytest.raises(ScriptError, match="SWA pool is too small"):
        run_script(Builtin("cpu").make("barrier", sizes), more)
    run = run_script(Builtin("cpu").make("deferred", Sizes(8, 3, 4)), more[:-1])
    assert (run.verdict, run.failed_at) == ("leak", 6)


@pytest.mark.parametrize("strategy", ["eager", "deferred", "enqueue", "barrier"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_nodes_that_grow(strategy, page_size):
    script = [
        steps.Extend("a", 3),
        steps.Decode("a"),
        steps.Decode("a"),
        steps.Extend("b", 5),
        steps.FreeSwa("a"),
        steps.Recover("a", "b"),
        steps.Extend("a", page_size),
        steps.Free("a"),
    ]
    run = run_script(
        Builtin("cpu").make(strategy, Sizes(16, 16, page_size)), script, keep_steps=True
    )
    pages = [-(-n // page_size) for n in (3, 4, 5)]
    b = pages[2]
    assert (
        run.verdict,
        run.comparison.physical,
        [s.comparison.physical for s in run.steps[:4]],
    ) == (
        "clean",
        0,
        [*pages, 2 * b],
    )
