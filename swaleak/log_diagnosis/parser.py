"""Reads a log as a stream: blocks are searched for a few words, and only lines with one are read.

What the messages look like and what they count is in ``formats.toml``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any, BinaryIO

from packaging.version import Version

from swaleak.log_diagnosis.log_text import LogText

MISSING, TWICE, LOCKED, NEGATIVE = "missing", "counted-twice", "never-unlocked", "negative-count"
KEPT_BYTES = 2**16  # before a block, to find the time and the rank of a message in
WINDOW_BYTES = 2**12  # of a very long line, on either side of a word
REACH_BYTES = 2**14  # behind an announcement in which the rest of the message is looked for
PREFIX_BYTES = 400  # of a line, for its time and rank
LINES_BACK = 300
MAX_FINDINGS = 2_000

# word -> a byte without which a block cannot hold it: one byte is found ten times as fast
WORDS = {b"etected!": b"!", b"able": b"=", b"cur_batch": b"=", b"page": b"", b"lang": b""}
TABLE: dict[str, Any] = tomllib.loads((files(__package__) / "formats.toml").read_text("utf-8"))
PATTERNS = {name: re.compile(regex) for name, regex in TABLE["patterns"].items()}
TIME, LOGGER, SOURCE = (re.compile(regex.encode()) for regex in TABLE["line_patterns"].values())
POOL = r"(?P<pool>full|swa|mamba[\w-]*)"
# whole where something ends it: 911,616 is no number, nor is one that another process wrote into
NUMBER = r"-?\d{1,18}(?![\w\[]|[.,]\d)"


@dataclass(frozen=True, slots=True)
class Format:
    """A wording; ``formats.toml`` says what each field means."""

    name: str
    releases: str
    kind: str
    template: str = ""
    regex: str = ""
    pool: str | None = None
    counts: tuple[str, ...] = ()
    begins: str | None = None
    raised: bool = False
    check_counts_protected: str = ""
    check_adds_pre_alloc: str = ""
    unprinted: str = ""


@cache
def pattern(form: Format) -> re.Pattern[str]:
    """Return the regular expression of a format's template."""
    parts: list[str] = []
    for literal, name, mark in re.findall(r"([^{}<>]+)|\{(\w+)\}|([<>])", form.template):
        if name:
            group = POOL if name == "pool" else f"(?P<{name}>{NUMBER})"
            parts.append(group if group not in parts else f"(?P={name})")
        else:
            blanks = re.sub(r"(?:\\ )+", r"\\s+", re.escape(literal)).replace("!", r"!\s*")
            parts.append({"<": "(?:", ">": ")?"}.get(mark, blanks))
    return re.compile(form.regex or "(?<![A-Za-z_])" + "".join(parts))


FORMATS = tuple(Format(**{**row, "counts": tuple(row.get("counts", ()))}) for row in TABLE["format"])


