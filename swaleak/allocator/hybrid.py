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

from swaleak.allocator.page_pool import PagePool, new_pages
from swaleak.allocator.strategies import Eager, Strategy
from swaleak.allocator.write_guard import guarded, plain


class GroupRefused(RuntimeError):
    """A second ``free_group_begin``, or a ``free_group_end`` without one. Nothing has changed."""


class GroupedFrees:
    """Frees and free groups, decided by ``strategy``; outside a group every free is eager.

    Full slots are passed as int64[n], or as int32[n] as in SGLang's request table, also as views.
    """

    page_size: int
    full_attn_allocator: Any
    swa_attn_allocator: Any
    full_to_swa_index_mapping: Tensor

    def take_strategy(self, strategy: type[Strategy]) -> None:
        """Start with an empty queue under ``strategy``. To be called before the pools exist."""
        self.strategy = strategy(self)
        self.no_group = Eager(self)
        self.group_open = False

    def guard_mapping(self) -> None:
        """Tell the strategy of writes to the mapping, if it listens. Once the pools exist."""
        mapping = plain(self.full_to_swa_index_mapping)
        self._peers = mapping
        if self.page_size > 1:  # a row per page; slots that make no whole page are never handed out
            pages = (len(mapping) - 1) // self.page_size
            self._peers = mapping[: pages * self.page_size].view(pages, self.page_size)
        if type(self.strategy).before_write is not Strategy.before_write:
            # weak: views of a tensor keep what it holds out of the garbage collector's sight
            strategy = weakref.ref(self.strategy)

            def before_write() -> None:
                if (there := strategy()) is not None:
                    there.before_write()

            self.full_to_swa_index_mapping = guarded(mapping, before_write)

    @property
    def frees(self) -> Strategy:
        """The strategy that a free which comes now is subject to."""
        return self.strategy if self.group_open else self.no_group

    def free(self, free_index: Tensor) -> None:
        """Give back full slots and their SWA peers."""
        self.free_swa(free_index)
        self.free_full(free_index)

    def free_swa(self, free_index: Tensor) -> None:
        """Give back the SWA peers; whole pages, even if only one of their slots is passed."""
        if free_index.numel():
            self.frees.on_free(free_index.long())  # not every kernel takes int32

    def free_full(self, free_index: Tensor) -> None:
        """Give back full slots only: the node is a tombstone."""
        if free_index.numel():
            self.frees.on_free_full(free_index.long())

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
        self.strategy.on_flush()
        self.strategy.on_flush_full()

    def clear(self) -> None:
        """Forget every queue, then reset the pools."""
        self.strategy.clear()
        self.group_open = False
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


class Pools:
    """The two pools and the mapping: everything but freeing."""

    def __init__(self, size: int, size_swa: int, page_size: int, device: str) -> None:
        self.page_size = page_size
        self.device = device
        self.full_attn_allocator = PagePool(size, page_size, device)
        self.swa_attn_allocator = PagePool(size_swa, page_size, device)
        # page 0 is padding; the last entry is "no location" and maps to itself
        self.full_to_swa_index_mapping = torch.zeros(
            size + page_size + 1, dtype=torch.int64, device=device
        )
        self.full_to_swa_index_mapping[-1] = -1

    def clear(self) -> None:
        """Make every page free again, and map nothing."""
        self.full_attn_allocator.clear()
        self.swa_attn_allocator.clear()
        self.full_to_swa_index_mapping[:-1].fill_(0)

    def full_available_size(self) -> int:
        """Return the number of free full slots."""
        return self.full_attn_allocator.available_size()

    def swa_available_size(self) -> int:
        """Return the number of free SWA slots."""
        return self.swa_attn_allocator.available_size()

    def available_size(self) -> int:
        """Return how many slots can be had from both pools."""
        return min(self.full_available_size(), self.swa_available_size())

    def translate_loc_from_full_to_swa(self, kv_indices: Tensor) -> Tensor:
        """Return the SWA peers, int64[n], of full slots; 0 for none, -1 for location -1."""
        return plain(self.full_to_swa_index_mapping)[kv_indices]

    def set_full_to_swa_mapping(self, full_indices: Tensor, swa_indices: Tensor) -> None:
        """Point full slots at SWA slots, int64[n] each. Every write but ``resolve`` comes here."""
        if full_indices.numel():
            self.full_to_swa_index_mapping[full_indices.long()] = swa_indices.long()

    def alloc(self, need_size: int) -> Tensor | None:
        """Allocate whole pages from both pools. Return int64[need_size], full slots, or None."""
        if need_size > self.available_size():
            return None
        full = self.full_attn_allocator.alloc(need_size)
        swa = self.swa_attn_allocator.alloc(need_size)
        assert full is not None and swa is not None
        self.set_full_to_swa_mapping(full, swa)
        return full

    def alloc_extend(
        self,
        prefix_lens: Tensor,
        prefix_lens_cpu: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor,
        last_loc: Tensor,
        extend_num_tokens: int,
    ) -> Tensor | None:
        """Grow requests from ``prefix_lens`` to ``seq_lens`` tokens (int64[bs], and on the CPU).

        ``last_loc``: int64[bs], full slot of each one's last token, -1 for none. Returns
        int64[extend_num_tokens], full slots, or None if a pool is too small.
        """
        pages = new_pages(prefix_lens_cpu, seq_lens_cpu, self.page_size)
        if pages * self.page_size > self.available_size():
            return None
        swa_last = self.translate_loc_from_full_to_swa(last_loc)
        full = self.full_attn_allocator.extend(prefix_lens, seq_lens, last_loc, pages)
        swa = self.swa_attn_allocator.extend(prefix_lens, seq_lens, swa_last, pages)
        assert full is not None and swa is not None
        self.set_full_to_swa_mapping(full, swa)
        return full

    def alloc_decode(
        self, seq_lens: Tensor, seq_lens_cpu: Tensor, last_loc: Tensor
    ) -> Tensor | None:
        """Grow each request by one token, to ``seq_lens``; as ``alloc_extend``."""
        before, before_cpu = seq_lens - 1, seq_lens_cpu - 1
        return self.alloc_extend(
            before, before_cpu, seq_lens, seq_lens_cpu, last_loc, len(seq_lens_cpu)
        )

    def alloc_extend_swa_tail(
        self,
        prefix_lens: Tensor,
        prefix_lens_cpu: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor,
        last_loc: Tensor,
        extend_num_tokens: int,
        swa_tail_len: int,
    ) -> Tensor | None:
        """As ``alloc_extend`` for one request, with SWA peers for its last tokens only."""
        pages = new_pages(prefix_lens_cpu, seq_lens_cpu, self.page_size)
        if (
            pages * self.page_size > self.full_available_size()
            or swa_tail_len > self.swa_available_size()
        ):
            return None
        full = self.full_attn_allocator.extend(prefix_lens, seq_lens, last_loc, pages)
        assert full is not None
        head = extend_num_tokens - swa_tail_len
        if swa_tail_len:
            swa = self.swa_attn_allocator.alloc(swa_tail_len)
            assert swa is not None
            self.set_full_to_swa_mapping(full[head:], swa[:swa_tail_len])
        self.set_full_to_swa_mapping(full[:head], torch.zeros_like(full[:head]))
        return full


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
