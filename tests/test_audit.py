"""The comparison: every kind of violation."""

from __future__ import annotations

import pytest
import torch

from swaleak.checker.compare import compare
from swaleak.checker.shadow import Shadow
from swaleak.checker.slot_table import span_of
from swaleak.targets.driver import State


class Allocator:
    """A healthy state to damage: node owns full page 1 and SWA page 2, other 2 and 3."""

    def __init__(self, page_size: int, pages: int = 4) -> None:
        self.page_size = page_size
        self.mapping = torch.zeros((pages + 1) * page_size + 1, dtype=torch.int64)
        self.mapping[-1] = -1
        self.full_free = torch.tensor([3, 4])
        self.swa_free = torch.tensor([4, 1])
        self.shadow = Shadow(pages, pages, page_size)
        for name, full, swa in (("node", 1, 2), ("other", 2, 3)):
            self.page(full)[:] = torch.arange(swa * page_size, (swa + 1) * page_size)
            self.shadow.own(name, [full], [swa], page_size)

    def page(self, full: int) -> torch.Tensor:
        return self.mapping[full * self.page_size : (full + 1) * self.page_size]

    def state(self) -> State:
        pages = (len(self.mapping) - 1) // self.page_size - 1
        return State(self.page_size, self.mapping, self.full_free, self.swa_free, pages, pages)


def nothing(_: Allocator) -> None: ...


def leak_swa(a: Allocator) -> None:
    a.swa_free = torch.tensor([4])


def leak_full(a: Allocator) -> None:
    a.full_free = torch.tensor([3])


def lost(a: Allocator) -> None:
    a.page(1).zero_()


def lost_and_freed(a: Allocator) -> None:
    a.page(1).zero_()
    a.swa_free = torch.tensor([4, 1, 2])


def stale_owner(a: Allocator) -> None:
    slots = torch.arange(a.page_size, 2 * a.page_size)
    a.shadow.free(span_of(slots, a.page_size), full_side=False, swa_side=True)


def stale_nobody(a: Allocator) -> None:
    a.page(3)[:] = a.page(1)


def dangling_swa(a: Allocator) -> None:
    a.swa_free = torch.tensor([4, 1, 3])


def dangling_full(a: Allocator) -> None:
    a.full_free = torch.tensor([3, 4, 2])


def double_free(a: Allocator) -> None:
    a.full_free = torch.tensor([3, 4, 3])


def reserved(a: Allocator) -> None:
    a.swa_free = torch.tensor([4, 0, 1])


def outside(a: Allocator) -> None:
    a.swa_free = torch.tensor([4, 99, 1])


def shared(a: Allocator) -> None:
    a.page(2)[:] = a.page(1)


def misaligned(a: Allocator) -> None:
    a.page(1)[:] = a.page(1).flip(0)


def torn(a: Allocator) -> None:
    a.page(1)[0] = 0


DAMAGE = [
    (nothing, 1, 2, 2, "clean", []),
    (leak_swa, 4, 3, 2, "leak", ["leak: swa page 1"]),
    (leak_full, 4, 2, 2, "leak", ["leak: full page 4"]),
    (lost, 1, 2, 1, "leak", ["leak: swa page 2", "lost: node's page 0"]),
    (lost_and_freed, 4, 1, 1, "corrupt", ["lost: node's page 0"]),
    (stale_owner, 4, 2, 2, "corrupt", ["stale: node's page 0"]),
    (stale_nobody, 4, 2, 2, "corrupt", ["stale: full page 3", "shared: swa page 2"]),
    (dangling_swa, 1, 1, 2, "corrupt", ["dangling: swa page 3"]),
    (dangling_full, 1, 2, 2, "corrupt", ["dangling: full page 2"]),
    (double_free, 4, 2, 2, "corrupt", ["double-free: full page 3"]),
    (reserved, 1, 2, 2, "corrupt", ["reserved: swa page 0"]),
    (outside, 4, 2, 2, "corrupt", ["reserved: swa page 99"]),
    (
        shared,
        4,
        2,
        1,
        "leak",
        ["leak: swa page 3", "lost: other's page 0", "stale: other's page 0", "shared: swa page 2"],
    ),
    (misaligned, 4, 2, 2, "corrupt", ["misaligned: node's page 0"]),
    (torn, 4, 2, 2, "corrupt", ["lost: node's page 0"]),
]


@pytest.mark.parametrize(
    ("damage", "page_size", "physical", "mapped", "verdict", "violations"),
    DAMAGE,
    ids=[row[0].__name__ for row in DAMAGE],
)
def test_each_kind_of_violation(damage, page_size, physical, mapped, verdict, violations) -> None:
    allocator = Allocator(page_size)
    damage(allocator)
    found = compare(allocator.state(), allocator.shadow)
    assert (found.physical, found.mapped, found.verdict, [str(v) for v in found.violations]) == (
        physical,
        mapped,
        verdict,
        violations,
    )


def test_in_an_open_group_only_counts_are_given() -> None:
    allocator = Allocator(4)
    leak_swa(allocator)
    allocator.shadow.in_group = True
    found = compare(allocator.state(), allocator.shadow)
    assert (found.physical, found.mapped, found.verdict) == (3, 2, "clean")
