"""Drives the real radix caches of the installed SGLang, with a real KV pool.

This is the one place that imports SGLang itself: seconds, and all of its dependencies. Names are
those of v0.5.18.
"""

from __future__ import annotations

import array
import logging
import warnings
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple, cast

import torch

from swaleak.allocator.state import State
from swaleak.allocator.strategy import STRATEGIES, Strategy
from swaleak.errors import RAISED, TargetError, told
from swaleak.script.ops import Group, TreeOp
from swaleak.sglang.adapter import Driver, graft
from swaleak.sglang.loader import CLASS

MEM_CACHE = "sglang.srt.mem_cache"
CLASSES = {
    "swa": (f"{MEM_CACHE}.swa_radix_cache", "SWARadixCache"),
    "unified": (f"{MEM_CACHE}.unified_radix_cache", "UnifiedRadixCache"),
}
UNMAPPED = -1  # the SWA page of a node that should have one and has none


class Caches:
    """The caches of the installed SGLang on ``device`` (a torch device name).

    Loads SGLang's plugins as a server does, ours among them, so that ``SWALEAK`` works here too.
    Raises ``TargetError`` if SGLang, or what it needs, cannot be imported.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                import_module("sglang.srt.plugins").load_plugins()
                self.allocator: type[Any] = _get(f"{MEM_CACHE}.allocator.swa", CLASS)
                self._pool_class = _get(f"{MEM_CACHE}.swa_memory_pool", "SWAKVPool")
                self._cache_params = _get(f"{MEM_CACHE}.cache_init_params", "CacheInitParams")
                self._key_class = _get(f"{MEM_CACHE}.radix_cache", "RadixKey")
                self._parameters = import_module(f"{MEM_CACHE}.base_prefix_cache")
                self.component = _get(f"{MEM_CACHE}.unified_cache.components", "ComponentType")
                self._classes = {k: found for k, v in CLASSES.items() if (found := _find(*v))}
            except RAISED as error:
                reason = f"the installed SGLang cannot be imported: {told(error)}"
                raise TargetError(reason) from None

    @cached_property
    def left_out(self) -> dict[str, str]:
        """Which caches (``swa``, ``unified``) cannot be driven here, and why."""
        reasons = {}
        for cache in CLASSES:
            if cache not in self._classes:
                reasons[cache] = f"this release has no {CLASSES[cache][1]}"
                continue
            try:
                self.make(cache, None, 1, 1, 1, 1).owners()
            except NotImplementedError as error:  # a tree core in another language
                reasons[cache] = f"the nodes of its {CLASSES[cache][1]} cannot be read ({error})"
        return reasons

    @property
    def repaired_by(self) -> str | None:
        """The strategy that the plugin has grafted on the class in this process, if any."""
        strategy = getattr(self._make_allocator(self.allocator, 1, 1, 1), "strategy", None)
        return strategy.name if isinstance(strategy, Strategy) else None

    def make(
        self,
        cache: str,
        strategy: str | None,
        full_pages: int,
        swa_pages: int,
        page_size: int,
        window: int,
    ) -> Tree:
        """Return an empty cache. ``strategy``: None leaves the class as it is.

        ``full_pages``, ``swa_pages``, ``window``: pages, the pools without their padding page.
        """
        class_ = self.allocator
        if strategy is not None:
            class_ = graft(class_, STRATEGIES[strategy])
        allocator = self._make_allocator(class_, full_pages, swa_pages, page_size)
        params = self._cache_params(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=allocator,
            page_size=page_size,
            sliding_window_size=window * page_size,
        )
        if cache == "unified":
            params.tree_components = (self.component.FULL, self.component.SWA)
        return Tree(self, self._classes[cache](params), allocator)

    def _make_allocator(self, class_: Any, full_pages: int, swa_pages: int, page_size: int) -> Any:
        full, swa = full_pages * page_size, swa_pages * page_size
        pool = self._pool_class(
            full, swa, page_size, torch.bfloat16, 1, 1, [0], [1], device=self.device
        )  # one head of one element: only the bookkeeping is looked at
        return class_(full, swa, page_size, torch.bfloat16, self.device, pool, False)

    def key(self, prompt: str, page_size: int) -> Any:
        """Return the cache's key for a prompt, ``page_size`` tokens a letter."""
        tokens = [ord(c) * page_size + i for c in prompt for i in range(page_size)]
        return self._key_class(array.array("q", tokens))

    def params(self, name: str, **values: Any) -> Any:
        """Return one of SGLang's parameter objects, such as ``InsertParams``."""
        return getattr(self._parameters, name)(**values)


class Owned(NamedTuple):
    """What one owner holds: full pages, beside each its SWA page (None: none), and slots in all."""

    full: list[int]
    swa: list[int | None]
    slots: int


