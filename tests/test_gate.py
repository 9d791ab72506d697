"""`check` and `repro` as a gate: what is judged, against what, and what is never a 0."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT, USER_CLASS, Cli, wheel

LEAKS = """\
schema = 1
title = "Mine"
steps = [
  { alloc = "node" },
  { alloc = "incoming" },
  { group = "begin" },
  { free_swa = "node" },
  { recover = "node", from = "incoming" },
  { group = "end" },
]
"""
HEALS = """\
schema = 1
steps = [
  { alloc = "node" },
  { free_swa = "node", slots = "0:1" },
  { load_back = "node" },
  { expect = { physical = 1, mapped = 1 } },
]
[pools]
page_sizes = [4]
[[known]]
versions = "<0.5.14"
verdict = "corrupt"
physical = 1
mapped = 1
kinds = ["stale"]
"""
RECYCLED = """\
schema = 1
steps = [
  { alloc = "other" },
  { alloc = "old" },
  { alloc = "c" },
  { free = "c" },
  { free_swa = "other" },
  { free = "old", slots = "0:1" },
  { load_back = "other" },
  { alloc_tail = "decode", pages = 2, tail = 1 },
  { free = "decode" },
]
[pools]
full_pages = 3
swa_pages = 3
page_sizes = [4]
"""


def checkout(folder: Path, version: str) -> Path:
    """Unpack the sources of a release as a folder that no repository tracks."""
    with zipfile.ZipFile(wheel(version)) as archive:
        for name in archive.namelist():
            if name.startswith("sglang/srt/") and name.endswith(".py"):
                archive.extract(name, folder)
    return folder


def rows(out: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(out)["results"]
    return found


def file(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


@pytest.mark.wheels
def test_an_own_scenario_that_leaks_on_a_checkout_is_exit_code_1(cli: Cli, tmp_path: Path) -> None:
    mine, tree = file(tmp_path, LEAKS), checkout(tmp_path / "tree", "0.5.18")
    answer = cli("repro", mine, "--on", tree, "-s", "shipped", "--page-size", "1", "-f", "json")
    assert (answer.code, [row["verdict"] for row in rows(answer.out)]) == (1, ["leak"])


@pytest.mark.wheels
@pytest.mark.parametrize(("version", "code"), [("0.5.18", 1), ("0.5.19", 0)])
def test_check_judges_by_an_own_scenario(version: str, code: int, cli: Cli, tmp_path: Path) -> None:
    answer = cli("check", wheel(version), "--scenario", file(tmp_path, LEAKS), "-f", "json")
    assert answer.code == code
    assert {row["scenario"] for row in rows(answer.out)} == {"mine"}


@pytest.mark.wheels
def test_a_violation_that_heals_is_shown_as_such(cli: Cli, tmp_path: Path) -> None:
    mine = file(tmp_path, HEALS)
    answer = cli("repro", mine, "--on", wheel("0.5.13.post1"), "-s", "shipped", "-f", "json")
    [row] = rows(answer.out)
    assert (answer.code, row["verdict"], row["physical"], row["mapped"]) == (0, "corrupt", 1, 1)
    table = cli("repro", mine, "--on", wheel("0.5.13.post1"), "-s", "shipped")
    assert "healed" in table.out


@pytest.mark.wheels
def test_counts_are_those_of_the_end(cli: Cli, tmp_path: Path) -> None:
    """#25805: a recycled full page keeps its old mapping; the fix clears it below a tail."""
    mine = file(tmp_path, RECYCLED)
    source = "sglang/srt/mem_cache/allocator/swa.py"
    with zipfile.ZipFile(wheel("0.5.13.post1")) as archive:
        fixed = archive.read(source).decode().splitlines(keepends=True)
    clears = "self.full_to_swa_index_mapping[alloc_full_indices[:-swa_tail_len]] = 0"
    without = [line.replace(" = 0", " += 0") if clears in line else line for line in fixed]
    patch = tmp_path / "without.diff"
    patch.write_text("".join(difflib.unified_diff(fixed, without, f"a/{source}", f"b/{source}")))
    answer = cli(
        *("repro", mine, "--on", wheel("0.5.13.post1"), "-s", "shipped", "-f", "json"),
        *("--patch", patch),
    )
    counts = [(row["origin"], row["physical"], row["mapped"]) for row in rows(answer.out)]
    assert counts == [("shipped", 1, 1), ("patched", 0, 1)]


@pytest.mark.wheels
def test_strict_with_a_baseline_counts_what_is_new(cli: Cli) -> None:
    same = cli("check", wheel("0.5.19"), "--strict", "--baseline", wheel("0.5.19"))
    assert same.code == 0
    assert "unchanged" in same.out
    alone = cli("check", wheel("0.5.19"), "--strict")
    assert alone.code == 1
    worse = cli(
        *("check", wheel("0.5.23"), "--strict", "--baseline", wheel("0.5.19")),
        *("--scenario", "segment-freed-twice", "-f", "json"),
    )
    assert worse.code == 1
    found = {(row["target"], row.get("change")) for row in rows(worse.out)}
    assert ("sglang 0.5.23", "new") in found
    better = cli(
        *("check", wheel("0.5.20"), "--strict", "--baseline", wheel("0.5.18")),
        *("--scenario", "grouped-free-adopt"),
    )
    assert better.code == 0
    assert "fixed" in better.out


def test_nothing_that_was_run_is_never_a_0(cli: Cli) -> None:
    answer = cli("repro", "tree/recovery", "--on", "builtin")
    assert answer.code != 0
    assert answer.err.count("\n") == 1
    assert "nothing was run" in answer.err


def test_page_sizes_and_scenarios_that_are_given_twice_run_once(cli: Cli) -> None:
    answer = cli(
        *("repro", "steady-group", "steady-group", "--on", "builtin", "-s", "eager"),
        *("--page-size", "4", "--page-size", "4", "-f", "json"),
    )
    assert (answer.code, len(rows(answer.out))) == (0, 1)


HANGS = (
    USER_CLASS.format(strategy="Deferred")
    + """
    def free_group_end(self):
        while True:
            pass
"""
)


@pytest.mark.parametrize(
    "command", [("check",), ("repro", "tombstone-recovery", "-s", "shipped", "--on")]
)
def test_a_candidate_that_hangs_ends_in_124(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    done = subprocess.run(
        [sys.executable, "-m", "swaleak", *command, "hangs:Mine", "--timeout", "8"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    assert (done.returncode, done.stdout) == (124, "")
    assert done.stderr.startswith("swaleak: timed out after 8 s: ")
    assert "tombstone-recovery on hangs:Mine, strategy shipped, page size 1" in done.stderr


@pytest.mark.parametrize("name", ["mine.toml", "run.jsonl"])
def test_a_scenario_or_a_trace_is_no_target(name: str, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / name).write_text(LEAKS)
    answer = cli("check", tmp_path / name)
    assert (answer.code, answer.out) == (2, "")


def test_commands_are_listed_by_name(cli: Cli) -> None:
    shown = cli("--help").out
    names = ("bench", "check", "diagnose", "doctor", "explore", "export", "list", "record")
    places = [shown.index(f" {name} ") for name in names]
    assert places == sorted(places)
