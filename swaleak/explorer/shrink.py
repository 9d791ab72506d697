"""A long failing script -> a short one. Delta debugging over one predicate.

What "fails in the same way" means is the predicate's business; nothing here runs a script.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from swaleak.scenario import steps
from swaleak.scenario.cache_steps import CacheStep
from swaleak.scenario.request_steps import Admit, Grow, RequestStep
from swaleak.scenario.steps import NAMES, FreeStep, Step

Script = tuple[Step, ...]
Fails = Callable[[Script], bool]


def shrink(script: Sequence[Step], fails: Fails) -> Script:
    """Return a script for which ``fails`` is still true, its nodes called n1, n2 and so on.

    No step, node or pair of group edges can be left out of it, and no allocation or free made
    simpler, without ``fails`` becoming false. ``fails(script)`` has to be true at the start; it is
    asked about scripts that may make no sense, and has to say False to those. The same arguments
    give the same result.
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


def renamed(script: Sequence[Step]) -> Script:
    """Return the same script with nodes called n1, n2, … in the order of their allocation.

    A name that is allocated again is a new node. Requests are called r1, r2 and so on.
    """
    names: dict[str, str] = {}
    given = 0
    result = []
    for step in script:
        for name in step.nodes():
            if name not in names or isinstance(step, steps.Alloc | steps.AllocTail | Admit):
                given += 1
                names[name] = f"{'r' if isinstance(step, RequestStep) else 'n'}{given}"
        changes = {key: names[getattr(step, key)] for key in NAMES if hasattr(step, key)}
        result.append(replace(step, **changes))
    return tuple(result)


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
    """Binary-search the shortest failing prefix."""
    low, high = 1, len(script)
    while low < high:
        middle = (low + high) // 2
        if fails(script[:middle]):
            high = middle
        else:
            low = middle + 1
    return script[:high] if fails(script[:high]) else script


def _without_nodes(script: Script) -> Iterator[Script]:
    """Leave out all steps of a node."""
    for name in dict.fromkeys(name for step in script for name in step.nodes()):
        yield tuple(step for step in script if name not in step.nodes())


def _without_runs(script: Script) -> Iterator[Script]:
    """Leave out runs of steps, long ones first, from the end."""
    size = len(script) // 2
    while size:
        for stop in range(len(script), 0, -size):
            yield script[: max(0, stop - size)] + script[stop:]
        size //= 2


def _without_groups(script: Script) -> Iterator[Script]:
    """Leave out a group's begin and end, and keep what is between them."""
    for start, step in enumerate(script):
        if step == steps.Group("begin"):
            for stop in range(start + 1, len(script)):
                if script[stop] == steps.Group("end"):
                    yield script[:start] + script[start + 1 : stop] + script[stop + 1 :]
                    break


def _simpler(script: Script) -> Iterator[Script]:
    """Make one step simpler: whole nodes, plain allocations, fewer pages and tokens."""
    for at, step in enumerate(script):
        for simpler in _simpler_steps(step):
            yield (*script[:at], simpler, *script[at + 1 :])


def _two_simpler(script: Script) -> Iterator[Script]:
    """Leave out or make simpler two steps at once: nodes of one length shrink together."""
    edits = [
        (at, edit)
        for at, step in enumerate(script)
        for edit in ((), *((simpler,) for simpler in _simpler_steps(step)))
    ]
    for i, (one, first) in enumerate(edits):
        for other, second in edits[i + 1 :]:
            if other > one:
                between = script[one + 1 : other]
                yield (*script[:one], *first, *between, *second, *script[other + 1 :])


def _simpler_steps(step: Step) -> Iterator[Step]:
    match step:
        case steps.Alloc(node, pages) if pages > 1:
            yield steps.Alloc(node, 1)
            yield steps.Alloc(node, pages - 1)
        case steps.AllocTail(node, pages, tail):
            yield steps.Alloc(node, pages)
            if pages > 1:
                yield steps.AllocTail(node, pages - 1, min(tail, pages - 1))
        case steps.Extend(node, tokens):
            yield steps.Alloc(node)
            if tokens > 1:
                yield steps.Extend(node, 1)
                yield steps.Extend(node, tokens - 1)
        case steps.FreeSegment(node, pages, slots):
            yield steps.Free(node, pages, slots)
        case steps.FreeSwaSegment(node, pages, slots):
            yield steps.FreeSwa(node, pages, slots)
        case FreeStep() if step.part is not None:
            yield replace(step, pages=None, slots=None)
        case Admit(request, prompt):
            parts = re.findall(r"[A-Za-z](?:/\d+)?", prompt)
            for at in range(len(parts) if len(parts) > 1 else 0):
                yield Admit(request, "".join(parts[:at] + parts[at + 1 :]))
            for at, part in enumerate(parts):
                for simpler in {part[0], "A"} - {part}:
                    yield Admit(request, "".join([*parts[:at], simpler, *parts[at + 1 :]]))
        case Grow(request, by, tokens):
            if by is not None and by != "A":
                yield Grow(request, "A")
            if tokens > 1:
                yield Grow(request)
        case CacheStep() if isinstance(step.value, int) and step.value > 1:
            yield replace(step, value=1)
