"""The report of ``swaleak diagnose``. No torch here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from swaleak import __version__
from swaleak.errors import releases_text
from swaleak.log_diagnosis.match import TABLE, Fault, advice, known_faults
from swaleak.log_diagnosis.parser import Diagnosis, Finding
from swaleak.report.model import Cell, Grid, Report, Section

MAX_ROWS, MAX_GROUPS, MAX_RANKS, MAX_UNREAD = 12, 20, 6, 5
PAGE_SIZES = (256, 128, 64, 32, 16)  # the usual ones
POOLS = {None: "a pool", "req_to_token": "the request pool", "swa": "the SWA pool"}


class _Table(Grid):
    """A table in pieces where the terminal is narrow: a number that is folded is misread."""

    def parts(self, width: int) -> Iterator[Grid]:
        for part in Grid(self.columns, self.rows, series=True).parts(width):
            yield replace(part, right=self.right)


def diagnose_report(name: str, diagnosis: Diagnosis) -> Report:
    """Return what a log says; ``ok`` is False if no leak is in it. ``name``: of the log."""
    findings, unread = diagnosis.findings, diagnosis.unread
    off = {(finding.meaning, finding.pool) for finding in findings}
    faults = [known_faults(finding, off) for finding in findings]
    texts = [_explanation(*pair) for pair in zip(findings, faults, strict=True)]
    rows = zip(findings, faults, texts, strict=True)
    body = {
        "bytes": diagnosis.size,
        "findings": [_finding_json(finding, fitting, text[-1]) for finding, fitting, text in rows],
        "unread": [
            {"line": f.lines[0], "why": f.what, "rank": f.ranks[0][0], "time": f.first}
            for f in unread
        ],
        "unread_count": len(unread),
        "versions": list(diagnosis.versions),
        "page_sizes": list(diagnosis.page_sizes),
        "dumps": diagnosis.dumps,
    }
    said, notes = ", ".join((name, f"{diagnosis.size} bytes", *diagnosis.kinds)), _notes(diagnosis)
    if not findings and not unread:
        return Report("diagnose", False, " ".join((f"No leak in {said}.", *notes)), (), body)
    names = [*map("SGLang {}".format, diagnosis.versions)]
    names += map("page size {}".format, diagnosis.page_sizes)
    header = f"swaleak {__version__}: {said}; it names " + (
        ", ".join(names) or "no version, no page size"
    )
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, (finding, text) in enumerate(zip(findings, texts, strict=True)):
        groups[(finding.form.kind, str(finding.pool), *text)].append(i)
    shown = set(range(len(findings)))
    if len(findings) > MAX_ROWS:  # of each kind the first, the largest and the last
        largest = (max(g, key=lambda i: abs(findings[i].difference or 0)) for g in groups.values())
        shown = {
            i for g, top in zip(groups.values(), largest, strict=True) for i in (g[0], top, g[-1])
        }
        notes.insert(0, f"{len(findings) - len(shown)} more are in the JSON.")
    sections = [Section("", _table(sorted(shown), findings), tuple(notes))] if findings else []
    for (_, _, *lines), numbers in list(groups.items())[:MAX_GROUPS]:
        title = ", ".join(str(i + 1) for i in numbers if i in shown)
        title += f": {_title([findings[i] for i in numbers])}"
        pages = _pages([findings[i] for i in numbers])
        sections.append(Section(title, None, tuple(filter(None, (pages, *lines)))))
    if unread:
        sections.append(_unread(unread, () if findings else tuple(notes)))
    return Report("diagnose", True, header, tuple(sections), body)


def _explanation(finding: Finding, faults: Sequence[Fault]) -> list[str]:
    """Return what a finding means, the faults that fit, and what to do."""
    entry, terms = TABLE["findings"][finding.meaning], dict(finding.terms)
    overlap = terms.get("high", 0) - terms.get("low", 0)
    values = asdict(finding) | terms
    values["bytes"] = finding.what or (
        f"the {finding.pool} frontier overlaps the pool before it by {overlap} bytes"
    )
    lines = [entry["says"].format(**values)]
    if finding.absent:
        names = ", ".join(f"{name}=" for name in finding.absent)
        lines.append(f"The message has no {names}: if it was cut off, the difference is wrong.")
    if not finding.version:
        lines.append(f"This wording is of SGLang {releases_text(finding.form.releases)}.")
    if not faults:
        lines.append("No known fault of these releases fits.")
    for fault in faults[:1]:
        needs = " and ".join(fault.unconfirmed(finding)).replace("_", " ")
        fits = f"Fits if the server has {needs}" if needs else "Fits"
        lines.append(f"{fits} ({fault.where}): {fault.title} ({', '.join(fault.refs)}).")
        lines.append(f"Reproduce it: {fault.reproduce}" if fault.reproduce else "")
    if faults[1:] and faults[0].unconfirmed(finding):
        lines.append(f"Less likely: {', '.join(fault.refs[0] for fault in faults[1:])}.")
    return [*filter(None, lines), advice(finding, faults, entry["do"].format(**values))]


def _pages(group: Sequence[Finding]) -> str:
    size, pages = group[0].page_size, [{n: abs(m) for n, m in f.pages.items()} for f in group]
    common = [n for n in pages[0] if all(n in each for each in pages)]
    if size and pages[0] and size not in common:
        return f"That is no whole number of pages of {size} slots."
    usual = [n for n in common if n in PAGE_SIZES] or [n for n in common if n > 1][:3]
    told: list[str] = []
    for n in [size] if size in common else usual:
        counts = sorted({each[n] for each in pages})
        number = f"{counts[0]} to {counts[-1]}" if counts[1:] else str(counts[0])
        # the unit is said once: 1 page of 256 slots, 2 of 128 or 4 of 64
        told.append(
            f"{number} of {n}" if told else f"{number} page{'s' * (number != '1')} of {n} slots"
        )
    said = " or ".join(filter(None, (", ".join(told[:-1]), *told[-1:])))
    said = said or "no whole number of pages, unless their size is 1"
    return f"That is {said}." if pages[0] else ""


def _table(shown: Sequence[int], findings: Sequence[Finding]) -> Grid:
    columns = ("#", "pool", "total", "accounted", "difference", "meaning", "seen")
    rows = []
    for f, i in ((findings[i], i) for i in shown):
        difference = f"{f.difference:+d}" if f.difference else f.difference
        numbers = (f.total, f.accounted, difference)
        texts = (
            i + 1,
            f.pool or "-",
            *("-" if n is None else n for n in numbers),
            f.meaning,
            f.count,
        )
        style = "bold red" if f.meaning == "missing" else "bold magenta"
        rows.append(tuple(Cell(str(t), style if t == f.meaning else "") for t in texts))
    return _Table(columns, tuple(rows), frozenset({*columns} - {"pool", "meaning"}))


def _title(group: Sequence[Finding]) -> str:
    """Return a headline for findings that are explained alike."""
    first, terms = group[0], dict(group[0].terms)
    entry = TABLE["findings"].get(first.form.kind) or TABLE["findings"][first.meaning]
    sizes = sorted({abs(f.difference or 0) for f in group})
    slots = f"{sizes[0]} to {sizes[-1]}" if sizes[1:] else str(sizes[0])
    title = entry["title"].format(
        **terms,
        slots=f"{slots} slot{'s' * (slots != '1')}",
        pool=POOLS.get(first.pool, f"the {first.pool} pool"),
        negative=" and ".join(f"{name}={n}" for name, n in terms.items() if n < 0),
        s="s" * (next(iter(terms.values()), 0) != 1),
    )
    times = sorted(time for f in group for time in (f.first, f.last) if time)
    ranks = sorted({rank for f in group for rank, _ in f.ranks if rank})
    where = f" on {', '.join(ranks[:MAX_RANKS])}{', …' * (len(ranks) > MAX_RANKS)}" * bool(ranks)
    when = f", {' to '.join(dict.fromkeys((times[0], times[-1])))}" if times else ""
    count = sum(f.count for f in group)
    return f"{title}, seen {count} time{'s' * (count != 1)}{where}{when}"


def _notes(diagnosis: Diagnosis) -> list[str]:
    notes = [*diagnosis.unused]
    if diagnosis.truncated:
        notes.append("The log is packed, and the file ends too early: the rest is not read.")
    if diagnosis.more:
        notes.append(f"{diagnosis.more} more messages with other numbers are not told apart.")
    if diagnosis.dumps:
        batch = f" of {diagnosis.batch} request{'s' * (diagnosis.batch != 1)}" * bool(
            diagnosis.batch
        )
        notes.append(
            f"A watchdog's dump was taken while a batch{batch} was running; what the batch holds "
            "is not in its sums."
        )
    return notes


def _unread(unread: Sequence[Finding], notes: tuple[str, ...]) -> Section:
    shown = [*unread[:MAX_UNREAD], *unread[MAX_UNREAD:][-1:]]
    heads = [", ".join(filter(None, (f"Line {f.lines[0]}", f.ranks[0][0], f.first))) for f in shown]
    lines = [f"{head}: {f.what}." for head, f in zip(heads, shown, strict=True)]
    lines += [f"{len(unread) - len(shown)} more."] * (len(unread) > len(shown))
    told = (
        "A leak message is there" if len(unread) == 1 else f"{len(unread)} leak messages are there"
    )
    return Section(f"{told}, but cannot be read", None, (*lines, *notes))


def _finding_json(finding: Finding, faults: Sequence[Fault], todo: str) -> dict[str, Any]:
    sure = [fault for fault in faults if not fault.unconfirmed(finding)]
    return asdict(finding) | {
        "kind": finding.form.kind,
        "form": finding.form.name,
        "releases": finding.form.releases,
        "difference": finding.difference,
        "pages": {str(size): number for size, number in finding.pages.items()},
        "terms": dict(finding.terms),
        "flags": dict(finding.flags),
        "ranks": {rank or "": count for rank, count in finding.ranks},
        "known": list(dict.fromkeys(ref for fault in sure for ref in fault.refs)),
        "may_fit": [fault.refs[0] for fault in faults if fault not in sure],
        "reproduce": [fault.reproduce for fault in sure if fault.reproduce],
        "advice": todo,
    }
