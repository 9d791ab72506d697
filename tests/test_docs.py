"""What the documents say is what the tool does."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest

from swaleak.checker.run import run_script
from swaleak.scenario import catalogue, contract, steps, toml
from swaleak.scenario.cache_steps import CACHE_STEPS
from swaleak.scenario.steps import STEPS
from swaleak.targets.open import Builtin, Sizes
from swaleak.targets.sources import RELEASES
from tests.conftest import ROOT, wheel


@pytest.mark.wheels
def test_the_table_of_releases_is_up_to_date() -> None:
    for version in RELEASES:
        wheel(version)
    spec = importlib.util.spec_from_file_location("releases", ROOT / "docs" / "releases.py")
    assert spec and spec.loader
    releases = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(releases)
    assert releases.PAGE.read_text() == releases.page(), "run python docs/releases.py"


GUIDE = ROOT / "docs" / "scenarios.md"


@pytest.fixture
def guide() -> str:
    if not GUIDE.is_file():
        pytest.skip("docs/ is not here (a source distribution)")
    return GUIDE.read_text()


def table(guide: str, head: str) -> dict[str, str]:
    """Return a table of the guide, by what its head begins with: first column -> the rest."""
    lines = guide[guide.index(f"| {head}") :].split("\n\n")[0].splitlines()[2:]
    rows = (re.fullmatch(r"\| `([^`]+)` \| (.*) ?\|", line) for line in lines)
    return {row[1]: row[2] for row in rows if row}


def keys_of(table: type[Any]) -> list[str]:
    return list(table.__struct_encode_fields__)


def test_the_guide_has_every_step_and_its_keys(guide: str) -> None:
    rows = table(guide, "step | other keys")
    keys = {name: re.findall(r"`(\w+)`", row.split("|")[0]) for name, row in rows.items()}
    of_node = {key: [k for k in keys_of(step) if k != key] for key, step in STEPS.items()}
    assert keys == of_node | {"expect": []}  # its value is a table


# what the head of a table begins with -> what the table lists
OUTCOME = keys_of(toml.OutcomeTable)
LISTED = {
    "key | what it holds": keys_of(toml.FileTable),
    "key of `[pools]`": keys_of(toml.PoolsTable),
    "key of an outcome": OUTCOME,
    "key of `[[known]]`": [key for key in keys_of(toml.KnownTable) if key not in OUTCOME],
    "kind |": toml.KINDS,
    "step | its value": tuple(CACHE_STEPS),
}


@pytest.mark.parametrize("head", LISTED)
def test_the_guide_has_every_key(head: str, guide: str) -> None:
    assert sorted(table(guide, head)) == sorted(LISTED[head])


def test_the_guide_has_every_choice_and_limit(guide: str) -> None:
    choices = (*contract.CONTRACTS, *toml.STRATEGIES, *toml.VERDICTS, *toml.CACHES)
    assert [name for name in choices if f"`{name}`" not in guide] == []
    limits = (
        f"{catalogue.MAX_FILE_BYTES >> 20} MiB, {toml.MAX_STEPS} steps, {toml.MAX_SLOTS} "
        f"slots per pool, {toml.MAX_PAGE_SIZE} slots per page."
    )
    assert limits in guide


def test_what_the_guide_says_is_not_there_is_not_needed() -> None:
    text = 'schema = 1\nsteps = [{ alloc_tail = "a" }, { extend = "b" }]\nexpect.every = %s'
    bare = toml.parse(text % '{ verdict = "leak" }', name="mine", source="mine.toml")
    assert (bare.title, bare.reach, bare.full_pages, bare.swa_pages, bare.page_sizes) == (
        "mine",
        "production",
        8,
        8,
        (1, 4, 256),
    )
    assert bare.steps == (steps.AllocTail("a", 1, 1), steps.Extend("b", 1))


def test_the_script_in_the_guide_comes_out_as_it_declares(guide: str) -> None:
    text = guide.partition("```toml\n")[2].partition("```")[0]
    mine = toml.parse(text, name="mine", source="mine.toml")
    for strategy in toml.STRATEGIES:
        run = run_script(Builtin("cpu").make(strategy, Sizes(8, 8, 4)), mine.steps)
        declared = mine.declared(strategy)
        assert (run.verdict, run.comparison.physical, run.comparison.mapped) == (
            declared.verdict,
            declared.physical,
            declared.mapped,
        )
