"""The calls: the only instruction set. Steps lower to calls, and a trace is a file of calls.

A call says what it makes on an allocator (``driver``, see ``targets/driver.py``) and what an
allocator without groups would hold afterwards (``shadow``, see ``checker/shadow.py``).

Slots are not named by their place in the pool: each pool numbers the slots that it hands out,
1, 2, 3, … over the whole run. A call that allocates carries the first numbers of what it is given;
every other call carries ranges of numbers. ``[[7, 2], [30, 1]]`` are the slots with the numbers 7,
8 and 30. Number 0 is no slot: ``[[0, 3]]`` stands for three slots without a peer. So the same
calls can be made on any allocator, whichever pages it hands out.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, NamedTuple

from msgspec import Meta, Struct

SCHEMA = "swaleak-trace/1"
MAX_SLOTS = 2**31  # of a pool
MAX_PAGE_SIZE = 4096
Number = Annotated[int, Meta(ge=0, lt=2**62)]
Count = Annotated[int, Meta(ge=1, le=MAX_SLOTS)]
PageSize = Annotated[int, Meta(ge=1, le=MAX_PAGE_SIZE)]
Slots = tuple[tuple[Number, Number], ...]  # (first number, count)


class PoolExhausted(Exception):
    """A pool has fewer free pages than a call needs."""


class WrongAllocation(RuntimeError):
    """An allocation returned nothing although there was room, or not as many slots as asked for."""


class Call(Struct, frozen=True, tag_field="op", forbid_unknown_fields=True, omit_defaults=True):
    """One call on an allocator, or one direct write of its mapping."""

    op: ClassVar[str]  # its name in a trace, and for a free that of the allocator's method
    code: ClassVar[str]  # the same call as a line of an exported unittest
    allocates: ClassVar[bool] = False

    def make(self, driver: Any, shadow: Any) -> None:
        """Make the call on an allocator, then on its shadow. Raises what the allocator raises."""
        raise NotImplementedError

    def pages_needed(self, page_size: int) -> tuple[int, int]:
        """Return how many pages the full and the SWA pool have to hand out."""
        return 0, 0


class Allocation(Call, frozen=True):
    """``n`` slots from both pools. ``full``, ``swa``: the first numbers of what is handed out."""

    full: Number
    swa: Number
    n: Number

    allocates: ClassVar[bool] = True

    def pages_needed(self, page_size: int) -> tuple[int, int]:
        """Return the pages of ``n`` slots, for both pools."""
        pages = -(-self.n // page_size)
        return pages, pages

    @property
    def mapped(self) -> int:
        """How many of the slots, counted from the last one, have to come with a peer."""
        return self.n

    def ask(self, driver: Any, shadow: Any) -> Any:
        """Return what the allocator hands out, full slots, int64[n], or None."""
        raise NotImplementedError

    def make(self, driver: Any, shadow: Any) -> None:
        """Allocate. Raises ``PoolExhausted`` or ``WrongAllocation``."""
        full = received(self, driver, self.ask(driver, shadow))
        shadow.allocate(self.full, full, self.swa, driver.peers(full), self.mapped)


class Alloc(Allocation, frozen=True, tag="alloc"):
    """``alloc``: at page size 1, slots of both pools."""

    code: ClassVar[str] = "{new} = allocator.alloc({n})"

    def ask(self, driver: Any, shadow: Any) -> Any:
        """Call ``alloc``."""
        return driver.alloc(self.n)


class AllocPages(Allocation, frozen=True, tag="alloc_both"):
    """Whole pages of both pools and a mapping between them, as SGLang's tests allocate."""

    code: ClassVar[str] = "{new} = self.alloc_pages({n})"

    def ask(self, driver: Any, shadow: Any) -> Any:
        """Call ``alloc`` of both pools, then ``set_full_to_swa_mapping``."""
        return driver.alloc_pages(self.n)


