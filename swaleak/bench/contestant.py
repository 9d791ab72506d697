"""Who is measured: names on the command line -> strategies on targets."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swaleak.allocator.strategy import STRATEGIES
from swaleak.errors import UsageError, unknown
from swaleak.target import SHIPPED, STRATEGY_NAMES, Target, strategy_of


@dataclass(frozen=True, slots=True)
class Contestant:
    """Who is measured: a strategy on a target."""

    label: str
    target: Target
    strategy: str

    @property
    def origin(self) -> str:
        """``builtin``, ``shipped``, ``grafted`` or ``patched``."""
        return self.target.origin(self.strategy)


def contestants(
    baseline: str,
    candidates: Sequence[str] | None,
    on: Callable[[], Target],
    open_: Callable[[str], Target],
    open_candidate: Callable[[str], Target],
) -> tuple[Contestant, ...]:
    """Return the baseline, then the candidates.

    A strategy's name means that strategy on ``on()``; any other is a target, as shipped or, for
    candidates, as ``open_candidate`` patches it. A strategy without candidates is held against the
    others that batch. Raises ``UsageError`` for a name that is neither, and for one that is there
    already.
    """
    found = [_contestant(baseline, on, open_)]
    if not candidates:
        if found[0].strategy == SHIPPED:
            raise UsageError(f"{baseline} against what? name it with --candidate")
        names = (s.name for s in STRATEGIES.values() if s.batches)
        candidates = [name for name in names if name != found[0].strategy]
    found += [_contestant(name, on, open_candidate) for name in candidates]
    asked = (baseline, *candidates)
    labels = [one.label for one in found]
    for i, one in enumerate(found):
        if labels.count(one.label) > 1:  # two checkouts of one version: call them what they asked
            found[i] = Contestant(asked[i], one.target, one.strategy)
            if one.strategy != SHIPPED or asked.count(asked[i]) > 1:
                raise UsageError(
                    f"{asked[i]} is named twice; the A/A row measures the baseline against itself"
                )
    return tuple(found)


def _contestant(name: str, on: Callable[[], Target], open_: Callable[[str], Target]) -> Contestant:
    if name in STRATEGY_NAMES:
        strategy, target = strategy_of(name), on()
        return Contestant(_short(target) if strategy == SHIPPED else strategy, target, strategy)
    try:
        target = open_(name)
    except UsageError:
        if difflib.get_close_matches(name, STRATEGY_NAMES):
            raise UsageError(unknown("strategy", name, STRATEGY_NAMES)) from None
        raise
    if SHIPPED not in target.strategies():
        raise UsageError(f"{name} ships no strategy of its own; name {', '.join(STRATEGIES)}")
    return Contestant(_short(target), target, SHIPPED)


def _short(target: Target) -> str:
    short = target.name.removeprefix("sglang ")
    return short if short[:1].isdigit() else target.name
