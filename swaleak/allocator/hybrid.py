"""The hybrid allocator: a full pool, an SWA pool, the mapping between them, and a strategy.

Written from the description in the README, with SGLang's names for what SGLang has too.
``GroupedFrees`` is the part that frees; it is the same for the built-in model and for a strategy
grafted on SGLang's own class.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from swaleak.allocator.mapping import guarded, plain
from swaleak.allocator.pools import Pools
from swaleak.allocator.strategy import Strategy


class GroupRefused(RuntimeError):
    """A second ``free_group_begin``, or a ``free_group_end`` without one. Nothing has changed."""


class GroupedFrees:
    """Frees and free groups, decided by ``strategy``.

    Full slots that a group frees wait in ``full_queue`` until it ends; whose SWA pages go with
    them, and when that is decided, is the strategy's business.
    """

    page_size: int
    full_attn_allocator: Any
    swa_attn_allocator: Any
    full_to_swa_index_mapping: Tensor

    def take_strategy(self, strategy: type[Strategy]) -> None:
        """Start with an empty queue under ``strategy``. To be called before the pools exist."""
        self.strategy = strategy(self)
        self.group_open = False
        self.full_queue: list[Tensor] = []

    def guard_mapping(self) -> None:
        """Let the strategy hear of writes to the mapping, if it listens. Once the pools exist."""
        mapping = plain(self.full_to_swa_index_mapping)
        self._peers = mapping
        if self.page_size > 1:  # a row a page; slots that make no whole page are never handed out
            pages = (len(mapping) - 1) // self.page_size
            self._peers = mapping[: pages * self.page_size].view(pages, self.page_size)
        if type(self.strategy).before_write is not Strategy.before_write:
            # weak: what a tensor with views holds, the garbage collector never sees
            strategy = weakref.ref(self.strategy)

            def before_write() -> None:
                if (there := strategy()) is not None:
                    there.before_write()

            self.full_to_swa_index_mapping = guarded(mapping, before_write)

    @property
    def batching(self) -> bool:
        """Whether a free that comes now has to wait for the end of a group."""
        return self.group_open and self.strategy.batches

    def free(self, free_index: Tensor) -> None:
        """Give back full slots and their SWA peers.

        ``free_index``: full slots, int64[n], or int32[n] as in SGLang's request table; it may be
        a view.
        """
        self.free_swa(free_index)
        self.free_full(free_index)

    def free_swa(self, free_index: Tensor) -> None:
        """Give back the SWA peers; whole pages, even if only one of their slots is named."""
        if free_index.numel() == 0:
            return
        full = free_index.long()  # int32 may index a tensor, but not every kernel takes it
        if self.batching:
            self.strategy.free(full)
        else:
            self.release(self.resolve(full))

    def free_full(self, free_index: Tensor) -> None:
        """Give back full slots only: the node is a tombstone."""
        if free_index.numel() == 0:
            return
        full = free_index.long()
        if self.batching:
            self.full_queue.append(full.clone())
        else:
            self.full_attn_allocator.free(full)

    def free_segment(self, free_index: Tensor, *, start_pos: int) -> None:
        """As ``free``, for the slots of one request from token ``start_pos`` on."""
        self.free_swa_segment(free_index, start_pos=start_pos)
        self.free_full_segment(free_index, start_pos=start_pos)

    def free_swa_segment(self, free_index: Tensor, *, start_pos: int) -> None:
        """As ``free_swa``, for the slots of one request from token ``start_pos`` on."""
        self.free_swa(free_index)

    def free_full_segment(self, free_index: Tensor, *, start_pos: int) -> None:
        """As ``free_full``, for the slots of one request from token ``start_pos`` on."""
        self.free_full(free_index)

    def free_group_begin(self) -> None:
        """Hold frees until ``free_group_end``. Raises ``GroupRefused`` in an open group."""
        if self.group_open:
            raise GroupRefused("a free group is open already; groups do not nest")
        self.group_open = True

    def free_group_end(self) -> None:
        """Carry out what the group holds. Raises ``GroupRefused`` if none is open."""
        if not self.group_open:
            raise GroupRefused("no free group is open")
        self.group_open = False
        self.strategy.flush()
        if self.full_queue:
            queue, self.full_queue = self.full_queue, []
            self.full_attn_allocator.free(torch.cat(queue))

    def clear(self) -> None:
        """Forget every queue, then reset the pools."""
        self.strategy.clear()
        self.group_open = False
        self.full_queue = []
        pools: Any = super()  # whatever class this is mixed into
        pools.clear()

    def resolve(self, full: Tensor) -> Tensor:
        """Look up the SWA peers of whole pages and clear their mapping.

        ``full``: int64[n], full slots. Returns int64[m], SWA slots, 0 where there is none.
        """
        pages = full
        if self.page_size > 1:  # slots come page by page; ``release`` ignores what comes twice
            pages = torch.unique_consecutive(full // self.page_size)
        swa = self._peers[pages]
        self._peers.index_fill_(0, pages, 0)
        return swa if self.page_size == 1 else swa.view(-1)

    def release(self, swa: Tensor) -> None:
        """Put SWA slots (int64[n]) back; zeros and repetitions are ignored."""
        if self.page_size == 1:
            swa = torch.unique(swa)  # a paged pool does this itself
        self.swa_attn_allocator.free(swa[swa > 0])


class HybridAllocator(GroupedFrees, Pools):
    """The built-in model.

    ``size`` and ``size_swa`` are slots, without the padding page. ``device`` is a torch device
    name. It synchronises with the host where a free list has to know its length: at a release
    and, above page size 1, when pages are told apart.
    """

    def __init__(
        self, size: int, size_swa: int, page_size: int, device: str, strategy: type[Strategy]
    ) -> None:
        self.take_strategy(strategy)
        super().__init__(size, size_swa, page_size, device)
        self.guard_mapping()
