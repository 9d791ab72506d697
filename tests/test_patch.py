"""Patches as a pull request gives them, and git bisect. Upstream files are made at run time."""

from __future__ import annotations

import difflib
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from swaleak.scenario import catalogue
from swaleak.scenario.scenario import Scenario
from swaleak.scenario.write import to_toml
from swaleak.targets import loader
from swaleak.targets.patch import split
from swaleak.targets.sources import ALLOCATOR, SourceTree
from swaleak.targets import open as open_module
from tests.conftest import Cli, wheel

SWA = f"{ALLOCATOR}/swa.py"
ELSEWHERE = """\
diff --git a/docs/notes.md b/docs/notes.md
--- a/docs/notes.md
+++ b/docs/notes.md
@@ -1,2 +1,2 @@
 kept
-- old
+- new
"""


def sources(version: str) -> dict[str, str]:
    """Return the allocator sources of a release: path -> text."""
    with zipfile.ZipFile(wheel(version)) as archive:
        return {
            name: archive.read(name).decode()
            for name in archive.namelist()
            if name.startswith(ALLOCATOR) and name.endswith(".py")
        }


def fixed(text: str) -> str:
    """Resolve ownership when the free is called: the queue of full slots is never used."""
    held = "not self.is_not_in_free_group"
    head, tail = text.split("    def free_swa(", 1)
    assert held in tail
    return head + "    def free_swa(" + tail.replace(held, "False", 1)


def diff(old: str, new: str, prefix: str) -> str:
    lines = (text.splitlines(keepends=True) for text in (old, new))
    names = (f"{side}/{prefix}{SWA}" for side in "ab")
    return f"diff --git a/{prefix}{SWA} b/{prefix}{SWA}\n" + "".join(
        difflib.unified_diff(*lines, *names)
    )


@pytest.fixture
def fix() -> str:
    text = sources("0.5.18")[SWA]
    return diff(text, fixed(text), "python/")


@pytest.mark.wheels
def test_a_fix_passes_the_gate_beside_what_it_mends(fix: str, cli: Cli, tmp_path: Path) -> None:
    patch = tmp_path / "fix.diff"
    patch.write_text(f"From: someone\nSubject: [PATCH] --- a fix\n\n{ELSEWHERE}{fix}")
    answer = cli("check", wheel("0.5.18"), "--patch", patch)
    assert answer.code == 0
    assert "tombstone-recovery         2/1 leak   ok 2/2" in answer.out
    assert "left out, not in the allocator package: docs/notes.md" in answer.out
    results = json.loads(cli("check", wheel("0.5.18"), "--patch", patch, "-f", "json").out)
    origins = {(r["target"], r["origin"]) for r in results["results"]}
    assert origins == {("sglang 0.5.18", "shipped"), ("sglang 0.5.18 + fix.diff", "patched")}


