"""Scenario -> scenario file. What is written here, ``scenario.parse`` reads back the same."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from swaleak.script import ops
from swaleak.script.ops import Op
from swaleak.script.scenario import SCHEMA, Outcome, Scenario


def to_toml(scenario: Scenario) -> str:
    """Return a scenario as TOML, keys in the order of the shipped files."""
    story = "\n".join(textwrap.wrap(" ".join(scenario.story.split()), 98))
    lines = [
        f"schema = {SCHEMA}",
        f"title = {json.dumps(scenario.title)}",
        f"reach = {json.dumps(scenario.reach)}",
        f'story = """\n{story}\n"""',
        "steps = [",
        *(f"  {_table(_step(op))}," for op in scenario.steps),
        "]",
        "",
        "[pools]",
        f"full_pages = {scenario.full_pages}",
        f"swa_pages = {scenario.swa_pages}",
        f"page_sizes = {list(scenario.page_sizes)}",
        "",
        "[expect]",
        *(f"{name} = {_table(_outcome(out))}" for name, out in scenario.expect.items()),
    ]
    return "\n".join(lines) + "\n"


def _step(op: Op) -> dict[str, Any]:
    match op:
        case ops.Alloc(node, pages):
            return {"alloc": node} | ({"pages": pages} if pages != 1 else {})
        case ops.AllocTail(node, pages, tail):
            return {"alloc_tail": node, "pages": pages, "tail": tail}
        case ops.Group(edge):
            return {"group": edge}
        case ops.Expect(physical, mapped):
            counts = {"physical": physical, "mapped": mapped}
            return {"expect": {k: v for k, v in counts.items() if v is not None}}
        case ops.LoadBack(node):
            return {"load_back": node}
        case ops.Recover() | ops.Adopt() | ops.Replace() | ops.Overwrite():
            return {op.key: op.node, "from": op.source}
        case _:
            part = op.part
            return {op.key: op.node} | ({part.unit: str(part).split()[1]} if part else {})


def _outcome(outcome: Outcome) -> dict[str, Any]:
    table = {"verdict": outcome.verdict, "physical": outcome.physical, "mapped": outcome.mapped}
    kinds = {"kinds": list(outcome.kinds)} if outcome.kinds else {}
    return {k: v for k, v in table.items() if v is not None} | kinds


def _table(table: dict[str, Any]) -> str:
    def value(item: Any) -> str:
        return _table(item) if isinstance(item, dict) else json.dumps(item)

    return "{ " + ", ".join(f"{key} = {value(item)}" for key, item in table.items()) + " }"
