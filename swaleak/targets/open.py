"""A target's name -> something that makes allocators and caches, on a device."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from swaleak.allocator.hybrid import HybridAllocator
from swaleak.allocator.strategies import STRATEGIES
from swaleak.errors import (
    RAISED,
    Interrupted,
    StandInError,
    SwaleakError,
    TargetError,
    UsageError,
    format_error,
    unknown,
)
from swaleak.targets import sources
from swaleak.targets.driver import Driver, Sizes, graft, shipped_strategy
from swaleak.targets.loader import ModuleLoader
from swaleak.targets.patch import patched
from swaleak.targets.radix_cache import Caches
from swaleak.targets.shims import BaseSWAKVPool
from swaleak.targets.sources import SourceTree

SHIPPED = "shipped"
# every name that is understood -> the short one
STRATEGY_NAMES = {
    **{name: s.name for s in STRATEGIES.values() for name in (s.name, s.long_name)},
    SHIPPED: SHIPPED,
}
MIN_CHECKED_BYTES = 2**20  # below, asking what is free takes longer than making the pools
CGROUP = Path("/sys/fs/cgroup")


class Target(Protocol):
    """Makes allocators and caches of one source.

    ``version``: the release that it is, byte for byte; only that excuses what is known of it.
    ``notes``: what a report should say about it.
    """

    name: str
    version: str | None
    device: str
    notes: tuple[str, ...]

    @property
    def ships(self) -> str | None:
        """The strategy it has of its own, if it has one."""

    @property
    def caches(self) -> Caches:
        """Its radix caches. Raises ``UsageError`` if it is of a kind that has none."""

    @property
    def stand_ins(self) -> tuple[str, ...]:
        """SGLang's names that swaleak has provided in place of SGLang, so far."""

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
    stand_ins: tuple[str, ...] = ()

    def __init__(self, device: str) -> None:
        self.device = device

    @property
    def caches(self) -> Caches:
        """None: raises ``UsageError``."""
        raise UsageError("the built-in model has no radix caches; name a release or a path")

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
            return Driver(HybridAllocator(*sizes.slots, sizes.page_size, self.device, build))
        except Exception as error:
            raise _cannot_make(self.name, sizes, error) from None


