"""Reports as data, and their shapes: a Rich table, Markdown to paste, JSON to read by machine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from swaleak import __version__
from swaleak.check.case import Case
from swaleak.script.ops import describe

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {
    "clean": "green",
    "leak": "bold red",
    "corrupt": "bold magenta",
    "refused": "yellow",
    "error": "bold red",
}


class Cell(NamedTuple):
    """A piece of text, and the style of a verdict."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table. ``right``: the columns that hold numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    right: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Section:
    """A title, a table, and lines under it."""

    title: str = ""
    grid: Grid | None = None
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """Everything one command has to say. ``body``: what the JSON holds besides the envelope."""

    command: str
    ok: bool
    header: str
    sections: tuple[Section, ...]
    body: dict[str, Any]
    torch: str | None = None
    device: str | None = None
    cases: tuple[Case, ...] = field(default=())

    def with_line(self, line: str) -> Report:
        """Return the same with one more line under the last table, and in the JSON."""
        *first, last = self.sections
        section = replace(last, lines=(*last.lines, line))
        return replace(self, sections=(*first, section), body={**self.body, "note": line})

    def as_json(self) -> str:
        """Return one JSON object, ``swaleak/1``."""
        envelope = {
            "schema": "swaleak/1",
            "command": self.command,
            "version": __version__,
            "torch": self.torch,
            "device": self.device,
            "ok": self.ok,
        }
        return json.dumps(envelope | self.body, indent=1) + "\n"

    def as_markdown(self) -> str:
        """Return Markdown that can be pasted into a pull request."""
        blocks = [self.header]
        for section in self.sections:
            if section.title:
                blocks.append(f"**{section.title}**")
            if section.grid:
                blocks.append(_markdown_table(section.grid))
            if section.lines:
                blocks.append("\n".join(f"- {line}" if line else "" for line in section.lines))
        return "\n\n".join(blocks) + "\n"

    def print_to(self, console: Console) -> None:
        """Print tables that are readable at 80 columns and without colour."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        console.print(Text(self.header, style="dim"), soft_wrap=False)
        for section in self.sections:
            console.print()
            if section.title:
                console.print(Text(section.title, style="bold"))
            if section.grid:
                table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
                for name in section.grid.columns:
                    justify: Any = "right" if name in section.grid.right else "left"
                    table.add_column(name, justify=justify, overflow="fold")
                for row in section.grid.rows:
                    table.add_row(*(Text(cell.text, style=cell.style) for cell in row))
                console.print(table)
            for line in section.lines:
                console.print(Text(line))


def case_json(case: Case) -> dict[str, Any]:
    """Return one entry of ``results``."""
    run = case.run
    entry: dict[str, Any] = {
        "scenario": case.scenario.name,
        "reach": case.scenario.reach,
        "target": case.target,
        "strategy": case.strategy,
        "origin": case.origin,
        "page_size": case.page_size,
        "physical": case.physical,
        "mapped": case.mapped,
        "verdict": case.verdict,
        "violations": violations_json(run.audit.violations),
        "declared": case.declared.verdict if case.declared else None,
        "as_declared": case.as_declared,
        "known": case.known.when if case.known else None,
    }
    if run.raised:
        entry["raised"] = run.raised
    if run.unmet:
        entry["unmet"] = list(run.unmet)
    if run.substituted:
        entry["substituted"] = dict(run.substituted)
    if run.repeats > 1:
        entry["repeats"] = run.repeats
        entry["leaked_per_repeat"] = (case.physical - case.mapped) / run.repeats
    if run.steps:
        entry["steps"] = [
            {
                "step": number,
                "op": describe(step.op),
                "physical": step.audit.physical,
                "mapped": step.audit.mapped,
                "violations": violations_json(step.audit.violations),
            }
            for number, step in enumerate(run.steps, start=1)
        ]
    return entry


def violations_json(violations: Iterable[Any]) -> list[dict[str, Any]]:
    """Return violations as JSON: kind, pool or owner, pages."""
    return [
        {"kind": v.kind, "pool": v.pool, "pages": list(v.pages)}
        if v.owner is None
        else {"kind": v.kind, "owner": v.owner, "pages": list(v.pages)}
        for v in violations
    ]


def repro_report(header: str, cases: Sequence[Case], **where: str) -> Report:
    """One table a scenario: strategies down, what came out across."""
    sections = []
    for name in dict.fromkeys(case.scenario.name for case in cases):
        mine = [case for case in cases if case.scenario.name == name]
        scenario = mine[0].scenario
        grid = Grid(
            ("strategy", "origin", "page size", "physical", "mapped", "verdict", "declared"),
            tuple(_repro_row(case) for case in mine),
            frozenset({"page size", "physical", "mapped"}),
        )
        sections.append(Section(f"{name}: {scenario.title}", grid, explain(mine)))
        sections += [_steps_section(case) for case in mine if case.run.steps]
    ok = all(case.as_declared for case in cases)
    body = {"results": [case_json(case) for case in cases]}
    return Report("repro", ok, header, tuple(sections), body, cases=tuple(cases), **where)


def verify_report(header: str, cases: Sequence[Case], **where: str) -> Report:
    """The catalogue down, strategies across."""
    strategies = list(dict.fromkeys(case.strategy for case in cases))
    shipped = {case.strategy for case in cases if case.origin == "shipped"}
    titles = {s: f"{s}*" if s in shipped else s for s in strategies}
    rows = []
    for name in dict.fromkeys(case.scenario.name for case in cases):
        mine = [case for case in cases if case.scenario.name == name]
        cells = [cell_of([case for case in mine if case.strategy == s]) for s in strategies]
        rows.append((Cell(name), *cells))
    wrong = [case for case in cases if not case.as_declared]
    lines = ["Cells: physical/mapped SWA pages and the verdict, at every page size."]
    if shipped:
        lines.append("* SGLang's own class, untouched; the others are grafted on it.")
    lines += [
        f"known: {case.scenario.name} {case.verdict} in {case.target} ({case.known})"
        for case in _first_of_each(case for case in cases if case.known)
    ]
    lines += [f"NOT AS DECLARED: {line}" for line in explain(wrong)]
    lines.append(
        f"{len(cases)} runs, all as declared."
        if not wrong
        else f"{len(wrong)} of {len(cases)} runs not as declared."
    )
    grid = Grid(("scenario", *(titles[s] for s in strategies)), tuple(rows))
    body = {"results": [case_json(case) for case in cases]}
    section = Section("", grid, tuple(lines))
    return Report("verify", not wrong, header, (section,), body, cases=tuple(cases), **where)


def cell_of(cases: Sequence[Case]) -> Cell:
    """Return one cell for a case at several page sizes; ``!`` marks what was not declared."""
    if not cases:
        return Cell("")
    by_text: dict[str, list[Case]] = {}
    for case in cases:
        counts = "" if case.run.raised else f"{case.physical}/{case.mapped} "
        by_text.setdefault(f"{counts}{case.verdict}", []).append(case)
    texts = []
    for text, same in by_text.items():
        sizes = "" if len(by_text) == 1 else f" at {', '.join(str(c.page_size) for c in same)}"
        mark = "" if all(case.as_declared for case in same) else "!"
        texts.append(f"{mark}{text}{sizes}")
    worst = max((case.verdict for case in cases), key=list(STYLES).index)
    return Cell("\n".join(texts), STYLES[worst])


def explain(cases: Sequence[Case]) -> tuple[str, ...]:
    """Return a line for each way in which something went wrong: who lost what."""
    lines: dict[str, list[Case]] = {}
    several = len({case.scenario.name for case in cases}) > 1
    for case in cases:
        for fact in _facts(case):
            who = f"{case.scenario.name}, {case.strategy}" if several else case.strategy
            lines.setdefault(f"{who}: {fact}", []).append(case)
    everywhere = {case.page_size for case in cases}
    return tuple(
        line if {case.page_size for case in same} == everywhere else f"{line} ({_sizes(same)})"
        for line, same in lines.items()
    )


def _facts(case: Case) -> list[str]:
    run = case.run
    facts = [*run.unmet]
    if run.raised:
        facts.append(f"step {run.failed_at} {case.verdict}: {run.raised}")
    if run.audit.violations:
        told = "; ".join(tell(violation) for violation in run.audit.violations)
        facts.append(
            told if run.raised or not run.failed_at else f"from step {run.failed_at}: {told}"
        )
    if run.repeats > 1:
        lost = (case.physical - case.mapped) / run.repeats
        facts.append(f"SWA pages lost a round: {lost:g}, over {run.repeats} rounds")
    if run.starved:
        facts.append(f"the pool ran dry in round {run.repeats}")
    facts += [f"{missing} is not there, done as {done}" for missing, done in run.substituted]
    if facts and case.known:
        facts[-1] += f" ({case.known})"
    return facts


def tell(violation: Any) -> str:
    """Return a violation as a piece of a sentence."""
    pages = ", ".join(str(page) for page in violation.pages[:6])
    if len(violation.pages) > 6:
        pages += f" and {len(violation.pages) - 6} more"
    plural = "s" if len(violation.pages) > 1 else ""
    verb = "" if plural else "s"
    pool = {"swa": "SWA", "full": "full"}.get(violation.pool, "")
    match violation.kind, violation.owner:
        case "lost", owner:
            return f"{owner} lost the SWA side of its page{plural} {pages}"
        case "stale", None:
            return f"stale: full page{plural} {pages} of nobody's still map{verb}"
        case "stale", owner:
            return f"stale: {owner}'s page{plural} {pages} still map{verb}"
        case "misaligned", owner:
            return f"misaligned: {owner}'s page{plural} {pages}"
        case "leak", _:
            return f"{pool} page{plural} {pages} leaked"
        case "dangling", _:
            return f"dangling: {pool} page{plural} {pages} in use and in the free list"
        case "double-free", _:
            return f"{pool} page{plural} {pages} twice in the free list"
        case "reserved", _:
            return f"reserved {pool} page{plural} {pages} in the free list"
        case _:
            return f"{violation.kind}: {pool} page{plural} {pages}"


def _repro_row(case: Case) -> tuple[Cell, ...]:
    declared = case.declared.verdict if case.declared else "-"
    mark = "" if case.as_declared else "  <- no"
    return (
        Cell(case.strategy),
        Cell(case.origin),
        Cell(str(case.page_size)),
        Cell(str(case.physical)),
        Cell(str(case.mapped)),
        Cell(case.verdict, STYLES[case.verdict]),
        Cell(declared + mark, "" if case.as_declared else "bold red"),
    )


def _steps_section(case: Case) -> Section:
    rows = tuple(
        (
            Cell(str(number)),
            Cell(describe(step.op)),
            Cell(str(step.audit.physical)),
            Cell(str(step.audit.mapped)),
            Cell("; ".join(tell(v) for v in step.audit.violations), "red"),
        )
        for number, step in enumerate(case.run.steps, start=1)
    )
    title = f"{case.scenario.name}, {case.strategy}, page size {case.page_size}, step by step"
    columns = ("step", "operation", "physical", "mapped", "violations")
    return Section(title, Grid(columns, rows, frozenset({"step", "physical", "mapped"})))


def _first_of_each(cases: Iterable[Case]) -> list[Case]:
    return list({(c.scenario.name, c.verdict): c for c in reversed(list(cases))}.values())[::-1]


def _sizes(cases: Sequence[Case]) -> str:
    return "page size " + ", ".join(dict.fromkeys(str(case.page_size) for case in cases))


def _markdown_table(grid: Grid) -> str:
    def line(cells: Iterable[str]) -> str:
        return (
            "| "
            + " | ".join(cell.replace("|", "\\|").replace("\n", "<br>") for cell in cells)
            + " |"
        )

    rules = ("--:" if name in grid.right else "---" for name in grid.columns)
    rows = (line(cell.text for cell in row) for row in grid.rows)
    return "\n".join([line(grid.columns), "| " + " | ".join(rules) + " |", *rows])
