"""The page map: a row per step, a cell per SWA page, and one sentence on what the run did wrong.

Everything is read off the pages that a run has kept (``Step.pages``); no scenario is known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from swaleak.errors import counted, page_list, plural
from swaleak.report.cases import OPEN_GROUP
from swaleak.report.model import Cell, Grid, Section, cells, grouped, step_cells, violation_text
from swaleak.scenario import steps

if TYPE_CHECKING:
    from swaleak.checker.case import Case
    from swaleak.checker.page_map import Page
    from swaleak.checker.run import Run, StepResult

WIDTH = 80  # columns
STEP_WIDTH = 26  # columns of a step; what is longer is folded
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
FAULTS = {  # a fault, the letter where there is no room for it, and what it means
    "leaked": ("L", "in use, and nothing reaches it any more"),
    "freed": ("F", "in the free list, although a node has it"),
    "stale": ("S", "nobody's, and the mapping still points at it"),
    "shared": ("2", "two nodes have it"),
    "unmapped": ("U", "a node has it, and the mapping does not point at it"),
    "bad free": ("R", "in the free list twice, or never allowed there"),
}


def page_maps(cases: Iterable[Case], *, every_step: bool) -> dict[str, list[Section]]:
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
            sections[scenario.name] = [Section(sentence=Cell(" ".join(t.split()))) for t in texts]
        rows = len(case.run.steps) if every_step else ROWS
        sections[scenario.name].append(page_map(case, rows))
    return sections


def page_map(case: Case, rows: int = ROWS) -> Section:
    """Return the page map of one case that has kept its steps, in at most ``rows`` rows."""
    pages = _PageMap(case.run)
    origin = "" if case.origin == case.strategy else f" ({case.origin})"
    title = f"{case.scenario.name}, {case.strategy}{origin}, page size {case.page_size}"
    said = Cell(sentence(case.run), "green" if pages.wrong is None else "bold red")
    return Section(f"{title}: the SWA pages", pages.grid(rows), pages.legend(), said)


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


def wrong_step(run: Run) -> int | None:
    """Return the index of the first step after which something was wrong, or that failed."""
    bad = next((i for i, step in enumerate(run.steps) if step.comparison.violations), None)
    if bad is None and run.verdict == "error":
        return len(run.steps) - 1
    return bad


def sentence(run: Run) -> str:
    """Return what a run that has kept its steps did wrong, in one sentence."""
    at = wrong_step(run)
    if at is None:
        if run.raised:
            return f"Refused, and nothing has changed: {run.raised}"
        if run.steps and run.steps[-1].in_group:
            return OPEN_GROUP
        return "Every page is with the node that should have it, and nothing else is held."
    step = run.steps[at]
    clauses = _Change(run.steps, at).clauses()
    if run.raised and at == len(run.steps) - 1:
        clauses.append(f"the allocator raised {run.raised}")
    counts = (
        f"{counted(step.comparison.physical, 'SWA page')} in use, {step.comparison.mapped} mapped."
    )
    return f"Step {at + 1}, {step.step!s}: {'; '.join(clauses)}. {counts}"


def _by_page(results: Iterable[StepResult]) -> list[dict[int, Page]]:
    return [{page.page: page for page in result.pages} for result in results]


def _is_freed(page: Page | None) -> bool:
    return page is not None and not page.held and bool(page.owners)


class _Change:
    """What one step changed, explained by the pages of the steps before it."""

    def __init__(self, results: Sequence[StepResult], at: int) -> None:
        self.step = results[at]
        self.rows = _by_page(results[: at + 1])

    def clauses(self) -> list[str]:
        """Return what was freed that should not be, what is lost, and what else is wrong."""
        now, before = self.rows[-1], self.rows[-2] if len(self.rows) > 1 else {}
        freed = [p for p, was in before.items() if was.held and _is_freed(now.get(p))]
        faults = grouped((fault(entry, self.step.in_group), page) for page, entry in now.items())
        leaked, stale = faults.get("leaked", []), faults.get("stale", [])
        victims = grouped((now[page].owners[0], page) for page in freed)
        clauses = [self._freed(owner, pages, leaked) for owner, pages in victims.items()]
        for pages, held, what in (
            (leaked, True, "now unreachable"),
            (stale, True, "held and mapped although nobody has {it}"),
            (stale, False, "free, and the mapping still points at {it}"),
        ):
            these = [page for page in pages if now[page].held == held]
            for (owner, since), group in grouped((self._last(p), p) for p in these).items():
                whose = f", {owner}'s until step {since}," if owner else ""
                are, it = plural("is", len(group)), plural("it", len(group))
                clauses.append(f"{page_list(group)}{whose} {are} {what.format(it=it)}")
        explained = {*freed, *leaked, *stale}
        for v in self.step.comparison.violations:
            of_node = v.owner in victims or (v.kind == "stale" and stale)
            of_page = v.kind in ("leak", "dangling") and explained.issuperset(v.pages)
            if not of_node and not (v.pool == "swa" and of_page):
                clauses.append(violation_text(v))
        return clauses

    def _freed(self, owner: str, pages: list[int], leaked: list[int]) -> str:
        """Explain pages that are ``owner``'s and were freed at this step."""
        lost = [page for page in leaked if self._last(page)[0] == owner]
        first = {self._first(page) for page in pages}
        giver = first.pop() if len(first) == 1 else owner
        freed, it = page_list(pages), plural("it", len(pages))
        if self.step.step == steps.Group("end") and lost:
            whose = f"{giver}'s" if giver != owner else "its new"
            peer = plural("peer", len(lost))
            return f"the flush looked up {owner}'s {peer}, found {whose} {freed}, and freed {it}"
        since = "" if giver == owner else f" ({it} {plural('was', len(pages))} {giver}'s before)"
        return f"{freed} {plural('is', len(pages))} freed although {owner} has {it}{since}"

    def _last(self, page: int) -> tuple[str, int]:
        """Return the last owner of a page, and the number of the step that took it from them."""
        for i in range(len(self.rows) - 1, -1, -1):
            entry = self.rows[i].get(page)
            if entry and entry.owners:
                return entry.owners[0], i + 2
        return "", 0

    def _first(self, page: int) -> str:
        """Return whose a page was when it was last taken from the free list."""
        owner = ""
        for row in reversed(self.rows[:-1]):
            entry = row.get(page)
            if entry is None or not entry.held:
                break
            owner = entry.owners[0] if entry.owners else owner
        return owner