class ClassTarget:
    """An allocator class of SGLang's shape, untouched or with a strategy grafted on it.

    ``modules``: the source tree's that it comes from, if it comes from one.
    """

    def __init__(
        self,
        class_: type[Any],
        name: str,
        device: str,
        *,
        modules: ModuleLoader | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.device = device
        self.version = modules.tree.version if modules else None
        self.notes = notes
        self.modules = modules
        patched = modules is not None and bool(modules.tree.patched or modules.tree.added)
        self._own = "patched" if patched else SHIPPED
        self._class = class_
        self._grafts: dict[str, type[Any]] = {}

    @cached_property
    def ships(self) -> str | None:
        """The strategy the class has of its own, found out by trying it; None if that fails."""
        try:
            return shipped_strategy(self.make(SHIPPED, Sizes(4, 4, 1)))
        except TargetError:
            raise
        except KeyboardInterrupt:
            raise Interrupted(f"{self.name}, tried out for the strategy it ships") from None
        except RAISED:  # a candidate may be broken in any way; scenarios will tell
            return None

    @cached_property
    def caches(self) -> Caches:
        """Those of its source tree. Raises ``UsageError`` for a class without one."""
        if self.modules is None:
            raise UsageError(f"{self.name} is an allocator's class, it has no radix caches")
        return Caches(self.modules, self.make, self.name)

    @property
    def stand_ins(self) -> tuple[str, ...]:
        """Those of its modules."""
        return self.modules.used_stand_ins if self.modules else ()

    def strategies(self) -> tuple[str, ...]:
        """As shipped, then all four."""
        return (SHIPPED, *STRATEGIES)

    def origin(self, strategy: str) -> str:
        """``shipped`` or ``patched`` for the class untouched, else ``grafted``."""
        return self._own if strategy in (SHIPPED, self.ships) else "grafted"

    def allocator_class(self, strategy: str) -> type[Any]:
        """Return the class for a strategy. Raises ``TargetError`` if it allows no subclass."""
        # asked for first: what a source ships is found out with what it ships
        if strategy == SHIPPED or self.origin(strategy) == self._own:
            return self._class
        if strategy not in self._grafts:
            try:
                self._grafts[strategy] = graft(self._class, STRATEGIES[strategy])
            except RAISED as error:  # a metaclass, __init_subclass__
                reason = f"it allows no subclass: {format_error(error)}"
                raise TargetError(f"{self.name}: {strategy} cannot be grafted, {reason}") from None
        return self._grafts[strategy]

    def make(self, strategy: str, sizes: Sizes) -> Driver:
        """Return a fresh allocator of this class. Raises ``TargetError`` if it has none to give."""
        class_ = self.allocator_class(strategy)
        _check_memory(sizes, self.device)
        try:
            driver = Driver(
                class_(
                    *sizes.slots,
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


def open_target(name: str, device: str, patches: list[str] | None = None) -> Target:
    """Return the target that ``name`` means on ``device`` (a torch device name).

    ``patches``: files with diffs to apply to its sources first, "-" for standard input. Raises
    ``UsageError`` for a name that means nothing, ``TargetError`` for one that cannot be loaded.
    """
    if name == "auto":
        name = "installed" if sources.is_installed() else "builtin"
    if name == "builtin" or _is_class(name):
        if patches:
            raise UsageError(f"--patch needs SGLang's sources to apply to, not {name}")
        return Builtin(device) if name == "builtin" else _user_class(name, device)
    return open_tree(_find_tree(name), device, patches)


def open_targets(
    names: Sequence[str], device: str, patches: list[str] | None = None
) -> list[Target]:
    """Return these targets, after each the same one patched if there are ``patches``.

    Targets of the same name, such as two copies of a release, are told apart by how they were
    asked for. Raises as ``open_target``.
    """
    opened: list[tuple[str, Target]] = []
    for name in dict.fromkeys(names):
        opened.append((name, open_target(name, device)))
        if patches:
            opened.append((name, open_target(name, device, patches)))
    labels = [target.name for _, target in opened]
    for asked, target in opened:
        if labels.count(target.name) > 1:
            target.name = f"{target.name} ({asked})"
    return [target for _, target in opened]


def open_tree(tree: SourceTree, device: str, patches: list[str] | None = None) -> ClassTarget:
    """Return the allocator and caches of a source tree, patched if there are ``patches``.

    Raises as ``open_target``.
    """
    notes: tuple[str, ...] = ()
    if patches:
        tree, left_out = patched(tree, patches)
        notes = tuple(f"left out of the patch, not run here: {path}" for path in left_out)
    modules = ModuleLoader(tree, device)
    return ClassTarget(modules.allocator_class, tree.label, device, modules=modules, notes=notes)


def strategy_of(name: str) -> str:
    """Return the short name of a strategy, or ``shipped``; raises ``UsageError``."""
    if name not in STRATEGY_NAMES:
        raise UsageError(unknown("strategy", name, STRATEGY_NAMES))
    return STRATEGY_NAMES[name]


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


def describe_device(device: str) -> str:
    """Return ``cuda:0 (NVIDIA H200)``, or the bare name of a CPU."""
    if device.startswith("cuda"):
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return device


def free_memory(device: str) -> int | None:
    """Return free bytes on a device, None where nobody says.

    On the CPU: what the machine has, and what the container's limit leaves of it.
    """
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")
        )
    except (OSError, StopIteration, ValueError):
        return None
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            used = int((CGROUP / usage).read_text()) - _reclaimable(CGROUP / usage)
            free = min(free, max(0, int((CGROUP / limit).read_text()) - used))
    return free


def _reclaimable(usage: Path) -> int:
    """Return the bytes of files that the kernel has cached and can drop; they count as used."""
    try:
        lines = usage.with_name("memory.stat").read_text().splitlines()
    except OSError:
        return 0
    sizes = dict(line.split() for line in lines)
    return int(sizes.get("total_inactive_file", sizes.get("inactive_file", 0)))


def _find_tree(name: str) -> SourceTree:
    if name == "installed":
        return sources.from_installed()
    for ending, kind, command in (
        (".toml", "a scenario", "swaleak repro"),
        (".jsonl", "a trace", "swaleak replay"),
    ):
        if name.endswith(ending):
            raise UsageError(f"{name}: {kind}, not a target; `{command} {name}` runs it")
    path = Path(name)
    try:
        if name and path.is_dir():
            return sources.from_folder(path)
        if path.is_file():
            return sources.from_wheel(path)
    except OSError as error:  # such as a name too long for any file
        raise UsageError(f"{name[:60]}: {error.strerror or error}") from None
    if sources.is_version(name):
        return sources.from_release(name)
    if "/" in name or name.endswith(".whl"):
        raise UsageError(f"{name}: no such file or folder")
    # no list of releases: which there are beyond those that this swaleak was tried on, pip knows
    first = sources.FIRST.partition(".post")[0]
    known = ("auto", "builtin", "installed", f"a release from {first} on", "a path", "module:Class")
    raise UsageError(unknown("target", name, known))


def _is_class(name: str) -> bool:
    module, _, class_ = name.partition(":")
    return class_.isidentifier() and all(part.isidentifier() for part in module.split("."))


def _user_class(name: str, device: str) -> ClassTarget:
    module, _, attribute = name.partition(":")
    if "" not in sys.path:  # a console script does not look in the folder it is called from
        sys.path.insert(0, "")
    try:
        class_ = getattr(importlib.import_module(module), attribute)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may raise whatever it likes
        raise TargetError(f"{name}: {format_error(error)}") from None
    if not isinstance(class_, type):
        raise TargetError(f"{name}: is no class")
    return ClassTarget(class_, name, device)


def _check_memory(sizes: Sizes, device: str) -> None:
    entries = 2 * sum(sizes.slots) + 4 * (sizes.full_pages + sizes.swa_pages)
    wanted = entries * 8
    if wanted < MIN_CHECKED_BYTES:
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
    if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in format_error(error):
        return UsageError(
            f"{sizes.full_pages} full and {sizes.swa_pages} SWA pages of {sizes.page_size} slots "
            f"do not fit into the device's memory"
        )
    reason = str(error) if isinstance(error, StandInError) else format_error(error)
    return TargetError(f"{name}: its allocator cannot be made: {reason}")