class AllocExtend(Allocation, frozen=True, tag="extend"):
    """``alloc_extend``. ``prefix``, ``seq``: tokens per request; ``last``: slot of the last one."""

    code: ClassVar[str] = (
        "{new} = allocator.alloc_extend(*self.growth({prefix}, {seq}, {last}), {n})"
    )

    prefix: tuple[Number, ...]
    seq: tuple[Number, ...]
    last: Slots

    def pages_needed(self, page_size: int) -> tuple[int, int]:
        """Return the pages that the requests grow into, for both pools."""
        grown = zip(self.prefix, self.seq, strict=False)
        pages = sum(-(-after // page_size) - -(-before // page_size) for before, after in grown)
        return pages, pages

    def ask(self, driver: Any, shadow: Any) -> Any:
        """Call ``alloc_extend``."""
        return driver.alloc_extend(self.prefix, self.seq, shadow.full.find(self.last).slots, self.n)


class AllocDecode(Allocation, frozen=True, tag="decode"):
    """``alloc_decode``: one token per request. ``seq``: tokens with it, per request."""

    code: ClassVar[str] = "{new} = allocator.alloc_decode(*self.growth({seq}, {seq}, {last})[2:])"

    seq: tuple[Number, ...]
    last: Slots

    def pages_needed(self, page_size: int) -> tuple[int, int]:
        """Return one page for each request whose last page is full, for both pools."""
        pages = sum((after - 1) % page_size == 0 for after in self.seq)
        return pages, pages

    def ask(self, driver: Any, shadow: Any) -> Any:
        """Call ``alloc_decode``."""
        return driver.alloc_decode(self.seq, shadow.full.find(self.last).slots)


class AllocExtendSwaTail(AllocExtend, frozen=True, tag="tail"):
    """``alloc_extend_swa_tail``: only the last ``tail`` tokens get an SWA peer."""

    code: ClassVar[str] = (
        "{new} = allocator.alloc_extend_swa_tail("
        "*self.growth({prefix}, {seq}, {last}), {n}, {tail})"
    )

    tail: Number

    @property
    def mapped(self) -> int:
        """The tail."""
        return self.tail

    def pages_needed(self, page_size: int) -> tuple[int, int]:
        """Return the full pages that the requests grow into, and the SWA pages of the tail."""
        return super().pages_needed(page_size)[0], -(-self.tail // page_size)

    def ask(self, driver: Any, shadow: Any) -> Any:
        """Call ``alloc_extend_swa_tail``."""
        last = shadow.full.find(self.last).slots
        return driver.alloc_extend_swa_tail(self.prefix, self.seq, last, self.n, self.tail)


class AllocFull(Call, frozen=True, tag="alloc_full"):
    """``full_attn_allocator.alloc``: full slots without peers."""

    code: ClassVar[str] = "{new} = allocator.full_attn_allocator.alloc({n})"

    full: Number
    n: Number

    allocates: ClassVar[bool] = True

    def pages_needed(self, page_size: int) -> tuple[int, int]:
        """Return the pages of ``n`` slots, of the full pool."""
        return -(-self.n // page_size), 0

    def make(self, driver: Any, shadow: Any) -> None:
        """Allocate. Raises ``PoolExhausted`` or ``WrongAllocation``."""
        full = received(self, driver, driver.alloc_full(self.n))
        shadow.allocate(self.full, full)


class AllocSwa(Call, frozen=True, tag="alloc_swa"):
    """``swa_attn_allocator.alloc``: SWA slots that nothing maps to yet."""

    code: ClassVar[str] = "{new_swa} = allocator.swa_attn_allocator.alloc({n})"

    swa: Number
    n: Number

    allocates: ClassVar[bool] = True

    def pages_needed(self, page_size: int) -> tuple[int, int]:
        """Return the pages of ``n`` slots, of the SWA pool."""
        return 0, -(-self.n // page_size)

    def make(self, driver: Any, shadow: Any) -> None:
        """Allocate. Raises ``PoolExhausted`` or ``WrongAllocation``."""
        shadow.allocate_swa(self.swa, received(self, driver, driver.alloc_swa(self.n)))


class Point(Call, frozen=True, tag="point"):
    """``set_full_to_swa_mapping``: full slots get these SWA slots as peers."""

    code: ClassVar[str] = "allocator.set_full_to_swa_mapping({full}, {swa})"

    full: Slots
    swa: Slots

    def make(self, driver: Any, shadow: Any) -> None:
        """Write the mapping. Raises ``ScriptError`` if the lengths differ."""
        full, swa = shadow.full.find(self.full), shadow.swa.find(self.swa)
        shadow.check_lengths(full, swa)
        driver.point(full.slots, swa.slots)
        shadow.point(full, swa)


class PointAtPeers(Call, frozen=True, tag="point_at_peers"):
    """``set_full_to_swa_mapping``: full slots get the SWA peers that ``source`` has now."""

    code: ClassVar[str] = (
        "allocator.set_full_to_swa_mapping({full}, "
        "allocator.translate_loc_from_full_to_swa({source}))"
    )

    full: Slots
    source: Slots

    def make(self, driver: Any, shadow: Any) -> None:
        """Look the peers up in the allocator, and write the mapping."""
        full, source = shadow.full.find(self.full), shadow.full.find(self.source)
        shadow.check_lengths(full, source)
        driver.point(full.slots, driver.translate(source.slots))
        shadow.point_at_peers(full, source)


class ClearMapping(Call, frozen=True, tag="clear"):
    """A direct write, ``full_to_swa_index_mapping[full] = 0``, as SGLang's caches make it."""

    code: ClassVar[str] = "allocator.full_to_swa_index_mapping[{full}] = 0"

    full: Slots

    def make(self, driver: Any, shadow: Any) -> None:
        """Write the mapping."""
        full = shadow.full.find(self.full)
        driver.clear_mapping(full.slots)
        shadow.clear_mapping(full)


class FreeCall(Call, frozen=True):
    """A free of full slots. A page is freed whole, even if only one of its slots is passed.

    ``buffer``: a name for the index tensor that is passed, for ``Overwrite``.
    """

    full: Slots
    buffer: str | None = None

    full_side: ClassVar[bool] = True  # what is freed: the full pages, their SWA peers, or both
    swa_side: ClassVar[bool] = True

    def make(self, driver: Any, shadow: Any) -> None:
        """Free, whoever holds the slots now."""
        swa_side = self.swa_side or not driver.frees_full_alone
        full = shadow.to_free(self.full)
        shadow.about_to_free(full, full_side=self.full_side, swa_side=swa_side)
        passed = driver.index(full.slots)
        if self.buffer is not None:
            shadow.buffers[self.buffer] = passed
        getattr(driver, self.op)(passed)
        shadow.free(full, full_side=self.full_side, swa_side=swa_side)


class Free(FreeCall, frozen=True, tag="free"):
    """``free``."""

    code: ClassVar[str] = "allocator.free({passed})"


class FreeSegment(FreeCall, frozen=True, tag="free_segment"):
    """``free_segment`` with ``start_pos`` 0."""

    code: ClassVar[str] = 'self.segment("free_segment", "free", {passed})'


class FreeSwa(FreeCall, frozen=True, tag="free_swa"):
    """``free_swa``."""

    code: ClassVar[str] = "allocator.free_swa({passed})"

    full_side: ClassVar[bool] = False


class FreeSwaSegment(FreeCall, frozen=True, tag="free_swa_segment"):
    """``free_swa_segment`` with ``start_pos`` 0."""

    code: ClassVar[str] = 'self.segment("free_swa_segment", "free_swa", {passed})'

    full_side: ClassVar[bool] = False


class FreeFull(FreeCall, frozen=True, tag="free_full"):
    """``free_full``: the full slots of a tombstone."""

    code: ClassVar[str] = "self.free_full({passed})"

    swa_side: ClassVar[bool] = False


class FreeFullSegment(FreeCall, frozen=True, tag="free_full_segment"):
    """``free_full_segment`` with ``start_pos`` 0."""

    code: ClassVar[str] = 'self.segment("free_full_segment", "free", {passed})'

    swa_side: ClassVar[bool] = False


class FreeFullPool(Call, frozen=True, tag="free_full_pool"):
    """``full_attn_allocator.free``: past the hybrid allocator.

    ``cleared``: in the recorded run no mapping entry was left; a cache clears them by a direct
    write that no recorder sees, so it is made here.
    """

    code: ClassVar[str] = "allocator.full_attn_allocator.free({full})"

    full: Slots
    cleared: bool

    def make(self, driver: Any, shadow: Any) -> None:
        """Clear what is still mapped, if the recorded run had, and free."""
        full = shadow.to_free(self.full)
        if self.cleared and shadow.maps(full):
            driver.clear_mapping(full.slots)
            shadow.clear_mapping(full)
        shadow.about_to_free(full, full_side=True, swa_side=False)
        driver.free_full_pool(full.slots)
        shadow.free(full, full_side=True, swa_side=False)


class FreeSwaPool(Call, frozen=True, tag="free_swa_pool"):
    """``swa_attn_allocator.free``: past the hybrid allocator."""

    code: ClassVar[str] = "allocator.swa_attn_allocator.free({swa})"

    swa: Slots

    def make(self, driver: Any, shadow: Any) -> None:
        """Free."""
        swa = shadow.swa.find(self.swa)
        driver.free_swa_pool(swa.slots)
        shadow.free_swa_pool(swa)


class Overwrite(Call, frozen=True, tag="overwrite"):
    """The caller overwrites, in place, an index tensor that it has passed to a free."""

    code: ClassVar[str] = "{buffer}.copy_({source})"

    buffer: str
    source: Slots

    def make(self, driver: Any, shadow: Any) -> None:
        """Overwrite. Raises ``ScriptError`` if no such buffer was passed, or the lengths differ."""
        shadow.overwrite(self.buffer, shadow.full.find(self.source))


class GroupBegin(Call, frozen=True, tag="begin"):
    """``free_group_begin``."""

    code: ClassVar[str] = "allocator.free_group_begin()"

    def make(self, driver: Any, shadow: Any) -> None:
        """Open a free group."""
        driver.group_begin()
        shadow.group(opens=True)


class GroupEnd(Call, frozen=True, tag="end"):
    """``free_group_end``. ``physical``, ``mapped``: SWA pages in the recorded run, afterwards."""

    code: ClassVar[str] = "allocator.free_group_end()"

    physical: Number | None = None
    mapped: Number | None = None

    def make(self, driver: Any, shadow: Any) -> None:
        """Flush."""
        driver.group_end()
        shadow.group(opens=False)


def received(call: Call, driver: Any, slots: Any) -> Any:
    """Return what an allocation was given: exactly as many slots as it asked for.

    Raises ``PoolExhausted`` if it was given nothing and there may have been too little, and
    ``WrongAllocation`` otherwise.
    """
    n = call.n  # type: ignore[attr-defined]
    if slots is None:
        state = driver.state()
        free_full, free_swa = len(state.full_free), len(state.swa_free)
        full, swa = call.pages_needed(driver.page_size)
        spare = isinstance(call, AllocExtend | AllocDecode)  # SGLang's estimate may be a page more
        if free_full < full + (full > 0 and spare) or free_swa < swa + (swa > 0 and spare):
            raise PoolExhausted
        raise WrongAllocation(
            f"{call.op} was given nothing, with {free_full} full and {free_swa} SWA pages free"
        )
    if slots.numel() != n:
        raise WrongAllocation(f"{call.op} was given {slots.numel()} slots, not {n}")
    return slots


CALLS: tuple[type[Call], ...] = (
    Alloc,
    AllocPages,
    AllocExtend,
    AllocDecode,
    AllocExtendSwaTail,
    AllocFull,
    AllocSwa,
    Point,
    PointAtPeers,
    ClearMapping,
    Free,
    FreeSegment,
    FreeSwa,
    FreeSwaSegment,
    FreeFull,
    FreeFullSegment,
    FreeFullPool,
    FreeSwaPool,
    Overwrite,
    GroupBegin,
    GroupEnd,
)


class Header(Struct, frozen=True, tag_field="schema", tag=SCHEMA, forbid_unknown_fields=True):
    """What a trace's calls were made on. Pool sizes are pages, without the padding page.

    ``sglang``: its version, if known. ``fix``: the strategy that the plugin had grafted on it.
    """

    page_size: PageSize
    full_pages: Count
    swa_pages: Count
    sglang: str | None = None
    rank: int = 0
    fix: str | None = None


class Line(NamedTuple):
    """A call of a trace, and its line in the file, from 1."""

    number: int
    call: Call


for _call in CALLS:
    _call.op = str(_call.__struct_config__.tag)
