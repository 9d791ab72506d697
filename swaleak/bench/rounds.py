"""The measuring: rounds in which each contestant has one turn, and what it needs around it."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from swaleak.bench.cases import Settings, Shape
from swaleak.bench.clock import Clock, Sample
from swaleak.bench.contestant import Contestant
from swaleak.bench.stand import Stand, group_ops, ready
from swaleak.check.audit import audit
from swaleak.device import free_memory
from swaleak.errors import RAISED, SwaleakError, UsageError

BLOCK = 25  # rounds, then new allocators: where in memory they lie is worth up to 2 %
RUN_IN = 3  # groups that a new allocator does before it is timed
NOT_YET = Sample(0)


@dataclass(frozen=True, slots=True)
class Round:
    """One round. ``samples``: of each contestant, last the baseline's second one.

    ``audits``: what the audit says of each contestant's group. ``counted``: not a warm-up.
    ``done`` and ``total``: rounds, over all cases.
    """

    shape: Shape
    audits: tuple[str, ...]
    samples: tuple[Sample, ...]
    counted: bool
    done: int
    total: int


def run(
    contestants: Sequence[Contestant], shapes: Sequence[Shape], settings: Settings, clock: Clock
) -> Iterator[Round]:
    """Measure case after case, and yield every round, those that warm up too.

    In a round each contestant has one turn, the baseline two, in random order; all get new
    allocators every ``BLOCK`` rounds. Garbage collection is off and torch uses one thread while
    this runs. Raises ``UsageError`` for a contestant that cannot be measured.
    """
    rounds = settings.warmup + settings.samples
    order = list(range(len(contestants) + 1))
    shuffle = random.Random(settings.seed).shuffle
    with _quiet():
        for number, shape in enumerate(shapes):
            _check_room(shape, len(order), contestants[0].target.device)
            audits = tuple(judge(one, shape, settings) for one in contestants)
            stands: list[Stand] = []
            for turn in range(rounds):
                shuffle(order)
                if turn % BLOCK == 0:
                    stands.clear()
                    stands = _line_up(contestants, shape, settings, order)
                samples = [NOT_YET] * len(stands)
                for i in order:
                    stands[i].reset()
                    samples[i] = clock.measure(stands[i].group)
                yield Round(
                    shape,
                    audits,
                    tuple(samples),
                    counted=turn >= settings.warmup,
                    done=number * rounds + turn + 1,
                    total=len(shapes) * rounds,
                )


def _check_room(shape: Shape, stands: int, device: str) -> None:
    """Raise ``UsageError`` if the mappings and their copies are over the device's free memory."""
    needed = 3 * stands * 8 * shape.sizes.full_pages * shape.page_size  # bytes
    free = free_memory(device)
    if free is not None and needed > free:
        raise UsageError(
            f"{shape}: takes {needed >> 30} GiB, {free >> 30} are free on {device}; "
            f"ask for fewer pages"
        )


def _line_up(
    contestants: Sequence[Contestant], shape: Shape, settings: Settings, order: Sequence[int]
) -> list[Stand]:
    """Return a stand for each contestant and one more for the first, made in ``order``, run in."""
    lined = (*contestants, contestants[0])
    stands = {}
    for i in order:
        with _explained(lined[i], shape):
            stands[i] = Stand(lined[i], shape, settings)
            for _ in range(RUN_IN):
                stands[i].group()
                stands[i].reset()
    return [stands[i] for i in range(len(lined))]


def judge(contestant: Contestant, shape: Shape, settings: Settings) -> str:
    """Return the audit's verdict on one whole group: a time is worth nothing if pages are lost.

    Raises ``UsageError`` if the allocator raises.
    """
    with _explained(contestant, shape):
        driver, player = ready(contestant, shape)
        for op in group_ops(shape, settings):
            player.play(op)
    return audit(driver, player.ledger).verdict


@contextmanager
def _quiet() -> Iterator[None]:
    """No garbage collection, and one thread: what is timed is small."""
    collecting, threads = gc.isenabled(), torch.get_num_threads()
    gc.collect()
    gc.disable()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()


@contextmanager
def _explained(contestant: Contestant, shape: Shape) -> Iterator[None]:
    """Turn whatever an allocator raises, or a device that is full, into one line."""
    try:
        yield
    except SwaleakError:
        raise
    except RAISED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"{contestant.label} cannot be measured ({shape}): {reason}") from None
