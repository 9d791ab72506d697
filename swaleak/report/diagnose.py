"""The report of ``swaleak diagnose``: findings in words and as JSON. No torch here."""

from __future__ import annotations

from typing import Any

from swaleak import __version__
from swaleak.diagnose.finding import FAULTS, MISSING, TWICE, Diagnosis, Fault, Finding
from swaleak.report.report import Cell, Grid, Report, Section

SHOWN = 50  # findings that are printed; the JSON holds all
MEANINGS = {
    MISSING: "Slots that nobody accounts for, neither free nor in use: a leak. They are gone until "
    "the server restarts.",
    TWICE: "Slots that are counted twice, free and in use at once: no leak, but two "
    "owners may come to write to one page.",
}
POOLS = {None: "pool not named", "req_to_token": "request slots"}
LEAK = FAULTS[0]


def diagnose_report(name: str, diagnosis: Diagnosis) -> Report:
    """Return what a log says; ``ok`` is False if it says nothing. ``name``: of the log."""
    body = {
        "bytes": diagnosis.size,
        "findings": [_finding_json(finding) for finding in diagnosis.findings],
        "versions": list(diagnosis.versions),
        "page_sizes": list(diagnosis.page_sizes),
    }
    header = f"swaleak {__version__}: {name}, {_size(diagnosis.size)}{_named(diagnosis)}"
    notes = _notes(diagnosis)
    if not diagnosis.findings:
        lines = ("No leak message found.", *notes)
        return Report("diagnose", False, header, (Section("", None, lines),), body)
    shown = diagnosis.findings[:SHOWN]
    rows = tuple(_row(i, finding) for i, finding in enumerate(shown, start=1))
    columns = ("#", "pool", "total", "accounted", "difference", "meaning", "seen")
    right = frozenset({"#", "total", "accounted", "difference", "seen"})
    sections = [Section("", Grid(columns, rows, right), notes)]
    told: dict[tuple[str, ...], list[int]] = {}
    for i, finding in enumerate(shown, start=1):
        told.setdefault(_explain(finding), []).append(i)
    sections += [Section(_title(numbers, shown), None, lines) for lines, numbers in told.items()]
    return Report("diagnose", True, header, tuple(sections), body)


def _row(number: int, finding: Finding) -> tuple[Cell, ...]:
    slots = (finding.total, finding.accounted, finding.difference)
    signs = ("", "", "+")
    return (
        Cell(str(number)),
        Cell(POOLS.get(finding.pool, str(finding.pool))),
        *(
            Cell("-" if value is None else f"{value:{sign}d}")
            for value, sign in zip(slots, signs, strict=True)
        ),
        Cell(finding.meaning, "bold red" if finding.meaning == MISSING else "bold magenta"),
        Cell(str(finding.count)),
    )


def _title(numbers: list[int], findings: tuple[Finding, ...]) -> str:
    """Return a headline for findings that are explained alike."""
    first = findings[numbers[0] - 1]
    shown = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
    times = [f.first for f in (findings[i - 1] for i in numbers) if f.first]
    times += [f.last for f in (findings[i - 1] for i in numbers) if f.last]
    count = sum(findings[i - 1].count for i in numbers)
    when = ""
    if times:
        when = f", {min(times)}" + (f" to {max(times)}" if max(times) != min(times) else "")
    return f"{shown}: {_headline(first)}, seen {count} time{'s' if count > 1 else ''}{when}"


def _headline(finding: Finding) -> str:
    pool = {None: "a pool", "req_to_token": "the request slots"}.get(
        finding.pool, f"the {finding.pool} pool"
    )
    match finding.kind:
        case "sum":
            number = abs(finding.difference or 0)
            verb = "missing from" if finding.meaning == MISSING else "counted twice in"
            return f"{number} slot{'s' if number > 1 else ''} {verb} {pool}"
        case "double-free":
            return f"{finding.terms[0][1]} pages twice in the free list of {pool}"
        case "use-after-free":
            return f"{finding.terms[0][1]} references to free pages of {pool}"
        case _:
            return f"more is free in {pool} than there is"


