"""Requests on SGLang's own radix caches, driven as its scheduler does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swaleak.checker.conservation import run_on_cache
from swaleak.checker.run import Run
from swaleak.checker.snapshot import Graph
from swaleak.errors import ScriptError
from swaleak.scenario.request_steps import prompt_of, tokens_of
from swaleak.scenario.steps import Step
from swaleak.scenario.toml import parse
from swaleak.targets.driver import Sizes
from swaleak.targets.radix_cache import CLASSES, Caches, RadixCache
from swaleak.targets.sources import RELEASES
from tests.conftest import Cli, sglang, wheel
from tests.test_radix_cache import CACHES

pytestmark = pytest.mark.wheels

LIFE = """
{ admit = "r1", prompt = "BB" }, { chunk = "r1" }, { grow = "r1", by = "B" }, { chunk = "r1" },
{ admit = "r2", prompt = "AB" }, { evict_swa = 2 }, { chunk = "r2" }, { grow = "r1", tokens = 3 },
{ slide = "r1" }, { grow = "r2", tokens = 2 }, { release_window = "r2" }, { group = "begin" },
{ finish = "r1" }, { retract = "r2" }, { group = "end" }, { admit = "r3", prompt = "BBA" },
{ abort = "r3" }, { flush = true }
"""
# #29352: seven steps after which the first request reads a page that was freed under it
TAKEN = """
{ admit = "r1", prompt = "BB" }, { chunk = "r1" }, { grow = "r1", by = "B" }, { chunk = "r1" },
{ admit = "r2", prompt = "B" }, { evict_swa = 2 }, { chunk = "r2" }
"""
# #36081 with no eviction in the group, where the unified cache frees what has left the window
LEAK = """
{ admit = "r1", prompt = "A" }, { admit = "r2", prompt = "AAA" }, { group = "begin" },
{ chunk = "r2" }, { finish = "r1" }, { group = "end" }
"""


def script(text: str) -> tuple[Step, ...]:
    return parse(f"schema = 1\nsteps = [{text}]", name="mine", source="mine.toml").steps


def run(version: str, cache: str, text: str, size: int, strategy: str = "shipped") -> Run:
    caches = sglang(version).caches

    def make(strategy: str) -> RadixCache:
        return caches.make(cache, strategy, Sizes(16, 16, size), 1)

    return run_on_cache(make, strategy, script(text))


def said(run: Run) -> list[tuple[str, str]]:
    return [(str(violation), violation.fault) for violation in run.comparison.violations]


@pytest.mark.parametrize(("version", "cache"), CACHES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_life_on_every_release(version: str, cache: str, page_size: int) -> None:
    text = LIFE if page_size == 1 else LIFE.replace('{ release_window = "r2" }, ', "")
    if cache == "unified" and version in RELEASES[: RELEASES.index("0.5.16")]:
        text = text.replace('{ release_window = "r2" }, ', "")
    if version < "0.5.15":  # what is freed in the middle is another test
        text = text.replace('prompt = "AB"', 'prompt = "A"')
    seen = run(version, cache, text, page_size)
    assert (seen.verdict, seen.raised, seen.comparison.full) == ("clean", None, 0)


@pytest.mark.parametrize("cache", CLASSES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_page_is_taken_from_a_running_request(cache: str, page_size: int) -> None:
    for version in ("0.5.13.post1", "0.5.14"):
        for strategy in ("shipped", "enqueue"):
            seen = run(version, cache, TAKEN, page_size, strategy)
            assert said(seen) == [("stolen: request r1's full page 0", "cache")]
            assert (seen.verdict, seen.failed_at) == ("corrupt", 7)
    assert run("0.5.15.post1", cache, TAKEN, page_size).verdict == "clean"


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_leak_of_0_5_18_without_an_eviction(page_size: int) -> None:
    seen = run("0.5.18", "unified", LEAK, page_size)
    assert seen.verdict == "leak"
    assert {violation.fault for violation in seen.comparison.violations} == {"allocator"}
    for strategy in ("eager", "enqueue", "barrier"):
        assert run("0.5.18", "unified", LEAK, page_size, strategy).verdict == "clean"
    assert run("0.5.19", "unified", LEAK, page_size).verdict == "clean"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{ grow = "r1" }', "step 1: grow: there is no request 'r1' at this point"),
        (
            '{ admit = "r1", prompt = "A" }, { grow = "r1" }',
            "step 2: grow r1: chunk it first, what it has computed is not in the cache",
        ),
        (
            '{ admit = "r1", prompt = "A" }, { flush = true }',
            "step 2: flush: r1 is running, and only an idle server is flushed",
        ),
        ('{ admit = "r1", prompt = "A/3" }', "step 1: A/3 is no part of a page of 1 tokens"),
        (
            '{ group = "begin" }, { admit = "r1", prompt = "A" }',
            "step 2: admit r1: a free group is open, in which nothing is allocated",
        ),
    ],
)
def test_what_a_scheduler_does_not_do_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ScriptError) as raised:
        run("0.5.18", "swa", text, 1)
    assert str(raised.value) == reason


def test_prompts_by_the_token() -> None:
    for prompt in ("AB", "A/3", "A/3B", "AB/1"):
        assert prompt_of(tuple(tokens_of(prompt, 4)), 4) == prompt
    assert prompt_of((*tokens_of("A", 4), 0, 0), 4) == "A+2"
    assert prompt_of(tuple(tokens_of("AB", 4)[2:]), 4) == "A/2:4B"


@pytest.mark.parametrize("cache", CLASSES)
def test_nodes_that_differ_in_the_last_token_of_an_eagle_key_are_two(cache: str) -> None:
    tree = sglang("0.5.19").caches.make(cache, "shipped", Sizes(16, 16, 4), 1, eagle=True)
    for step in script(
        '{ admit = "r1", prompt = "AA" }, { finish = "r1" },'
        '{ admit = "r2", prompt = "AB" }, { finish = "r2" }'
    ):
        tree.play(step)
    assert sorted(tree.look().owners) == ["AA/1", "AB/1"]


@pytest.mark.parametrize(("version", "cache"), [("0.5.18", "swa"), ("0.5.23", "unified")])
def test_a_graph_of_objects_goes_back(version: str, cache: str) -> None:
    tree = sglang(version).caches.make(cache, "shipped", Sizes(16, 16, 4), 1)
    steps = script(TAKEN)
    for step in steps[:5]:
        tree.play(step)
    graph = Graph(tree, (Caches,))
    owners, mapping = tree.look().owners, tree.state().mapping.clone()
    for step in (*steps[5:], *script('{ abort = "r1" }, { abort = "r2" }, { evict_full = 8 }')):
        tree.play(step)
    assert tree.look().owners != owners
    graph.restore()
    assert (tree.look().owners, tree.state().mapping.tolist()) == (owners, mapping.tolist())
    for step in steps[5:]:
        tree.play(step)
    tree.settle()


def test_the_search_finds_what_is_known_and_saves_it(cli: Cli, tmp_path: Path) -> None:
    saved = tmp_path / "found.toml"
    asked = ("explore", "--requests", "--random", "--steps", "60", "--cache")
    answer = cli(*asked, "unified", "--on", wheel("0.5.18"), "--save", str(saved), "-f", "json")
    [found] = json.loads(answer.out)["results"]
    assert (answer.code, found["cache"], found["requests"]) == (1, "unified", 3)
    assert found["failures"][0]["verdict"] == "leak"
    assert len(found["failures"][0]["steps"]) <= 8
    again = cli("repro", str(saved), "--on", wheel("0.5.18"), "-s", "shipped")
    assert again.code == 0
    clean = cli("explore", "--requests", "--depth", "3", "--on", wheel("0.5.19"), "-f", "json")
    results = json.loads(clean.out)["results"]
    assert (clean.code, [r["exhausted"] for r in results]) == (0, [False, False])
    assert [r["failures"] for r in results] == [[], []]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--requests", "--nodes", "2"), "explore: --nodes means nothing with --requests"),
        (("--cache", "swa"), "explore: --cache means nothing without --requests"),
        (("--requests", "--cache", "x"), "unknown cache 'x'; known: swa, unified"),
    ],
)
def test_bad_options(options: tuple[str, ...], said: str, cli: Cli) -> None:
    answer = cli("explore", *options, "--on", wheel("0.5.19"))
    assert (answer.code, answer.err) == (2, f"swaleak: {said}\n")
