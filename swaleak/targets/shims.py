"""The names that SGLang's allocator and caches import from the rest of SGLang.

Written from what the names mean, for a single process on a CPU or a CUDA device. Each module of
SGLang that is stood in for is one function here, which returns its names. What none of them has is
a ``Placeholder``.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from swaleak.allocator.page_pool import extend_slots, new_pages
from swaleak.errors import StandInError

Names = dict[str, Any]
T = TypeVar("T")


class Placeholder:
    """A name of SGLang that swaleak does not provide. It can be held, not used.

    It may be imported, named in an annotation, asked for an attribute, and asked what is an
    instance of it (nothing is). Whoever calls, iterates, compares or subclasses it, or asks whether
    it is true, gets a ``StandInError`` that names it.
    """

    def __init__(self, name: str, touched: set[str]) -> None:
        self._name = name
        self._touched = touched

    def __repr__(self) -> str:
        return f"<{self._name}, not provided>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._touched.add(self._name)
        found = Placeholder(f"{self._name}.{name}", self._touched)
        setattr(self, name, found)  # the same one each time, so that it can be a key
        return found

    def __instancecheck__(self, instance: object) -> bool:
        self._touched.add(self._name)
        return False

    __subclasscheck__ = __instancecheck__

    def _annotation(self, _: object) -> Placeholder:
        return self

    __or__ = __ror__ = __getitem__ = _annotation

    def __eq__(self, other: object) -> bool:
        # no class is this one; and ``typing`` looks for its own forms among annotations
        if isinstance(other, type) or type(other).__module__ == "typing":
            return NotImplemented
        return bool(self._used())

    __hash__ = object.__hash__

    def _used(self, *_: object, **__: object) -> Any:
        raise StandInError(f"it uses {self._name}, which swaleak does not provide")

    __call__ = __iter__ = __bool__ = __len__ = __contains__ = __mro_entries__ = _used
    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __enter__ = __exit__ = _used
    __int__ = __index__ = __float__ = __add__ = __radd__ = __sub__ = __rsub__ = _used
    __mul__ = __rmul__ = __floordiv__ = __mod__ = __and__ = __rand__ = __setitem__ = _used


class KVCache:
    """Base of SGLang's KV pools; the allocator only hands it around."""


class BaseSWAKVPool(KVCache):
    """A hybrid KV pool as far as an allocator sees it: it holds the mapping and translates."""

    full_kv_pool = None
    swa_kv_pool = None
    swa_req_ring_size = None
    request_window = None
    swa_uses_full_indices = False
    full_to_swa_index_mapping: Tensor | None = None

    def register_mapping(self, full_to_swa_index_mapping: Tensor) -> None:
        """Keep the mapping, int64[full slots + page size + 1]."""
        self.full_to_swa_index_mapping = full_to_swa_index_mapping

    def translate_loc_from_full_to_swa(self, kv_indices: Tensor) -> Tensor:
        """Return the SWA peers of full slots, int64[n]."""
        assert self.full_to_swa_index_mapping is not None
        return self.full_to_swa_index_mapping[kv_indices]


class Kernel:
    """A torch function that is launched like a Triton kernel: ``kernel[grid](…)``."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.function


def alloc_extend(
    prefix_lens: Tensor,
    seq_lens: Tensor,
    last_loc: Tensor,
    free_pages: Tensor,
    out_indices: Tensor,
    _bs_upper: int,
    page_size: int,
) -> None:
    """Write the slots of new tokens to ``out_indices``; see ``extend_slots``."""
    out_indices.copy_(extend_slots(prefix_lens, seq_lens, last_loc, free_pages, page_size))


def alloc_decode(
    seq_lens: Tensor,
    last_loc: Tensor,
    free_pages: Tensor,
    out_indices: Tensor,
    _bs_upper: int,
    page_size: int,
) -> None:
    """As ``alloc_extend``, one token a request."""
    out_indices.copy_(extend_slots(seq_lens - 1, seq_lens, last_loc, free_pages, page_size))


def get_and_clear_swa_pages(
    full_page_representatives: Tensor,
    mapping: Tensor,
    page_size: int,
    check_page_mappings: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Look up the SWA page of each full page (named by its first slot) and clear its mapping.

    Returns int64[n] pages, bool[n] "has a peer", and None: page mappings are not checked here.
    """
    swa = mapping[full_page_representatives]
    place = torch.arange(page_size, device=mapping.device)
    start = full_page_representatives // page_size * page_size
    mapping.index_fill_(0, (start[:, None] + place).reshape(-1), 0)
    return swa // page_size, swa > 0, torch.ones_like(swa, dtype=torch.bool)


