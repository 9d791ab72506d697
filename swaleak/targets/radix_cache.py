"""Makes, drives and reads SGLang's radix caches, run out of a source tree.

Names are those of v0.5.18; where another release differs it is said.
"""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch

from swaleak.errors import RAISED, StandInError, TargetError, format_error
from swaleak.scenario.calls import PoolExhausted
from swaleak.scenario.request_steps import RequestStep, prompt_of, tokens_of
from swaleak.scenario.steps import Group, Step
from swaleak.targets.driver import Driver, Sizes, State
from swaleak.targets.loader import ModuleLoader
from swaleak.targets.requests import Request, Requests, RequestTable

MEM_CACHE = "sglang.srt.mem_cache"
CLASSES = {
    "swa": (f"{MEM_CACHE}.swa_radix_cache", "SWARadixCache"),
    "unified": (f"{MEM_CACHE}.unified_radix_cache", "UnifiedRadixCache"),
}
# where the unified cache's parts are; the newer place, then that of 0.5.16 and before
COMPONENTS = (f"{MEM_CACHE}.unified_cache.components", f"{MEM_CACHE}.unified_cache_components")
UNMAPPED = -1  # the SWA page of a node that should have one and has none


class Caches:
    """The radix caches of one SGLang.

    ``make_driver``: returns an allocator of it, from a strategy and pool sizes.
    """

    def __init__(
        self, modules: ModuleLoader, make_driver: Callable[[str, Sizes], Driver], name: str
    ) -> None:
        self.module = modules.module
        self.exists = modules.exists
        self.make_driver = make_driver
        self.name = name

    @cached_property
    def left_out(self) -> dict[str, str]:
        """Which caches (``swa``, ``unified``) there are none of, and why."""
        return {
            cache: f"it has no {class_}"
            for cache, (module, class_) in CLASSES.items()
            if not self.exists(module)
        }

    def make(
        self,
        cache: str,
        strategy: str,
        sizes: Sizes,
        window: int,
        *,
        tokens: int | None = None,
        eagle: bool = False,
    ) -> RadixCache:
        """Return an empty cache (``swa``, ``unified``).

        ``window``: the sliding window in pages; ``tokens``: in tokens, if it is not whole pages.
        ``eagle``: keys are pairs of tokens, as with EAGLE. Raises ``TargetError`` if it cannot be
        made.
        """
        driver = self.make_driver(strategy, sizes)
        try:
            params_class = self.module(f"{MEM_CACHE}.cache_init_params").CacheInitParams
            fields = {field.name for field in dataclasses.fields(params_class)}
            extra: dict[str, Any] = {}
            if cache == "unified":
                extra["tree_components"] = (self.component.FULL, self.component.SWA)
            if "tree_core_backend" in fields:  # 0.5.21 and later: that in Rust is no source
                extra["tree_core_backend"] = "python"
            params = params_class(
                disable=False,
                req_to_token_pool=RequestTable(sizes.slots[0] + 1, driver.device),
                token_to_kv_pool_allocator=driver.allocator,
                page_size=sizes.page_size,
                sliding_window_size=tokens or window * sizes.page_size,
                is_eagle=eagle,
                **extra,
            )
            return RadixCache(self, self._class(cache)(params), driver)
        except TargetError:
            raise
        except (StandInError, *RAISED) as error:
            reason = error if isinstance(error, StandInError) else format_error(error)
            raise TargetError(f"{self.name}: its {cache} cache cannot be made: {reason}") from None

    @cached_property
    def component(self) -> Any:
        """The unified cache's ``ComponentType``."""
        name = next(name for name in COMPONENTS if self.exists(name))
        return self.module(name).ComponentType

    def key(self, prompt: str, page_size: int) -> Any:
        """Return the cache's key for a prompt, ``page_size`` tokens per letter."""
        return self.token_key(tokens_of(prompt, page_size))

    def token_key(self, tokens: list[int]) -> Any:
        """Return the cache's key for tokens."""
        key_class = self.module(f"{MEM_CACHE}.radix_cache").RadixKey
        return key_class(array.array("q", tokens))

    def params(self, name: str, **values: Any) -> Any:
        """Return one of SGLang's parameter objects, such as ``InsertParams``."""
        return getattr(self.module(f"{MEM_CACHE}.base_prefix_cache"), name)(**values)

    def _class(self, cache: str) -> Any:
        module, name = CLASSES[cache]
        return getattr(self.module(module), name)


