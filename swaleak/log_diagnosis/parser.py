"""Reads a log as a stream: blocks are searched for a few words, and only lines with one are read.

What the messages look like and what they count is in ``formats.toml``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, BinaryIO

from packaging.version import Version

from swaleak.log_diagnosis.log_text import LogText

MISSING, TWICE = "missing", "counted-twice"
KEPT_BYTES = 2**16  # before a block, to find the time and the rank of a message in
WINDOW_BYTES = 2**12  # of a very long line, on either side of a word
REACH_BYTES = 2**14  # behind an announcement in which the rest of the message is looked for
PREFIX_BYTES = 400  # of a line, for its time and rank
LINES_BACK = 300
MAX_FINDINGS = 4_000

# word -> a byte without which a block cannot hold it: one byte is found ten times as fast
WORDS = {
    **dict.fromkeys((b"able", b"cur_batch", b"recomputed"), b"="),
    **{b"etected!": b"!", b"page": b"", b"lang": b""},
}
TABLE: dict[str, Any] = tomllib.loads((files(__package__) / "formats.toml").read_text("utf-8"))
PATTERNS = {name: re.compile(regex) for name, regex in TABLE["patterns"].items()}
TIME, LOGGER, SOURCE = (re.compile(regex.encode()) for regex in TABLE["line_patterns"].values())


@dataclass(frozen=True, slots=True)
class Format:
    """A wording; ``formats.toml`` says what each field means."""

    name: str = ""
    releases: str = ""
    kind: str = "unread"
    template: str = ""
    regex: str = ""
    pool: str | None = None
    counts: tuple[str, ...] = ()
    begins: str = "(?!)"
    check_counts_protected: str = ""
    check_adds_pre_alloc: str = ""
    unprinted: str = ""


@cache
def pattern(form: Format) -> re.Pattern[str]:
    """Return the regular expression of a format's template."""
    parts: list[str] = []
    for literal, name, mark in re.findall(r"([^{}<>]+)|\{(\w+)\}|([<>])", form.template):
        blanks = re.sub(r"(?:\\ )+", r"\\s+", re.escape(literal)).replace("!", r"!\s*")
        part = TABLE["pool"] if name == "pool" else f"(?P<{name}>{TABLE['number']})"
        part = part if part not in parts else f"(?P={name})"
        parts.append(part if name else {"<": "(?:", ">": ")?"}.get(mark, blanks))
    return re.compile(form.regex or "(?<![A-Za-z_])" + "".join(parts))


