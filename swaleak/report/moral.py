"""One sentence that says what a run did wrong, worked out from the pictures it has kept.

No scenario is known here: which page was freed, whose it was, and whose the page was that nothing
reaches any more, is all read off ``Step.pages``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from swaleak.report.facts import OPEN_GROUP, tell
from swaleak.script import ops
from swaleak.script.ops import describe
from swaleak.words import named

if TYPE_CHECKING:
    from swaleak.check.picture import Page
    from swaleak.check.replay import Run, Step

K = TypeVar("K")


def wrong_step(run: Run) -> int | None:
    """Return the index of the first step after which the audit disagreed, or that failed."""
    bad = next((i for i, step in enumerate(run.steps) if step.audit.violations), None)
    if bad is None and run.verdict == "error":
        return len(run.steps) - 1
    return bad


def moral(run: Run) -> str:
    """Return the sentence. ``run`` has kept its steps."""
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
    counts = f"{_pages(step.audit.physical)} in use, {step.audit.mapped} mapped."
    return f"Step {at + 1}, {describe(step.op)}: {'; '.join(clauses)}. {counts}"


class _Change:
    """What one step changed, told by the pages of the steps before it."""

    def __init__(self, steps: Sequence[Step], at: int) -> None:
        self.op = steps[at].op
        self.audit = steps[at].audit
        self.rows: list[dict[int, Page]] = [
            {page.page: page for page in step.pages} for step in steps[: at + 1]
        ]

    def clauses(self) -> list[str]:
        """Return what was freed that should not be, what is lost, and what else is wrong."""
        now, before = self.rows[-1], self.rows[-2] if len(self.rows) > 1 else {}
        freed = [p for p, was in before.items() if was.held and _is_freed(now.get(p))]
        leaked = [page for page, entry in now.items() if entry.stranded and not entry.mapped]
        unowned = {page: entry for page, entry in now.items() if not entry.owners}
        stale = [p for p, entry in unowned.items() if entry.mapped and not entry.queued]
        victims = _group(freed, lambda page: now[page].owners[0])
        clauses = [self._freed(owner, pages, leaked) for owner, pages in victims.items()]
        for pages, held, what in (
            (leaked, True, "now unreachable"),
            (stale, True, "held and mapped although nobody has it"),
            (stale, False, "free, and the mapping still points at it"),
        ):
            these = [page for page in pages if now[page].held == held]
            for (owner, since), group in _group(these, self._left).items():
                whose = f", {owner}'s until step {since}," if owner else ""
                clauses.append(f"{named(group)}{whose} {_are(group)} {what}")
        told = {*freed, *leaked, *stale}
        for v in self.audit.violations:
            of_node = v.owner in victims or (v.kind == "stale" and stale)
            of_page = (
                v.pool == "swa" and v.kind in ("leak", "dangling") and told.issuperset(v.pages)
            )
            if not of_node and not of_page:
                clauses.append(tell(v))
        return clauses

    def _freed(self, owner: str, pages: list[int], leaked: list[int]) -> str:
        """Tell of pages that are ``owner``'s and were freed at this step."""
        lost = [page for page in leaked if self._left(page)[0] == owner]
        first = {self._first(page) for page in pages}
        giver = first.pop() if len(first) == 1 else owner
        if self.op == ops.Group("end") and lost:
            whose = f"{giver}'s" if giver != owner else "its new"
            peer = "peer" if len(lost) == 1 else "peers"
            found = f"{whose} {named(pages)}"
            return f"the flush looked up {owner}'s {peer}, found {found}, and freed {_it(pages)}"
        since = "" if giver == owner else f" (it was {giver}'s before)"
        return f"{named(pages)} {_are(pages)} freed although {owner} has {_it(pages)}{since}"

    def _left(self, page: int) -> tuple[str, int]:
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


def _is_freed(entry: Page | None) -> bool:
    return entry is not None and not entry.held and bool(entry.owners)


def _group(pages: Iterable[int], key: Callable[[int], K]) -> dict[K, list[int]]:
    groups: dict[K, list[int]] = {}
    for page in pages:
        groups.setdefault(key(page), []).append(page)
    return groups


def _pages(count: int) -> str:
    return f"{count} SWA page{'s' if count != 1 else ''}"


def _are(pages: Sequence[int]) -> str:
    return "are" if len(pages) > 1 else "is"


def _it(pages: Sequence[int]) -> str:
    return "them" if len(pages) > 1 else "it"
