"""The player and its judge: what is a result, what is a mistake of the script's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from swaleak.allocator.hybrid import HybridAllocator
from swaleak.allocator.strategies import Eager
from swaleak.checker.run import run_script as replay
from swaleak.errors import ScriptError
from swaleak.scenario import steps as ops
from swaleak.scenario.steps import Step as Op
from swaleak.targets.driver import Driver
from swaleak.targets.open import Builtin, Sizes

A, B = ops.Alloc("a"), ops.Alloc("b")
BEGIN, END = ops.Group("begin"), ops.Group("end")


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
    a.full_queue.append(torch.tensor([4]))


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
    run = replay(Driver(Raises(damage)), [A, ops.FreeSwa("a"), B])
    assert (run.verdict, run.failed_at, run.raised) == (verdict, 2, "RuntimeError: no more")


@pytest.mark.parametrize(
    ("full_pages", "script", "message"),
    [
        (2, [A, BEGIN, ops.Free("a"), ops.Alloc("c"), B, ops.Adopt("a", "b")], "no node 'a'"),
        (8, [A, B, BEGIN, ops.Free("a"), END, ops.Adopt("a", "b")], "no node 'a'"),
        (
            8,
            [A, B, BEGIN, ops.Free("a"), ops.Adopt("a", "b"), END, ops.Alloc("c")],
            "the SWA pages of 'a' hang on full slots that are free",
        ),
    ],
)
def test_a_script_that_is_at_fault(full_pages: int, script: list[Op], message: str) -> None:
    with pytest.raises(ScriptError, match=message):
        replay(Builtin("cpu").make("eager", Sizes(full_pages, 8, 1)), script)


def test_a_pool_that_runs_dry_by_its_own_leak_is_a_leak() -> None:
    sizes = Sizes(8, 3, 4)
    leaky = [A, B, BEGIN, ops.FreeSwa("a"), ops.Recover("a", "b"), END]
    more = [*leaky, ops.Alloc("c"), ops.Alloc("d"), ops.Alloc("e")]
    with pytest.raises(ScriptError, match="SWA pool is too small"):
        replay(Builtin("cpu").make("barrier", sizes), more)
    run = replay(Builtin("cpu").make("deferred", Sizes(8, 3, 4)), more[:-1])
    assert (run.verdict, run.failed_at) == ("leak", 6)


@pytest.mark.parametrize("strategy", ["eager", "deferred", "enqueue", "barrier"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_nodes_that_grow(strategy, page_size):
    script = [
        ops.Extend("a", 3),
        ops.Decode("a"),
        ops.Decode("a"),
        ops.Extend("b", 5),
        ops.FreeSwa("a"),
        ops.Recover("a", "b"),
        ops.Extend("a", page_size),
        ops.Free("a"),
    ]
    run = replay(Builtin("cpu").make(strategy, Sizes(16, 16, page_size)), script, keep_steps=True)
    pages = [-(-n // page_size) for n in (3, 4, 5)]
    b = pages[2]
    assert (run.verdict, run.comparison.physical, [s.audit.physical for s in run.steps[:4]]) == (
        "clean",
        0,
        [*pages, 2 * b],
    )
