"""Random scripts: what they find, that they find the same twice, and what shards do."""

import pytest
from swaleak.search.explore import Shard

from swaleak.explorer.random_walk import RandomWalk as Fuzzer
from swaleak.scenario.contract import Rules
from swaleak.targets.open import Builtin, Sizes

BUILTIN = Builtin("cpu")


def fuzzed(strategy, page_size, contract="production", scripts=30, shard=None):
    def make(full, swa):
        return BUILTIN.make(strategy, Sizes(full, swa, page_size))

    fuzzer = Fuzzer(make, Rules(contract, 8, 3, growth=True), 60, 0, scripts, shard)
    for _ in fuzzer.run():
        pass
    return fuzzer.tried


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("contract", ["production", "latent"])
@pytest.mark.parametrize("strategy", ["eager", "enqueue", "barrier"])
def test_random_scripts_find_nothing_in_sound_strategies(strategy, contract, page_size):
    tried = fuzzed(strategy, page_size, contract)
    assert (tried.failure, tried.scripts) == (None, 30)


@pytest.mark.parametrize("page_size", [1, 4])
def test_random_scripts_find_and_shrink_the_bug_the_same_way_twice(page_size):
    once, again = (fuzzed("deferred", page_size).failure for _ in range(2))
    kinds = {violation.kind for violation in once.run.comparison.violations}
    assert (once.order, once.seed) == (again.order, again.seed)
    assert once.length > len(once.order) == 6 and "leak" in kinds


def test_random_shards_split_the_seeds():
    counted = [fuzzed("eager", 1, shard=Shard(i, 4), scripts=10).scripts for i in (1, 2, 3, 4)]
    assert counted == [3, 3, 2, 2]
