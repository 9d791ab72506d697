"""The page timeline: one row a step, one cell an SWA page, and the sentence from ``moral``.

Everything is read off the pictures that a run has kept (``Step.pages``); no scenario is known here.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

from swaleak.report.moral import moral, wrong_step
from swaleak.report.report import Cell, Grid, Section
from swaleak.script.ops import describe

if TYPE_CHECKING:
    from swaleak.check.case import Case
    from swaleak.check.picture import Page
    from swaleak.check.replay import Run

WIDTH = 80  # columns
OPERATION = 26  # columns of an operation; what is longer is folded
NAME = 4  # letters of a node's name below which a single letter says as much
ROWS = 24  # rows that are shown where nobody asked for every step
BAD = "bold white on red"
STYLES = ("cyan", "green", "yellow", "bright_blue", "magenta")
INTRO = (
    "SGLang keeps a second pool of KV pages for sliding-window attention (SWA), and a mapping that "
    "says which of them is whose. A page that is in use but not mapped can never be given back. A "
    "node is a cached prefix; without its SWA page it is a tombstone. Frees may be collected in a "
    "group and carried out at its end."
)
FAULTS = {  # a word, the letter where there is no room for it, and what it means
    "leaked": ("L", "in use, and nothing reaches it any more"),
    "freed": ("F", "in the free list, although a node has it"),
    "stale": ("S", "nobody's, and the mapping still points at it"),
    "shared": ("2", "two nodes have it"),
    "unmapped": ("U", "a node has it, and the mapping does not point at it"),
    "bad free": ("R", "in the free list twice, or never allowed there"),
}


def timelines(cases: Iterable[Case], *, every_step: bool) -> dict[str, list[Section]]:
    """Return, by scenario, sections that show these cases, which have kept their steps.

    ``every_step``: show all rows of all cases. Otherwise long runs are cut to the rows around the
    moment where they go wrong, and cases that differ in page size only are shown once.
    """
    sections: dict[str, list[Section]] = {}
    shown: set[tuple[object, ...]] = set()
    for case in cases:
        scenario = case.scenario
        look = (scenario.name, case.strategy, *(step.pages for step in case.run.steps))
        if look in shown and not every_step:
            continue
        shown.add(look)
        if scenario.name not in sections:
            texts = [text for text in (INTRO if not sections else "", scenario.story) if text]
            sections[scenario.name] = [Section(moral=Cell(" ".join(t.split()))) for t in texts]
        rows = len(case.run.steps) if every_step else ROWS
        sections[scenario.name].append(timeline(case, rows))
    return sections


def timeline(case: Case, rows: int = ROWS) -> Section:
    """Return the strip of pages of one case that has kept its steps, in at most ``rows`` rows."""
    strip = _Strip(case.run)
    origin = "" if case.origin == case.strategy else f" ({case.origin})"
    title = f"{case.scenario.name}, {case.strategy}{origin}, page size {case.page_size}"
    sentence = Cell(moral(case.run), "bold red" if strip.wrong is not None else "green")
    return Section(f"{title}: the SWA pages", strip.grid(rows), strip.legend(), sentence)


class _Strip:
    """Which pages have a column, how wide it is, and what stands in it.

    Three forms, the first that fits into ``WIDTH``: cells with (the start of) a node's name, cells
    with a letter for it, and letters for only the pages that matter most.
    """

    def __init__(self, run: Run) -> None:
        self.steps = run.steps
        self.wrong = wrong_step(run)
        self.rows = [{page.page: page for page in step.pages} for step in run.steps]
        self.faults = [
            {page.page: fault(page, step.in_group) for page in step.pages} for step in run.steps
        ]
        owners = (name for row in self.rows for page in row.values() for name in page.owners)
        self.names = list(dict.fromkeys(owners))
        self.was = self._last_owners()
        self.pages = sorted({page for row in self.rows for page in row})
        room = self._room()
        width = room // max(1, len(self.pages)) - 1
        self.labels = {name: _cut(name, width - 2) for name in self.names}
        clear = len(set(self.labels.values())) == len(self.names)
        self.named = clear and (
            width >= NAME + 2 or width - 2 >= max(map(len, self.names), default=0)
        )
        self.width = min(width, max([8, *map(len, self.names)]) + 4)
        self.hidden: list[int] = []
        if not self.named:
            self.labels = {name: _letter(i) for i, name in enumerate(self.names)}
            texts = [*map(str, self.pages), *(f"●{label}" for label in self.labels.values())]
            self.width = max(map(len, texts))
            self._hide(room // (self.width + 1))

    def grid(self, rows: int) -> Grid:
        """Return the table; a row of dots stands for rows that are left out."""
        total = len(self.rows)
        first, stop = 0, total
        if total > rows:
            stop = min(total, (total if self.wrong is None else self.wrong + 1) + 2)
            first = max(0, stop - rows)
        lines = [self._row(i) for i in range(first, stop)]
        if first:
            lines.insert(0, self._dots(first))
        if stop < total:
            lines.append(self._dots(total - stop))
        wide = self.named and self.width >= len(f"page {max(self.pages, default=0)}")
        heads = [f"page {page}" if wide else str(page) for page in self.pages]
        others = ["others"] if self.hidden else []
        columns = ("#", "operation", *heads, *others, "used", "mapped")
        return Grid(columns, tuple(lines), frozenset({"#", "others", "used", "mapped"}), gap=0)

    def legend(self) -> tuple[str, ...]:
        """Return what the marks mean, those that are there."""
        queued = "(name) given up, waits" if self.named else "small letter: waits"
        lines = [f"● mapped   ○ in use, not mapped   · free   {queued} in the queue"]
        seen = dict.fromkeys(word for row in self.faults for word in row.values() if word)
        lines += [f"✗ {self._word(word)}: {FAULTS[word][1]}" for word in seen]
        if not self.named:
            shown = [name for name in self.names if self._shown(name)]
            told = ", ".join(f"{self.labels[name]} {name}" for name in shown[:20])
            more = f" and {len(shown) - 20} more" if len(shown) > 20 else ""
            lines.append(f"nodes: {told}{more}")
        if self.hidden:
            lines.append(f"others: how many of {len(self.hidden)} more pages are in use")
        return tuple(lines)

    def _room(self) -> int:
        """Return the columns that are left for pages, each with a blank behind it."""
        operation = max([len("operation"), *(len(describe(step.op)) for step in self.steps)])
        number = len(str(len(self.steps))) + 1
        taken = (number, min(operation, OPERATION), len("used"), len("mapped"))
        return WIDTH - 2 - sum(taken) - (len(taken) - 1)

    def _last_owners(self) -> list[dict[int, str]]:
        """Return, per step, who has or last had a page since it was taken from the free list."""
        was: dict[int, str] = {}
        owners = []
        for row in self.rows:
            was = {page: was.get(page, "") for page in row}
            was |= {page: entry.owners[0] for page, entry in row.items() if entry.owners}
            owners.append(was)
        return owners

    def _hide(self, most: int) -> None:
        """Keep the pages that went wrong, those of the same nodes, then the most restless."""
        if len(self.pages) <= most:
            return
        most = max(1, most - 7 // (self.width + 1) - 1)  # for the column "others"
        wrong = {page for row in self.faults for page, word in row.items() if word}
        nodes = {self.was[i].get(page) for i in range(len(self.rows)) for page in wrong} - {None}
        rank = {}
        for page in self.pages:
            cells = [self._cell(i, page).text for i in range(len(self.rows))]
            changes = sum(a != b for a, b in pairwise(cells))
            related = any(was.get(page) in nodes for was in self.was)
            rank[page] = (page not in wrong, not related, -changes, page)
        kept = sorted(self.pages, key=rank.__getitem__)[:most]
        self.hidden = sorted(set(self.pages) - set(kept))
        self.pages = sorted(kept)

    def _shown(self, name: str) -> bool:
        return any(was.get(page) == name for was in self.was for page in self.pages)

    def _row(self, i: int) -> tuple[Cell, ...]:
        step = self.steps[i]
        bad = i == self.wrong
        cells = [self._cell(i, page) for page in self.pages]
        if self.hidden:
            held = sum(page in self.rows[i] and self.rows[i][page].held for page in self.hidden)
            cells.append(Cell(str(held)))
        return (
            Cell(f"✗{i + 1}" if bad else str(i + 1), BAD if bad else ""),
            Cell(describe(step.op), "bold" if bad else ""),
            *cells,
            Cell(str(step.audit.physical)),
            Cell(str(step.audit.mapped)),
        )

    def _dots(self, steps: int) -> tuple[Cell, ...]:
        blank = (Cell(""),) * (len(self.pages) + bool(self.hidden) + 2)
        return (Cell("…"), Cell(f"{steps} step{'s' if steps > 1 else ''}", "dim"), *blank)

    def _cell(self, i: int, page: int) -> Cell:
        entry = self.rows[i].get(page)
        if entry is None:
            return Cell("·", "dim")
        if word := self.faults[i][page]:
            return Cell(
                f"✗ {_cut(word, self.width - 2)}" if self.named else f"✗{self._word(word)}", BAD
            )
        mark = "●" if entry.mapped else "○"
        owner = self.was[i][page]
        label = self.labels.get(owner, "")
        style = STYLES[self.names.index(owner) % len(STYLES)] if owner else ""
        if entry.queued:
            text = f"{mark} ({_cut(owner, self.width - 4)})" if self.named else mark + label.lower()
            return Cell(text, f"dim {style}".strip())
        return Cell(f"{mark} {label}" if self.named else mark + label, style)

    def _word(self, word: str) -> str:
        return word if self.named else FAULTS[word][0]


def fault(page: Page, in_group: bool) -> str:
    """Return what is wrong with a page, one of ``FAULTS``, or an empty string."""
    if len(page.owners) > 1:
        return "shared"
    if page.owners:
        if not page.held:
            return "freed"
        return "" if page.mapped or in_group else "unmapped"
    if page.stranded:
        return "stale" if page.mapped else "leaked"
    if page.held:
        return ""
    return "stale" if page.mapped else "bad free"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"


def _letter(i: int) -> str:
    """Return A to Z, then AA, AB and so on."""
    head = _letter(i // 26 - 1) if i >= 26 else ""
    return head + chr(ord("A") + i % 26)
