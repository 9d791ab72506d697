"""Scenario -> scenario file. What is written here, ``read.parse`` reads back the same."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from swaleak.script import ops
from swaleak.script.ops import Op
from swaleak.script.scenario import SCHEMA, Known, Outcome, Scenario


def to_toml(scenario: Scenario) -> str:
    """Return a scenario as TOML, keys in the order of the shipped files."""
    story = "\n".join(textwrap.wrap(" ".join(scenario.story.split()), 98, break_long_words=False))
    lines = [f"schema = {SCHEMA}", f"title = {_value(scenario.title)}"]
    if scenario.upstream:
        lines.append(f"upstream = {_value(list(scenario.upstream))}")
    lines += [
        f"reach = {_value(scenario.reach)}",
        f'story = """\n{_escaped(story)}\n"""',
        "steps = [",
        *(f"  {_value(step_of(op))}," for op in scenario.steps),
        "]",
        "",
        "[pools]",
        f"full_pages = {scenario.full_pages}",
        f"swa_pages = {scenario.swa_pages}",
        f"page_sizes = {_value(list(scenario.page_sizes))}",
    ]
    if scenario.expect:
        lines += ["", "[expect]"]
        lines += [f"{name} = {_value(_outcome(o))}" for name, o in scenario.expect.items()]
    for known in scenario.known:
        lines += ["", "[[known]]", *(f"{k} = {_value(v)}" for k, v in _known(known).items())]
    return "\n".join(lines) + "\n"


def step_of(op: Op) -> dict[str, Any]:
    """Return an operation as the table that a scenario file has for it."""
    match op:
        case ops.Alloc(node, pages):
            return {"alloc": node} | ({"pages": pages} if pages != 1 else {})
        case ops.AllocTail(node, pages, tail):
            return {"alloc_tail": node, "pages": pages, "tail": tail}
        case ops.Extend(node, tokens):
            return {"extend": node, "tokens": tokens}
        case ops.Group(edge):
            return {"group": edge}
        case ops.Expect(physical, mapped):
            return {"expect": _there({"physical": physical, "mapped": mapped})}
        case ops.LoadBack(node) | ops.Decode(node):
            return {op.key: node}
        case ops.Recover() | ops.Adopt() | ops.Replace() | ops.Overwrite():
            return {op.key: op.node, "from": op.source}
        case _:
            part = op.part
            return {op.key: op.node} | ({part.unit: str(part).split()[1]} if part else {})


def _outcome(outcome: Outcome) -> dict[str, Any]:
    counts = {"physical": outcome.physical, "mapped": outcome.mapped}
    kinds = list(outcome.kinds) or None
    return {"verdict": outcome.verdict} | _there(counts | {"kinds": kinds})


def _known(known: Known) -> dict[str, Any]:
    where = {
        "versions": str(known.versions),
        "page_sizes": list(known.page_sizes) or None,
        "fixed": known.fixed,
        "fix": known.fix,
    }
    return _there(where) | _outcome(known.outcome)


def _there(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None}


def _value(value: Any) -> str:
    """Return a value as TOML: its strings are JSON's, but for one control character."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(v)}" for key, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)


def _escaped(text: str) -> str:
    """Return lines of text as they may stand in a multi-line string."""
    return "\n".join(_value(line)[1:-1] for line in text.split("\n"))
