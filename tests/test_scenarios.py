"""The catalogue: what is published must come out, on the built-in model and on SGLang's code."""

from __future__ import annotations

import pytest
from packaging.specifiers import SpecifierSet

from swaleak.checker.case import run_case
from swaleak.scenario import catalogue as scenarios
from swaleak.targets.open import Builtin, Target
from swaleak.targets.sources import RELEASES
from tests.conftest import sglang

BUILTIN = Builtin("cpu")
CATALOGUE = {scenario.name: scenario for scenario in scenarios.catalogue() if not scenario.caches}

# scenario -> (deferred, every other strategy), as physical/mapped verdict
MODEL = {
    "tombstone-recovery": ("2/1 leak", "2/2 clean"),
    "recovery-after-the-group": ("2/2 clean", "2/2 clean"),
    "tombstone-replace": ("2/2 clean", "2/2 clean"),
    "steady-group": ("4/4 clean", "4/4 clean"),
    "partial-page-free": ("2/2 clean", "2/2 clean"),
    "adopt-in-group": ("2/1 leak", "2/2 clean"),
    "hicache-load-back": ("2/1 leak", "2/2 clean"),
    "grouped-free-adopt": ("2/1 leak", "2/2 clean"),
    "nested-group": ("refused", "refused"),
    "double-group-end": ("refused", "refused"),
    "buffer-overwritten": ("2/2 clean", "2/2 clean"),
    "free-of-a-tombstone": ("1/1 clean", "1/1 clean"),
    "segment-free-of-a-tombstone": ("1/1 clean", "1/1 clean"),
}

# scenario -> releases -> what SGLang as shipped does there, with the kinds of violation;
# what is not named here is clean
SHIPPED: dict[str, dict[str, str]] = {
    "tombstone-recovery": {"==0.5.18": "2/1 leak: leak lost"},
    "partial-page-free": {"<0.5.14": "1/2 corrupt: dangling shared stale"},
    "adopt-in-group": {"==0.5.18": "2/1 leak: leak lost"},
    "hicache-load-back": {"==0.5.18": "2/1 leak: leak lost"},
    "grouped-free-adopt": {"<0.5.20": "2/1 leak: leak lost"},
    "nested-group": {
        "==0.5.18": "2/2 corrupt: stale",
        "==0.5.19": "2/1 leak: leak",
        ">=0.5.20": "refused:",
    },
    "double-group-end": {"<0.5.19": "1/1 corrupt: double-free"},
    "buffer-overwritten": {"<0.5.18": "2/2 leak: dangling leak lost stale"},
    "free-of-a-tombstone": {">=0.5.20": "1/1 corrupt: reserved"},
    "segment-free-of-a-tombstone": {">=0.5.20": "1/1 corrupt: reserved"},
}
PAGE_SIZE_1_ONLY = ("free-of-a-tombstone",)


def outcome(target: Target, name: str, strategy: str, page_size: int) -> str:
    case = run_case(CATALOGUE[name], target, strategy, page_size)
    return (
        "refused" if case.verdict == "refused" else f"{case.physical}/{case.mapped} {case.verdict}"
    )


@pytest.mark.parametrize("strategy", ["eager", "deferred", "enqueue", "barrier"])
@pytest.mark.parametrize("name", MODEL)
def test_built_in_model(name: str, strategy: str) -> None:
    sizes = CATALOGUE[name].page_sizes
    expected = MODEL[name][0 if strategy == "deferred" else 1]
    found = {size: outcome(BUILTIN, name, strategy, size) for size in sizes}
    assert found == dict.fromkeys(sizes, expected)


def test_page_sizes() -> None:
    sizes = {name: scenario.page_sizes for name, scenario in CATALOGUE.items() if name in MODEL}
    assert sizes == {**dict.fromkeys(MODEL, (1, 4, 256)), "partial-page-free": (4, 256)}


