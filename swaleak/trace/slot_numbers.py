"""Slot -> number: what a recorder calls the slots that a pool hands out."""

from __future__ import annotations

import torch
from torch import Tensor

from swaleak.checker.slot_table import Cells

FEW = 64  # slots that are looked up one by one
Ranges = list[list[int]]


class Numbers:
    """Every slot a pool hands out gets the next number; this is who has which, 8 bytes a slot.

    A few slots are looked up one by one, which is faster than five kernels; many, by kernels.
    """

    def __init__(self, slots: int) -> None:
        self.of_slot = Cells(slots + 1)
        self.next = 1

    def give(self, slots: Tensor) -> int:
        """Number ``slots``, int64[n], in order. Returns the first number."""
        first, count = self.next, slots.numel()
        self.next = first + count
        cells = self.of_slot.cells
        if count <= FEW:
            for number, slot in enumerate(slots.tolist(), start=first):
                cells[slot] = number
        else:
            self.of_slot.tensor[slots] = torch.arange(first, self.next, device="cpu")
        cells[0] = 0  # the padding slot is nobody's: "no peer"
        return first

    def ranges(self, several: list[Tensor]) -> list[Ranges]:
        """Return the numbers of slots, int64[n] each, as ranges; see ``scenario/calls.py``."""
        lengths = [slots.numel() for slots in several]
        if sum(lengths) <= FEW * len(lengths):
            return [self._one_by_one(slots.tolist()) for slots in several]
        numbers = self.of_slot.tensor[torch.cat(several)]
        ends = torch.tensor(lengths, device="cpu").cumsum(0)
        step = numbers.diff()
        nobody = numbers == 0
        fresh = torch.ones(numbers.numel() + 1, dtype=torch.bool, device="cpu")
        fresh[1:-1] = torch.where(nobody[:-1], step != 0, step != 1)
        fresh[ends] = True
        starts = fresh.nonzero().reshape(-1)
        cuts = torch.searchsorted(starts, ends).tolist()
        pairs = torch.stack((numbers[starts[:-1]], starts.diff()), 1).tolist()
        return [pairs[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]

    def _one_by_one(self, slots: list[int]) -> Ranges:
        cells, found, last, follows = self.of_slot.cells, [], [0, 0], -1
        for slot in slots:
            number = cells[slot]
            if number == follows:
                last[1] += 1
                follows += number > 0
            else:
                last = [number, 1]
                found.append(last)
                follows = number + 1 if number else 0
        return found
