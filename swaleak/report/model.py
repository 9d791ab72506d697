"""What a report is made of: tables, sentences, the JSON payload, and how an outcome is worded.

``render.py`` turns it into a terminal's table, Markdown, JSON, SVG, HTML and JUnit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from swaleak.errors import page_list, plural

if TYPE_CHECKING:
    from swaleak.checker.compare import Violation
    from swaleak.checker.run import Run, StepResult
    from swaleak.scenario.toml import Outcome

K = TypeVar("K")
V = TypeVar("V")

STYLES = {
    "clean": "green",
    "leak": "bold red",
    "corrupt": "bold magenta",
    "refused": "yellow",
    "error": "bold red",
}
SHIPPED = "shipped"  # the strategy that is asked for; whose code that is, is in a case's origin
# a violation's kind, and whether it is of an owner's pages or of a pool's -> its wording
WORDINGS = {
    ("lost", False): "{pages} lost the SWA side",
    ("lost", True): "{owner} lost the SWA side of its {pages}",
    ("stale", False): "stale: {pages} still {maps} although nobody owns {it}",
    ("stale", True): "stale: {owner}'s {pages} still {maps}",
    ("leak", False): "{pages} leaked",
    ("dangling", False): "dangling: {pages} in use and in the free list",
    ("double-free", False): "{pages} twice in the free list",
    ("reserved", False): "reserved {pages} in the free list",
    ("shared", False): "shared: {pages} with more than one owner",
    ("stolen", True): "stolen: {owner} still reads its {pages}",
    ("miscounted", True): "miscounted: the locks of {owner} are not those of who holds it",
    ("miscounted", False): "miscounted: {pool} is not the sum over the nodes",
    ("freed-twice", False): "freed-twice: {pages}",
    ("not-owned", False): "not-owned: {pages} freed by somebody who does not have {it}",
    ("overwritten", False): "overwritten: {pages} left without a mapping",
    ("orphaned", False): "orphaned: {pages} kept in use, the full side freed",
}
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but for tabs and line ends


class Cell(NamedTuple):
    """A piece of text, and its Rich style."""

    text: str
    style: str = ""


def cells(*values: object) -> tuple[Cell, ...]:
    """Return a row of a table."""
    return tuple(value if isinstance(value, Cell) else Cell(str(value)) for value in values)


@dataclass(frozen=True, slots=True)
class Grid:
    """A table.

    ``right``: the columns that hold numbers. ``series``: may be split between any two columns.
    ``gap``: blanks around a cell.
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
            columns = (self.columns[0], *self.columns[start:stop])
            rows = tuple((row[0], *row[start:stop]) for row in self.rows)
            yield replace(self, columns=columns, rows=rows, series=False)
            start = stop


@dataclass(frozen=True, slots=True)
class Section:
    """A title, a table, one sentence that sums it up, and lines under it."""

    title: str = ""
    grid: Grid | None = None
    lines: tuple[str, ...] = ()
    sentence: Cell | None = None


@dataclass(frozen=True, slots=True)
class TestResult:
    """One run of a scenario, as JUnit has it.

    ``passed``: None for the baseline of a patch, which is shown and not judged. ``kind``,
    ``message`` and ``text``: of a failure.
    """

    suite: str
    group: str
    name: str
    passed: bool | None
    kind: str = ""
    message: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything one command has to say. ``body``: what the JSON holds besides the envelope.

    ``verdict``: the sentence that comes first. ``tests``: the runs of scenarios it is about.
    """

    command: str
    ok: bool
    header: str
    sections: tuple[Section, ...]
    body: dict[str, Any]
    torch: str | None = None
    device: str | None = None
    verdict: Cell | None = None
    tests: tuple[TestResult, ...] = ()

    def with_notes(self, notes: Sequence[str]) -> Report:
        """Return the same with more lines at the end."""
        if not notes:
            return self
        *first, last = self.sections
        section = replace(last, lines=(*last.lines, *notes))
        body = {**self.body, "note": notes[-1], "notes": list(notes)}
        return replace(self, sections=(*first, section), body=body)


@dataclass(frozen=True, slots=True)
class About:
    """What a report is about: its first line, notes on the targets, torch and the device.

    ``patched``: the labels of the targets that ``--patch`` has changed. ``stand_ins``: by label,
    SGLang's names that swaleak has provided in place of SGLang.
    """

    header: str
    notes: tuple[str, ...]
    torch: str
    device: str
    patched: frozenset[str] = frozenset()
    stand_ins: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def report(
        self, command: str, ok: bool, sections: Iterable[Section], results: list[Any], **more: Any
    ) -> Report:
        """Return a report with these notes on its targets ahead of its sections."""
        notes = [Section(lines=self.notes)] if self.notes else []
        body: dict[str, Any] = {"results": results}
        if self.stand_ins:
            body["stand_ins"] = self.stand_ins
        return Report(
            command, ok, self.header, (*notes, *sections), body, self.torch, self.device, **more
        )


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key, in the order in which they came."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def visible(text: str) -> str:
    """Return a text whose control characters are escaped: a title must not drive the terminal."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def strategy_text(strategy: str, origin: str) -> str:
    """Return the strategy; of a patched target that is asked for its own, ``patched``."""
    return "patched" if (strategy, origin) == (SHIPPED, "patched") else strategy


