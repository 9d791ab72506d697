"""A mapping tensor that tells somebody before it is written, however it is written.

SGLang's caches write ``allocator.full_to_swa_index_mapping[i] = 0`` past every method of the
allocator. A barrier that only stood in front of methods would miss those writes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


class GuardedMapping(Tensor):
    """The same storage as a plain tensor; ``before_write()`` runs ahead of each write.

    Seen: item assignment, every in-place method or operator, ``out=``, also on views of it.
    Not seen: kernels that write through a raw pointer, and ``.data`` or ``.numpy()`` aliases.
    What is read from it (a copy, not a view) is a plain tensor again.
    """

    before_write: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` on the plain tensor, after a warning if it writes."""
        kwargs = kwargs or {}
        for target in _written(func, args, kwargs):
            target.before_write()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        passed = (*args, *kwargs.values())
        source = next((arg for arg in passed if isinstance(arg, GuardedMapping)), None)
        return result if source is None else _guard_views(result, source)


def guarded(mapping: Tensor, before_write: Callable[[], None]) -> GuardedMapping:
    """Return ``mapping`` (int64[n]) behind a guard, on the same storage."""
    alias: GuardedMapping = torch.Tensor._make_subclass(GuardedMapping, mapping)
    alias.before_write = before_write
    return alias


def plain(mapping: Tensor) -> Tensor:
    """Return the same storage without a guard."""
    return mapping if type(mapping) is Tensor else mapping.as_subclass(Tensor)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[GuardedMapping]:
    """Return the guarded tensors that ``func`` is about to write."""
    out = kwargs.get("out")
    targets = list(out) if isinstance(out, (tuple, list)) else [out]
    if _in_place(func):
        first = args[0] if args else kwargs.get("input", kwargs.get("self"))
        # torch._foreach_*_ writes each tensor of its first list
        targets += first if isinstance(first, (tuple, list)) else [first]
    return [target for target in targets if isinstance(target, GuardedMapping)]


@lru_cache(maxsize=1024)
def _in_place(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is not None:  # torch.ops.aten.…
        return bool(schema.is_mutable)
    name: str = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in _IN_PLACE_OPERATORS
    return name.endswith("_")


_OPERATORS = "add sub mul truediv floordiv mod pow div rem and or xor lshift rshift"
_IN_PLACE_OPERATORS = {"__setitem__", "__set__", *(f"__i{op}__" for op in _OPERATORS.split())}


def _guard_views(result: Any, source: GuardedMapping) -> Any:
    """Return ``result`` with every view of ``source`` in it behind the same guard."""
    if isinstance(result, (tuple, list)):
        return type(result)(_guard_views(item, source) for item in result)
    if type(result) is Tensor and _shares_storage(result, source):
        return guarded(result, source.before_write)
    return result


def _shares_storage(one: Tensor, other: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
