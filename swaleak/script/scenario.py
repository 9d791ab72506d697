"""A scenario: a script, the pools it is for, and what is declared to come of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from packaging.specifiers import SpecifierSet

from swaleak.errors import UsageError
from swaleak.script.ops import Op

SCHEMA = 1
MAX_SLOTS = 2**31
MAX_PAGE_SIZE = 4096
MAX_STEPS = 100_000
REACHES = ("production", "latent")
STRATEGIES = ("eager", "deferred", "enqueue", "barrier")
VERDICTS = ("clean", "leak", "corrupt", "refused", "error")
KINDS = ("leak", "lost", "stale", "dangling", "double-free", "reserved", "shared", "misaligned")

_WORDS = {"==": "", ">=": "from ", ">": "after ", "<": "before ", "<=": "up to ", "!=": "not "}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run is declared to come out as; what is ``None`` or empty is not declared."""

    verdict: str
    physical: int | None = None
    mapped: int | None = None
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Known:
    """Releases in which SGLang as shipped is known to fail.

    ``fixed``: the first release that does not (else read off ``versions``). ``fix``: the pull
    request that mended it.
    """

    versions: SpecifierSet
    outcome: Outcome
    page_sizes: tuple[int, ...] = ()
    fixed: str | None = None
    fix: str | None = None

    def covers(self, version: str, page_size: int) -> bool:
        """Say whether this failure is known for ``version`` at ``page_size``."""
        sized = not self.page_sizes or page_size in self.page_sizes
        return sized and self.versions.contains(version, prereleases=True)

    @property
    def when(self) -> str:
        """``fixed in 0.5.19``, as far as a release has it."""
        ends = [spec.version for spec in self.versions if spec.operator == "<"]
        fixed = self.fixed or next(iter(ends), None)
        if fixed:
            return f"fixed in {fixed}"
        return f"known {'in ' if self.releases[:1].isdigit() else ''}{self.releases}"

    @property
    def releases(self) -> str:
        """``from 0.5.18, before 0.5.19``, or ``0.5.18``."""
        specs = sorted(self.versions, key=lambda spec: (spec.operator in ("<", "<="), spec.version))
        return ", ".join(_WORDS.get(spec.operator, spec.operator) + spec.version for spec in specs)

    def __str__(self) -> str:
        """Return ``fixed in 0.5.19, #36381``."""
        return ", ".join([self.when] + ([self.fix] if self.fix else []))


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scripted case. ``full_pages`` and ``swa_pages`` are pool sizes, without page 0."""

    name: str
    title: str
    steps: tuple[Op, ...]
    reach: str = "production"
    story: str = ""
    upstream: tuple[str, ...] = ()
    full_pages: int = 8
    swa_pages: int = 8
    page_sizes: tuple[int, ...] = (1, 4, 256)
    expect: dict[str, Outcome] = field(default_factory=dict)
    known: tuple[Known, ...] = ()
    source: str = ""

    def declared(self, strategy: str) -> Outcome:
        """Return what this scenario declares for one of our strategies."""
        return self.expect.get(strategy) or self.expect.get("every") or Outcome("clean")

    def known_failure(self, version: str | None, page_size: int) -> Known | None:
        """Return what is known to fail here in SGLang ``version`` as shipped."""
        if version is None:
            return None
        return next((known for known in self.known if known.covers(version, page_size)), None)


def check_page_size(size: int) -> None:
    """Raise ``UsageError`` for a page size, in slots, that no pool can have."""
    if not 1 <= size <= MAX_PAGE_SIZE:
        raise UsageError(f"page size {size}: must be from 1 to {MAX_PAGE_SIZE}")
