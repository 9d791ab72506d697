"""Reports as data, and their shapes: a Rich table, Markdown to paste, JSON to read by machine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from swaleak import __version__
from swaleak.script.ops import describe

if TYPE_CHECKING:
    from rich.console import Console

    from swaleak.check.case import Case
    from swaleak.check.picture import Page

STYLES = {
    "clean": "green",
    "leak": "bold red",
    "corrupt": "bold magenta",
    "refused": "yellow",
    "error": "bold red",
}

PLAIN = str.maketrans("●○·✗…", "*o.x~")  # for a terminal that knows ASCII only


class Cell(NamedTuple):
    """A piece of text, and the style of a verdict."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table.

    ``right``: the columns that hold numbers. ``series``: one subject a column. ``gap``: blanks
    around a cell.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    right: frozenset[str] = frozenset()
    series: bool = False
    gap: int = 1

    def parts(self, width: int) -> Iterator[Grid]:
        """Yield the table, a series in pieces no wider than ``width`` that repeat column one."""
        if not self.series:
            yield self
            return
        texts = zip(self.columns, *([cell.text for cell in row] for row in self.rows), strict=True)
        widths = [3 + max(len(line) for t in column for line in t.split("\n")) for column in texts]
        start = 1
        while start < len(self.columns):
            stop, room = start + 1, width - widths[0] - widths[start]
            while stop < len(self.columns) and (room := room - widths[stop]) >= 0:
                stop += 1
            yield Grid(
                (self.columns[0], *self.columns[start:stop]),
                tuple((row[0], *row[start:stop]) for row in self.rows),
            )
            start = stop


@dataclass(frozen=True, slots=True)
class Section:
    """A title, a table, what it comes to in one sentence, and lines under it."""

    title: str = ""
    grid: Grid | None = None
    lines: tuple[str, ...] = ()
    moral: Cell | None = None


