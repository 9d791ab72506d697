"""The attributes of an allocator: captured, restored, and "did this call change anything?".

There is one walk over them, ``entries``. What is captured is what ``Driver.parts`` shows:
attributes are put back by reference, lists and other containers as fresh ones, and a tensor's
content only if its version counter says that somebody wrote it. Tensors keep their identity, so
that who shares storage with whom stays true. State in objects of other kinds is not seen here;
the explorer finds that out by making calls again from the start.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from enum import Enum
from functools import cache
from logging import Logger
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from swaleak.allocator.write_guard import plain
from swaleak.checker.shadow import Shadow
from swaleak.checker.slot_table import Cells
from swaleak.targets.driver import Driver

Marks = list[tuple[object, int]]
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
SCALARS = (bool, int, float, str, type(None))


class Length(int):
    """How many items of a container follow."""


def entries(value: object) -> Iterator[object]:
    """Yield tensors and plain values of an attribute, containers one by one with their length."""
    if isinstance(value, (Tensor, *SCALARS)):
        yield value
    elif isinstance(value, CONTAINERS):
        yield Length(len(value))
        for item in value.items() if isinstance(value, dict) else value:
            yield from entries(item)


def marks(driver: Driver) -> Marks:
    """Return something that is the same as long as nothing in the allocator has been written.

    Costs no copy and no synchronisation: a tensor is told by its identity and version counter.
    """
    return [
        (entry, entry._version if isinstance(entry, Tensor) else 0)
        for part in driver.parts()
        for name, value in vars(part).items()
        for entry in (name, *entries(value))
    ]


def unchanged(before: Marks, after: Marks) -> bool:
    """Whether two lists of ``marks`` are of one state."""
    return len(before) == len(after) and all(
        version == now and (one is other or (not isinstance(one, Tensor) and one == other))
        for (one, version), (other, now) in zip(before, after, strict=True)
    )


@dataclass(slots=True)
class _Tensor:
    """A tensor, its content when it was captured, and its version counter by then."""

    tensor: Tensor
    content: Tensor
    version: int


def _captured(tensor: Tensor) -> _Tensor:
    there = plain(tensor)
    return _Tensor(there, there.clone(), there._version)


def _write_back(tensors: list[_Tensor]) -> None:
    """Give back their content to the tensors that were written."""
    written = [w for w in tensors if w.tensor._version != w.version]
    for w in written:
        w.tensor.copy_(w.content)
    for w in written:  # views share a counter: read it when all have been written
        w.version = w.tensor._version


class Snapshot:
    """An allocator and its shadow at one point. Its cost is paid here: restoring is cheap."""

    def __init__(self, driver: Driver, shadow: Shadow) -> None:
        tensors: dict[int, Tensor] = {id(buffer): buffer for buffer in shadow.buffers.values()}
        self.parts: list[tuple[dict[str, Any], dict[str, Any], list[tuple[str, Any]]]] = []
        for part in driver.parts():
            live, held = vars(part), []
            for name, value in live.items():
                if isinstance(value, Tensor):
                    tensors[id(value)] = value
                elif isinstance(value, CONTAINERS):
                    held.append((name, copy(value)))
                    tensors |= {id(t): t for t in entries(value) if isinstance(t, Tensor)}
            self.parts.append((live, dict(live), held))
        self.tensors = [_captured(tensor) for tensor in tensors.values()]
        self.shadow = [_content(vars(where)) for where in (shadow, shadow.full, shadow.swa)]

    def restore(self) -> None:
        """Go back."""
        for live, attributes, held in self.parts:
            live.clear()  # attributes come and go, too
            live.update(attributes)
            for name, items in held:
                live[name] = items[:] if type(items) is list else copy(items)
        _write_back(self.tensors)
        for live, scalars, arrays, containers in self.shadow:
            live.update(scalars)
            for cells, content in arrays:
                cells[:] = content
            for name, items in containers:
                live[name] = items.copy()


class Graph:
    """Everything that can be reached from one object, at one point: a cache, its nodes, requests.

    ``kept``: types whose objects never change. Objects keep their identity; what came into being
    later is let go of.
    """

    def __init__(self, root: object, kept: tuple[type, ...]) -> None:
        kept = (*SCALARS, *_FIXED, *kept)
        self.attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.slots: list[tuple[object, list[tuple[str, Any]]]] = []
        self.mappings: list[tuple[Any, Any]] = []
        self.sequences: list[tuple[Any, Any]] = []
        self.tensors: list[_Tensor] = []
        seen, waiting = {id(root)}, [root]
        while waiting:
            value = waiting.pop()
            for inner in self._enter(value):
                if not isinstance(inner, kept) and id(inner) not in seen:
                    seen.add(id(inner))
                    waiting.append(inner)

    def _enter(self, value: Any) -> list[Any]:
        """Keep one object's content, and return what it refers to."""
        kind: Any = type(value)
        if isinstance(value, Tensor):
            self.tensors.append(_captured(value))
            return []
        if isinstance(value, (dict, set)):
            self.mappings.append((value, kind.copy(value)))
            return [*value.values(), *value] if isinstance(value, dict) else [*value]
        if isinstance(value, (list, deque, array)):
            self.sequences.append((value, copy(value)))
            return [] if isinstance(value, array) else [*value]
        if isinstance(value, (tuple, frozenset)):
            return [*value]
        inner = []
        if (live := getattr(value, "__dict__", None)) is not None:
            self.attributes.append((live, live.copy()))
            inner += live.values()
        if names := _slots(kind):
            held = [(name, getattr(value, name)) for name in names if hasattr(value, name)]
            self.slots.append((value, held))
            inner += [item for _, item in held]
        return inner

    def restore(self) -> None:
        """Go back."""
        for live, attributes in self.attributes:
            live.clear()
            live.update(attributes)
        for mapping, content in self.mappings:
            mapping.clear()
            mapping.update(content)
        for sequence, content in self.sequences:
            if type(sequence) is deque:
                sequence.clear()
                sequence.extend(content)
            else:
                sequence[:] = content
        for value, held in self.slots:
            for name, item in held:
                setattr(value, name, item)
        _write_back(self.tensors)


_FIXED: tuple[type, ...] = (
    *(type, ModuleType, FunctionType, MethodType, BuiltinFunctionType),
    *(Enum, bytes, torch.device, torch.dtype, Logger),
)


@cache
def _slots(kind: Any) -> tuple[str, ...]:
    """Return the names of a type's attributes that are kept in slots, if they can be set."""
    if kind.__module__ == "builtins":
        return ()
    frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
    names = [name for base in kind.__mro__ for name in vars(base).get("__slots__", ())]
    return () if frozen else tuple(n for n in names if n not in ("__dict__", "__weakref__"))


def _content(live: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[Any], list[Any]]:
    """Return a shadow's attributes, its plain values, and copies of its arrays and containers."""
    scalars, arrays, containers = {}, [], []
    for name, value in live.items():
        kind = type(value)
        if kind in (dict, set, list):
            containers.append((name, value.copy()))
        elif kind is Cells:
            arrays.append((value.cells, value.copy()))
        elif kind in SCALARS:
            scalars[name] = value
    return live, scalars, arrays, containers
