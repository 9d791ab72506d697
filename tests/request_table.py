"""Slots as SGLang passes them: slices of an int32 request table, and other views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swaleak.targets.driver import Driver, Sizes
from swaleak.targets.open import Target


def row(slots: Tensor) -> Tensor:
    """A slice of a row, as `req_to_token[req_pool_idx, start:stop]`."""
    table = torch.zeros((2, len(slots) + 2), dtype=torch.int32)
    table[1, 1:-1] = slots
    return table[1, 1:-1]


def column(slots: Tensor) -> Tensor:
    """The same, not contiguous."""
    table = torch.zeros((len(slots) + 2, 3), dtype=torch.int32)
    table[1:-1, 1] = slots
    return table[1:-1, 1]


def column_of_int64(slots: Tensor) -> Tensor:
    return slots[:, None].repeat(1, 3)[:, 1]


VIEWS: list[Callable[[Tensor], Tensor]] = [row, column, column_of_int64]
CALLS = ("translate", "clear_mapping", "point")


class TableDriver(Driver):
    """A driver that passes on views in place of the slots it is given."""

    def __init__(self, allocator: Any, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__(allocator)
        for name in CALLS:
            setattr(self, name, self._with_views(getattr(self, name), view))
        self.view = view

    def index(self, slots: Tensor) -> Tensor:
        return self.view(slots)  # whatever is freed

    @staticmethod
    def _with_views(call: Any, view: Callable[[Tensor], Tensor]) -> Any:
        return lambda *slots: call(*map(view, slots))


@dataclass
class TableTarget:
    """A target whose drivers are such."""

    target: Target
    view: Callable[[Tensor], Tensor]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def make(self, strategy: str, sizes: Sizes) -> TableDriver:
        return TableDriver(self.target.make(strategy, sizes).allocator, self.view)
