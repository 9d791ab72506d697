"""What following a trace costs beside its calls made bare, and whether its memory stays flat.

    python benchmarks/replay.py [--calls N] [--page-size P]... [--pages N] [--strategy S]

Makes a trace of N calls for the built-in model: free groups of eight requests, of which some free
their SWA head, some recover a tombstone and all end. Then, in one process and in turns:

* bare: the same calls on an allocator of their own, with slots that a twin has handed out;
* lines: reading the trace, and checking each line;
* follow: all of it, with the ledger, and every group judged.

"speed" is (bare + lines) / follow, what ledger and audit leave of the speed of a plain player of
the file; "to bare alone" counts the reading of the file against ``follow`` as well.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swaleak.check.follow import Followed, follow
from swaleak.script.trace import Header, Line, TraceReader, TraceWriter
from swaleak.script.trace import line as as_line
from swaleak.sglang.adapter import Driver
from swaleak.target import Builtin, Sizes

REQUESTS = 8  # a group
TURN = 100  # calls that are made bare, then followed


class Requests:
    """Writes the lines of requests that live for two groups. Never more than the pools hold."""

    def __init__(self, writer: TraceWriter, page_size: int, most_pages: int) -> None:
        self.writer = writer
        self.size = page_size
        self.most = most_pages
        self.rng = random.Random(0)
        self.next = 1
        self.lines = 0
        self.swa_pages = 0
        self.running: deque[tuple[int, int]] = deque()  # first number, pages

    def group(self) -> None:
        """Admit eight requests; the eight before them end in a free group."""
        ending, self.running = self.running, deque()
        for _ in range(REQUESTS):
            self.running.append(self.alloc(self.rng.randint(1, self.most)))
        self.write("begin", {})
        for first, pages in ending:
            self.end(first, pages)
        self.write("end", {"physical": self.swa_pages, "mapped": self.swa_pages})

    def alloc(self, pages: int) -> tuple[int, int]:
        first, slots = self.next, pages * self.size
        self.next += slots
        self.swa_pages += pages
        op = "alloc" if self.size == 1 else "alloc_both"
        self.write(op, {"full": first, "swa": first, "n": slots})
        return first, pages

    def end(self, first: int, pages: int) -> None:
        head = pages // 2
        if head:
            self.write("free_swa", {"full": [[first, head * self.size]]})
            self.swa_pages -= head
        if head and self.rng.random() < 0.25:  # the head is a tombstone: somebody recovers it
            other, _ = self.alloc(head)
            slots = [[other, head * self.size]]
            self.write("point", {"full": [[first, head * self.size]], "swa": slots})
            self.write("free_full_pool", {"full": slots, "cleared": True})
            head = 0
        self.write("free", {"full": [[first, pages * self.size]]})
        self.swa_pages -= pages - head

    def write(self, op: str, data: dict[str, Any]) -> None:
        self.writer.write(as_line(op, data))
        self.lines += 1


def make_trace(folder: Path, sizes: Sizes, calls: int, most_pages: int) -> Path:
    writer = TraceWriter(str(folder / f"{calls}.jsonl"))
    writer.start(Header(sizes.page_size, sizes.full_pages, sizes.swa_pages))
    requests = Requests(writer, sizes.page_size, most_pages)
    while requests.lines < calls:
        requests.group()
    writer.file.close()
    return Path(writer.file.name)


Call = tuple[Callable[..., Any], tuple[Any, ...]]


class Bare:
    """Turns lines into calls on one allocator, with the slots that its twin hands out."""

    def __init__(self, twin: Driver, driver: Driver) -> None:
        self.twin = twin
        self.driver = driver
        self.full: dict[int, Tensor] = {}
        self.swa: dict[int, Tensor] = {}

    def call(self, line: Line) -> list[Call]:
        """Make the call on the twin, and return it for the other one."""
        op, data = line.op, line.data
        if op in ("alloc", "alloc_both"):
            pages = data["n"] // self.twin.page_size
            full = self.twin.alloc(pages)
            assert full is not None
            self.full[data["full"]] = full.clone()
            self.swa[data["swa"]] = self.twin.translate(full).clone()
            return [(self.driver.alloc, (pages,))]
        if op in ("begin", "end"):
            name, args = f"group_{op}", ()
            done: list[tuple[str, tuple[Any, ...]]] = [(name, args)]
        elif op == "point":
            done = [
                ("point", (self.named(self.full, data["full"]), self.named(self.swa, data["swa"])))
            ]
        elif op == "free_full_pool":  # the cache clears the mapping before it frees the newcomer
            slots = self.named(self.full, data["full"])
            done = [("clear_mapping", (slots,)), (op, (slots,))]
        else:
            done = [(op, (self.named(self.full, data["full"]),))]
        for name, args in done:
            getattr(self.twin, name)(*args)
        return [(getattr(self.driver, name), args) for name, args in done]

    def forget(self) -> None:
        """Only the last few allocations can still be named."""
        for of in (self.full, self.swa):
            for first in list(of)[: -4 * REQUESTS]:
                del of[first]

    def named(self, of: dict[int, Tensor], ranges: list[list[int]]) -> Tensor:
        [[first, count]] = ranges
        slots = of[first]
        if count == len(slots):  # a request's last line names all of it
            return slots
        return slots[:count]


class Measured:
    """Follows a trace, and makes the same calls bare in turns of ``TURN`` calls."""

    def __init__(self, path: Path, make: Callable[[Sizes], Driver], after: int) -> None:
        self.path, self.make, self.after = path, make, after
        self.calls = self.lines = self.paused = 0.0
        self.early_mib = 0.0
        started = time.process_time()
        self.followed: Followed = follow(self.items(), make)
        self.follow = time.process_time() - started - self.paused
        self.late_mib = peak_mib()

    def items(self) -> Iterator[Header | Line]:
        """The trace; while ``follow`` waits for the next turn, the bare calls are made."""
        lines: Iterator[Header | Line] = iter(TraceReader(self.path))
        header = next(lines)
        assert isinstance(header, Header)
        yield header
        sizes = Sizes(header.full_pages, header.swa_pages, header.page_size)
        player = Bare(self.make(sizes), self.make(sizes))
        done = 0
        while True:
            started = time.process_time()
            turn = [item for item in islice(lines, TURN) if isinstance(item, Line)]
            read = time.process_time()
            self.lines += read - started
            calls = [call for line in turn for call in player.call(line)]
            ready = time.process_time()
            for function, args in calls:
                function(*args)
            self.calls += time.process_time() - ready
            player.forget()
            done += len(turn)
            if not self.early_mib and done >= self.after:
                self.early_mib = peak_mib()
            self.paused += time.process_time() - read
            if not turn:
                return
            yield from turn


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--page-size", type=int, action="append", help="by default 1, 4 and 256")
    parser.add_argument("--pages", type=int, default=512, help="in each pool")
    parser.add_argument("--most-pages", type=int, default=8, help="of a request")
    parser.add_argument("--strategy", default="barrier")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # what torch has imported is nobody's cost
    target = Builtin("cpu")
    print(f"torch {torch.__version__}, one thread, {asked.strategy}, {asked.pages} pages a pool")
    print("CPU time, us a call; peak memory of the process after a tenth and at the end, MiB\n")
    print("| page size | calls | bare | lines | follow | speed | to bare alone | MiB |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    for page_size in asked.page_size or [1, 4, 256]:
        sizes = Sizes(asked.pages, asked.pages, page_size)
        with tempfile.TemporaryDirectory() as folder:
            path = make_trace(Path(folder), sizes, asked.calls, asked.most_pages)
            seen = Measured(path, lambda s: target.make(asked.strategy, s), asked.calls // 10)
        assert (seen.followed.verdict, seen.followed.differ) == ("clean", 0)
        each = 1e6 / seen.followed.calls
        print(
            f"| {page_size} | {seen.followed.calls:,} | {seen.calls * each:.1f} "
            f"| {seen.lines * each:.1f} | {seen.follow * each:.1f} "
            f"| {(seen.calls + seen.lines) / seen.follow:.2f} | {seen.calls / seen.follow:.2f} "
            f"| {seen.early_mib:.0f}, {seen.late_mib:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
