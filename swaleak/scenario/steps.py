"""The steps of an allocator's scenario, each with the calls that it lowers to.

A step names nodes: owners of full slots. ``lower`` yields calls one after the other, so that a
later call sees in the shadow what an earlier one was given; ``rename`` enters afterwards who owns
what. Which step is legal is in ``contract.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec import Meta, Struct, field

from swaleak.scenario import calls
from swaleak.scenario.calls import MAX_SLOTS, Call, Count, Slots

if TYPE_CHECKING:
    from swaleak.checker.shadow import Node, Shadow

Name = Annotated[str, Meta(min_length=1, max_length=80)]
FromZero = Annotated[int, Meta(ge=0, le=MAX_SLOTS)]


class Part(Struct, frozen=True):
    """A Python slice ``start:stop`` of a node, counted in ``unit`` ("pages" or "slots")."""

    unit: str
    start: int | None
    stop: int | None

    def __str__(self) -> str:
        return f"{self.unit} {self.bounds}"

    @property
    def bounds(self) -> str:
        """``0:1``, as a scenario file has it."""
        start = "" if self.start is None else self.start
        stop = "" if self.stop is None else self.stop
        return f"{start}:{stop}"

    def slots(self, total: int, page_size: int) -> tuple[int, int]:
        """Return first and stop of a node's ``total`` slots that this part refers to."""
        scale = page_size if self.unit == "pages" else 1
        start, stop, _ = slice(self.start, self.stop).indices(-(-total // scale))
        return start * scale, min(stop * scale, total)


class Step(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One step. ``key``: its name in a scenario file, the key of its first field."""

    key: ClassVar[str] = ""

    def lower(self, shadow: Shadow) -> Iterator[Call]:
        """Yield the calls that this step makes, given who owns what."""
        return iter(())

    def rename(self, shadow: Shadow) -> None:
        """Enter who owns what, once the calls are made."""

    def nodes(self) -> tuple[str, ...]:
        """Return the nodes that it names."""
        return tuple(getattr(self, name) for name in NAMES if hasattr(self, name))

    def nonsense(self) -> str | None:
        """Return why its values cannot be used whatever came before, None if they can."""
        return None

    def __str__(self) -> str:
        return " ".join((self.key, *self.nodes()))


NAMES = ("node", "source", "request")


class Alloc(Step, frozen=True):
    """A new node of whole pages, from both pools."""

    node: Name = field(name="alloc")
    pages: Count = 1

    def lower(self, shadow: Shadow) -> Iterator[Call]:
        call = calls.Alloc if shadow.page_size == 1 else calls.AllocPages
        yield call(shadow.full.next, shadow.swa.next, self.pages * shadow.page_size)

    def rename(self, shadow: Shadow) -> None:
        slots = self.pages * shadow.page_size
        shadow.name(self.node, ((shadow.full.next - slots, slots),))

    def __str__(self) -> str:
        return f"alloc {self.node}" + (f", {self.pages} pages" if self.pages != 1 else "")


class AllocTail(Step, frozen=True):
    """A new node of full pages, with SWA peers for the last ``tail`` of them only."""

    node: Name = field(name="alloc_tail")
    pages: Count = 1
    tail: FromZero = 1

    def lower(self, shadow: Shadow) -> Iterator[Call]:
        size = shadow.page_size
        tokens = self.pages * size
        yield calls.AllocExtendSwaTail(
            shadow.full.next,
            shadow.swa.next,
            tokens,
            prefix=(0,),
            seq=(tokens,),
            last=((0, 1),),
            tail=self.tail * size,
        )

    rename = Alloc.rename

    def __str__(self) -> str:
        return f"alloc_tail {self.node}, {self.pages} pages, tail {self.tail}"


class Extend(Step, frozen=True):
    """A node grows by ``tokens`` slots, or is made of them, as a request's does."""

    node: Name = field(name="extend")
    tokens: Count = 1

    def lower(self, shadow: Shadow) -> Iterator[Call]:
        first, swa, tokens = shadow.full.next, shadow.swa.next, self.tokens
        if shadow.page_size == 1:
            yield calls.Alloc(first, swa, tokens)
            return
        before, last = _grown(shadow, self.node)
        yield calls.AllocExtend(
            first, swa, tokens, prefix=(before,), seq=(before + tokens,), last=last
        )

    def rename(self, shadow: Shadow) -> None:
        node = shadow.nodes.get(self.node)
        numbers = node.numbers if node else ()
        new = (shadow.full.next - self.tokens, self.tokens)
        if numbers and sum(numbers[-1]) == new[0]:
            numbers, new = numbers[:-1], (numbers[-1][0], numbers[-1][1] + self.tokens)
        shadow.name(self.node, (*numbers, new))

    def __str__(self) -> str:
        return f"extend {self.node}, {self.tokens} tokens"


class Decode(Step, frozen=True):
    """A node grows by one slot."""

    node: Name = field(name="decode")

    tokens: ClassVar[int] = 1

    def lower(self, shadow: Shadow) -> Iterator[Call]:
        first, swa = shadow.full.next, shadow.swa.next
        if shadow.page_size == 1:
            yield calls.Alloc(first, swa, 1)
            return
        before, last = _grown(shadow, self.node)
        yield calls.AllocDecode(first, swa, 1, seq=(before + 1,), last=last)

    rename = Extend.rename


class FreeStep(Step, frozen=True):
    """A free of a node, or of a part of it; a page of which one slot is freed is gone."""

    node: Name
    pages: str | None = None
    slots: str | None = None

    call: ClassVar[type[calls.FreeCall]]

    @property
    def part(self) -> Part | None:
        """The part of the node that is freed, None for all of it."""
        pages, slots = self.pages, self.slots
        if pages is not None:
            return _part("pages", pages)
        return None if slots is None else _part("slots", slots)

    def lower(self, shadow: Shadow) -> Iterator[Call]:
        node = self.owner(shadow)
        numbers = node.numbers
        if (part := self.part) is not None:
            numbers = cut(numbers, *part.slots(node.slots, shadow.page_size))
        yield self.call(numbers, self.node)

    def owner(self, shadow: Shadow) -> Node:
        """Return the node, also if it was freed before."""
        return shadow.nodes.get(self.node) or shadow.gone[self.node]

    def touched(self, shadow: Shadow, node: Node) -> range:
        """Return which of the node's pages are freed."""
        part, size = self.part, shadow.page_size
        if part is None:
            return range(len(node.pages))
        first, stop = part.slots(node.slots, size)
        return range(first // size, -(-stop // size) if first < stop else 0)

    def rename(self, shadow: Shadow) -> None:
        if self.node not in shadow.nodes:
            if not any(shadow.peers(self.owner(shadow))):
                shadow.freed.pop(self.node, None)
            return
        if not self.call.full_side:
            return
        node, size = shadow.nodes[self.node], shadow.page_size
        gone = self.touched(shadow, node)
        if len(gone) == len(node.pages):
            shadow.drop(self.node)
            return
        rest = cut(node.numbers, 0, gone.start * size)
        rest += cut(node.numbers, gone.stop * size, node.slots)
        shadow.name(self.node, rest, node.pages[: gone.start] + node.pages[gone.stop :])

    def __str__(self) -> str:
        return f"{self.key} {self.node}" + (f", {self.part}" if self.part else "")


class Free(FreeStep, frozen=True):
    """Full slots and their SWA peers are given back."""

    node: Name = field(name="free")

    call: ClassVar[type[calls.FreeCall]] = calls.Free


class FreeSwa(FreeStep, frozen=True):
    """The SWA peers are given back; what stays is a tombstone."""

    node: Name = field(name="free_swa")

    call: ClassVar[type[calls.FreeCall]] = calls.FreeSwa


class FreeFull(FreeStep, frozen=True):
    """The full slots of a tombstone are given back."""

    node: Name = field(name="free_full")

    call: ClassVar[type[calls.FreeCall]] = calls.FreeFull


class FreeSegment(FreeStep, frozen=True):
    """As ``free``, through the call for the slots of one request."""

    node: Name = field(name="free_segment")

    call: ClassVar[type[calls.FreeCall]] = calls.FreeSegment


class FreeSwaSegment(FreeStep, frozen=True):
    """As ``free_swa``, through the call for the slots of one request."""

    node: Name = field(name="free_swa_segment")

    call: ClassVar[type[calls.FreeCall]] = calls.FreeSwaSegment


class Recover(Step, frozen=True):
    """A tombstone gets the SWA peers of ``source``, which is gone."""

    node: Name = field(name="recover")
    source: Name = field(name="from")

    def lower(self, shadow: Shadow) -> Iterator[Call]:
        yield from Adopt.lower(self, shadow)  # type: ignore[arg-type]
        yield calls.FreeFullPool(shadow.nodes[self.source].numbers, cleared=False)

    def rename(self, shadow: Shadow) -> None:
        shadow.gone[self.source] = shadow.nodes.pop(self.source)

    def __str__(self) -> str:
        return f"{self.key} {self.node} from {self.source}"


class Adopt(Step, frozen=True):
    """A tombstone gets the SWA peers of ``source``, which stays as a tombstone."""

    node: Name = field(name="adopt")
    source: Name = field(name="from")

    def lower(self, shadow: Shadow) -> Iterator[Call]:
        node = shadow.nodes[self.node] if self.node in shadow.nodes else shadow.freed[self.node]
        source = shadow.nodes[self.source]
        yield calls.PointAtPeers(node.numbers, source.numbers)
        yield calls.ClearMapping(source.numbers)

    __str__ = Recover.__str__


class Replace(Step, frozen=True):
    """A node is freed and gets all that ``source`` owns, which is gone."""

    node: Name = field(name="replace")
    source: Name = field(name="from")

    def lower(self, shadow: Shadow) -> Iterator[Call]:
        node = shadow.nodes[self.node]
        call = calls.Free if any(shadow.peers(node)) else calls.FreeFull
        yield call(node.numbers)

    def rename(self, shadow: Shadow) -> None:
        shadow.nodes[self.node] = shadow.nodes.pop(self.source)

    __str__ = Recover.__str__


class LoadBack(Step, frozen=True):
    """A tombstone gets fresh SWA pages: HiCache's way back from the host."""

    node: Name = field(name="load_back")

    def lower(self, shadow: Shadow) -> Iterator[Call]:
        node, first = shadow.nodes[self.node], shadow.swa.next
        yield calls.AllocSwa(first, len(node.pages) * shadow.page_size)
        yield calls.Point(node.numbers, ((first, node.slots),))


class Overwrite(Step, frozen=True):
    """The index tensor last passed to a free of the node is overwritten with another's slots."""

    node: Name = field(name="overwrite")
    source: Name = field(name="from")

    def lower(self, shadow: Shadow) -> Iterator[Call]:
        yield calls.Overwrite(self.node, shadow.nodes[self.source].numbers)

    __str__ = Recover.__str__


class Group(Step, frozen=True):
    """``edge`` is "begin" (``free_group_begin``) or "end" (``free_group_end``)."""

    edge: str = field(name="group")

    def lower(self, shadow: Shadow) -> Iterator[Call]:
        yield calls.GroupBegin() if self.edge == "begin" else calls.GroupEnd()

    def __str__(self) -> str:
        return f"group {self.edge}"


class Expect(Step, frozen=True):
    """SWA pages have to be so many here. It makes no call."""

    physical: FromZero | None = None
    mapped: FromZero | None = None

    key: ClassVar[str] = "expect"  # its value is a table

    def __str__(self) -> str:
        wanted = {"physical": self.physical, "mapped": self.mapped}
        return "expect " + ", ".join(f"{k} {v}" for k, v in wanted.items() if v is not None)


_STEPS: tuple[type[Step], ...] = (
    *(Alloc, AllocTail, Extend, Decode),
    *(Free, FreeSwa, FreeFull, FreeSegment, FreeSwaSegment),
    *(Recover, Adopt, Replace, LoadBack, Overwrite, Group, Expect),
)
for _step in _STEPS:
    _step.key = _step.key or _step.__struct_encode_fields__[0]
STEPS: dict[str, type[Any]] = {step.key: step for step in _STEPS}


@lru_cache(maxsize=1024)
def _part(unit: str, text: str) -> Part:
    start, stop = (int(bound) if bound.strip() else None for bound in text.split(":"))
    return Part(unit, start, stop)


def cut(numbers: Slots, start: int, stop: int) -> Slots:
    """Return the ``start``-th to the ``stop``-th of slots that are given as ranges of numbers."""
    if len(numbers) == 1:
        first, count = numbers[0]
        kept = min(stop, count) - start
        return ((first + start, kept),) if kept > 0 else ()
    parts = []
    for first, count in numbers:
        low, high = max(0, start), min(count, stop)
        if low < high:
            parts.append((first + low, high - low))
        start, stop = start - count, stop - count
    return tuple(parts)


def ends_in_group(script: tuple[Step, ...]) -> bool:
    """Say whether a free group is open when every step has been made."""
    edges = [step.edge for step in script if isinstance(step, Group)]
    return edges[-1:] == ["begin"]


def _grown(shadow: Shadow, name: str) -> tuple[int, Slots]:
    """Return how many tokens a node has, and the slot of the last one, slot 0 for none."""
    node = shadow.nodes.get(name)
    if node is None:
        return 0, ((0, 1),)
    first, count = node.numbers[-1]
    return node.slots, ((first + count - 1, 1),)
