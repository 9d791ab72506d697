"""Reports as files: the form is in the ending, and half a file never stays."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from swaleak.checker.case import Case, run_case
from swaleak.checker.compare import Violation
from swaleak.checker.run import Run
from swaleak.errors import UsageError, counted, page_list
from swaleak.report.cases import check_report, repro_report
from swaleak.report.model import About, Report, violation_text
from swaleak.report.page_map import INTRO, page_map
from swaleak.report.render import FORMATS, as_json, as_junit, as_markdown, as_svg, write
from swaleak.scenario import catalogue as scenarios
from swaleak.scenario.toml import Outcome
from swaleak.targets.open import Builtin
from tests.conftest import USER_CLASS, Cli

SVG = "{http://www.w3.org/2000/svg}"


def swaleak(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swaleak", *arguments], capture_output=True, text=True
    )


class Page(HTMLParser):
    """What an HTML page shows, and what it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.fetched = "", []
        self.feed(text)

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag, attrs) -> None:
        self.fetched += [value for key, value in attrs if key in ("src", "href")]


def test_the_picture_of_the_bug(tmp_path):
    svg, html = tmp_path / "bug.svg", tmp_path / "bug.html"
    codes = [swaleak("repro", "-s", "deferred", "-o", str(path)).returncode for path in (svg, html)]
    page = Page(html.read_text())
    drawn = "".join(ElementTree.fromstring(svg.read_text()).itertext()).replace("\xa0", " ")
    told = ("✗ leaked", "✗ freed", "found incoming's page 3", "in use but not mapped")
    missing = [
        (words, where)
        for where, text in (("svg", drawn), ("html", page.text))
        for words in told
        if words not in " ".join(text.split())
    ]
    remote = re.findall(r"url\((?!#)[^)]*\)|@import[^;]*", svg.read_text() + html.read_text())
    assert (codes, missing, remote + page.fetched) == ([0, 0], [], [])


def test_the_picture_at_the_top_of_the_readme_is_up_to_date():
    """docs/tombstone-recovery.svg is what `repro --strategy deferred` writes, but for versions."""
    kept = Path(__file__).parent.parent / "docs" / "tombstone-recovery.svg"
    if not kept.is_file():
        pytest.skip("docs/ is not here (a source distribution)")
    drawn = "".join(ElementTree.fromstring(kept.read_text()).itertext()).replace("\xa0", " ")
    scenario = scenarios.load("tombstone-recovery")
    case = run_case(scenario, Builtin("cpu"), "deferred", 4, keep_steps=True)
    strip = page_map(case)
    texts = [strip.sentence.text, *strip.lines, INTRO, scenario.story]
    texts += [cell.text for row in strip.grid.rows for cell in row]
    squeezed = re.sub(r"\s", "", drawn)
    assert [text for text in texts if re.sub(r"\s", "", text) not in squeezed] == []


ENDINGS = {
    ".json": lambda text: json.loads(text)["command"] == "repro",
    ".md": lambda text: "| strategy |" in text,
    ".svg": lambda text: ElementTree.fromstring(text).tag == f"{SVG}svg",
    ".html": lambda text: text.startswith("<!DOCTYPE html>"),
    ".xml": lambda text: ElementTree.fromstring(text).tag == "testsuites",
}


def report() -> Report:
    case = run_case(scenarios.load("tombstone-recovery"), Builtin("cpu"), "deferred", 4)
    return repro_report(About("header", (), "2", "cpu"), [case])


@pytest.mark.parametrize("ending", FORMATS)
def test_endings(ending, tmp_path):
    path = tmp_path / f"report{ending.upper()}"
    write(report(), path)
    assert (ENDINGS[ending](path.read_text()), list(tmp_path.iterdir())) == (True, [path])


@pytest.mark.parametrize("command", ["repro", "show"])
@pytest.mark.parametrize("form", ["table", "markdown"])
def test_no_control_character_of_a_title_reaches_the_terminal(command, form, cli, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('schema = 1\ntitle = "a\\u001b[31mb\\u0007"\nsteps = [{ alloc = "a" }]\n')
    on = ("--on", "builtin") if command == "repro" else ()
    said = cli(command, path, "-f", form, *on).out
    assert ("a\\x1b[31mb\\x07" in said, set(said) & {"\x1b", "\x07"}) == (True, set())


@pytest.mark.parametrize(
    "call", ["repro --on builtin", "verify --on builtin --page-size 4", "list"]
)
def test_what_is_piped_has_no_trailing_blanks(call, cli):
    lines = cli(*call.split()).out.split("\n")
    assert [line for line in lines if line != line.rstrip()] == []


def test_an_older_file_stays_whole(tmp_path, monkeypatch):
    path = tmp_path / "report.md"
    path.write_text("older")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="No space left on device"):
        write(report(), path)
    assert [(p, p.read_text()) for p in tmp_path.iterdir()] == [(path, "older")]


