"""What can be seen of an allocator from outside: the mapping and two free lists."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class State(NamedTuple):
    """An allocator's state, on its device.

    ``mapping``: int64[full slots + padding page + 1]. ``full_free``, ``swa_free``: int64[n], the
    free lists, page numbers. ``full_pages``, ``swa_pages``: pool sizes in pages.
    """

    page_size: int
    mapping: Tensor
    full_free: Tensor
    swa_free: Tensor
    full_pages: int
    swa_pages: int