@dataclass(frozen=True, slots=True)
class Finding:
    """One message, however often it came and from whichever ranks.

    ``kind``: that of its format, or ``lock`` or ``unaligned``; ``unread`` for a message that cannot
    be read, and ``what`` is why. ``wanted``: the figure without which the difference is not known.
    ``released``: the releases that print this wording. ``version``, ``page_size``, ``flags``: what
    the log says of the server. ``ranks``: how often from each, None where the log does not say.
    """

    kind: str
    pool: str | None = None
    meaning: str = ""
    total: int | None = None
    accounted: int | None = None
    terms: tuple[tuple[str, int], ...] = ()
    absent: tuple[str, ...] = ()
    wanted: str | None = None
    what: str = ""
    format: str = ""
    released: str = ""
    version: str | None = None
    page_size: int | None = None
    flags: frozenset[tuple[str, bool]] = frozenset()
    count: int = 0
    first: str | None = None
    last: str | None = None
    lines: tuple[int, int] = (0, 0)
    ranks: tuple[tuple[str | None, int], ...] = ()

    @property
    def difference(self) -> int | None:
        """Slots accounted for, less the slots that exist; None if not known."""
        if self.total is None or self.accounted is None or self.wanted:
            return None
        return self.accounted - self.total

    @property
    def pages(self) -> dict[int, int]:
        """The difference in pages by each page size that divides it, the largest size first."""
        if self.kind == "double-free" and self.page_size:
            return {self.page_size: dict(self.terms).get("pages", 0)}
        slots = self.difference
        if not slots or self.kind != "sum" or (self.pool or "").startswith("mamba"):
            return {}
        sizes = {2**i for i in range(13)} | ({self.page_size} if self.page_size else set())
        return {n: slots // n for n in sorted(sizes, reverse=True) if slots % n == 0}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a log holds.

    ``dumps``: sums of a watchdog that differ because a batch was running; ``batch``: its requests.
    ``more``: messages beyond the findings that are kept apart. ``unused``: options that the log
    contradicts.
    """

    findings: tuple[Finding, ...]
    unread: tuple[Finding, ...]
    versions: tuple[str, ...]
    page_sizes: tuple[int, ...]
    unused: tuple[str, ...]
    dumps: int
    batch: int | None
    more: int
    size: int
    kinds: tuple[str, ...]
    truncated: bool


def diagnose(log: BinaryIO, page_size: int | None = None, release: str | None = None) -> Diagnosis:
    """Read a log to its end; the options stand in for what the log does not say.

    Raises ``OSError`` if it cannot be read, or is packed with anything but gzip.
    """
    scan, text = _Scanner(release), LogText(log)
    for block in text:
        scan.feed(block)
    scan.finish()
    versions, sizes = tuple(scan.versions), tuple(scan.page_sizes)
    # what is said once, also behind a message, holds for the whole log
    version = versions[0] if len(versions) == 1 else release
    size = sizes[0] if len(sizes) == 1 else page_size
    found = [
        replace(f, version=f.version or version, page_size=f.page_size or size)
        for f in (*scan.seen.values(), *scan.beyond.values())
    ]
    given = (("--release", release, versions), ("--page-size", page_size, sizes))
    return Diagnosis(
        tuple(f for f in found if f.kind != "unread"),
        tuple(sorted((f for f in found if f.kind == "unread"), key=lambda f: f.lines)),
        versions,
        sizes,
        tuple(
            f"{option} {value} is not used: the log names {', '.join(map(str, said))}."
            for option, value, said in given
            if value and set(said) - {value}
        ),
        scan.dumps,
        scan.batch,
        scan.more,
        text.raw.size,
        tuple(text.kinds),
        text.truncated,
    )


@dataclass(slots=True)
class _Scanner:
    """Collects findings. ``data`` is a window of the log that starts ``base`` bytes into it."""

    release: str | None
    data: bytes = b""
    base: int = 0
    done: int = 0  # in ``data``; what lies before it has been read
    counted: int = 0  # bytes of the log that hold ``newlines``
    newlines: int = 0
    open_end: int = -1  # where in ``data`` the log ends, if within a line
    versions: dict[str, None] = field(default_factory=dict)  # the last one comes last
    page_sizes: dict[int, None] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=dict)
    seen: dict[Finding, Finding] = field(default_factory=dict)
    beyond: dict[tuple[str, ...], Finding] = field(default_factory=dict)
    more: int = 0
    dumps: int = 0
    batch: int | None = None
    dump_at: int = -REACH_BYTES - 1  # where in the log a watchdog's dump was last seen
    announced_at: int = -REACH_BYTES - 1
    sum_end: int = -1  # where in the log the last line with a sum ended
    # announcements of which no pool that is off was seen yet: place, source, finding
    pending: list[tuple[int, bytes, Finding]] = field(default_factory=list)
    # source of lines -> place, time and rank that were last found
    prefixes: dict[bytes, tuple[int, str | None, str | None]] = field(default_factory=dict)

    def feed(self, block: bytes) -> None:
        self.data += block
        limit = self.data.rfind(b"\n", self.done) + 1
        if not limit and len(self.data) - self.done > 2**20:  # a line longer than any message
            limit = len(self.data) - WINDOW_BYTES
        if limit:
            self.read_to(limit)

    def finish(self) -> None:
        if self.data and not self.data.endswith(b"\n"):
            self.open_end = len(self.data)
            self.data += b"\n"
            tail = self.data[-WINDOW_BYTES:-1].decode("utf-8", "replace")
            cut = PATTERNS["cut_announcement"].search(tail)
            if cut and "memory leak detected".startswith(cut[1]):
                begin = self.data.rfind(b"\n", 0, -1) + 1
                self.count(Finding("unread", what=_why(tail)), begin, announced=True)
        self.read_to(len(self.data))
        self.expire(self.base + len(self.data) + REACH_BYTES + 1)

    def read_to(self, limit: int) -> None:
        """Read ``data`` up to ``limit``, then forget all but what a time may be found in."""
        for at in sorted(self.places(limit)):
            if at >= self.done:
                self.line(at)
        self.done = max(self.done, limit)
        self.line_number(limit)
        forget = max(0, limit - KEPT_BYTES)
        self.data = self.data[forget:]
        self.base += forget
        self.done -= forget

    def places(self, limit: int) -> Iterator[int]:
        """Yield where a word begins, once per line or window."""
        for word, mark in WORDS.items():
            at = self.data.find(word, self.done, limit) if mark in self.data else -1
            while at >= 0:
                yield at
                end = self.data.find(b"\n", at, at + WINDOW_BYTES)
                at = self.data.find(word, end if end > 0 else at + 1, limit)

    def line(self, at: int) -> None:
        """Read the line around a word; of a very long one, what is near."""
        begin, end = self.data.rfind(b"\n", 0, at) + 1, self.data.find(b"\n", at)
        end = end if end >= 0 else len(self.data)
        first, last = max(begin, self.done), end
        if end - begin > KEPT_BYTES:
            first, last = max(first, at - WINDOW_BYTES), min(end, at + WINDOW_BYTES)
        self.done = last + 1
        text = PATTERNS["escaped"].sub("", self.data[first:last].decode("utf-8", "replace"))
        *parts, rest = PATTERNS["line_end"].split(text.rstrip("\r"))
        for part in parts:
            self.part(part, begin, end, True)
        self.part(rest, begin, end, last == end != self.open_end)

    def part(self, text: str, begin: int, end: int, ended: bool) -> None:
        """Read one line of a message; ``begin`` and ``end`` are those of its line in ``data``."""
        self.settings(text)
        if any(skip in text for skip in TABLE["skip"]):
            return
        here = self.base + begin
        if "cur_batch" in text:
            self.dump_at = self.base + end
            size = PATTERNS["batch_size"].search(text)
            self.batch = int(size[1]) if size else self.batch
        announced = PATTERNS["announced"].search(text) is not None
        if announced:
            self.announced_at, self.dump_at = here, -REACH_BYTES - 1
        dumped, near = here - self.dump_at <= REACH_BYTES, here - self.announced_at <= REACH_BYTES
        told, sums, covered = False, False, 0
        for form in FORMATS:
            where = self.raised(text, begin, end) if form.raised else text
            found = pattern(form).search(where, 0 if form.raised else covered)
            while found:
                covered = found.end()
                sums |= form.kind == "sum"
                finding = self.message(form, found, ended, near)
                if finding and dumped and form.kind == "sum":
                    self.dumps += 1
                elif finding:
                    told = True
                    self.count(finding, begin, announced)
                found = pattern(form).search(where, covered)
            if form.begins and not (sums or told) and re.search(form.begins, text):
                told = True
                if not dumped and "[Mem Check" not in text:
                    self.count(Finding("unread", what=_why(text)), begin, announced)
            if form.raised and told:
                break
        # in 2024 the announcement came behind the sum
        if announced and not told and not ("KV cache" in text and self.sum_end == here):
            why = _why(text)
            if sums and "separators" not in why:
                why = "the pool that it names adds up, and no line of another pool is behind it"
            time, rank, source, _ = self.origin(begin)
            lines = (self.line_number(begin),) * 2
            unread = Finding("unread", what=why, first=time, lines=lines, ranks=((rank, 1),))
            self.pending.append((here, source, unread))
        self.sum_end = self.base + end + 1 if sums else self.sum_end

    def settings(self, text: str) -> None:
        """Take note of the release and the server's options."""
        for version in PATTERNS["version"].findall(text):
            self.versions.pop(version, None)
            self.versions[version] = None
        for name, value in PATTERNS["setting"].findall(text) if "page" in text else ():
            name, on = name.replace("-", "_"), value.lower() not in ("none", "false", "null")
            if name == "disaggregation_mode":
                self.flags |= {"decode": value == "decode", "disaggregation": on}
            elif name != "page_size":
                self.flags["speculative" if name.startswith("spec") else name] = on
            elif value.isdigit() and int(value) and "unaligned" not in text:
                self.page_sizes.pop(int(value), None)
                self.page_sizes[int(value)] = None

    def message(
        self, form: Format, found: re.Match[str], ended: bool, announced: bool
    ) -> Finding | None:
        """Return what a message means by the rule of the check behind it; None if all is well."""
        groups = {name: value for name, value in found.groupdict().items() if value is not None}
        pool, what = groups.pop("pool", form.pool), groups.pop("what", "")
        terms = {name: int(number) for name, number in groups.items()}
        if "index" in terms:  # sub-pools of a hybrid allocator
            pool = {0: "full", 1: "swa"}.get(terms.pop("index"))
        total, rest = terms.pop("total", None), found.string[found.end() :]
        absent = tuple(name for name in form.counts if name not in terms)
        finding = Finding(
            form.kind,
            pool.lower() if pool else None,
            TWICE if form.kind in ("double-free", "use-after-free", "overfull") else form.kind,
            total,
            sum(terms.values()) if form.counts else None,
            tuple(terms.items()),
            absent,
            what=what,
            format=form.name,
            released=form.releases,
        )
        if not form.counts:
            return finding
        if PATTERNS["cut_term"].match(rest):
            return Finding("unread", what=_why(found.string))
        if not rest and not ended and (absent or not found[0].endswith("=0")):
            return Finding("unread", what=_why(found.string, found[0].rpartition("=")[2]))
        slots, version = finding.difference or 0, next(reversed(self.versions), self.release)
        if form.check_adds_pre_alloc and Version(version or "1") >= Version("0.4.8"):
            if self.flags.get("decode", slots > 0):
                return replace(finding, meaning="unknown", wanted="pre_alloc_size")
        if unaligned := PATTERNS["unaligned"].search(rest):
            finding = replace(finding, what=unaligned[1].replace("'", ""), kind="unaligned")
            return replace(finding, meaning="unaligned-count", page_size=int(unaligned[2]))
        if min(terms.values()) < 0:
            return replace(finding, meaning=NEGATIVE)
        if slots:
            return replace(finding, meaning=MISSING if slots < 0 else TWICE)
        if announced and form.check_counts_protected and terms.get("protected"):
            return replace(finding, kind="lock", meaning=LOCKED)
        return None

    def count(self, finding: Finding, begin: int, announced: bool) -> None:
        """Count a finding in the line at ``begin``.

        Ranks write into one log, so that lines of one may lie between two of another: the oldest
        announcement of the same source that lacks a line is taken for the one it belongs to.
        """
        time, rank, source, own = self.origin(begin)
        self.expire(self.base + begin)
        for waiting in [] if announced else self.pending:
            theirs = waiting[2].ranks[0][0]
            if waiting[1] == source and (not own or theirs in (rank, None)):
                self.pending.remove(waiting)
                rank = rank if own else theirs
                break
        lines = (self.line_number(begin),) * 2
        key = replace(
            finding,
            terms=finding.terms if finding.total is None else (),
            version=next(reversed(self.versions), None),
            page_size=finding.page_size or next(reversed(self.page_sizes), None),
            flags=frozenset(self.flags.items()),
            lines=lines if finding.kind == "unread" else (0, 0),
        )
        old = self.seen.get(key, replace(key, terms=finding.terms, lines=lines, first=time))
        ranks = dict(old.ranks)
        ranks[rank] = ranks.get(rank, 0) + 1
        ordered = tuple(sorted(ranks.items(), key=lambda item: item[0] or ""))
        lines = (old.lines[0], lines[1])
        self.keep(
            key,
            replace(old, count=old.count + 1, last=time or old.last, lines=lines, ranks=ordered),
        )

    def keep(self, key: Finding, new: Finding) -> None:
        """Keep a finding; of those beyond ``MAX_FINDINGS`` the largest and the last of a kind."""
        if key in self.seen or len(self.seen) < MAX_FINDINGS:
            self.seen[key] = new
            return
        self.more += 1
        kind = new.kind, str(new.pool), new.meaning
        largest = self.beyond.setdefault(("largest", *kind), new)
        if abs(new.difference or 0) > abs(largest.difference or 0):
            self.beyond[("largest", *kind)] = new
        self.beyond[("last", *kind)] = new

    def expire(self, at: int) -> None:
        """Give up on announcements of which nothing came in the ``REACH_BYTES`` up to ``at``."""
        while self.pending and self.pending[0][0] < at - REACH_BYTES:
            unread = replace(self.pending.pop(0)[2], count=1)
            self.keep(unread, unread)

    def origin(self, begin: int) -> tuple[str | None, str | None, bytes, bool]:
        """Return time and rank of SGLang's nearest prefix, the line's source, if the prefix is its.

        Each line may have a time of its own in front, of kubectl or journald: SGLang's prefix with
        the rank may still be many lines above.
        """
        at, source, time, rank, found = begin, self.source(begin), None, None, None
        known = self.prefixes.get(source, (-1, None, None))
        for _ in range(LINES_BACK):
            if self.source(at) == source:
                if found := LOGGER.search(self.head(at)):
                    time, rank = found[1].decode().replace("T", " "), found[2].decode().strip()
                    break
                own = TIME.search(self.head(at))
                time = time or (own[0].decode().replace("T", " ") if own else None)
            if at <= 0 or self.base + at <= known[0]:
                time, rank = known[1] or time, known[2]
                break
            at = self.data.rfind(b"\n", 0, at - 1) + 1
        self.prefixes[source] = (self.base + begin, time, rank or None)
        return time, rank or None, source, found is not None and at == begin

    def head(self, begin: int) -> bytes:
        """Return where the prefix of a line is."""
        return self.data[begin : begin + PREFIX_BYTES].partition(b"\n")[0]

    def source(self, begin: int) -> bytes:
        """Return whose line it is, where a prefix says so."""
        found = SOURCE.search(self.head(begin))
        return found[0] if found else b""

    def line_number(self, at: int) -> int:
        """Return the number of the line that begins here, from 1; never before the last one."""
        self.newlines += self.data.count(b"\n", max(0, self.counted - self.base), at)
        self.counted = max(self.counted, self.base + at)
        return self.newlines + 1

    def raised(self, text: str, begin: int, end: int) -> str:
        """Return the last line of a traceback and the one above it; nothing if it is none."""
        if "available_size()" not in text:
            return ""
        before = self.data[self.data.rfind(b"\n", 0, max(begin - 1, 0)) + 1 : begin]
        if b'File "' not in before and b"AssertionError" not in self.data[begin : end + 200]:
            return ""
        return before.decode("utf-8", "replace") + text


def _why(text: str, number: str = "") -> str:
    """Return why nothing can be read from a message; ``number``: the one that ends the log."""
    if found := PATTERNS["separated"].search(text):
        return f"its numbers have separators ({found[1]}), and SGLang writes none"
    if number:
        whole = "if that is the whole message, end it with a newline"
        return f"the log ends in {number} without a newline, so that it may be cut off; {whole}"
    return f'cut off behind "{text.rstrip()[-40:].lstrip()}"'
