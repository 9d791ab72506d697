"""How fast `swaleak explore` is, beside Hypothesis's state machine on the same rules.

    python benchmarks/explore.py --on TARGET [--strategy S] [--depth N] [--examples N]

Both drive the same allocator by the same rules on one core. Counted are *distinct* states, up to
renaming of nodes and pages, a second; for Hypothesis the time that telling them apart takes is
left out. Failing states are not gone on from, by either.
"""

import argparse
import json
import time

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from swaleak.check.audit import audit
from swaleak.check.player import Player
from swaleak.search.explore import Explorer, room
from swaleak.search.legal import Rules, legal
from swaleak.search.stage import Stage, queue_kinds
from swaleak.search.survey import has_segments
from swaleak.target import Sizes, open_target, strategy_of


def explore(make, rules, depth):
    explorer = Explorer(make, rules, depth, every=True)
    for _ in explorer.run():
        pass
    covered = explorer.covered()
    return {
        "states": covered.states,
        "transitions": covered.transitions,
        "failures": len(covered.failures),
        "seconds": round(covered.seconds, 3),
        "transitions_per_second": round(covered.transitions / covered.seconds),
        "states_per_second": round(covered.states / covered.seconds),
        "bytes_per_state": round(covered.bytes_per_state),
    }


def hypothesis_machine(make, rules, depth, examples):
    pages = room(rules, depth)
    kinds = queue_kinds(make, make(1, 1).page_size)
    seen = set()
    spent = {"telling apart": 0.0, "transitions": 0}

    class Machine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.stage = Stage(make(pages, pages), kinds, latent=rules.latent)
            self.player: Player = self.stage.player
            self.failed = False

        @precondition(lambda self: not self.failed)
        @rule(data=st.data())
        def operate(self, data):
            op = data.draw(st.sampled_from(list(legal(self.player.ledger, rules))))
            self.player.play(op)
            self.failed = bool(audit(self.player.allocator, self.player.ledger).violations)
            spent["transitions"] += 1
            started = time.perf_counter()
            seen.add(self.stage.key())
            spent["telling apart"] += time.perf_counter() - started

        @precondition(lambda self: self.failed)
        @rule()
        def stop(self):
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
    return {
        "states": len(seen),
        "transitions": spent["transitions"],
        "seconds": round(seconds, 3),
        "transitions_per_second": round(spent["transitions"] / seconds),
        "states_per_second": round(len(seen) / seconds),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--on", default="builtin")
    parser.add_argument("--strategy", default=None)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--examples", type=int, default=1000)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    target = open_target(asked.on, "cpu")
    strategy = strategy_of(asked.strategy or ("shipped" if target.ships else "deferred"))
    rules = Rules(segments=has_segments(target, strategy))

    def make(full, swa):
        return target.make(strategy, Sizes(full, swa, asked.page_size))

    explore(make, rules, 5)  # the first calls of torch are slow
    ours = explore(make, rules, asked.depth)
    theirs = hypothesis_machine(make, rules, asked.depth, asked.examples)
    ratio = ours["states_per_second"] / max(1, theirs["states_per_second"])
    where = {"target": target.name, "strategy": strategy, "page_size": asked.page_size}
    result = where | {"depth": asked.depth, "explore": ours, "hypothesis": theirs}
    print(json.dumps(result | {"times_as_many_distinct_states": round(ratio, 1)}, indent=1))


if __name__ == "__main__":
    main()
