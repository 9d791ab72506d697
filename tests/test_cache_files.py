"""Scenarios of the caches as files: what is read, and what is refused with which sentence."""

from __future__ import annotations

import pytest

from swaleak.errors import ScriptError
from swaleak.scenario import catalogue, steps
from swaleak.scenario.cache_steps import CACHE_STEPS
from swaleak.scenario.toml import parse

GOOD = """schema = 1
title = "T"
caches = ["swa"]
window = 2
steps = [{ insert = "AB" }, { lock = "AB" }, { group = "begin" }, { evict_swa = 2 },
  { group = "end" }, { expect = { physical = 1 } }, { unlock = "AB" }]
"""


def test_a_file_is_read():
    read = parse(GOOD, name="tree/t", source="t.toml")
    assert (read.steps, read.caches, read.window, read.page_sizes, read.on("swa").name) == (
        (
            CACHE_STEPS["insert"]("AB"),
            CACHE_STEPS["lock"]("AB"),
            steps.Group("begin"),
            CACHE_STEPS["evict_swa"](2),
            steps.Group("end"),
            steps.Expect(physical=1),
            CACHE_STEPS["unlock"]("AB"),
        ),
        ("swa",),
        2,
        (1, 4),
        "tree/t:swa",
    )


def test_it_is_told_by_what_it_declares_and_not_by_its_folder():
    of_cache = parse('schema = 1\nsteps = [{ insert = "A" }]', name="t", source="t.toml")
    of_allocator = parse(
        'schema = 1\nsteps = [{ alloc = "A" }]', name="tree/t", source="tree/t.toml"
    )
    assert (of_cache.caches, of_allocator.caches) == (("swa", "unified"), ())


BROKEN = [
    ("caches = ['lru']", "caches: unknown value 'lru'"),
    ("window = 0", "window: expected a whole number >= 1"),
    ("steps = []", "steps: needs a non-empty array"),
    ("steps = [{ insert = 'A1' }]", "step 1: insert needs a prompt"),
    (
        "caches = ['swa']\nsteps = [{ inzert = 'A' }]",
        "step 1: unknown step 'inzert'; did you mean 'insert'?",
    ),
    ("steps = [{ insert = 'A', pages = 2 }]", "step 1: unknown key 'pages'"),
    ("steps = [{ insert = 'A', match = 'B' }]", "step 1: two steps in one, insert and match"),
    ("steps = [{ insert = 'A' }, { unlock = 'A' }]", "step 2: 'A' is not locked"),
    ("steps = [{ evict_swa = 0 }]", "step 1: evict_swa: must be a whole number"),
    ("steps = [{ match = 'A' }]\npools = 3", "pools: expected a table, got a whole number"),
    ("steps = [{ match = 'A' }]\nmore = 3", "unknown key 'more'"),
]


@pytest.mark.parametrize(("text", "reason"), BROKEN, ids=[reason for _, reason in BROKEN])
def test_a_broken_file_is_one_sentence(text, reason):
    if "steps" not in text:
        text += "\nsteps = [{ match = 'A' }]"
    with pytest.raises(ScriptError) as caught:
        parse(f"schema = 1\n{text}\n", name="t", source="t.toml")
    assert str(caught.value).startswith(f"t.toml: {reason}")


def test_the_catalogue_has_both_kinds_and_starts_with_the_default():
    every = catalogue.catalogue()
    assert (every[0].name, sum(bool(s.caches) for s in every)) == (catalogue.DEFAULT, 6)
