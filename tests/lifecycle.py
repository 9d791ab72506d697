"""Requests from admission to their end on SGLang's own caches, with SGLang's own request table.

What a scheduler does, without a model: slots stand in a ``ReqToTokenPool`` (int32), and its slices
go to the caches and the allocator. Prompts are prefilled in one or two chunks, tokens are decoded,
what leaves the window is freed by SGLang's own function, requests finish or are aborted, in free
groups. Plugins are loaded as SGLang's processes do, so SWALEAK decides what is watched.

Names are those of 0.5.18. Run as a script, it prints one JSON object: for each group the SWA pages
that were lost in it, seen by a look at every slot, and what was left when all requests had ended
and all nodes were evicted.
"""

from __future__ import annotations

import argparse
import array
import json
import random
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from swaleak.targets import shims
from swaleak.targets.driver import Sizes
from swaleak.targets.radix_cache import MEM_CACHE
from tests.churn import imported_caches

FULL_PAGES, SWA_PAGES, WINDOW = 192, 96, 3  # pages
MOST_RUNNING, LONGEST = 8, 20  # requests; pages of one of them


@dataclass
class Request:
    """The attributes that the caches and ``free_swa_out_of_window_slots`` read and write."""

    origin_input_ids: array.array[int]
    req_pool_idx: int | None = None
    output_ids: array.array[int] = field(default_factory=lambda: array.array("q"))
    kv: Any = field(default_factory=lambda: SimpleNamespace(swa_evicted_seqlen=0))
    filled: int = 0  # tokens that have slots
    wanted: int = 0  # tokens it is going to decode
    decode_batch_idx: int = 0
    extra_key: None = None
    cache_salt: None = None
    priority: int = 0
    session: None = None
    finished_reason: None = None
    mamba_pool_idx: None = None
    cache_protected_len: int = 0
    inflight_middle_chunks: int = 0
    kv_committed_len: int = 0
    last_node: Any = None
    prefix_indices: Any = None
    swa_uuid_for_lock: Any = None
    skip_lock_node_ids: Any = None
    swa_prefix_lock_released: bool = False

    def tokens(self) -> array.array[int]:
        return self.origin_input_ids + self.output_ids

    def get_fill_ids(self) -> array.array[int]:
        return self.tokens()[: self.filled]


