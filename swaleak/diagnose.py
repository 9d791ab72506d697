"""Finds leak messages in a server log, and works out what they mean. Needs no torch.

SGLang's checks add up what each pool can account for, and complain where the sum is not the size
of the pool. A log is read as a stream: blocks are searched for a few words, and only lines that
hold one of them are looked at, so that a log of any size takes little memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from packaging.specifiers import SpecifierSet

_Name = TypeVar("_Name", str, int)

MISSING, TWICE = "missing", "counted-twice"
PAGE_SIZES = frozenset(2**i for i in range(13))
BLOCK = 2**20  # bytes that are read at a time
BEHIND = 2**16  # bytes before a block that are kept, to find the time of a message
AROUND = 2**12  # bytes of a line that are looked at on either side of a word
LINES_BACK = 300  # lines before a message in which its time is looked for
MOST = 10_000  # findings that are told apart


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that is known.

    ``refs``: of sgl-project/sglang. ``kinds``, ``pools``, ``meaning``: the findings it leads to.
    ``versions``: releases that have it, any where that is not known. ``scenario`` and ``release``:
    where it can be replayed, if it lies in the allocator.
    """

    title: str
    refs: tuple[str, ...]
    kinds: tuple[str, ...]
    pools: tuple[str | None, ...]
    meaning: str
    versions: SpecifierSet
    scenario: str | None = None
    release: str | None = None

    def fits(self, finding: Finding) -> bool:
        """Whether it explains a finding, as far as the log tells version and page size."""
        size, version = finding.page_size, finding.version
        return (
            finding.kind in self.kinds
            and finding.pool in self.pools
            and finding.meaning == self.meaning
            and (not size or (finding.difference or 0) % size == 0)
            and (version is None or self.versions.contains(version, prereleases=True))
        )

    @property
    def command(self) -> str | None:
        """What reproduces it here."""
        if self.scenario is None:
            return None
        return f"swaleak repro {self.scenario} --strategy shipped --on {self.release}"


