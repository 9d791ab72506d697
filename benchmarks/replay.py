"""What following a trace costs beside its calls made bare, and whether its memory stays flat.

    python -m benchmarks.replay [--calls N] [--page-size P]... [--decode N]... [--pages N]

Makes a trace of N calls for the built-in model: eight requests at a time are admitted, grow by
``--decode`` tokens each, and end in a free group, where most have freed their SWA head and some
recover a tombstone. Then, in one process and in turns:

* calls: the same calls on an allocator of their own, with slots that another has handed out;
* player: reading and checking a line, finding the slots that it names and making its call, with a
  dictionary for each pool and nothing else: no ledger, no audit;
* follow: all of it, with the ledger, and every group judged.

"speed" is player / follow; "to calls alone" counts the reading of the file against ``follow``.
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

import torch
from swaleak.check.follow import Followed, follow
from swaleak.trace.format import Header, Line, TraceReader, TraceWriter
from swaleak.trace.format import line as as_line
from swaleak.targets.driver import Driver
from torch import Tensor

from swaleak.targets.open import Builtin, Sizes

REQUESTS = 8  # a group
MOST_PAGES = 8  # of a prompt
PAGES = 512
TURN = 100  # calls that are made bare, then followed


@dataclass
class Request:
    """``ranges``: the numbers of its slots. Those of ``pages`` pages came with its prompt."""

    pages: int
    ranges: list[list[int]]

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
        self.write("begin", {})
        for request in ending:
            self.end(request)
        self.write("end", {"physical": self.swa_pages, "mapped": self.swa_pages})

    def admit(self, pages: int) -> Request:
        slots = pages * self.size
        op = "alloc" if self.size == 1 else "alloc_both"
        first = self.hand_out(op, slots, {})
        self.swa_pages += pages
        return Request(pages, [[first, slots]])

    def grow(self) -> None:
        """A token for every request that runs."""
        last = [[sum(request.ranges[-1]) - 1, 1] for request in self.running]
        self.swa_pages += sum(request.tokens % self.size == 0 for request in self.running)
        if self.size == 1:
            first = self.hand_out("alloc", REQUESTS, {})
        else:
            seq = [request.tokens + 1 for request in self.running]
            first = self.hand_out("decode", REQUESTS, {"seq": seq, "last": last})
        for number, request in enumerate(self.running, first):
            request.ranges.append([number, 1])

    def end(self, request: Request) -> None:
        head = request.pages // 2
        part = [[request.ranges[0][0], head * self.size]]
        pages = -(-request.tokens // self.size)
        if head:
            self.write("free_swa", {"full": part})
            self.swa_pages -= head
        if head and self.rng.random() < 0.25:  # the head is a tombstone: somebody recovers it
            other = self.admit(head).ranges
            self.write("point", {"full": part, "swa": other})
            self.write("free_full_pool", {"full": other, "cleared": True})
            head = 0
        self.write("free", {"full": request.ranges})
        self.swa_pages -= pages - head

    def hand_out(self, op: str, slots: int, more: dict[str, Any]) -> int:
        first, self.next = self.next, self.next + slots
        self.write(op, {"full": first, "swa": first, "n": slots, **more})
        return first

    def write(self, op: str, data: dict[str, Any]) -> None:
        self.writer.write(as_line(op, data))
        self.lines += 1


def make_trace(folder: Path, sizes: Sizes, calls: int, decode: int) -> Path:
    writer = TraceWriter(str(folder / f"{calls}.jsonl"))
    writer.start(Header(sizes.page_size, sizes.full_pages, sizes.swa_pages))
    requests = Requests(writer, sizes.page_size, decode)
    while requests.lines < calls:
        requests.group()
    writer.file.close()
    return Path(writer.file.name)


Call = tuple[str, tuple[Any, ...]]


class Slots:
    """What was handed out, found by number."""

    def __init__(self) -> None:
        self.firsts: list[int] = []
        self.parts: list[Tensor] = []

    def add(self, first: int, slots: Tensor) -> None:
        self.firsts.append(first)
        self.parts.append(slots)

    def named(self, ranges: list[list[int]]) -> Tensor:
        parts = [self.part(first, count) for first, count in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def part(self, first: int, count: int) -> Tensor:
        index = bisect_right(self.firsts, first) - 1
        slots, at = self.parts[index], first - self.firsts[index]
        return slots if count == slots.numel() else slots[at : at + count]

    def forget(self, most: int) -> None:
        del self.firsts[:-most], self.parts[:-most]


class Player:
    """Makes the calls of a trace on one allocator, and remembers what was handed out."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.size = driver.page_size
        self.full = Slots()
        self.swa = Slots()

    def play(self, line: Line) -> list[Call]:
        """Make the calls of a line, and return them."""
        op, data = line.op, line.data
        driver = self.driver
        if op in ("alloc", "alloc_both"):
            pages = data["n"] // self.size
            full: Any = driver.alloc(pages)
            self.remember(data, full)
            return [("alloc", (pages,))]
        if op == "decode":
            seq = torch.tensor(data["seq"])
            args = (seq, seq, self.full.named(data["last"]))
            self.remember(data, driver.allocator.alloc_decode(*args))
            return [("alloc_decode", args)]
        if op == "begin":
            driver.group_begin()
            return [("group_begin", ())]
        if op == "end":
            driver.group_end()
            return [("group_end", ())]
        full = self.full.named(data["full"])
        if op == "point":
            swa = self.swa.named(data["swa"])
            driver.point(full, swa)
            return [("point", (full, swa))]
        if op == "free_full_pool":  # the cache clears the mapping before it frees the newcomer
            driver.clear_mapping(full)
            driver.free_full_pool(full)
            return [("clear_mapping", (full,)), (op, (full,))]
        getattr(driver, op)(full)
        return [(op, (full,))]

    def remember(self, data: dict[str, Any], full: Tensor) -> None:
        self.full.add(data["full"], full)
        self.swa.add(data["swa"], self.driver.translate(full))

    def forget(self, most: int) -> None:
        """Only the last few allocations can still be named."""
        self.full.forget(most)
        self.swa.forget(most)


