"""SGLang's own radix caches, run out of a wheel: no SGLang is installed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from swaleak.checker.case import run_case
from swaleak.checker.compare import compare_pages, read
from swaleak.checker.conservation import shadow_of
from swaleak.errors import TargetError, UsageError
from swaleak.scenario import catalogue
from swaleak.scenario.cache_steps import CACHE_STEPS
from swaleak.scenario.steps import Step
from swaleak.targets.driver import Sizes
from swaleak.targets.open import Builtin, ClassTarget
from swaleak.targets.radix_cache import CLASSES, RadixCache
from swaleak.targets.sources import RELEASES
from tests.conftest import sglang

WITH_SWA = RELEASES[: RELEASES.index("0.5.20") + 1]  # the later ones have the unified cache alone
CACHES = [
    (version, cache)
    for version in RELEASES
    for cache in CLASSES
    if cache == "unified" or version in WITH_SWA
]
SIZES = (24, 16)  # pages, few enough that there is something to evict
WINDOW = 2


def random_steps(cache: RadixCache, rng: random.Random, count: int) -> Iterator[Step]:
    """Yield steps that a scheduler could make, chosen by what ``cache`` has room for.

    Whoever takes one makes it before asking for the next.
    """
    locked: list[str] = []
    for _ in range(count):
        kind = rng.choice(
            ["insert"] * 4 + ["lock", "group"] * 2 + ["match", "unlock", "evict_swa", "evict_full"]
        )
        prompt = "".join(rng.choice("AB") for _ in range(rng.randint(1, 6)))
        value: str | int = prompt
        if kind == "insert":
            state = cache.state()
            if len(prompt) > min(len(state.full_free), len(state.swa_free)):
                if cache.in_group:
                    continue
                kind, value = rng.choice(["evict_swa", "evict_full"]), len(prompt)
        elif kind == "lock":
            if len(locked) == 4:
                continue
            locked.append(prompt)
        elif kind == "unlock":
            if not locked:
                continue
            value = locked.pop(rng.randrange(len(locked)))
        elif kind.startswith("evict"):
            value = rng.randint(1, 4)
        elif kind == "group":
            value = "end" if cache.in_group else "begin"
        yield CACHE_STEPS[kind](value)
    if cache.in_group:
        yield CACHE_STEPS["group"]("end")


def random_run(cache: RadixCache, seed: int, count: int) -> list[str]:
    """Return the violations when a group ends, the first that there are, else none."""
    for step in random_steps(cache, random.Random(seed), count):
        cache.play(step)
        if not cache.in_group:
            seen = compare_pages(read(cache.state()), shadow_of(cache))
            if seen.violations:
                return [violation.kind for violation in seen.violations]
    cache.settle()
    return []


@pytest.mark.wheels
@pytest.mark.parametrize(("version", "cache"), CACHES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_random_steps_conserve_every_page(version: str, cache: str, page_size: int) -> None:
    """By eager frees on every release; as shipped on all but 0.5.18."""
    caches, sizes = sglang(version).caches, Sizes(*SIZES, page_size)
    strategies = ["eager", "enqueue", "barrier"] + ["shipped"] * (version != "0.5.18")
    found = {
        strategy: random_run(caches.make(cache, strategy, sizes, WINDOW), seed, 150)
        for seed, strategy in enumerate(strategies)
    }
    assert found == {strategy: [] for strategy in strategies}


@pytest.mark.wheels
@pytest.mark.parametrize("cache", CLASSES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_random_steps_find_the_leak_of_0_5_18(cache: str, page_size: int) -> None:
    caches, sizes = sglang("0.5.18").caches, Sizes(*SIZES, page_size)
    runs = (random_run(caches.make(cache, "shipped", sizes, WINDOW), s, 300) for s in range(10))
    found = next((kinds for kinds in runs if kinds), [])
    assert "leak" in found


@pytest.mark.wheels
@pytest.mark.parametrize("version", RELEASES)
def test_the_catalogue_on_every_release(version: str) -> None:
    """0.5.18 leaks, all others are clean; the fixes hold on each."""
    target, expected, found = sglang(version), {}, {}
    for scenario in catalogue.catalogue():
        for cache in scenario.caches:
            if cache in target.caches.left_out:
                continue
            for size in scenario.page_sizes:
                for strategy in ("shipped", "eager", "enqueue", "barrier"):
                    case = run_case(scenario, target, strategy, size, cache=cache)
                    key = (scenario.name, cache, size, strategy)
                    known = case.known.outcome.verdict if case.known else "clean"
                    expected[key], found[key] = (known, True), (case.verdict, case.as_declared)
    assert found == expected
    leaks = {name for (name, *_), (verdict, _) in found.items() if verdict == "leak"}
    leaking = {"tree/recovery", "tree/two-nodes", "tree/leaf-reused"}
    assert leaks == (leaking if version == "0.5.18" else set())


@pytest.mark.wheels
def test_which_release_has_which_cache() -> None:
    left_out = {version: set(sglang(version).caches.left_out) for version in RELEASES}
    assert left_out == {v: set() if v in WITH_SWA else {"swa"} for v in RELEASES}


def test_what_has_no_caches_says_so() -> None:
    for target in (Builtin("cpu"), ClassTarget(object, "mine:Mine", "cpu")):
        with pytest.raises(UsageError, match="no radix caches"):
            _ = target.caches


# placeholders that are looked at, for a name or for an instance; none is used
TOUCHED = {
    "sglang.srt.disaggregation.kv_events.StorageMedium",
    "sglang.srt.mem_cache.hicache_storage.PoolName",
    "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool",
}


@pytest.mark.wheels
@pytest.mark.parametrize("version", RELEASES)
def test_what_is_stood_in_for(version: str) -> None:
    target = sglang(version)
    assert isinstance(target, ClassTarget) and target.modules is not None
    for cache in CLASSES.keys() - target.caches.left_out.keys():
        random_run(target.caches.make(cache, "enqueue", Sizes(*SIZES, 4), WINDOW), 1, 50)
    touched = target.modules.touched
    assert {name for name in touched if name.rpartition(".")[0] not in touched} <= TOUCHED


@pytest.mark.wheels
def test_a_cache_that_cannot_be_made_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = sglang("0.5.19").caches
    class_ = caches.module("sglang.srt.mem_cache.swa_radix_cache").SWARadixCache

    def fail(self: object, params: object) -> None:
        raise ValueError("two\nlines")

    monkeypatch.setattr(class_, "__init__", fail)
    with pytest.raises(TargetError) as caught:
        caches.make("swa", "shipped", Sizes(4, 4, 1), 1)
    assert str(caught.value) == "sglang 0.5.19: its swa cache cannot be made: ValueError: two lines"
