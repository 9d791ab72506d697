"""A long failing script -> a short one: delta debugging over one predicate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

from swaleak.script.ops import Group, Op

Script = tuple[Op, ...]


def shrink(script: Script, fails: Callable[[Script], bool]) -> Script:
    """Return a script of which no operation and no node can be left out, its nodes n1, n2, ….

    ``fails(script)`` is true at the start and stays so; scripts that make no sense do not fail.
    """
    best = script
    while True:
        smaller = next((c for c in _candidates(best) if fails(c)), None)
        if smaller is None:
            return _renamed(best)
        best = smaller


def _candidates(script: Script) -> list[Script]:
    names = dict.fromkeys(name for op in script for name in nodes_of(op))
    found = [tuple(op for op in script if name not in nodes_of(op)) for name in names]
    edges = [i for i, op in enumerate(script) if isinstance(op, Group)]
    found += [tuple(op for i, op in enumerate(script) if i not in pair) for pair in pairwise(edges)]
    size = len(script) // 2
    while size:
        found += [script[:at] + script[at + size :] for at in range(0, len(script), size)]
        size //= 2
    return [candidate for candidate in found if len(candidate) < len(script)]


def nodes_of(op: Op) -> tuple[str, ...]:
    """Return the nodes that an operation names."""
    return tuple(getattr(op, key) for key in ("node", "source") if hasattr(op, key))


def _renamed(script: Script) -> Script:
    names = dict.fromkeys(name for op in script for name in nodes_of(op))
    short = {name: f"n{i}" for i, name in enumerate(names, start=1)}
    return tuple(
        replace(
            cast(Any, op),
            **{k: short[getattr(op, k)] for k in ("node", "source") if hasattr(op, k)},
        )
        for op in script
    )
