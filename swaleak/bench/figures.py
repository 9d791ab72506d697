"""Rounds -> figures: medians, and their ratios with bootstrapped intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swaleak.bench.cases import MIN_SAMPLES, Shape
from swaleak.bench.clock import Sample
from swaleak.bench.rounds import Round

RESAMPLES = 2000  # of the bootstrap
CHUNK = 2**21  # resampled values looked at together


@dataclass(frozen=True, slots=True)
class Timing:
    """A median, in microseconds, and its ratio to the baseline's with a 95 % interval."""

    us: float
    ratio: float
    low: float
    high: float

    @property
    def noise(self) -> float:
        """Of the baseline against itself: the largest difference that may be there, as a part."""
        return max(abs(self.low - 1), abs(self.high - 1))

    def verdict(self, noise: float) -> str:
        """``within noise``, or the difference in per cent."""
        if self.low <= 1 + noise and self.high >= 1 - noise:
            return "within noise"
        return f"{self.ratio - 1:+.1%}".replace("%", " %")


@dataclass(frozen=True, slots=True)
class Result:
    """One case, measured. ``audits``: a verdict for each contestant.

    ``wall``, ``gpu``: for each contestant, and last for the baseline's second self.
    """

    shape: Shape
    samples: int
    audits: tuple[str, ...]
    wall: tuple[Timing, ...]
    gpu: tuple[Timing, ...] | None


def results(rounds: Iterable[Round], seed: int) -> tuple[Result, ...]:
    """Return figures for every case of which there are ``MIN_SAMPLES`` rounds or more."""
    by_shape: dict[Shape, list[Round]] = {}
    for one in rounds:
        if one.counted:
            by_shape.setdefault(one.shape, []).append(one)
    return tuple(
        _result(shape, same, seed) for shape, same in by_shape.items() if len(same) >= MIN_SAMPLES
    )


def _result(shape: Shape, rounds: Sequence[Round], seed: int) -> Result:
    def times(read: Callable[[Sample], int | None]) -> Tensor:
        table = [[read(sample) for sample in one.samples] for one in rounds]
        return torch.tensor(table, dtype=torch.float64).T / 1000  # to microseconds

    on_gpu = rounds[0].samples[0].gpu is not None
    return Result(
        shape,
        len(rounds),
        rounds[0].audits,
        compare(times(lambda sample: sample.wall), seed),
        compare(times(lambda sample: sample.gpu), seed) if on_gpu else None,
    )


def compare(times: Tensor, seed: int) -> tuple[Timing, ...]:
    """Compare medians. ``times``: float64[contestants, rounds], microseconds, baseline first.

    The intervals are bootstrapped, 95 %, by drawing whole rounds: contestants that stood side by
    side in a slow moment stay side by side.
    """
    count, rounds = times.shape
    generator = torch.Generator().manual_seed(seed)
    drawn = times.new_empty(count, RESAMPLES)
    step = max(1, CHUNK // rounds)
    for start in range(0, RESAMPLES, step):
        size = (min(step, RESAMPLES - start), rounds)
        chosen = torch.randint(rounds, size, generator=generator)
        for i in range(count):
            drawn[i, start : start + step] = times[i][chosen].median(dim=1).values
    medians = times.median(dim=1).values
    bounds = torch.quantile(drawn / drawn[0], times.new_tensor([0.025, 0.975]), dim=1)
    return tuple(
        Timing(median, median / medians[0].item(), low, high)
        for median, low, high in zip(medians.tolist(), *bounds.tolist(), strict=True)
    )
