"""A trace that fails -> a small scenario that fails in the same way.

A trace is followed until it fails. Then it is read again, as steps on nodes of one page each, and
only those steps are kept that have to do with the pages that were re-pointed in the group that
failed; what is left is short enough for ``shrink``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from swaleak.checker.run import Run, run_script
from swaleak.errors import ScriptError, UsageError
from swaleak.explorer.counterexample import declared
from swaleak.explorer.shrink import Script, shrink
from swaleak.scenario import steps
from swaleak.scenario.calls import Call, Header, Slots
from swaleak.scenario.steps import Step
from swaleak.scenario.toml import MAX_STEPS, Scenario
from swaleak.targets.driver import Sizes
from swaleak.targets.open import SHIPPED, Target
from swaleak.trace.format import TraceReader, read_header
from swaleak.trace.replay import TraceRun, run_trace


class Reduced(NamedTuple):
    """A small scenario, what comes out of it, and how the trace failed."""

    scenario: Scenario
    run: Run
    trace: TraceRun


def reduce(path: Path, target: Target, strategy: str) -> Reduced:
    """Return a scenario that fails as the trace does.

    Raises ``UsageError`` for a trace that does not fail, or that fails in a way that steps on
    nodes cannot express.
    """
    followed = run_trace(
        TraceReader(path),
        lambda header: target.make(strategy, sizes_of(header)),
        lambda so_far: bool(so_far.first_bad),
    )
    if followed.first_bad is None:
        raise UsageError(f"{path}: nothing to shrink, it is {followed.verdict} under {strategy}")
    page_size = read_header(path).page_size
    for script in _slices(path, page_size, followed.first_bad.line):
        sizes = _room(script, page_size)
        run = _run(script, target, strategy, sizes)
        if run is not None and run.verdict == followed.verdict:
            small = _small(script, _Fails(target, strategy, page_size, run.verdict))
            found = run_script(target.make(strategy, _room(small, page_size)), small)
            about = _scenario(small, target, strategy, page_size, path, found)
            return Reduced(about, found, followed)
    raise UsageError(
        f"{path}: {followed.verdict} after group {followed.first_bad.group}, but not so as "
        f"steps on single nodes; `swaleak replay` shows it"
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
        if isinstance(op, steps.Recover | steps.Adopt):
            for before in range(at):
                if isinstance(script[before], steps.FreeSwa) and op.node in script[before].nodes():
                    yield tuple(
                        other
                        for i, other in enumerate(script)
                        if i != before and op.source not in other.nodes()
                    )


def sizes_of(header: Header) -> Sizes:
    """Return the pools that a trace was recorded on."""
    return Sizes(header.full_pages, header.swa_pages, header.page_size)


def _run(script: Script, target: Target, strategy: str, sizes: Sizes) -> Run | None:
    try:
        run = run_script(target.make(strategy, sizes), script)
    except ScriptError:  # a script that makes no sense
        return None
    return None if run.mistakes else run  # its failure would be the caller's


def _room(script: Script, page_size: int) -> Sizes:
    pages = max(
        8, sum(isinstance(step, steps.Alloc | steps.AllocTail | steps.LoadBack) for step in script)
    )
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
    failing: list[Step] = []
    for op, _ in steps_of(path, page_size, last):
        failing = [] if op == steps.Group("begin") else [*failing, op]
    pairs = [set(op.nodes()) for op in failing if len(op.nodes()) == 2]
    loaded = [{op.node} for op in failing if isinstance(op, steps.LoadBack)]
    everyone = {name for op in failing for name in op.nodes()}
    for names in (*pairs, *loaded, everyone):
        yield _only(path, page_size, last, names)
    whole = tuple(op for op, _ in steps_of(path, page_size, last))
    if len(whole) <= MAX_STEPS:
        yield whole


def _only(path: Path, page_size: int, last: int, names: set[str]) -> Script:
    """Return the steps on ``names`` and on whom they share steps with."""
    while True:
        kept: list[Step] = []
        more = set(names)
        for op, _ in steps_of(path, page_size, last):
            mine = op.nodes()
            if names.intersection(mine):
                more.update(mine)
                kept.append(op)
            elif isinstance(op, steps.Group):
                if op.edge == "end" and kept and kept[-1] == steps.Group("begin"):
                    kept.pop()  # a group in which nothing of theirs happened
                else:
                    kept.append(op)
        if more == names:
            return tuple(kept)
        names = more


def steps_of(path: Path, page_size: int, last: int) -> Iterator[tuple[Step, int]]:
    """Yield the trace as steps on nodes of one page, up to line ``last``, each with its line.

    Raises ``ScriptError`` for a trace that cannot be read.
    """
    pages = _Pages(page_size)
    for item in TraceReader(path):
        if isinstance(item, Header):
            pages = _Pages(page_size)
            continue
        for op in pages.read(item.call):
            yield op, item.number
        if item.number >= last:
            return


T = TypeVar("T")


@dataclass(slots=True)
class _Page:
    """A full page: a node. ``peer``: number of the SWA page it maps to. ``shown``: allocated."""

    name: str
    peer: int | None = None
    owned: bool = True
    shown: bool = False


class _Numbered(Generic[T]):
    """Something for runs of numbers, found by any number in the run."""

    def __init__(self) -> None:
        self.firsts: list[int] = []
        self.items: dict[int, T] = {}

    def add(self, first: int, item: T) -> None:
        self.firsts.append(first)
        self.items[first] = item

    def find(self, ranges: Slots) -> list[tuple[int, T]]:
        """Return the items that ranges touch, with their first numbers, each once, in order."""
        found: dict[int, T] = {}
        for number, count in ranges:
            if number == 0:
                continue
            at = max(0, bisect_right(self.firsts, number) - 1)
            while at < len(self.firsts) and self.firsts[at] < number + count:
                first = self.firsts[at]
                found.setdefault(first, self.items[first])
                at += 1
        return list(found.items())


class _Pages:
    """Reads a trace as what happens to single pages."""

    def __init__(self, page_size: int) -> None:
        self.size = page_size
        self.full: _Numbered[_Page] = _Numbered()
        self.swa: _Numbered[None] = _Numbered()
        self.holder: dict[int, _Page] = {}  # SWA page -> who maps to it
        self.giving: dict[str, _Page] = {}  # a node whose SWA page somebody else maps to now

    def read(self, call: Call) -> Iterator[Step]:
        """Yield what a line is for the pages it touches."""
        op = call.op
        data = {name: getattr(call, name) for name in call.__struct_fields__}
        match op:
            case "begin":
                yield steps.Group("begin")
            case "end":
                yield from (steps.Adopt(to.name, name) for name, to in self.giving.items())
                self.giving.clear()
                yield steps.Group("end")
            case "alloc" | "alloc_both" | "alloc_full" | "alloc_swa":
                yield from self._alloc(op, data["n"], data.get("full"), data.get("swa"))
            case "extend" | "decode" | "tail":
                yield from self._grow(data)
            case "point":
                yield from self._point(data["full"], data["swa"])
            case "free_full_pool":
                for _, page in self.full.find(data["full"]):
                    yield from self._free_full_pool(page)
            case "clear" | "free_swa_pool":
                pass  # part of a recovery, which ends in free_full_pool
            case _:
                for _, page in self.full.find(data["full"]):
                    yield from self._free(op, page)

    def _alloc(self, op: str, slots: int, full: int | None, swa: int | None) -> Iterator[Step]:
        for at in range(0, slots, self.size):
            if swa is not None:
                self.swa.add(swa + at, None)
            if full is not None:
                page = _Page(f"p{full + at}")
                self.full.add(full + at, page)
                if swa is not None:
                    yield from self._show(page, swa + at)

    def _show(self, page: _Page, peer: int | None) -> Iterator[Step]:
        page.shown = True
        if peer is None:
            yield steps.AllocTail(page.name, 1, 0)
            return
        page.peer = peer
        self.holder[peer] = page
        yield steps.Alloc(page.name)

    def _grow(self, data: dict[str, Any]) -> Iterator[Step]:
        full, swa, seqs = data["full"], data["swa"], data["seq"]
        prefixes = data.get("prefix") or [seq - 1 for seq in seqs]
        without = data["n"] - data["tail"] if "tail" in data else 0
        token = 0
        for prefix, seq in zip(prefixes, seqs, strict=True):
            token += min(seq, -(-prefix // self.size) * self.size) - prefix  # in the last page
            for start in range(-(-prefix // self.size) * self.size, seq, self.size):
                filled = min(self.size, seq - start)
                page = _Page(f"p{full + token}")
                self.full.add(full + token, page)
                self.swa.add(swa + token, None)
                has_peer = token + filled > without
                yield from self._show(page, swa + token if has_peer else None)
                token += filled

    def _point(self, full: Slots, swa: Slots) -> Iterator[Step]:
        pages, peers = self.full.find(full), self.swa.find(swa)
        for (_, page), (peer, _) in zip(pages, peers, strict=False):
            giver = self.holder.get(peer)
            if giver is page:
                continue
            if giver is None and not page.shown:
                yield from self._show(page, peer)
                continue
            if giver is None:
                yield steps.LoadBack(page.name)
            else:
                giver.peer = None
                self.giving[giver.name] = page
            page.peer = peer
            self.holder[peer] = page

    def _free_full_pool(self, page: _Page) -> Iterator[Step]:
        if page.name in self.giving:
            yield steps.Recover(self.giving.pop(page.name).name, page.name)
        elif page.peer is None and page.shown:
            yield steps.FreeFull(page.name)
        page.owned = False  # with a peer left, the free of that comes next and frees it whole

    def _free(self, op: str, page: _Page) -> Iterator[Step]:
        if not page.shown:
            return
        had, whole = page.peer is not None, op in ("free", "free_segment")
        if op.startswith("free_full"):
            if page.owned:
                yield steps.FreeFull(page.name)
            page.owned = False
            return
        if page.peer is not None:
            self.holder.pop(page.peer, None)
            page.peer = None
        if not page.owned and had:
            yield steps.Free(page.name)
        elif whole and page.owned:
            yield steps.Free(page.name)
            page.owned = False
        elif had:
            yield steps.FreeSwa(page.name)
