"""Which SWA pages are held, mapped and owned after a step, and by whom."""

from __future__ import annotations

from dataclasses import dataclass

from swaleak.checker.compare import Reading, marked
from swaleak.checker.shadow import Shadow


@dataclass(frozen=True, slots=True)
class Page:
    """One SWA page that is not simply free, for the page map.

    ``owners``: the nodes that should have it; more than one is a fault, none means nobody.
    ``held``: it is not in the free list. ``mapped``: the mapping reaches it. ``queued``: nobody's
    any more, but held until the open group ends.
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


def page_map(reading: Reading, shadow: Shadow, before: tuple[Page, ...]) -> tuple[Page, ...]:
    """Return every SWA page that is held, mapped, owned, or that a free list should not hold.

    ``before``: the pages after the step before; what was stranded then does not wait now.
    """
    owners: dict[int, list[str]] = {}
    for name, node in (shadow.nodes | shadow.orphans()).items():
        for page in shadow.peers(node):
            if page > 0:
                owners.setdefault(page, []).append(name)
    held, reached = marked(reading.swa_times == 0), marked(reading.reached)
    waiting: set[int] = set()
    if shadow.in_group:
        waiting = held - owners.keys() - {page.page for page in before if page.stranded}
    listed_twice = marked(reading.swa_times > 1)
    shown = held | reached | owners.keys() | listed_twice | set(reading.swa_reserved)
    old = {page.page: page for page in before}
    pages = (
        Page(
            page,
            tuple(owners.get(page, ())),
            page in held,
            page in reached,
            page in waiting,
        )
        for page in sorted(shown)
    )
    # most pages stay as they were; a run of many steps shares them
    return tuple(old[page.page] if old.get(page.page) == page else page for page in pages)
