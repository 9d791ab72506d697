"""The explorer: what it finds, that it finds the same twice, and that going back is exact."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swaleak.check.player import Starved
from swaleak.script.ops import Part, describe
from swaleak.search.stage import Stage

from swaleak.allocator.hybrid import HybridAllocator
from swaleak.allocator.strategies import STRATEGIES
from swaleak.errors import ScriptError, TargetError
from swaleak.explorer.breadth_first import BreadthFirst as Explorer
from swaleak.explorer.breadth_first import Shard
from swaleak.explorer.canonical import queue_kinds
from swaleak.explorer.search import has_segments
from swaleak.scenario import steps as ops
from swaleak.scenario.contract import Rules, in_production, legal
from swaleak.targets.driver import Driver
from swaleak.targets.open import Builtin, Sizes
from tests.conftest import sglang


def maker(target, strategy, page_size):
    return lambda full, swa: target.make(strategy, Sizes(full, swa, page_size))


BUILTIN = Builtin("cpu")


def explored(target, strategy, page_size, depth, contract="production", shard=None, every=False):
    rules = Rules(contract, segments=has_segments(target, strategy))
    explorer = Explorer(maker(target, strategy, page_size), rules, depth, shard, every)
    for _ in explorer.run():
        pass
    return explorer


def failure(explorer):
    """Return the first failing order in words, its verdict and kinds; None if none fails."""
    for found in explorer.coverage.failures:
        kinds = {violation.kind for violation in found.run.comparison.violations}
        return " | ".join(map(describe, found.order)), found.run.verdict, kinds
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
        ([f.order for f in e.coverage.failures], e.coverage.states, e.coverage.transitions)
        for e in runs
    ]
    assert told[0] == told[1] and len(told[0][0]) > 1


def test_bounds_that_leave_nothing_to_try_are_exhausted():
    explorer = Explorer(maker(BUILTIN, "eager", 1), Rules(nodes=1, pages=1), 20)
    for _ in explorer.run():
        pass
    # no node, a live one, a tombstone; each in a group and outside
    assert (explorer.coverage.exhausted, explorer.coverage.states) == (True, 5)


def test_shards_together_do_what_one_does():
    def states(shard):
        return explored(BUILTIN, "enqueue", 1, 6, shard=shard)._seen

    whole = states(None)
    parts = [states(Shard(i, 3)) for i in (1, 2, 3)]
    assert set.union(*parts) == whole and all(len(part) < len(whole) for part in parts)


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

    explorer = Explorer(make, Rules(), 6)
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


def test_an_attribute_that_comes_late_is_refused():
    explorer = Explorer(lambda f, s: Driver(Late(f, s, 1, "cpu", STRATEGIES["eager"])), Rules(), 4)
    with pytest.raises(TargetError, match=r"cannot follow Late\.began"):
        for _ in explorer.run():
            pass


def test_state_in_a_dict_is_followed():
    explorer = Explorer(
        lambda f, s: Driver(Shelved(f, s, 1, "cpu", STRATEGIES["eager"])), Rules(), 6
    )
    for _ in explorer.run():
        pass
    order = "alloc n1, 2 pages | group begin | free n1, pages 0:1 | free n1 | group end"
    assert failure(explorer) == (order, "leak", {"leak"})


def play(stage, script):
    for op in script:
        stage.play(op)
    return stage


def stage_of(strategy, page_size=1, latent=False):
    make = maker(BUILTIN, strategy, page_size)
    return Stage(make(16, 16), queue_kinds(make, page_size), latent=latent)


A, B, C = "a", "b", "c"
SAME = [
    ([ops.Alloc(A), ops.Alloc(B)], [ops.Alloc(B), ops.Alloc(A)]),
    ([ops.Alloc(A), ops.Alloc(B), ops.Free(A)], [ops.Alloc(A), ops.Alloc(B), ops.Free(B)]),
    ([ops.Alloc(A), ops.Alloc(B, 2)], [ops.Alloc(B, 2), ops.Alloc(A)]),
    (
        [ops.Alloc(A), ops.Alloc(B), ops.Group("begin"), ops.FreeSwa(A)],
        [ops.Alloc(A), ops.Alloc(B), ops.Group("begin"), ops.FreeSwa(B)],
    ),
    (
        [ops.Alloc(A), ops.Alloc(B), ops.FreeSwa(A), ops.Recover(A, B)],
        [ops.Alloc(C)],
    ),
]
OTHER = [
    ([ops.Alloc(A)], [ops.Alloc(A, 2)]),
    ([ops.Alloc(A)], [ops.Alloc(A), ops.Group("begin")]),
    ([ops.Alloc(A)], [ops.Alloc(A), ops.FreeSwa(A)]),
    (
        [ops.Alloc(A, 2), ops.FreeSwa(A, Part("pages", 0, 1))],
        [ops.Alloc(A, 2), ops.FreeSwa(A, Part("pages", 1, 2))],
    ),
    (  # the free is still queued, or carried out
        [ops.Alloc(A), ops.Alloc(B), ops.Group("begin"), ops.Free(A)],
        [ops.Alloc(B), ops.Group("begin")],
    ),
]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("strategy", ["deferred", "enqueue", "barrier"])
def test_states_are_told_apart_up_to_renaming(strategy, page_size):
    def equal(one, other):
        return (
            play(stage_of(strategy, page_size), one).key()
            == play(stage_of(strategy, page_size), other).key()
        )

    told = [equal(*pair) for pair in SAME + OTHER]
    assert told == [True] * len(SAME) + [False] * len(OTHER)


def walk(draw, stage, rules, steps):
    """Play random legal operations, as many as are legal; return them."""
    played = []
    for _ in range(steps):
        op = draw(st.sampled_from(list(legal(stage.player.ledger, rules, stage.kept()))))
        before = stage.save()
        try:
            stage.play(op)
        except (ScriptError, Starved):
            stage.restore(before)
        except RuntimeError:  # refused
            stage.restore(before)
        else:
            played.append(op)
    return played


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("strategy", list(STRATEGIES))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_going_back_is_exact(strategy, page_size, data):
    rules = Rules("latent", growth=True)
    stage = stage_of(strategy, page_size, latent=True)
    script = walk(data.draw, stage, rules, 6)
    key, point = stage.key(), stage.save()
    walk(data.draw, stage, rules, 6)  # a detour
    stage.restore(point)
    back = stage.key()
    script += walk(data.draw, stage, rules, 4)
    straight = play(stage_of(strategy, page_size, latent=True), script)
    assert (back, stage.key()) == (key, straight.key())


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_the_rules_are_the_same_from_both_sides(data):
    stage = stage_of("eager", 4)
    walk(data.draw, stage, Rules("latent", growth=True), 12)
    ledger = stage.player.ledger
    latent = legal(ledger, Rules("latent", growth=True))
    filtered = {op for op in latent if in_production(op, ledger)}
    assert filtered == set(legal(ledger, Rules("production", growth=True)))


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
    assert any(order in {op.key for op in f.order} for f in explorer.coverage.failures)
