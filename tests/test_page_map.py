"""The page map: what stands in its cells, and the sentence that it comes to."""

import contextlib
import io
import itertools
import os
import subprocess
import sys

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console

from swaleak.allocator.strategies import STRATEGIES
from swaleak.checker.case import run_case
from swaleak.checker.page_map import Page
from swaleak.checker.run import run_script as replay
from swaleak.errors import ScriptError
from swaleak.report.cases import case_json
from swaleak.report.model import Report
from swaleak.report.page_map import FAULTS, WIDTH, fault, page_map, page_maps
from swaleak.report.render import print_to
from swaleak.scenario import catalogue as scenarios
from swaleak.scenario import steps as ops
from swaleak.scenario.toml import Scenario, parse
from swaleak.targets.open import Builtin, Sizes
from tests.conftest import sglang


def target_of(version: str | None):
    return sglang(version) if version else Builtin("cpu")


def played(scenario, strategy="deferred", page_size=4, version=None):
    if isinstance(scenario, str):
        scenario = scenarios.load(scenario)
    return run_case(scenario, target_of(version), strategy, page_size, keep_steps=True)


def printed(*sections) -> str:
    file = io.StringIO()
    report = Report("repro", True, "header", sections, {})
    print_to(report, Console(file=file, width=WIDTH, highlight=False))
    return file.getvalue()


def script(*steps: str, pages: int = 200):
    pools = f"[pools]\nfull_pages = {pages}\nswa_pages = {pages}"
    text = f"schema = 1\nsteps = [{', '.join(steps)}]\n{pools}"
    return parse(text, name="script", source="script.toml")


LEAKED = "2 SWA pages in use, 1 mapped."
# scenario, strategy, release -> the sentence
SENTENCES = {
    ("tombstone-recovery", "deferred", None): "Step 7, group end: the flush looked up node's "
    "peer, found incoming's page 3, and freed it; page 2, node's until step 5, is now "
    f"unreachable. {LEAKED}",
    ("hicache-load-back", "deferred", None): "Step 6, group end: the flush looked up node's peer, "
    "found its new page 3, and freed it; page 2, node's until step 4, is now unreachable. "
    f"{LEAKED}",
    ("tombstone-recovery", "enqueue", None): "Every page is with the node that should have it, "
    "and nothing else is held.",
    ("nested-group", "barrier", None): "Refused, and nothing has changed: GroupRefused: a free "
    "group is open already; groups do not nest",
    ("nested-group", "shipped", "0.5.18"): "Step 6, group end: page 2, node's until step 4, is "
    "held and mapped although nobody has it. 2 SWA pages in use, 2 mapped.",
    ("nested-group", "shipped", "0.5.19"): "Step 6, group end: page 2, node's until step 4, is "
    f"now unreachable. {LEAKED}",
    ("double-group-end", "shipped", "0.5.18"): "Step 6, group end: full page 2 twice in the free "
    "list. 1 SWA page in use, 1 mapped.",
    ("partial-page-free", "shipped", "0.5.13.post1"): "Step 3, free_swa node, slots 0:1: page 2, "
    "node's until step 3, is free, and the mapping still points at it. 1 SWA page in use, 2 "
    "mapped.",
    ("buffer-overwritten", "shipped", "0.5.17"): "Step 7, group end: page 3 is freed although "
    "other has it; page 2, node's until step 5, is held and mapped although nobody has it; full "
    "page 2 leaked; dangling: full page 3 in use and in the free list. 2 SWA pages in use, 2 "
    "mapped.",
}


@pytest.mark.parametrize(
    "told",
    [
        pytest.param(key, id="-".join(map(str, key)), marks=[pytest.mark.wheels] * bool(key[2]))
        for key in SENTENCES
    ],
)
def test_the_sentence(told):
    scenario, strategy, version = told
    assert page_map(played(scenario, strategy, version=version)).sentence.text == SENTENCES[told]


def test_the_strip_of_the_bug():
    assert printed(page_map(played("tombstone-recovery"))).splitlines()[2:] == [
        "tombstone-recovery, deferred (builtin), page size 4: the SWA pages",
        "",
        "  # step                       page 1      page 2   page 3     used mapped",
        " " + "─" * 73,
        "  1 alloc bystander            ● bystander ·        ·             1      1",
        "  2 alloc node                 ● bystander ● node   ·             2      2",
        "  3 alloc incoming             ● bystander ● node   ● incoming    3      3",
        "  4 group begin                ● bystander ● node   ● incoming    3      3",
        "  5 free_swa node              ● bystander ● (node) ● incoming    3      3",
        "  6 recover node from incoming ● bystander ○ (node) ● node        3      2",
        " ✗7 group end                  ● bystander ✗ leaked ✗ freed       2      1",
        "",
        "Step 7, group end: the flush looked up node's peer, found incoming's page 3, and",
        "freed it; page 2, node's until step 5, is now unreachable. 2 SWA pages in use, 1",
        "mapped.",
        "",
        "● mapped   ○ in use, not mapped   · free   (name) given up, waits in the queue",
        "✗ leaked: in use, and nothing reaches it any more",
        "✗ freed: in the free list, although a node has it",
    ]


def crowd(nodes: int):
    """A leak among many nodes, in pools too wide for a line."""
    names = [f"request-{i}" for i in range(nodes)]
    return script(
        *(f'{{ alloc = "{name}", pages = {1 + i % 3} }}' for i, name in enumerate(names)),
        '{ group = "begin" }',
        '{ free_swa = "request-3" }',
        '{ recover = "request-3", from = "request-6" }',
        '{ free = "request-4" }',
        '{ group = "end" }',
        '{ alloc = "after" }',
    )


