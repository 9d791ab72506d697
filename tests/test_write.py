"""A scenario that is written reads back the same."""

from dataclasses import replace

import pytest

from swaleak.scenario import catalogue, steps
from swaleak.scenario.toml import Scenario, parse, to_toml
from tests.test_shrink import LONG


@pytest.mark.parametrize("name", catalogue.names())
def test_a_written_scenario_reads_back_the_same(name):
    there = catalogue.load(name)
    back = parse(to_toml(there), name=name, source=there.source)
    story = " ".join(there.story.split())
    assert replace(back, story=" ".join(back.story.split())) == replace(there, story=story)


def test_a_written_scenario_keeps_every_step_and_odd_names():
    name = 'a "b" \\ é'
    script = (
        *LONG,
        steps.AllocTail(name, 3, 1),
        steps.FreeSegment(name, slots=":-1"),
        steps.FreeSwaSegment(name),
        steps.Adopt(name, "a"),
        steps.Replace(name, "a"),
        steps.Overwrite(name, "a"),
        steps.LoadBack(name),
        steps.Expect(None, 3),
    )
    there = Scenario(name="x", title=name, steps=script, story=name, source="x")
    assert parse(to_toml(there), name="x", source="x") == there
