"""Shrinking, random scripts, written scenarios, and the command itself."""

import io
import json
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swaleak import cli
from swaleak.check.replay import replay
from swaleak.report import explore as explore_reports
from swaleak.report.progress import ProgressLine
from swaleak.script import catalogue as scenarios
from swaleak.script import ops
from swaleak.script.ops import Part, describe
from swaleak.script.read import parse
from swaleak.script.scenario import Scenario
from swaleak.script.write import to_toml
from swaleak.search.explore import Explorer, Progress, Shard
from swaleak.search.fuzz import Fuzzer
from swaleak.search.legal import Rules
from swaleak.search.shrink import renamed, shrink
from swaleak.search.witness import described_by
from swaleak.target import Builtin, Sizes

BUILTIN = Builtin("cpu")


def words(script):
    return " | ".join(map(describe, script))


def keys(script):
    return [op.key for op in script]


LONG = (
    ops.Alloc("a", 3),
    ops.Alloc("b"),
    ops.Group("begin"),
    ops.Free("b"),
    ops.FreeSwa("a", Part("pages", 0, 1)),
    ops.Group("end"),
    ops.Extend("c", 5),
    ops.Decode("c"),
    ops.Free("c"),
    ops.FreeFull("a", Part("pages", 0, 1)),
)


@pytest.mark.parametrize(
    ("fails", "left"),
    [
        (lambda s: "free_full" in keys(s), "free_full n1"),
        (lambda s: "decode" in keys(s) and "extend" in keys(s), "extend n1, 1 tokens | decode n1"),
        (lambda s: keys(s).count("group") == 2, "group begin | group end"),
        (lambda s: sum(getattr(op, "pages", 0) for op in s) >= 2, "alloc n1, 2 pages"),
        (lambda s: len(s) >= 3, "alloc n1 | alloc n2 | group begin"),
        (lambda s: s[-1:] == LONG[-1:], "free_full n1, pages 0:1"),
    ],
)
def test_shrink(fails, left):
    assert words(shrink(LONG, fails)) == left


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, len(LONG) - 1), min_size=1))
def test_shrink_keeps_what_is_needed_and_nothing_else(needed):
    wanted = [LONG[i].key for i in sorted(needed)]

    def fails(script):
        rest = iter(keys(script))
        return all(key in rest for key in wanted)  # in this order

    assert keys(shrink(LONG, fails)) == wanted


def test_names_in_order_of_allocation_and_a_used_name_is_a_new_node():
    script = [ops.Alloc("x"), ops.Alloc("a"), ops.Free("x"), ops.Alloc("x"), ops.Recover("a", "x")]
    told = "alloc n1 | alloc n2 | free n1 | alloc n3 | recover n2 from n3"
    assert words(renamed(script)) == told


def fuzzed(strategy, page_size, contract="production", scripts=30, shard=None):
    def make(full, swa):
        return BUILTIN.make(strategy, Sizes(full, swa, page_size))

    fuzzer = Fuzzer(make, Rules(contract, 8, 3, growth=True), 60, 0, scripts, shard)
    for _ in fuzzer.run():
        pass
    return fuzzer.tried


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("contract", ["production", "latent"])
@pytest.mark.parametrize("strategy", ["eager", "enqueue", "barrier"])
def test_random_scripts_find_nothing_in_sound_strategies(strategy, contract, page_size):
    tried = fuzzed(strategy, page_size, contract)
    assert (tried.failure, tried.scripts) == (None, 30)


@pytest.mark.parametrize("page_size", [1, 4])
def test_random_scripts_find_and_shrink_the_bug_the_same_way_twice(page_size):
    once, again = (fuzzed("deferred", page_size).failure for _ in range(2))
    kinds = {violation.kind for violation in once.run.audit.violations}
    assert (once.order, once.seed) == (again.order, again.seed)
    assert once.length > len(once.order) == 6 and "leak" in kinds


