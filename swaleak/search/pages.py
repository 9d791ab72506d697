"""A trace, read as operations on nodes of one page each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from swaleak.script import ops
from swaleak.script.ops import Op
from swaleak.script.trace import Header, Line, Ranges, TraceReader


def operations(path: Path, page_size: int, last: int) -> Iterator[tuple[Op, int]]:
    """Yield the trace as operations on nodes of one page, up to line ``last``, each with its line.

    Raises ``ScriptError`` for a trace that cannot be read.
    """
    pages = _Pages(page_size)
    for item in TraceReader(path):
        if isinstance(item, Header):
            pages = _Pages(page_size)
            continue
        for op in pages.read(item):
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

    def find(self, ranges: Ranges) -> list[tuple[int, T]]:
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

    def read(self, line: Line) -> Iterator[Op]:
        """Yield what a line is for the pages it touches."""
        op, data = line.op, line.data
        match op:
            case "begin":
                yield ops.Group("begin")
            case "end":
                yield from (ops.Adopt(to.name, name) for name, to in self.giving.items())
                self.giving.clear()
                yield ops.Group("end")
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

    def _alloc(self, op: str, slots: int, full: int | None, swa: int | None) -> Iterator[Op]:
        for at in range(0, slots, self.size):
            if swa is not None:
                self.swa.add(swa + at, None)
            if full is not None:
                page = _Page(f"p{full + at}")
                self.full.add(full + at, page)
                if swa is not None:
                    yield from self._show(page, swa + at)

    def _show(self, page: _Page, peer: int | None) -> Iterator[Op]:
        page.shown = True
        if peer is None:
            yield ops.AllocTail(page.name, 1, 0)
            return
        page.peer = peer
        self.holder[peer] = page
        yield ops.Alloc(page.name)

    def _grow(self, data: dict[str, Any]) -> Iterator[Op]:
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

    def _point(self, full: Ranges, swa: Ranges) -> Iterator[Op]:
        pages, peers = self.full.find(full), self.swa.find(swa)
        for (_, page), (peer, _) in zip(pages, peers, strict=False):
            giver = self.holder.get(peer)
            if giver is page:
                continue
            if giver is None and not page.shown:
                yield from self._show(page, peer)
                continue
            if giver is None:
                yield ops.LoadBack(page.name)
            else:
                giver.peer = None
                self.giving[giver.name] = page
            page.peer = peer
            self.holder[peer] = page

    def _free_full_pool(self, page: _Page) -> Iterator[Op]:
        if page.name in self.giving:
            yield ops.Recover(self.giving.pop(page.name).name, page.name)
        elif page.peer is None and page.shown:
            yield ops.FreeFull(page.name)
        page.owned = False  # with a peer left, the free of that comes next and frees it whole

    def _free(self, op: str, page: _Page) -> Iterator[Op]:
        if not page.shown:
            return
        had, whole = page.peer is not None, op in ("free", "free_segment")
        if op.startswith("free_full"):
            if page.owned:
                yield ops.FreeFull(page.name)
            page.owned = False
            return
        if page.peer is not None:
            self.holder.pop(page.peer, None)
            page.peer = None
        if not page.owned and had:
            yield ops.Free(page.name)
        elif whole and page.owned:
            yield ops.Free(page.name)
            page.owned = False
        elif had:
            yield ops.FreeSwa(page.name)
