"""What a caller does wrong is named, with its step, and is not held against the allocator."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest

from swaleak.checker.run import Execution, Run, run_script
from swaleak.errors import RAISED
from swaleak.scenario.contract import CONTRACTS, Rules, legal
from swaleak.scenario.toml import STRATEGIES, parse
from swaleak.targets.driver import Sizes
from swaleak.targets.open import Builtin, Target
from tests.conftest import Cli, sglang

FREED_TWICE = '{ alloc = "a" }, { free = "a" }, { free = "a" }'
FREED_TWICE_IN_A_GROUP = """
{ alloc = "a", pages = 2 }, { group = "begin" }, { free = "a" }, { free = "a", pages = "1:" },
{ group = "end" }
"""
NOT_OWNED = '{ alloc = "a" }, { free = "a" }, { alloc = "b" }, { free = "a" }'
OVERWRITTEN = '{ alloc = "a" }, { load_back = "a" }'
OVERWRITTEN_BY_RECOVER = '{ alloc = "a" }, { alloc = "b" }, { recover = "a", from = "b" }'
ORPHANED = '{ alloc = "a" }, { free_full = "a" }'

# script -> mistakes with their steps, verdict, what is wrong at the end
CASES = {
    FREED_TWICE: ([(3, "freed-twice: full page 1")], "clean", ["double-free: full page 1"]),
    FREED_TWICE_IN_A_GROUP: ([(4, "freed-twice: full page 2")], "clean", None),
    OVERWRITTEN: ([(2, "overwritten: swa page 1")], "leak", ["leak: swa page 1"]),
    OVERWRITTEN_BY_RECOVER: ([(3, "overwritten: swa page 1")], "leak", ["leak: swa page 1"]),
    ORPHANED: ([(2, "orphaned: swa page 1")], "leak", ["leak: swa page 1"]),
}


def run(text: str, strategy: str, page_size: int, target: Target | None = None) -> Run:
    steps = parse(f"schema = 1\nsteps = [{text}]", name="mine", source="mine.toml").steps
    maker = target or Builtin("cpu")
    return run_script(maker.make(strategy, Sizes(8, 8, page_size)), steps)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("text", CASES)
def test_a_mistake_is_named(text: str, strategy: str, page_size: int) -> None:
    mistakes, verdict, wrong = CASES[text]
    seen = run(text, strategy, page_size)
    assert [(at, str(one)) for at, one in seen.mistakes] == mistakes
    assert (seen.verdict, seen.by_caller) == (verdict, True)
    if wrong is not None:
        assert [str(one) for one in seen.comparison.violations] == wrong


def test_a_free_of_what_somebody_else_has_now() -> None:
    target = Builtin("cpu")
    seen = run(NOT_OWNED.replace('{ alloc = "b" }', '{ alloc = "b", pages = 8 }'), "eager", 4)
    [(step, mistake)] = seen.mistakes
    assert (step, mistake.kind, mistake.pages, mistake.fault) == (4, "not-owned", (1,), "caller")
    assert (seen.verdict, seen.by_caller) == ("clean", True)
    full = '{ alloc = "a", pages = 8 }, { free = "a" }, { alloc = "b", pages = 8 }, { free = "b" }'
    assert run(full, "eager", 4, target).mistakes == ()


@pytest.mark.wheels
@pytest.mark.parametrize("version", ["0.5.18", "0.5.19", "0.5.23"])
def test_a_release_is_not_blamed_for_it(version: str) -> None:
    """An allocator that raises on misuse, or gives a page back twice, did what it was told."""
    for text, (mistakes, _, _) in CASES.items():
        seen = run(text, "shipped", 4, sglang(version))
        orphaned = text == ORPHANED and version == "0.5.18"  # its free_full is ``free``
        assert [(at, str(one)) for at, one in seen.mistakes] == ([] if orphaned else mistakes)
        assert seen.by_caller or (orphaned and seen.verdict == "clean")


@pytest.mark.parametrize("contract", CONTRACTS)
def test_no_search_makes_mistakes(contract: str) -> None:
    """What the contract allows, and what the shadow calls a mistake, exclude each other."""
    rules = Rules(contract, nodes=2, pages=2, segments=True, growth=True)
    made = 0
    waiting = [()]
    for _ in range(4):
        longer = []
        for order in waiting[:400]:
            execution = Execution(Builtin("cpu").make("eager", Sizes(6, 6, 4)))
            with suppress(*RAISED):  # a second group, and whatever else is refused
                for step in order:
                    execution.make(step)
            for step in [] if execution.shadow.mistakes else legal(execution.shadow, rules):
                longer.append((*order, step))
            made += 1
            assert execution.shadow.mistakes == []
        waiting = longer[:: max(1, len(longer) // 400)]
    assert made > 300


def test_the_public_cases(cli: Cli, tmp_path: Path) -> None:
    """#38941: one page in two segments. FreeToken 204: a live node is loaded back."""
    text = """
schema = 1
title = "one page freed in two segments whose seam is inside the page"
steps = [
  { alloc = "row", pages = 2 }, { group = "begin" }, { free_segment = "row", slots = "0:6" },
  { free_segment = "row", slots = "6:8" }, { group = "end" },
]
[pools]
page_sizes = [4]
[expect]
every = { verdict = "clean", physical = 0, mapped = 0, kinds = ["freed-twice"] }
"""
    (tmp_path / "seam.toml").write_text(text)
    seen = cli("repro", str(tmp_path / "seam.toml"), "-f", "json")
    results = json.loads(seen.out)["results"]
    assert (seen.code, len(results)) == (0, 4)
    for result in results:
        assert result["verdict"] == "clean"
        assert {
            "step": 4,
            "kind": "freed-twice",
            "pool": "full",
            "pages": [2],
            "fault": "caller",
        } in result["violations"]
    (tmp_path / "live.toml").write_text(
        'schema = 1\ntitle = "loaded back"\nsteps = [{ alloc = "node" }, { load_back = "node" }]\n'
    )
    seen = cli("repro", str(tmp_path / "live.toml"))
    assert seen.code == 1  # no leak was declared
    words = " ".join(seen.out.split())
    assert "step 2: overwritten: SWA page 1 left without a mapping (the caller's fault)" in words
    assert "from step 2: SWA page 1 leaked (the caller's fault)" in words
    seen = cli("repro", str(tmp_path / "live.toml"), "--repeat", "150")  # said once, not per round
    assert seen.out.count("overwritten") == len(STRATEGIES)


