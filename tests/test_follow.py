"""The ledger of slots says what the ledger of nodes says, whichever way it enters them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings

from swaleak.allocator.hybrid import HybridAllocator
from swaleak.allocator.strategy import STRATEGIES
from swaleak.check import names
from swaleak.check.follow import Followed, _parted, follow
from swaleak.check.replay import Player, replay
from swaleak.script import ops
from swaleak.script.ops import Op
from swaleak.script.trace import Header, Line, TraceReader
from swaleak.sglang import plugin
from swaleak.sglang.adapter import Driver
from swaleak.target import Builtin
from tests.test_property import SIZES, scripts

BUILTIN = Builtin("cpu")


def recorded(folder: str, page_size: int, script: tuple[Op, ...]) -> list[Header | Line]:
    class_ = plugin.watched_by(HybridAllocator, plugin.read_wish(f"record:{folder}/t.jsonl"), None)
    pages = SIZES[page_size].full_pages * page_size
    player = Player(Driver(class_(pages, pages, page_size, "cpu", STRATEGIES["eager"])))
    for op in script:
        player.play(op)
    [path] = Path(folder).glob("t.*.jsonl")
    return list(TraceReader(path))


def followed(trace: list[Header | Line], strategy: str, few: int, sweep: int) -> Followed:
    with mock.patch.multiple(names, FEW=few, SWEEP=sweep):
        return follow(trace, lambda sizes: BUILTIN.make(strategy, sizes))


# an adoption clears the giver's mapping by a direct write with no call after it, which no recorder
# hears: such a script is not what its trace says (SGLang's caches free the giver's slots next)
RECORDABLE = scripts().filter(lambda drawn: not any(type(op) is ops.Adopt for op in drawn[1]))


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(drawn=RECORDABLE)
@settings(deadline=None, max_examples=60)
def test_it_agrees_with_the_ledger_of_nodes(
    strategy: str, drawn: tuple[int, tuple[Op, ...]]
) -> None:
    page_size, script = drawn
    script = (*script, ops.Group("begin"), ops.Group("end"))  # whatever came last is judged too
    with tempfile.TemporaryDirectory() as folder:
        trace = recorded(folder, page_size, script)
    run = replay(BUILTIN.make(strategy, SIZES[page_size]), script)
    ways = [followed(trace, strategy, *way) for way in ((64, 1024), (64, 1), (0, 1024), (0, 1))]
    assert [(f.verdict, f.last.physical, f.last.mapped) for f in ways if f.last] == [
        (run.verdict, run.audit.physical, run.audit.mapped)
    ] * len(ways)
    assert ways == [ways[0]] * len(ways)


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
    assert _parted(used, torch.tensor(free, dtype=torch.int64)) is whole


HICACHE = [Header(1, 4, 4), Line(2, "begin", {}), Line(3, "alloc_swa", {"swa": 1, "n": 2})]
GONE = Line(4, "free_swa_pool", {"swa": [[1, 2]]})
END = Line(5, "end", {"physical": 0, "mapped": 0})


def test_slots_for_a_load_that_never_came_are_nobodys_when_they_are_given_back() -> None:
    seen = follow([*HICACHE, GONE, END], lambda sizes: BUILTIN.make("barrier", sizes))
    assert (seen.verdict, seen.differ, seen.last.physical, seen.last.mapped) == ("clean", 0, 0, 0)