class Engine:
    """Requests over one cache, in steps as a scheduler takes them."""

    def __init__(self, cache: str, page_size: int, seed: int) -> None:
        caches = imported_caches()
        # the Triton kernels of alloc_extend and alloc_decode need a GPU
        vars(import_module(f"{MEM_CACHE}.allocator.paged")).update(shims.kernels("cpu"))
        self.slide_out = import_module(f"{MEM_CACHE}.common").free_swa_out_of_window_slots
        tree = caches.make(cache, "shipped", Sizes(FULL_PAGES, SWA_PAGES, page_size), WINDOW)
        pool = import_module(f"{MEM_CACHE}.memory_pool").ReqToTokenPool
        self.table = pool(MOST_RUNNING, (LONGEST + 2) * page_size, "cpu", False)
        assert self.table.req_to_token.dtype == torch.int32
        tree.cache.req_to_token_pool = self.table
        self.caches, self.cache, self.page_size = caches, tree.cache, page_size
        self.driver, self.allocator = tree.driver, tree.driver.allocator
        self.rng = random.Random(seed)
        self.running: list[Request] = []
        self.chunked: list[Request] = []
        self.known_lost: set[int] = set()
        self.groups: list[list[int]] = []

    def step(self) -> None:
        """Admit and prefill, decode, then let slide and end some, all that frees in one group."""
        for _ in range(self.rng.randint(0, 3)):
            self.admit()
        for request in list(self.running):
            self.decode(request)
        self.allocator.free_group_begin()
        for request in [*self.chunked, *self.running]:
            if self.rng.random() < 0.1:  # another request of the batch needs room
                self.evict(swa_num_tokens=self.rng.randint(1, 20) * self.page_size)
            if request in self.chunked:
                self.cache.cache_unfinished_req(request, chunked=True)
            elif len(request.output_ids) > request.wanted:
                self.end(request, insert=self.rng.random() > 0.2)
            elif len(request.output_ids) == 1:
                self.cache.cache_unfinished_req(request)
            else:
                self.slide(request)
        self.end_group()
        for request in list(self.chunked):
            self.prefill(request, len(request.origin_input_ids))

    def admit(self) -> None:
        if not self.table.free_slots:
            return
        letters = [self.rng.choice("AB" if i < 4 else "ABCD") for i in range(LONGEST // 2)]
        prompt = letters[: self.rng.randint(2, LONGEST // 2)]
        ids = array.array("q", (ord(c) * 4096 + i for c in prompt for i in range(self.page_size)))
        ids = ids[: len(ids) - self.rng.randrange(self.page_size)]
        request = Request(ids, wanted=self.rng.choice((1, 2, LONGEST // 3 * self.page_size)))
        key = self.caches.module(f"{MEM_CACHE}.radix_cache").RadixKey(ids[:-1])
        match = self.cache.match_prefix(self.caches.params("MatchPrefixParams", key=key))
        self.table.alloc([request])
        lock = self.cache.inc_lock_ref(match.last_device_node)
        request.last_node, request.swa_uuid_for_lock = (
            match.last_device_node,
            lock.swa_uuid_for_lock,
        )
        request.skip_lock_node_ids = getattr(lock, "skip_lock_node_ids", None)
        have = match.device_indices
        request.cache_protected_len = request.filled = len(have)
        self.table.write((request.req_pool_idx, slice(0, len(have))), have)
        cut = self.rng.randint(len(have) + 1, len(ids)) if self.rng.random() < 0.4 else len(ids)
        self.prefill(request, cut)

    def prefill(self, request: Request, upto: int) -> None:
        """Get slots for its prompt up to a token; without room it is aborted."""
        if request in self.chunked:
            self.chunked.remove(request)
        if not self.grow(request, upto):
            self.allocator.free_group_begin()
            self.end(request, insert=False)
            self.end_group()
        elif upto < len(request.origin_input_ids):
            self.chunked.append(request)
        else:
            self.running.append(request)

    def decode(self, request: Request) -> None:
        request.decode_batch_idx += 1
        if len(request.tokens()) == request.filled:
            request.output_ids.append(self.rng.choice((1, 2)))
        if not self.grow(request, request.filled + 1):
            self.allocator.free_group_begin()
            self.end(request, insert=False)
            self.end_group()

    def grow(self, request: Request, upto: int) -> bool:
        have, wanted, row = request.filled, upto - request.filled, request.req_pool_idx
        if wanted <= 0:
            return True
        for _ in range(2):
            if self.page_size == 1:
                slots = self.allocator.alloc(wanted)
            else:
                before, after = torch.tensor([have]), torch.tensor([upto])
                last = self.table.req_to_token[row, have - 1 : have] if have else torch.tensor([-1])
                slots = self.allocator.alloc_extend(before, before, after, after, last, wanted)
            if slots is not None:
                self.table.write((row, slice(have, upto)), slots)
                request.filled = request.kv_committed_len = upto
                return True
            self.evict(num_tokens=wanted + self.page_size, swa_num_tokens=wanted + self.page_size)
        return False

    def slide(self, request: Request) -> None:
        """As ``maybe_evict_swa``: what has left the window, and the lock on the prefix."""
        window = self.cache.sliding_window_size
        self.slide_out(
            request,
            request.filled - 1,
            sliding_window_size=window,
            page_size=self.page_size,
            req_to_token_pool=self.table,
            token_to_kv_pool_allocator=self.allocator,
        )
        locked = not request.swa_prefix_lock_released and request.swa_uuid_for_lock is not None
        if locked and request.decode_batch_idx >= window:
            self.cache.dec_swa_lock_only(
                request.last_node,
                request.swa_uuid_for_lock,
                skip_lock_node_ids=request.skip_lock_node_ids,
            )
            request.swa_prefix_lock_released = True

    def end(self, request: Request, *, insert: bool) -> None:
        """Finish it, or abort it."""
        self.cache.cache_finished_req(request, is_insert=insert, kv_len_to_handle=request.filled)
        self.table.free(request)
        if request in self.running:
            self.running.remove(request)

    def evict(self, **tokens: int) -> None:
        self.cache.evict(self.caches.params("EvictParams", **tokens))

    def end_group(self) -> None:
        self.allocator.free_group_end()
        state = self.driver.state()
        mapping = state.mapping[:-1]
        mapped = set((mapping[mapping > 0] // self.page_size).tolist())
        lost = {*range(1, state.swa_pages + 1)} - mapped - set(state.swa_free.tolist())
        self.groups.append(sorted(lost - self.known_lost))
        self.known_lost = lost

    def drain(self) -> tuple[int, int]:
        """End everything; return full and SWA pages that are still in use."""
        self.allocator.free_group_begin()
        for request in [*self.running, *self.chunked]:
            self.end(request, insert=True)
        self.end_group()
        self.allocator.free_group_begin()
        everything = FULL_PAGES * self.page_size
        self.evict(num_tokens=everything, swa_num_tokens=everything)
        self.end_group()
        state = self.driver.state()
        return state.full_pages - len(state.full_free), state.swa_pages - len(state.swa_free)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", default="swa", choices=("swa", "unified"))
    parser.add_argument("--page-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    engine = Engine(asked.cache, asked.page_size, asked.seed)
    for _ in range(asked.steps):
        engine.step()
    left = engine.drain()
    print(json.dumps({"groups": engine.groups, "left": left}))


if __name__ == "__main__":
    main()
