"""A log in UTF-8 without packing and colours, read as a stream."""

from __future__ import annotations

import codecs
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from itertools import chain
from typing import Any, BinaryIO

BLOCK_BYTES, MAX_LINE_BYTES, MAX_ESCAPE_BYTES = 2**18, 2**20, 2**12
OTHERS = {b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}
# ECMA-48 control sequences (colours), operating system commands (titles, links), short escapes
ESCAPE = re.compile(
    rb"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]"
    rb"|[\]PX^_][^\x07\x1b\n]{0,4096}(?:\x07|\x1b\\)|[ -/]{1,8}[0-~]|[0-OQ-WYZ\\`-~])"
)


class LogText:
    """The blocks of a log.

    ``kinds``: how it was packed and encoded. ``truncated``: it is packed and the file ends before
    the packing does.
    """

    def __init__(self, log: BinaryIO) -> None:
        self.stream: Any = io.BufferedReader(log, BLOCK_BYTES)
        self.kinds: list[str] = []
        self.truncated = False

    def __iter__(self) -> Iterator[bytes]:
        """Raise ``OSError`` if the log cannot be read or is packed with anything but gzip."""
        head = self.stream.peek()
        for magic, name in OTHERS.items():
            if head.startswith(magic):
                raise OSError(f"packed with {name}, which is not read here: unpack it first")
        if head.startswith(b"\x1f\x8b"):
            self.kinds.append("gzip")
            self.stream = gzip.GzipFile(fileobj=self.stream)
        blocks = self._read()
        first = next(blocks, b"")
        blocks = chain((first,), blocks)
        if encoding := _encoding(first[:64]):
            self.kinds.append("UTF-16")
            decoder = codecs.getincrementaldecoder(encoding)("replace")
            blocks = (decoder.decode(block).encode("utf-8", "replace") for block in blocks)
        return _uncoloured(blocks)

    def _read(self) -> Iterator[bytes]:
        try:
            while block := self.stream.read1(BLOCK_BYTES):
                yield block
        except EOFError:
            self.truncated = True
        except (zlib.error, gzip.BadGzipFile):
            raise OSError("packed with gzip, and damaged") from None


def _encoding(head: bytes) -> str | None:
    """Return the encoding of a log in UTF-16, as Windows redirects it; else None."""
    if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    even, odd = head[::2], head[1::2]
    for name, letters, zeros in (("utf-16-le", even, odd), ("utf-16-be", odd, even)):
        if len(odd) > 4 and all(letters) and not any(zeros):
            return name
    return None


def _uncoloured(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield blocks without escape sequences, none of which is cut by the end of a block."""
    rest = b""
    for block in blocks:
        if not rest and b"\x1b" not in block:
            yield block
            continue
        rest += block
        cut = rest.rfind(b"\n") + 1
        if not cut and len(rest) > MAX_LINE_BYTES:
            cut = len(rest) - MAX_ESCAPE_BYTES
        yield ESCAPE.sub(b"", rest[:cut])
        rest = rest[cut:]
    yield ESCAPE.sub(b"", rest)