def test_random_shards_split_the_seeds():
    counted = [fuzzed("eager", 1, shard=Shard(i, 4), scripts=10).scripts for i in (1, 2, 3, 4)]
    assert counted == [3, 3, 2, 2]


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
    run = replay(BUILTIN.make(strategy, Sizes(16, 16, page_size)), script, keep_steps=True)
    pages = [-(-n // page_size) for n in (3, 4, 5)]
    b = pages[2]
    assert (run.verdict, run.audit.physical, [s.audit.physical for s in run.steps[:4]]) == (
        "clean",
        0,
        [*pages, 2 * b],
    )


@pytest.mark.parametrize("name", scenarios.names())
def test_a_written_scenario_reads_back_the_same(name):
    there = scenarios.load(name)
    back = parse(to_toml(there), name=name, source=there.source)
    story = " ".join(there.story.split())
    assert replace(back, story=" ".join(back.story.split())) == replace(there, story=story)


def test_a_written_scenario_keeps_every_operation_and_odd_names():
    name = 'a "b" \\ é'
    steps = (
        *LONG,
        ops.AllocTail(name, 3, 1),
        ops.FreeSegment(name, Part("slots", None, -1)),
        ops.FreeSwaSegment(name),
        ops.Adopt(name, "a"),
        ops.Replace(name, "a"),
        ops.Overwrite(name, "a"),
        ops.LoadBack(name),
        ops.Expect(None, 3),
    )
    there = Scenario(name="x", title=name, steps=steps, story=name, source="x")
    assert parse(to_toml(there), name="x", source="x") == there


def test_the_catalogue_recognises_its_own():
    catalogue = scenarios.catalogue()
    told = {s.name: described_by(renamed(s.steps), catalogue) for s in catalogue}
    assert told == {name: name for name in told}


def test_the_catalogue_recognises_another_order_of_allocation_without_bystander():
    steps = (
        ops.Alloc("b"),
        ops.Alloc("a"),
        ops.Group("begin"),
        ops.FreeSwa("a"),
        ops.Recover("a", "b"),
        ops.Group("end"),
    )
    told = [described_by(s, scenarios.catalogue()) for s in (steps, steps[:-1])]
    assert told == ["tombstone-recovery", None]


def run(monkeypatch, capsys, *arguments):
    """Return the exit code, what was printed, and the error line."""
    monkeypatch.setattr(sys, "argv", ["swaleak", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    printed = capsys.readouterr()
    return exit_.value.code, printed.out, printed.err


ON = ("explore", "--on", "builtin", "--depth", "6")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((), 1),
        (("-s", "barrier"), 0),
        (("-s", "enqueue", "--contract", "latent", "--page-size", "1", "--page-size", "4"), 0),
        (("-s", "deferred", "--shard", "1/2"), 1),
        (("--random", "--steps", "50", "--seed", "3"), 1),
        (("--random", "--steps", "50", "-s", "eager", "--scripts", "5", "--shard", "2/2"), 0),
    ],
)
def test_exit_codes(monkeypatch, capsys, arguments, code):
    assert run(monkeypatch, capsys, *ON, *arguments)[::2] == (code, "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--shard", "3/2"), "--shard 3/2: must be I/N"),
        (("--shard", "x"), "--shard x: must be I/N"),
        (("--save", "found.json"), "a scenario is a .toml file"),
        (("--save", "/nowhere/found.toml"), "there is no folder /nowhere"),
        (("-s", "shipped"), "the built-in model ships nothing"),
        (("-s", "bariier"), "did you mean 'barrier'?"),
        (("--page-size", "0"), "page size 0: must be from 1 to 4096"),
        (("--contract", "loose"), "'loose'"),
        (("--nodes", "0"), "--nodes"),
    ],
)
def test_bad_usage_is_one_line(monkeypatch, capsys, arguments, said):
    code, out, err = run(monkeypatch, capsys, *ON, *arguments)
    assert (code, out, err.count("\n"), said in err) == (2, "", 1, True)


def test_a_saved_failure_replays_as_declared(monkeypatch, capsys, tmp_path):
    saved = str(tmp_path / "found.toml")
    assert run(monkeypatch, capsys, *ON, "--page-size", "4", "--save", saved)[0] == 1
    code, out, _ = run(monkeypatch, capsys, "repro", saved, "--on", "builtin", "--format", "json")
    verdicts = {r["strategy"]: r["verdict"] for r in json.loads(out)["results"]}
    clean = dict.fromkeys(("eager", "enqueue", "barrier"), "clean")
    assert (code, verdicts) == (0, clean | {"deferred": "leak"})


def test_json(monkeypatch, capsys):
    _, out, _ = run(monkeypatch, capsys, *ON, "--format", "json")
    told = json.loads(out)
    [result] = told["results"]
    [failure] = result["failures"]
    last = failure["steps"][-1]
    assert (
        told["ok"],
        result["depth"],
        failure["verdict"],
        failure["scenario"],
        last["owners"],
        [violation["kind"] for violation in last["violations"]],
    ) == (
        False,
        5,
        "leak",
        "tombstone-recovery",
        {"n1": {"full": [1], "swa": [2]}},
        ["leak", "lost"],
    )


def test_many_failures_are_counted_and_the_json_has_all(monkeypatch, capsys):
    monkeypatch.setattr(explore_reports, "SHOWN", 2)
    call = (*ON, "--contract", "latent", "--all")
    _, table, _ = run(monkeypatch, capsys, *call)
    _, out, _ = run(monkeypatch, capsys, *call, "-f", "json")
    failures = len(json.loads(out)["results"][0]["failures"])
    said = f"{failures - 2} of {failures} failures not shown; -f json prints all"
    assert (failures > 3, table.count("fails after"), said in table) == (True, 2, True)


@pytest.mark.parametrize(
    ("search", "arguments"), [(Explorer, ()), (Fuzzer, ("--random", "--steps", "20"))]
)
def test_interrupted_says_what_was_covered(monkeypatch, capsys, search, arguments):
    whole = search.run

    def interrupted(self):
        progress = whole(self)
        yield next(progress)
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "run", interrupted)
    code, out, err = run(monkeypatch, capsys, *ON, "-s", "eager", *arguments, "--format", "json")
    [result] = json.loads(out)["results"]
    tried = result.get("transitions") or result.get("operations")
    assert (code, err, result["interrupted"], tried > 0) == (130, "", True, True)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("file", "written"),
    [
        (io.StringIO(), ""),
        (Terminal(), "\r\x1b[2Kdepth 3: 10 states, 20 transitions, 10/s\r\x1b[2K"),
    ],
)
def test_progress_line(file, written):
    with ProgressLine(file) as line:
        line.show(Progress(10, 20, 3, 2.0))
        line.show(Progress(11, 22, 3, 2.0))  # too soon after the other
    assert file.getvalue() == written
