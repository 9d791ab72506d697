"""Rounds -> figures: medians, and their ratios to the baseline's with bootstrapped intervals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from swaleak.benchmark.measure import Case, Round

MIN_SAMPLES = 20  # fewer say nothing about a median
RESAMPLES = 2000  # of the bootstrap


@dataclass(frozen=True, slots=True)
class Timing:
    """A median, in microseconds, and its ratio to the baseline's with a 95 % interval."""

    us: float
    ratio: float
    low: float
    high: float

    @property
    def noise(self) -> float:
        """Of the baseline against itself: the largest relative difference in its interval."""
        return max(abs(self.low - 1), abs(self.high - 1))

    def verdict(self, noise: float) -> str:
        """``within noise``, or the difference in per cent."""
        if self.low <= 1 + noise and self.high >= 1 - noise:
            return "within noise"
        return f"{self.ratio - 1:+.1%}".replace("%", " %")


@dataclass(frozen=True, slots=True)
class Result:
    """One case, measured. ``verdicts``: one per contestant.

    ``timings``: per clock, ``gpu`` if there is one and ``wall``: one per contestant, and last the
    baseline's second one.
    """

    case: Case
    samples: int
    verdicts: tuple[str, ...]
    timings: dict[str, tuple[Timing, ...]]


def results(rounds: Iterable[Round], seed: int) -> tuple[Result, ...]:
    """Return figures for every case of which there are ``MIN_SAMPLES`` rounds or more."""
    by_case: dict[Case, list[Round]] = {}
    for one in rounds:
        if one.counted:
            by_case.setdefault(one.case, []).append(one)
    return tuple(
        Result(case, len(same), same[0].verdicts, _timings(same, seed))
        for case, same in by_case.items()
        if len(same) >= MIN_SAMPLES
    )


def _timings(rounds: list[Round], seed: int) -> dict[str, tuple[Timing, ...]]:
    found = {}
    for clock in ("gpu", "wall"):
        table = [[getattr(sample, clock) for sample in one.samples] for one in rounds]
        if table[0][0] is not None:
            # a candidate's module may have set a default device
            times = torch.tensor(table, dtype=torch.float64, device="cpu")
            found[clock] = compare(times.T / 1000, seed)  # to microseconds
    return found


def compare(times: Tensor, seed: int) -> tuple[Timing, ...]:
    """Compare medians. ``times``: float64[contestants, rounds], microseconds, baseline first.

    The 95 % intervals are bootstrapped by drawing whole rounds, so that contestants measured in one
    slow moment stay together.
    """
    rounds = times.shape[1]
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.stack(
        [
            times[:, torch.randint(rounds, (rounds,), generator=generator, device="cpu")]
            .median(dim=1)
            .values
            for _ in range(RESAMPLES)
        ]
    )
    medians = times.median(dim=1).values
    bounds = torch.quantile(drawn / drawn[:, :1], times.new_tensor([0.025, 0.975]), dim=0)
    return tuple(
        Timing(median, median / medians[0].item(), low, high)
        for median, low, high in zip(medians.tolist(), *bounds.tolist(), strict=True)
    )
