"""Every benchmark runs to its end, and the table is written whole or not at all. No times here."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import explore, replay, run, sizes, startup
from benchmarks.figures import Figures, Row, take_turns
from benchmarks.run import BEGIN, END, PARTS, with_table
from tests.conftest import ROOT, wheel

PAGE = f"# A page\n\nbefore\n\n{BEGIN}old\n{END}\nafter\n"
ROWS = {"startup": 5, "explore": 2, "replay": 6, "sizes": 4, "plugin": 10}


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ``python -m`` finds this tree."""
    monkeypatch.chdir(ROOT)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "README.md"
    path.write_text(PAGE)
    return path


def figures(name: str) -> Figures:
    return Figures((Row(name, "2 s", "bare", "1 s", (2.0, 2.0)),), f"how {name}")


def parts_of(page: Path) -> dict[str, int]:
    """Part -> rows, as they stand between the marks."""
    text = page.read_text()
    between = text[text.index(BEGIN) : text.index(END)]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in between.splitlines()]
    return {part: rows.count(part) for part in PARTS}


@pytest.mark.parametrize(
    ("main", "arguments", "shown"),
    [
        (
            explore.main,
            "--on builtin --depth 3 --examples 3 --turns 2",
            ["distinct states", "transitions"],
        ),
        (replay.main, "--calls 200 --page-size 4 --page-size 256", ["| 4 | 16 |", "| 256 | 0 |"]),
        (sizes.main, "--runs 1 --on builtin", ["911,616 SWA, page 256", "2,000,000 SWA, page 1"]),
    ],
    ids=["explore", "replay", "sizes"],
)
def test_a_script_runs_to_its_end(
    main: Callable[[], None],
    arguments: str,
    shown: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["it", *arguments.split()])
    main()
    out = capsys.readouterr().out
    assert [what for what in shown if what not in out] == []


@pytest.mark.wheels
def test_startup_runs_to_its_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["it", "--runs", "1", str(wheel("0.5.18"))])
    startup.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| `swaleak")]
    assert len(rows) == ROWS["startup"]
    assert "a verdict on real code" in rows[3]
    assert "the catalogue, 1 targets" in rows[4]


@pytest.mark.wheels
def test_one_command_writes_the_table(page: Path) -> None:
    releases = [str(wheel(version)) for version in ("0.5.18", "0.5.19")]
    on = [word for release in releases for word in ("--on", release)]
    assert run.main(["--quick", "--write", *on], page) == 0
    assert parts_of(page) == {**ROWS, "plugin": 1}
    text = page.read_text()
    assert "| plugin | not measured yet |" in text
    assert str(Path(releases[0]).parent) not in text  # whose folders they are is nobody's business


@pytest.mark.sglang
@pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here"
)
def test_the_plugin_is_measured_under_an_interpreter_that_has_sglang(page: Path) -> None:
    wanted = ["--quick", "--write", "--only", "plugin", "--sglang-python", sys.executable]
    assert run.main(wanted, page) == 0
    assert parts_of(page) == {**dict.fromkeys(PARTS, 1), "plugin": ROWS["plugin"]}


def test_only_what_is_between_the_marks_is_replaced() -> None:
    first = with_table(PAGE, {part: figures(part) for part in PARTS})
    assert first.startswith(PAGE[: PAGE.index(BEGIN)] + BEGIN)
    assert first.endswith(PAGE[PAGE.index(END) :])
    assert "old" not in first
    assert "| replay | replay | 2 s | bare: 1 s | 2.00 (2.00..2.00) |" in first
    assert with_table(first, {part: figures(part) for part in PARTS}) == first


def test_parts_that_were_not_asked_for_stay_and_are_marked() -> None:
    first = with_table(PAGE, {part: figures(part) for part in PARTS if part != "plugin"})
    assert "* plugin: not measured yet\n" in first
    second = with_table(first, {"plugin": figures("anew")})
    assert "| plugin | anew |" in second
    assert "* plugin: how anew\n" in second
    assert "| sizes | sizes | 2 s |" in second
    assert second.count(" (from an earlier run)\n") == 4
    assert with_table(second, {"plugin": figures("anew")}) == second


def test_a_part_that_fails_is_named_and_the_page_stays_as_it_is(
    page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(settings: run.Settings) -> Figures:
        raise RuntimeError("it broke")

    monkeypatch.setitem(run.PARTS, "startup", fails)
    monkeypatch.setitem(run.PARTS, "sizes", lambda settings: figures("sizes"))
    assert run.main(["--only", "startup", "--only", "sizes"], page) == 1
    shown = capsys.readouterr()
    assert "startup failed: RuntimeError: it broke" in shown.err
    assert "| sizes | sizes | 2 s |" in shown.out
    assert page.read_text() == PAGE


def test_a_command_that_crashes_is_no_figure() -> None:
    with pytest.raises(RuntimeError, match="no_such_name"):
        startup.seconds([sys.executable, "-c", "no_such_name"])


def test_a_page_without_marks_is_refused_before_anything_is_measured(
    page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page.write_text("no marks")
    monkeypatch.setitem(run.PARTS, "sizes", lambda settings: pytest.fail("measured"))
    with pytest.raises(SystemExit, match="2"):
        run.main(["--only", "sizes"], page)
    assert "README.md: no <!--" in capsys.readouterr().err


def test_the_plugin_needs_an_interpreter(page: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main(["--only", "plugin"], page)


@pytest.mark.parametrize(("turns", "runs"), [(1, 1), (3, 4)])
def test_turns_are_paired_and_the_first_of_several_is_thrown_away(turns: int, runs: int) -> None:
    done: list[str] = []

    def once(name: str) -> int:
        done.append(name)
        return done.count(name)

    seen = take_turns(once, ["a", "b"], turns)
    assert seen == {name: list(range(runs - turns + 1, runs + 1)) for name in ("a", "b")}


def test_figures_survive_the_way_between_two_interpreters() -> None:
    assert Figures.of_data(figures("it").as_data()) == figures("it")


def test_the_published_table_is_complete() -> None:
    assert parts_of(run.PAGE) == ROWS
