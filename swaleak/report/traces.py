"""Reports about recorded runs: what was recorded, how it replays, what it shrinks to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swaleak.check.follow import Followed, GroupEnd
from swaleak.report.entries import violations_json
from swaleak.report.facts import tell
from swaleak.report.report import STYLES, About, Cell, Grid, Report, Section
from swaleak.script.ops import describe
from swaleak.search.reduce import Reduced
from swaleak.words import counted, named


@dataclass(frozen=True, slots=True)
class Replayed:
    """A trace that was followed under one strategy."""

    target: str
    strategy: str
    origin: str
    followed: Followed


def replay_report(about: About, path: Path, runs: Sequence[Replayed]) -> Report:
    """One row a strategy: SWA pages at the end, and what went wrong first."""
    rows = tuple(_row(run) for run in runs)
    columns = ("strategy", "origin", "groups", "physical", "mapped", "verdict", "as recorded")
    right = frozenset({"groups", "physical", "mapped", "as recorded"})
    lines = [fact for run in runs for fact in _facts(run)]
    lines.append("as recorded: groups after which both counts were as in the recorded run.")
    section = Section(path.name, Grid(columns, rows, right), tuple(lines))
    ok = all(run.followed.verdict == "clean" for run in runs)
    body = {"results": [_json(path, run) for run in runs]}
    return Report("replay", ok, about.header, (section,), body, about.torch, about.device)


def record_report(files: Sequence[Path], status: int) -> Report:
    """What a recorded command left behind."""
    rows = tuple((Cell(str(file)), Cell(f"{file.stat().st_size:,}")) for file in files)
    lines = (
        f"The command ended with exit code {status}.",
        "`swaleak replay FILE` judges a trace, `swaleak shrink FILE -o X.toml` makes it small.",
    )
    section = Section("", Grid(("trace", "bytes"), rows, frozenset({"bytes"})), lines)
    body = {"results": [{"trace": str(file)} for file in files], "exit_code": status}
    return Report(
        "record", status == 0, f"recorded {counted(len(files), 'trace')}", (section,), body
    )


def shrink_report(about: About, path: Path, written: Path, small: Reduced) -> Report:
    """The steps that are left, and where they were written."""
    script = small.scenario.steps
    steps = tuple((Cell(str(i)), Cell(describe(op))) for i, op in enumerate(script, start=1))
    bad = small.followed.first_bad
    assert bad is not None
    verdict, audit = small.run.verdict, small.run.audit
    lines = (
        f"{path.name} fails after group {bad.group}, line {bad.line}: {_told(bad)}",
        f"In {len(steps)} steps: {verdict}, physical {audit.physical}, mapped {audit.mapped}. "
        f"Written to {written};",
        f"`swaleak repro {written}` replays it.",
    )
    grid = Grid(("step", "operation"), steps, frozenset({"step"}))
    body = {
        "results": [
            {
                "trace": str(path),
                "scenario": str(written),
                "steps": [describe(op) for op in script],
                "verdict": verdict,
                "physical": audit.physical,
                "mapped": audit.mapped,
            }
        ]
    }
    section = Section("", grid, lines)
    return Report("shrink", True, about.header, (section,), body, about.torch, about.device)


def _row(run: Replayed) -> tuple[Cell, ...]:
    seen = run.followed
    physical, mapped = (seen.last.physical, seen.last.mapped) if seen.last else ("-", "-")
    return (
        Cell(run.strategy),
        Cell(run.origin),
        Cell(str(seen.groups)),
        Cell(str(physical)),
        Cell(str(mapped)),
        Cell(seen.verdict, STYLES[seen.verdict]),
        Cell(f"{seen.groups - seen.differ} of {seen.groups}"),
    )


def _facts(run: Replayed) -> list[str]:
    seen, facts = run.followed, []
    if seen.first_bad:
        bad = seen.first_bad
        facts.append(f"from group {bad.group} (line {bad.line}) on: {_told(bad)}")
    if seen.raised:
        facts.append(f"line {seen.raised[0]}: the allocator raised {seen.raised[1]}")
    if seen.starved:
        facts.append(f"line {seen.starved}: a pool ran dry")
    if not seen.groups:
        facts.append("no free group ends in this trace, so that nothing was judged")
    return [f"{run.strategy}: {fact}" for fact in facts]


def _told(bad: GroupEnd) -> str:
    return "; ".join(
        f"full {named(v.pages)} lost the SWA side" if v.kind == "lost" else tell(v)
        for v in bad.violations
    )


def _json(path: Path, run: Replayed) -> dict[str, Any]:
    seen = run.followed
    entry: dict[str, Any] = {
        "trace": str(path),
        "target": run.target,
        "strategy": run.strategy,
        "origin": run.origin,
        "groups": seen.groups,
        "calls": seen.calls,
        "physical": seen.last.physical if seen.last else None,
        "mapped": seen.last.mapped if seen.last else None,
        "verdict": seen.verdict,
        "groups_as_recorded": seen.groups - seen.differ,
        "violations": violations_json(seen.first_bad.violations) if seen.first_bad else [],
    }
    if seen.first_bad:
        entry["first_bad"] = {"group": seen.first_bad.group, "line": seen.first_bad.line}
    if seen.raised:
        entry["raised"] = {"line": seen.raised[0], "error": seen.raised[1]}
    if seen.starved:
        entry["starved"] = {"line": seen.starved}
    return entry
