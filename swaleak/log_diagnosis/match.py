"""Which known faults of SGLang a finding fits, and what to do; the faults are in ``faults.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
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
    scenario: str | None = None
    on: str | None = None

    @property
    def command(self) -> str | None:
        """What replays it."""
        replay = f"swaleak repro {self.scenario} --strategy shipped --on {self.on}"
        return replay if self.scenario else None

    def fits(self, finding: Finding, findings: Sequence[Finding]) -> bool:
        """Whether it explains a finding, as far as the log tells; never outside its releases."""
        flags, size, slots = dict(finding.flags), finding.page_size, finding.difference or 0
        off = {f.pool for f in findings if f.meaning == finding.meaning}
        return (
            finding.form.kind in self.kinds
            and finding.meaning in self.meanings
            and (not self.pools or finding.pool in (None, *self.pools))
            and (not self.formats or finding.form.name in self.formats)
            and off.issuperset(self.together)
            and all(flags.get(need, True) for need in self.needs)
            and not (self.paged and size == 1)
            and not (size and finding.pool != "mamba" and slots % size)
            and any(one in SpecifierSet(self.releases, True) for one in possible_releases(finding))
        )


FAULTS = tuple(
    Fault(**{key: tuple(v) if isinstance(v, list) else v for key, v in row.items()})
    for row in TABLE["fault"]
)


def possible_releases(finding: Finding) -> tuple[str, ...]:
    """Return the releases a finding may be of: the log's, or those that print its wording."""
    if finding.version:
        return (finding.version,)
    printed = SpecifierSet(finding.form.releases, True)
    return tuple(release for release in FORMATS["releases"] if release in printed)


def known_faults(finding: Finding, findings: Sequence[Finding]) -> tuple[Fault, ...]:
    """Return the faults that fit, first those whose conditions the log confirms."""
    flags = dict(finding.flags)
    fitting = (fault for fault in FAULTS if fault.fits(finding, findings))
    return tuple(sorted(fitting, key=lambda f: not (f.together or any(map(flags.get, f.needs)))))


def advice(finding: Finding, faults: Sequence[Fault], otherwise: str) -> str:
    """Return what to do: upgrade, or a setting; ``otherwise``: where no known fault fits."""
    if faults and faults[0].fixed:
        return f"upgrade to {faults[0].fixed} or later; until then {faults[0].until}."
    if faults:
        return f"no release up to 0.5.23 is known to have a fix; {faults[0].until}."
    steps = [otherwise]
    if not finding.version:
        steps.append("--release X rules more faults in or out")
    if not finding.page_size and finding.difference:
        steps.append("--page-size N tells whole pages from odd slots")
    return "; ".join(steps) + "."