@pytest.mark.parametrize(("nodes", "every_row"), [(7, True), (60, False)])
def test_wide_pools_are_folded_to_the_pages_that_matter(nodes, every_row):
    """Page 7 leaks, page 13 is freed; they and their marks are there however wide the pools."""
    strip = page_map(played(crowd(nodes)))
    text = printed(strip)
    facts = (
        {"7", "13", "others"} <= set(strip.grid.columns),
        "…" not in [row[0].text for row in strip.grid.rows],
        max(map(len, text.splitlines())) <= WIDTH,
        "✗L" in text and "✗F" in text and "request-6's page 13" in strip.sentence.text,
    )
    assert facts == (True, every_row, True, True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_scenario_fits_80_columns(strategy):
    cases = [
        played(scenario, strategy, scenario.page_sizes[-1]) for scenario in scenarios.catalogue()
    ]
    by_scenario = page_maps(cases, every_step=True)
    lines = printed(*(s for sections in by_scenario.values() for s in sections)).splitlines()
    assert [line for line in lines if len(line) > WIDTH] == []


# what a page is -> what is wrong with it
STATES = {
    "mapped": (Page(1, ("a",), True, True, False), ""),
    "queued, still mapped": (Page(1, (), True, True, True), ""),
    "queued, not mapped": (Page(1, (), True, False, True), ""),
    "leaked": (Page(1, (), True, False, False), "leaked"),
    "held and mapped, nobody's": (Page(1, (), True, True, False), "stale"),
    "free and mapped": (Page(1, (), False, True, False), "stale"),
    "free, a node's": (Page(1, ("a",), False, False, False), "freed"),
    "a node's, not mapped": (Page(1, ("a",), True, False, False), "unmapped"),
    "two nodes'": (Page(1, ("a", "b"), True, True, False), "shared"),
    "padding in the free list": (Page(0, (), False, False, False), "bad free"),
}


@pytest.mark.parametrize("state", STATES)
def test_fault(state):
    page, wrong = STATES[state]
    assert (fault(page, in_group=False), wrong in FAULTS or wrong == "") == (wrong, True)


NAMES = ("a", "node with a long name", "c")
MENU = [
    *(ops.Alloc(name, pages) for name in NAMES for pages in (1, 2)),
    *(kind(name) for name in NAMES for kind in (ops.Free, ops.FreeSwa, ops.FreeFull, ops.LoadBack)),
    *(
        kind(one, other)
        for one, other in itertools.permutations(NAMES, 2)
        for kind in (ops.Recover, ops.Adopt, ops.Replace)
    ),
    *(ops.Group(edge) for edge in ("begin", "end")),
]


@given(
    st.lists(st.sampled_from(MENU), min_size=1, max_size=16), st.sampled_from(sorted(STRATEGIES))
)
@settings(deadline=None, max_examples=60)
def test_any_run_has_a_strip_and_a_sentence(wanted, strategy):
    """Whatever is played: the strip fits, and it is marked wrong just where the audit says so."""
    steps = []
    for op in wanted:  # keep what makes sense after what was kept
        with contextlib.suppress(ScriptError):
            replay(Builtin("cpu").make("eager", Sizes(40, 40, 4)), (*steps, op))
            steps.append(op)
    assume(steps)
    script = Scenario("any", "any", tuple(steps), full_pages=40, swa_pages=40)
    case = played(script, strategy)
    section = page_map(case)
    marked = [i for i, row in enumerate(section.grid.rows) if row[0].text.startswith("✗")]
    bad = [i for i, step in enumerate(case.run.steps) if step.comparison.violations][:1]
    widest = max(map(len, printed(section).splitlines()))
    assert (marked, widest <= WIDTH, section.sentence.text.startswith("Step")) == (
        bad,
        True,
        bool(bad),
    )


def test_what_leaked_before_a_group_does_not_wait_in_it():
    leaky = script(
        *('{ alloc = "node" }', '{ alloc = "incoming" }', '{ group = "begin" }'),
        *('{ free_swa = "node" }', '{ recover = "node", from = "incoming" }'),
        *('{ group = "end" }', '{ group = "begin" }'),
    )
    last = played(leaky).run.steps[-1]
    assert [(page.page, page.queued) for page in last.pages] == [(1, False), (2, False)]


def test_pages_are_in_the_json_of_a_step():
    step = case_json(played("tombstone-recovery"))["steps"][5]
    assert step == {
        "step": 6,
        "op": "recover node from incoming",
        "physical": 3,
        "mapped": 2,
        "violations": [],
        "pages": [
            {"page": n, "owners": who, "free": False, "mapped": bool(who), "queued": not who}
            for n, who in ((1, ["bystander"]), (2, []), (3, ["node"]))
        ],
    }


def on_a_terminal(*arguments: str) -> str:
    """Return what the command line prints where standard output is a terminal."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    run = subprocess.Popen(
        [sys.executable, "-m", "swaleak", *arguments],
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=os.environ | {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"},
    )
    os.close(theirs)
    output = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # Linux: nobody writes any more
            break
        if not piece:
            break
        output += piece
    os.close(ours)
    run.wait()
    return output.decode()


@pytest.mark.parametrize(("strategy", "times"), [("deferred", 1), ("enqueue", 0)])
def test_a_failing_run_is_shown_on_a_terminal(strategy, times):
    assert on_a_terminal("repro", "-s", strategy).count("the SWA pages") == times
