"""A driver that does to SGLang's caches what a scheduler does, with random requests, in groups.

It loads plugins as SGLang's processes do, so SWALEAK decides what is watched. Run it as a script:
it prints one JSON object, with the SWA pages in use and mapped after each group.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from swaleak.allocator.strategies import STRATEGIES
from swaleak.targets.driver import Driver, Sizes, graft
from swaleak.targets.radix_cache import Caches, RadixCache

PAGES = 512
WINDOW = 2  # pages
BATCH = 8  # requests a group


class Imported:
    """The modules of the SGLang that ``import sglang`` gives, with all of its dependencies."""

    module = staticmethod(import_module)

    @staticmethod
    def exists(name: str) -> bool:
        return find_spec(name) is not None


def imported_caches(adapt: Callable[[type], type] = lambda class_: class_) -> Caches:
    """Return the caches of the imported SGLang, over its own KV pool, its plugins loaded.

    ``adapt``: makes the allocator's class from SGLang's.
    """
    import_module("sglang.srt.plugins").load_plugins()
    shipped = import_module("sglang.srt.mem_cache.allocator.swa").SWATokenToKVPoolAllocator
    pool_class = import_module("sglang.srt.mem_cache.swa_memory_pool").SWAKVPool

    def make(strategy: str, sizes: Sizes) -> Driver:
        class_ = shipped if strategy == "shipped" else graft(shipped, STRATEGIES[strategy])
        # one head of one element: only the bookkeeping is looked at
        pool = pool_class(
            *sizes.slots, sizes.page_size, torch.bfloat16, 1, 1, [0], [1], device="cpu"
        )
        size = sizes.page_size
        return Driver(adapt(class_)(*sizes.slots, size, torch.bfloat16, "cpu", pool, False))

    return Caches(Imported(), make, "the imported SGLang")  # type: ignore[arg-type]


def prompt(rng: random.Random) -> str:
    """A prompt of 2 to 12 pages; the first ones are few, so that many requests share them."""
    length = rng.randint(2, 12)
    return "".join(rng.choice("ABC" if i < 4 else "ABCDEFGH") for i in range(length))


class Server:
    """Requests over one cache: matched, locked, allocated; inserted and unlocked in groups."""

    def __init__(self, caches: Caches, cache: str, page_size: int, pages: int, seed: int) -> None:
        self.caches = caches
        self.rng = random.Random(seed)
        sizes = Sizes(pages, pages // 2, page_size)
        self.tree: RadixCache = caches.make(cache, "shipped", sizes, WINDOW)
        self.cache = self.tree.cache
        self.allocator = self.tree.driver.allocator
        self.page_size = page_size
        self.running: list[tuple[Any, Any, bool]] = []

    def match(self, key: Any) -> Any:
        """The longest prefix in the cache, locked."""
        match = self.cache.match_prefix(self.caches.params("MatchPrefixParams", key=key))
        return match, (match.last_device_node, self.cache.inc_lock_ref(match.last_device_node))

    def unlock(self, node: Any, lock: Any, slid: bool = False) -> None:
        self.cache.dec_lock_ref(node, lock.to_dec_params(), skip_swa=slid)

    def admit(self, prompt: str) -> tuple[Any, torch.Tensor, int, Any] | None:
        """Match a prompt and get slots for the rest; None if there is no room at all."""
        key = self.caches.key(prompt, self.page_size)
        match, lock = self.match(key)
        have = match.device_indices
        missing = len(prompt) - len(have) // self.page_size
        slots = self.tree.alloc(missing) if missing else have[:0]
        if slots is None:
            self.evict(missing * self.page_size)
            slots = self.tree.alloc(missing)
        if slots is None:
            self.unlock(*lock)
            return None
        return key, torch.cat((have, slots)), len(have), lock

    def evict(self, tokens: int) -> None:
        full, swa = self.tree.driver.full_pool, self.tree.driver.swa_pool
        self.cache.evict(
            self.caches.params(
                "EvictParams",
                num_tokens=max(0, tokens - full.available_size()),
                swa_num_tokens=max(0, tokens - swa.available_size()),
            )
        )

    def slide(self, node: Any, lock: Any) -> bool:
        """The window has left what a request holds: give up the SWA side of its lock."""
        if lock.swa_uuid_for_lock is None:
            return False
        self.cache.dec_swa_lock_only(
            node, lock.swa_uuid_for_lock, skip_lock_node_ids=lock.skip_lock_node_ids
        )
        return True

    def batch(self) -> None:
        """Admit some requests, then finish them in one group; some old ones end with them."""
        wanted = [prompt(self.rng) for _ in range(BATCH // 2)]
        wanted += [self.rng.choice(wanted) for _ in range(BATCH // 2)]
        admitted = [a for p in wanted if (a := self.admit(p))]
        self.allocator.free_group_begin()
        for key, value, have, (node, lock) in admitted:
            params = self.caches.params("InsertParams", key=key, value=value, prev_prefix_len=have)
            self.cache.insert(params)
            self.unlock(node, lock)
            if self.rng.random() < 0.5:  # goes on: holds what it has just put into the cache
                node, lock = self.match(key)[1]
                slid = self.rng.random() < 0.01 and self.slide(node, lock)
                self.running.append((node, lock, slid))
            if self.rng.random() < 0.03:
                pages = self.rng.randint(1, 120)
                params = self.caches.params("EvictParams", swa_num_tokens=pages * self.page_size)
                self.cache.evict(params)
        while len(self.running) > BATCH:
            self.unlock(*self.running.pop(self.rng.randrange(len(self.running))))
        self.allocator.free_group_end()

    def counts(self) -> tuple[int, int]:
        """SWA pages in use and mapped, counted in full."""
        state = self.tree.state()
        mapping = state.mapping[:-1]
        mapped = torch.unique(mapping[mapping > 0] // self.page_size)
        return state.swa_pages - len(state.swa_free), len(mapped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", default="swa", choices=("swa", "unified"))
    parser.add_argument("--page-size", type=int, default=4)
    parser.add_argument("--pages", type=int, default=PAGES)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill-at", type=int, help="kill this process inside that group")
    parser.add_argument("--no-counts", action="store_true", help="for timing")
    asked = parser.parse_args()
    caches = imported_caches()
    server = Server(caches, asked.cache, asked.page_size, asked.pages, asked.seed)
    groups = []
    started = time.perf_counter()
    for group in range(1, asked.requests // BATCH + 1):
        if group == asked.kill_at:
            server.allocator.free_group_begin()
            os.kill(os.getpid(), signal.SIGKILL)
        server.batch()
        if not asked.no_counts:
            groups.append(server.counts())
    seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "groups": groups, "last": server.counts()}))


if __name__ == "__main__":
    main()
