"""Tree scenarios as files: what is read, and what is refused with which sentence."""

from __future__ import annotations

import pytest
from swaleak.script import tree
from swaleak.script.ops import Expect, Group, TreeOp

from swaleak.errors import ScriptError

GOOD = """schema = 1
title = "T"
caches = ["swa"]
window = 2
steps = [{ insert = "AB" }, { lock = "AB" }, { group = "begin" }, { evict_swa = 2 },
  { group = "end" }, { expect = { physical = 1 } }, { unlock = "AB" }]
"""


def test_a_file_is_read():
    read = tree.parse(GOOD, name="tree/t", source="t.toml")
    assert (read.steps, read.caches, read.window, read.about.page_sizes, read.on("swa").name) == (
        (
            TreeOp("insert", "AB"),
            TreeOp("lock", "AB"),
            Group("begin"),
            TreeOp("evict_swa", 2),
            Group("end"),
            Expect(physical=1),
            TreeOp("unlock", "AB"),
        ),
        ("swa",),
        2,
        (1, 4),
        "tree/t:swa",
    )


BROKEN = [
    ("caches = ['lru']", "caches: unknown value 'lru'"),
    ("window = 0", "window: must be a whole number"),
    ("steps = []", "steps: needs a non-empty array"),
    ("steps = [{ insert = 'A1' }]", "step 1: insert needs a prompt"),
    ("steps = [{ inzert = 'A' }]", "step 1: unknown operation 'inzert'; did you mean 'insert'?"),
    ("steps = [{ insert = 'A', pages = 2 }]", "step 1: unknown key 'pages'"),
    ("steps = [{ insert = 'A' }, { unlock = 'A' }]", "step 2: 'A' is not locked"),
    ("steps = [{ evict_swa = 0 }]", "step 1: evict_swa: must be a whole number"),
    ("steps = [{ match = 'A' }]\npools = 3", "pools: must be a table"),
    ("steps = [{ match = 'A' }]\nmore = 3", "unknown key 'more'"),
]


@pytest.mark.parametrize(("text", "reason"), BROKEN, ids=[reason for _, reason in BROKEN])
def test_a_broken_file_is_one_sentence(text, reason):
    if "steps" not in text:
        text += "\nsteps = [{ match = 'A' }]"
    with pytest.raises(ScriptError) as caught:
        tree.parse(f"schema = 1\n{text}\n", name="t", source="t.toml")
    assert str(caught.value).startswith(f"t.toml: {reason}")


def test_the_catalogue_reads_and_starts_with_the_default():
    assert next(s.about.name for s in tree.catalogue()) == tree.DEFAULT
