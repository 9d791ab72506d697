"""What is measured: the cases, and how often and with what in a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from swaleak.errors import UsageError
from swaleak.script.scenario import MAX_SLOTS, MAX_STEPS, check_page_size
from swaleak.target import Sizes

MIN_SAMPLES = 20  # fewer say nothing about a median


@dataclass(frozen=True, slots=True)
class Shape:
    """One case: a group of ``calls`` calls of ``free_swa``, each naming ``pages`` whole pages."""

    page_size: int
    calls: int
    pages: int

    def __str__(self) -> str:
        return f"page size {self.page_size}, calls {self.calls}, pages {self.pages}"

    @property
    def sizes(self) -> Sizes:
        """Pools that hold the group's pages, a recovery's, and as many free ones."""
        pages = 2 * (self.calls + 1) * self.pages
        return Sizes(pages, pages, self.page_size)


PUBLISHED = tuple(
    Shape(*numbers)
    for numbers in (
        (256, 1, 1),
        (256, 8, 1),
        (256, 8, 16),
        (256, 64, 1),
        (1, 1, 1),
        (1, 8, 1),
        (1, 64, 1),
    )
)


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure.

    ``whole``: with the physical release. ``recover``: with a recovery a group. ``segment``: through
    ``free_swa_segment``, as SGLang's caches do from 0.5.20 on; ``free_swa`` where there is none.
    """

    warmup: int = 50
    samples: int = 500
    whole: bool = False
    recover: bool = False
    segment: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < MIN_SAMPLES:
            raise UsageError(
                f"--samples {self.samples}: too few to say anything, {MIN_SAMPLES} are the least"
            )


def shapes(
    page_sizes: Sequence[int] | None, calls: Sequence[int] | None, pages: Sequence[int] | None
) -> tuple[Shape, ...]:
    """Return the published cases or, if anything is asked for, every combination.

    What is not asked for is then 256 and 1 slots a page, 1, 8 and 64 calls, 1 page a call. Raises
    ``UsageError`` for a size over the limits.
    """
    if not (page_sizes or calls or pages):
        return PUBLISHED
    asked = product(page_sizes or (256, 1), calls or (1, 8, 64), pages or (1,))
    chosen = tuple(dict.fromkeys(Shape(*numbers) for numbers in asked))
    for shape in chosen:
        if shape.calls > MAX_STEPS:
            raise UsageError(f"{shape.calls} calls: at most {MAX_STEPS} in a group")
        check_page_size(shape.page_size)
        if shape.sizes.full_pages * shape.page_size > MAX_SLOTS:
            raise UsageError(
                f"{shape.calls} calls of {shape.pages} pages of {shape.page_size} slots are over "
                f"the limit of {MAX_SLOTS} slots a pool"
            )
    return chosen