class Measured:
    """Follows a trace; in turns of ``TURN`` calls these are also made bare, and by a player."""

    def __init__(self, path: Path, make: Callable[[Sizes], Driver], after: int, most: int) -> None:
        self.path, self.make, self.after, self.most = path, make, after, most
        self.calls = self.player = self.paused = 0.0
        self.early_mib = 0.0
        started = time.process_time()
        self.followed: Followed = follow(self.items(), make)
        self.follow = time.process_time() - started - self.paused
        self.late_mib = peak_mib()

    def items(self) -> Iterator[Header | Line]:
        """The trace; while ``follow`` waits for the next turn, the others have theirs."""
        ahead, lines, again = (iter(TraceReader(self.path)) for _ in range(3))
        header = next(ahead)
        assert header == next(lines) == next(again)
        assert isinstance(header, Header)
        yield header
        sizes = Sizes(header.full_pages, header.swa_pages, header.page_size)
        twin, player = Player(self.make(sizes)), Player(self.make(sizes))
        bare = self.make(sizes)
        done = 0
        while True:
            paused = time.process_time()
            turn = [item for item in islice(ahead, TURN) if isinstance(item, Line)]
            named_calls = [call for line in turn for call in twin.play(line)]
            calls = [
                (getattr(bare, name, None) or getattr(bare.allocator, name), args)
                for name, args in named_calls
            ]
            started = time.process_time()
            for function, args in calls:
                function(*args)
            called = time.process_time()
            self.calls += called - started
            for line in islice(lines, len(turn)):
                assert isinstance(line, Line)
                player.step(line)
            self.player += time.process_time() - called
            twin.forget(self.most)
            player.forget(self.most)
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
    page_size: int, decode: int, calls: int, pages: int = PAGES, strategy: str = "barrier"
) -> Measured:
    """Make a trace and measure it. Raises ``RuntimeError`` if it does not come out clean."""
    target = Builtin("cpu")
    with tempfile.TemporaryDirectory() as folder:
        path = make_trace(Path(folder), Sizes(pages, pages, page_size), calls, decode)
        most = 4 * REQUESTS + 2 * decode
        seen = Measured(path, partial(target.make, strategy), calls // 10, most)
    if (seen.followed.verdict, seen.followed.differ) != ("clean", 0):
        raise RuntimeError(f"a healthy trace came out {seen.followed.verdict}")
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
    print(f"torch {torch.__version__}, one thread, {asked.strategy}, {asked.pages} pages a pool")
    print("CPU time, us a call; peak memory of the process after a tenth and at the end, MiB\n")
    print("| page size | decode | made | calls | player | follow | speed | to calls alone | MiB |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for page_size, decode in product(asked.page_size or [1, 4, 256], asked.decode or [0, 16]):
        seen = measured(page_size, decode, asked.calls, asked.pages, asked.strategy)
        each = 1e6 / seen.followed.calls
        print(
            f"| {page_size} | {decode} | {seen.followed.calls:,} | {seen.calls * each:.1f} "
            f"| {seen.player * each:.1f} | {seen.follow * each:.1f} "
            f"| {seen.player / seen.follow:.2f} | {seen.calls / seen.follow:.2f} "
            f"| {seen.early_mib:.0f}, {seen.late_mib:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
