"""How fast `swaleak explore` is, beside Hypothesis's state machine on the same rules.

    python -m benchmarks.explore [--on TARGET] [--strategy S] [--depth N] [--examples N] [--turns N]

Both drive the same allocator by the same rules on one core, in turns. Counted are *distinct*
states, up to renaming of nodes and pages, a second; for Hypothesis the time that telling them
apart takes is left out. Failing states are not gone on from, by either.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from benchmarks.figures import Figures, Row, environment, markdown, ratios, take_turns
from swaleak.checker.compare import compare
from swaleak.checker.run import Execution
from swaleak.cli_cases import start_torch
from swaleak.explorer.breadth_first import BreadthFirst, room
from swaleak.explorer.canonical import Keys, Make, queue_kinds
from swaleak.explorer.search import has_segments
from swaleak.scenario.contract import Rules, legal
from swaleak.targets.driver import Driver, Sizes
from swaleak.targets.open import open_target, strategy_of

TURNS = 7
DEPTH, EXAMPLES = 8, 1000


@dataclass(frozen=True, slots=True)
class Searched:
    """What one search has seen. ``bytes_per_state``: None where nobody counts."""

    states: int
    transitions: int
    seconds: float
    bytes_per_state: float | None = None

    @property
    def states_per_second(self) -> float:
        return self.states / self.seconds

    @property
    def transitions_per_second(self) -> float:
        return self.transitions / self.seconds


def explore(make: Make, rules: Rules, depth: int) -> Searched:
    explorer = BreadthFirst(make, rules, depth, every=True)
    for _ in explorer.run():
        pass
    seen = explorer.coverage
    return Searched(seen.states, seen.transitions, seen.seconds, seen.bytes_per_state)


def hypothesis_machine(make: Make, rules: Rules, depth: int, examples: int) -> Searched:
    pages = room(rules, depth)
    kinds = queue_kinds(make, make(1, 1).page_size)
    seen: set[bytes] = set()
    spent = {"telling apart": 0.0, "transitions": 0}

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.execution = Execution(make(pages, pages))
            self.keys = Keys(self.execution.driver, kinds, latent=rules.latent)
            self.failed = False

        @precondition(lambda self: not self.failed)
        @rule(data=st.data())
        def operate(self, data: st.DataObject) -> None:
            driver, shadow = self.execution.driver, self.execution.shadow
            self.execution.step(data.draw(st.sampled_from(list(legal(shadow, rules)))))
            self.failed = bool(compare(driver.state(), shadow).violations)
            spent["transitions"] += 1
            started = time.perf_counter()
            seen.add(self.keys.key(shadow))
            spent["telling apart"] += time.perf_counter() - started

        @precondition(lambda self: self.failed)
        @rule()
        def stop(self) -> None:
            pass

    effort = settings(
        max_examples=examples,
        stateful_step_count=depth,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    started = time.perf_counter()
    run_state_machine_as_test(Machine, settings=effort)
    seconds = time.perf_counter() - started - spent["telling apart"]
    return Searched(len(seen), int(spent["transitions"]), seconds)


def measure(
    on: str = "0.5.18",
    strategy: str | None = None,
    *,
    depth: int = DEPTH,
    page_size: int = 1,
    examples: int = EXAMPLES,
    turns: int = TURNS,
) -> Figures:
    """Let both search, in turns. ``strategy``: None for the target's own."""
    start_torch()  # as the command does
    target = open_target(on, "cpu")
    name = strategy_of(strategy or ("shipped" if target.ships else "deferred"))
    rules = Rules(segments=has_segments(target, name))

    def make(full: int, swa: int) -> Driver:
        return target.make(name, Sizes(full, swa, page_size))

    searches: dict[str, Callable[[], Searched]] = {
        "explorer": lambda: explore(make, rules, depth),
        "Hypothesis": lambda: hypothesis_machine(make, rules, depth, examples),
    }
    seen = take_turns(lambda searcher: searches[searcher](), list(searches), turns)
    ours, theirs = seen["explorer"], seen["Hypothesis"]

    def row(measured: str, rate: Callable[[Searched], float]) -> Row:
        mine, others = [rate(one) for one in ours], [rate(one) for one in theirs]
        return Row(
            f"`swaleak explore`: {measured} per second, more is better",
            f"{statistics.median(mine):,.0f}",
            "Hypothesis's state machine",
            f"{statistics.median(others):,.0f}",
            ratios(mine, others),
        )

    last = ours[-1]
    return Figures(
        (
            row("distinct states", lambda one: one.states_per_second),
            row("transitions", lambda one: one.transitions_per_second),
        ),
        f"{turns} turns, one core, {target.name}, {name}, page size {page_size}: every legal order "
        f"of up to {depth} steps, {last.transitions:,} transitions and {last.states:,} states "
        f"of {last.bytes_per_state:.0f} bytes; Hypothesis {theirs[-1].transitions:,} and "
        f"{theirs[-1].states:,}; {environment()}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--on", default="0.5.18")
    parser.add_argument("--strategy", default=None)
    parser.add_argument("--depth", type=int, default=DEPTH)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--examples", type=int, default=EXAMPLES)
    parser.add_argument("--turns", type=int, default=TURNS)
    asked = parser.parse_args()
    figures = measure(
        asked.on,
        asked.strategy,
        depth=asked.depth,
        page_size=asked.page_size,
        examples=asked.examples,
        turns=asked.turns,
    )
    print(markdown(figures))


if __name__ == "__main__":
    main()
