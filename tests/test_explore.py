"""The explorer: what it finds, that it finds the same twice, and that going back is exact."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swaleak.allocator.hybrid import HybridAllocator
from swaleak.allocator.strategies import STRATEGIES
from swaleak.checker.run import Execution
from swaleak.checker.snapshot import Snapshot
from swaleak.errors import ScriptError, TargetError
from swaleak.explorer.breadth_first import BreadthFirst
from swaleak.explorer.canonical import Keys, queue_kinds
from swaleak.explorer.search import has_segments
from swaleak.scenario import steps
from swaleak.scenario.calls import PoolExhausted
from swaleak.scenario.contract import Rules, in_production, legal, refusal
from swaleak.targets.driver import Driver, Sizes
from swaleak.targets.open import Builtin
from tests.conftest import sglang


def maker(target, strategy, page_size):
    return lambda full, swa: target.make(strategy, Sizes(full, swa, page_size))


BUILTIN = Builtin("cpu")


def explored(target, strategy, page_size, depth, contract="production", every=False, jobs=1):
    rules = Rules(contract, segments=has_segments(target, strategy))
    explorer = BreadthFirst(
        maker(target, strategy, page_size), rules, depth, every=every, jobs=jobs
    )
    for _ in explorer.run():
        pass
    return explorer


def failure(explorer):
    """Return the first failing order in words, its verdict and kinds; None if none fails."""
    for found in explorer.failures:
        kinds = {violation.kind for violation in found.run.comparison.violations}
        return " | ".join(map(str, found.order)), found.run.verdict, kinds
    return None


RECOVERED = (
    "alloc n1 | alloc n2 | group begin | free_swa n1 | recover n1 from n2 | group end",
    "leak",
    {"leak", "lost"},
)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(
    ("strategy", "found"),
    [("eager", None), ("deferred", RECOVERED), ("enqueue", None), ("barrier", None)],
)
def test_shortest_failure_of_the_model(strategy, found, page_size):
    assert failure(explored(BUILTIN, strategy, page_size, 6)) == found


@pytest.mark.parametrize(
    ("strategy", "found"),
    [
        ("eager", None),
        (
            "deferred",
            (
                "alloc n1 | group begin | free_swa n1 | load_back n1 | group end",
                "leak",
                {"leak", "lost"},
            ),
        ),
        ("enqueue", None),
        ("barrier", None),
    ],
)
def test_latent_contract_of_the_model(strategy, found):
    assert failure(explored(BUILTIN, strategy, 1, 5, "latent")) == found


def test_same_search_twice_finds_the_same():
    runs = [explored(BUILTIN, "deferred", 1, 7, every=True) for _ in range(2)]
    told = [
        ([f.order for f in e.failures], e.coverage.states, e.coverage.transitions) for e in runs
    ]
    assert told[0] == told[1] and len(told[0][0]) > 1


def test_bounds_that_leave_nothing_to_try_are_exhausted():
    explorer = BreadthFirst(maker(BUILTIN, "eager", 1), Rules(nodes=1, pages=1), 20)
    for _ in explorer.run():
        pass
    # no node, a live one, a tombstone; each in a group and outside
    assert (explorer.coverage.exhausted, explorer.coverage.states) == (True, 5)


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize(("strategy", "depth"), [("deferred", 7), ("enqueue", 8)])
def test_two_processes_find_what_one_finds(strategy, depth, every):
    def told(jobs):
        found = explored(BUILTIN, strategy, 1, depth, every=every, jobs=jobs)
        covered = found.coverage
        counts = (covered.states, covered.transitions, covered.depth, covered.dry)
        return [f.order for f in found.failures], counts, found._seen

    one = told(1)
    assert len(one[2]) > 256  # so many that it is worth a second process
    assert told(2)[:2] == one[:2]


class Secretive(HybridAllocator):
    """Keeps what it remembers where nobody would look for it, and loses a page on the third."""

    def __init__(self, *args):
        self.secret = type("Secret", (), {"frees": 0})()
        super().__init__(*args)

    def free_swa(self, free_index):
        self.secret.frees += 1
        if self.secret.frees % 3:
            super().free_swa(free_index)


def test_state_that_cannot_be_put_back_is_refused():
    def make(full, swa):
        return Driver(Secretive(full, swa, 1, "cpu", STRATEGIES["eager"]))

    explorer = BreadthFirst(make, Rules(), 6)
    with pytest.raises(TargetError, match="cannot put it back"):
        for _ in explorer.run():
            pass


class Late(HybridAllocator):
    def free_group_begin(self):
        self.began = True
        super().free_group_begin()


class Shelved(HybridAllocator):
    """Queues pages in a dict, and forgets one of two: what is put back has to reach in there."""

    def __init__(self, *args):
        self.shelf = {}
        super().__init__(*args)

    def free_swa(self, free_index):
        if not self.group_open:
            super().free_swa(free_index)
        elif self.shelf:
            self.shelf["two"] = self.resolve(free_index)
        else:
            self.shelf["one"] = self.resolve(free_index)

    def free_group_end(self):
        super().free_group_end()
        if "one" in self.shelf:
            self.release(self.shelf["one"])
        self.shelf.clear()


def test_an_attribute_that_comes_late_is_followed():
    explorer = BreadthFirst(
        lambda f, s: Driver(Late(f, s, 1, "cpu", STRATEGIES["deferred"])), Rules(), 6
    )
    for _ in explorer.run():
        pass
    assert failure(explorer) == RECOVERED


def test_state_in_a_dict_is_followed():
    explorer = BreadthFirst(
        lambda f, s: Driver(Shelved(f, s, 1, "cpu", STRATEGIES["eager"])), Rules(), 6
    )
    for _ in explorer.run():
        pass
    order = "alloc n1, 2 pages | group begin | free n1, pages 0:1 | free n1 | group end"
    assert failure(explorer) == (order, "leak", {"leak"})


class Stage:
    """An execution whose states are told apart."""

    def __init__(self, strategy, page_size=1, latent=False):
        make = maker(BUILTIN, strategy, page_size)
        self.execution = Execution(make(16, 16))
        self.latent = latent
        self.keys = Keys(self.execution.driver, queue_kinds(make, page_size), latent=latent)
        self.shadow = self.execution.shadow

    def make(self, script):
        for step in script:
            self.execution.step(step)
            if not self.latent:
                self.shadow.buffers.clear()
        return self

    def key(self):
        return self.keys.key(self.shadow)

    def save(self):
        return Snapshot(self.execution.driver, self.shadow)


A, B, C = "a", "b", "c"
SAME = [
    ([steps.Alloc(A), steps.Alloc(B)], [steps.Alloc(B), steps.Alloc(A)]),
    (
        [steps.Alloc(A), steps.Alloc(B), steps.Free(A)],
        [steps.Alloc(A), steps.Alloc(B), steps.Free(B)],
    ),
    ([steps.Alloc(A), steps.Alloc(B, 2)], [steps.Alloc(B, 2), steps.Alloc(A)]),
    (
        [steps.Alloc(A), steps.Alloc(B), steps.Group("begin"), steps.FreeSwa(A)],
        [steps.Alloc(A), steps.Alloc(B), steps.Group("begin"), steps.FreeSwa(B)],
    ),
    (
        [steps.Alloc(A), steps.Alloc(B), steps.FreeSwa(A), steps.Recover(A, B)],
        [steps.Alloc(C)],
    ),
]
OTHER = [
    ([steps.Alloc(A)], [steps.Alloc(A, 2)]),
    ([steps.Alloc(A)], [steps.Alloc(A), steps.Group("begin")]),
    ([steps.Alloc(A)], [steps.Alloc(A), steps.FreeSwa(A)]),
    (
        [steps.Alloc(A, 2), steps.FreeSwa(A, pages="0:1")],
        [steps.Alloc(A, 2), steps.FreeSwa(A, pages="1:2")],
    ),
    (  # the free is still queued, or carried out
        [steps.Alloc(A), steps.Alloc(B), steps.Group("begin"), steps.Free(A)],
        [steps.Alloc(B), steps.Group("begin")],
    ),
]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("strategy", ["deferred", "enqueue", "barrier"])
def test_states_are_told_apart_up_to_renaming(strategy, page_size):
    def equal(one, other):
        keys = [Stage(strategy, page_size).make(script).key() for script in (one, other)]
        return keys[0] == keys[1]

    told = [equal(*pair) for pair in SAME + OTHER]
    assert told == [True] * len(SAME) + [False] * len(OTHER)


def walk(draw, stage, rules, length):
    """Make random legal steps, as many as are legal; return them."""
    made = []
    for _ in range(length):
        kept = stage.keys.kept(stage.shadow) if stage.latent else {}
        step = draw(st.sampled_from(list(legal(stage.shadow, rules, kept))))
        before = stage.save()
        try:
            stage.make([step])
        except (ScriptError, PoolExhausted, RuntimeError):  # no room, or refused
            before.restore()
        else:
            made.append(step)
    return made


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("strategy", list(STRATEGIES))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_going_back_is_exact(strategy, page_size, data):
    rules = Rules("latent", growth=True)
    stage = Stage(strategy, page_size, latent=True)
    script = walk(data.draw, stage, rules, 6)
    key, point = stage.key(), stage.save()
    walk(data.draw, stage, rules, 6)  # a detour
    point.restore()
    back = stage.key()
    script += walk(data.draw, stage, rules, 4)
    straight = Stage(strategy, page_size, latent=True).make(script)
    assert (back, stage.key()) == (key, straight.key())


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_the_rules_are_the_same_from_both_sides(data):
    stage = Stage("eager", 4, latent=True)
    walk(data.draw, stage, Rules("latent", growth=True), 12)
    latent = list(legal(stage.shadow, Rules("latent", growth=True)))
    filtered = {step for step in latent if in_production(step, stage.shadow)}
    assert filtered == set(legal(stage.shadow, Rules("production", growth=True)))
    assert all(refusal(step, stage.shadow) is None for step in latent)


@pytest.mark.wheels
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(
    ("version", "strategy", "found"),
    [
        ("0.5.18", "shipped", RECOVERED),
        ("0.5.18", "enqueue", None),
        ("0.5.18", "barrier", None),
        ("0.5.19", "shipped", None),
        ("0.5.20", "shipped", None),
        ("0.5.23", "shipped", None),
        ("0.5.23", "deferred", RECOVERED),
    ],
)
def test_shortest_failure_of_releases(version, strategy, found, page_size):
    assert failure(explored(sglang(version), strategy, page_size, 6)) == found


@pytest.mark.wheels
@pytest.mark.parametrize(
    ("version", "order"),
    [
        ("0.5.17", "overwrite"),  # the queue holds the caller's own tensor
        ("0.5.18", "load_back"),
        ("0.5.20", "free_swa_segment"),
    ],
)
def test_latent_failures_of_releases(version, order):
    explorer = explored(sglang(version), "shipped", 1, 6, "latent", every=True)
    assert any(order in {step.key for step in f.order} for f in explorer.failures)
