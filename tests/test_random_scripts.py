"""Random scripts: what they find, that they find the same twice, and what shards do."""

import pytest

from swaleak.explorer.random_walk import RandomWalk, Shard
from swaleak.scenario.contract import Rules
from swaleak.targets.driver import Sizes
from swaleak.targets.open import Builtin

BUILTIN = Builtin("cpu")


def walked(strategy, page_size, contract="production", scripts=30, shard=None):
    def make(full, swa):
        return BUILTIN.make(strategy, Sizes(full, swa, page_size))

    walk = RandomWalk(make, Rules(contract, 8, 3, growth=True), 60, 0, scripts, shard)
    for _ in walk.run():
        pass
    return walk


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("contract", ["production", "latent"])
@pytest.mark.parametrize("strategy", ["eager", "enqueue", "barrier"])
def test_random_scripts_find_nothing_in_sound_strategies(strategy, contract, page_size):
    walk = walked(strategy, page_size, contract)
    assert (walk.failures, walk.coverage.scripts) == ([], 30)


@pytest.mark.parametrize("page_size", [1, 4])
def test_random_scripts_find_and_shrink_the_bug_the_same_way_twice(page_size):
    once, again = (walked("deferred", page_size).failures[0] for _ in range(2))
    kinds = {violation.kind for violation in once.run.comparison.violations}
    assert (once.order, once.seed) == (again.order, again.seed)
    assert once.length > len(once.order) == 6 and "leak" in kinds


def test_random_shards_split_the_seeds():
    walks = [walked("eager", 1, shard=Shard(i, 4), scripts=10) for i in (1, 2, 3, 4)]
    counted = [walk.coverage.scripts for walk in walks]
    assert counted == [3, 3, 2, 2]
