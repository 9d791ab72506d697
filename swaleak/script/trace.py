"""Recorded runs: JSON lines, in terms of allocations, so that they replay under another strategy.

The first line is a header; a header further down says that the pools were reset. Every other line
is a call. Slots are not named by their place in the pool: each pool numbers the slots it hands out,
1, 2, 3, … over the whole run, and an allocation is named by its first number. ``[[7, 2], [30, 1]]``
are the slots with numbers 7, 8 and 30: two slots of one allocation, and one of another. Number 0
is nobody's: ``[0, 3]`` stands for three times "no peer".

====================  =============================  ==============================================
``op``                takes                          is
====================  =============================  ==============================================
``alloc``             ``full swa n``                 ``alloc(n)`` at page size 1
``extend``            ``full swa n prefix seq last`` ``alloc_extend``
``decode``            ``full swa n seq last``        ``alloc_decode``
``tail``              as extend, and ``tail``        ``alloc_extend_swa_tail``
``alloc_both``        ``full swa n``                 the next two and a ``point``, in one line
``alloc_full``        ``full n``                     ``full_attn_allocator.alloc(n)``
``alloc_swa``         ``swa n``                      ``swa_attn_allocator.alloc(n)``
``point``             ``full swa``                   ``set_full_to_swa_mapping``
``clear``             ``full``                       ``clear_full_to_swa_mapping``
``free``, ``free_…``  ``full``                       the call of that name
``free_full_pool``    ``full cleared``               ``full_attn_allocator.free``; ``cleared``: no
                                                     mapping entry was left
``free_swa_pool``     ``swa``                        ``swa_attn_allocator.free``
``begin``, ``end``    ``physical mapped``            a free group; SWA pages when it had ended
``unheard``                                          somebody has written the mapping, no call did
====================  =============================  ==============================================

In those that hand out, ``full`` and ``swa`` are the first numbers of what was handed out;
everywhere else they are ranges.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from swaleak.errors import ScriptError
from swaleak.script.scenario import MAX_PAGE_SIZE, MAX_SLOTS

SCHEMA = "swaleak-trace/1"
MAX_LINE = 2**24  # bytes; an allocation of a million tokens is a line of a few hundred
# calls of the allocator that are lines under their own names
PEER_FREES = ("free", "free_swa", "free_segment", "free_swa_segment")  # the SWA side goes
FULL_FREES = ("free_full", "free_full_segment")
FREES = (*PEER_FREES, *FULL_FREES)
# the allocator's call -> the line's name
GROWS = {"alloc_extend": "extend", "alloc_decode": "decode", "alloc_extend_swa_tail": "tail"}
UNHEARD = "unheard"
NEEDS: dict[str, tuple[str, ...]] = {
    "alloc": ("full", "swa", "n"),
    "alloc_both": ("full", "swa", "n"),
    "alloc_full": ("full", "n"),
    "alloc_swa": ("swa", "n"),
    "extend": ("full", "swa", "n", "prefix", "seq", "last"),
    "tail": ("full", "swa", "n", "prefix", "seq", "last", "tail"),
    "decode": ("full", "swa", "n", "seq", "last"),
    "point": ("full", "swa"),
    "clear": ("full",),
    **dict.fromkeys(FREES, ("full",)),
    "free_full_pool": ("full", "cleared"),
    "free_swa_pool": ("swa",),
    "begin": (),
    "end": ("physical", "mapped"),
    UNHEARD: (),
}

Ranges = list[list[int]]
HANDS_OUT = frozenset({"alloc", "alloc_both", "alloc_full", "alloc_swa", *GROWS.values()})


@dataclass(frozen=True, slots=True)
class Header:
    """What a trace was recorded on. Pool sizes are pages, without the padding page.

    ``sglang``: its version, if known. ``fix``: the strategy that the plugin had grafted on it.
    """

    page_size: int
    full_pages: int
    swa_pages: int
    sglang: str | None = None
    rank: int = 0
    fix: str | None = None


class Line(NamedTuple):
    """One call. ``number``: its line in the file, from 1. ``data``: as in the table above."""

    number: int
    op: str
    data: dict[str, Any]


def line(op: str, data: dict[str, Any]) -> str:
    """Return a call as a line."""
    return json.dumps({"op": op, **data}, separators=(",", ":")) + "\n"


class TraceWriter:
    """Writes a trace of this process: ``path`` with the process number in front of its ending."""

    def __init__(self, path: str) -> None:
        wanted = Path(path)
        name = f"{wanted.stem}.{os.getpid()}"
        number, mine = 1, wanted.with_name(f"{name}{wanted.suffix}")
        while mine.exists():  # a second allocator of this process, or an older process
            number += 1
            mine = wanted.with_name(f"{name}.{number}{wanted.suffix}")
        self.file = mine.open("xb", buffering=0)  # nothing is left to write when it is closed

    def start(self, header: Header) -> None:
        """Write a header."""
        self.write(json.dumps({"schema": SCHEMA, **asdict(header)}) + "\n")

    def write(self, text: str) -> None:
        """Hand whole lines to the operating system: they outlive this process."""
        data = text.encode()
        while data:  # a disk that is nearly full takes a part first
            data = data[self.file.write(data) :]


class TraceReader:
    """Reads a trace, a line at a time.

    ``torn``: after the last line has been read, a sentence if that line was incomplete, as it is
    when the process was killed while it wrote. Raises ``ScriptError`` with file and line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn: str | None = None

    def __iter__(self) -> Iterator[Header | Line]:
        number = 0
        try:
            with self.path.open("rb") as file:
                while raw := file.readline(MAX_LINE):
                    number += 1
                    if not raw.endswith(b"\n"):
                        if len(raw) == MAX_LINE:
                            raise self._error(number, f"longer than {MAX_LINE >> 20} MiB")
                        self.torn = f"{self.path}: its last line, {number}, is torn; it is left out"
                        break
                    yield self._item(number, raw)
        except OSError as error:
            raise ScriptError(f"{self.path}: {error.strerror or error}") from None
        if number == 0 or (number == 1 and self.torn):
            raise ScriptError(f"{self.path}: holds no complete line, nothing was recorded")

    def _item(self, number: int, raw: bytes) -> Header | Line:
        try:
            text = str(raw, "utf-8").strip()
            data, end = _decode(text)
        except (ValueError, RecursionError):
            raise self._error(number, "not a line of JSON") from None
        if end != len(text):
            raise self._error(number, "not a line of JSON")
        if not isinstance(data, dict):
            raise self._error(number, "not a JSON object")
        if number == 1 or "schema" in data:
            return self._header(number, data)
        op = data.pop("op", None)
        if not isinstance(op, str) or op not in NEEDS:
            raise self._error(number, f"unknown operation {op!r}")
        if op == UNHEARD:  # what follows is about a mapping that nobody knows: no verdict
            raise self._error(
                number,
                "the trace is incomplete from here on: somebody wrote the mapping past the "
                f"allocator; its first {number - 1} lines can be replayed",
            )
        checks = _CHECKS[op]
        if data.keys() != checks.keys():
            raise self._error(number, f"{op} takes {', '.join(NEEDS[op]) or 'nothing'}")
        for key, value in data.items():
            if not checks[key](value):
                raise self._error(number, f"{op}: {key} is {str(value)[:40]!r}")
        return Line(number, op, data)

    def _header(self, number: int, data: dict[str, Any]) -> Header:
        if data.pop("schema", None) != SCHEMA:
            raise self._error(number, f"not a {SCHEMA} header")
        try:
            header = Header(**data)
        except TypeError:
            raise self._error(number, "a header with unknown or missing keys") from None
        sizes = (header.page_size, header.full_pages, header.swa_pages)
        if not all(type(size) is int and size > 0 for size in sizes):
            raise self._error(number, "sizes in a header must be whole numbers above 0")
        pages = max(header.full_pages, header.swa_pages)
        if header.page_size > MAX_PAGE_SIZE or pages * header.page_size > MAX_SLOTS:
            raise self._error(number, f"over the limit of {MAX_SLOTS} slots a pool")
        known = (header.sglang, str), (header.fix, str), (header.rank, int)
        if not all(value is None or isinstance(value, kind) for value, kind in known):
            raise self._error(number, "a header whose sglang, fix or rank is of another kind")
        return header

    def _error(self, number: int, reason: str) -> ScriptError:
        return ScriptError(f"{self.path}: line {number}: {reason}")


def read_header(path: Path) -> Header:
    """Return a trace's header. Raises ``ScriptError``."""
    header = next(iter(TraceReader(path)))
    assert isinstance(header, Header)  # the first line is one, or cannot be read
    return header


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _are_numbers(value: Any) -> bool:
    return type(value) is list and all(map(_is_number, value))


def _are_ranges(value: Any) -> bool:
    if type(value) is not list:
        return False
    for part in value:
        if type(part) is not list or len(part) != 2:
            return False
        first, count = part
        if type(first) is not int or type(count) is not int:
            return False
        if not (0 <= first < 2**62 and 0 <= count < 2**62):
            return False
    return True


def _check(op: str, key: str) -> Callable[[Any], bool]:
    match key:
        case "full" | "swa" if op in HANDS_OUT:
            return _is_number
        case "full" | "swa" | "last":
            return _are_ranges
        case "prefix" | "seq":
            return _are_numbers
        case "cleared":
            return lambda value: type(value) is bool
        case _:
            return _is_number


_CHECKS = {op: {key: _check(op, key) for key in keys} for op, keys in NEEDS.items()}
_decode = json.JSONDecoder().raw_decode