@dataclass(frozen=True, slots=True)
class About:
    """What was driven: the first line of a report, notes on the targets, torch and device."""

    header: str
    notes: tuple[str, ...]
    torch: str
    device: str


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
        """Return the same with one more line, before the last one, and in the JSON."""
        *first, last = self.sections
        section = replace(last, lines=(*last.lines[:-1], line, *last.lines[-1:]))
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
            if section.moral:
                blocks.append(section.moral.text)
            if section.lines:
                blocks.append("\n".join(f"- {line}" if line else "" for line in section.lines))
        return "\n\n".join(blocks) + "\n"

    def print_to(self, console: Console) -> None:
        """Print tables that are readable at 80 columns and without colour."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        marks = PLAIN if console.options.ascii_only else {}

        def text(words: str, style: str = "") -> Text:
            return Text(words.translate(marks), style=style)

        console.print(text(self.header, "dim"), soft_wrap=False)
        for section in self.sections:
            console.print()
            if section.title:
                console.print(text(section.title, "bold"))
            for grid in section.grid.parts(console.width) if section.grid else ():
                table = Table(box=box.SIMPLE_HEAD, padding=(0, grid.gap), pad_edge=False)
                for name in grid.columns:
                    justify: Any = "right" if name in grid.right else "left"
                    table.add_column(name, justify=justify, overflow="fold")
                for row in grid.rows:
                    table.add_row(*(text(*cell) for cell in row))
                console.print(table)
            if section.moral:
                console.print(text(*section.moral))
                if section.lines:
                    console.print()
            for line in section.lines:
                console.print(text(line))


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
                "pages": [_page_json(page) for page in step.pages],
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


def _page_json(page: Page) -> dict[str, Any]:
    """Return one SWA page of one step; pages that are simply free are left out."""
    return {
        "page": page.page,
        "owners": list(page.owners),
        "free": not page.held,
        "mapped": page.mapped,
        "queued": page.queued,
    }


def repro_report(
    about: About,
    cases: Sequence[Case],
    timelines: Mapping[str, Sequence[Section]] | None = None,
) -> Report:
    """One table a scenario: strategies down, what came out across; under it, its timelines."""
    sections = []
    for name in dict.fromkeys(case.scenario.name for case in cases):
        mine = [case for case in cases if case.scenario.name == name]
        scenario = mine[0].scenario
        grid = Grid(
            ("strategy", "origin", "page size", "physical", "mapped", "verdict", "declared"),
            tuple(_repro_row(case) for case in mine),
            frozenset({"page size", "physical", "mapped"}),
        )
        lines = (*explain(mine), *substitutions(mine))
        sections.append(Section(f"{name}: {scenario.title}", grid, lines))
        sections += (timelines or {}).get(name, ())
    return _report("repro", about, all(case.as_declared for case in cases), sections, cases)


def verify_report(about: About, cases: Sequence[Case]) -> Report:
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
    lines = ["Cells: physical/mapped SWA pages and the verdict."]
    if shipped:
        lines.append("* SGLang's own class, untouched; the others are grafted on it.")
    lines += dict.fromkeys(
        f"known: {case.scenario.name} {case.verdict} in {case.target} ({case.known})"
        for case in cases
        if case.known
    )
    lines += [f"! not as declared: {line}" for line in explain(wrong)]
    lines += substitutions(cases)
    lines.append(
        f"{len(cases)} runs, all as declared."
        if not wrong
        else f"{len(wrong)} of {len(cases)} runs not as declared."
    )
    grid = Grid(("scenario", *(titles[s] for s in strategies)), tuple(rows))
    return _report("verify", about, not wrong, [Section("", grid, tuple(lines))], cases)


def check_report(about: About, cases: Sequence[Case], left_out: int) -> Report:
    """Scenarios down, targets across. With patches, only the patched targets are judged."""
    names = list(dict.fromkeys(case.target for case in cases))
    patched = [case for case in cases if case.origin == "patched"]
    failed = [case for case in patched or cases if not case.safe]
    rows = []
    for scenario in dict.fromkeys(case.scenario.name for case in cases):
        mine = [case for case in cases if case.scenario.name == scenario]
        cells = [cell_of([case for case in mine if case.target == name]) for name in names]
        rows.append((Cell(scenario), *cells))
    columns = ("scenario", *(name.removeprefix("sglang ") for name in names))
    lines = [*failures(cases), *refusals(cases), *substitutions(cases)]
    if not all(case.as_declared for case in cases):
        lines.append("! marks what is not as it is known of that release.")
    if patched:
        lines.append("As shipped is there to compare with; what counts is what the patch makes.")
    if left_out:
        lines.append(f"{left_out} latent scenarios left out; --strict judges by them too.")
    lines.append(
        f"{len(failed)} of {len(patched or cases)} runs failed."
        if failed
        else f"{len(patched or cases)} runs, all clean or refused."
    )
    sections = [Section("", Grid(columns, tuple(rows), series=True), tuple(lines))]
    return _report("check", about, not failed, sections, cases)


def _report(
    command: str, about: About, ok: bool, sections: Sequence[Section], cases: Sequence[Case]
) -> Report:
    notes = [Section("", None, about.notes)] if about.notes else []
    body = {"results": [case_json(case) for case in cases]}
    return Report(
        command,
        ok,
        about.header,
        (*notes, *sections),
        body,
        about.torch,
        about.device,
        tuple(cases),
    )


def cell_of(cases: Sequence[Case]) -> Cell:
    """Return one cell for a case at all its page sizes; what is well at some is left unsaid.

    ``!`` marks what was not declared.
    """
    said: dict[str, list[Case]] = {}
    for case in sorted(cases, key=lambda case: case.safe):
        counts = f"{case.physical}/{case.mapped}"
        word = f"ok {counts}" if case.verdict == "clean" else f"{counts} {case.verdict}"
        word = case.verdict if case.verdict == "refused" else word
        said.setdefault(word if case.as_declared else f"!{word}", []).append(case)
    bad = {word: same for word, same in said.items() if not all(case.safe for case in same)}
    told = bad or said
    lines = [
        word if len(same) == len(cases) else f"{word} at {_sizes(same)}"
        for word, same in told.items()
    ]
    worst = max((case.verdict for case in cases), key=list(STYLES).index, default="clean")
    return Cell("\n".join(lines), STYLES[worst])


def explain(cases: Sequence[Case]) -> tuple[str, ...]:
    """Return a line for each way in which something went wrong: who lost what."""
    lines: dict[str, list[Case]] = {}
    failed = [case for case in cases if _facts(case)]
    scenarios = {case.scenario.name for case in failed}
    targets = {case.target for case in failed}
    for case in failed:
        scenario = [case.scenario.name] if len(scenarios) > 1 else []
        target = [case.target] if len(targets) > 1 else []
        who = ", ".join([*scenario, *target, case.strategy])
        for fact in _facts(case):
            lines.setdefault(f"{who}: {fact}", []).append(case)
    everywhere = {case.page_size for case in cases}
    return tuple(
        line if {c.page_size for c in same} == everywhere else f"{line} (page size {_sizes(same)})"
        for line, same in lines.items()
    )


def failures(cases: Sequence[Case]) -> list[str]:
    """Return a line for each way a scenario fails the gate, and in which targets."""
    same: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        if not case.safe:
            same.setdefault((case.scenario.name, "; ".join(_facts(case))), []).append(case)
    lines = []
    for (scenario, facts), found in same.items():
        targets = ", ".join(dict.fromkeys(c.target.removeprefix("sglang ") for c in found))
        tried = {c.page_size for c in cases if c.scenario.name == scenario}
        sizes = "" if {c.page_size for c in found} == tried else f" at page size {_sizes(found)}"
        lines.append(f"{scenario} in {targets}{sizes}: {facts}")
    return lines


def refusals(cases: Sequence[Case]) -> list[str]:
    """Return a line for each way in which allocators refused, and where."""
    same: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        if case.verdict == "refused":
            key = (case.scenario.name, f"step {case.run.failed_at} refused: {case.run.raised}")
            same.setdefault(key, []).append(case.target.removeprefix("sglang "))
    return [
        f"{scenario} in {', '.join(dict.fromkeys(targets))}: {fact}"
        for (scenario, fact), targets in same.items()
    ]


def substitutions(cases: Sequence[Case]) -> list[str]:
    """Return a line for each call that was made in place of one that a target lacks."""
    made = dict.fromkeys((c.target, *pair) for c in cases for pair in c.run.substituted)
    lacking: dict[tuple[str, str], list[str]] = {}
    for target, missing, done in made:
        lacking.setdefault((missing, done), []).append(target.removeprefix("sglang "))
    return [
        f"No {missing} in {', '.join(targets)}; done as {done}."
        for (missing, done), targets in lacking.items()
    ]


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
    if facts and case.known and case.as_declared:
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


def _sizes(cases: Sequence[Case]) -> str:
    return ", ".join(dict.fromkeys(str(case.page_size) for case in cases))


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
