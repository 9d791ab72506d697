"""The targets: what makes allocators, and what it says about itself."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from swaleak.allocator.hybrid import HybridAllocator
from swaleak.allocator.strategy import STRATEGIES
from swaleak.device import free_memory
from swaleak.errors import RAISED, Interrupted, SwaleakError, TargetError, UsageError, told
from swaleak.sglang.adapter import Driver, graft, ships
from swaleak.sglang.shims import BaseSWAKVPool

SHIPPED = "shipped"
UNASKED = 2**20  # bytes of pools; below, asking what is free takes longer than making them


@dataclass(frozen=True, slots=True)
class Sizes:
    """Pool sizes in pages, without the padding page, and slots a page."""

    full_pages: int
    swa_pages: int
    page_size: int


class Target(Protocol):
    """Whose allocator is driven."""

    name: str
    version: str | None
    device: str
    notes: tuple[str, ...]
    is_installed: bool

    @property
    def ships(self) -> str | None:
        """The strategy it has of its own, if it has one."""

    def strategies(self) -> tuple[str, ...]:
        """What can be asked of it, its own first."""

    def origin(self, strategy: str) -> str:
        """``builtin``, ``shipped``, ``grafted`` or ``patched``."""

    def make(self, strategy: str, sizes: Sizes) -> Driver:
        """Return a fresh allocator behind a driver."""


class Builtin:
    """The built-in model."""

    name = "builtin"
    version: str | None = None
    ships: str | None = None
    notes: tuple[str, ...] = ()
    is_installed = False

    def __init__(self, device: str) -> None:
        self.device = device

    def strategies(self) -> tuple[str, ...]:
        """All four."""
        return tuple(STRATEGIES)

    def origin(self, strategy: str) -> str:
        """``builtin``, always."""
        return "builtin"

    def make(self, strategy: str, sizes: Sizes) -> Driver:
        """Return a fresh built-in allocator. Raises ``UsageError`` for ``shipped``."""
        if strategy == SHIPPED:
            raise UsageError(
                "the built-in model ships nothing; name one of " + ", ".join(STRATEGIES)
            )
        _check_memory(sizes, self.device)
        build = STRATEGIES[strategy]
        try:
            return Driver(HybridAllocator(*_slots(sizes), sizes.page_size, self.device, build))
        except Exception as error:
            raise _cannot_make(self.name, sizes, error) from None


class OfClass:
    """An allocator class of SGLang's shape, untouched or with a strategy grafted on it.

    ``patched``: it was changed with ``--patch``. ``installed``: it is what ``import sglang``
    gives, caches and all. ``notes``: what the report should say about it.
    """

    def __init__(
        self,
        class_: type[Any],
        name: str,
        device: str,
        *,
        version: str | None = None,
        patched: bool = False,
        installed: bool = False,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.version = version
        self.device = device
        self.notes = notes
        self.is_installed = installed and not patched
        self._own = "patched" if patched else SHIPPED
        self._class = class_
        self._grafts: dict[str, type[Any]] = {}

    @cached_property
    def ships(self) -> str | None:
        """The strategy the class has of its own, found out by trying it; None if that fails."""
        try:
            return ships(self._driver(self._class, Sizes(4, 4, 1)))
        except TargetError:
            raise
        except KeyboardInterrupt:
            raise Interrupted(f"{self.name}, tried out for the strategy it ships") from None
        except RAISED:  # a candidate may be broken in any way; scenarios will tell
            return None

    def strategies(self) -> tuple[str, ...]:
        """As shipped, then all four."""
        return (SHIPPED, *STRATEGIES)

    def origin(self, strategy: str) -> str:
        """``shipped`` or ``patched`` for the class untouched, else ``grafted``."""
        return self._own if strategy in (SHIPPED, self.ships) else "grafted"

    def make(self, strategy: str, sizes: Sizes) -> Driver:
        """Return a fresh allocator of this class. Raises ``TargetError`` if it has none to give."""
        if self.origin(strategy) == self._own:
            return self._driver(self._class, sizes)
        if strategy not in self._grafts:
            try:
                self._grafts[strategy] = graft(self._class, STRATEGIES[strategy])
            except RAISED as error:  # a metaclass, __init_subclass__
                reason = f"{strategy} cannot be grafted on it, it allows no subclass: {told(error)}"
                raise TargetError(f"{self.name}: {reason}") from None
        return self._driver(self._grafts[strategy], sizes)

    def _driver(self, class_: type[Any], sizes: Sizes) -> Driver:
        _check_memory(sizes, self.device)
        try:
            driver = Driver(
                class_(
                    *_slots(sizes),
                    page_size=sizes.page_size,
                    dtype=torch.bfloat16,
                    device=self.device,
                    kvcache=kv_pool_for(class_),
                    need_sort=False,
                )
            )
            _check_shape(driver, sizes, self.device)
            return driver
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a constructor may raise whatever it likes
            raise _cannot_make(self.name, sizes, error) from None


def kv_pool_for(class_: type[Any]) -> Any:
    """Return a KV pool that a class accepts: ours, made of its own base class if it has one."""
    bases = [
        vars(sys.modules[c.__module__]).get("BaseSWAKVPool")
        for c in class_.__mro__
        if c.__module__ in sys.modules
    ]
    real = next((base for base in bases if isinstance(base, type)), None)
    if real is None or real is BaseSWAKVPool:
        return BaseSWAKVPool()
    both: Any = type("KVPool", (BaseSWAKVPool, real), {"__init__": lambda self: None})
    both.__abstractmethods__ = frozenset()  # it only holds the mapping, it has no buffers
    return both()


def _check_memory(sizes: Sizes, device: str) -> None:
    entries = 2 * sum(_slots(sizes)) + 4 * (sizes.full_pages + sizes.swa_pages)
    wanted = entries * 8
    if wanted < UNASKED:
        return
    there = free_memory(device)
    if there is not None and wanted > there:
        raise UsageError(
            f"pools of {sizes.full_pages} full and {sizes.swa_pages} SWA pages of "
            f"{sizes.page_size} slots need {wanted >> 20} MiB, {device} has {there >> 20} MiB free"
        )


def _check_shape(driver: Driver, sizes: Sizes, device: str) -> None:
    """Raise ``TypeError`` for an allocator whose state cannot be read as ``State`` has it."""
    mapping, *free_lists = driver.state()[1:4]
    for what, tensor in (("mapping", mapping), *(("free list", pages) for pages in free_lists)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"its {what} is no tensor")
        if tensor.dim() != 1 or tensor.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"its {what} is no int64[n], but {tensor.dtype} of {[*tensor.shape]}")
        if tensor.device.type != torch.device(device).type:
            raise TypeError(f"its {what} is on {tensor.device}, not on {device}")
    wanted = sizes.full_pages * sizes.page_size + 1
    if len(mapping) <= wanted:
        raise TypeError(f"its mapping has {len(mapping)} entries, for {wanted} slots and the last")
    for part in driver.parts():
        if not hasattr(part, "__dict__"):
            raise TypeError(f"{type(part).__name__} keeps its state in slots, not in attributes")


def _cannot_make(name: str, sizes: Sizes, error: BaseException) -> SwaleakError:
    if isinstance(error, SwaleakError):
        return error
    if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in told(error):
        return UsageError(
            f"{sizes.full_pages} full and {sizes.swa_pages} SWA pages of {sizes.page_size} slots "
            f"do not fit into the device's memory"
        )
    return TargetError(f"{name}: its allocator cannot be made: {told(error)}")


def _slots(sizes: Sizes) -> tuple[int, int]:
    return sizes.full_pages * sizes.page_size, sizes.swa_pages * sizes.page_size
