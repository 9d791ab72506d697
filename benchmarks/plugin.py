"""What the plugin costs: audit, record and fix beside SGLang as shipped, on the churn of the tests.

    python -m benchmarks.plugin [--rounds N] [--requests N]

Needs an installed SGLang (tests/requirements-sglang.txt). The arms take turns in one process; the
baseline is SGLang as shipped, without the plugin.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from benchmarks.figures import Figures, Row, environment, markdown, ratios, take_turns
from swaleak.allocator.strategies import STRATEGIES
from swaleak.live import plugin
from swaleak.targets.driver import graft
from swaleak.targets.open import ClassTarget, open_target
from swaleak.targets.shims import BaseSWAKVPool
from swaleak.targets.sources import from_installed
from tests.churn import BATCH, PAGES, Server, imported_caches

FULL, SWA, PAGE = 9_116_160, 911_616, 256  # slots; the pools of the public report
ROUNDS, REQUESTS = 15, 2000
PLAIN = "SGLang as shipped"


def arms(base: type[Any], folder: str) -> dict[str, type[Any]]:
    def asked(text: str) -> type[Any]:
        return plugin.watched_by(base, plugin.read_settings(text), None)

    return {
        PLAIN: base,
        "audit": asked("audit"),
        "record": asked(f"record:{folder}/t.jsonl"),
        "audit,record": asked(f"audit,record:{folder}/t.jsonl"),
        "fix:barrier": graft(base, STRATEGIES["barrier"]),
        "fix:enqueue": graft(base, STRATEGIES["enqueue"]),
    }


def churn(class_: type[Any], cache: str, page_size: int, requests: int) -> float:
    """CPU seconds of a churn on a fresh cache."""
    server = Server(imported_caches(lambda _: class_), cache, page_size, PAGES, seed=0)
    started = time.process_time()
    for _ in range(requests // BATCH):
        server.batch()
    return time.process_time() - started


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


def kinds_of_churn(rounds: int, requests: int, folder: str) -> tuple[list[Row], list[Row]]:
    """Return the churn of both caches at two page sizes, all four together and each alone."""
    imported_caches()  # loads SGLang and its plugins
    shipped = import_module("sglang.srt.mem_cache.allocator.swa").SWATokenToKVPoolAllocator
    classes = arms(shipped, folder)
    groups = requests // BATCH
    whole = {name: [0.0] * rounds for name in classes}
    each: list[Row] = []
    for cache in ("swa", "unified"):
        for page_size in (1, 4):

            def run(name: str, cache: str = cache, page_size: int = page_size) -> float:
                return churn(classes[name], cache, page_size, requests)

            seen = take_turns(run, list(classes), rounds)
            for name, seconds in seen.items():
                whole[name] = [a + b for a, b in zip(whole[name], seconds, strict=True)]
            each += rows_of(f"in the {cache} cache, page size {page_size}", seen, groups)
    return rows_of("in the churn of the tests", whole, 4 * groups), each


def production(rounds: int, folder: str) -> list[Row]:
    """Return what one group costs on pools of production size."""
    target = open_target("installed", "cpu")
    assert isinstance(target, ClassTarget)
    classes = arms(target.allocator_class("shipped"), folder)
    groups = {name: production_group(class_) for name, class_ in classes.items()}
    seen = take_turns(lambda name: groups[name](), list(groups), rounds)
    return rows_of("on production pools", seen, 1)


def rows_of(what: str, seen: dict[str, list[float]], groups: int) -> list[Row]:
    """Return each arm beside the first. ``seen``: CPU seconds of so many groups, one a turn."""
    [(plain, base), *others] = seen.items()

    def each(seconds: list[float]) -> str:
        return f"{statistics.median(seconds) / groups * 1e3:.3f} ms"

    return [
        Row(
            f"`SWALEAK={name}`: a group {what}",
            each(seconds),
            plain,
            each(base),
            ratios(seconds, base),
        )
        for name, seconds in others
    ]


def measure(rounds: int = ROUNDS, requests: int = REQUESTS) -> Figures:
    """Measure all arms on the churn, then on pools of production size."""
    torch.set_num_threads(1)
    logging.getLogger("swaleak").setLevel(logging.CRITICAL)  # the churn leaks, as it should
    with tempfile.TemporaryDirectory() as folder:
        whole, each = kinds_of_churn(rounds, requests, folder)
        large = production(rounds * 10, folder)
    started = time.perf_counter()
    plugin.activate()
    idle = (time.perf_counter() - started) * 1e6
    note = (
        f"{rounds} turns of {requests} requests through each of two caches at two page sizes, "
        f"{rounds * 10} turns of a group on {FULL:,} full and {SWA:,} SWA slots, page size "
        f"{PAGE}; CPU time of one thread; installed and not asked for, it takes {idle:.0f} us at "
        f"start; SGLang {from_installed().version}, {environment()}"
    )
    return Figures((*whole, *large), note, tuple(each))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--json", action="store_true", help="for benchmarks.run")
    asked = parser.parse_args()
    figures = measure(asked.rounds, asked.requests)
    print(json.dumps(figures.as_data()) if asked.json else markdown(figures))


if __name__ == "__main__":
    main()