def test_an_exported_test_is_the_same_as_a_file(tmp_path):
    path = tmp_path / "test_bug.py"
    codes = [
        (run := swaleak("export", "tombstone-recovery", "--unittest", *more)).returncode
        for more in ((), ("-o", str(path)))
    ]
    printed = swaleak("export", "tombstone-recovery", "--unittest").stdout
    assert (codes, run.stdout, path.read_text()) == ([0, 0], "", printed)


def case_of(target: str, verdict: str, declared: str | None, **more: object) -> Case:
    """A case that came out as ``verdict``, on a run of the real thing."""
    scenario = scenarios.load("tombstone-recovery")
    strategy = "deferred" if verdict == "leak" else "eager"
    case = run_case(scenario, Builtin("cpu"), strategy, 4)
    run = Run(verdict, case.run.comparison, failed_at=7, **more)
    outcome = Outcome(declared or "clean")
    return Case(scenario, target, strategy, "shipped", 4, run, outcome, None)


def latent(case: Case) -> Case:
    return replace(case, scenario=replace(case.scenario, reach="latent"))


ABOUT = About("header", (), "2", "cpu")
PATCHED = About("header", (), "2", "cpu", patched=frozenset({"a + b.diff"}))
BASELINE = "a (baseline, not judged)"

# report -> suites: name, tests, failures, skipped
SUITES = {
    "repro, as declared": (
        repro_report(ABOUT, [case_of("a", "clean", "clean"), case_of("b", "clean", "clean")]),
        [("a", "1", "0", "0"), ("b", "1", "0", "0")],
    ),
    "repro, not as declared": (
        repro_report(ABOUT, [case_of("a", "leak", "clean"), case_of("a", "clean", "clean")]),
        [("a", "2", "1", "0")],
    ),
    "check: only misuse may be refused": (
        check_report(
            ABOUT, [case_of("a", "refused", None), latent(case_of("b", "refused", None))], {}
        ),
        [("a", "1", "1", "0"), ("b", "1", "0", "0")],
    ),
    "check: a leak is not, although it is declared": (
        check_report(
            ABOUT,
            [case_of("a", "leak", "leak"), case_of("b", "error", None, raised="E: \x00 & <b>")],
            {},
        ),
        [("a", "1", "1", "0"), ("b", "1", "1", "0")],
    ),
    "check: what a patch mends fails in the baseline only": (
        check_report(
            PATCHED,
            [case_of("a", "leak", "leak"), case_of("a + b.diff", "clean", "clean")],
            {"a + b.diff": "a"},
        ),
        [(BASELINE, "1", "0", "1"), ("a + b.diff", "1", "0", "0")],
    ),
    "repro: nor does a baseline count that is not as declared": (
        repro_report(
            PATCHED, [case_of("a", "leak", "clean"), case_of("a + b.diff", "leak", "clean")]
        ),
        [(BASELINE, "1", "0", "1"), ("a + b.diff", "1", "1", "0")],
    ),
}


@pytest.mark.parametrize("name", SUITES)
def test_junit(name):
    report, expected = SUITES[name]
    root = ElementTree.fromstring(as_junit(report).encode())
    suites = [tuple(map(s.get, ("name", "tests", "failures", "skipped"))) for s in root]
    named = [(c.get("classname"), bool(c.get("name"))) for c in root.iter("testcase")]
    totals = root.get("tests"), root.get("failures")
    told = [f.text.splitlines()[0] for f in root.iter("failure")]
    assert (suites, named, totals, told) == (
        expected,
        [("tombstone-recovery", True)] * len(report.tests),
        tuple(str(sum(int(suite[i]) for suite in expected)) for i in (1, 2)),
        ["A tombstone is recovered while its free is still queued"] * int(totals[1]),
    )
    assert report.ok == (totals[1] == "0")


def test_a_failure_in_junit_says_who_lost_what():
    text = as_junit(check_report(ABOUT, [case_of("a", "leak", None)], {}))
    (failure,) = ElementTree.fromstring(text.encode()).iter("failure")
    assert (failure.attrib, failure.text.splitlines()[1:]) == (
        {"type": "leak", "message": "leak, 2 physical and 1 mapped SWA pages"},
        [
            "deferred: from step 7: SWA page 2 leaked; node lost the SWA side of its page 0",
            "deferred: leak (MISMATCH: declared clean)",
        ],
    )


