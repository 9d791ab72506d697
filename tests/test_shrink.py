"""A long failing script becomes a short one, and keeps what it fails by."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swaleak.explorer.shrink import renamed, shrink
from swaleak.scenario import steps


def words(script):
    return " | ".join(map(str, script))


def keys(script):
    return [step.key for step in script]


LONG = (
    steps.Alloc("a", 3),
    steps.Alloc("b"),
    steps.Group("begin"),
    steps.Free("b"),
    steps.FreeSwa("a", pages="0:1"),
    steps.Group("end"),
    steps.Extend("c", 5),
    steps.Decode("c"),
    steps.Free("c"),
    steps.FreeFull("a", pages="0:1"),
)


@pytest.mark.parametrize(
    ("fails", "left"),
    [
        (lambda s: "free_full" in keys(s), "free_full n1"),
        (lambda s: "decode" in keys(s) and "extend" in keys(s), "extend n1, 1 tokens | decode n1"),
        (lambda s: keys(s).count("group") == 2, "group begin | group end"),
        (
            lambda s: (
                sum(getattr(step, "pages", None) or 0 for step in s if step.key == "alloc") >= 2
            ),
            "alloc n1, 2 pages",
        ),
        (lambda s: len(s) >= 3, "alloc n1 | alloc n2 | group begin"),
        (lambda s: s[-1:] == LONG[-1:], "free_full n1, pages 0:1"),
    ],
)
def test_shrink(fails, left):
    assert words(shrink(LONG, fails)) == left


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, len(LONG) - 1), min_size=1))
def test_shrink_keeps_what_is_needed_and_nothing_else(needed):
    wanted = [LONG[i].key for i in sorted(needed)]

    def fails(script):
        rest = iter(keys(script))
        return all(key in rest for key in wanted)  # in this order

    assert keys(shrink(LONG, fails)) == wanted


def test_names_in_order_of_allocation_and_a_used_name_is_a_new_node():
    script = [
        steps.Alloc("x"),
        steps.Alloc("a"),
        steps.Free("x"),
        steps.Alloc("x"),
        steps.Recover("a", "x"),
    ]
    told = "alloc n1 | alloc n2 | free n1 | alloc n3 | recover n2 from n3"
    assert words(renamed(script)) == told