class _PageMap:
    """Which pages have a column, how wide it is, and what is in its cells.

    Three forms, the first that fits into ``WIDTH``: cells with (the start of) a node's name, cells
    with a letter for it, and letters for only the pages that matter most.
    """

    def __init__(self, run: Run) -> None:
        self.steps = run.steps
        self.wrong = wrong_step(run)
        self.rows = _by_page(run.steps)
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
        longest = max(map(len, self.names), default=0)
        distinct = len(set(self.labels.values())) == len(self.names)
        self.with_names = distinct and width - 2 >= min(NAME, longest)
        self.width = min(width, max(8, longest) + 4)
        self.hidden: list[int] = []
        if not self.with_names:
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
        wide = self.with_names and self.width >= len(f"page {max(self.pages, default=0)}")
        heads = [f"page {page}" if wide else str(page) for page in self.pages]
        others = ["others"] if self.hidden else []
        columns = ("#", "step", *heads, *others, "used", "mapped")
        return Grid(columns, tuple(lines), frozenset({"#", "others", "used", "mapped"}), gap=0)

    def legend(self) -> tuple[str, ...]:
        """Return what the marks mean, those that are there."""
        queued = "(name) given up, waits" if self.with_names else "small letter: waits"
        lines = [f"● mapped   ○ in use, not mapped   · free   {queued} in the queue"]
        seen = dict.fromkeys(wrong for row in self.faults for wrong in row.values() if wrong)
        lines += [f"✗ {self._mark(wrong)}: {FAULTS[wrong][1]}" for wrong in seen]
        if not self.with_names:
            shown = [f"{self.labels[name]} {name}" for name in self.names if self._shown(name)]
            more = f" and {len(shown) - 20} more" if len(shown) > 20 else ""
            lines.append(f"nodes: {', '.join(shown[:20])}{more}")
        if self.hidden:
            lines.append(f"others: how many of {len(self.hidden)} more pages are in use")
        return tuple(lines)

    def _room(self) -> int:
        """Return the columns that are left for pages, each with a blank behind it."""
        step = max([len("step"), *(len(str(step.step)) for step in self.steps)])
        number = len(str(len(self.steps))) + 1
        taken = (number, min(step, STEP_WIDTH), len("used"), len("mapped"))
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
        """Keep the pages that went wrong, those of the same nodes, then those that change most."""
        if len(self.pages) <= most:
            return
        most = max(1, most - 7 // (self.width + 1) - 1)  # for the column "others"
        wrong = {page for row in self.faults for page, word in row.items() if word}
        nodes = {self.was[i].get(page) for i in range(len(self.rows)) for page in wrong} - {None}
        rank = {}
        for page in self.pages:
            texts = [self._cell(i, page).text for i in range(len(self.rows))]
            changes = sum(a != b for a, b in pairwise(texts))
            related = any(was.get(page) in nodes for was in self.was)
            rank[page] = (page not in wrong, not related, -changes, page)
        kept = sorted(self.pages, key=rank.__getitem__)[:most]
        self.hidden = sorted(set(self.pages) - set(kept))
        self.pages = sorted(kept)

    def _shown(self, name: str) -> bool:
        return any(was.get(page) == name for was in self.was for page in self.pages)

    def _row(self, i: int) -> tuple[Cell, ...]:
        bad = i == self.wrong
        number, step, used, mapped = step_cells(i + 1, self.steps[i])
        pages = [self._cell(i, page) for page in self.pages]
        if self.hidden:
            held = sum(page in self.rows[i] and self.rows[i][page].held for page in self.hidden)
            pages.append(Cell(str(held)))
        number = Cell(f"✗{number.text}", BAD) if bad else number
        return (number, Cell(step.text, "bold" if bad else ""), *pages, used, mapped)

    def _dots(self, steps: int) -> tuple[Cell, ...]:
        blanks = len(self.pages) + bool(self.hidden) + 2
        return cells("…", Cell(counted(steps, "step"), "dim"), *[""] * blanks)

    def _cell(self, i: int, page: int) -> Cell:
        entry = self.rows[i].get(page)
        if entry is None:
            return Cell("·", "dim")
        if wrong := self.faults[i][page]:
            mark = self._mark(wrong)
            return Cell(f"✗ {_cut(mark, self.width - 2)}" if self.with_names else f"✗{mark}", BAD)
        mark = "●" if entry.mapped else "○"
        owner = self.was[i][page]
        label = self.labels.get(owner, "")
        style = STYLES[self.names.index(owner) % len(STYLES)] if owner else ""
        if not self.with_names:
            text = mark + (label.lower() if entry.queued else label)
        else:
            text = f"{mark} ({_cut(owner, self.width - 4)})" if entry.queued else f"{mark} {label}"
        return Cell(text, f"dim {style}".strip() if entry.queued else style)

    def _mark(self, wrong: str) -> str:
        return wrong if self.with_names else FAULTS[wrong][0]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"


def _letter(i: int) -> str:
    """Return A to Z, then AA, AB and so on."""
    head = _letter(i // 26 - 1) if i >= 26 else ""
    return head + chr(ord("A") + i % 26)
