"""The report of ``swaleak diagnose``: findings in words and as JSON. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from swaleak import __version__
from swaleak.diagnose.finding import FAULTS, MISSING, TWICE, Diagnosis, Fault, Finding
from swaleak.report.model import Cell, Grid, Report, Section

SHOWN = 12  # findings that are printed one by one; of more, those that matter. The JSON holds all
GROUPS = 20  # kinds of findings that are printed
NAMED = 6  # ranks, or runs of ranks, that are named
UNREAD = 5  # unreadable messages that are named
MEANINGS = {
    MISSING: "Slots that nobody accounts for, neither free nor in use: a leak. They are gone until "
    "the server restarts.",
    TWICE: "Slots that are counted twice, free and in use at once: no leak, but two "
    "owners may come to write to one page.",
}
POOLS = {None: "pool not named", "req_to_token": "request slots"}
LEAK = FAULTS[0]


class _Table(Grid):
    """Findings. Too narrow a terminal gets them in pieces: a number that is folded is misread."""

    def parts(self, width: int) -> Iterator[Grid]:
        """Yield the table in pieces no wider than ``width``, the numbers to the right."""
        for part in Grid(self.columns, self.rows, series=True).parts(width):
            yield replace(part, right=self.right)


def diagnose_report(name: str, diagnosis: Diagnosis) -> Report:
    """Return what a log says; ``ok`` is False if it says nothing. ``name``: of the log."""
    body = {
        "bytes": diagnosis.size,
        "findings": [_finding_json(finding) for finding in diagnosis.findings],
        "unread": [
            {"line": one.line, "why": one.why, "rank": one.rank, "time": one.time}
            for one in diagnosis.unread
        ],
        "unread_count": diagnosis.unread_count,
        "versions": list(diagnosis.versions),
        "page_sizes": list(diagnosis.page_sizes),
    }
    said = ", ".join((name, _size(diagnosis.size), *diagnosis.kinds)) + _named(diagnosis)
    header, notes = f"swaleak {__version__}: {said}", _notes(diagnosis)
    unread = _unread(diagnosis)
    if not diagnosis.findings:
        said_none = () if unread else ("No leak message found.",)
        rest = (*said_none, *notes)
        sections = [*unread, *([Section("", None, rest)] if rest else [])]
        return Report("diagnose", bool(unread), header, tuple(sections), body)
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, finding in enumerate(diagnosis.findings):
        groups.setdefault(_explain(finding), []).append(i)
    told = dict(list(groups.items())[:GROUPS])
    shown = {lines: _shown(numbers, diagnosis.findings) for lines, numbers in told.items()}
    rows = sorted(number for numbers in shown.values() for number in numbers)
    if len(rows) < len(diagnosis.findings):
        notes = (
            f"{len(diagnosis.findings)} different findings: of each kind the first, the largest "
            f"and the last are shown, {len(diagnosis.findings) - len(rows)} more are in the JSON.",
            *notes,
        )
    sections = [Section("", _table(rows, diagnosis.findings), notes)]
    for (_, *lines), numbers in told.items():
        group = [diagnosis.findings[i] for i in numbers]
        title = f"{_numbers(shown[(_, *lines)], len(numbers))}: {_title(group)}"
        pages = (_pages(group[0]) if len(group) == 1 else _pages_of(group),)
        sections.append(Section(title, None, (*(pages if group[0].pages else ()), *lines)))
    return Report("diagnose", True, header, (*sections, *unread), body)


def _shown(numbers: list[int], findings: tuple[Finding, ...]) -> list[int]:
    """Return which findings of a kind are shown: the first, the largest and the last of many."""
    if len(findings) <= SHOWN:
        return numbers
    largest = max(numbers, key=lambda i: abs(findings[i].difference or 0))
    last = max(numbers, key=lambda i: findings[i].lines[1])
    return sorted({numbers[0], largest, last})


def _table(shown: list[int], findings: tuple[Finding, ...]) -> Grid:
    """Return the findings, with the ranks if any is named."""
    columns = ["#", "pool", "total", "accounted", "difference", "meaning", "seen"]
    rows = [_row(i + 1, findings[i]) for i in shown]
    if any(rank for i in shown for rank, _ in findings[i].ranks):
        columns.append("ranks")
        rows = [
            (*row, Cell(_ranks(rank for rank, _ in findings[i].ranks)))
            for i, row in zip(shown, rows, strict=True)
        ]
    right = frozenset({"#", "total", "accounted", "difference", "seen"})
    return _Table(tuple(columns), tuple(rows), right)


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


def _numbers(shown: list[int], count: int) -> str:
    """Return which rows a headline is of, and of how many that are no rows."""
    more = f" and {count - len(shown)} more" if count > len(shown) else ""
    return ", ".join(str(i + 1) for i in shown) + more


def _title(group: list[Finding]) -> str:
    """Return a headline for findings that are explained alike, less which they are."""
    times = [time for f in group for time in (f.first, f.last) if time]
    count = sum(finding.count for finding in group)
    ranks = {rank for finding in group for rank, _ in finding.ranks}
    where = f" on {_ranks(ranks)}" if any(ranks) else ""
    when = ""
    if times:
        when = f", {min(times)}" + (f" to {max(times)}" if max(times) != min(times) else "")
    return f"{_headline(group)}, seen {count} time{'s' if count > 1 else ''}{where}{when}"


def _ranks(ranks: Iterable[str | None]) -> str:
    """Return ranks by their names in the log, those that follow each other as one: ``TP0-3``."""
    runs: list[tuple[str, int, int]] = []
    split = (re.fullmatch(r"(.*?)(\d+)", rank) for rank in ranks if rank)
    for head, number in sorted((m[1], int(m[2])) for m in split if m):
        if runs and runs[-1][0] == head and number == runs[-1][2] + 1:
            runs[-1] = (head, runs[-1][1], number)
        else:
            runs.append((head, number, number))
    names = [f"{head}{a}" + (f"-{b}" if b > a else "") for head, a, b in runs]
    return ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")


def _headline(group: list[Finding]) -> str:
    finding = group[0]
    pool = {None: "a pool", "req_to_token": "the request slots"}.get(
        finding.pool, f"the {finding.pool} pool"
    )
    sizes = [abs(f.difference or sum(number for _, number in f.terms)) for f in group]
    number = str(min(sizes)) + (f" to {max(sizes)}" if max(sizes) > min(sizes) else "")
    match finding.kind:
        case "sum":
            verb = "missing from" if finding.meaning == MISSING else "counted twice in"
            return f"{number} slot{'s' if number != '1' else ''} {verb} {pool}"
        case "double-free":
            return f"{number} pages twice in the free list of {pool}"
        case "use-after-free":
            return f"{number} references to free pages of {pool}"
        case _:
            return f"more is free in {pool} than there is"


def _explain(finding: Finding) -> tuple[str, ...]:
    """Return a kind of finding, then what it means and which known faults fit, alike for all."""
    whole = finding.page_size in finding.pages
    lines = [f"{finding.kind} {finding.pool} {finding.page_size} {whole} {bool(finding.pages)}"]
    if finding.doubtful:
        names = ", ".join(f"{name}=" for name in finding.doubtful)
        lines.append(
            f"The message names no {names}, which every release from 0.5.12 does: if it was cut "
            f"off, the difference is not the true one."
        )
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


def _pages_of(group: list[Finding]) -> str:
    """Return what several findings of one kind come to."""
    size = group[0].page_size
    if size in group[0].pages:
        numbers = sorted({abs(finding.pages[size]) for finding in group})
        told = ", ".join(map(str, numbers))
        if len(numbers) > 8:
            told = f"{numbers[0]} to {numbers[-1]}"
        return f"In pages of {size} slots: {told}."
    if size:
        return f"They are no whole numbers of pages of {size}."
    common = [n for n in group[0].pages if n > 1 and all(n in f.pages for f in group)]
    if not common:
        return "They are no whole numbers of pages, unless the page size is 1."
    sizes = ", ".join(map(str, common[:3])) + (", …" if len(common) > 3 else "")
    return f"They are whole numbers of pages of {sizes} slots, by the page size."


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
    if diagnosis.torn:
        notes.append("The log is packed, and the file ends too early: what is missing is not read.")
    if diagnosis.unused:
        named = ", ".join(map(str, diagnosis.page_sizes))
        notes.append(f"--page-size {diagnosis.unused} is not used: the log names {named}.")
    if diagnosis.more:
        notes.append(f"{diagnosis.more} more messages of yet other numbers are not told apart.")
    if diagnosis.dumps:
        notes.append(
            f"{diagnosis.dumps} sums of a watchdog's dump are left out: it is taken while a batch "
            f"runs, and what that batch holds is not in them."
        )
    return tuple(notes)


def _unread(diagnosis: Diagnosis) -> list[Section]:
    """Return which messages are there and cannot be read, and why; nothing if there are none."""
    if not diagnosis.unread:
        return []
    told = [*diagnosis.unread[:UNREAD], *diagnosis.unread[UNREAD:][-1:]]
    lines = [
        ", ".join(
            [
                f"Line {one.line}",
                *([one.rank] if one.rank else []),
                *([one.time] if one.time else []),
            ]
        )
        + f": {one.why}."
        for one in told
    ]
    if more := diagnosis.unread_count - len(told):
        lines.append(f"{more} more such messages.")
    title = "A leak message is there, but cannot be read; nothing is worked out from it"
    if diagnosis.unread_count > 1:
        title = (
            f"{diagnosis.unread_count} leak messages are there, but cannot be read; nothing is "
            "worked out from them"
        )
    return [Section(title, None, tuple(lines))]


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
        "lines": list(finding.lines),
        "ranks": {rank or "": count for rank, count in finding.ranks},
        "absent": list(finding.doubtful),
        "known": [ref for fault in finding.known for ref in fault.refs],
        "reproduce": [fault.command for fault in finding.known if fault.command],
    }
