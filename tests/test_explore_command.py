"""`swaleak explore`: exit codes, the report, what is recognised, and the line while it runs."""

import io
import json

import pytest

from swaleak.explorer.breadth_first import BreadthFirst, Progress
from swaleak.explorer.counterexample import same_order
from swaleak.explorer.random_walk import RandomWalk
from swaleak.explorer.shrink import renamed
from swaleak.report import explore as explore_reports
from swaleak.report.progress import ProgressLine
from swaleak.scenario import catalogue as scenarios
from swaleak.scenario import steps


def test_the_catalogue_recognises_its_own():
    catalogue = [s for s in scenarios.catalogue() if not s.caches]
    told = {s.name: same_order(renamed(s.steps), catalogue) for s in catalogue}
    assert told == {name: name for name in told}


def test_the_catalogue_recognises_another_order_of_allocation_without_bystander():
    order = (
        steps.Alloc("b"),
        steps.Alloc("a"),
        steps.Group("begin"),
        steps.FreeSwa("a"),
        steps.Recover("a", "b"),
        steps.Group("end"),
    )
    told = [same_order(s, scenarios.catalogue()) for s in (order, order[:-1])]
    assert told == ["tombstone-recovery", None]


AT_RANDOM = ("explore", "--on", "builtin")
ON = (*AT_RANDOM, "--depth", "6")


def call(arguments):
    return (*(AT_RANDOM if "--random" in arguments else ON), *arguments)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((), 1),
        (("-s", "barrier"), 0),
        (("-s", "enqueue", "--contract", "latent", "--page-size", "1", "--page-size", "4"), 0),
        (("-s", "deferred", "--jobs", "2"), 1),
        (("--random", "--steps", "50", "--seed", "3"), 1),
        (("--random", "--steps", "50", "-s", "eager", "--scripts", "5", "--shard", "2/2"), 0),
    ],
)
def test_exit_codes(cli, arguments, code):
    answer = cli(*call(arguments))
    assert (answer.code, answer.err) == (code, "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--shard", "1/2"), "explore: --shard means nothing without --random"),
        (("--save", "found.json"), "a scenario is a .toml file"),
        (("--save", "/nowhere/found.toml"), "there is no folder /nowhere"),
        (("-s", "shipped"), "the built-in model ships nothing"),
        (("-s", "bariier"), "did you mean 'barrier'?"),
        (("--page-size", "0"), "page size 0: must be from 1 to 4096"),
        (("--contract", "loose"), "'loose'"),
        (("--nodes", "0"), "--nodes"),
        (("--steps", "5"), "explore: --steps means nothing without --random"),
        (("--scripts", "5"), "explore: --scripts means nothing without --random"),
        (("--random",), "explore: --depth means nothing with --random"),
    ],
)
def test_bad_usage_is_one_line(cli, arguments, said):
    answer = cli(*ON, *arguments)
    assert (answer.code, answer.out, answer.err.count("\n"), said in answer.err) == (2, "", 1, True)


def test_what_is_in_the_catalogue_is_told_from_what_is_new(cli):
    call = ("explore", "--on", "builtin", "--depth", "7", "--all", "-s", "deferred", "-f")
    failures = json.loads(cli(*call, "json").out)["results"][0]["failures"]
    found = [f["scenario"] for f in failures]
    new = [None] * (len(failures) - 1)
    assert (found, len(failures) > 1) == (["tombstone-recovery", *new], True)
    lines = cli(*call, "table").out.splitlines()
    assert lines.count("In the catalogue: tombstone-recovery.") == 1
    assert lines.count("New: no catalogue scenario has these steps.") == min(len(new), 9)


@pytest.mark.parametrize(("depth", "longer"), [(64, False), (3, True)])
def test_longer_orders_are_not_covered_unless_there_are_none(cli, depth, longer):
    call = ("explore", "--on", "builtin", "-s", "eager", "--nodes", "1", "--depth", depth)
    said = " ".join(cli(*call).out.split())
    assert ("No order of any length fails" in said, "longer orders" in said) == (not longer, longer)
    assert "with up to 1 node of 1 to 2 pages." in said


def test_one_of_anything_is_no_plural(cli):
    said = cli(*AT_RANDOM, "-s", "eager", "--random", "--scripts", "1", "--steps", "1").out
    lines = ("1 random script does not fail.", "1 script, 1 step in")
    assert [line in said for line in lines] == [True, True]


def test_a_saved_failure_replays_as_declared(cli, tmp_path):
    saved = tmp_path / "found.toml"
    assert cli(*ON, "--page-size", 4, "--save", saved).code == 1
    answer = cli("repro", saved, "--on", "builtin", "--format", "json")
    verdicts = {r["strategy"]: r["verdict"] for r in json.loads(answer.out)["results"]}
    clean = dict.fromkeys(("eager", "enqueue", "barrier"), "clean")
    assert (answer.code, verdicts) == (0, clean | {"deferred": "leak"})


def test_json(cli):
    told = json.loads(cli(*ON, "--format", "json").out)
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


def test_many_failures_are_counted_and_the_json_has_all(cli, monkeypatch):
    monkeypatch.setattr(explore_reports, "SHOWN", 2)
    every = (*ON, "--contract", "latent", "--all")
    table = cli(*every).out
    failures = len(json.loads(cli(*every, "-f", "json").out)["results"][0]["failures"])
    said = f"{failures - 2} of {failures} failures not shown; -f json prints all"
    assert (failures > 3, table.count("fails after"), said in table) == (True, 2, True)


@pytest.mark.parametrize(
    ("search", "arguments"), [(BreadthFirst, ()), (RandomWalk, ("--random", "--steps", "20"))]
)
def test_interrupted_says_what_was_covered(cli, monkeypatch, search, arguments):
    whole = search.run

    def interrupted(self):
        progress = whole(self)
        yield next(progress)
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "run", interrupted)
    answer = cli(*call(arguments), "-s", "eager", "--format", "json")
    [result] = json.loads(answer.out)["results"]
    tried = result.get("transitions") or result.get("operations")
    covered = (result["interrupted"], tried > 0)
    assert (answer.code, answer.err, covered) == (130, "", (True, True))


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
