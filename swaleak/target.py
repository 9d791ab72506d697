"""A target's name -> something that makes allocators."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from swaleak.allocator.hybrid import HybridAllocator
from swaleak.allocator.strategy import STRATEGIES, Strategy
from swaleak.errors import UsageError, unknown
from swaleak.sglang import source
from swaleak.sglang.adapter import Driver, graft, ships
from swaleak.sglang.loader import load
from swaleak.sglang.shims import BaseSWAKVPool

SHIPPED = "shipped"


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
        slots = _slots(sizes)
        return Driver(HybridAllocator(*slots, sizes.page_size, self.device, STRATEGIES[strategy]))


class SGLang:
    """SGLang's own allocator class, untouched or with a strategy grafted on it."""

    def __init__(self, tree: source.SourceTree, device: str, *, is_installed: bool = False) -> None:
        self.tree = tree
        self.is_installed = is_installed
        self.name = tree.label
        self.version = tree.version
        self.device = device
        self._class = load(tree, device)
        self._grafts: dict[str, type[Any]] = {}

    @cached_property
    def ships(self) -> str:
        """The strategy the class has of its own, found out by trying it."""
        return ships(lambda: self._driver(self._class, Sizes(4, 4, 1)))

    def strategies(self) -> tuple[str, ...]:
        """As shipped, then all four."""
        return (SHIPPED, *STRATEGIES)

    def origin(self, strategy: str) -> str:
        """``shipped`` for the class untouched, also by the name of its own strategy."""
        return "shipped" if strategy in (SHIPPED, self.ships) else "grafted"

    def make(self, strategy: str, sizes: Sizes) -> Driver:
        """Return a fresh allocator of this class."""
        if self.origin(strategy) == "shipped":
            return self._driver(self._class, sizes)
        if strategy not in self._grafts:
            self._grafts[strategy] = graft(self._class, STRATEGIES[strategy])
        return self._driver(self._grafts[strategy], sizes)

    def _driver(self, class_: type[Any], sizes: Sizes) -> Driver:
        pool = BaseSWAKVPool()
        return Driver(
            class_(
                *_slots(sizes),
                page_size=sizes.page_size,
                dtype=torch.bfloat16,
                device=self.device,
                kvcache=pool,
                need_sort=False,
            )
        )


def open_target(name: str, device: str) -> Target:
    """Return the target that ``name`` means on ``device`` (a torch device name).

    Raises ``UsageError`` for a name that means nothing, ``TargetError`` for one that cannot be
    loaded.
    """
    if name == "auto":
        name = "installed" if source.is_installed() else "builtin"
    if name == "builtin":
        return Builtin(device)
    if name == "installed":
        return SGLang(source.from_installed(), device, is_installed=True)
    path = Path(name)
    if path.is_dir():
        return SGLang(source.from_folder(path), device)
    if path.is_file():
        return SGLang(source.from_wheel(path), device)
    if "/" in name or name.endswith(".whl"):
        raise UsageError(f"{name}: no such file or folder")
    raise UsageError(unknown("target", name, ("auto", "builtin", "installed", "a path")))


def choose_device(name: str) -> str:
    """Return the torch device for ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises ``UsageError`` for a device that is not there.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and (kind == "cpu" or not index.isdecimal())):
        raise UsageError(unknown("device", name, ("auto", "cpu", "cuda", "cuda:0")))
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise UsageError(f"--device {name}: torch {torch.__version__} sees no CUDA device here")
        if index and int(index) >= count:
            raise UsageError(
                f"--device {name}: there are {count} CUDA devices, cuda:0 is the first"
            )
    return name


def strategy_of(name: str) -> str:
    """Return the short name of a strategy, or ``shipped``; raises ``UsageError``."""
    if name == SHIPPED:
        return SHIPPED
    for strategy in STRATEGIES.values():
        if name in _names(strategy):
            return strategy.name
    known: Iterable[str] = [n for s in STRATEGIES.values() for n in _names(s)]
    raise UsageError(unknown("strategy", name, [*dict.fromkeys(known), SHIPPED]))


def _names(strategy: type[Strategy]) -> tuple[str, str]:
    return strategy.name, strategy.long_name


def _slots(sizes: Sizes) -> tuple[int, int]:
    return sizes.full_pages * sizes.page_size, sizes.swa_pages * sizes.page_size
