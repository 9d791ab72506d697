"""Counts messages: those of the same numbers are one finding, with the ranks they came from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from swaleak.diagnose.finding import Finding

MOST = 10_000  # findings that are told apart


@dataclass(slots=True)
class Sightings:
    """A message as it first came, and where and when it did."""

    finding: Finding
    count: int = 0
    first: str | None = None
    last: str | None = None
    lines: tuple[int, int] = (0, 0)
    ranks: dict[str | None, int] = field(default_factory=dict)

    def add(self, line: int, time: str | None, rank: str | None) -> None:
        """Take note of one more."""
        self.count += 1
        self.first, self.last = self.first or time, time or self.last
        self.lines = (self.lines[0] or line, line)
        self.ranks[rank] = self.ranks.get(rank, 0) + 1

    def told(self) -> Finding:
        """Return the finding with all of it."""
        return replace(
            self.finding,
            count=self.count,
            first=self.first,
            last=self.last,
            lines=self.lines,
            ranks=tuple(sorted(self.ranks.items(), key=lambda item: item[0] or "")),
        )


class Tally:
    """Findings, and how often each was seen.

    ``more``: messages beyond what is told apart. Of those, the largest and the newest of each kind
    are kept all the same: nobody who has so many asks for the ten thousandth.
    """

    def __init__(self) -> None:
        self.more = 0
        self._seen: dict[Finding, Sightings] = {}
        self._largest: dict[tuple[object, ...], Sightings] = {}
        self._newest: dict[tuple[object, ...], Sightings] = {}

    def add(self, finding: Finding, line: int, time: str | None, rank: str | None) -> None:
        """Count a finding of a line."""
        key = finding if finding.total is None else replace(finding, terms=())
        seen = self._seen.get(key) or Sightings(finding)
        seen.add(line, time, rank)
        if seen.count > 1 or len(self._seen) < MOST:
            self._seen[key] = seen
            return
        kind = finding.kind, finding.pool, finding.meaning
        self.more += 1
        self._newest[kind] = seen
        largest = self._largest.setdefault(kind, seen)
        if abs(finding.difference or 0) > abs(largest.finding.difference or 0):
            self._largest[kind] = seen

    def __iter__(self) -> Iterator[Finding]:
        """Yield the findings, in the order in which they came."""
        beyond = {id(s): s for s in (*self._largest.values(), *self._newest.values())}
        for seen in (*self._seen.values(), *beyond.values()):
            yield seen.told()
