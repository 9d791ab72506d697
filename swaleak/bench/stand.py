"""One contestant at the start line: an allocator before a group, and the way back to there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from swaleak.allocator.mapping import plain
from swaleak.bench.cases import Settings, Shape
from swaleak.bench.contestant import Contestant
from swaleak.check.player import Player
from swaleak.errors import UsageError
from swaleak.script import ops
from swaleak.script.ops import Op
from swaleak.sglang.adapter import Driver

SOURCE = "incoming"  # the node that a tombstone is recovered from
RELEASES = ("free", "free_page_ids", "free_segment")  # how a pool is given pages back


class Stand:
    """One contestant at the start line: an allocator in the state before a group.

    ``group()`` is the work to be timed; ``reset()`` puts the state back.
    """

    def __init__(self, contestant: Contestant, shape: Shape, settings: Settings) -> None:
        self.driver, player = ready(contestant, shape)
        self.free_swa: Callable[[Tensor], None] = (
            self.driver.free_swa_segment if settings.segment else self.driver.allocator.free_swa
        )
        self.freed = [player.slots[_node(i)] for i in range(shape.calls)]
        self.source = player.slots[SOURCE] if settings.recover else None
        if not settings.whole:
            for pool in (self.driver.full_pool, self.driver.swa_pool):
                _leave_out_releases(pool)
        self.attributes, self.tensors = _save(self.driver)
        if not settings.whole:
            self._check_left_out(contestant.label)

    def group(self) -> None:
        """One free group."""
        allocator, free_swa = self.driver.allocator, self.free_swa
        allocator.free_group_begin()
        for full in self.freed:
            free_swa(full)
        if self.source is not None:
            self.driver.point(self.freed[0], self.driver.translate(self.source))
            self.driver.clear_mapping(self.source)
            self.driver.free_full_pool(self.source)
        allocator.free_group_end()

    def reset(self) -> None:
        """Put back every attribute, and what is in the tensors."""
        for part, name, value in self.attributes:
            setattr(part, name, list(value) if isinstance(value, list) else value)
        for tensor, content in self.tensors:
            tensor.copy_(content)

    def _check_left_out(self, label: str) -> None:
        free = len(self.driver.state().swa_free)
        self.group()
        if len(self.driver.state().swa_free) != free:
            raise UsageError(f"{label} has a way of its own to release pages; measure with --whole")
        self.reset()


def ready(contestant: Contestant, shape: Shape) -> tuple[Driver, Player]:
    """Return an allocator, and a player of it with all allocated and a node to recover from."""
    driver = contestant.target.make(contestant.strategy, shape.sizes)
    player = Player(driver)
    for name in (SOURCE, *(_node(i) for i in range(shape.calls))):
        player.play(ops.Alloc(name, shape.pages))
    return driver, player


def group_ops(shape: Shape, settings: Settings) -> Iterator[Op]:
    """Yield the same group as ``Stand.group``, as a script that can be judged."""
    free = ops.FreeSwaSegment if settings.segment else ops.FreeSwa
    yield ops.Group("begin")
    for i in range(shape.calls):
        yield free(_node(i))
    if settings.recover:
        yield ops.Recover(_node(0), SOURCE)
    yield ops.Group("end")


def _node(i: int) -> str:
    return f"node {i}"


def _leave_out_releases(pool: Any) -> None:
    for name in RELEASES:
        if hasattr(pool, name):
            setattr(pool, name, _nothing)


def _nothing(*_args: object, **_kwargs: object) -> None:
    """Stand in for a physical release."""


def _save(driver: Driver) -> tuple[list[tuple[object, str, object]], list[tuple[Tensor, Tensor]]]:
    """Return the allocator's state: (owner, name, value) of attributes, (tensor, its copy)."""
    attributes: list[tuple[object, str, object]] = []
    tensors: list[tuple[Tensor, Tensor]] = []
    for part in driver.parts():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                tensors.append((plain(value), plain(value).clone()))
            if value is None or isinstance(value, (bool, int, float, str, list, Tensor)):
                attributes.append((part, name, list(value) if isinstance(value, list) else value))
    return attributes, tensors
