"""The steps of an allocator's scenario, each with the calls that it lowers to.

A step names nodes: owners of full slots. ``lower`` yields calls one after the other, so that a
later call sees in the shadow what an earlier one was given; ``rename`` enters afterwards who owns
what. Which step is legal is in ``contract.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct, field

from swaleak.scenario import calls
from swaleak.scenario.calls import MAX_SLOTS, Call, Count, Slots, cut

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
    """One step. ``key``: its name in a scenario file, where it is also the key of its node."""

    key: ClassVar[str] = ""

    def lower(self, shadow: Shadow) -> Iterator[Call]:
        """Yield the calls that this step makes, given who owns what."""
        return iter(())

    def rename(self, shadow: Shadow) -> None:
        """Enter who owns what, once the calls are made."""

    def nodes(self) -> tuple[str, ...]:
        """Return the nodes that it names."""
        return tuple(getattr(self, name) for name in NAMES if hasattr(self, name))

    def __str__(self) -> str:
        return " ".join((self.key, *self.nodes()))


NAMES = ("node", "source")


class Alloc(Step, frozen=True):
    """A new node of whole pages, from both pools."""

    node: Name = field(name="alloc")
    pages: Count = 1

    key: ClassVar[str] = "alloc"

    def lower(self, shadow: Shadow) -> Iterator[Call]:
        """``alloc``, or whole pages of both pools."""
        call = calls.Alloc if shadow.page_size == 1 else calls.AllocPages
        yield call(shadow.full.next, shadow.swa.next, self.pages * shadow.page_size)

    def rename(self, shadow: Shadow) -> None:
        """A new node."""
        slots = self.pages * shadow.page_size
        shadow.name(self.node, ((shadow.full.next - slots, slots),))

    def __str__(self) -> str:
        return f"alloc {self.node}" + (f", {self.pages} pages" if self.pages != 1 else "")


class AllocTail(Step, frozen=True):
    """A new node of full pages, with SWA peers for the last ``tail`` of them only."""

    node: Name = field(name="alloc_tail")
    pages: Count = 1
    tail: FromZero = 1

    key: ClassVar[str] = "alloc_tail"

    def lower(self, shadow: Shadow) -> Iterator[Call]:
        """``alloc_extend_swa_tail`` for a request without a prefix."""
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

    rename = Alloc.rename  # type: ignore[assignment]

    def __str__(self) -> str:
        return f"alloc_tail {self.node}, {self.pages} pages, tail {self.tail}"


class Extend(Step, frozen=True):
    """A node grows by ``tokens`` slots, or is made of them, as a request's does."""

    node: Name = field(name="extend")
    tokens: Count = 1

    key: ClassVar[str] = "extend"

    def lower(self, shadow: Shadow) -> Iterator[Call]:
        """``alloc_extend`` for one request; ``alloc`` at page size 1, as the scheduler does."""
        first, swa, tokens = shadow.full.next, shadow.swa.next, self.tokens
        if shadow.page_size == 1:
            yield calls.Alloc(first, swa, tokens)
            return
        before, last = _grown(shadow, self.node)
        yield calls.AllocExtend(
            first, swa, tokens, prefix=(before,), seq=(before + tokens,), last=last
        )

    def rename(self, shadow: Shadow) -> None:
        """The node has more slots."""
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

    key: ClassVar[str] = "decode"
    tokens: ClassVar[int] = 1

    def lower(self, shadow: Shadow) -> Iterator[Call]:
        """``alloc_decode`` for one request; ``alloc`` at page size 1."""
        first, swa = shadow.full.next, shadow.swa.next
        if shadow.page_size == 1:
            yield calls.Alloc(first, swa, 1)
            return
        before, last = _grown(shadow, self.node)
        yield calls.AllocDecode(first, swa, 1, seq=(before + 1,), last=last)

    rename = Extend.rename  # type: ignore[assignment]


