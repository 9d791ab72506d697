"""Drives requests on a radix cache as SGLang's scheduler does: admitted, cached, grown, ended.

Whatever a release has a function for below ``mem_cache`` is done by that function; the rest follows
its ``schedule_batch.py`` and ``schedule_policy.py``. Names are those of v0.5.18; where another
release differs it is said. docs/requests.md says which function each step follows.
"""

from __future__ import annotations

import array
import inspect
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from swaleak.errors import ScriptError, StandInError
from swaleak.scenario import request_steps as steps
from swaleak.scenario.calls import PoolExhausted
from swaleak.scenario.contract import request_refusal
from swaleak.scenario.request_steps import OUTPUT, RequestStep, tokens_of
from swaleak.targets.driver import Driver

ROWS = 64  # requests that run at once
PREFILLED, CACHED, DECODING = "prefilled", "cached", "decoding"


class Missing(StandInError, AttributeError):
    """A release reads something of a request that ``Request`` does not have."""


class Request:
    """A request, with what the caches of any release read of one and write to it.

    Since 0.5.16 some of it is read of ``request.kv``, of which release it depends what: that is the
    request itself. ``filled``: tokens that have slots. ``state``: ``prefilled`` (what has slots is
    not in the cache yet), ``cached``, ``decoding``. ``peers``: by position, the SWA slot that was
    handed out for it.
    """

    extra_key = cache_salt = session = session_id = finished_len = discard_output_reason = None
    swa_branching_seqlen = mamba_branching_seqlen = mamba_pool_idx = None
    mamba_last_track_seqlen = retraction_backup = kv_rotation_base = None
    swa_host_hit_length = mamba_host_hit_length = host_hit_length = priority = swa_evict_floor = 0
    skip_radix_cache_insert = holds_mamba = swa_prefix_lock_released = False
    cache_inserted_len = cache_protected_len = prefix_len = 0
    swa_evicted_seqlen = kv_committed_len = kv_allocated_len = decode_batch_idx = 0
    prefix_indices = last_node = last_host_node = lock = lock_receipt = None
    swa_uuid_for_lock = skip_lock_node_ids = None

    def __init__(self, name: str, tokens: list[int]) -> None:
        self.rid = name
        self.origin_input_ids = array.array("q", tokens)
        self.output_ids = array.array("q")
        self.filled = 0
        self.state = PREFILLED
        self.peers: list[int] = []
        self.req_pool_idx: int | None = None
        self.finished_reason: str | None = None
        self.kv: Any = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Missing(f"it reads Req.{name}, which swaleak does not provide")

    @property
    def tokens(self) -> array.array[int]:
        """Prompt and output."""
        return self.origin_input_ids + self.output_ids

    full_untruncated_fill_ids = tokens

    @property
    def seqlen(self) -> int:
        """The number of its tokens."""
        return len(self.origin_input_ids) + len(self.output_ids)

    @property
    def fill_len(self) -> int:
        """Tokens that have slots, as 0.5.14 and before call them."""
        return self.filled

    extend_end = fill_len

    @property
    def extend_range(self) -> SimpleNamespace:
        """Tokens that have slots, as 0.5.15 to 0.5.20 call them."""
        return SimpleNamespace(start=self.cache_protected_len, end=self.filled)

    @property
    def swa_released(self) -> bool:
        """Whether it has given up the SWA part of its lock."""
        return bool(self.swa_prefix_lock_released or getattr(self.lock, "swa_released", False))

    @property
    def holds_kv(self) -> bool:
        """Whether it has a row."""
        return self.req_pool_idx is not None

    @property
    def is_kv_released(self) -> bool:
        """Whether nothing of its row is left."""
        return self.kv_allocated_len == 0 and self.swa_evicted_seqlen == 0

    def get_fill_ids(self) -> array.array[int]:
        """Return the tokens that have slots."""
        return self.tokens[: self.filled]

    def finished(self) -> bool:
        """Whether it has ended by itself."""
        return self.finished_reason is not None

    def effective_kv_committed_len(self) -> int:
        """Return how many tokens have slots, 0.5.16 and later."""
        return self.kv_committed_len

    owned_kv_len = effective_kv_committed_len

    def pop_committed_kv_cache(self) -> int:
        """Return how many tokens have slots, 0.5.15 and before."""
        return self.kv_committed_len

    def pop_overallocated_kv_cache(self) -> tuple[int, int]:
        """Return the slots beyond those of tokens: none."""
        return self.kv_committed_len, self.kv_allocated_len

    def refresh_fill_ids(self) -> None:
        """Nothing: they are never out of date."""

    def get_evicted_seqlen(self, _component: Any) -> int:
        """Return below which position nothing has an SWA peer, 0.5.21 and later."""
        return self.swa_evicted_seqlen

    def set_evicted_seqlen(self, _component: Any, length: int) -> None:
        """Set it."""
        self.swa_evicted_seqlen = length

    def swa_dead_lo(self, _page_size: int) -> int:
        """Return the lowest position whose SWA peer the request itself may free."""
        return self.cache_protected_len

    def mark_kv_released(self) -> None:
        """Forget the row."""
        self.kv_allocated_len = self.swa_evicted_seqlen = 0


