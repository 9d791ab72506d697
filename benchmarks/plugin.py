"""What the plugin costs: audit, record and fix beside SGLang as shipped, on the churn of the tests.

    python benchmarks/plugin.py [--rounds N] [--requests N]

Needs an installed SGLang (tests/requirements-sglang.txt). The arms take turns in one process, in
an order that changes every round, so that a busy machine is equally unfair to all; the figure is
the median over rounds of (arm / plain) within a round.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from churn import BATCH, PAGES, Server

from swaleak.allocator.strategy import STRATEGIES
from swaleak.sglang import plugin
from swaleak.sglang.adapter import graft
from swaleak.sglang.loader import load
from swaleak.sglang.shims import BaseSWAKVPool
from swaleak.sglang.source import from_installed
from swaleak.sglang.tree import Caches

FULL, SWA, PAGE = 9_116_160, 911_616, 256  # slots; the pools of the public report


def arms(base: type[Any], folder: str) -> dict[str, type[Any]]:
    def asked(text: str) -> type[Any]:
        return plugin.watched_by(base, plugin.read_wish(text), None)

    return {
        "plain": base,
        "audit": asked("audit"),
        "record": asked(f"record:{folder}/t.jsonl"),
        "audit,record": asked(f"audit,record:{folder}/t.jsonl"),
        "fix:barrier": graft(base, STRATEGIES["barrier"]),
        "fix:enqueue": graft(base, STRATEGIES["enqueue"]),
    }


def churn(caches: Caches, class_: type[Any], cache: str, page_size: int, requests: int) -> float:
    """CPU seconds of a churn on a fresh cache."""
    caches.allocator = class_
    server = Server(caches, cache, page_size, PAGES, seed=0)
    started = time.process_time()
    for _ in range(requests // BATCH):
        server.batch()
    return time.process_time() - started


def take_turns(
    run: Callable[[str], float], names: list[str], rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds, and median ratio to the first arm, of each arm."""
    run(names[0])  # warm up
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in random.sample(names, len(names)):
            seconds[name].append(run(name))
    plain = seconds[names[0]]
    ratios = {n: [s / p for s, p in zip(seconds[n], plain, strict=True)] for n in names}
    return (
        {n: statistics.median(s) for n, s in seconds.items()},
        {n: statistics.median(r) for n, r in ratios.items()},
    )


def production_group(class_: type[Any]) -> Callable[[], float]:
    """CPU seconds of one group on pools of production size, half full: 8 requests of 32 pages."""
    allocator = class_(FULL, SWA, PAGE, torch.bfloat16, "cpu", BaseSWAKVPool(), need_sort=False)
    full, swa = allocator.full_attn_allocator, allocator.swa_attn_allocator
    running: list[torch.Tensor] = []

    def admit() -> None:
        slots = full.alloc(32 * PAGE)
        allocator.set_full_to_swa_mapping(slots, swa.alloc(32 * PAGE))
        running.append(slots)

    for _ in range(SWA // PAGE // 64):
        admit()

    def group() -> float:
        started = time.process_time()
        for _ in range(8):
            admit()
        allocator.free_group_begin()
        for _ in range(8):
            allocator.free(running.pop(0))
        allocator.free_group_end()
        return time.process_time() - started

    return group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=2000)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("swaleak").setLevel(logging.CRITICAL)  # the churn leaks, as it should
    caches = Caches("cpu")
    base = caches.allocator
    print(f"torch {torch.__version__}, SGLang {from_installed().version}, one thread, CPU time\n")
    print("| churn | arm | ms a group | to plain |\n|---|---|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        whole: dict[str, float] = {}
        for cache in ("swa", "unified"):
            for page_size in (1, 4):
                classes = arms(base, folder)
                seconds, ratios = take_turns(
                    lambda n: churn(caches, classes[n], cache, page_size, asked.requests),  # noqa: B023
                    list(classes),
                    asked.rounds,
                )
                for name, spent in seconds.items():
                    whole[name] = whole.get(name, 0) + spent
                    ms = spent / (asked.requests // BATCH) * 1e3
                    extra = f"{(ratios[name] - 1) * 100:+.1f} %"
                    print(f"| {cache}, page {page_size} | {name} | {ms:.3f} | {extra} |")
        for name, spent in whole.items():
            ms = spent / (asked.requests // BATCH) / 4 * 1e3
            extra = f"{(spent / whole['plain'] - 1) * 100:+.1f} %"
            print(f"| **both caches, both sizes** | {name} | {ms:.3f} | {extra} |")
        caches.allocator = base
        print(f"\nfull {FULL:,}, SWA {SWA:,} slots, page {PAGE}: 8 requests of 32 pages a group\n")
        print("| arm | ms a group | more than plain |\n|---|--:|--:|")
        groups = {
            n: production_group(c) for n, c in arms(load(from_installed(), "cpu"), folder).items()
        }
        seconds, _ = take_turns(lambda n: groups[n](), list(groups), asked.rounds * 10)
        for name, spent in seconds.items():
            more = (spent - seconds["plain"]) * 1e3
            print(f"| {name} | {spent * 1e3:.3f} | {more:+.3f} ms |")
    started = time.perf_counter()
    plugin.activate()
    print(f"\ninstalled and not asked for: {(time.perf_counter() - started) * 1e6:.1f} us at start")


if __name__ == "__main__":
    main()
