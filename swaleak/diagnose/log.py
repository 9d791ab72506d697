"""Reads a log as a stream: blocks are searched for a few words, and only lines with one looked at.

So a log of any size takes little memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from swaleak.diagnose.finding import Diagnosis, Finding, Unread
from swaleak.diagnose.message import (
    as_text,
    findings_in,
    has_numbers,
    is_announced,
    is_balanced,
    is_cut_announcement,
    overfull_in,
    why_unreadable,
)
from swaleak.diagnose.plain import BLOCK, Log, Plain
from swaleak.diagnose.tally import Tally

_Name = TypeVar("_Name", str, int)
BEHIND = 2**16  # bytes before a block that are kept, to find the time of a message
AROUND = 2**12  # bytes of a line that are looked at on either side of a word
REACH = 2**14  # bytes behind a message that the rest of it is looked for in
LINES_BACK = 300  # lines before a message in which its time is looked for
UNREAD = 1_000  # unreadable messages of which it is told where they are


def diagnose(log: Log, page_size: int | None = None) -> Diagnosis:
    """Read a log to its end. ``page_size``: of the server, where the log does not name it.

    Raises ``OSError`` if it cannot be read, or is packed with anything but gzip.
    """
    scanner, plain = _Scanner(page_size), Plain(log)
    for block in plain:
        scanner.feed(block)
    found = scanner.finish()
    return replace(found, size=plain.size, kinds=tuple(plain.kinds), torn=plain.torn)


# the longer, the faster they are found
ANNOUNCING = (b"memory leak detec", b"Pool Mem Leak Detec")
WORDS = (
    *ANNOUNCING,
    b"available",
    b"KV double free",
    b"KV page use-after-free",
    b"cur_batch_for_debug",
)
SETTINGS = (b"page_size", b"page-size")
RELEASE = (
    rb"\W{0,3}(?:\[\w*\])?(?:[ _]?version)?\W{0,4}v?([01]\.\d+\.\d+(?:\.?(?:post|rc|dev)\d+)?)"
)
# more digits behind it: an IP address. Two patterns, because a literal beginning is found fast
VERSIONS = tuple(re.compile(name + RELEASE + rb"(?!\.?\d)") for name in (b"sglang", b"SGLang"))
PAGE_SIZE = re.compile(rb"page[_-]size['\"]?[=: ]+(\d{1,9})\b")
TIME = re.compile(rb"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d")
# behind the time in the prefix of SGLang's logger: [2026-08-23 13:33:20 DP0 PP1 TP3 EP3]
RANK = re.compile(rb"\[[^\[\]\n]{1,40}?((?: (?:DP|PP|ATTN_CP|MOE_DP|TP|EP)\d{1,5})+)\]")


@dataclass(frozen=True, slots=True)
class _Announced:
    """A message whose first pool adds up: what it is about comes in a line behind it."""

    at: int
    line: int
    why: str
    rank: str | None
    time: str | None


class _Scanner:
    """Collects findings. ``data`` is a window of the log; it starts ``base`` bytes into it."""

    def __init__(self, page_size: int | None) -> None:
        self.given = page_size
        self.data = b""
        self.base = 0
        self.counted = 0  # bytes of the log in which lines have been counted
        self.lines = 0  # lines that end there
        self.seen = 0  # what lies before it in ``data`` has been looked at
        self.tally = Tally()
        self.versions: dict[str, None] = {}  # the last one named comes last
        self.page_sizes: dict[int, None] = {}
        self.dump_end = -1  # where in the log the last line of a watchdog's dump ended
        self.dumps = 0
        self.open_end = -1  # where in ``data`` the log ends, if within a line
        self.announced: list[_Announced] = []
        self.unread: list[Unread] = []
        self.unread_count = 0
        # where a time was last looked for, and what was found
        self.timed: tuple[int, str | None, str | None] = (-1, None, None)

    def feed(self, block: bytes) -> None:
        """Look at what is there, up to the end of the last whole line."""
        self.data += block
        limit = self.data.rfind(b"\n", self.seen) + 1
        if not limit and len(self.data) - self.seen > BLOCK:  # a line longer than any message
            limit = len(self.data) - AROUND
        if limit:
            self.look(limit)

    def finish(self) -> Diagnosis:
        """Look at the rest, and return everything."""
        if self.data and not self.data.endswith(b"\n"):
            self.open_end = len(self.data)
            self.data += b"\n"
        self.look(len(self.data))
        begin, end = self.data.rfind(b"\n", 0, -1) + 1, len(self.data) - 1
        tail = as_text(self.data[max(begin, end - AROUND) : end])
        if self.open_end >= 0 and is_cut_announcement(tail):
            self.unreadable(begin, end, why_unreadable(tail))
        self.expire(self.base + len(self.data) + REACH + 1)
        # what is named once, also behind a message, holds for all of the log
        version = next(iter(self.versions)) if len(self.versions) == 1 else None
        page_size = next(iter(self.page_sizes)) if len(self.page_sizes) == 1 else self.given
        found = (
            replace(f, version=f.version or version, page_size=f.page_size or page_size)
            for f in self.tally
        )
        self.unread.sort(key=lambda one: one.line)
        return Diagnosis(
            findings=tuple(found),
            size=self.base + len(self.data),
            versions=tuple(self.versions),
            page_sizes=tuple(self.page_sizes),
            dumps=self.dumps,
            more=self.tally.more,
            unread=tuple(self.unread),
            unread_count=self.unread_count,
            unused=self.given if set(self.page_sizes) - {self.given} else None,
        )

    def look(self, limit: int) -> None:
        """Look at ``data`` up to ``limit``, then forget all but what a time may be found in."""
        hits = [(at, self.version_at) for at in self.matches(VERSIONS, limit)]
        hits += [(at, self.page_size_at) for at in self.places(SETTINGS, limit)]
        hits += [(at, self.word_at) for at in self.places(WORDS, limit)]
        for at, read in sorted(hits, key=lambda hit: hit[0]):
            read(at)
        self.seen = max(self.seen, limit)
        keep = max(0, limit - BEHIND)
        if self.counted < self.base + keep:
            self.line_of(keep)
        self.data = self.data[keep:]
        self.base += keep
        self.seen -= keep

    def places(self, words: tuple[bytes, ...], limit: int) -> Iterator[int]:
        """Yield where any of the words begins, from ``seen`` to ``limit``."""
        for word in words:
            at = self.data.find(word, self.seen, limit + len(word))
            while 0 <= at < limit:
                yield at
                at = self.data.find(word, at + 1, limit + len(word))

    def matches(self, patterns: tuple[re.Pattern[bytes], ...], limit: int) -> Iterator[int]:
        """Yield where any of the patterns begins to match, from ``seen`` to ``limit``."""
        for pattern in patterns:
            for found in pattern.finditer(self.data, self.seen, limit):
                yield found.start()

    def version_at(self, at: int) -> None:
        """Take note of a version that is named here."""
        for pattern in VERSIONS:
            if found := pattern.match(self.data, at):
                _move_to_end(self.versions, found[1].decode())

    def page_size_at(self, at: int) -> None:
        """Take note of a page size, if one is named here."""
        prefixed = self.data[at - 1 : at].replace(b"_", b"a").isalpha()  # another page size
        if not prefixed and (found := PAGE_SIZE.match(self.data, at)) and int(found[1]):
            _move_to_end(self.page_sizes, int(found[1]))

    def word_at(self, at: int) -> None:
        """Look at the line around a word, once."""
        if at < self.seen:
            return
        begin = self.data.rfind(b"\n", 0, at) + 1
        end = self.data.find(b"\n", at)
        end = len(self.data) if end < 0 else end
        first, last = max(begin, self.seen, at - AROUND), min(end, at + AROUND)
        self.seen = last + 1
        # it stands before the sum, so that it is the word that led here
        announced = self.data.startswith(ANNOUNCING, at)
        balanced = is_balanced(self.data, first, last)
        if balanced and not announced:
            if self.base + begin == self.dump_end:
                self.dump_end = self.base + end + 1
            return
        text = as_text(self.data[first:last])
        announced = announced and is_announced(text)
        if balanced and announced:
            self.announce(begin, end, text)
            return
        if "cur_batch_for_debug" in text:
            self.dump_end = self.base + end + 1
        ended = last == end != self.open_end
        told = False
        for finding in findings_in(text, ended):
            told |= self.found(finding, begin, end, announced)
        if (overfull := overfull_in(text)) and self.is_raised(begin, end):
            self.count(overfull, begin, end, announced)
        if announced and not told:
            self.announce(begin, end, text)

    def found(self, finding: Finding | str, begin: int, end: int, announced: bool) -> bool:
        """Take a finding in the line from ``begin`` to ``end``, unless it is part of a dump.

        A watchdog prints the sums while a batch runs, and what that batch holds is not in them.
        Return whether it was taken.
        """
        is_sum = isinstance(finding, str) or finding.kind == "sum"
        if is_sum and self.base + begin == self.dump_end:
            self.dump_end = self.base + end + 1
            self.dumps += not isinstance(finding, str) and finding.difference != 0
            return False
        if isinstance(finding, str):
            if self.data.find(b"[Mem Check", begin, end) >= 0:  # it tells every sum, right or not
                return False
            self.unreadable(begin, end, finding, announced)
        elif finding.difference != 0:
            self.count(finding, begin, end, announced)
        else:
            return False
        return True

    def count(self, finding: Finding, begin: int, end: int, announced: bool) -> None:
        """Count a finding; ``begin`` and ``end`` are those of its line."""
        version = next(reversed(self.versions), None)
        page_size = next(reversed(self.page_sizes), None)
        named = replace(finding, version=version, page_size=page_size)
        self.tally.add(named, self.line_of(begin), *self.origin(begin, end, announced))

    def unreadable(self, begin: int, end: int, why: str, announced: bool = True) -> None:
        """Take note of a message that cannot be read."""
        time, rank = self.origin(begin, end, announced)
        self.note(Unread(self.line_of(begin), why, rank, time))

    def note(self, unread: Unread) -> None:
        """Keep what cannot be read, if that is not too much."""
        self.unread_count += 1
        if len(self.unread) < UNREAD:
            self.unread.append(unread)

    def announce(self, begin: int, end: int, text: str) -> None:
        """Take note of a message that says nothing of a leak yet: more lines of it may follow."""
        why = why_unreadable(text)
        if end == self.open_end or not has_numbers(text):
            self.unreadable(begin, end, why)
            return
        if "separators" not in why:
            why = "the pool that it names adds up, and no line of another pool is behind it"
        time, rank = self.origin(begin, end, True)
        self.announced.append(_Announced(self.base + begin, self.line_of(begin), why, rank, time))

    def expire(self, at: int) -> None:
        """Give up on messages of which nothing more came in the ``REACH`` bytes up to ``at``."""
        while self.announced and self.announced[0].at < at - REACH:
            old = self.announced.pop(0)
            self.note(Unread(old.line, old.why, old.rank, old.time))

    def origin(self, begin: int, end: int, announced: bool) -> tuple[str | None, str | None]:
        """Return the time and the rank of a message, of which this may be a further line.

        Ranks write into one log, so that lines of one may lie between two of another: the oldest
        message that lacks a line is taken for the one that it belongs to.
        """
        time, near = self.time_of(begin, end)
        own = self.rank_in(begin, end)
        self.expire(self.base + begin)
        for i, message in enumerate([] if announced else self.announced):
            if own is None or message.rank in (own, None):
                del self.announced[i]
                return time, own or message.rank
        return time, own or near

    def line_of(self, at: int) -> int:
        """Return the number of the line that begins here, from 1; never before the last one."""
        self.lines += self.data.count(b"\n", max(0, self.counted - self.base), at)
        self.counted = self.base + at
        return self.lines + 1

    def rank_in(self, begin: int, end: int) -> str | None:
        """Return the rank that the prefix of a line names."""
        found = RANK.search(self.data, begin, min(end, begin + 200))
        return found[1].decode().strip() if found else None

    def is_raised(self, begin: int, end: int) -> bool:
        """Whether the line from ``begin`` to ``end`` is where a traceback ends."""
        before = self.data[self.data.rfind(b"\n", 0, max(begin - 1, 0)) + 1 : begin]
        return b'File "' in before or b"AssertionError" in self.data[begin : end + 200]

    def time_of(self, begin: int, end: int) -> tuple[str | None, str | None]:
        """Return the time in a line, or the last one before it, and the rank beside that."""
        at = self.base + begin
        found = TIME.search(self.data, begin, min(end, begin + AROUND))
        for _ in range(LINES_BACK):
            if found or begin <= 0 or self.base + begin <= self.timed[0]:
                break
            end, begin = begin, self.data.rfind(b"\n", 0, begin - 1) + 1
            found = TIME.search(self.data, begin, min(end, begin + 200))
        _, time, rank = self.timed if self.base + begin <= self.timed[0] else (0, None, None)
        if found:
            time = found[0].decode().replace("T", " ")
            rank = self.rank_in(begin, end)
        self.timed = at, time, rank
        return time, rank


def _move_to_end(names: dict[_Name, None], name: _Name) -> None:
    names.pop(name, None)
    names[name] = None
