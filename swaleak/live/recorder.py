"""The recorder: turns the calls that reach a live allocator into a trace; see ``trace/format.py``.

A call costs a copy of its slots; names and lines are made when the group ends, for all of its
calls together.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from swaleak.live.auditor import Gauge, Look
from swaleak.live.instrument import (
    EVERY_CALL,
    FREES,
    GROWS,
    POOL_CALLS,
    RESETS,
    Hooks,
    pair_of,
    slots_of,
)
from swaleak.scenario.calls import CALLS, Header
from swaleak.trace.format import UNHEARD, TraceWriter
from swaleak.trace.slot_numbers import Numbers, Ranges

HANDS_OUT = frozenset(call.op for call in CALLS if call.allocates)
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
GROWN = frozenset(GROWS.values())

# a call not written yet: its name, or its line once that is finished; full slots, SWA slots
# (int64[n] each), what else it takes
Kept = tuple[str, Tensor | None, Tensor | None, dict[str, Any] | None]


class Recorder:
    """Writes one allocator's trace to ``path``, with the process number in it.

    ``fix``: the strategy that is grafted on the class, if any. Raises ``OSError`` where no file
    can be made; ``watched`` keeps that from the server.
    """

    def __init__(self, allocator: Any, gauge: Gauge, path: str, fix: str | None) -> None:
        self.allocator = allocator
        self.gauge = gauge
        self.fix = fix
        self.writer = TraceWriter(path)
        self.unheard = False
        self.on_host = gauge.mapping.device.type == "cpu"
        self._start()

    def connect(self, hooks: Hooks) -> None:
        """Ask for every call that allocates, frees, points or groups."""
        if not self.gauge.mapping.is_inference():  # such a tensor counts no writes
            self.version = self.gauge.mapping._version
            hooks.add((*EVERY_CALL, *POOL_CALLS), self._listen, self._settle)
        hooks.add(["alloc"], None, self._alloc)
        for name in PARAMETERS:
            hooks.add([name], None, self._grow(name))
        for name in FREES:
            hooks.add([name], self._free(name))
        hooks.add(["clear_full_to_swa_mapping"], self._free("clear"))
        hooks.add(["set_full_to_swa_mapping"], self._point)
        hooks.add(["full.alloc"], None, self._took_full)
        hooks.add(["swa.alloc"], None, self._took_swa)
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

    def _listen(self, _args: Any, _kwargs: Any) -> None:
        """Take note if the mapping was written since the last call ended, by whoever it was.

        A tensor counts its writes on the host: nobody waits for a device.
        """
        if self.gauge.mapping._version != self.version:
            self.kept.append((UNHEARD, None, None, None))
            self.unheard = True

    def _settle(self, *_: Any) -> None:
        self.version = self.gauge.mapping._version

    def _reset(self, *_: Any) -> None:
        self._write()
        self._start()

    def _alloc(self, _args: Any, _kwargs: Any, result: Tensor | None) -> None:
        if result is not None:
            self._keep(("alloc", result.clone(), self.gauge.peers(result), None))

    def _grow(self, name: str) -> Callable[..., None]:
        op, parameters = GROWS[name], PARAMETERS[name]

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
            self._keep(("last", last, None, None))
            self._keep((op, result.clone(), self.gauge.peers(result), rest))

        return after

    def _took_full(self, _args: Any, _kwargs: Any, result: Tensor | None) -> None:
        if result is not None:
            self._keep(("alloc_full", result.clone(), None, None))

    def _took_swa(self, _args: Any, _kwargs: Any, result: Tensor | None) -> None:
        if result is not None:
            self._keep(("alloc_swa", None, result.clone(), None))

    def _free(self, name: str) -> Callable[..., None]:
        def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.kept.append((name, slots_of(args, kwargs).clone(), None, None))

        return before

    def _point(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        full, swa = pair_of(args, kwargs)
        self._keep(("point", full.clone(), swa.clone(), None))

    def _free_full_pool(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # a cache that has re-pointed a node clears the newcomer's entries without any call
        slots = slots_of(args, kwargs)
        peers = {"peers": self.gauge.peers(slots)}
        self.kept.append(("free_full_pool", slots.clone(), None, peers))

    def _free_swa_pool(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._keep(("free_swa_pool", None, slots_of(args, kwargs).clone(), None))

    def _begin(self, _args: Any, _kwargs: Any) -> None:
        self._keep(("begin", None, None, None))

    def ended(self, look: Look) -> None:
        """A group has ended."""
        counts = {"physical": look.physical, "mapped": self.gauge.mapped()}
        self.kept.append(("end", None, None, counts))
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
        if self.unheard:
            kept, self.unheard = _unexplained(kept), False
        kept = _paired(kept)
        text: list[str] = []
        waiting: list[Kept] = []
        freed = False
        for call in kept:
            op = call[0]
            if op in HANDS_OUT:
                if freed or op in GROWN:
                    # what is handed out now may have been freed by a call that still waits
                    self._name(waiting, text)
                    waiting, freed = [], False
                waiting.append(self._number(call))
            else:
                freed = freed or op.startswith("free")
                waiting.append(call)
        self._name(waiting, text)
        self.writer.write("".join(text))

    def _number(self, call: Kept) -> Kept:
        """Give numbers to what a call hands out. Its line is finished, unless it has a rest."""
        op, full, swa, rest = call
        data = dict(rest) if rest else {}
        if full is not None:
            data["full"], data["n"] = self.full.give(full), full.numel()
        if swa is not None:
            data["swa"], data["n"] = self.swa.give(swa), swa.numel()
        if rest:
            return op, None, None, data
        numbers = "".join(f',"{key}":{value}' for key, value in data.items())
        return f'{{"op":"{op}"{numbers}}}\n', None, None, None

    def _name(self, calls: list[Kept], text: list[str]) -> None:
        """Append the lines of ``calls``, their slots named by numbers."""
        fulls = [call[1] for call in calls if call[1] is not None]
        swas = [call[2] for call in calls if call[2] is not None]
        full, swa = iter(self.full.ranges(fulls)), iter(self.swa.ranges(swas))
        for op, has_full, has_swa, rest in calls:
            if has_swa is None and has_full is not None and op != "last":  # a free, as most are
                more = ""
                if rest is not None:
                    more = ',"cleared":false' if rest["peers"].any() else ',"cleared":true'
                text.append(f'{{"op":"{op}","full":{next(full)}{more}}}\n')
            elif op.startswith("{"):
                text.append(op)
            elif op == "last":
                self.last = next(full)
            else:
                data = dict(rest) if rest else {}
                if has_full is not None:
                    data["full"] = next(full)
                if has_swa is not None:
                    data["swa"] = next(swa)
                if op in GROWN:
                    data["last"] = self.last
                text.append(json.dumps({"op": op, **data}, separators=(",", ":")) + "\n")


def _unexplained(kept: list[Kept]) -> list[Kept]:
    """Leave out the unheard writes that are a cache's own: the trace says what those did.

    A cache that has re-pointed a node clears the newcomer's entries directly, and then frees its
    full slots in their pool.
    """
    return [
        call
        for call, (op, _, _, rest) in zip(kept, [*kept[1:], kept[-1]], strict=True)
        if not (call[0] == UNHEARD and op == "free_full_pool" and rest and not rest["peers"].any())
    ]


def _paired(kept: list[Kept]) -> list[Kept]:
    """Make one call of pages taken from each pool and then mapped to each other."""
    paired: list[Kept] = []
    for call in kept:
        if call[0] == "point" and [op for op, *_ in paired[-2:]] == ["alloc_full", "alloc_swa"]:
            (_, full, _, _), (_, _, swa, _) = paired[-2:]
            if _same(full, call[1]) and _same(swa, call[2]):
                paired[-2:] = [("alloc_both", full, swa, None)]
                continue
        paired.append(call)
    return paired


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def _to_host(kept: list[Kept]) -> list[Kept]:
    """Return the same calls with their slots on the host: one copy, one wait."""
    tensors = [t for _, full, swa, _ in kept for t in (full, swa) if t is not None]
    tensors += [rest["peers"] for *_, rest in kept if rest and "peers" in rest]
    if not tensors:
        return kept
    flat = torch.cat([tensor.reshape(-1).long() for tensor in tensors]).cpu()
    parts = iter(torch.split(flat, [tensor.numel() for tensor in tensors]))
    moved: list[Kept] = [
        (op, None if full is None else next(parts), None if swa is None else next(parts), rest)
        for op, full, swa, rest in kept
    ]
    return [
        (op, full, swa, rest | {"peers": next(parts)} if rest and "peers" in rest else rest)
        for op, full, swa, rest in moved
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
