"""What following a trace costs beside its calls made bare, and whether its memory stays flat.

    python benchmarks/replay.py [--calls N] [--page-size P] [--pages N] [--strategy S]

Makes a trace of N calls for the built-in model: free groups of eight requests, of which some free
their SWA head, some recover a tombstone and all end. Then, in one process and in turns:

* the calls alone: the same calls on a second allocator, their slots looked up beforehand;
* the lines alone: reading and checking the trace;
* ``follow``: reading, looking up, calling, keeping the ledger, judging every group.

The ratio that counts is (calls + lines) / follow: what is left of the speed when ledger and audit
come on top. A twin allocator, which is not timed, hands out the slots that the bare calls name.
Peak memory is the process's own, after a tenth of the trace and after all of it.
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
from typing import Any, TextIO

import torch
from torch import Tensor

from swaleak.check.follow import Followed, follow
from swaleak.script.trace import Header, Line, TraceReader, TraceWriter
from swaleak.script.trace import line as as_line
from swaleak.sglang.adapter import Driver
from swaleak.target import Builtin, Sizes

REQUESTS = 8  # a group
CHUNK = 10_000  # calls that are looked up ahead


class Requests:
    """Writes the lines of requests that live for two groups. Never more than the pools hold."""

    def __init__(self, file: TextIO, page_size: int, most_pages: int) -> None:
        self.file = file
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
        self.file.write(as_line(op, data))
        self.lines += 1


def make_trace(folder: Path, sizes: Sizes, calls: int, most_pages: int) -> Path:
    writer = TraceWriter(str(folder / f"{calls}.jsonl"))
    writer.start(Header(sizes.page_size, sizes.full_pages, sizes.swa_pages))
    requests = Requests(writer.file, sizes.page_size, most_pages)
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

    def named(self, of: dict[int, Tensor], ranges: list[list[int]]) -> Tensor:
        [[first, count]] = ranges
        slots = of[first]
        if count == len(slots):  # a request's last line names all of it
            return slots
        return slots[:count]


def bare(path: Path, make: Callable[[Sizes], Driver]) -> float:
    """Seconds that the calls take alone."""
    lines: Iterator[Header | Line] = iter(TraceReader(path))
    header = next(lines)
    assert isinstance(header, Header)
    sizes = Sizes(header.full_pages, header.swa_pages, header.page_size)
    player = Bare(make(sizes), make(sizes))
    spent = 0.0
    while chunk := list(islice(lines, CHUNK)):
        calls = [call for line in chunk if isinstance(line, Line) for call in player.call(line)]
        started = time.perf_counter()
        for function, args in calls:
            function(*args)
        spent += time.perf_counter() - started
        for of in (player.full, player.swa):  # all that can still be named are the last few
            for first in list(of)[: -4 * REQUESTS]:
                del of[first]
    return spent


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = action()
    return time.perf_counter() - started, result


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
    target = Builtin("cpu")

    def make(sizes: Sizes) -> Driver:
        return target.make(asked.strategy, sizes)

    print(f"torch {torch.__version__}, one thread, {asked.strategy}, {asked.pages} pages a pool\n")
    print("| page size | calls | calls us | lines us | follow us | speed | to the calls alone |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    memory = []
    with tempfile.TemporaryDirectory() as folder:
        for page_size in asked.page_size or [1, 4, 256]:
            sizes = Sizes(asked.pages, asked.pages, page_size)
            for calls in (asked.calls // 10, asked.calls):
                path = make_trace(Path(folder), sizes, calls, asked.most_pages)
                gc.collect()
                followed: Followed
                following, followed = timed(lambda: follow(TraceReader(path), make))  # noqa: B023
                memory.append((page_size, followed.calls, peak_mib()))
                alone = bare(path, make)
                lines, _ = timed(lambda: deque(TraceReader(path), maxlen=0))  # noqa: B023
                path.unlink()
                each = 1e6 / followed.calls
                print(
                    f"| {page_size} | {followed.calls:,} | {alone * each:.2f} | {lines * each:.2f} "
                    f"| {following * each:.2f} | {(alone + lines) / following:.2f} "
                    f"| {alone / following:.2f} |  {followed.verdict}, {followed.groups:,} groups"
                )
    print("\n| page size | calls | peak MiB of the process so far |\n|--:|--:|--:|")
    for page_size, calls, mib in memory:
        print(f"| {page_size} | {calls:,} | {mib:.0f} |")


if __name__ == "__main__":
    main()
