"""What following a trace costs beside its calls made bare, and whether its memory stays flat.

    python -m benchmarks.replay [--calls N] [--page-size P]... [--decode N]... [--pages N]

Makes a trace of N calls for the built-in model: eight requests at a time are admitted, grow by
``--decode`` tokens each, and end in a free group, where most have freed their SWA head and some
recover a tombstone. Then, in one process and in turns:

* calls: the same calls on an allocator of their own, with slots that another has handed out;
* bare: reading and checking a line, finding the slots that it refers to and making its call, with
  a list per pool and nothing else: no shadow, no comparison;
* replay: all of it, with the shadow, and every group judged.

"speed" is bare / replay; "to calls alone" counts the reading of the file against ``replay``.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from swaleak.scenario import calls
from swaleak.scenario.calls import Call, Header, Line, Slots
from swaleak.targets.driver import Driver, Sizes
from swaleak.targets.open import Builtin
from swaleak.trace.format import TraceReader, TraceWriter
from swaleak.trace.replay import TraceRun, run_trace
from swaleak.trace.to_scenario import sizes_of

REQUESTS = 8  # a group
MOST_PAGES = 8  # of a prompt
PAGES = 512
TURN = 100  # calls that are made bare, then replayed


@dataclass
class Request:
    """``ranges``: the numbers of its slots. Those of ``pages`` pages came with its prompt."""

    pages: int
    ranges: list[tuple[int, int]]

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.ranges)


class Requests:
    """Writes the lines of requests. Never more than the pools hold."""

    def __init__(self, writer: TraceWriter, page_size: int, decode: int) -> None:
        self.writer = writer
        self.size = page_size
        self.decode = decode
        self.rng = random.Random(0)
        self.next = 1
        self.lines = 0
        self.swa_pages = 0
        self.running: list[Request] = []

    def group(self) -> None:
        """Admit eight requests and let them grow; the eight before them end in a free group."""
        ending, self.running = self.running, []
        for _ in range(REQUESTS):
            self.running.append(self.admit(self.rng.randint(1, MOST_PAGES)))
        for _ in range(self.decode):
            self.grow()
        self.write(calls.GroupBegin())
        for request in ending:
            self.end(request)
        self.write(calls.GroupEnd(self.swa_pages, self.swa_pages))

    def admit(self, pages: int) -> Request:
        slots = pages * self.size
        first = self.number(slots)
        self.write((calls.Alloc if self.size == 1 else calls.AllocPages)(first, first, slots))
        self.swa_pages += pages
        return Request(pages, [(first, slots)])

    def grow(self) -> None:
        """A token for every request that runs."""
        last = tuple((sum(request.ranges[-1]) - 1, 1) for request in self.running)
        self.swa_pages += sum(request.tokens % self.size == 0 for request in self.running)
        first = self.number(REQUESTS)
        if self.size == 1:
            self.write(calls.Alloc(first, first, REQUESTS))
        else:
            seq = tuple(request.tokens + 1 for request in self.running)
            self.write(calls.AllocDecode(first, first, REQUESTS, seq, last))
        for number, request in enumerate(self.running, first):
            request.ranges.append((number, 1))

    def end(self, request: Request) -> None:
        head = request.pages // 2
        part = ((request.ranges[0][0], head * self.size),)
        pages = -(-request.tokens // self.size)
        if head:
            self.write(calls.FreeSwa(part))
            self.swa_pages -= head
        if head and self.rng.random() < 0.25:  # the head is a tombstone: somebody recovers it
            other = tuple(self.admit(head).ranges)
            self.write(calls.Point(part, other))
            self.write(calls.FreeFullPool(other, cleared=True))
            head = 0
        self.write(calls.Free(tuple(request.ranges)))
        self.swa_pages -= pages - head

    def number(self, slots: int) -> int:
        first, self.next = self.next, self.next + slots
        return first

    def write(self, call: Call) -> None:
        self.writer.write(msgspec.json.encode(call).decode() + "\n")
        self.lines += 1


def make_trace(folder: Path, sizes: Sizes, count: int, decode: int) -> Path:
    writer = TraceWriter(str(folder / f"{count}.jsonl"))
    writer.start(Header(sizes.page_size, sizes.full_pages, sizes.swa_pages))
    requests = Requests(writer, sizes.page_size, decode)
    while requests.lines < count:
        requests.group()
    writer.file.close()
    return Path(writer.file.name)


Made = tuple[str, tuple[Any, ...]]  # a method of the driver or the allocator, its arguments


class HandedOut:
    """What was handed out, found by number."""

    def __init__(self) -> None:
        self.firsts: list[int] = []
        self.parts: list[Tensor] = []

    def add(self, first: int, slots: Tensor) -> None:
        self.firsts.append(first)
        self.parts.append(slots)

    def find(self, ranges: Slots) -> Tensor:
        parts = [self.part(first, count) for first, count in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def part(self, first: int, count: int) -> Tensor:
        index = bisect_right(self.firsts, first) - 1
        slots, at = self.parts[index], first - self.firsts[index]
        return slots if count == slots.numel() else slots[at : at + count]

    def forget(self, most: int) -> None:
        del self.firsts[:-most], self.parts[:-most]


class Bare:
    """Makes the calls of a trace on one allocator, and remembers what was handed out."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.size = driver.page_size
        self.full = HandedOut()
        self.swa = HandedOut()

    def make(self, call: Any) -> list[Made]:
        """Make a call of the trace, and return what it came down to."""
        driver, name = self.driver, call.op
        match call:
            case calls.Alloc(n=n) | calls.AllocPages(n=n):
                name = "alloc" if isinstance(call, calls.Alloc) else "alloc_pages"
                self.remember(call, getattr(driver, name)(n))
                return [(name, (n,))]
            case calls.AllocDecode(seq=lens):
                seq = torch.tensor(lens)
                args = (seq, seq, self.full.find(call.last))
                self.remember(call, driver.allocator.alloc_decode(*args))
                return [("alloc_decode", args)]
            case calls.GroupBegin():
                driver.group_begin()
                return [("group_begin", ())]
            case calls.GroupEnd():
                driver.group_end()
                return [("group_end", ())]
        full = self.full.find(call.full)
        if isinstance(call, calls.Point):
            swa = self.swa.find(call.swa)
            driver.point(full, swa)
            return [("point", (full, swa))]
        if name == "free_full_pool":  # the cache clears the mapping before it frees the newcomer
            driver.clear_mapping(full)
            driver.free_full_pool(full)
            return [("clear_mapping", (full,)), (name, (full,))]
        getattr(driver, name)(full)
        return [(name, (full,))]

    def remember(self, call: Any, full: Tensor) -> None:
        self.full.add(call.full, full)
        self.swa.add(call.swa, self.driver.translate(full))

    def forget(self, most: int) -> None:
        """Only the last few allocations can still be referred to."""
        self.full.forget(most)
        self.swa.forget(most)