FAULTS = (
    Fault(
        "deferred resolve, 0.5.18: a grouped free_swa looks its page up too late",
        ("#36081", "#36135", "#36381"),
        ("sum",),
        ("swa", None),
        MISSING,
        SpecifierSet(">=0.5.18,<0.5.19"),
        "tombstone-recovery",
        "0.5.18",
    ),
    Fault(
        "partial free of a page leaves its other slots mapped, before 0.5.14",
        ("#27779",),
        ("sum", "double-free", "overfull"),
        ("swa", None),
        TWICE,
        SpecifierSet("<0.5.14"),
        "partial-page-free",
        "0.5.13.post1",
    ),
    Fault(
        "free group ended twice, before 0.5.19 (no cache of SGLang is known to do it)",
        ("#36381",),
        ("double-free",),
        ("full",),
        TWICE,
        SpecifierSet("<0.5.19"),
        "double-group-end",
        "0.5.18",
    ),
    Fault(
        "segment free of a tombstone puts the padding page into the free list, from 0.5.20",
        ("#38519",),
        ("double-free", "overfull"),
        ("swa", None),
        TWICE,
        SpecifierSet(">=0.5.20"),
        "segment-free-of-a-tombstone",
        "0.5.20",
    ),
    Fault(
        "SWA page counted twice with speculative decoding and page size > 1 (in the cache)",
        ("#27789",),
        ("sum",),
        ("swa", None),
        TWICE,
        SpecifierSet(""),
    ),
    Fault(
        "out-of-window slots freed under EAGLE while the cache still counts them (in the cache)",
        ("#34823", "#34870"),
        ("sum",),
        ("full", "swa", None),
        TWICE,
        SpecifierSet(""),
    ),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One message, however often it came.

    ``kind``: ``sum`` (a pool does not add up), ``double-free``, ``use-after-free`` or ``overfull``
    (more is free than there is). ``pool``: None where the message does not say. ``total``,
    ``accounted``: slots. ``terms``: what the message counts, as it first came. ``page_size``,
    ``version``: what the log named. ``first``, ``last``: times as the log writes them.
    """

    kind: str
    pool: str | None
    meaning: str
    total: int | None = None
    accounted: int | None = None
    terms: tuple[tuple[str, int], ...] = ()
    page_size: int | None = None
    version: str | None = None
    count: int = 1
    first: str | None = None
    last: str | None = None

    @property
    def difference(self) -> int | None:
        """Slots that are accounted for, less those that there are."""
        if self.total is None or self.accounted is None:
            return None
        return self.accounted - self.total

    @property
    def pages(self) -> dict[int, int]:
        """The difference in pages, by each page size that divides it, the largest first."""
        if self.kind == "double-free" and self.page_size:
            return {self.page_size: sum(number for _, number in self.terms)}
        slots = self.difference
        if not slots or self.pool not in ("full", "swa", None):
            return {}
        sizes = sorted(PAGE_SIZES | ({self.page_size} if self.page_size else set()), reverse=True)
        return {size: slots // size for size in sizes if slots % size == 0}

    @property
    def known(self) -> tuple[Fault, ...]:
        """The known faults that fit."""
        return tuple(fault for fault in FAULTS if fault.fits(self))


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a log holds. ``dumps``: pool lines left out, because a running batch is not in them.

    ``more``: messages beyond the number of findings that are told apart.
    """

    findings: tuple[Finding, ...]
    size: int
    versions: tuple[str, ...]
    page_sizes: tuple[int, ...]
    dumps: int = 0
    more: int = 0


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
# several pools in one line: a log of JSON objects, or lines that were joined
PART = re.compile(r"\\n|(?=\[[\w-]{1,20}\]\s+total=)")
# a check that logs every balanced sum writes millions of these; they are told without more ado
NUMBER = rb"=(-?\d+)"
SUM = re.compile(
    rb"total%b, available%b, evictable%b, protected%b(?:, session_held%b, uncached%b)?"
    % ((NUMBER,) * 6)
)
TAG = re.compile(r"\[(full|swa|mamba[\w-]*)\]")
PAIR = re.compile(r"(?<![\w.])([A-Za-z_][\w.]{0,99})(?:\(\))?=(-?\d{1,18})\b")
TERM = re.compile(
    r"(?:(full|swa|mamba)_)?(available|evictable|protected|session_held|uncached)"
    r"(?:_(?:size|full|swa))*"
)
TOTALS = {  # name -> pool, None where it does not say
    "total": None,
    "total_size": None,
    "max_total_num_tokens": "full",
    "full_tokens_per_layer": "full",
    "swa_tokens_per_layer": "swa",
    "token_to_kv_pool_allocator.size": "full",
    "mamba_pool.size": "mamba",
}
REQUESTS = "req_to_token"
SUB_POOLS = ("full", "swa")
DOUBLE_FREE = re.compile(r"KV double free: sub-pool (\d+) has (\d+) duplicate pages")
USE_AFTER_FREE = re.compile(r"KV page use-after-free: (\d+) owner page refs")
OVERFULL = re.compile(r"(?:(full|swa)_attn_allocator\.)?available_size\(\)\s*<=\s*[\w.]*size\b")


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
        if self.is_balanced(first, last):
            if self.base + begin == self.dump_end:
                self.dump_end = self.base + end + 1
            return
        text = self.data[first:last].decode("utf-8", "replace")
        if "cur_batch_for_debug" in text:
            self.dump_end = self.base + end + 1
        for part in PART.split(text):
            for finding in _findings(part):
                self.found(finding, begin, end)
        overfull = OVERFULL.search(text)
        if overfull and self.is_raised(begin, end):
            self.tally(Finding("overfull", overfull[1], TWICE), begin, end)

    def is_balanced(self, first: int, last: int) -> bool:
        """Whether there is one sum between ``first`` and ``last``, and it is right."""
        found = SUM.search(self.data, first, last)
        if not found or self.data.find(b"total=", found.end(), last) >= 0:
            return False
        total, *terms = (int(number or 0) for number in found.groups())
        return total == sum(terms)

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


def _findings(text: str) -> Iterator[Finding]:
    """Yield what one piece of a line says, balanced sums included."""
    if found := DOUBLE_FREE.search(text):
        index, pages = int(found[1]), int(found[2])
        pool = SUB_POOLS[index] if index < len(SUB_POOLS) else None
        yield Finding("double-free", pool, TWICE, terms=(("duplicate pages", pages),))
    if found := USE_AFTER_FREE.search(text):
        refs = ("references to free pages", int(found[1]))
        yield Finding("use-after-free", "full", TWICE, terms=(refs,))
    if "dcp_physical_page_slack_allowed" not in text and (sum_ := _sum(text)):
        yield sum_


def _sum(text: str) -> Finding | None:
    """Return what a pool adds up to, of any wording: a total, and terms one of which is free."""
    total: tuple[int, str | None] | None = None
    pools: list[str] = []
    terms: dict[str, int] = {}
    for name, digits in PAIR.findall(text):
        last = name.rpartition(".")[2]
        owner = ".".join(name.split(".")[-2:])
        key = last if last in TOTALS else owner
        if key in TOTALS:
            total = int(digits), TOTALS[key]
        elif term := TERM.fullmatch(last):
            pools += [term[1]] if term[1] else []
            terms.setdefault(term[2], int(digits))
    if total is None or "available" not in terms:
        return None
    tag = TAG.search(text)
    pool = pools[0] if pools else tag[1] if tag else total[1]
    if "req_to_token_pool memory leak" in text:
        pool = REQUESTS
    accounted = sum(terms.values())
    meaning = MISSING if accounted < total[0] else TWICE
    return Finding("sum", pool, meaning, total[0], accounted, tuple(terms.items()))


def _move_to_end(names: dict[_Name, None], name: _Name) -> None:
    names.pop(name, None)
    names[name] = None
