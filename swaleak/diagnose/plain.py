"""A log as it was before something packed, encoded or coloured it. Streams, as all of this does."""

from __future__ import annotations

import codecs
import re
import zlib
from collections.abc import Iterator
from itertools import chain
from typing import Protocol

BLOCK = 2**20  # bytes that are read at a time
LONGEST = 2**12  # bytes of the longest escape sequence that is taken for one
GZIP = b"\x1f\x8b"
OTHERS = {b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}
BOMS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
HEAD = 64  # bytes by which it is told what a log is
# ECMA-48: control sequences (colours), operating system commands (titles, links) and other strings,
# and the short ones. None of them is looked for beyond its line
ESCAPE = re.compile(
    rb"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]"
    rb"|[\]PX^_][^\x07\x1b\n]{0,%d}(?:\x07|\x1b\\)|[ -/]{1,8}[0-~]|[0-OQ-WYZ\\`-~])" % LONGEST
)


class Log(Protocol):
    """What is read: an open binary file."""

    def read(self, size: int, /) -> bytes | None:
        """Return at most ``size`` bytes, none at the end."""


class Plain:
    """A log without its packing, in UTF-8 and without colours.

    ``size``: bytes of the file that were read. ``kinds``: what it was packed and written in.
    ``torn``: whether it is packed, and ends before the packing does.
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        self.size = 0
        self.kinds: list[str] = []
        self.torn = False

    def __iter__(self) -> Iterator[bytes]:
        """Yield the log in blocks.

        Raises ``OSError`` if it cannot be read, is damaged, or is packed with anything but gzip.
        """
        head, blocks = _peek(self.raw())
        for magic, name in OTHERS.items():
            if head.startswith(magic):
                raise OSError(f"packed with {name}, which is not read here: unpack it first")
        if head.startswith(GZIP):
            self.kinds.append("gzip")
            head, blocks = _peek(self.unpacked(blocks))
        if encoding := _encoding(head):
            self.kinds.append("UTF-16")
            blocks = _recoded(blocks, encoding)
        return _uncoloured(blocks)

    def raw(self) -> Iterator[bytes]:
        """Yield what is in the file."""
        while block := self.log.read(BLOCK):
            self.size += len(block)
            yield block

    def unpacked(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        """Yield what was packed, however many members of gzip it is in."""
        member, begun = zlib.decompressobj(31), False
        for block in blocks:
            while block:
                begun = True
                try:
                    yield member.decompress(block, BLOCK)
                except zlib.error:
                    raise OSError("packed with gzip, and damaged") from None
                block = member.unconsumed_tail
                if member.eof:  # another may follow, behind padding
                    block = member.unused_data.lstrip(b"\0")
                    member, begun = zlib.decompressobj(31), False
        self.torn = begun
        yield member.flush()


def _peek(blocks: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """Return how a log begins, and all of it."""
    head = b""
    for block in blocks:
        head += block
        if len(head) >= HEAD:
            break
    return head, chain((head,), blocks)


def _encoding(head: bytes) -> str | None:
    """Return the encoding of a log in UTF-16, which Windows makes of a log that is redirected."""
    if head[:2] in BOMS:
        return BOMS[head[:2]]
    low, high = head[:HEAD:2], head[1:HEAD:2]
    if len(high) > 4 and not any(high) and all(low):
        return "utf-16-le"
    return "utf-16-be" if len(high) > 4 and not any(low) and all(high) else None


def _recoded(blocks: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    for block in blocks:
        yield decoder.decode(block).encode("utf-8", "replace")


def _uncoloured(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield blocks without escape sequences: a colour between two words parts what is looked for.

    Only where there is one are blocks cut at the ends of lines, so that none is taken apart.
    """
    rest = b""
    for block in blocks:
        if not rest and b"\x1b" not in block:
            yield block
            continue
        rest += block
        cut = rest.rfind(b"\n") + 1
        if not cut and len(rest) > BLOCK:
            cut = len(rest) - LONGEST
        if cut:
            yield ESCAPE.sub(b"", rest[:cut])
            rest = rest[cut:]
    yield ESCAPE.sub(b"", rest)