def test_what_healed_is_one_line_per_step_beside_what_still_holds():
    case = case_of("a", "leak", "leak")
    stale, lost = Violation("stale", (0, 1), owner="node"), Violation("lost", (0,), owner="x")
    healed = ((2, stale), (2, lost), (4, stale))
    run = Run("leak", case.run.comparison, failed_at=7, healed=healed)
    report = repro_report(ABOUT, [replace(case, run=run, origin="builtin")])
    assert report.sections[0].lines == (
        "deferred: from step 7: SWA page 2 leaked; node lost the SWA side of its page 0",
        "deferred: at step 2: stale: node's pages 0, 1 still map; x lost the SWA side of its "
        "page 0; healed by the end",
        "deferred: at step 4: stale: node's pages 0, 1 still map; healed by the end",
    )
    assert report.body["results"][0]["healed"][0] == {
        "step": 2,
        "kind": "stale",
        "owner": "node",
        "pages": [0, 1],
        "fault": "allocator",
    }


# cases that came out as, and were declared as -> the first sentence, and the lines that mismatch
FIRST = {
    (("leak", "leak"),): ("1 run, as declared.", []),
    (("leak", "leak"), ("clean", "clean")): ("2 runs, all as declared.", []),
    (("clean", "leak"), ("leak", "leak")): (
        "1 of 2 runs not as declared.",
        ["eager: clean (MISMATCH: declared leak)"],
    ),
    (("leak", "clean"),): (
        "1 of 1 run not as declared.",
        ["deferred: leak (MISMATCH: declared clean)"],
    ),
}


@pytest.mark.parametrize("outcomes", FIRST)
@pytest.mark.parametrize("form", [as_markdown, as_svg])
def test_the_verdict_is_the_first_sentence(outcomes, form):
    made = [case_of("a", verdict, declared) for verdict, declared in outcomes]
    cases = [replace(case, origin="builtin") for case in made]
    report = repro_report(ABOUT, cases)
    verdict, mismatches = FIRST[outcomes]
    text = re.sub("<[^>]*>|&#160;|[*\\s]", "", form(report))
    squeezed = verdict.replace(" ", "")
    assert text.index("header") < text.index(squeezed) < text.index("tombstone-recovery:")
    assert [line for line in report.sections[0].lines if "MISMATCH" in line] == mismatches
    marked = [row[-1].text for row in report.sections[0].grid.rows if "MISMATCH" in row[-1].text]
    assert len(marked) == len(mismatches)


def test_all_notes_are_in_the_json():
    noted = report().with_notes(["one", "two"])
    body = json.loads(as_json(noted))
    assert (body["note"], body["notes"]) == ("two", ["one", "two"])
    assert noted.sections[-1].lines[-2:] == ("one", "two")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (counted(1, "run"), "1 run"),
        (counted(1000, "run"), "1,000 runs"),
        (page_list([3]), "page 3"),
        (page_list(range(1, 9)), "pages 1, 2, 3, 4, 5, 6 and 2 more"),
        (violation_text(Violation("stale", (2,), "full")), "although nobody owns it"),
        (violation_text(Violation("stale", (2, 3), "full")), "still map although nobody owns them"),
        (violation_text(Violation("lost", (2, 3), "full")), "full pages 2, 3 lost the SWA side"),
        (violation_text(Violation("stolen", (1,), owner="n")), "stolen: n still reads its page 1"),
    ],
)
def test_one_and_many(text, said):
    assert text.endswith(said)


# what is typed -> exit code; `mine` stands for a class that is asked for its own frees
VERDICTS = {
    "repro --on builtin": 0,
    "repro --on builtin -s deferred -s barrier --repeat 2": 0,
    "repro wrong.toml --on builtin": 1,
    "verify --on builtin --page-size 4": 0,
    "verify --on xml_barrier:Mine --page-size 4": 0,
    "check builtin xml_barrier:Mine": 2,
    "check xml_barrier:Mine": 0,
    "check xml_deferred:Mine": 1,
    "check xml_barrier:Mine xml_deferred:Mine --strict": 1,
}


@pytest.mark.parametrize("call", VERDICTS)
def test_the_verdict_in_the_xml_is_the_exit_code(
    call: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes by the one comes to the same as who goes by the other."""
    monkeypatch.chdir(tmp_path)
    Path("wrong.toml").write_text(
        'schema = 1\nsteps = [ { alloc = "a" } ]\nexpect.every = { verdict = "leak" }\n'
    )
    for strategy in ("Barrier", "Deferred"):
        Path(f"xml_{strategy.lower()}.py").write_text(USER_CLASS.format(strategy=strategy))
    answer = cli(*call.split(), "-o", "run.xml")
    assert (answer.code, verdict_of(Path("run.xml"))) == (VERDICTS[call], VERDICTS[call])


def verdict_of(path: Path) -> int:
    """Return what a reader of the XML takes it for: 0 for no failure, 1 for one, 2 for no file."""
    if not path.exists():
        return 2
    root = ElementTree.fromstring(path.read_text())
    counted = {int(root.get(kind, "0")) for kind in ("failures", "errors")}
    assert (max(counted) > 0) == (next(root.iter("failure"), None) is not None)
    return int(max(counted) > 0)