def test_a_recorded_caller_that_frees_twice(cli: Cli, tmp_path: Path) -> None:
    lines = [
        {"schema": "swaleak-trace/1", "page_size": 4, "full_pages": 8, "swa_pages": 8},
        {"op": "alloc_both", "full": 1, "swa": 1, "n": 8},
        {"op": "free", "full": [[1, 4]]},
        {"op": "free", "full": [[1, 4]]},
        {"op": "begin"},
        {"op": "end"},
    ]
    trace = tmp_path / "twice.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    seen = cli("replay", str(trace), "--strategy", "enqueue", "-f", "json")
    [result] = json.loads(seen.out)["results"]
    assert seen.code == 1
    assert [one for one in result["violations"] if "line" in one] == [
        {"line": 4, "kind": "freed-twice", "pool": "full", "pages": [1], "fault": "caller"}
    ]
    assert {one["fault"] for one in result["violations"]} == {"caller"}


@pytest.mark.wheels
def test_a_refusal_is_not_called_the_callers_fault(cli: Cli) -> None:
    """A latent scenario may be refused; nobody made a mistake in it."""
    seen = cli("repro", "nested-group", "--on", "0.5.23", "-s", "enqueue", "--page-size", "4")
    assert (seen.code, "refused" in seen.out, "caller's fault" in seen.out) == (0, True, False)