class Tree:
    """One cache over one allocator. Prompts are words, a letter a page."""

    def __init__(self, caches: Caches, cache: Any, allocator: Any) -> None:
        self.caches = caches
        self.cache = cache
        self.driver = Driver(allocator)
        self.page_size = self.driver.page_size
        self.in_group = False
        self.locks: dict[str, list[tuple[Any, Any]]] = {}
        self.waiting: dict[str, list[torch.Tensor]] = {}

    def play(self, step: TreeOp | Group) -> None:
        """Make one call. Raises what SGLang raises, and ``PoolEmpty``."""
        if isinstance(step, Group):
            self.in_group = step.edge == "begin"
            (self.driver.group_begin if self.in_group else self.driver.group_end)()
            return
        match step.key, step.what:
            case "alloc", str(prompt):
                self.waiting.setdefault(prompt, []).append(self._alloc(prompt))
            case "insert", str(prompt):
                self._insert(prompt)
            case "match", str(prompt):
                self._match(prompt)
            case "lock", str(prompt):
                node = self._match(prompt)
                lock = self.cache.inc_lock_ref(node)
                self.locks.setdefault(prompt, []).append((node, lock))
            case "unlock", str(prompt):
                self._unlock(*self.locks[prompt].pop())
            case "evict_swa", int(pages):
                self._evict(swa_num_tokens=pages * self.page_size)
            case "evict_full", int(pages):
                self._evict(num_tokens=pages * self.page_size)

    def settle(self) -> None:
        """Drop every lock that is left and let the cache check itself, if it can."""
        for locks in self.locks.values():
            while locks:
                self._unlock(*locks.pop())
        if hasattr(self.cache, "sanity_check"):
            self.cache.sanity_check()

    def state(self) -> State:
        """Return the allocator's state."""
        return self.driver.state()

    def owners(self) -> dict[str, Owned]:
        """Return who should own what, read off the tree: a node is an owner.

        The unified cache keeps the SWA slots of each node; where a cache does not, a node that is
        no tombstone should own whatever its slots map to.
        """
        owners: dict[str, Owned] = {}
        root = getattr(self.cache, "root_node", None) or self.cache.tree_core.root_node
        paths = [(root, "")]
        while paths:
            node, path = paths.pop()
            for child in node.children.values():
                tokens = list(child.key.token_ids[: len(child.key)])
                letters = (chr(token // self.page_size) for token in tokens[:: self.page_size])
                name = path + "".join(letters)
                paths.append((child, name))
                owners[name] = self._node(child)
        for prompt, waiting in self.waiting.items():
            for i, slots in enumerate(waiting):
                owned = Owned(self._pages(slots), self._peers(slots), len(slots))
                owners[f"{prompt} (allocated {i})"] = owned
        return owners

    def _node(self, node: Any) -> Owned:
        if hasattr(node, "swa_tombstone"):
            full = node.value
            none: list[int | None] = [None] * (len(full) // self.page_size)
            swa = none if node.swa_tombstone else self._peers(full)
            return Owned(self._pages(full), swa, slots=len(full))
        component = self.caches.component
        full = node.component_data[component.FULL].value
        kept = node.component_data[component.SWA].value
        none = [None] * (len(full) // self.page_size)
        return Owned(self._pages(full), none if kept is None else [*self._pages(kept)], len(full))

    def _peers(self, full: torch.Tensor) -> list[int | None]:
        return [page or UNMAPPED for page in self._pages(self.driver.translate(full))]

    def _pages(self, slots: torch.Tensor) -> list[int]:
        return cast("list[int]", (slots[:: self.page_size] // self.page_size).tolist())

    def _alloc(self, prompt: str) -> torch.Tensor:
        slots = self.driver.alloc(len(prompt))
        if slots is None:
            raise PoolEmpty(f"{prompt}: the pools are too small")
        return slots

    def _insert(self, prompt: str) -> None:
        waiting = self.waiting.get(prompt)
        slots = waiting.pop(0) if waiting else self._alloc(prompt)
        key = self.caches.key(prompt, self.page_size)
        self.cache.insert(self.caches.params("InsertParams", key=key, value=slots))

    def _match(self, prompt: str) -> Any:
        key = self.caches.key(prompt, self.page_size)
        return self.cache.match_prefix(
            self.caches.params("MatchPrefixParams", key=key)
        ).last_device_node

    def _evict(self, **tokens: int) -> None:
        self.cache.evict(self.caches.params("EvictParams", **tokens))

    def _unlock(self, node: Any, lock: Any) -> None:
        self.cache.dec_lock_ref(node, lock.to_dec_params())


class PoolEmpty(Exception):
    """The script asks for more pages than the pools have."""


def _get(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def _find(module: str, name: str) -> Any:
    """Return a class that not every release has, or None."""
    try:
        return _get(module, name)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return None
