"""Which known faults of SGLang a finding fits, and what to do; all of it is in ``faults.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from packaging.specifiers import SpecifierSet

from swaleak.log_diagnosis.parser import TABLE as FORMATS
from swaleak.log_diagnosis.parser import Finding

TABLE: dict[str, Any] = tomllib.loads((files(__package__) / "faults.toml").read_text("utf-8"))


@dataclass(frozen=True, slots=True)
class Fault:
    """A public fault; ``faults.toml`` says what each field means."""

    title: str
    refs: tuple[str, ...]
    releases: str
    known: str
    where: str
    kinds: tuple[str, ...]
    meanings: tuple[str, ...]
    until: str
    pools: tuple[str, ...] = ()
    fixed: str | None = None
    together: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    paged: bool = False
    reproduce: str | None = None

    def fits(self, finding: Finding, off: Set[tuple[str, str | None]]) -> bool:
        """Whether it may explain a finding, as far as the log tells; never outside its releases."""
        flags, size, slots = dict(finding.flags), finding.page_size, finding.difference or 0
        return (
            finding.form.kind in self.kinds
            and finding.meaning in self.meanings
            and (not self.pools or finding.pool in (None, *self.pools))
            and (not self.formats or finding.form.name in self.formats)
            and all((finding.meaning, pool) in off for pool in self.together)
            and all(flags.get(need, True) for need in self.needs)
            and not (self.paged and size == 1)
            and not (size and finding.pool in ("full", "swa") and slots % size)
            and _any_in(self.releases, possible_releases(finding))
        )

    def unconfirmed(self, finding: Finding) -> tuple[str, ...]:
        """Return what it needs besides and the log does not show."""
        needs = () if self.together else self.needs
        page = ("a page size above 1",) if self.paged and not finding.page_size else ()
        return (*(need for need in needs if (need, True) not in finding.flags), *page)


def _fault(row: dict[str, Any]) -> Fault:
    fields: Any = {key: tuple(v) if isinstance(v, list) else v for key, v in row.items()}
    return Fault(**fields)


FAULTS = tuple(map(_fault, TABLE["fault"]))


@cache
def _any_in(releases: str, candidates: tuple[str, ...]) -> bool:
    return any(one in SpecifierSet(releases, True) for one in candidates)


@cache
def _printed_by(releases: str) -> tuple[str, ...]:
    return tuple(release for release in FORMATS["releases"] if _any_in(releases, (release,)))


def possible_releases(finding: Finding) -> tuple[str, ...]:
    """Return the releases a finding may be of: the log's, or those that print its wording."""
    return (finding.version,) if finding.version else _printed_by(finding.form.releases)


def known_faults(finding: Finding, off: Set[tuple[str, str | None]]) -> list[Fault]:
    """Return the faults that may fit, first those with nothing unconfirmed.

    ``off``: meaning and pool of all findings of the log.
    """
    fitting = [fault for fault in FAULTS if fault.fits(finding, off)]
    return sorted(fitting, key=lambda fault: bool(fault.unconfirmed(finding)))


def advice(finding: Finding, faults: Sequence[Fault], otherwise: str) -> str:
    """Return what to do: upgrade, or a setting; ``otherwise``: where no known fault fits."""
    steps = [otherwise] if finding.version else [otherwise, "--release X rules more faults out"]
    if not finding.page_size and finding.difference:
        steps.append("--page-size N tells whole pages from odd slots")
    rest = "; ".join(steps)
    for fault in faults[:1]:
        fix = f"upgrade to {fault.fixed} or later; until then {fault.until}"
        fix = (
            fix if fault.fixed else f"{fault.until}; no release up to 0.5.23 is known to have a fix"
        )
        rest = f"if so, {fix}. If not, {rest}" if fault.unconfirmed(finding) else fix
    return f"What to do: {rest}."
