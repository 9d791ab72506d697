"""What a log can say of its pools, and the faults that are known to make it say so."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

MISSING, TWICE = "missing", "counted-twice"
SIX_FIELDS = SpecifierSet(">=0.5.12.dev0")  # those write every term there is into every sum
PAGE_SIZES = frozenset(2**i for i in range(13))


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
        "deferred resolve, 0.5.18: a page freed in a free group is looked up only when the group "
        "ends; if its owner has a newer page by then, that one goes and the old one is lost",
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
    """One message, however often it came, and from whichever ranks.

    ``kind``: ``sum`` (a pool does not add up), ``double-free``, ``use-after-free`` or ``overfull``
    (more is free than there is). ``pool``: None where the message does not say. ``total``,
    ``accounted``: slots. ``terms``: what the message counts, as it first came. ``absent``: what it
    does not count, though some release does. ``page_size``, ``version``: what the log named.
    ``first``, ``last``: times as the log writes them. ``lines``: where it came first and last.
    ``ranks``: how often it came from each, None where the log does not say.
    """

    kind: str
    pool: str | None
    meaning: str
    total: int | None = None
    accounted: int | None = None
    terms: tuple[tuple[str, int], ...] = ()
    absent: tuple[str, ...] = ()
    page_size: int | None = None
    version: str | None = None
    count: int = 1
    first: str | None = None
    last: str | None = None
    lines: tuple[int, int] = (0, 0)
    ranks: tuple[tuple[str | None, int], ...] = ()

    @property
    def doubtful(self) -> tuple[str, ...]:
        """What is not counted, and should be: the message may have been cut off."""
        if self.version and not SIX_FIELDS.contains(self.version, prereleases=True):
            return self.absent if "protected" in self.absent else ()
        return self.absent

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
class Unread:
    """A message that is there, and that nothing can be worked out from. ``line``: of the log."""

    line: int
    why: str
    rank: str | None = None
    time: str | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a log holds. ``dumps``: pool lines left out, because a running batch is not in them.

    ``size``: bytes of the file. ``kinds``: what it was packed and written in. ``torn``: the packing
    ends too early. ``more``: messages beyond the number of findings that are told apart.
    ``unread``: messages that could not be read, the first of ``unread_count``. ``unused``: a page
    size that was given, though the log names another.
    """

    findings: tuple[Finding, ...]
    size: int
    versions: tuple[str, ...]
    page_sizes: tuple[int, ...]
    dumps: int = 0
    more: int = 0
    kinds: tuple[str, ...] = ()
    torn: bool = False
    unread: tuple[Unread, ...] = ()
    unread_count: int = 0
    unused: int | None = None