class RequestTable:
    """``ReqToTokenPool``: a row of slots per request, int32[rows, columns] as a server has them."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.device = device
        self.columns = columns
        self.free_slots = list(range(ROWS))

    @cached_property
    def req_to_token(self) -> Tensor:
        """The rows; made for the first request, many scenarios have none."""
        return torch.zeros((ROWS, self.columns), dtype=torch.int32, device=self.device)

    def write(self, indices: Any, values: Tensor) -> None:
        """Write slots to a part of a row."""
        self.req_to_token[indices] = values.to(torch.int32)

    def take(self, request: Request) -> None:
        """Give a request a row."""
        if not self.free_slots:
            raise ScriptError(f"more than {ROWS} requests run at once")
        request.req_pool_idx = self.free_slots.pop(0)

    def free(self, request: Any) -> None:
        """Take a request's row."""
        self.free_slots.insert(0, request.req_pool_idx)
        request.req_pool_idx = None


class Requests:
    """The requests on one cache. ``running``: by name, those that have been admitted."""

    def __init__(self, caches: Any, cache: Any, driver: Driver) -> None:
        self.caches = caches
        self.cache = cache
        self.driver = driver
        self.page_size = driver.page_size
        self.window: int = cache.sliding_window_size
        self.running: dict[str, Request] = {}
        # whether it can give up the SWA part of a lock: an option of a server, off unless it is set
        self.releases = any(
            hasattr(cache, name) for name in ("release_swa_prefix_lock", "dec_swa_lock_only")
        )

    @cached_property
    def table(self) -> RequestTable:
        """The rows of the requests."""
        table: RequestTable = self.cache.req_to_token_pool
        return table

    def row(self, request: Request) -> Tensor:
        """Return the slots of a request, int32[filled]."""
        row: Tensor = self.table.req_to_token[request.req_pool_idx, : request.filled]
        return row

    @cached_property
    def common(self) -> Any:
        """SGLang's ``mem_cache.common``."""
        return self.caches.module("sglang.srt.mem_cache.common")

    def play(self, step: RequestStep, *, in_group: bool) -> None:
        """Make one step. Raises what SGLang raises, ``ScriptError`` and ``PoolExhausted``."""
        reason = request_refusal(step, self, in_group=in_group)
        if reason is not None:
            raise ScriptError(reason)
        if isinstance(step, steps.Admit):
            self._admit(step.request, tokens_of(step.prompt, self.page_size))
            return
        if isinstance(step, steps.Flush):
            self.cache.reset()
            self.driver.allocator.clear()
            return
        request = self.running[getattr(step, "request", "")]
        match step:
            case steps.Grow(by=None):
                for _ in range(step.tokens):
                    self._decode(request)
            case steps.Grow(by=str(by)):
                request.origin_input_ids.extend(tokens_of(by, self.page_size))
                request.state = PREFILLED
                self._extend(request)
            case steps.Chunk():
                self._cache_unfinished(request)
            case steps.Slide():
                self._slide(request)
            case steps.ReleaseWindow():
                self._release_window(request)
            case steps.Finish():
                request.finished_reason = "length"
                self.end(request, keep=True)
            case _:
                self.end(request, keep=False)

    def _admit(self, name: str, tokens: list[int]) -> None:
        """As ``get_new_batch_prefill`` and ``prepare_for_extend``."""
        request = Request(name, tokens)
        key = self.caches.token_key(tokens[:-1])
        match = self.cache.match_prefix(self.caches.params("MatchPrefixParams", key=key))
        node = request.last_node = match.last_device_node
        if hasattr(self.cache, "lock"):  # 0.5.22 and later
            request.lock = self.cache.lock(node)
        else:
            lock = self.cache.inc_lock_ref(node)
            request.swa_uuid_for_lock = getattr(lock, "swa_uuid_for_lock", None)
            request.skip_lock_node_ids = getattr(lock, "skip_lock_node_ids", None)
            request.lock_receipt = lock.to_dec_params()
        prefix = self.prefix_of(match)
        self.table.take(request)
        have = request.cache_protected_len = request.filled = request.prefix_len = len(prefix)
        self.table.write((request.req_pool_idx, slice(0, have)), prefix)
        request.peers = [0] * have
        self.running[name] = request
        try:
            self._extend(request)
        except PoolExhausted:
            self.end(request, keep=False)
            raise

    def prefix_of(self, match: Any) -> Tensor:
        """Return the slots that a match has found, int64[n]."""
        if hasattr(match, "device_indices"):
            slots: Tensor = match.device_indices
        else:  # 0.5.22 and later
            slots = self.cache.path_device_indices(match.last_device_node)
            slots = slots[: match.device_prefix_len]
        return slots

    def _extend(self, request: Request) -> None:
        """Allocate for all tokens of the prompt, as ``alloc_for_extend``."""
        before, after = request.filled, len(request.origin_input_ids)
        self._make_room(after - before)
        if self.page_size == 1:
            slots = self.driver.alloc(after - before)
        else:
            slots = self.driver.alloc_extend([before], [after], self._last(request), after - before)
        self._take(request, slots, after)

    def _decode(self, request: Request) -> None:
        """Allocate for one more token, as ``alloc_for_decode``."""
        request.output_ids.append(OUTPUT)
        request.decode_batch_idx += 1
        request.state = DECODING
        self._make_room(1)
        after = request.filled + 1
        if self.page_size == 1:
            slots = self.driver.alloc(1)
        else:
            slots = self.driver.alloc_decode([after], self._last(request))
        self._take(request, slots, after)

    def _last(self, request: Request) -> Tensor:
        """Return the slot of its last token, int64[1]; 0 for none."""
        last = request.filled
        if not last:
            return torch.zeros(1, dtype=torch.int64, device=self.table.device)
        return self.table.req_to_token[request.req_pool_idx, last - 1 : last].long()

    def _make_room(self, tokens: int) -> None:
        """Evict what is missing, as ``evict_from_tree_cache`` of the release does it."""
        paged = self.page_size if self.page_size > 1 else 0  # a new page for each request
        self.common.evict_from_tree_cache(self.cache, tokens + paged)

    def _take(self, request: Request, slots: Tensor | None, after: int) -> None:
        if slots is None:
            raise PoolExhausted(f"{request.rid}: the pools are too small")
        self.table.write((request.req_pool_idx, slice(request.filled, after)), slots)
        request.peers[request.filled :] = self.driver.peers(slots).tolist()
        request.filled = request.kv_committed_len = request.kv_allocated_len = after

    def _cache_unfinished(self, request: Request) -> None:
        """As ``process_batch_result_prefill``, and ``get_next_batch_to_run`` of a middle chunk."""
        if hasattr(self.common, "checkpoint_kv_cache"):  # 0.5.22 and later
            self.common.checkpoint_kv_cache(request, self.cache)
        else:
            self.common.maybe_cache_unfinished_req(request, self.cache)
        request.state = CACHED

    def _slide(self, request: Request) -> None:
        """As ``ScheduleBatch._evict_swa``, below the token that is computed next."""
        length, cache = request.filled, self.cache
        if hasattr(cache, "evict_sliding_windows"):  # 0.5.21 and later
            cache.evict_sliding_windows(request, length)
        elif hasattr(self.common, "free_swa_out_of_window_slots"):  # 0.5.14 and later
            self.common.free_swa_out_of_window_slots(
                request,
                length,
                sliding_window_size=self.window,
                page_size=self.page_size,
                req_to_token_pool=self.table,
                token_to_kv_pool_allocator=self.driver.allocator,
            )
        else:
            size = self.page_size
            start = max(request.swa_evicted_seqlen, request.cache_protected_len)
            stop = max(start, length - self.window - size) // size * size
            request.swa_evicted_seqlen = start
            if stop > start:
                row = self.table.req_to_token[request.req_pool_idx]
                self.driver.allocator.free_swa(row[start:stop])
                request.swa_evicted_seqlen = stop

    def locks_swa(self, request: Request) -> bool:
        """Whether a request's lock has an SWA part that can be given up by itself."""
        if hasattr(self.cache, "release_swa_prefix_lock"):  # 0.5.22 and later: it sees for itself
            return request.lock is not None
        if "swa_uuid_for_lock" in self.release_parameters:  # 0.5.19 and before
            return request.swa_uuid_for_lock is not None
        receipt: Any = request.lock_receipt
        if hasattr(receipt, "swa_uuid_for_lock"):  # 0.5.20
            return receipt.swa_uuid_for_lock is not None
        component = self.caches.component.SWA
        return receipt.component_lock_uuids.get(component) is not None

    @cached_property
    def release_parameters(self) -> frozenset[str]:
        """The parameters of ``dec_swa_lock_only``."""
        return frozenset(inspect.signature(self.cache.dec_swa_lock_only).parameters)

    def _release_window(self, request: Request) -> None:
        """As ``maybe_evict_swa`` where a server has set the option for it."""
        cache = self.cache
        if hasattr(cache, "release_swa_prefix_lock"):  # 0.5.22 and later
            cache.release_swa_prefix_lock(request)
            return
        names = ("swa_uuid_for_lock", "skip_lock_node_ids")
        if given := {n: getattr(request, n) for n in names if n in self.release_parameters}:
            cache.dec_swa_lock_only(request.last_node, **given)
        else:  # 0.5.20 and 0.5.21
            cache.dec_swa_lock_only(request.last_node, request.lock_receipt)
        request.swa_prefix_lock_released = True

    def end(self, request: Request, *, keep: bool) -> None:
        """End it as ``release_kv_cache`` does; ``keep``: what it holds goes into the cache."""
        release = self.common.release_kv_cache
        del self.running[request.rid]
        if "checkpoint" in inspect.signature(release).parameters:  # 0.5.22 and later
            release(request, self.cache, checkpoint=keep)
        else:
            release(request, self.cache, is_insert=keep)
