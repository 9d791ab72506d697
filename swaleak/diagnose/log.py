"""Reads a log as a stream: blocks are searched for a few words, and only lines with one looked at.

So a log of any size takes little memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol, TypeVar

from swaleak.diagnose.finding import Diagnosis, Finding
from swaleak.diagnose.message import findings_in, is_balanced, overfull_in

_Name = TypeVar("_Name", str, int)
BLOCK = 2**20  # bytes that are read at a time
BEHIND = 2**16  # bytes before a block that are kept, to find the time of a message
AROUND = 2**12  # bytes of a line that are looked at on either side of a word
LINES_BACK = 300  # lines before a message in which its time is looked for
MOST = 10_000  # findings that are told apart


class Log(Protocol):
    """What is read: an open binary file."""

    def read(self, size: int, /) -> bytes | None:
        """Return at most ``size`` bytes, none at the end."""


def diagnose(log: Log, page_size: int | None = None) -> Diagnosis:
    """Read a log to its end. ``page_size``: of the server, where the log does not name it.

    Raises ``OSError`` if it cannot be read.
    """
    scanner = _Scanner(page_size)
    while block := log.read(BLOCK):
        scanner.feed(block)
    return scanner.finish()


WORDS = (b"available", b"KV double free", b"use-after-free", b"cur_batch_for_debug")
SETTINGS = (b"page_size", b"page-size")
RELEASE = (
    rb"\W{0,3}(?:\[\w*\])?(?:[ _]?version)?\W{0,4}v?([01]\.\d+\.\d+(?:\.?(?:post|rc|dev)\d+)?)"
)
# more digits behind it: an IP address. Two patterns, because a literal beginning is found fast
VERSIONS = tuple(re.compile(name + RELEASE + rb"(?!\.?\d)") for name in (b"sglang", b"SGLang"))
PAGE_SIZE = re.compile(rb"page[_-]size['\"]?[=: ]+(\d{1,9})\b")
TIME = re.compile(rb"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d")


class _Scanner:
    """Collects findings. ``data`` is a window of the log; it starts ``base`` bytes into it."""

    def __init__(self, page_size: int | None) -> None:
        self.given = page_size
        self.data = b""
        self.base = 0
        self.seen = 0  # what lies before it in ``data`` has been looked at
        self.findings: dict[tuple[object, ...], Finding] = {}
        self.versions: dict[str, None] = {}  # the last one named comes last
        self.page_sizes: dict[int, None] = {}
        self.dump_end = -1  # where in the log the last line of a watchdog's dump ended
        self.dumps = 0
        self.more = 0
        self.timed: tuple[int, str | None] = (-1, None)  # where a time was last looked for

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
        size = self.base + len(self.data)
        self.data += b"\n"
        self.look(len(self.data))
        # what is named once, also behind a message, holds for all of the log
        version = next(iter(self.versions)) if len(self.versions) == 1 else None
        page_size = next(iter(self.page_sizes)) if len(self.page_sizes) == 1 else self.given
        found = (
            replace(f, version=f.version or version, page_size=f.page_size or page_size)
            for f in self.findings.values()
        )
        named = tuple(self.versions), tuple(self.page_sizes)
        return Diagnosis(tuple(found), size, *named, self.dumps, self.more)

    def look(self, limit: int) -> None:
        """Look at ``data`` up to ``limit``, then forget all but what a time may be found in."""
        hits = [(at, self.version_at) for at in self.matches(VERSIONS, limit)]
        hits += [(at, self.page_size_at) for at in self.places(SETTINGS, limit)]
        hits += [(at, self.word_at) for at in self.places(WORDS, limit)]
        for at, read in sorted(hits, key=lambda hit: hit[0]):
            read(at)
        self.seen = max(self.seen, limit)
        keep = max(0, limit - BEHIND)
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
        if is_balanced(self.data, first, last):
            if self.base + begin == self.dump_end:
                self.dump_end = self.base + end + 1
            return
        text = self.data[first:last].decode("utf-8", "replace")
        if "cur_batch_for_debug" in text:
            self.dump_end = self.base + end + 1
        for finding in findings_in(text):
            self.found(finding, begin, end)
        if (overfull := overfull_in(text)) and self.is_raised(begin, end):
            self.tally(overfull, begin, end)

    def found(self, finding: Finding, begin: int, end: int) -> None:
        """Take a finding in the line from ``begin`` to ``end``, unless it is part of a dump.

        A watchdog prints the sums while a batch runs, and what that batch holds is not in them.
        """
        if finding.kind == "sum" and self.base + begin == self.dump_end:
            self.dump_end = self.base + end + 1
            self.dumps += finding.difference != 0
        elif finding.difference != 0:
            self.tally(finding, begin, end)

    def tally(self, finding: Finding, begin: int, end: int) -> None:
        """Count a finding; ``begin`` and ``end`` are those of its line."""
        version = next(reversed(self.versions), None)
        page_size = next(reversed(self.page_sizes), None)
        terms = finding.terms if finding.total is None else ()
        key = (
            finding.kind,
            finding.pool,
            finding.total,
            finding.accounted,
            terms,
            version,
            page_size,
        )
        time = self.time_of(begin, end)
        if key in self.findings:
            old = self.findings[key]
            self.findings[key] = replace(
                old, count=old.count + 1, first=old.first or time, last=time or old.last
            )
        elif len(self.findings) == MOST:
            self.more += 1
        else:
            self.findings[key] = replace(
                finding, version=version, page_size=page_size, first=time, last=time
            )

    def is_raised(self, begin: int, end: int) -> bool:
        """Whether the line from ``begin`` to ``end`` is where a traceback ends."""
        before = self.data[self.data.rfind(b"\n", 0, max(begin - 1, 0)) + 1 : begin]
        return b'File "' in before or b"AssertionError" in self.data[begin : end + 200]

    def time_of(self, begin: int, end: int) -> str | None:
        """Return the time in a line, or the last one before it."""
        at = self.base + begin
        found = TIME.search(self.data, begin, min(end, begin + AROUND))
        for _ in range(LINES_BACK):
            if found or begin <= 0 or self.base + begin <= self.timed[0]:
                break
            end, begin = begin, self.data.rfind(b"\n", 0, begin - 1) + 1
            found = TIME.search(self.data, begin, min(end, begin + 200))
        time = self.timed[1] if self.base + begin <= self.timed[0] else None
        if found:
            time = found[0].decode().replace("T", " ")
        self.timed = at, time
        return time


def _move_to_end(names: dict[_Name, None], name: _Name) -> None:
    names.pop(name, None)
    names[name] = None