FORMATS = tuple(
    Format(**{**row, "counts": tuple(row.get("counts", ()))}) for row in TABLE["format"]
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One message, however often it came and from whichever ranks.

    ``what``: what it says in words, or why it cannot be read. ``absent``: terms that its format has
    and it lacks. ``wanted``: the figure without which the difference is not known. ``version``,
    ``page_size``, ``flags``: what the log says of the server. ``ranks``: how often from each.
    """

    form: Format
    pool: str | None = None
    meaning: str = ""
    total: int | None = None
    accounted: int | None = None
    terms: tuple[tuple[str, int], ...] = ()
    absent: tuple[str, ...] = ()
    wanted: str | None = None
    what: str = ""
    version: str | None = None
    page_size: int | None = None
    flags: frozenset[tuple[str, bool]] = frozenset()
    count: int = 1
    first: str | None = None
    last: str | None = None
    lines: tuple[int, int] = (0, 0)
    ranks: tuple[tuple[str | None, int], ...] = ()

    @property
    def difference(self) -> int | None:
        """Slots accounted for, less the slots that exist; None if not known."""
        known = self.total is not None and self.accounted is not None and not self.wanted
        return self.accounted - self.total if known else None  # type: ignore[operator]

    @property
    def pages(self) -> dict[int, int]:
        """The difference in pages by each page size that divides it, the largest size first."""
        if self.form.kind == "double-free" and self.page_size:
            return {self.page_size: dict(self.terms).get("pages", 0)}
        of_pages = self.meaning in (MISSING, TWICE) and self.pool in ("full", "swa", None)
        slots = self.difference if of_pages else None
        sizes = {2**i for i in range(13)} | ({self.page_size} if self.page_size else set())
        return {n: slots // n for n in sorted(sizes, reverse=True) if slots and slots % n == 0}


class Diagnosis:
    """What a log holds, as far as it has been read.

    ``versions``, ``page_sizes``: of the server, the last one said comes last. ``dumps``: sums of a
    watchdog that differ because a batch was running; ``batch``: its requests. ``more``: messages
    beyond ``MAX_FINDINGS``. ``unused``: options that the log contradicts. ``size``: bytes.
    """

    def __init__(self, release: str | None = None) -> None:
        self.release, self.kinds, self.truncated = release, list[str](), False
        self.versions, self.page_sizes = dict[str, None](), dict[int, None]()
        self.findings, self.unread, self.unused = list[Finding](), list[Finding](), list[str]()
        self.flags, self.extra_slots, self.batch = dict[str, bool](), 0, 0
        # ``data`` is a window of the log that starts ``base`` bytes into it, read up to ``done``;
        # there are ``newlines`` in the first ``counted`` bytes of the log
        self.data = b""
        self.base = self.done = self.counted = self.newlines = self.dumps = self.more = 0
        # where in ``data`` the log ends, if within a line; where in the log a line with a sum ended
        self.open_end = self.sum_end = -1
        # where in the log a watchdog's dump and an announcement were last seen
        self.dump_at = self.announced_at = -REACH_BYTES - 1
        self.seen: dict[Finding, Finding] = {}
        # announcements of which no pool that is off was seen yet: place, source, finding
        self.pending: list[tuple[int, bytes, Finding]] = []
        # source of lines -> place, time and rank that were last found
        self.prefixes: dict[bytes, tuple[int, str | None, str | None]] = {}

    @property
    def size(self) -> int:
        """Bytes of the log's text."""
        return self.base + len(self.data)

    def feed(self, block: bytes) -> None:
        """Read up to the end of the last whole line."""
        self.data += block
        limit = self.data.rfind(b"\n", self.done) + 1
        if not limit and len(self.data) - self.done > 2**20:  # a line longer than any message
            limit = len(self.data) - WINDOW_BYTES
        if limit:
            self.read_to(limit)

    def finish(self, page_size: int | None) -> None:
        """Read the rest, and give every finding what the log says but once."""
        if self.data and not self.data.endswith(b"\n"):
            self.open_end = len(self.data)
            self.data += b"\n"
        self.read_to(len(self.data), [self.open_end - 1] if self.open_end > 0 else [])
        self.expire(self.size + REACH_BYTES + 1)
        version = next(iter(self.versions)) if len(self.versions) == 1 else self.release
        size = next(iter(self.page_sizes)) if len(self.page_sizes) == 1 else page_size
        for f in self.seen.values():
            told = replace(f, version=f.version or version, page_size=f.page_size or size)
            (self.findings if f.meaning else self.unread).append(told)
        self.unread.sort(key=lambda f: f.lines)
        self.unused_option("--release", self.release, [*self.versions])
        self.unused_option("--page-size", page_size, [*self.page_sizes])

    def unused_option(self, option: str, value: object, said: Sequence[object]) -> None:
        """Note an option that the log contradicts."""
        if value and {*said} - {value}:
            names = ", ".join(map(str, said))
            self.unused.append(f"{option} {value} is not used: the log names {names}.")

    def read_to(self, limit: int, more: list[int] | None = None) -> None:
        """Read ``data`` up to ``limit``, then forget all but what a time may be found in."""
        for at in sorted([*self.places(limit), *(more or [])]):
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
        if PATTERNS["continued"].search(text) and self.done < len(self.data):
            self.line(self.done)

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
        announced = PATTERNS["announced" if ended else "announced_or_cut"].search(text) is not None
        if announced:
            self.announced_at, self.dump_at = here, -REACH_BYTES - 1
        dumped, near = here - self.dump_at <= REACH_BYTES, here - self.announced_at <= REACH_BYTES
        told, sums, covered = False, False, 0
        above = self.data[self.data.rfind(b"\n", 0, max(begin - 1, 0)) + 1 : begin]
        for form in FORMATS:
            raised = form.kind == "overfull" and "available_size()" in text
            where = above.decode("utf-8", "replace") + text if raised else text
            found = pattern(form).search(where, 0 if raised else covered)
            while found and not (raised and told):
                covered = found.end()
                sums |= form.kind == "sum"
                finding = self.message(form, found, ended, near)
                if finding and dumped and form.kind == "sum":
                    self.dumps += 1
                elif finding:
                    told = True
                    self.count(finding, begin, announced)
                found = pattern(form).search(where, covered)
            if not (sums or told) and re.search(form.begins, text):
                told = True
                if not dumped and "[Mem Check" not in text:
                    self.count(_unread(text), begin, announced)
        # in 2024 the announcement came behind the sum
        if announced and not told and not ("KV cache" in text and self.sum_end == here):
            time, rank, source, _ = self.origin(begin)
            lines = (self.line_number(begin),) * 2
            unread = replace(_unread(text, balanced=sums), first=time, lines=lines)
            self.pending.append((here, source, replace(unread, ranks=((rank, 1),))))
        self.sum_end = self.base + end + 1 if sums else self.sum_end

    def settings(self, text: str) -> None:
        """Take note of the release and the server's options."""
        for version in PATTERNS["version"].findall(text):
            self.versions.pop(version, None)
            self.versions[version] = None
        for name, value in (
            PATTERNS["setting"].findall(text) if "page" in text or "--" in text else ()
        ):
            name, on = name.replace("-", "_"), value.lower() not in ("none", "false", "null")
            if name == "disaggregation_decode_extra_slots":
                self.extra_slots = int(value) if value.isdigit() else 0
            elif name == "disaggregation_mode":
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
        meaning = TWICE if form.kind in ("double-free", "use-after-free", "overfull") else form.kind
        finding = Finding(form, pool.lower() if pool else None, meaning, total, what=what)
        finding = replace(finding, terms=tuple(terms.items()))
        if not form.counts:
            return finding
        absent = tuple(name for name in form.counts if name not in terms)
        if PATTERNS["cut_term"].match(rest):
            return _unread(found.string)
        if not rest and not ended and (absent or not found[0].endswith("=0")):
            return _unread(found.string, number=found[0].rpartition("=")[2])
        finding = replace(finding, accounted=sum(terms.values()), absent=absent)
        slots, version = finding.difference or 0, next(reversed(self.versions), self.release)
        if form.check_adds_pre_alloc and Version(version or "1") >= Version("0.4.8"):
            if self.flags.get("decode", slots > 0) and not self.extra_slots:
                return replace(finding, meaning="unknown", wanted="pre_alloc_size")
            more = self.extra_slots if self.flags.get("decode") else 0
            finding, slots = replace(finding, total=(total or 0) + more), slots - more
        if unaligned := PATTERNS["unaligned"].search(rest):
            finding = replace(finding, what=unaligned[1].replace("'", ""))
            return replace(finding, meaning="unaligned-count", page_size=int(unaligned[2]))
        if min(terms.values()) < 0:
            return replace(finding, meaning="negative-count")
        if slots:
            return replace(finding, meaning=MISSING if slots < 0 else TWICE)
        locked = announced and form.check_counts_protected and terms.get("protected")
        return replace(finding, meaning="never-unlocked") if locked else None

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
        line = self.line_number(begin)
        key = replace(
            finding,
            terms=finding.terms if finding.total is None else (),
            version=next(reversed(self.versions), None),
            page_size=finding.page_size or next(reversed(self.page_sizes), None),
            flags=frozenset(self.flags.items()),
            lines=(0, 0) if finding.meaning else (line, line),
        )
        old = self.seen.get(
            key, replace(key, terms=finding.terms, count=0, first=time, lines=(line, line))
        )
        ranks = dict(old.ranks)
        ranks[rank] = ranks.get(rank, 0) + 1
        new = replace(old, count=old.count + 1, last=time or old.last, lines=(old.lines[0], line))
        in_order = tuple(sorted(ranks.items(), key=lambda item: item[0] or ""))
        self.keep(key, replace(new, ranks=in_order))

    def keep(self, key: Finding, new: Finding) -> None:
        """Keep a finding, if there are not too many."""
        if key in self.seen or len(self.seen) < MAX_FINDINGS:
            self.seen[key] = new
        else:
            self.more += 1

    def expire(self, at: int) -> None:
        """Give up on announcements of which nothing came in the ``REACH_BYTES`` up to ``at``."""
        while self.pending and self.pending[0][0] < at - REACH_BYTES:
            unread = self.pending.pop(0)[2]
            self.keep(unread, unread)

    def origin(self, begin: int) -> tuple[str | None, str | None, bytes, bool]:
        """Return time and rank of SGLang's nearest prefix, the line's source, if the prefix is its.

        Each line may have a time of its own in front, of kubectl or journald: SGLang's prefix with
        the rank may still be many lines above.
        """
        at, time, rank, found = begin, None, None, None
        source = self.prefix(begin)[1]
        known = self.prefixes.get(source, (-1, None, None))
        for _ in range(LINES_BACK):
            head, whose = self.prefix(at)
            if whose == source:
                if found := LOGGER.search(head):
                    time, rank = found[1].decode().replace("T", " "), found[2].decode().strip()
                    break
                own = TIME.search(head)
                time = time or (own[0].decode().replace("T", " ") if own else None)
            if at <= 0 or self.base + at <= known[0]:
                time, rank = known[1] or time, known[2]
                break
            at = self.data.rfind(b"\n", 0, at - 1) + 1
        self.prefixes[source] = (self.base + begin, time, rank or None)
        return time, rank or None, source, found is not None and at == begin

    def prefix(self, begin: int) -> tuple[bytes, bytes]:
        """Return where the prefix of a line is, and whose line it is, where that says so."""
        head = self.data[begin : begin + PREFIX_BYTES].partition(b"\n")[0]
        found = SOURCE.search(head)
        return head, found[0] if found else b""

    def line_number(self, at: int) -> int:
        """Return the number of the line that begins here, from 1; never before the last one."""
        self.newlines += self.data.count(b"\n", max(0, self.counted - self.base), at)
        self.counted = max(self.counted, self.base + at)
        return self.newlines + 1


def _unread(text: str, number: str = "", balanced: bool = False) -> Finding:
    """Return a message that cannot be read, and why. ``number``: the one that ends the log."""
    why = f'cut off behind "{text.rstrip()[-40:].lstrip()}"'
    if found := PATTERNS["separated"].search(text):
        why = f"its numbers have separators ({found[1]}), and SGLang writes none"
    elif balanced:
        why = "the pool that it names adds up, and no line of another pool is behind it"
    elif number:
        why = f"the log ends in {number} without a newline, so that it may be cut off; if that is "
        why += "the whole message, end it with a newline"
    return Finding(Format(), what=why)


def diagnose(log: BinaryIO, page_size: int | None = None, release: str | None = None) -> Diagnosis:
    """Read a log to its end; the options stand in for what the log does not say.

    Raises ``OSError`` if it cannot be read, or is packed with anything but gzip.
    """
    text, diagnosis = LogText(log), Diagnosis(release)
    for block in text:
        diagnosis.feed(block)
    diagnosis.finish(page_size)
    diagnosis.kinds, diagnosis.truncated = text.kinds, text.truncated
    return diagnosis