class FreeStep(Step, frozen=True):
    """A free of a node, or of a part of it; a page of which one slot is freed is gone."""

    node: Name
    pages: str | None = None
    slots: str | None = None

    call: ClassVar[type[calls.FreeCall]]

    @property
    def part(self) -> Part | None:
        """The part of the node that is freed, None for all of it."""
        unit = "pages" if self.pages is not None else "slots"
        text = self.pages if self.pages is not None else self.slots
        if text is None:
            return None
        bounds = [int(bound) if bound.strip() else None for bound in text.split(":")]
        return Part(unit, *bounds)

    def lower(self, shadow: Shadow) -> Iterator[Call]:
        """The free of that name."""
        node = self.owner(shadow)
        first, stop = self.bounds(shadow, node)
        yield self.call(cut(node.numbers, first, stop), self.node)

    def owner(self, shadow: Shadow) -> Node:
        """Return the node; for the SWA side, also one whose full side was freed before."""
        return shadow.nodes[self.node] if self.node in shadow.nodes else shadow.freed[self.node]

    def bounds(self, shadow: Shadow, node: Node) -> tuple[int, int]:
        """Return first and stop of the node's slots that are passed."""
        part = self.part
        return (0, node.slots) if part is None else part.slots(node.slots, shadow.page_size)

    def touched(self, shadow: Shadow, node: Node) -> range:
        """Return which of the node's pages are freed."""
        first, stop = self.bounds(shadow, node)
        if first >= stop:
            return range(0)
        return range(first // shadow.page_size, -(-stop // shadow.page_size))

    def rename(self, shadow: Shadow) -> None:
        """The node keeps the rest of its pages, if its full side was freed."""
        if not self.call.full_side:
            if self.node not in shadow.nodes and not any(shadow.peers(self.owner(shadow))):
                del shadow.freed[self.node]
            return
        node, size = shadow.nodes[self.node], shadow.page_size
        gone = self.touched(shadow, node)
        rest = cut(node.numbers, 0, gone.start * size)
        rest += cut(node.numbers, gone.stop * size, node.slots)
        if rest:
            shadow.name(self.node, rest)
        else:
            shadow.drop(self.node)

    def __str__(self) -> str:
        return f"{self.key} {self.node}" + (f", {self.part}" if self.part else "")


class Free(FreeStep, frozen=True):
    """Full slots and their SWA peers are given back."""

    node: Name = field(name="free")

    key: ClassVar[str] = "free"
    call: ClassVar[type[calls.FreeCall]] = calls.Free


class FreeSwa(FreeStep, frozen=True):
    """The SWA peers are given back; what stays is a tombstone."""

    node: Name = field(name="free_swa")

    key: ClassVar[str] = "free_swa"
    call: ClassVar[type[calls.FreeCall]] = calls.FreeSwa


class FreeFull(FreeStep, frozen=True):
    """The full slots of a tombstone are given back."""

    node: Name = field(name="free_full")

    key: ClassVar[str] = "free_full"
    call: ClassVar[type[calls.FreeCall]] = calls.FreeFull


class FreeSegment(FreeStep, frozen=True):
    """As ``free``, through the call for the slots of one request."""

    node: Name = field(name="free_segment")

    key: ClassVar[str] = "free_segment"
    call: ClassVar[type[calls.FreeCall]] = calls.FreeSegment


class FreeSwaSegment(FreeStep, frozen=True):
    """As ``free_swa``, through the call for the slots of one request."""

    node: Name = field(name="free_swa_segment")

    key: ClassVar[str] = "free_swa_segment"
    call: ClassVar[type[calls.FreeCall]] = calls.FreeSwaSegment


class Recover(Step, frozen=True):
    """A tombstone gets the SWA peers of ``source``, which is gone."""

    node: Name = field(name="recover")
    source: Name = field(name="from")

    key: ClassVar[str] = "recover"

    def lower(self, shadow: Shadow) -> Iterator[Call]:
        """Point the node at the peers, clear their old mapping directly, free the full slots."""
        yield from Adopt.lower(self, shadow)  # type: ignore[arg-type]
        yield calls.FreeFullPool(shadow.nodes[self.source].numbers, cleared=False)

    def rename(self, shadow: Shadow) -> None:
        """The source is gone."""
        del shadow.nodes[self.source]

    def __str__(self) -> str:
        return f"{self.key} {self.node} from {self.source}"


class Adopt(Step, frozen=True):
    """A tombstone gets the SWA peers of ``source``, which stays as a tombstone."""

    node: Name = field(name="adopt")
    source: Name = field(name="from")

    key: ClassVar[str] = "adopt"

    def lower(self, shadow: Shadow) -> Iterator[Call]:
        """Point the node at the peers, clear their old mapping directly."""
        node = shadow.nodes[self.node] if self.node in shadow.nodes else shadow.freed[self.node]
        source = shadow.nodes[self.source]
        yield calls.PointAtPeers(node.numbers, source.numbers)
        yield calls.ClearMapping(source.numbers)

    __str__ = Recover.__str__


class Replace(Step, frozen=True):
    """A node is freed and gets all that ``source`` owns, which is gone."""

    node: Name = field(name="replace")
    source: Name = field(name="from")

    key: ClassVar[str] = "replace"

    def lower(self, shadow: Shadow) -> Iterator[Call]:
        """``free_full`` of a tombstone, ``free`` of another node."""
        node = shadow.nodes[self.node]
        call = calls.Free if any(shadow.peers(node)) else calls.FreeFull
        yield call(node.numbers)

    def rename(self, shadow: Shadow) -> None:
        """The source goes by the node's name."""
        shadow.nodes[self.node] = shadow.nodes.pop(self.source)

    __str__ = Recover.__str__


class LoadBack(Step, frozen=True):
    """A tombstone gets fresh SWA pages: HiCache's way back from the host."""

    node: Name = field(name="load_back")

    key: ClassVar[str] = "load_back"

    def lower(self, shadow: Shadow) -> Iterator[Call]:
        """``alloc`` of the SWA pool, ``set_full_to_swa_mapping``."""
        node, first = shadow.nodes[self.node], shadow.swa.next
        yield calls.AllocSwa(first, len(node.pages) * shadow.page_size)
        yield calls.Point(node.numbers, ((first, node.slots),))


class Overwrite(Step, frozen=True):
    """The index tensor last passed to a free of the node is overwritten with another's slots."""

    node: Name = field(name="overwrite")
    source: Name = field(name="from")

    key: ClassVar[str] = "overwrite"

    def lower(self, shadow: Shadow) -> Iterator[Call]:
        """A write of the caller's own."""
        yield calls.Overwrite(self.node, shadow.nodes[self.source].numbers)

    __str__ = Recover.__str__


class Group(Step, frozen=True):
    """``edge`` is "begin" (``free_group_begin``) or "end" (``free_group_end``)."""

    edge: str = field(name="group")

    key: ClassVar[str] = "group"

    def lower(self, shadow: Shadow) -> Iterator[Call]:
        """``free_group_begin`` or ``free_group_end``."""
        yield calls.GroupBegin() if self.edge == "begin" else calls.GroupEnd()

    def __str__(self) -> str:
        return f"group {self.edge}"


class Expect(Step, frozen=True):
    """SWA pages have to be so many here. It makes no call."""

    physical: FromZero | None = None
    mapped: FromZero | None = None

    key: ClassVar[str] = "expect"

    def __str__(self) -> str:
        wanted = {"physical": self.physical, "mapped": self.mapped}
        return "expect " + ", ".join(f"{k} {v}" for k, v in wanted.items() if v is not None)


STEPS: dict[str, type[Any]] = {
    step.key: step
    for step in (
        *(Alloc, AllocTail, Extend, Decode),
        *(Free, FreeSwa, FreeFull, FreeSegment, FreeSwaSegment),
        *(Recover, Adopt, Replace, LoadBack, Overwrite, Group, Expect),
    )
}


MAX_PROMPT_PAGES = 1000
LETTER_STEPS = ("alloc", "insert", "match", "lock", "unlock")
PAGE_STEPS = ("evict_swa", "evict_full")


class CacheStep(Step, frozen=True):
    """A step of a cache's scenario: the cache makes the calls, so it lowers to none.

    ``value``: a prompt, one letter per page, so that ``AB`` and ``AC`` share their first page; or a
    number of pages to evict.
    """

    value: str | int

    def nonsense(self) -> str | None:
        """Return why its value cannot be used, None if it can."""
        value = self.value
        if isinstance(value, int):
            in_range = 1 <= value <= MAX_SLOTS // 4096
            return None if in_range else f"{self.key}: must be a whole number from 1"
        if value.isalpha() and value.isascii() and len(value) <= MAX_PROMPT_PAGES:
            return None
        return f'{self.key} needs a prompt: letters, one per page, such as "AB"'

    def __str__(self) -> str:
        if isinstance(self.value, int):
            return f"{self.key} {self.value} page{'' if self.value == 1 else 's'}"
        return f"{self.key} {self.value}"


def _cache_step(key: str, kind: type) -> type[Any]:
    """Return the class of a cache's step, whose value stands under its name."""
    name = "".join(word.capitalize() for word in key.split("_"))
    return msgspec.defstruct(
        f"Cache{name}",
        [("value", kind, msgspec.field(name=key))],
        bases=(CacheStep,),
        namespace={"key": key},
        frozen=True,
    )


CACHE_STEPS: dict[str, type[Any]] = {
    **{key: _cache_step(key, str) for key in LETTER_STEPS},
    **{key: _cache_step(key, int) for key in PAGE_STEPS},
    "group": Group,
    "expect": Expect,
}


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
