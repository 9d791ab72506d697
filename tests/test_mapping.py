"""The barrier stands in front of every write to the mapping, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from swaleak.allocator.write_guard import GuardedMapping, guarded, plain
from swaleak.targets.open import Builtin, Sizes, Target
from tests.conftest import sglang

AT = torch.tensor([1, 2])
SEVEN = torch.tensor([7, 7])


def by_torch_function(m: torch.Tensor) -> None:
    torch.index_put_(m, (AT,), SEVEN)


def by_operator_overload(m: torch.Tensor) -> None:
    torch.ops.aten.index_fill_.int_Scalar(m, 0, AT, 7)


def by_out(m: torch.Tensor) -> None:
    torch.add(torch.zeros(6, dtype=torch.int64), 7, out=m)


def by_foreach(m: torch.Tensor) -> None:
    torch._foreach_add_([m], 7)


def by_augmented_assignment(m: torch.Tensor) -> None:
    m += 7


WRITES: list[Callable[[torch.Tensor], object]] = [
    lambda m: m.__setitem__(1, 7),
    lambda m: m.__setitem__(AT, 7),
    lambda m: m.__setitem__(slice(None, -1), 7),
    lambda m: m.fill_(7),
    lambda m: m.zero_(),
    lambda m: m.copy_(torch.full((6,), 7)),
    lambda m: m.index_fill_(0, AT, 7),
    lambda m: m.index_copy_(0, AT, SEVEN),
    lambda m: m.index_put_((AT,), SEVEN),
    lambda m: m.scatter_(0, AT, SEVEN),
    lambda m: m.masked_fill_(m == 1, 7),
    lambda m: m[:-1].fill_(7),
    lambda m: m[1:][1:].__setitem__(0, 7),
    lambda m: m.view(2, 3)[1].zero_(),
    lambda m: m.detach().zero_(),
    lambda m: m.split(2)[1].fill_(7),
    lambda m: m.unbind()[1].fill_(7),
    by_torch_function,
    lambda m: torch.index_put_(input=m, indices=(AT,), values=SEVEN),
    lambda m: torch.ops.aten.fill_.Scalar(self=m, value=7),
    lambda m: torch._foreach_add_(self=[m], scalar=7),
    lambda m: torch.narrow(input=m, dim=0, start=1, length=2).fill_(7),
    by_operator_overload,
    by_out,
    by_foreach,
    by_augmented_assignment,
]

READS: list[Callable[[torch.Tensor], object]] = [
    lambda m: m[AT],
    lambda m: m[1],
    lambda m: m[:-1],
    lambda m: m.tolist(),
    lambda m: m > 0,
    lambda m: torch.zeros(6, dtype=torch.int64).copy_(m),
    lambda m: torch.cat((m, m)),
    lambda m: m.clone().zero_(),
    lambda m: m[AT].fill_(7),
    lambda m: repr(m),
]


def tensor_and_log() -> tuple[GuardedMapping, list[list[int]]]:
    """A guarded tensor, and a log of what it held whenever the guard was called."""
    under = torch.arange(6)
    log: list[list[int]] = []
    return guarded(under, lambda: log.append(under.tolist())), log


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_heard_before_it_happens(write: Callable[[torch.Tensor], object]) -> None:
    mapping, log = tensor_and_log()
    write(mapping)
    assert log[0] == [0, 1, 2, 3, 4, 5]
    assert plain(mapping).tolist() != log[0]


@pytest.mark.parametrize("read", READS)
def test_a_read_is_not_heard(read: Callable[[torch.Tensor], object]) -> None:
    mapping, log = tensor_and_log()
    read(mapping)
    assert (log, plain(mapping).tolist()) == ([], [0, 1, 2, 3, 4, 5])


def test_what_is_read_is_plain_and_views_stay_guarded() -> None:
    mapping, _ = tensor_and_log()
    kinds = [type(x) for x in (mapping[AT], mapping + 1, mapping.clone(), mapping[:-1], mapping[1])]
    assert kinds == [torch.Tensor, torch.Tensor, torch.Tensor, GuardedMapping, GuardedMapping]


def direct_write_first(target: Target, page_size: int) -> tuple[int, list[int], list[int]]:
    """Queue a free, then write the mapping tensor directly: no method runs in between.

    Returns how many SWA slots became free, and the mapping of two nodes afterwards.
    """
    driver = target.make("barrier", Sizes(4, 4, page_size))
    node, other = driver.alloc_pages(page_size), driver.alloc_pages(page_size)
    assert node is not None and other is not None
    before = driver.swa_pool.available_size()
    driver.group_begin()
    driver.free_swa(node)
    mapping = driver.allocator.full_to_swa_index_mapping
    mapping[node] = mapping[other]
    mapping[other] = 0
    driver.group_end()
    freed = (driver.swa_pool.available_size() - before) // page_size
    return freed, driver.translate(node).tolist(), driver.translate(other).tolist()


@pytest.mark.wheels
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_direct_write_right_after_a_queued_free_0_5_18(page_size: int) -> None:
    moved = list(range(2 * page_size, 3 * page_size))
    for target in (Builtin("cpu"), sglang("0.5.18")):
        assert direct_write_first(target, page_size) == (1, moved, [0] * page_size)
