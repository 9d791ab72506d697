"""Reports about recorded runs: what was recorded, how it replays, what it shrinks to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swaleak.errors import counted
from swaleak.report.model import (
    STYLES,
    About,
    Cell,
    Grid,
    Report,
    Section,
    cells,
    dated_json,
    mistakes_text,
    run_json,
    violations_json,
    violations_text,
)
from swaleak.trace.replay import TraceRun
from swaleak.trace.to_scenario import Reduced


@dataclass(frozen=True, slots=True)
class Replayed:
    """A trace that was followed under one strategy."""

    target: str
    strategy: str
    origin: str
    trace: TraceRun


def replay_report(about: About, path: Path, runs: Sequence[Replayed]) -> Report:
    """One row per strategy: SWA pages at the end, and what went wrong first."""
    results = [{"trace": str(path)} | _json(run) for run in runs]
    counts = ("groups", "physical", "mapped")
    rows = tuple(
        cells(
            *("-" if one[key] is None else one[key] for key in ("strategy", "origin", *counts)),
            Cell(one["verdict"], STYLES[one["verdict"]])
            if one["groups"]
            else Cell("not judged", "yellow"),
            f"{one['groups_as_recorded']} of {one['groups']}",
        )
        for one in results
    )
    columns = ("strategy", "origin", *counts, "verdict", "as recorded")
    lines = [f"{run.strategy}: {fact}" for run in runs for fact in _facts(run.trace)]
    lines.append("as recorded: groups after which both counts were those of the recorded run.")
    grid = Grid(columns, rows, frozenset({*counts, "as recorded"}))
    clean = all(one["verdict"] == "clean" and one["groups"] for one in results)
    ok = clean and not any(run.trace.mistakes for run in runs)
    return about.report("replay", ok, [Section(path.name, grid, tuple(lines))], results)


def record_report(files: Sequence[Path], status: int) -> Report:
    """What a recorded command left behind."""
    rows = tuple(cells(file, f"{file.stat().st_size:,}") for file in files)
    lines = (
        f"The command ended with exit code {status}.",
        "`swaleak replay FILE` judges a trace, `swaleak shrink FILE -o X.toml` makes it small.",
    )
    section = Section("", Grid(("trace", "bytes"), rows, frozenset({"bytes"})), lines)
    body = {"results": [{"trace": str(file)} for file in files], "exit_code": status}
    header = f"recorded {counted(len(files), 'trace')}"
    return Report("record", status == 0, header, (section,), body)


def shrink_report(about: About, path: Path, written: Path, small: Reduced) -> Report:
    """The steps that are left, and where they were written."""
    steps = [str(step) for step in small.scenario.steps]
    outcome = run_json(small.run)
    bad = small.trace.first_bad
    assert bad is not None
    lines = (
        f"{path.name} fails after group {bad.group}, line {bad.line}: "
        f"{violations_text(bad.violations)}",
        f"In {counted(len(steps), 'step')}: {outcome['verdict']}, physical {outcome['physical']}, "
        f"mapped {outcome['mapped']}. Written to {written};",
        f"`swaleak repro {written}` replays it.",
    )
    rows = tuple(cells(number, step) for number, step in enumerate(steps, start=1))
    section = Section("", Grid(("#", "step"), rows, frozenset("#")), lines)
    result = {"trace": str(path), "scenario": str(written), "steps": steps, **outcome}
    return about.report("shrink", True, [section], [result])


def _facts(seen: TraceRun) -> list[str]:
    facts = mistakes_text(seen.mistakes, "line")
    if bad := seen.first_bad:
        facts.append(f"from group {bad.group} (line {bad.line}): {violations_text(bad.violations)}")
    if seen.raised:
        facts.append(f"line {seen.raised[0]}: the allocator raised {seen.raised[1]}")
    if seen.exhausted:
        facts.append(f"line {seen.exhausted}: a pool was exhausted")
    if not seen.groups:
        facts.append("no free group ends in this trace, so nothing was judged")
    return facts


def _json(run: Replayed) -> dict[str, Any]:
    seen = run.trace
    entry: dict[str, Any] = {
        "target": run.target,
        "strategy": run.strategy,
        "origin": run.origin,
        "groups": seen.groups,
        "calls": seen.calls,
        "physical": seen.last.physical if seen.last else None,
        "mapped": seen.last.mapped if seen.last else None,
        "verdict": seen.verdict,
        "groups_as_recorded": seen.groups - seen.differ,
        "violations": [
            *(violations_json(seen.first_bad.violations) if seen.first_bad else []),
            *dated_json(seen.mistakes, "line"),
        ],
    }
    if seen.first_bad:
        entry["first_bad"] = {"group": seen.first_bad.group, "line": seen.first_bad.line}
    if seen.raised:
        entry["raised"] = {"line": seen.raised[0], "error": seen.raised[1]}
    if seen.exhausted:
        entry["starved"] = {"line": seen.exhausted}
    return entry