class Measured:
    """Replays a trace; in turns of ``TURN`` calls these are also made bare, and alone."""

    def __init__(self, path: Path, make: Callable[[Sizes], Driver], after: int, most: int) -> None:
        self.path, self.make, self.after, self.most = path, make, after, most
        self.calls = self.bare = self.paused = 0.0
        self.early_mib = 0.0
        started = time.process_time()
        self.run: TraceRun = run_trace(self.items(), lambda header: make(sizes_of(header)))
        self.replay = time.process_time() - started - self.paused
        self.late_mib = peak_mib()

    def items(self) -> Iterator[Header | Line]:
        """The trace; while ``run_trace`` waits for the next turn, the others have theirs."""
        ahead, lines, again = (iter(TraceReader(self.path)) for _ in range(3))
        header = next(ahead)
        assert header == next(lines) == next(again)
        assert isinstance(header, Header)
        yield header
        sizes = Sizes(header.full_pages, header.swa_pages, header.page_size)
        twin, bare = Bare(self.make(sizes)), Bare(self.make(sizes))
        alone = self.make(sizes)
        done = 0
        while True:
            paused = time.process_time()
            turn = [item for item in islice(ahead, TURN) if isinstance(item, Line)]
            made = [one for line in turn for one in twin.make(line.call)]
            # the driver's own ``alloc_decode`` makes tensors of its arguments first
            functions = [
                (getattr(alone.allocator if name == "alloc_decode" else alone, name), args)
                for name, args in made
            ]
            started = time.process_time()
            for function, args in functions:
                function(*args)
            called = time.process_time()
            self.calls += called - started
            for line in islice(lines, len(turn)):
                assert isinstance(line, Line)
                bare.make(line.call)
            self.bare += time.process_time() - called
            twin.forget(self.most)
            bare.forget(self.most)
            done += len(turn)
            if not self.early_mib and done >= self.after:
                self.early_mib = peak_mib()
            self.paused += time.process_time() - paused
            if not turn:
                return
            yield from islice(again, len(turn))


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(
    page_size: int, decode: int, count: int, pages: int = PAGES, strategy: str = "barrier"
) -> Measured:
    """Make a trace and measure it. Raises ``RuntimeError`` if it does not come out clean."""
    target = Builtin("cpu")
    with tempfile.TemporaryDirectory() as folder:
        path = make_trace(Path(folder), Sizes(pages, pages, page_size), count, decode)
        most = 4 * REQUESTS + 2 * decode
        seen = Measured(path, partial(target.make, strategy), count // 10, most)
    if (seen.run.verdict, seen.run.differ) != ("clean", 0):
        raise RuntimeError(f"a healthy trace came out {seen.run.verdict}")
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--page-size", type=int, action="append", help="by default 1, 4 and 256")
    parser.add_argument("--decode", type=int, action="append", help="by default 0 and 16")
    parser.add_argument("--pages", type=int, default=PAGES, help="in each pool")
    parser.add_argument("--strategy", default="barrier")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # what torch has imported is nobody's cost
    print(f"torch {torch.__version__}, one thread, {asked.strategy}, {asked.pages} pages per pool")
    print("CPU time, us per call; peak memory of the process after a tenth and at the end, MiB\n")
    print("| page size | decode | made | calls | bare | replay | speed | to calls alone | MiB |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for page_size, decode in product(asked.page_size or [1, 4, 256], asked.decode or [0, 16]):
        seen = measured(page_size, decode, asked.calls, asked.pages, asked.strategy)
        each = 1e6 / seen.run.calls
        print(
            f"| {page_size} | {decode} | {seen.run.calls:,} | {seen.calls * each:.1f} "
            f"| {seen.bare * each:.1f} | {seen.replay * each:.1f} "
            f"| {seen.bare / seen.replay:.2f} | {seen.calls / seen.replay:.2f} "
            f"| {seen.early_mib:.0f}, {seen.late_mib:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
