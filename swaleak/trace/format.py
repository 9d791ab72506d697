"""Trace files: recorded runs as JSON lines, in calls, so that they replay under another strategy.

The first line is a header; a header further down says that the pools were reset. Every other line
is a call of ``scenario/calls.py``, its name under ``op``. One more operation, ``unheard``, says
that somebody has written the mapping without a call: a trace can be read up to there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Union

import msgspec

from swaleak.errors import ScriptError
from swaleak.scenario.calls import CALLS, MAX_SLOTS, SCHEMA, Call, Header, Line
from swaleak.scenario.toml import explain

MAX_LINE_BYTES = 2**24  # an allocation of a million tokens is a line of a few hundred
PROGRESS_LINES = 4096

Progress = Callable[[int, int], None]  # bytes read, bytes in all


UNHEARD = "unheard"


class Unheard(Call, frozen=True, tag=UNHEARD):
    """Somebody has written the mapping, and no call did."""


_NAMES = [UNHEARD, *(call.op for call in CALLS)]
_decode_call = msgspec.json.Decoder(Union[(*CALLS, Unheard)]).decode
_encode = msgspec.json.Encoder().encode


class TraceWriter:
    """Writes a trace of this process: ``path`` with the process number in front of its ending."""

    def __init__(self, path: str) -> None:
        wanted = Path(path)
        name = f"{wanted.stem}.{os.getpid()}"
        number, own = 1, wanted.with_name(f"{name}{wanted.suffix}")
        while own.exists():  # a second allocator of this process, or an older process
            number += 1
            own = wanted.with_name(f"{name}.{number}{wanted.suffix}")
        self.file = own.open("xb", buffering=0)  # nothing is left to write when it is closed

    def start(self, header: Header) -> None:
        """Write a header."""
        self._write(_encode(header) + b"\n")

    def write(self, text: str) -> None:
        """Hand whole lines to the operating system: they outlive this process."""
        self._write(text.encode())

    def _write(self, data: bytes) -> None:
        while data:  # a disk that is nearly full takes a part first
            data = data[self.file.write(data) :]


class TraceReader:
    """Reads a trace, a line at a time.

    ``progress`` is called now and then with the bytes read and the bytes in all. ``torn``: after
    the last line has been read, a sentence if that line was incomplete, as it is when the process
    was killed while it wrote. Raises ``ScriptError`` with file and line.
    """

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        self.path = path
        self.progress = progress
        self.torn: str | None = None

    def __iter__(self) -> Iterator[Header | Line]:
        number = 0
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                while raw := file.readline(MAX_LINE_BYTES):
                    number += 1
                    if not raw.endswith(b"\n"):
                        if len(raw) == MAX_LINE_BYTES:
                            raise self._error(number, f"longer than {MAX_LINE_BYTES >> 20} MiB")
                        self.torn = f"{self.path}: its last line, {number}, is torn; it is left out"
                        break
                    if self.progress and number % PROGRESS_LINES == 0:
                        self.progress(file.tell(), size)
                    yield self._item(number, raw)
        except OSError as error:
            raise ScriptError(f"{self.path}: {error.strerror or error}") from None
        if number == 0 or (number == 1 and self.torn):
            raise ScriptError(f"{self.path}: holds no complete line, nothing was recorded")

    def _item(self, number: int, raw: bytes) -> Header | Line:
        try:
            call: Call = _decode_call(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return self._header(number, raw, error)
        if number == 1:
            raise self._error(number, f"not a {SCHEMA} header")
        if isinstance(call, Unheard):  # the calls that follow are about a mapping nobody knows
            raise self._error(
                number,
                "the trace is incomplete from here on: somebody wrote the mapping past the "
                f"allocator; its first {number - 1} lines can be replayed",
            )
        return Line(number, call)

    def _header(self, number: int, raw: bytes, error: Exception) -> Header:
        """Return the header that a line is which is no call, or raise what is wrong with it."""
        try:
            data: Any = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise self._error(number, "not a line of JSON") from None
        if not isinstance(data, dict):
            raise self._error(number, "not a JSON object")
        if number > 1 and "schema" not in data:
            op = data.get("op")
            if op not in _NAMES:
                raise self._error(number, f"unknown operation {str(op)[:40]!r}")
            place, reason = explain(str(error))
            raise self._error(number, ": ".join(filter(None, (op, place, reason))))
        if data.get("schema") != SCHEMA:
            raise self._error(number, f"not a {SCHEMA} header")
        try:
            header: Header = msgspec.convert(data, Header)
        except msgspec.ValidationError as wrong:
            place, reason = explain(str(wrong))
            raise self._error(number, ": ".join(filter(None, ("header", place, reason)))) from None
        if max(header.full_pages, header.swa_pages) * header.page_size > MAX_SLOTS:
            raise self._error(number, f"over the limit of {MAX_SLOTS} slots per pool")
        return header

    def _error(self, number: int, reason: str) -> ScriptError:
        return ScriptError(f"{self.path}: line {number}: {reason}")


def read_header(path: Path) -> Header:
    """Return a trace's header. Raises ``ScriptError``."""
    header = next(iter(TraceReader(path)))
    assert isinstance(header, Header)  # the first line is one, or cannot be read
    return header
