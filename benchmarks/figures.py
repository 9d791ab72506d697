"""What the benchmarks have in common: paired turns, ratios, and the table they are shown in."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from swaleak.report.bench import machine_facts

Name = TypeVar("Name")
Seen = TypeVar("Seen")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure beside its baseline. ``ratios``: figure to baseline, one a turn.

    ``figure`` and ``baseline`` say the medians, with units; ``measured`` and ``against`` what
    they are of.
    """

    measured: str
    figure: str
    against: str
    baseline: str
    ratios: tuple[float, ...]

    def cells(self) -> tuple[str, ...]:
        """Return the row as it is printed."""
        low, middle, high = spread(self.ratios)
        ratio = f"{middle:.2f} ({low:.2f}..{high:.2f})"
        return self.measured, self.figure, f"{self.against}: {self.baseline}", ratio


@dataclass(frozen=True, slots=True)
class Figures:
    """What one part of the benchmarks has found. ``note``: what it was measured on, and how.

    ``details``: rows that say the same more finely.
    """

    rows: tuple[Row, ...]
    note: str
    details: tuple[Row, ...] = ()

    def as_data(self) -> dict[str, Any]:
        """Return it as JSON takes it, for a part that runs under another interpreter."""
        return asdict(self)

    @classmethod
    def of_data(cls, data: dict[str, Any]) -> Figures:
        """The reverse of ``as_data``."""

        def rows(name: str) -> tuple[Row, ...]:
            return tuple(Row(**{**row, "ratios": tuple(row["ratios"])}) for row in data[name])

        return cls(rows("rows"), data["note"], rows("details"))


def take_turns(
    run: Callable[[Name], Seen], names: Sequence[Name], turns: int
) -> dict[Name, list[Seen]]:
    """Run every name once a turn, in an order that changes, so that a busy machine is fair to all.

    One more turn comes first and is thrown away, since it fills caches; a single turn, which shows
    that a benchmark works and measures nothing, does without.
    """
    seen: dict[Name, list[Seen]] = {name: [] for name in names}
    for _ in range(turns if turns == 1 else turns + 1):
        for name in random.sample(names, len(names)):
            seen[name].append(run(name))
    return {name: found[-turns:] for name, found in seen.items()}


def ratios(seen: Sequence[float], base: Sequence[float]) -> tuple[float, ...]:
    """Return the ratio within each turn."""
    return tuple(a / b for a, b in zip(seen, base, strict=True))


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def environment() -> str:
    """Return the versions and the machine that figures were taken with."""
    machine = machine_facts("cpu")
    return ", ".join([f"torch {torch.__version__}", *(fact for fact in machine.values() if fact)])


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table, line by line."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines)]


def markdown(figures: Figures) -> str:
    """Return what one part has found, as a page."""
    head = ("measured", "figure", "baseline", "ratio")
    lines = table(head, [row.cells() for row in (*figures.rows, *figures.details)])
    return "\n".join([*lines, "", figures.note])
