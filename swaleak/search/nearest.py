"""What in the catalogue a failure is like: the same outcome by the same kind of operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swaleak.check.case import run_case
from swaleak.check.replay import Run
from swaleak.script import ops
from swaleak.script.ops import Op
from swaleak.script.scenario import Scenario
from swaleak.search.witness import Witness
from swaleak.target import Target

# operations that give a node other slots than it had, or a queued free other indices
REPOINTING = (ops.Recover, ops.Adopt, ops.Replace, ops.LoadBack, ops.Overwrite)


class Way(NamedTuple):
    """How something fails: the verdict, kind and pool of each violation, re-pointing operations."""

    verdict: str
    violations: frozenset[tuple[str, str | None]]
    pointed: frozenset[str]


@dataclass(frozen=True, slots=True)
class Example:
    """A scenario of the catalogue, and how it fails where the search was."""

    scenario: str
    steps: tuple[Op, ...]
    way: Way


@dataclass(frozen=True, slots=True)
class Likeness:
    """The nearest scenario. ``same``: it fails in the same way, and not only by the same cause."""

    scenario: str
    same: bool


def examples(
    catalogue: Iterable[Scenario], target: Target, strategy: str, page_size: int
) -> list[Example]:
    """Return the scenarios of ``catalogue`` that fail there, in its order."""
    ran = [
        (scenario, run_case(scenario, target, strategy, page_size).run)
        for scenario in catalogue
        if page_size >= min(scenario.page_sizes)
    ]
    return [Example(s.name, s.steps, _way(s.steps, run)) for s, run in ran if _is_told(run)]


def nearest(found: Witness, among: Iterable[Example]) -> Likeness | None:
    """Return the example that fails most like ``found``, None where none does.

    Considered are those with the same verdict and the same re-pointing operations, of which there
    is one; those with the same violations come first, then those that differ in the fewest
    operations.
    """
    if not _is_told(found.run):
        return None
    way = _way(found.order, found.run)
    alike = [
        example
        for example in among
        if (example.way.verdict, example.way.pointed) == (way.verdict, way.pointed)
        and way.pointed
        and example.way.violations & way.violations
    ]
    closest = min(
        alike,
        key=lambda one: (one.way != way, _apart(one.steps, found.order)),
        default=None,
    )
    return Likeness(closest.scenario, closest.way == way) if closest else None


def _is_told(run: Run) -> bool:
    """Whether a run disagrees with the ledger; what only raised says nothing of how it is like."""
    return bool(run.audit.violations)


def _way(order: Sequence[Op], run: Run) -> Way:
    violations = frozenset((v.kind, v.pool) for v in run.audit.violations)
    pointed = frozenset(op.key for op in order if isinstance(op, REPOINTING))
    return Way(run.verdict, violations, pointed)


def _apart(one: Sequence[Op], other: Sequence[Op]) -> int:
    counts, others = (Counter(op.key for op in order) for order in (one, other))
    return sum(((counts - others) + (others - counts)).values())
