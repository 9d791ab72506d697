"""A long failing script -> a short one. Delta debugging over one predicate.

What "fails in the same way" means is the predicate's business; nothing here plays a script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from swaleak.script import ops
from swaleak.script.ops import Op

Script = tuple[Op, ...]
Fails = Callable[[Script], bool]
_NAMES = ("node", "source")


def shrink(script: Sequence[Op], fails: Fails) -> Script:
    """Return a script for which ``fails`` is still true, its nodes called n1, n2 and so on.

    No operation, node or pair of group edges can be left out of it, and no allocation or free
    made simpler, without ``fails`` becoming false. ``fails(script)`` has to be true at the start;
    it is asked about scripts that may make no sense, and has to say False to those. The same
    arguments give the same result.
    """
    best = _prefix(tuple(script), fails)
    while True:
        before = best
        for candidates in (_without_nodes, _without_runs, _without_groups, _simpler):
            best = _descend(best, candidates, fails)
        if best == before:
            best = _descend(best, _two_simpler, fails)
        if best == before:
            return renamed(best)


def renamed(script: Sequence[Op]) -> Script:
    """Return the same script with nodes called n1, n2, … in the order of their allocation.

    A name that is allocated again is a new node.
    """
    names: dict[str, str] = {}
    given = 0
    result = []
    for op in script:
        for name in nodes_of(op):
            if name not in names or isinstance(op, ops.Alloc | ops.AllocTail):
                given += 1
                names[name] = f"n{given}"
        changes = {key: names[getattr(op, key)] for key in _NAMES if hasattr(op, key)}
        result.append(replace(cast(Any, op), **changes))
    return tuple(result)


def nodes_of(op: Op) -> tuple[str, ...]:
    """Return the nodes that an operation names."""
    return tuple(getattr(op, key) for key in _NAMES if hasattr(op, key))


def _descend(
    script: Script, candidates: Callable[[Script], Iterator[Script]], fails: Fails
) -> Script:
    """Take the first candidate that still fails, and start again from it, until none does."""
    found = True
    while found:
        found = False
        for candidate in candidates(script):
            if fails(candidate):
                script, found = candidate, True
                break
    return script


def _prefix(script: Script, fails: Fails) -> Script:
    """Cut what comes after the failure: what failed once has failed in any longer script."""
    low, high = 1, len(script)
    while low < high:
        middle = (low + high) // 2
        if fails(script[:middle]):
            high = middle
        else:
            low = middle + 1
    return script[:high] if fails(script[:high]) else script


def _without_nodes(script: Script) -> Iterator[Script]:
    """Leave out all that names a node."""
    for name in dict.fromkeys(name for op in script for name in nodes_of(op)):
        yield tuple(op for op in script if name not in nodes_of(op))


def _without_runs(script: Script) -> Iterator[Script]:
    """Leave out runs of operations, long ones first, from the end."""
    size = len(script) // 2
    while size:
        for stop in range(len(script), 0, -size):
            yield script[: max(0, stop - size)] + script[stop:]
        size //= 2


def _without_groups(script: Script) -> Iterator[Script]:
    """Leave out a group's begin and end, and keep what is between them."""
    for start, op in enumerate(script):
        if op == ops.Group("begin"):
            for stop in range(start + 1, len(script)):
                if script[stop] == ops.Group("end"):
                    yield script[:start] + script[start + 1 : stop] + script[stop + 1 :]
                    break


def _simpler(script: Script) -> Iterator[Script]:
    """Make one operation simpler: whole nodes, plain allocations, fewer pages and tokens."""
    for at, op in enumerate(script):
        for simpler in _simpler_ops(op):
            yield (*script[:at], simpler, *script[at + 1 :])


def _two_simpler(script: Script) -> Iterator[Script]:
    """Leave out or make simpler two operations at once: nodes of one length shrink together."""
    edits = [
        (at, edit)
        for at, op in enumerate(script)
        for edit in ((), *((s,) for s in _simpler_ops(op)))
    ]
    for i, (one, first) in enumerate(edits):
        for other, second in edits[i + 1 :]:
            if other > one:
                between = script[one + 1 : other]
                yield (*script[:one], *first, *between, *second, *script[other + 1 :])


def _simpler_ops(op: Op) -> Iterator[Op]:
    match op:
        case ops.Alloc(node, pages) if pages > 1:
            yield ops.Alloc(node, 1)
            yield ops.Alloc(node, pages - 1)
        case ops.AllocTail(node, pages, tail):
            yield ops.Alloc(node, pages)
            if pages > 1:
                yield ops.AllocTail(node, pages - 1, min(tail, pages - 1))
        case ops.Extend(node, tokens):
            yield ops.Alloc(node)
            if tokens > 1:
                yield ops.Extend(node, 1)
                yield ops.Extend(node, tokens - 1)
        case ops.FreeSegment(node, part):
            yield ops.Free(node, part)
        case ops.FreeSwaSegment(node, part):
            yield ops.FreeSwa(node, part)
        case ops.FreeOp(_, part) if part is not None:
            yield replace(op, part=None)
        case _:
            pass
