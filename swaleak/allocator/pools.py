"""The full pool, the SWA pool and the mapping between them; how pages are freed is elsewhere.

Names are SGLang's for what SGLang has too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swaleak.allocator.mapping import plain
from swaleak.allocator.pool import PagePool, new_pages


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
