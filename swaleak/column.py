"""A number a slot or a page, on the host: for Python one by one, for kernels many at once."""

from __future__ import annotations

from array import array

import torch


class Column:
    """int64[n], 0 at first. ``cells`` and ``tensor`` are the same memory."""

    def __init__(self, count: int) -> None:
        self.cells = array("q", (0,)) * count
        self.tensor = torch.frombuffer(self.cells, dtype=torch.int64)