@pytest.mark.wheels
@pytest.mark.parametrize("command", ["check", "repro --on", "repro wrong.toml --on"])
@pytest.mark.parametrize("mends", [True, False])
def test_the_xml_judges_the_patch_and_not_what_it_mends(
    command: str, mends: bool, fix: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as the exit code does; `wrong.toml` declares nothing, so that as shipped fails."""
    monkeypatch.chdir(tmp_path)
    text = sources("0.5.18")[SWA]
    Path("a.diff").write_text(fix if mends else diff(text, f"# changed\n{text}", "python/"))
    steps = catalogue.load("tombstone-recovery").steps
    Path("wrong.toml").write_text(to_toml(Scenario("wrong", "wrong", steps)))
    answer = cli(*command.split(), wheel("0.5.18"), "--patch", "a.diff", "-o", "run.xml")
    root = ElementTree.parse("run.xml").getroot()
    suites = [(s.get("name"), s.get("failures") == "0") for s in root]
    assert (answer.code, suites) == (
        int(not mends),
        [("sglang 0.5.18 (baseline, not judged)", True), ("sglang 0.5.18 + a.diff", mends)],
    )


@pytest.mark.wheels
def test_a_mark_in_a_patched_column_and_no_strategy_that_a_patch_ships(
    cli: Cli, tmp_path: Path
) -> None:
    text = sources("0.5.18")[SWA]
    (tmp_path / "nop.diff").write_text(diff(text, f"# changed\n{text}", "python/"))
    said = cli("check", wheel("0.5.18"), "--patch", tmp_path / "nop.diff").out
    assert [line for line in said.splitlines() if line.lstrip().startswith("!")] == [
        "! as patched: neither clean nor refused as misuse; known faults excuse no patch.",
    ]
    assert ("tombstone-recovery         2/1 leak   !2/1 leak" in said, said.count("ships")) == (
        True,
        1,
    )


# strategies asked for -> the first words of rows and of lines
ROWS = {
    (): ["shipped    shipped", "patched    patched", "sglang 0.5.18: from step 7"],
    ("barrier",): [
        "barrier    grafted",
        "barrier    on patched",
        "barrier on patched: swaleak's frees replace the patched",
    ],
}


@pytest.mark.wheels
@pytest.mark.parametrize("strategies", ROWS)
def test_rows_and_lines_say_which_sources_they_are_about(
    strategies: tuple[str, ...], fix: str, cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "fix.diff").write_text(fix)
    asked = [word for name in strategies for word in ("-s", name)]
    call = ("repro", "--on", wheel("0.5.18"), "--patch", tmp_path / "fix.diff", *asked)
    lines = [line.strip() for line in cli(*call, "--page-size", "4").out.splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith("strategy")) + 2
    told = [line for line in lines[start:] if line][:3]
    assert [t[: len(row)] for t, row in zip(told, ROWS[strategies], strict=True)] == ROWS[
        strategies
    ]


@pytest.mark.wheels
def test_explore_loads_the_patched_sources_and_no_others(
    fix: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = tmp_path / "fix.diff"
    patch.write_text(fix)
    loaded: list[str] = []

    def load(tree: SourceTree, device: str) -> type:
        loaded.append(tree.label)
        return loader.load(tree, device)

    monkeypatch.setattr(names, "load", load)
    answer = cli("explore", "--on", wheel("0.5.18"), "--patch", patch, "--depth", "6")
    assert (answer.code, loaded) == (0, ["sglang 0.5.18 + fix.diff"])
    assert "\npatched, page size 1, production contract\n" in answer.out


@pytest.mark.wheels
@pytest.mark.parametrize("prefix", ["python/", "", "some/fork/python/"])
def test_any_root_and_standard_input(prefix: str, cli: Cli, monkeypatch) -> None:
    text = sources("0.5.18")[SWA]
    stdin = io.TextIOWrapper(io.BytesIO(diff(text, fixed(text), prefix).encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    answer = cli("repro", "--on", wheel("0.5.18"), "--patch", "-", "--page-size", 4, "-f", "json")
    keys = ("origin", "physical", "mapped", "verdict")
    assert (
        answer.code,
        [tuple(r[k] for k in keys) for r in json.loads(answer.out)["results"]],
    ) == (
        0,
        [("shipped", 2, 1, "leak"), ("patched", 2, 2, "clean")],
    )


@pytest.mark.wheels
def test_a_patch_that_mends_nothing_fails(cli: Cli, tmp_path: Path) -> None:
    text = sources("0.5.18")[SWA]
    (tmp_path / "nop.diff").write_text(diff(text, f"# changed\n{text}", "python/"))
    assert cli("check", wheel("0.5.18"), "--patch", tmp_path / "nop.diff").code == 1


@pytest.mark.wheels
def test_patches_add_up_and_a_new_file_counts(fix: str, cli: Cli, tmp_path: Path) -> None:
    """One patch makes a file in the package, the next imports it."""
    new = f"python/{ALLOCATOR}/extra.py"
    (tmp_path / "1.diff").write_text(
        f"diff --git a/{new} b/{new}\nnew file mode 100644\n--- /dev/null\n+++ b/{new}\n"
        "@@ -0,0 +1 @@\n+EXTRA = 1\n"
    )
    text = sources("0.5.18")[SWA]
    imports = f"from sglang.srt.mem_cache.allocator.extra import EXTRA  # {'x' * 20}\n{text}"
    (tmp_path / "2.diff").write_text(diff(text, imports, "python/"))
    call = (
        "check",
        wheel("0.5.18"),
        "--patch",
        tmp_path / "1.diff",
        "--patch",
        tmp_path / "2.diff",
    )
    assert (cli(*call).code, cli(*call[:2], *call[4:]).code) == (1, 125)


@pytest.mark.wheels
@pytest.mark.parametrize("crlf", ["patch", "sources", "both"])
def test_line_ends_are_no_reason_not_to_apply(
    crlf: str, fix: str, cli: Cli, tmp_path: Path
) -> None:
    """A diff that came by mail or from Windows, and a checkout made there."""
    (tmp_path / "fix.diff").write_bytes(
        fix.replace("\n", "\r\n").encode() if crlf != "sources" else fix.encode()
    )
    for path, text in sources("0.5.18").items():
        file = tmp_path / "checkout" / "python" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((text.replace("\n", "\r\n") if crlf != "patch" else text).encode())
    answer = cli("check", tmp_path / "checkout", "--patch", tmp_path / "fix.diff")
    assert (answer.code, answer.err) == (0, "")


@pytest.mark.wheels
def test_files_left_out_are_one_line(fix: str, cli: Cli, tmp_path: Path) -> None:
    others = "".join(ELSEWHERE.replace("notes", f"notes{number}") for number in range(69))
    (tmp_path / "fix.diff").write_text(others + fix)
    call = ("repro", "--on", wheel("0.5.18"), "--patch", tmp_path / "fix.diff", "-f", "markdown")
    assert [line for line in cli(*call).out.splitlines() if "notes" in line] == [
        "- left out, not in the allocator package: 69 files, docs/notes0.md, docs/notes1.md, "
        "docs/notes2.md and so on"
    ]


@pytest.mark.wheels
def test_what_does_not_apply_is_one_line(fix: str, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "fix.diff").write_text(fix)
    (tmp_path / "else.diff").write_text(ELSEWHERE)
    (tmp_path / "torn.diff").write_text(fix[: len(fix) - 40])
    (tmp_path / "no.diff").write_bytes(b"\xff\xfe")
    hunk = fix.split("@@ -")[1].split(",")[0]
    said = {
        "fix.diff": f"the hunk at {SWA}:{hunk} does not apply to sglang 0.5.19",
        "else.diff": f"no hunk of it changes {ALLOCATOR}/",
        "torn.diff": f"python/{SWA}: corrupt patch",
    }
    for name, message in said.items():
        answer = cli("check", wheel("0.5.19"), "--patch", tmp_path / name)
        assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1)
        assert answer.err.startswith(f"swaleak: {tmp_path / name}: {message}")
    for name, reason in (("no.diff", "not a UTF-8"), ("none.diff", "No such file")):
        answer = cli("check", wheel("0.5.19"), "--patch", tmp_path / name)
        assert (answer.code, answer.err.count("\n"), reason in answer.err) == (2, 1, True)


def test_a_changed_line_is_never_taken_for_a_header() -> None:
    text = (
        "--- a/one.sql\n+++ b/one.sql\n@@ -1,2 +1,2 @@\n--- old comment\n+++ new comment\n same\n"
        "--- a/two.sql\t2026-01-01\n+++ b/two.sql\t2026-01-02\n@@ -1 +1 @@\n-a\n+b\n"
    )
    assert [(part.path, part.strip) for part in split(text)] == [
        ("b/one.sql", -1),
        ("b/two.sql", -1),
    ]


GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")


@pytest.mark.wheels
def test_git_bisect_run(tmp_path: Path) -> None:
    """Ten commits from the sources of two releases; the first bad one is the sixth."""

    def git(*args: str) -> str:
        done = subprocess.run([*GIT, *args], cwd=tmp_path, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    git("init", "-q", "-b", "main")
    commits = []
    for number in range(10):
        files = sources("0.5.17" if number < 5 else "0.5.18")
        for name, text in files.items():
            file = tmp_path / "python" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            broken = number == 3 and name == SWA  # a commit that cannot be loaded is skipped
            file.write_text(f"{'def' if broken else ''}\n# commit {number}\n{text}")
        git("add", "-A")
        git("commit", "-q", "-m", f"commit {number}")
        commits.append(git("rev-parse", "HEAD").strip())
    git("bisect", "start", commits[-1], commits[0])
    found = git("bisect", "run", sys.executable, "-m", "swaleak", "check", ".")
    assert f"{commits[5]} is the first bad commit" in found