class Owned(NamedTuple):
    """What one owner holds: full pages, beside each its SWA page (None: none), and slots in all."""

    full: list[int]
    swa: list[int | None]
    slots: int


class Held(NamedTuple):
    """What a node holds: slots of both pools, and how often each side is locked.

    ``tokens``: that lead to its end; with EAGLE one more, which is a part of its key. ``stop``: the
    position behind its last slot. ``value``: the full slots as the node has them. ``swa``: None
    also where the cache keeps no SWA slots. ``tombstone``: it has no SWA side.
    """

    name: str
    tokens: list[int]
    stop: int
    node: Any
    value: torch.Tensor
    full: list[int]
    swa: list[int] | None
    full_locks: int
    swa_locks: int
    tombstone: bool


class Reader(NamedTuple):
    """Who reads pages: its tokens and, by position, their full slots.

    The first ``prefix`` are the cache's; from ``start`` on they are inside the window. ``node``:
    the one that is locked for it, or its number. ``request``: if it is one.
    """

    name: str
    tokens: list[int]
    slots: list[int]
    prefix: int
    start: int
    node: Any
    request: Request | None = None


class Look(NamedTuple):
    """Nodes, owners by name, and readers, as they are now."""

    nodes: list[Held]
    owners: dict[str, Owned]
    readers: list[Reader]


class Lock(NamedTuple):
    """A lock on a node, what the cache has said of it, and the slots that it protects."""

    node: Any
    receipt: Any
    slots: torch.Tensor


