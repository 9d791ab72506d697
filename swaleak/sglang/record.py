"""The recorder: turns the calls that reach a live allocator into a trace; see ``script/trace.py``.

A call costs a copy of its slots; names and lines are made when the group ends, for all of its
calls together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swaleak.script.trace import HANDS_OUT, Header, Ranges, TraceWriter, line
from swaleak.sglang.live import Gauge
from swaleak.sglang.watch import FREES, FULL_FREES, RESETS, Hooks, slots_of

MANY = 512  # calls outside groups that are kept at most
PARAMETERS = {
    "alloc_extend": ("prefix_lens", "prefix_lens_cpu", "seq_lens", "seq_lens_cpu", "last_loc"),
    "alloc_decode": ("seq_lens", "seq_lens_cpu", "last_loc"),
}
PARAMETERS["alloc_extend_swa_tail"] = (
    *PARAMETERS["alloc_extend"],
    "extend_num_tokens",
    "swa_tail_len",
)
SHORT = {"alloc_extend": "extend", "alloc_decode": "decode", "alloc_extend_swa_tail": "tail"}


class Kept(NamedTuple):
    """A call that is not written yet. ``full``, ``swa``: int64[n], the slots it is about."""

    op: str
    full: Tensor | None = None
    swa: Tensor | None = None
    rest: dict[str, Any] | None = None


class Numbers:
    """Every slot a pool hands out gets the next number; this is who has which, 8 bytes a slot."""

    def __init__(self, slots: int) -> None:
        self.of_slot = torch.zeros(slots + 1, dtype=torch.int64)
        self.next = 1

    def give(self, slots: Tensor) -> int:
        """Number ``slots``, int64[n], in order. Returns the first number."""
        first = self.next
        self.next = first + len(slots)
        self.of_slot[slots] = torch.arange(first, self.next)
        self.of_slot[0] = 0  # the padding slot is nobody's: "no peer"
        return first

    def ranges(self, several: list[Tensor]) -> list[Ranges]:
        """Return the numbers of slots, int64[n] each, as ranges; see ``script/trace.py``."""
        lengths = [len(slots) for slots in several]
        if not sum(lengths):
            return [[] for _ in several]
        numbers = self.of_slot[torch.cat(several)]
        ends = torch.tensor(lengths).cumsum(0)
        fresh = torch.ones(len(numbers) + 1, dtype=torch.bool)
        nobody = numbers == 0
        follows = (numbers[1:] == numbers[:-1] + 1) & ~nobody[:-1]
        fresh[1:-1] = ~(follows | (nobody[1:] & nobody[:-1]))
        fresh[ends] = True
        starts = fresh.nonzero().reshape(-1)
        firsts = numbers[starts[:-1]].tolist()
        sizes = (starts[1:] - starts[:-1]).tolist()
        pairs = [[first, size] for first, size in zip(firsts, sizes, strict=True)]
        cuts = torch.searchsorted(starts, ends).tolist()
        return [pairs[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]


class Recorder:
    """Writes one allocator's trace. ``fix``: the strategy that is grafted on the class."""

    def __init__(self, allocator: Any, gauge: Gauge, path: str, fix: str | None) -> None:
        self.allocator = allocator
        self.gauge = gauge
        self.fix = fix
        self.writer = TraceWriter(path)
        self.on_host = gauge.mapping.device.type == "cpu"
        self._start()

    def connect(self, hooks: Hooks) -> None:
        """Ask for every call that allocates, frees, points or groups."""
        hooks.add(["alloc"], None, self._alloc)
        for name in PARAMETERS:
            hooks.add([name], None, self._grow(name))
        for name in (*FREES, *FULL_FREES):
            hooks.add([name], self._free(name))
        hooks.add(["clear_full_to_swa_mapping"], self._free("clear"))
        hooks.add(["set_full_to_swa_mapping"], self._point)
        hooks.add(["full.alloc"], None, self._take("full"))
        hooks.add(["swa.alloc"], None, self._take("swa"))
        hooks.add(["full.free"], self._free_full_pool)
        hooks.add(["swa.free"], self._free_swa_pool)
        hooks.add(["free_group_begin"], self._begin)
        hooks.add(RESETS, None, self._reset)

    def _start(self) -> None:
        size = self.gauge.page_size
        full_pages = int(self.allocator.full_attn_allocator.size) // size
        self.writer.start(
            Header(size, full_pages, self.gauge.pages, _sglang_version(), _rank(), self.fix)
        )
        self.kept: list[Kept] = []
        self.last: Ranges = []
        self.full = Numbers(len(self.gauge.mapping))
        self.swa = Numbers((self.gauge.pages + 1) * size)

    def _reset(self, *_: Any) -> None:
        self._write()
        self._start()

    def _alloc(self, _args: Any, _kwargs: Any, result: Tensor | None) -> None:
        if result is not None:
            self._keep(Kept("alloc", result, self.gauge.mapping[result]))

    def _grow(self, name: str) -> Callable[..., None]:
        op, parameters = SHORT[name], PARAMETERS[name]

        def after(args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor | None) -> None:
            if result is None:
                return
            given = dict(zip(parameters, args, strict=False)) | kwargs
            rest: dict[str, Any] = {"seq": given["seq_lens_cpu"].tolist()}
            if "prefix_lens_cpu" in given:
                rest["prefix"] = given["prefix_lens_cpu"].tolist()
            if "swa_tail_len" in given:
                rest["tail"] = int(given["swa_tail_len"])
            last = given["last_loc"].clamp(min=0)  # -1, "no slot before": nobody's, as slot 0
            self._keep(Kept("last", last))
            self._keep(Kept(op, result, self.gauge.mapping[result], rest))

        return after

    def _take(self, pool: str) -> Callable[..., None]:
        def after(_args: Any, _kwargs: Any, result: Tensor | None) -> None:
            if result is not None:
                full, swa = (result, None) if pool == "full" else (None, result)
                self._keep(Kept(f"alloc_{pool}", full, swa))

        return after

    def _free(self, name: str) -> Callable[..., None]:
        def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._keep(Kept(name, slots_of(args, kwargs).clone()))

        return before

    def _point(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        full, swa = (*args, *kwargs.values())
        self._keep(Kept("point", full.clone(), swa.clone()))

    def _free_full_pool(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # a cache that has re-pointed a node clears the newcomer's entries without any call
        slots = slots_of(args, kwargs)
        self._keep(Kept("free_full_pool", slots.clone(), rest={"peers": self.gauge.mapping[slots]}))

    def _free_swa_pool(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._keep(Kept("free_swa_pool", swa=slots_of(args, kwargs).clone()))

    def _begin(self, _args: Any, _kwargs: Any) -> None:
        self._keep(Kept("begin"))

    def ended(self, physical: int, mapped: int) -> None:
        """A group has ended; these are the SWA pages in use and mapped."""
        self.kept.append(Kept("end", rest={"physical": physical, "mapped": mapped}))
        self._write()

    def _keep(self, call: Kept) -> None:
        self.kept.append(call)
        if len(self.kept) > MANY:
            self._write()

    def _write(self) -> None:
        """Write all that is kept. Slots get their numbers in the order of the calls."""
        kept, self.kept = self.kept, []
        if not self.on_host:
            kept = _to_host(kept)
        text: list[str] = []
        waiting: list[Kept] = []
        freed = False
        for call in kept:
            if call.op in HANDS_OUT:
                if freed or call.op in SHORT.values():
                    # what is handed out now may have been freed by a call that still waits
                    self._name(waiting, text)
                    waiting, freed = [], False
                waiting.append(self._number(call))
            else:
                freed = freed or call.op.startswith("free")
                waiting.append(call)
        self._name(waiting, text)
        self.writer.write("".join(text))

    def _number(self, call: Kept) -> Kept:
        """Give numbers to what a call hands out."""
        rest = dict(call.rest or {})
        if call.full is not None:
            rest |= {"full": self.full.give(call.full), "n": len(call.full)}
        if call.swa is not None:
            rest |= {"swa": self.swa.give(call.swa), "n": len(call.swa)}
        return Kept(call.op, rest=rest)

    def _name(self, calls: list[Kept], text: list[str]) -> None:
        """Append the lines of ``calls``, their slots named by numbers."""
        full = iter(self.full.ranges([call.full for call in calls if call.full is not None]))
        swa = iter(self.swa.ranges([call.swa for call in calls if call.swa is not None]))
        for call in calls:
            data = dict(call.rest) if call.rest else {}
            if call.full is not None:
                data["full"] = next(full)
            if call.swa is not None:
                data["swa"] = next(swa)
            if call.op == "last":
                self.last = data["full"]
                continue
            if call.op in SHORT.values():
                data["last"] = self.last
            if "peers" in data:
                data["cleared"] = not bool(data.pop("peers").any())
            text.append(line(call.op, data))


def _to_host(kept: list[Kept]) -> list[Kept]:
    """Return the same calls with their slots on the host: one copy, one wait."""
    tensors = [t for call in kept for t in (call.full, call.swa) if t is not None]
    tensors += [call.rest["peers"] for call in kept if call.rest and "peers" in call.rest]
    if not tensors:
        return kept
    flat = torch.cat([tensor.reshape(-1).long() for tensor in tensors]).cpu()
    split = iter(torch.split(flat, [tensor.numel() for tensor in tensors]))
    moved = [
        call._replace(
            full=None if call.full is None else next(split),
            swa=None if call.swa is None else next(split),
        )
        for call in kept
    ]
    return [
        call._replace(rest=call.rest | {"peers": next(split)})
        if call.rest and "peers" in call.rest
        else call
        for call in moved
    ]


def _sglang_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def _rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return 0
