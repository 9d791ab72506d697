"""A picture of the SWA pool after one step: page by page, whose it is and where it stands."""

from __future__ import annotations

from dataclasses import dataclass

from swaleak.check.audit import Reading
from swaleak.check.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Page:
    """One SWA page that is not simply free.

    ``owners``: the nodes that should hold it, by the ledger; more than one is a fault, none means
    nobody. ``held``: it is not in the free list. ``mapped``: the mapping points at it. ``queued``:
    nobody's any more, but held until the open group ends.
    """

    page: int
    owners: tuple[str, ...]
    held: bool
    mapped: bool
    queued: bool

    @property
    def stranded(self) -> bool:
        """Whether it is held and neither owned nor waiting."""
        return self.held and not self.owners and not self.queued


def picture(reading: Reading, ledger: Ledger, before: tuple[Page, ...]) -> tuple[Page, ...]:
    """Return every page that is held, mapped, owned, or that a free list should not hold.

    ``before``: the picture after the step before; what was stranded then does not wait now.
    """
    owners: dict[int, list[str]] = {}
    for nodes in (ledger.nodes, ledger.ghosts):
        for name, node in nodes.items():
            for page in node.swa:
                if page is not None:
                    owners.setdefault(page, []).append(name)
    swa = reading.swa
    waiting: set[int] = set()
    if ledger.in_group:
        waiting = swa.held - owners.keys() - {page.page for page in before if page.stranded}
    told = swa.held | reading.pointed | owners.keys() | set(swa.twice) | set(swa.reserved)
    old = {page.page: page for page in before}
    pages = (
        Page(
            page,
            tuple(owners.get(page, ())),
            page in swa.held,
            page in reading.pointed,
            page in waiting,
        )
        for page in sorted(told)
    )
    # most pages stay as they were; a run of many steps shares them
    return tuple(old[page.page] if old.get(page.page) == page else page for page in pages)