def _explain(finding: Finding) -> tuple[str, ...]:
    """Return what a finding comes to, what it means, and which known faults fit."""
    lines = [_pages(finding)] if finding.pages else []
    lines.append(MEANINGS[finding.meaning])
    if finding.known:
        for fault in finding.known:
            lines.append(f"Fits: {fault.title} ({', '.join(fault.refs)}).")
            if fault.command:
                lines.append(f"Reproduce it: {fault.command}")
    else:
        lines.append("No fault that swaleak knows fits.")
    if reason := _not_the_leak(finding):
        lines.append(f"Not the {_short(LEAK)}: {reason}.")
    return tuple(lines)


def _pages(finding: Finding) -> str:
    pages = {size: abs(number) for size, number in finding.pages.items()}
    if finding.page_size in pages:
        number = pages[finding.page_size]
        return f"That is {number} page{'s' if number > 1 else ''} of {finding.page_size} slots."
    told = [f"{n} page{'s' if n > 1 else ''} of {size}" for size, n in pages.items() if size > 1]
    if not told:
        return "That is no whole number of pages, unless the page size is 1."
    sizes = ", ".join(told[:3]) + (", …" if len(told) > 3 else "")
    if finding.page_size:
        return f"That is no whole number of pages of {finding.page_size}; it would be {sizes}."
    return f"That is {sizes}, by the page size."


def _not_the_leak(finding: Finding) -> str:
    """Return why a finding that resembles the leak of 0.5.18 is not that one; else nothing."""
    if finding.kind != "sum" or finding.pool not in LEAK.pools or LEAK in finding.known:
        return ""
    if finding.meaning != LEAK.meaning:
        return "that one loses slots, and here they are counted twice"
    if finding.version and not LEAK.versions.contains(finding.version, prereleases=True):
        return f"the log is of {finding.version}, only {LEAK.versions} has it"
    return f"that one loses whole pages, here of {finding.page_size} slots"


def _short(fault: Fault) -> str:
    return f"{fault.title.partition(':')[0]} ({fault.refs[0]})"


def _notes(diagnosis: Diagnosis) -> tuple[str, ...]:
    notes = []
    if len(diagnosis.findings) > SHOWN:
        notes.append(f"{len(diagnosis.findings)} different findings, {SHOWN} shown; JSON has all.")
    if diagnosis.more:
        notes.append(f"{diagnosis.more} more messages of yet other numbers are not told apart.")
    if diagnosis.dumps:
        notes.append(
            f"{diagnosis.dumps} sums of a watchdog's dump are left out: it is taken while a batch "
            f"runs, and what that batch holds is not in them."
        )
    return tuple(notes)


def _named(diagnosis: Diagnosis) -> str:
    """Return what the log names: versions and page sizes."""
    said = []
    if diagnosis.versions:
        said.append("SGLang " + ", ".join(diagnosis.versions))
    if diagnosis.page_sizes:
        said.append("page size " + ", ".join(map(str, diagnosis.page_sizes)))
    return f"; it names {' and '.join(said)}" if said else "; it names no version, no page size"


def _size(number: int) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if number < 10_000:
            return f"{number} {unit}"
        number //= 1024
    return f"{number} GiB"


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "pool": finding.pool,
        "total": finding.total,
        "accounted": finding.accounted,
        "difference": finding.difference,
        "pages": {str(size): number for size, number in finding.pages.items()},
        "meaning": finding.meaning,
        "terms": dict(finding.terms),
        "version": finding.version,
        "page_size": finding.page_size,
        "count": finding.count,
        "first": finding.first,
        "last": finding.last,
        "known": [ref for fault in finding.known for ref in fault.refs],
        "reproduce": [fault.command for fault in finding.known if fault.command],
    }
