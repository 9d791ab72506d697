"""The operations a script is made of, one frozen dataclass each.

What each one calls on an allocator is written in ``check/player.py``; what it means for
ownership, in ``check/ledger.py``. Names are nodes: named owners of full slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Part:
    """A Python slice ``start:stop`` of a node, counted in ``unit`` ("pages" or "slots")."""

    unit: str
    start: int | None
    stop: int | None

    def __str__(self) -> str:
        start = "" if self.start is None else self.start
        stop = "" if self.stop is None else self.stop
        return f"{self.unit} {start}:{stop}"

    def slots(self, total: int, page_size: int) -> slice:
        """Return the slice of a node's ``total`` slots that this part names."""
        scale = page_size if self.unit == "pages" else 1
        length = -(-total // scale)
        start, stop, _ = slice(self.start, self.stop).indices(length)
        return slice(start * scale, min(stop * scale, total))


@dataclass(frozen=True, slots=True)
class Alloc:
    """Allocate ``pages`` whole pages from both pools."""

    key: ClassVar[str] = "alloc"
    node: str
    pages: int = 1


@dataclass(frozen=True, slots=True)
class AllocTail:
    """Allocate ``pages`` full pages, with SWA peers for the last ``tail`` of them only."""

    key: ClassVar[str] = "alloc_tail"
    node: str
    pages: int = 1
    tail: int = 1


@dataclass(frozen=True, slots=True)
class Extend:
    """Grow ``node`` by ``tokens`` slots with ``alloc_extend``; one that is not there is new."""

    key: ClassVar[str] = "extend"
    node: str
    tokens: int = 1


@dataclass(frozen=True, slots=True)
class Decode:
    """Grow ``node`` by one slot with ``alloc_decode``."""

    key: ClassVar[str] = "decode"
    node: str


@dataclass(frozen=True, slots=True)
class FreeOp:
    """A free of a node, or of a part of it."""

    key: ClassVar[str] = ""
    node: str
    part: Part | None = None


@dataclass(frozen=True, slots=True)
class Free(FreeOp):
    """Give back full slots and their SWA peers."""

    key: ClassVar[str] = "free"


@dataclass(frozen=True, slots=True)
class FreeSwa(FreeOp):
    """Give back the SWA peers only; the node is a tombstone afterwards."""

    key: ClassVar[str] = "free_swa"


@dataclass(frozen=True, slots=True)
class FreeFull(FreeOp):
    """Give back the full slots of a tombstone."""

    key: ClassVar[str] = "free_full"


@dataclass(frozen=True, slots=True)
class FreeSegment(Free):
    """As ``Free``, through ``free_segment`` (``start_pos`` = 0)."""

    key: ClassVar[str] = "free_segment"


@dataclass(frozen=True, slots=True)
class FreeSwaSegment(FreeSwa):
    """As ``FreeSwa``, through ``free_swa_segment`` (``start_pos`` = 0)."""

    key: ClassVar[str] = "free_swa_segment"


@dataclass(frozen=True, slots=True)
class Recover:
    """Point the tombstone ``node`` at the SWA peers of ``source``; ``source`` is gone."""

    key: ClassVar[str] = "recover"
    node: str
    source: str


@dataclass(frozen=True, slots=True)
class Adopt:
    """As ``Recover``, but ``source`` stays as a tombstone."""

    key: ClassVar[str] = "adopt"
    node: str
    source: str


@dataclass(frozen=True, slots=True)
class Replace:
    """Free ``node`` and give it everything that ``source`` owns; ``source`` is gone."""

    key: ClassVar[str] = "replace"
    node: str
    source: str


@dataclass(frozen=True, slots=True)
class LoadBack:
    """Give the tombstone ``node`` fresh SWA pages (HiCache's way back from the host)."""

    key: ClassVar[str] = "load_back"
    node: str


@dataclass(frozen=True, slots=True)
class Overwrite:
    """The caller overwrites, in place, the index tensor it last passed to free ``node``."""

    key: ClassVar[str] = "overwrite"
    node: str
    source: str


@dataclass(frozen=True, slots=True)
class Group:
    """``edge`` is "begin" (``free_group_begin``) or "end" (``free_group_end``)."""

    key: ClassVar[str] = "group"
    edge: str


@dataclass(frozen=True, slots=True)
class Expect:
    """Assert SWA page counts in the middle of a script."""

    key: ClassVar[str] = "expect"
    physical: int | None = None
    mapped: int | None = None


@dataclass(frozen=True, slots=True)
class TreeOp:
    """A call to a radix cache: ``key`` is the call, ``what`` a prompt or a number of pages.

    See ``script/tree.py``. No allocator is driven with these, so they are no ``Op``.
    """

    key: str
    what: str | int


Op = (
    Alloc
    | AllocTail
    | Extend
    | Decode
    | Free
    | FreeSwa
    | FreeFull
    | FreeSegment
    | FreeSwaSegment
    | Recover
    | Adopt
    | Replace
    | LoadBack
    | Overwrite
    | Group
    | Expect
)
FREES: tuple[type[Free | FreeSwa | FreeFull], ...] = (
    Free,
    FreeSwa,
    FreeFull,
    FreeSegment,
    FreeSwaSegment,
)
PAIRS: tuple[type[Recover | Adopt | Replace | Overwrite], ...] = (
    Recover,
    Adopt,
    Replace,
    Overwrite,
)


def ends_in_group(script: Sequence[Op | TreeOp]) -> bool:
    """Say whether a free group is open when the script has been played."""
    edges = [op.edge for op in script if isinstance(op, Group)]
    return edges[-1:] == ["begin"]


def describe(op: Op | TreeOp) -> str:
    """Return the operation as one short line: ``recover node from incoming``."""
    match op:
        case TreeOp(key, what):
            pages = "page" if what == 1 else "pages"
            return f"{key} {what} {pages}" if isinstance(what, int) else f"{key} {what}"
        case Alloc(node, pages):
            return f"alloc {node}" + (f", {pages} pages" if pages != 1 else "")
        case AllocTail(node, pages, tail):
            return f"alloc_tail {node}, {pages} pages, tail {tail}"
        case Group(edge):
            return f"group {edge}"
        case Expect(physical, mapped):
            wants = {"physical": physical, "mapped": mapped}
            return "expect " + ", ".join(f"{k} {v}" for k, v in wants.items() if v is not None)
        case Extend(node, tokens):
            return f"extend {node}, {tokens} tokens"
        case LoadBack(node) | Decode(node):
            return f"{op.key} {node}"
        case Recover() | Adopt() | Replace() | Overwrite():
            return f"{op.key} {op.node} from {op.source}"
        case _:
            return f"{op.key} {op.node}" + (f", {op.part}" if op.part else "")
