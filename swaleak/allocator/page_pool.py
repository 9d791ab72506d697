"""One pool of pages: a free list, and nothing else.

Attribute and method names are SGLang's (``free_pages``, ``available_size``), so that one driver
reads both. Slot ``s`` lies in page ``s // page_size``; page 0 is padding and is never handed out.
A token pool is a pool with page size 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


class PagePool:
    """``size // page_size`` pages with the numbers 1, 2, … on ``device``."""

    def __init__(self, size: int, page_size: int, device: str) -> None:
        self.size = size
        self.page_size = page_size
        self.device = device
        self.num_pages = size // page_size
        self.clear()

    def clear(self) -> None:
        """Make every page free again."""
        self.free_pages = torch.arange(1, self.num_pages + 1, dtype=torch.int64, device=self.device)
        self.offsets = torch.arange(self.page_size, dtype=torch.int64, device=self.device)

    def available_size(self) -> int:
        """Return the number of free slots."""
        return len(self.free_pages) * self.page_size

    def alloc(self, need_size: int) -> Tensor | None:
        """Take whole pages. Return int64[need_size], slots page by page; None if too few."""
        pages = self._take(-(-need_size // self.page_size))
        if pages is None:
            return None
        return (pages[:, None] * self.page_size + self.offsets).reshape(-1)

    def extend(
        self, prefix_lens: Tensor, seq_lens: Tensor, last_loc: Tensor, new_pages: int
    ) -> Tensor | None:
        """Grow sequences; see ``extend_slots``. ``new_pages``: how many that takes in all."""
        if new_pages > len(self.free_pages):
            return None
        slots = extend_slots(prefix_lens, seq_lens, last_loc, self.free_pages, self.page_size)
        self._take(new_pages)
        return slots

    def free(self, free_index: Tensor) -> None:
        """Give back the pages of these slots: int64[n], in any order.

        A page is given back once however many of its slots are named. A token pool (page size 1)
        believes its caller, as SGLang's does: a slot named twice is free twice.
        """
        if free_index.numel():
            pages = (
                free_index if self.page_size == 1 else torch.unique(free_index // self.page_size)
            )
            self.free_pages = torch.cat((pages, self.free_pages))

    def _take(self, pages: int) -> Tensor | None:
        if pages > len(self.free_pages):
            return None
        taken, self.free_pages = self.free_pages[:pages], self.free_pages[pages:]
        return taken


def extend_slots(
    prefix_lens: Tensor, seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, page_size: int
) -> Tensor:
    """Return the slots of tokens ``prefix_lens[i] … seq_lens[i] - 1`` of each request in turn.

    ``prefix_lens``, ``seq_lens``, ``last_loc``: int[bs] (tokens, tokens, slot of the last token
    there is, -1 for none). ``free_pages``: int64[n], taken from the front, request by request.
    A token goes on in the page of its predecessor while that has room. Returns int64[tokens].
    """
    lens = seq_lens - prefix_lens
    request = torch.repeat_interleave(torch.arange(len(lens), device=lens.device), lens)
    token = torch.arange(len(request), device=lens.device)
    position = token - (lens.cumsum(0) - lens)[request] + prefix_lens[request]
    first_new = (prefix_lens + page_size - 1) // page_size
    new_pages = (seq_lens + page_size - 1) // page_size - first_new
    start = new_pages.cumsum(0) - new_pages
    nth_new = position // page_size - first_new[request]
    in_old_page = last_loc[request] + 1 + position - prefix_lens[request]
    pages = torch.cat((free_pages, free_pages.new_zeros(1)))  # never empty, so the index is valid
    page = pages[(start[request] + nth_new).clamp(min=0, max=len(free_pages))]
    return torch.where(nth_new >= 0, page * page_size + position % page_size, in_old_page).long()


def new_pages(prefix_lens: Tensor, seq_lens: Tensor, page_size: int) -> int:
    """Return how many pages it takes to grow ``prefix_lens`` to ``seq_lens`` (int[bs], on CPU)."""
    before = (prefix_lens + page_size - 1) // page_size
    after = (seq_lens + page_size - 1) // page_size
    return int((after - before).sum().item())
