"""Reports on cases: one table a scenario (`repro`), or a matrix of all (`verify`, `check`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from swaleak.report.entries import case_json
from swaleak.report.facts import (
    OPEN_GROUP,
    explain,
    failures,
    listed_sizes,
    refusals,
    strategy_shown,
    substitutions,
)
from swaleak.report.report import STYLES, About, Cell, Grid, Judged, Report, Section
from swaleak.words import counted

if TYPE_CHECKING:
    from swaleak.check.case import Case

BESIDE = "As shipped is there to compare with; what counts is what the patch makes."


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
            tuple(_repro_row(about, case) for case in mine),
            frozenset({"page size", "physical", "mapped"}),
        )
        unjudged = [OPEN_GROUP] if any(case.open_group for case in mine) else []
        beside = [BESIDE] if any(case.origin == "patched" for case in mine) else []
        lines = (
            *explain(mine),
            *unjudged,
            *_unmeasured(about, mine),
            *substitutions(mine),
            *beside,
        )
        sections.append(Section(f"{name}: {scenario.title}", grid, lines))
        sections += (timelines or {}).get(name, ())
    return _report("repro", about, sections, _judged(about, cases, _as_declared))


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
    judged = _judged(about, cases, _as_declared)
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
        f"{counted(len(cases), 'run')}, all as declared."
        if not wrong
        else f"{len(wrong)} of {counted(len(cases), 'run')} not as declared."
    )
    grid = Grid(("scenario", *(titles[s] for s in strategies)), tuple(rows))
    return _report("verify", about, [Section("", grid, tuple(lines))], judged)


def check_report(about: About, cases: Sequence[Case], left_out: int) -> Report:
    """Scenarios down, targets across. With patches, only the patched targets are judged."""
    names = list(dict.fromkeys(case.target for case in cases))
    judged = _judged(about, cases, lambda case: case.safe)
    runs = sum(one.passed is not None for one in judged)
    failed = sum(one.passed is False for one in judged)
    rows = []
    for scenario in dict.fromkeys(case.scenario.name for case in cases):
        mine = [case for case in cases if case.scenario.name == scenario]
        cells = [cell_of([case for case in mine if case.target == name]) for name in names]
        rows.append((Cell(scenario), *cells))
    columns = ("scenario", *(name.removeprefix("sglang ") for name in names))
    lines = [*failures(cases), *refusals(cases), *substitutions(cases)]
    lines += _marks(cases)
    if about.patched:
        lines.append(BESIDE)
    if left_out:
        latent = counted(left_out, "latent scenario")
        lines.append(f"{latent} left out; --strict judges by them too.")
    lines.append(
        f"{failed} of {counted(runs, 'run')} failed."
        if failed
        else f"{counted(runs, 'run')}, all clean, or refused where that is right."
        if any(one.case.verdict == "refused" for one in judged if one.passed)
        else f"{counted(runs, 'run')}, all clean."
    )
    sections = [Section("", Grid(columns, tuple(rows), series=True), tuple(lines))]
    return _report("check", about, sections, judged)


def _as_declared(case: Case) -> bool:
    return case.as_declared


def _judged(
    about: About, cases: Sequence[Case], passes: Callable[[Case], bool]
) -> tuple[Judged, ...]:
    """Judge the cases: with patches those of the patched targets, without all of them."""
    return tuple(
        Judged(case, None if about.patched and case.target not in about.patched else passes(case))
        for case in cases
    )


def _report(
    command: str, about: About, sections: Sequence[Section], cases: tuple[Judged, ...]
) -> Report:
    notes = [Section("", None, about.notes)] if about.notes else []
    body = {"results": [case_json(one.case) for one in cases]}
    return Report(
        command,
        all(one.passed is not False for one in cases),
        about.header,
        (*notes, *sections),
        body,
        about.torch,
        about.device,
        cases,
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
        word if len(same) == len(cases) else f"{word} at {listed_sizes(same)}"
        for word, same in told.items()
    ]
    worst = max((case.verdict for case in cases), key=list(STYLES).index, default="clean")
    return Cell("\n".join(lines), STYLES[worst])


def _unmeasured(about: About, cases: Sequence[Case]) -> list[str]:
    """Return the line that says which rows of a patched target are not of the patch's code."""
    grafted = [c.strategy for c in cases if c.target in about.patched and c.origin == "grafted"]
    if not grafted:
        return []
    names = " and ".join(dict.fromkeys(grafted))
    has_own = any(case.origin == "patched" for case in cases)
    return [
        f"{names} on patched: swaleak's frees stand in for the patched ones, so that this row does "
        f"not measure the patch{'.' if has_own else '; -s shipped does.'}"
    ]


def _marks(cases: Sequence[Case]) -> list[str]:
    """Return what ``!`` means, of the columns that have one."""
    patched = {case.origin == "patched" for case in cases if not case.as_declared}
    lines = {
        False: "! as shipped: not as it is known of that release.",
        True: "! as patched: not clean, nor refused misuse, whatever is known of it as shipped.",
    }
    return [line for of_patch, line in lines.items() if of_patch in patched]


def _repro_row(about: About, case: Case) -> tuple[Cell, ...]:
    on_patched = case.target in about.patched and case.origin == "grafted"
    declared = case.declared.verdict if case.declared else "-"
    mark = "" if case.as_declared else "  <- no"
    return (
        Cell(strategy_shown(case)),
        Cell("on patched" if on_patched else case.origin),
        Cell(str(case.page_size)),
        Cell(str(case.physical)),
        Cell(str(case.mapped)),
        Cell(case.verdict, STYLES[case.verdict]),
        Cell(declared + mark, "" if case.as_declared else "bold red"),
    )
