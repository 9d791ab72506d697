"""A scenario that is written reads back the same."""

from dataclasses import replace

import pytest
from swaleak.script.ops import Part

from swaleak.scenario import catalogue as scenarios
from swaleak.scenario import steps as ops
from swaleak.scenario.toml import Scenario, parse, to_toml
from tests.test_shrink import LONG


@pytest.mark.parametrize("name", scenarios.names())
def test_a_written_scenario_reads_back_the_same(name):
    there = scenarios.load(name)
    back = parse(to_toml(there), name=name, source=there.source)
    story = " ".join(there.story.split())
    assert replace(back, story=" ".join(back.story.split())) == replace(there, story=story)


def test_a_written_scenario_keeps_every_operation_and_odd_names():
    name = 'a "b" \\ é'
    steps = (
        *LONG,
        ops.AllocTail(name, 3, 1),
        ops.FreeSegment(name, Part("slots", None, -1)),
        ops.FreeSwaSegment(name),
        ops.Adopt(name, "a"),
        ops.Replace(name, "a"),
        ops.Overwrite(name, "a"),
        ops.LoadBack(name),
        ops.Expect(None, 3),
    )
    there = Scenario(name="x", title=name, steps=steps, story=name, source="x")
    assert parse(to_toml(there), name="x", source="x") == there
