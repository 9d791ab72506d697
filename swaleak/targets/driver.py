"""Makes calls on an allocator of SGLang's shape, and grafts a strategy on such a class.

The built-in model has that shape too, so one driver serves both. Names are those of v0.5.18.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from swaleak.allocator.hybrid import GroupedFrees
from swaleak.allocator.strategies import Strategy
from swaleak.allocator.write_guard import plain


@dataclass(frozen=True, slots=True)
class Sizes:
    """Pool sizes in pages, without the padding page, and slots per page."""

    full_pages: int
    swa_pages: int
    page_size: int

    @property
    def slots(self) -> tuple[int, int]:
        """Slots of the full and of the SWA pool."""
        return self.full_pages * self.page_size, self.swa_pages * self.page_size


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


class Driver:
    """One allocator. Slots are passed as int64[n] and come back on its device.

    To a free of the hybrid allocator they are passed as they are, see ``index``.

    ``substituted`` collects the calls that were made in place of ones that a release lacks.
    ``frees_full_alone``: whether it can free full slots and keep their SWA peers.
    """

    def __init__(self, allocator: Any) -> None:
        self.allocator = allocator
        self.page_size: int = allocator.page_size
        self.full_pool: Any = allocator.full_attn_allocator
        self.swa_pool: Any = allocator.swa_attn_allocator
        self.device = plain(allocator.full_to_swa_index_mapping).device
        self._on_host = self.device.type == "cpu"
        self.substituted: dict[str, str] = {}
        self.frees_full_alone = hasattr(allocator, "free_full")

    # allocate

    def alloc(self, slots: int) -> Tensor | None:
        """``alloc``."""
        return _handed_out(self.allocator.alloc(slots))

    def alloc_pages(self, slots: int) -> Tensor | None:
        """Whole pages from each pool, and a mapping between them."""
        if slots > min(self.full_pool.available_size(), self.swa_pool.available_size()):
            return None
        full = _handed_out(self.full_pool.alloc(slots))
        swa = _handed_out(self.swa_pool.alloc(slots))
        if full is not None and swa is not None:
            self.allocator.set_full_to_swa_mapping(full, swa)
        return full

    def alloc_full(self, slots: int) -> Tensor | None:
        """``full_attn_allocator.alloc``."""
        return _handed_out(self.full_pool.alloc(slots))

    def alloc_swa(self, slots: int) -> Tensor | None:
        """``swa_attn_allocator.alloc``."""
        return _handed_out(self.swa_pool.alloc(slots))

    def alloc_extend(
        self, prefix: Sequence[int], seq: Sequence[int], last: Tensor, tokens: int
    ) -> Tensor | None:
        """``alloc_extend``. ``last``: int64[bs], slot of each request's last token, 0 for none."""
        return _handed_out(self.allocator.alloc_extend(*self._growth(prefix, seq, last), tokens))

    def alloc_extend_swa_tail(
        self, prefix: Sequence[int], seq: Sequence[int], last: Tensor, tokens: int, tail: int
    ) -> Tensor | None:
        """``alloc_extend_swa_tail``: as ``alloc_extend``, with peers for the last tokens only."""
        growth = self._growth(prefix, seq, last)
        return _handed_out(self.allocator.alloc_extend_swa_tail(*growth, tokens, tail))

    def alloc_decode(self, seq: Sequence[int], last: Tensor) -> Tensor | None:
        """``alloc_decode``: one token per request."""
        _, _, seq_lens, seq_lens_cpu, last_loc = self._growth(seq, seq, last)
        return _handed_out(self.allocator.alloc_decode(seq_lens, seq_lens_cpu, last_loc))

    # free

    def index(self, slots: Tensor) -> Tensor:
        """Return slots (int64[n] on the host) as a caller passes them to a free."""
        return slots if self.device.type == "cpu" else slots.to(self.device)

    def free(self, full: Tensor) -> None:
        """``free``."""
        self.allocator.free(full)

    def free_swa(self, full: Tensor) -> None:
        """``free_swa``."""
        self.allocator.free_swa(full)

    def free_full(self, full: Tensor) -> None:
        """``free_full`` (0.5.19 and later), else ``free``."""
        if self.frees_full_alone:
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
        self.full_pool.free(self.index(full))

    def free_swa_pool(self, swa: Tensor) -> None:
        """``swa_attn_allocator.free``."""
        self.swa_pool.free(self.index(swa))

    # the mapping, groups, state

    def translate(self, full: Tensor) -> Tensor:
        """``translate_loc_from_full_to_swa``."""
        return cast(Tensor, self.allocator.translate_loc_from_full_to_swa(self._there(full)))

    def peers(self, full: Tensor) -> Tensor:
        """Return the mapping's entries, int64[n] on the host, whatever the allocator says."""
        mapping: Tensor = plain(self.allocator.full_to_swa_index_mapping)
        if self._on_host and mapping.dtype == torch.int64:
            return mapping[full]
        return mapping[self._there(full)].to("cpu", torch.int64)

    def point(self, full: Tensor, swa: Tensor) -> None:
        """``set_full_to_swa_mapping``."""
        self.allocator.set_full_to_swa_mapping(self._there(full), self._there(swa))

    def clear_mapping(self, full: Tensor) -> None:
        """A direct write: ``full_to_swa_index_mapping[full] = 0``."""
        self.allocator.full_to_swa_index_mapping[self._there(full)] = 0

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
        """Return the objects whose attributes are the allocator's state."""
        strategy = getattr(self.allocator, "strategy", None)
        parts = (self.allocator, self.full_pool, self.swa_pool)
        return (*parts, strategy) if isinstance(strategy, Strategy) else parts

    def _there(self, slots: Tensor) -> Tensor:
        return slots if self._on_host else slots.to(self.device)

    def _growth(
        self, prefix: Sequence[int], seq: Sequence[int], last: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        before, after = (torch.tensor(lens, device="cpu") for lens in (prefix, seq))
        last = torch.where(last > 0, last, -1)
        there = self.device
        return before.to(there), before, after.to(there), after, last.to(there)

    def _segment(self, name: str, otherwise: str, full: Tensor) -> None:
        if hasattr(self.allocator, name):
            getattr(self.allocator, name)(full, start_pos=0)
        else:
            self._instead(name, otherwise)(full)

    def _instead(self, missing: str, made: str) -> Any:
        self.substituted[missing] = made
        return getattr(self.allocator, made)


def _handed_out(slots: Any) -> Tensor | None:
    """Return what an allocation gave; ``TypeError`` unless that is int64[n], or None."""
    if slots is not None and not (isinstance(slots, Tensor) and slots.dim() == 1):
        raise TypeError(f"an allocation returned {type(slots).__name__}, not slots")
    return slots


def _free_list(pool: Any) -> Tensor:
    """Return int64[n]: free pages, and those that wait to be sorted in (``release_pages``)."""
    waiting = getattr(pool, "release_pages", None)
    if waiting is None or not waiting.numel():
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
    if issubclass(base, GroupedFrees):  # a class of the built-in model's kind chooses its own
        members = _GROUPED | {"take_strategy": take_strategy} | members
        bases = (base,)
    return type(f"{strategy.__name__}{base.__name__}", bases, members)


def shipped_strategy(driver: Driver, free: str = "free_swa") -> str:
    """Return the strategy that a class behaves like, found out by trying it.

    ``driver``: on a fresh allocator, page size 1, at least 2 slots per pool. What is asked: when
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