class RadixCache:
    """One cache over one allocator. Prompts are words, one letter per page."""

    def __init__(self, caches: Caches, cache: Any, driver: Driver) -> None:
        self.caches = caches
        self.cache = cache
        self.driver = driver
        self.page_size = driver.page_size
        state = driver.state()
        self.sizes = Sizes(state.full_pages, state.swa_pages, state.page_size)
        self.in_group = False
        self.requests = Requests(caches, cache, driver)
        self.locks: dict[str, list[Lock]] = {}
        self.waiting: dict[str, list[torch.Tensor]] = {}

    def play(self, step: Step) -> None:
        """Make one step. Raises what SGLang raises, and ``PoolExhausted``."""
        if isinstance(step, Group):
            self.in_group = step.edge == "begin"
            (self.driver.group_begin if self.in_group else self.driver.group_end)()
            return
        if isinstance(step, RequestStep):
            self.requests.play(step, in_group=self.in_group)
            return
        match step.key, getattr(step, "value", None):
            case "alloc", str(prompt):
                self.waiting.setdefault(prompt, []).append(self._alloc(prompt))
            case "insert", str(prompt):
                self._insert(prompt)
            case "match", str(prompt):
                self._match(prompt)
            case "lock", str(prompt):
                match = self._match(prompt)
                node, slots = match.last_device_node, self.requests.prefix_of(match)
                lock = Lock(node, self.cache.inc_lock_ref(node), slots)
                self.locks.setdefault(prompt, []).append(lock)
            case "unlock", str(prompt):
                self._unlock(self.locks[prompt].pop())
            case "evict_swa", int(pages):
                self._evict(swa_num_tokens=pages * self.page_size)
            case "evict_full", int(pages):
                self._evict(num_tokens=pages * self.page_size)

    def settle(self) -> None:
        """Abort what runs, drop every lock, and let the cache check itself, if it can."""
        for request in list(self.requests.running.values()):
            self.requests.end(request, keep=False)
        for locks in self.locks.values():
            while locks:
                self._unlock(locks.pop())
        if hasattr(self.cache, "sanity_check"):
            self.cache.sanity_check()

    def state(self) -> State:
        """Return the allocator's state."""
        return self.driver.state()

    def nodes(self) -> Iterator[tuple[list[int], Any]]:
        """Yield the tree's nodes but for the root, each with the tokens that lead to its end."""
        root = getattr(self.cache, "root_node", None) or self.cache.tree_core.root_node
        paths: list[tuple[Any, list[int]]] = [(root, [])]
        while paths:
            node, path = paths.pop()
            for child in node.children.values():
                tokens = path + list(child.key.token_ids[: len(child.key)])
                paths.append((child, tokens))
                yield tokens, child

    def _beyond(self, node: Any) -> list[int]:
        """Return the token behind a node's last one, which is a part of its key with EAGLE."""
        key, length = node.key, len(node.key)
        return list(key.token_ids[length : length + 1]) if key.is_bigram else []

    def look(self) -> Look:
        """Read off the tree, and the requests, who should own what and who reads it.

        The unified cache keeps the SWA slots of each node; where a cache does not, a node that is
        no tombstone should own whatever its slots map to.
        """
        nodes = [self._held(tokens, node) for tokens, node in self.nodes()]
        readers = list(self._readers())
        owners = {}
        for held in nodes:
            full = self._pages(held.full)
            peers: list[int | None] = [None] * len(full)
            if not held.tombstone:
                kept = held.swa
                peers = self._peers(held.value) if kept is None else [*self._pages(kept)]
            owners[held.name] = Owned(full, peers, len(held.full))
        for prompt, waiting in self.waiting.items():
            for i, value in enumerate(waiting):
                owned = Owned(self._pages(value.tolist()), self._peers(value), len(value))
                owners[f"{prompt} (allocated {i})"] = owned
        for reader in readers:
            if reader.request is not None:
                owners[reader.name] = self._owned_by(reader)
        return Look(nodes, owners, readers)

    def _held(self, tokens: list[int], node: Any) -> Held:
        stop, tokens = len(tokens), tokens + self._beyond(node)
        name = prompt_of(tokens, self.page_size)
        if hasattr(node, "swa_tombstone"):
            value, slots, bare = node.value, None, node.swa_tombstone
            locks = node.full_lock_ref, node.swa_lock_ref
        else:
            component = self.caches.component
            full, swa = node.component_data[component.FULL], node.component_data[component.SWA]
            value, bare = full.value, swa.value is None
            slots = None if bare else swa.value.tolist()
            locks = full.lock_ref, swa.lock_ref
        return Held(name, tokens, stop, node, value, value.tolist(), slots, *locks, bare)

    def _owned_by(self, reader: Reader) -> Owned:
        """Return what a request holds outside the cache."""
        request, size, start = reader.request, self.page_size, reader.prefix
        assert request is not None
        alive = request.swa_evicted_seqlen
        swa = [
            request.peers[at] // size or UNMAPPED if at >= alive else None
            for at in range(start, request.filled, size)
        ]
        return Owned(self._pages(reader.slots[start:]), swa, request.filled - start)

    def _readers(self) -> Iterator[Reader]:
        """Yield who reads pages that must not be taken: requests that run, and locks."""
        window = self.requests.window
        for prompt, locks in self.locks.items():
            for lock in locks:
                slots, length = lock.slots.tolist(), len(lock.slots)
                tokens, name = tokens_of(prompt, self.page_size), f"the lock of {prompt}"
                yield Reader(name, tokens, slots, length, length - window, lock.node)
        for request in self.requests.running.values():
            tokens, slots = request.tokens.tolist(), self.requests.row(request).tolist()
            node = request.last_node if request.lock is None else request.lock.node
            start, prefix = request.filled - window, request.cache_protected_len
            name = f"request {request.rid}"
            yield Reader(name, tokens, slots, prefix, start, node, request)

    def _peers(self, full: torch.Tensor) -> list[int | None]:
        """Return the SWA pages that full slots map to, ``UNMAPPED`` for none."""
        return [page or UNMAPPED for page in self._pages(self.driver.translate(full).tolist())]

    def _pages(self, slots: list[int]) -> list[int]:
        size = self.page_size
        return slots if size == 1 else [slot // size for slot in slots[::size]]

    def alloc(self, pages: int) -> torch.Tensor | None:
        """Return int64[n], full slots with SWA peers, None if a pool is too small."""
        call = self.driver.alloc if self.page_size == 1 else self.driver.alloc_pages
        return call(pages * self.page_size)

    def _alloc(self, prompt: str) -> torch.Tensor:
        slots = self.alloc(len(prompt))
        if slots is None:
            raise PoolExhausted(f"{prompt}: the pools are too small")
        return slots

    def _insert(self, prompt: str) -> None:
        waiting = self.waiting.get(prompt)
        slots = waiting.pop(0) if waiting else self._alloc(prompt)
        key = self.caches.key(prompt, self.page_size)
        self.cache.insert(self.caches.params("InsertParams", key=key, value=slots))

    def _match(self, prompt: str) -> Any:
        key = self.caches.key(prompt, self.page_size)
        params = self.caches.params("MatchPrefixParams", key=key)
        return self.cache.match_prefix(params)

    def _evict(self, **tokens: int) -> None:
        self.cache.evict(self.caches.params("EvictParams", **tokens))

    def _unlock(self, lock: Lock) -> None:
        self.cache.dec_lock_ref(lock.node, lock.receipt.to_dec_params())
