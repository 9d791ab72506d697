"""The report of ``swaleak diagnose``. No torch here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from swaleak import __version__
from swaleak.log_diagnosis.match import TABLE, Fault, advice, known_faults
from swaleak.log_diagnosis.parser import MISSING, Diagnosis, Finding
from swaleak.report.report import Cell, Grid, Report, Section, visible

if TYPE_CHECKING:
    from rich.console import Console

MAX_ROWS, MAX_GROUPS, MAX_RANKS, MAX_UNREAD, MAX_FAULTS = 12, 20, 6, 5, 3
POOLS = {None: "a pool", "req_to_token": "the request pool"}


class _Table(Grid):
    """A table in pieces where the terminal is narrow: a number that is folded is misread."""

    def parts(self, width: int) -> Iterator[Grid]:
        for part in Grid(self.columns, self.rows, series=True).parts(width):
            yield replace(part, right=self.right)


class _OneLine(Report):
    def print_to(self, console: Console) -> None:
        console.print(visible(self.header), soft_wrap=True, markup=False, highlight=False)


def diagnose_report(name: str, diagnosis: Diagnosis) -> Report:
    """Return what a log says; ``ok`` is False if no leak is in it. ``name``: of the log."""
    findings, unread = diagnosis.findings, diagnosis.unread
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    texts = [_explanation(finding, known_faults(finding, findings)) for finding in findings]
    for i, text in enumerate(texts):
        groups[(findings[i].form.kind, str(findings[i].pool), *text)].append(i)
    body = {
        "bytes": diagnosis.text.raw.size,
        "findings": [
            _finding_json(finding, known_faults(finding, findings), text[-1])
            for finding, text in zip(findings, texts, strict=True)
        ],
        "unread": [
            {"line": f.lines[0], "why": f.what, "rank": f.ranks[0][0], "time": f.first}
            for f in unread
        ],
        "unread_count": len(unread),
        "versions": list(diagnosis.versions),
        "page_sizes": list(diagnosis.page_sizes),
        "dumps": diagnosis.dumps,
    }
    said = ", ".join((name, _size(diagnosis.text.raw.size), *diagnosis.text.kinds))
    notes = _notes(diagnosis)
    if not findings and not unread:
        return _OneLine("diagnose", False, " ".join((f"No leak in {said}.", *notes)), (), body)
    names = [*map("SGLang {}".format, diagnosis.versions)]
    names += map("page size {}".format, diagnosis.page_sizes)
    said += "; it names " + (", ".join(names) or "no version, no page size")
    largest = [max(g, key=lambda i: abs(findings[i].difference or 0)) for g in groups.values()]
    shown = {i for g, top in zip(groups.values(), largest, strict=True) for i in (g[0], top, g[-1])}
    shown = shown if len(findings) > MAX_ROWS else set(range(len(findings)))
    if hidden := len(findings) - len(shown):
        notes.insert(0, f"Of each kind the first, the largest and the last: {hidden} more are in the JSON.")
    sections = [Section("", _table(sorted(shown), findings), tuple(notes))] if findings else []
    for (_, _, *lines), numbers in list(groups.items())[:MAX_GROUPS]:
        title = f"{', '.join(str(i + 1) for i in numbers if i in shown)}: "
        title += _title([findings[i] for i in numbers])
        sections.append(Section(title, None, tuple(lines)))
    if unread:
        sections.append(_unread(unread, () if findings else tuple(notes)))
    return Report("diagnose", True, f"swaleak {__version__}: {said}", tuple(sections), body)


def _explanation(finding: Finding, faults: tuple[Fault, ...]) -> list[str]:
    """Return what a finding means, the faults that fit, and what to do."""
    entry, terms = TABLE["findings"][finding.meaning], dict(finding.terms)
    values = asdict(finding) | terms
    values["beyond"] = (finding.accounted or 0) - (finding.total or 0)
    values["bytes"] = finding.what or (
        f"the {finding.pool} frontier overlaps the pool before it by "
        f"{terms.get('high', 0) - terms.get('low', 0)} bytes"
    )
    lines = [_pages(finding), entry["says"].format(**values)]
    if finding.absent:
        names = ", ".join(f"{name}=" for name in finding.absent)
        lines.append(f"The message has no {names}: if it was cut off, the difference is wrong.")
    if not finding.version:
        lines.append(f"This wording is of SGLang {finding.form.releases}.")
    for fault in faults[:MAX_FAULTS]:
        lines.append(f"Fits ({fault.where}): {fault.title} ({', '.join(fault.refs)}).")
        lines += [f"Reproduce it: {fault.command}"] if fault.command else []
    if faults[MAX_FAULTS:]:
        lines.append("May fit: " + ", ".join(f.refs[0] for f in faults[MAX_FAULTS:]) + ".")
    if not faults:
        lines.append("No known fault of these releases fits.")
    todo = advice(finding, faults, entry["do"].format(**values))
    return [*filter(None, lines), f"What to do: {todo}"]


def _pages(finding: Finding) -> str:
    size, pages = finding.page_size, {n: abs(m) for n, m in finding.pages.items()}
    if not pages:
        return ""
    if size and size not in pages:
        return f"That is no whole number of pages of {size} slots."
    sizes = [size] if size else [n for n in pages if n > 1][:3]
    told = [f"{pages[n]} page{'s' * (pages[n] != 1)} of {n} slots" for n in sizes]
    return f"That is {' or '.join(told) or 'no whole number of pages, unless their size is 1'}."


def _table(shown: Sequence[int], findings: Sequence[Finding]) -> Grid:
    columns = ("#", "pool", "total", "accounted", "difference", "meaning", "seen", "ranks")
    rows = []
    for i in shown:
        f = findings[i]
        slots = ["-" if n is None else str(n) for n in (f.total, f.accounted)]
        slots.append("-" if f.difference is None else f"{f.difference:+d}")
        texts = (str(i + 1), f.pool or "-", *slots, f.meaning, str(f.count), _ranks(f.ranks))
        styles = ("", "", "", "", "", "bold red" if f.meaning == MISSING else "bold magenta", "", "")
        rows.append(tuple(map(Cell, texts, styles)))
    columns, rows = (columns, rows) if any(f.ranks[0][0] or f.ranks[1:] for f in findings) else (
        columns[:-1], [row[:-1] for row in rows]
    )
    return _Table(columns, tuple(rows), frozenset({"#", "total", "accounted", "difference", "seen"}))


def _title(group: Sequence[Finding]) -> str:
    """Return a headline for findings that are explained alike."""
    first, terms = group[0], dict(group[0].terms)
    entry = TABLE["findings"].get(first.form.kind) or TABLE["findings"][first.meaning]
    sizes = sorted({abs(f.difference or 0) for f in group})
    slots = f"{sizes[0]} to {sizes[-1]}" if sizes[1:] else str(sizes[0])
    number = next(iter(terms.values()), 0)
    title = entry["title"].format(
        **terms,
        slots=f"{slots} slot{'s' * (slots != '1')}",
        pool=POOLS.get(first.pool, f"the {first.pool} pool"),
        negative=" and ".join(f"{name}={n}" for name, n in terms.items() if n < 0),
        s="s" * (number != 1),
    )
    times = sorted(time for f in group for time in (f.first, f.last) if time)
    count, ranks = sum(f.count for f in group), {rank for f in group for rank in f.ranks}
    where = f" on {_ranks(sorted(ranks, key=str))}" if any(rank for rank, _ in ranks) else ""
    when = f", {' to '.join(dict.fromkeys((times[0], times[-1])))}" if times else ""
    return f"{title}, seen {count} time{'s' * (count != 1)}{where}{when}"


def _ranks(ranks: Iterable[tuple[str | None, int]]) -> str:
    names = list(dict.fromkeys(rank for rank, _ in ranks if rank))
    return ", ".join(names[:MAX_RANKS]) + (", …" if names[MAX_RANKS:] else "")


def _notes(diagnosis: Diagnosis) -> list[str]:
    notes = [*diagnosis.unused]
    if diagnosis.text.truncated:
        notes.append("The log is packed, and the file ends too early: the rest is not read.")
    if diagnosis.more:
        notes.append(f"{diagnosis.more} more messages with other numbers are not told apart.")
    if diagnosis.dumps:
        batch = f" of {diagnosis.batch} request{'s' * (diagnosis.batch != 1)}" if diagnosis.batch else ""
        notes.append(
            f"A watchdog's dump was taken while a batch{batch} was running; what the batch holds is "
            f"not in its sums ({diagnosis.dumps})."
        )
    return notes


def _unread(unread: Sequence[Finding], notes: tuple[str, ...]) -> Section:
    shown = [*unread[:MAX_UNREAD], *unread[MAX_UNREAD:][-1:]]
    lines = [
        ", ".join(filter(None, (f"Line {f.lines[0]}", f.ranks[0][0], f.first))) + f": {f.what}."
        for f in shown
    ]
    lines += [f"{len(unread) - len(shown)} more."] if len(unread) > len(shown) else []
    title = "A leak message is there" if len(unread) == 1 else f"{len(unread)} leak messages are there"
    return Section(f"{title}, but cannot be read", None, (*lines, *notes))


def _size(number: int) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if number < 10_000:
            return f"{number} {unit}"
        number //= 1024
    return f"{number} GiB"


def _finding_json(finding: Finding, faults: tuple[Fault, ...], todo: str) -> dict[str, Any]:
    return asdict(finding) | {
        "kind": finding.form.kind,
        "form": finding.form.name,
        "releases": finding.form.releases,
        "difference": finding.difference,
        "pages": {str(size): number for size, number in finding.pages.items()},
        "terms": dict(finding.terms),
        "flags": dict(finding.flags),
        "lines": list(finding.lines),
        "ranks": {rank or "": count for rank, count in finding.ranks},
        "absent": list(finding.absent),
        "known": [ref for fault in faults for ref in fault.refs],
        "reproduce": [fault.command for fault in faults if fault.command],
        "advice": todo,
    }
