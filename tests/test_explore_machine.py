"""A Hypothesis state machine over the same rules: an independent check of the explorer.

It shares the rules, the shadow and the comparison with it, and nothing of how states are put back,
told apart or enumerated.
"""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from swaleak.checker.compare import compare_pages, read
from swaleak.checker.run import Execution
from swaleak.explorer.breadth_first import BreadthFirst
from swaleak.scenario.contract import Rules, legal
from swaleak.targets.driver import Sizes
from swaleak.targets.open import Builtin
from tests.conftest import sglang

RULES = Rules(nodes=3)
EFFORT = settings(
    max_examples=600,
    stateful_step_count=20,
    derandomize=True,
    phases=(Phase.generate,),  # that it fails is enough, how need not be short
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def machine(target, strategy, page_size):
    """Return a state machine that drives one target."""

    class Machine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.execution = Execution(target.make(strategy, Sizes(24, 24, page_size)))

        @rule(data=st.data())
        def operate(self, data):
            kinds = {}
            for op in legal(self.execution.shadow, RULES):
                kinds.setdefault(op.key, []).append(op)
            kind = data.draw(st.sampled_from(list(kinds)))
            self.execution.step(data.draw(st.sampled_from(kinds[kind])))

        @invariant()
        def owners_agree(self):
            state = self.execution.driver.state()
            assert not compare_pages(read(state), self.execution.shadow).violations

    return Machine


def fails_by_machine(target, strategy, page_size):
    try:
        run_state_machine_as_test(machine(target, strategy, page_size), settings=EFFORT)
    except AssertionError:
        return True
    return False


def fails_by_explorer(target, strategy, page_size):
    def make(full, swa):
        return target.make(strategy, Sizes(full, swa, page_size))

    explorer = BreadthFirst(make, RULES, 6)
    for _ in explorer.run():
        pass
    return bool(explorer.failures)


def judged(target, strategy, page_size):
    return (
        fails_by_machine(target, strategy, page_size),
        fails_by_explorer(target, strategy, page_size),
    )


@pytest.mark.parametrize(
    ("strategy", "fails"), [("deferred", True), ("enqueue", False), ("barrier", False)]
)
def test_both_agree_about_the_model(strategy, fails):
    assert judged(Builtin("cpu"), strategy, 1) == (fails, fails)


@pytest.mark.wheels
@pytest.mark.parametrize(
    ("strategy", "fails"), [("shipped", True), ("enqueue", False), ("barrier", False)]
)
def test_both_agree_about_0_5_18(strategy, fails):
    assert judged(sglang("0.5.18"), strategy, 1) == (fails, fails)
