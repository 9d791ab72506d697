"""A trace that fails -> a small scenario that fails in the same way.

A trace is followed until it fails. Then it is read again (``pages.operations``), and only those
operations are kept that have to do with the pages that were re-pointed in the group that failed;
what is left is short enough for ``shrink``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from swaleak.check.follow import Followed, follow
from swaleak.check.replay import Run, replay
from swaleak.errors import ScriptError, UsageError
from swaleak.script import ops
from swaleak.script.ops import Op
from swaleak.script.scenario import MAX_STEPS, Scenario
from swaleak.script.trace import TraceReader, read_header
from swaleak.search.pages import operations
from swaleak.search.shrink import Script, nodes_of, shrink
from swaleak.search.witness import declared
from swaleak.target import SHIPPED, Sizes, Target


class Reduced(NamedTuple):
    """A small scenario, what comes out of it, and how the trace failed."""

    scenario: Scenario
    run: Run
    followed: Followed


def reduce(path: Path, target: Target, strategy: str) -> Reduced:
    """Return a scenario that fails as the trace does.

    Raises ``UsageError`` for a trace that does not fail, or that fails in a way that operations on
    nodes cannot express.
    """
    followed = follow(
        TraceReader(path), lambda sizes: target.make(strategy, sizes), lambda f: bool(f.first_bad)
    )
    if followed.first_bad is None:
        raise UsageError(f"{path}: nothing to shrink, it is {followed.verdict} under {strategy}")
    page_size = read_header(path).page_size
    for script in _slices(path, page_size, followed.first_bad.line):
        sizes = _room(script, page_size)
        run = _run(script, target, strategy, sizes)
        if run is not None and run.verdict == followed.verdict:
            small = _small(script, _Fails(target, strategy, page_size, run.verdict))
            found = replay(target.make(strategy, _room(small, page_size)), small)
            about = _scenario(small, target, strategy, page_size, path, found)
            return Reduced(about, found, followed)
    raise UsageError(
        f"{path}: {followed.verdict} after group {followed.first_bad.group}, but not so as "
        f"operations on single nodes; `swaleak replay` shows it"
    )


@dataclass(frozen=True, slots=True)
class _Fails:
    """The predicate: does a script fail with this verdict?"""

    target: Target
    strategy: str
    page_size: int
    verdict: str

    def __call__(self, script: Script) -> bool:
        run = _run(script, self.target, self.strategy, _room(script, self.page_size))
        return run is not None and run.verdict == self.verdict


def _small(script: Script, fails: Callable[[Script], bool]) -> Script:
    """Shrink, also by what a recorded run is full of: nodes that were recovered once before."""
    while True:
        script = shrink(script, fails)
        shorter = next((s for s in _without_recoveries(script) if fails(s)), None)
        if shorter is None:
            return script
        script = shorter


def _without_recoveries(script: Script) -> Iterator[Script]:
    """Leave out that a node became a tombstone and was recovered from another."""
    for at, op in enumerate(script):
        if isinstance(op, ops.Recover | ops.Adopt):
            for before in range(at):
                if isinstance(script[before], ops.FreeSwa) and op.node in nodes_of(script[before]):
                    yield tuple(
                        other
                        for i, other in enumerate(script)
                        if i != before and op.source not in nodes_of(other)
                    )


def _run(script: Script, target: Target, strategy: str, sizes: Sizes) -> Run | None:
    try:
        return replay(target.make(strategy, sizes), script)
    except ScriptError:  # a script that makes no sense
        return None


def _room(script: Script, page_size: int) -> Sizes:
    pages = max(8, sum(isinstance(op, ops.Alloc | ops.AllocTail | ops.LoadBack) for op in script))
    return Sizes(pages, pages, page_size)


def _scenario(
    script: Script, target: Target, strategy: str, page_size: int, path: Path, run: Run
) -> Scenario:
    sizes = _room(script, page_size)
    name = target.ships if strategy == SHIPPED and target.ships else strategy
    bare = Scenario(
        name="shrunk",
        title=f"{run.verdict} of {target.name} under {name}, from a recorded run",
        steps=script,
        story=f"Shrunk from {path.name}.",
        full_pages=sizes.full_pages,
        swa_pages=sizes.swa_pages,
        page_sizes=(page_size,),
    )
    return declared(bare, run, target, strategy)


def _slices(path: Path, page_size: int, last: int) -> Iterator[Script]:
    """Yield scripts that may show the failure, the most specific ones first."""
    failing: list[Op] = []
    for op, _ in operations(path, page_size, last):
        failing = [] if op == ops.Group("begin") else [*failing, op]
    pairs = [set(nodes_of(op)) for op in failing if len(nodes_of(op)) == 2]
    loaded = [{op.node} for op in failing if isinstance(op, ops.LoadBack)]
    everyone = {name for op in failing for name in nodes_of(op)}
    for names in (*pairs, *loaded, everyone):
        yield _only(path, page_size, last, names)
    whole = tuple(op for op, _ in operations(path, page_size, last))
    if len(whole) <= MAX_STEPS:
        yield whole


def _only(path: Path, page_size: int, last: int, names: set[str]) -> Script:
    """Return the operations on ``names`` and on whom they share operations with."""
    while True:
        kept: list[Op] = []
        more = set(names)
        for op, _ in operations(path, page_size, last):
            mine = nodes_of(op)
            if names.intersection(mine):
                more.update(mine)
                kept.append(op)
            elif isinstance(op, ops.Group):
                if op.edge == "end" and kept and kept[-1] == ops.Group("begin"):
                    kept.pop()  # a group in which nothing of theirs happened
                else:
                    kept.append(op)
        if more == names:
            return tuple(kept)
        names = more
