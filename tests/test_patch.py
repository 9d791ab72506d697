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

from swaleak.checker.case import run_case
from swaleak.errors import StandInError, UsageError
from swaleak.scenario import catalogue
from swaleak.scenario.toml import Scenario, to_toml
from swaleak.targets import open as targets
from swaleak.targets.loader import ModuleLoader
from swaleak.targets.open import open_target, open_targets
from swaleak.targets.patch import patched, split
from swaleak.targets.sources import ALLOCATOR, MEM_CACHE, SourceTree, from_wheel, is_read
from tests.conftest import GIT, Cli, unpack, wheel

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
    """Return what is read of a release: path -> text."""
    with zipfile.ZipFile(wheel(version)) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist() if is_read(name)}


def fixed(text: str) -> str:
    """Resolve ownership when the free is called: the queue of full slots is never used."""
    held = "not self.is_not_in_free_group"
    head, tail = text.split("    def free_swa(", 1)
    assert held in tail
    return head + "    def free_swa(" + tail.replace(held, "False", 1)


def diff(old: str, new: str, prefix: str, path: str = SWA, context: int = 3) -> str:
    lines = (text.splitlines(keepends=True) for text in (old, new))
    names = (f"{side}/{prefix}{path}" for side in "ab")
    return f"diff --git a/{prefix}{path} b/{prefix}{path}\n" + "".join(
        difflib.unified_diff(*lines, *names, n=context)
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
    assert "tombstone-recovery            2/1 leak   ok 2/2 fixed" in answer.out
    assert "left out of the patch, not run here: docs/notes.md" in answer.out
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
    assert ("tombstone-recovery            2/1 leak   !2/1 leak" in said, said.count("ships")) == (
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

    def load(tree: SourceTree, device: str) -> ModuleLoader:
        loaded.append(tree.label)
        return ModuleLoader(tree, device)

    monkeypatch.setattr(targets, "ModuleLoader", load)
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
        "- left out of the patch, not run here: 69 files, docs/notes0.md, docs/notes1.md, "
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
        "else.diff": f"no hunk of it changes {MEM_CACHE}/",
        "torn.diff": f"python/{SWA}: corrupt patch, the hunk @@ -",
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
    assert [(part.new, len(part.hunks)) for part in split(text, "x.diff")] == [
        ("b/one.sql", 1),
        ("b/two.sql", 1),
    ]


def outcome(patch: str, version: str = "0.5.18", **more: str) -> str:
    """Return what tombstone-recovery comes to when a patch is applied."""
    target = open_target(str(wheel(version)), "cpu", [patch])
    return run_case(catalogue.load("tombstone-recovery"), target, "shipped", 4).verdict


def coloured(patch: str) -> str:
    """As `git diff --color=always` prints it."""
    colours = {"-": 31, "+": 32, "@": 36, "d": 1}
    return "".join(
        f"\x1b[{colours[line[0]]}m{line}\x1b[m\n" if line[:1] in colours else f"{line}\n"
        for line in patch.splitlines()
    )


def bare(patch: str, old: str, new: str) -> str:
    """As `diff -u` prints it, which writes the time behind each name."""
    body = patch.split("\n@@ ", 1)[1]
    return f"--- {old}\t2026-01-01 00:00:00\n+++ {new}\t2026-01-02 00:00:00\n@@ {body}"


FORMS = {
    "git": lambda old, new: diff(old, new, "python/"),
    "no prefix": lambda old, new: diff(old, new, "python/").replace("a/python", "python"),
    "-U0": lambda old, new: diff(old, new, "python/", context=0),
    "coloured": lambda old, new: coloured(diff(old, new, "python/")),
    "coloured -U0": lambda old, new: coloured(diff(old, new, "", context=0)),
    "orig": lambda old, new: bare(diff(old, new, ""), "swa.py.orig", "swa.py"),
    "another folder": lambda old, new: bare(diff(old, new, ""), "/tmp/swa.py", "swa_mine.py"),
    "by content": lambda old, new: bare(diff(old, new, ""), "old.py", "new.py"),
    "a whole path": lambda old, new: bare(diff(old, new, ""), f"x/{SWA}.old", f"y/{SWA}"),
    "-U0, no path": lambda old, new: bare(diff(old, new, "", context=0), "swa.py~", "swa.py"),
}


@pytest.mark.wheels
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_diff_applies(form: str, tmp_path: Path) -> None:
    old = sources("0.5.18")[SWA]
    (tmp_path / "fix.diff").write_text(FORMS[form](old, fixed(old)))
    assert outcome(str(tmp_path / "fix.diff")) == "clean"


REFUSED = {  # what is wrong -> a diff from the sources of 0.5.18, and why 0.5.19 refuses it
    "-U0": (
        lambda old: diff(old, fixed(old), "python/", context=0),
        f"the hunk at {SWA}:\\d+ does not apply to sglang 0.5.19",
    ),
    "-U0 that only adds": (
        lambda old: diff(old, f"# a\n{old}", "", context=0).replace(
            "--- a", "index abc123..0\n--- a"
        ),
        f"the hunk at {SWA}:0 does not apply to sglang 0.5.19",
    ),
    "by content": (
        lambda old: bare(diff(old, fixed(old), ""), "old.py", "new.py"),
        f"no hunk of it changes {MEM_CACHE}/",
    ),
    "many files": (
        lambda old: "--- old\n+++ new\n@@ -1 +1 @@\n-from __future__ import annotations\n+x\n",
        "new can be sglang/.* or sglang/.* or sglang/.*; give it its path in SGLang",
    ),
}


@pytest.mark.wheels
@pytest.mark.parametrize("wrong", REFUSED)
def test_a_diff_of_other_sources_is_refused(wrong: str, tmp_path: Path) -> None:
    """Without context only a line number says where a hunk goes."""
    make, said = REFUSED[wrong]
    (tmp_path / "fix.diff").write_text(make(sources("0.5.18")[SWA]))
    with pytest.raises(UsageError, match=f"^{tmp_path}/fix.diff: {said}$"):
        outcome(str(tmp_path / "fix.diff"), "0.5.19")


HELPER = "def pages_of(tokens, size):\n    return -(-tokens // size)\n"
NEW_MODULES = {  # the lines that a patch puts on top of swa.py -> files that it makes
    "from sglang.srt.utils.common import ceil_div\nassert ceil_div(5, 4) == 2": {},
    "from sglang.srt.environ import envs\nassert envs.SGLANG_IS_IN_CI.get() in (True, False)": {},
    "from sglang.srt.utils.page_math import pages_of\nassert pages_of(5, 4) == 2": {
        "sglang/srt/utils/page_math.py": HELPER
    },
    "from sglang.srt.swa import math\nassert math.pages_of(5, 4) == 2": {
        "sglang/srt/swa/__init__.py": "from .math import pages_of\n",
        "sglang/srt/swa/math.py": HELPER,
    },
    "from .page_math import pages_of\nassert pages_of(5, 4) == 2": {
        f"{ALLOCATOR}/page_math.py": HELPER
    },
}


def made(path: str, text: str) -> str:
    lines = "".join(f"+{line}\n" for line in text.splitlines())
    return (
        f"diff --git a/python/{path} b/python/{path}\nnew file mode 100644\n--- /dev/null\n"
        f"+++ b/python/{path}\n@@ -0,0 +1,{lines.count(chr(10))} @@\n{lines}"
    )


@pytest.mark.wheels
@pytest.mark.parametrize("top", NEW_MODULES)
def test_a_patch_may_bring_modules_and_import_what_no_shim_has(top: str, tmp_path: Path) -> None:
    files = NEW_MODULES[top]
    old = sources("0.5.18")[SWA]
    patch = diff(old, f"{top}\n{fixed(old)}", "python/")
    patch = "".join(made(path, text) for path, text in files.items()) + patch
    (tmp_path / "fix.diff").write_text(patch)
    assert outcome(str(tmp_path / "fix.diff")) == "clean"


@pytest.mark.wheels
def test_a_patched_helper_is_used(tmp_path: Path) -> None:
    """One that swaleak has a stand-in for, and a new one."""
    name = "sglang/srt/utils/common.py"
    helpers = sources("0.5.18")[name]
    mine = helpers.replace(
        "def next_power_of_2(", "def mine(n):\n    return 8\n\n\ndef next_power_of_2("
    )
    mine = mine.replace(
        "def next_power_of_2(", "def next_power_of_2(n):\n    return mine(n)\n\n\ndef was("
    )
    old = sources("0.5.18")[SWA]
    top = (
        "from sglang.srt.utils import mine, next_power_of_2\n"
        "assert (mine(1), next_power_of_2(1)) == (8, 8)\n"
    )
    patch = diff(helpers, mine, "python/", name) + diff(old, f"{top}{fixed(old)}", "python/")
    (tmp_path / "fix.diff").write_text(patch)
    assert outcome(str(tmp_path / "fix.diff")) == "clean"


@pytest.mark.wheels
def test_what_a_patch_adds_to_storage_is_not_run(tmp_path: Path) -> None:
    old = sources("0.5.18")[SWA]
    top = "from sglang.srt.mem_cache.storage.mine import f\n"
    patch = made(f"{MEM_CACHE}/storage/mine.py", "raise SystemError\n")
    (tmp_path / "fix.diff").write_text(patch + diff(old, f"{top}{fixed(old)}", "python/"))
    target = open_target(str(wheel("0.5.18")), "cpu", [str(tmp_path / "fix.diff")])
    assert target.notes == (
        f"left out of the patch, not run here: python/{MEM_CACHE}/storage/mine.py",
    )
    assert run_case(catalogue.load("tombstone-recovery"), target, "shipped", 4).verdict == "clean"


@pytest.mark.wheels
def test_a_stand_in_that_a_run_uses_ends_it(tmp_path: Path) -> None:
    """It is no finding about the candidate, whatever the candidate catches."""
    old = sources("0.5.18")[SWA]
    top = "from sglang.srt.server_args import get_it\n"
    use = "        try:\n            get_it()\n        except Exception:\n            pass\n"
    name = "    def free_group_end(self):\n"
    assert name in old
    (tmp_path / "a.diff").write_text(diff(old, top + old.replace(name, name + use), "python/"))
    with pytest.raises(StandInError, match=r"^it uses sglang\.srt\.server_args\.get_it, which"):
        outcome(str(tmp_path / "a.diff"))


@pytest.mark.wheels
def test_one_standard_input_patches_several_targets(
    fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(fix.encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    copy = unpack("0.5.18", tmp_path)
    opened = open_targets([str(wheel("0.5.18")), str(copy)], "cpu", ["-"])
    assert [target.name for target in opened] == [
        f"sglang 0.5.18{patched} ({source})"
        for source in (wheel("0.5.18"), copy)
        for patched in ("", " + patch")
    ]


CACHE_PATCHES = {  # cache -> the file and the call that a patch takes out, scenarios that fail then
    "swa": (
        f"{MEM_CACHE}/swa_radix_cache.py",
        "self.token_to_kv_pool_allocator.free_swa(",
        {"recovery", "recovery-later", "replace", "two-nodes"},
    ),
    "unified": (
        f"{MEM_CACHE}/unified_cache/components/swa_component.py",
        "alloc.free_swa(",
        {"recovery", "recovery-later", "replace", "two-nodes", "steady", "leaf-reused"},
    ),
}


@pytest.mark.wheels
@pytest.mark.parametrize("cache", CACHE_PATCHES)
def test_a_patch_of_a_cache_is_judged(cache: str, tmp_path: Path) -> None:
    """Its tombstones keep their SWA pages."""
    path, call, failing = CACHE_PATCHES[cache]
    old = sources("0.5.19")[path]
    assert call in old
    (tmp_path / "a.diff").write_text(diff(old, old.replace(call, "len("), "python/", path))
    found = []
    for patches in (None, [str(tmp_path / "a.diff")]):
        target = open_target(str(wheel("0.5.19")), "cpu", patches)
        scripts = [script for script in catalogue.catalogue() if script.caches]
        cases = [run_case(script, target, "shipped", 4, cache=cache) for script in scripts]
        found.append({case.scenario.name for case in cases if case.verdict != "clean"})
    assert found == [set(), {f"tree/{name}:{cache}" for name in failing}]


@pytest.mark.wheels
@pytest.mark.parametrize(("old", "new"), [("0.5.14", "0.5.15.post1"), ("0.5.18", "0.5.17")])
def test_a_plain_diff_of_two_releases_makes_one_into_the_other(
    old: str, new: str, tmp_path: Path
) -> None:
    """As ``diff -ruN`` makes it, of all of ``mem_cache``: most of its files are not read."""
    texts: list[dict[str, str]] = []
    for version in (old, new):
        with zipfile.ZipFile(wheel(version)) as archive:
            names = [n for n in archive.namelist() if n.startswith(MEM_CACHE) and n[-3:] == ".py"]
            texts.append({name: archive.read(name).decode() for name in names})
    before, after = texts
    with (tmp_path / "a.diff").open("w") as file:
        for path in sorted(before.keys() | after.keys()):
            lines = (text.get(path, "").splitlines(keepends=True) for text in texts)
            named = (f"{version}/python/{path}" for version in (old, new))
            file.writelines(difflib.unified_diff(*lines, *named))
    tree, (left_out,) = patched(from_wheel(wheel(old)), [str(tmp_path / "a.diff")])
    read = {path: text for path, text in tree.files.items() if path.startswith(MEM_CACHE)}
    assert read == {path: text for path, text in after.items() if is_read(path)}
    assert left_out.split()[0].isdecimal()


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