def get_num_new_pages(
    seq_lens: Tensor, page_size: int, prefix_lens: Tensor | None = None, decode: bool = False
) -> int:
    """Return how many pages it takes to grow requests; a decode step grows each by one token."""
    before = seq_lens - 1 if decode or prefix_lens is None else prefix_lens
    return new_pages(before, seq_lens, page_size)


def get_bool_env_var(name: str, default: str = "false") -> bool:
    """Return whether an environment variable says yes."""
    return os.environ.get(name, default).lower() in ("1", "true")


def ceil_align(size: int, unit: int) -> int:
    """Return the smallest multiple of ``unit`` that is at least ``size``."""
    return -(-size // unit) * unit


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def async_h2d(args: list[Any], *, dtype: torch.dtype, device: Any) -> Tensor:
    """Return a host list as a tensor on ``device``."""
    return torch.tensor(args, dtype=dtype, device=device)


class Bucket(enum.Enum):
    """How bad a broken invariant is."""

    SOFTEN = "soften"
    GUARD = "guard"
    FATAL_CONTAINABLE = "fatal_containable"
    FATAL_UNCONTAINABLE = "fatal_uncontainable"


class IsTrue:
    """The property of being true."""


class Invariant:
    """A declared invariant."""

    def __init__(self, name: str, bucket: Bucket, prop: object, **_: object) -> None:
        self.name, self.bucket, self.prop = name, bucket, prop


def expect(_invariant: Invariant, value: T, *, msg: str = "") -> T:
    """Check nothing, as a server does unless SGLANG_INVARIANT_CHECK is set."""
    return value


def utils(_device: str) -> Names:
    """``sglang.srt.utils`` and ``sglang.srt.utils.common``."""
    return {
        "is_npu": lambda: False,
        "is_hip": lambda: False,
        "is_cuda": torch.cuda.is_available,
        "get_bool_env_var": get_bool_env_var,
        "get_num_new_pages": get_num_new_pages,
        "ceil_align": ceil_align,
        "next_power_of_2": next_power_of_2,
        "async_h2d": async_h2d,
    }


def invariants(_device: str) -> Names:
    """``sglang.srt.utils.invariants``."""
    names = (Bucket, Invariant, IsTrue, expect)
    return {name.__name__: name for name in names}


def memory_pool(_device: str) -> Names:
    """``sglang.srt.mem_cache.memory_pool`` and ``base_swa_memory_pool``."""
    return {"KVCache": KVCache, "BaseSWAKVPool": BaseSWAKVPool}


def platforms(device: str) -> Names:
    """``sglang.srt.platforms``."""
    capabilities = SimpleNamespace(supports_triton=device.startswith("cuda"))
    platform = SimpleNamespace(capabilities=capabilities, get_paged_allocator_cls=lambda: None)
    return {"current_platform": platform}


def settings(_device: str) -> Names:
    """``sglang.srt.server_args`` and ``sglang.srt.runtime_context``: a server without options."""
    given = SimpleNamespace(
        speculative_algorithm=None, strip_thinking_cache=False, page_size=1, enable_metrics=False
    )
    names = ("get_global_server_args", "get_server_args", "get_spec", "get_serving")
    return dict.fromkeys(names, lambda: given)


def npu_hooks(_device: str) -> Names:
    """``sglang.srt.hardware_backend.npu.dsv4.dsv4_common_hooks``: no such hardware here."""
    return {"maybe_evict_dsv4_state_on_swa": lambda *_, **__: None}


def kernels(_device: str) -> Names:
    """The Triton kernels in torch; used where Triton is not."""
    return {
        "alloc_extend_kernel": Kernel(alloc_extend),
        "alloc_decode_kernel": Kernel(alloc_decode),
        "get_and_clear_swa_pages": get_and_clear_swa_pages,
    }


MODULES: dict[str, Callable[[str], Names]] = {
    "sglang.srt.utils": utils,
    "sglang.srt.utils.common": utils,
    "sglang.srt.utils.invariants": invariants,
    "sglang.srt.mem_cache.memory_pool": memory_pool,
    "sglang.srt.mem_cache.base_swa_memory_pool": memory_pool,
    "sglang.srt.platforms": platforms,
    "sglang.srt.hardware_backend.npu.dsv4.dsv4_common_hooks": npu_hooks,
    "sglang.srt.server_args": settings,
    "sglang.srt.runtime_context": settings,
    "sglang.srt.mem_cache.triton_ops.allocator": kernels,
    "sglang.kernels.ops.memory.allocator": kernels,
}


def names_in(module: str, device: str) -> Names:
    """Return what stands in for names of one of SGLang's modules."""
    return MODULES[module](device) if module in MODULES else {}
