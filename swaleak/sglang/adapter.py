"""Drives an allocator that has SGLang's shape, and grafts a strategy on such a class.

The built-in model has that shape too, so one driver serves both. Names are those of v0.5.18.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from swaleak.allocator.hybrid import GroupedFrees
from swaleak.allocator.mapping import plain
from swaleak.allocator.state import State
from swaleak.allocator.strategy import Strategy


class Driver:
    """Carries out a script's operations on one allocator instance.

    Slots are tensors on the allocator's device: int64[n], and int32[n] or views of it are taken as
    well, as they are in SGLang's request table. ``substituted`` collects the calls that
    were made in place of ones that a release lacks.
    """

    def __init__(self, allocator: Any) -> None:
        self.allocator = allocator
        self.page_size: int = allocator.page_size
        self.full_pool: Any = allocator.full_attn_allocator
        self.swa_pool: Any = allocator.swa_attn_allocator
        self.substituted: dict[str, str] = {}

    def alloc(self, pages: int) -> Tensor | None:
        """``alloc`` at page size 1, else whole pages from each pool and a mapping between them."""
        if self.page_size == 1:
            return _handed_out(self.allocator.alloc(pages))
        slots = pages * self.page_size
        if slots > min(self.full_pool.available_size(), self.swa_pool.available_size()):
            return None
        full, swa = self.full_pool.alloc(slots), self.swa_pool.alloc(slots)
        self.allocator.set_full_to_swa_mapping(full, swa)
        return _handed_out(full)

    def alloc_tail(self, pages: int, tail: int) -> Tensor | None:
        """``alloc_extend_swa_tail`` for a request without a prefix."""
        tokens = pages * self.page_size
        device = self.state().mapping.device
        prefix_cpu, seq_cpu = torch.tensor([0]), torch.tensor([tokens])
        full = self.allocator.alloc_extend_swa_tail(
            prefix_cpu.to(device),
            prefix_cpu,
            seq_cpu.to(device),
            seq_cpu,
            torch.tensor([-1], device=device),
            tokens,
            tail * self.page_size,
        )
        return _handed_out(full)

    def extend(self, prefix: int, last: Tensor | None, tokens: int) -> Tensor | None:
        """``alloc_extend`` for one request; ``alloc`` at page size 1, as SGLang's scheduler does.

        ``last``: int64[1], slot of its last token, None for a request without a prefix.
        """
        if self.page_size == 1:
            return _handed_out(self.allocator.alloc(tokens))
        device = self.state().mapping.device
        before, after = torch.tensor([prefix]), torch.tensor([prefix + tokens])
        if last is None:
            last = torch.tensor([-1], device=device)
        full = self.allocator.alloc_extend(
            before.to(device), before, after.to(device), after, last, tokens
        )
        return _handed_out(full)

    def decode(self, prefix: int, last: Tensor) -> Tensor | None:
        """``alloc_decode`` for one request of ``prefix`` tokens; ``alloc`` at page size 1."""
        if self.page_size == 1:
            return _handed_out(self.allocator.alloc(1))
        after = torch.tensor([prefix + 1])
        full = self.allocator.alloc_decode(after.to(last.device), after, last)
        return _handed_out(full)

    def alloc_swa(self, pages: int) -> Tensor | None:
        """``swa_attn_allocator.alloc``: SWA slots that nothing maps to yet."""
        return _handed_out(self.swa_pool.alloc(pages * self.page_size))

    def free(self, full: Tensor) -> None:
        """``free``."""
        self.allocator.free(full)

    def free_swa(self, full: Tensor) -> None:
        """``free_swa``."""
        self.allocator.free_swa(full)

    def free_full(self, full: Tensor) -> None:
        """``free_full`` (0.5.19 and later), else ``free``."""
        if hasattr(self.allocator, "free_full"):
            self.allocator.free_full(full)
        else:
            self._instead("free_full", "free")(full)

    def free_segment(self, full: Tensor) -> None:
        """``free_segment`` with ``start_pos`` = 0, else ``free``."""
        self._segment("free_segment", "free", full)

    def free_swa_segment(self, full: Tensor) -> None:
        """``free_swa_segment`` (0.5.20 and later) with ``start_pos`` = 0, else ``free_swa``."""
        self._segment("free_swa_segment", "free_swa", full)

    def free_full_segment(self, full: Tensor) -> None:
        """``free_full_segment`` (0.5.20 and later) with ``start_pos`` = 0, else ``free_full``."""
        if hasattr(self.allocator, "free_full_segment"):
            self.allocator.free_full_segment(full, start_pos=0)
        else:
            self.free_full(full)

    def free_full_pool(self, full: Tensor) -> None:
        """``full_attn_allocator.free``."""
        self.full_pool.free(full)

    def free_swa_pool(self, swa: Tensor) -> None:
        """``swa_attn_allocator.free``."""
        self.swa_pool.free(swa)

    def translate(self, full: Tensor) -> Tensor:
        """``translate_loc_from_full_to_swa``."""
        return cast(Tensor, self.allocator.translate_loc_from_full_to_swa(full))

    def point(self, full: Tensor, swa: Tensor) -> None:
        """``set_full_to_swa_mapping``."""
        self.allocator.set_full_to_swa_mapping(full, swa)

    def clear_mapping(self, full: Tensor) -> None:
        """A direct write: ``full_to_swa_index_mapping[full] = 0``."""
        self.allocator.full_to_swa_index_mapping[full] = 0

    def group_begin(self) -> None:
        """``free_group_begin``."""
        self.allocator.free_group_begin()

    def group_end(self) -> None:
        """``free_group_end``."""
        self.allocator.free_group_end()

    def state(self) -> State:
        """Return mapping and free lists as they are; see ``State``."""
        return State(
            self.page_size,
            plain(self.allocator.full_to_swa_index_mapping),
            _free_list(self.full_pool),
            _free_list(self.swa_pool),
            self.full_pool.size // self.page_size,
            self.swa_pool.size // self.page_size,
        )

    def parts(self) -> tuple[object, ...]:
        """Return the allocator, its pools and, if it has one, its strategy."""
        strategy = getattr(self.allocator, "strategy", None)
        parts = (self.allocator, self.full_pool, self.swa_pool)
        return (*parts, strategy) if isinstance(strategy, Strategy) else parts

    def _segment(self, name: str, otherwise: str, full: Tensor) -> None:
        if hasattr(self.allocator, name):
            getattr(self.allocator, name)(full, start_pos=0)
        else:
            self._instead(name, otherwise)(full)

    def _instead(self, missing: str, done: str) -> Any:
        self.substituted[missing] = done
        return getattr(self.allocator, done)


def _handed_out(slots: Any) -> Tensor | None:
    """Return what an allocation gave; ``TypeError`` unless that is int64[n], or None."""
    if slots is not None and not (isinstance(slots, Tensor) and slots.dim() == 1):
        raise TypeError(f"an allocation returned {type(slots).__name__}, not slots")
    return slots


def _free_list(pool: Any) -> Tensor:
    """Return int64[n]: free pages, and those that wait to be sorted in (``release_pages``)."""
    waiting = getattr(pool, "release_pages", None)
    if waiting is None or not len(waiting):
        return cast(Tensor, pool.free_pages)
    return torch.cat((pool.free_pages, waiting))


# ``clear`` is left to the class: it resets what else there is, and calls that of GroupedFrees
_GROUPED = {
    name: member
    for name, member in vars(GroupedFrees).items()
    if not name.startswith("__") and name != "clear"
}


def graft(base: type[Any], strategy: type[Strategy]) -> type[Any]:
    """Return a subclass of ``base`` (SGLang's hybrid allocator) that frees by ``strategy``.

    Everything that frees or groups comes from ``GroupedFrees``, the code of the built-in model;
    everything else stays SGLang's. The mapping is guarded if the strategy listens to writes, so
    that direct tensor writes are heard as well. Raises what ``base`` raises if it will have no
    subclass.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self.take_strategy(strategy)  # SGLang's constructor calls clear()
        base.__init__(self, *args, **kwargs)
        self.guard_mapping()

    def take_strategy(self: Any, _own: type[Strategy]) -> None:
        GroupedFrees.take_strategy(self, strategy)

    members = {"__init__": __init__, "__doc__": f"{base.__name__} with {strategy.long_name} frees."}
    bases: tuple[type[Any], ...] = (GroupedFrees, base)
    if issubclass(base, GroupedFrees):  # one of the built-in model's kind: it names its own
        members = _GROUPED | {"take_strategy": take_strategy} | members
        bases = (base,)
    return type(f"{strategy.__name__}{base.__name__}", bases, members)


def ships(driver: Driver, free: str = "free_swa") -> str:
    """Return the strategy that a class behaves like, found out by trying it.

    ``driver``: on a fresh allocator, page size 1, at least 2 slots a pool. What is asked: when
    does a grouped ``free_swa``, or a grouped ``free``, decide whose SWA slot it frees?
    """
    node, incoming = driver.alloc(1), driver.alloc(1)
    assert node is not None and incoming is not None
    peer, other = driver.translate(node).clone(), driver.translate(incoming).clone()
    available = driver.swa_pool.available_size()
    driver.group_begin()
    getattr(driver, free)(node)
    if driver.swa_pool.available_size() > available:
        return "eager"
    if not driver.translate(node).any():
        return "enqueue"
    driver.point(node, other)
    driver.group_end()
    freed = driver.state().swa_free
    return "barrier" if peer in freed and other not in freed else "deferred"
