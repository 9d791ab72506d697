"""What the documents say is what the tool does."""

from __future__ import annotations

import importlib.util
import re

import pytest

from swaleak.check.replay import replay
from swaleak.script import catalogue, ops, read, scenario, tree
from swaleak.sglang.release import RELEASES
from swaleak.target import Builtin, Sizes
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


def test_the_guide_has_every_operation_and_its_keys(guide: str) -> None:
    rows = table(guide, "operation | other keys")
    keys = {name: tuple(re.findall(r"`(\w+)`", row.split("|")[0])) for name, row in rows.items()}
    assert keys == {name: extra for name, (_, extra) in read.STEPS.items()}


# what the head of a table begins with -> what the table lists
LISTED = {
    "key | what it holds": read.KEYS,
    "key of `[pools]`": read.POOL_KEYS,
    "key of an outcome": read.OUTCOME_KEYS,
    "key of `[[known]]`": read.KNOWN_KEYS,
    "kind |": scenario.KINDS,
    "operation | its value": tuple(tree.STEPS),
}


@pytest.mark.parametrize("head", LISTED)
def test_the_guide_has_every_key(head: str, guide: str) -> None:
    assert sorted(table(guide, head)) == sorted(LISTED[head])


def test_the_guide_has_every_choice_and_limit(guide: str) -> None:
    choices = (*scenario.REACHES, *scenario.STRATEGIES, *scenario.VERDICTS, *tree.CACHES)
    assert [name for name in choices if f"`{name}`" not in guide] == []
    limits = (
        f"{catalogue.MAX_FILE_BYTES >> 20} MiB, {scenario.MAX_STEPS} steps, {scenario.MAX_SLOTS} "
        f"slots a pool, {scenario.MAX_PAGE_SIZE} slots a page."
    )
    assert limits in guide


def test_what_the_guide_says_is_not_there_is_not_needed() -> None:
    text = 'schema = 1\nsteps = [{ alloc_tail = "a" }, { extend = "b" }]\nexpect.every = %s'
    bare = read.parse(text % '{ verdict = "leak" }', name="mine", source="mine.toml")
    assert (bare.title, bare.reach, bare.full_pages, bare.swa_pages, bare.page_sizes) == (
        "mine",
        "production",
        8,
        8,
        (1, 4, 256),
    )
    assert bare.steps == (ops.AllocTail("a", 1, 1), ops.Extend("b", 1))


def test_the_script_in_the_guide_comes_out_as_it_declares(guide: str) -> None:
    text = guide.partition("```toml\n")[2].partition("```")[0]
    mine = read.parse(text, name="mine", source="mine.toml")
    for strategy in scenario.STRATEGIES:
        run = replay(Builtin("cpu").make(strategy, Sizes(8, 8, 4)), mine.steps)
        declared = mine.declared(strategy)
        assert (run.verdict, run.audit.physical, run.audit.mapped) == (
            declared.verdict,
            declared.physical,
            declared.mapped,
        )


def test_the_readme_says_how_to_install_without_an_index() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    commands = ("pip wheel --no-deps .", "pip install --no-deps --no-index swaleak-*.whl")
    assert [command for command in commands if f"`{command}`" not in readme] == []