def test_every_scenario_has_a_story_and_declares_what_the_model_does() -> None:
    for scenario in CATALOGUE.values():
        assert len(scenario.story) > 100, scenario.name
        for strategy in BUILTIN.strategies():
            for size in scenario.page_sizes:
                case = run_case(scenario, BUILTIN, strategy, size)
                assert case.as_declared, (scenario.name, strategy, size, case.run)


@pytest.mark.wheels
@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("name", MODEL)
def test_sglang_as_shipped(name: str, version: str) -> None:
    target = sglang(version)
    for size in CATALOGUE[name].page_sizes:
        case = run_case(CATALOGUE[name], target, "shipped", size)
        kinds = sorted({violation.kind for violation in case.run.comparison.violations})
        told = " ".join([outcome(target, name, "shipped", size) + ":", *kinds])
        clean = f"{MODEL[name][1] if 'clean' in MODEL[name][1] else '1/1 clean'}:"
        rows = SHIPPED.get(name, {}) if size == 1 or name not in PAGE_SIZE_1_ONLY else {}
        expected = next((row for v, row in rows.items() if version in SpecifierSet(v)), clean)
        assert (told, case.as_declared) == (expected, True), size


CACHE_CASES = [(scenario, cache) for scenario in scenarios.catalogue() for cache in scenario.caches]


@pytest.mark.wheels
@pytest.mark.parametrize("version", RELEASES)
def test_what_the_catalogue_declares_of_the_caches(version: str) -> None:
    """Every cache that a release has, with its own allocator and with each strategy below it."""
    target = sglang(version)
    wrong = [
        (scenario.name, cache, strategy, size, case.run)
        for scenario, cache in CACHE_CASES
        if cache not in target.caches.left_out
        for strategy in target.strategies()
        for size in scenario.page_sizes
        if not (case := run_case(scenario, target, strategy, size, cache=cache)).as_declared
    ]
    assert wrong == []
    assert list(target.caches.left_out) == ([] if version < "0.5.21" else ["swa"])


@pytest.mark.wheels
@pytest.mark.parametrize("version", RELEASES)
def test_what_the_catalogue_declares_of_sglang(version: str) -> None:
    """Shipped by its known failures, grafts by our strategies', whatever is in the catalogue."""
    target = sglang(version)
    wrong = [
        (scenario.name, strategy, size, case.run)
        for scenario in CATALOGUE.values()
        for strategy in target.strategies()
        for size in scenario.page_sizes
        if not (case := run_case(scenario, target, strategy, size)).as_declared
    ]
    assert wrong == []


@pytest.mark.wheels
@pytest.mark.parametrize(
    "name", [name for name, scenario in CATALOGUE.items() if scenario.reach == "production"]
)
def test_deferred_in_the_model_is_0_5_18(name: str) -> None:
    """SGLang's own code is the judge of the model, count by count, step by step."""
    scenario, target = CATALOGUE[name], sglang("0.5.18")
    for size in scenario.page_sizes:
        model, real = (
            run_case(scenario, of, strategy, size, keep_steps=True).run
            for of, strategy in ((BUILTIN, "deferred"), (target, "shipped"))
        )
        assert (model.verdict, model.comparison) == (real.verdict, real.comparison)
        assert [step.comparison for step in model.steps] == [step.comparison for step in real.steps]


@pytest.mark.wheels
@pytest.mark.parametrize(
    ("version", "strategy"),
    [(v, "eager") for v in RELEASES[:5]]
    + [("0.5.18", "deferred")]
    + [(v, "enqueue") for v in RELEASES[6:]],
)
def test_what_a_release_ships_is_found_by_probing(version: str, strategy: str) -> None:
    target = sglang(version)
    origins = {name: target.origin(name) for name in target.strategies()}
    grafted = dict.fromkeys(("shipped", "eager", "deferred", "enqueue", "barrier"), "grafted")
    assert (target.ships, origins) == (
        strategy,
        grafted | {"shipped": "shipped", strategy: "shipped"},
    )