def outcome_text(outcome: Outcome) -> str:
    """Return an outcome as it is declared: ``leak, physical 2, mapped 1, with lost``."""
    counts = (("physical", outcome.physical), ("mapped", outcome.mapped))
    parts = [outcome.verdict, *(f"{what} {count}" for what, count in counts if count is not None)]
    return ", ".join(parts) + (f", with {', '.join(outcome.kinds)}" if outcome.kinds else "")


def violations_text(violations: Iterable[Violation], *, of_cache: bool = False) -> str:
    """Return violations as one part of a sentence, and whose fault they are.

    What nobody but the allocator can have done wrong goes without saying; ``of_cache``: of a run
    in which the cache can.
    """
    texts = []
    for fault, found in grouped((one.fault, violation_text(one)) for one in violations).items():
        whose = f" (the {fault}'s fault)" if of_cache or fault != "allocator" else ""
        texts.append("; ".join(found) + whose)
    return "; ".join(texts)


def violation_text(violation: Violation) -> str:
    """Return a violation as a part of a sentence."""
    owner, count = violation.owner, len(violation.pages)
    pool = {"swa": "SWA ", "full": "full "}.get(violation.pool or "", "")
    wording = WORDINGS.get((violation.kind, owner is not None))
    if wording is None:
        whose = f"{owner}'s " if owner else ""
        return f"{violation.kind}: {whose}{pool}{page_list(violation.pages)}"
    return wording.format(
        owner=owner,
        pool=violation.pool,
        pages=pool + page_list(violation.pages),
        maps=plural("maps", count),
        it=plural("it", count),
    )


def violations_json(violations: Iterable[Violation]) -> list[dict[str, Any]]:
    """Return violations as JSON: kind, pool or owner or both, pages, whose fault they are."""
    return [
        {"kind": v.kind}
        | ({} if v.owner is None else {"owner": v.owner})
        | ({} if v.owner is not None and v.pool is None else {"pool": v.pool})
        | {"pages": list(v.pages), "fault": v.fault}
        for v in violations
    ]


def run_json(run: Run) -> dict[str, Any]:
    """Return what a run came out as, at its end, and its caller's mistakes."""
    result = {"verdict": run.verdict, **_counts_json(run)}
    result["violations"] += dated_json(run.mistakes)
    return result


def dated_json(found: Iterable[tuple[int, Violation]], place: str = "step") -> list[Any]:
    """Return violations as JSON, each with its step or line."""
    return [{place: at} | violations_json([violation])[0] for at, violation in found]


def mistakes_text(mistakes: Iterable[tuple[int, Violation]], place: str = "step") -> list[str]:
    """Return a sentence for each step or line in which a caller made mistakes."""
    return [f"{place} {at}: {violations_text(made)}" for at, made in grouped(mistakes).items()]


def step_json(number: int, step: StepResult) -> dict[str, Any]:
    """Return one step of a run that has kept them, and what was found after it."""
    return {"step": number, "op": str(step.step), **_counts_json(step)}


def step_cells(number: int, step: StepResult) -> tuple[Cell, ...]:
    """Return a step, and the SWA pages in use and mapped after it."""
    return cells(number, str(step.step), step.comparison.physical, step.comparison.mapped)


def _counts_json(of: Run | StepResult) -> dict[str, Any]:
    seen = of.comparison
    violations = violations_json(seen.violations)
    return {"physical": seen.physical, "mapped": seen.mapped, "violations": violations}
