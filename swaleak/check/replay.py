"""Drives a script through an allocator, beside a ledger, and says what came out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from swaleak.check.audit import Audit, Audited, audit, audit_of, read
from swaleak.check.ledger import Ledger, Node
from swaleak.check.picture import Page, picture
from swaleak.errors import RAISED, ScriptError, told
from swaleak.script import ops
from swaleak.script.ops import Op, TreeOp, describe


class Allocator(Audited, Protocol):
    """What a script drives. Slots are int64[n] tensors on the allocator's device."""

    page_size: int

    def alloc(self, pages: int) -> Tensor | None:
        """Allocate whole pages from both pools; full slots, or None if a pool is too small."""

    def alloc_tail(self, pages: int, tail: int) -> Tensor | None:
        """Allocate full pages, with peers for the last ``tail`` of them only."""

    def extend(self, prefix: int, last: Tensor | None, tokens: int) -> Tensor | None:
        """Grow a request of ``prefix`` tokens, the last of them in slot ``last``; new slots."""

    def decode(self, prefix: int, last: Tensor) -> Tensor | None:
        """Grow it by one token."""

    def alloc_swa(self, pages: int) -> Tensor | None:
        """Allocate SWA pages only; SWA slots."""

    def free(self, full: Tensor) -> None:
        """Free full slots and their peers."""

    def free_swa(self, full: Tensor) -> None:
        """Free the peers of full slots."""

    def free_full(self, full: Tensor) -> None:
        """Free full slots that have no peers."""

    def free_segment(self, full: Tensor) -> None:
        """As ``free``, through the call for the slots of one request."""

    def free_swa_segment(self, full: Tensor) -> None:
        """As ``free_swa``, through the call for the slots of one request."""

    def free_full_pool(self, full: Tensor) -> None:
        """Free full slots straight in the full pool, past the hybrid allocator."""

    def translate(self, full: Tensor) -> Tensor:
        """Return the SWA slots of full slots, 0 for none."""

    def point(self, full: Tensor, swa: Tensor) -> None:
        """Point full slots at SWA slots."""

    def clear_mapping(self, full: Tensor) -> None:
        """Clear mapping entries by writing the tensor directly, as SGLang's caches do."""

    def group_begin(self) -> None:
        """Open a free group."""

    def group_end(self) -> None:
        """End it."""

    def parts(self) -> tuple[object, ...]:
        """Return the objects whose attributes are the allocator's state."""

    @property
    def substituted(self) -> dict[str, str]:
        """Which calls were made in place of ones that this allocator lacks, so far."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a run: what was done, what the audit then said, and the SWA pages by then."""

    op: Op | TreeOp
    audit: Audit
    in_group: bool
    pages: tuple[Page, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """What came out. ``verdict``: clean, leak, corrupt, refused or error.

    ``audit``: at the end. ``failed_at``: first step (from 1) after which the audit disagreed, or
    at which the allocator raised. ``raised``: what it said. ``unmet``: expectations in the script
    that were not met. ``starved``: the pool ran dry although the ledger says there is room.
    """

    verdict: str
    audit: Audit
    failed_at: int | None = None
    raised: str | None = None
    unmet: tuple[str, ...] = ()
    starved: bool = False
    repeats: int = 1
    substituted: tuple[tuple[str, str], ...] = ()
    steps: tuple[Step, ...] = ()


def replay(
    allocator: Allocator, script: Iterable[Op], *, keep_steps: bool = False, repeat: int = 1
) -> Run:
    """Run a script and judge it.

    The allocator is audited after every step outside a group, and whenever it raises; it raising
    ends the run. With ``repeat`` the script runs again on the same allocator, after all nodes
    that are left have been freed; of the rounds between the first and the last one, only steps
    that expect something are audited, or all if they are kept. Raises ``ScriptError`` (with the
    step) for a step that makes no sense.
    """
    script = tuple(script)
    overwritten = {op.node for op in script if isinstance(op, ops.Overwrite)}
    judge = _Judge(Player(allocator, overwritten), keep_steps)
    for played in range(1, repeat + 1):
        judge.looking = keep_steps or played in (1, repeat)
        if played > 1 and not judge.tidy():
            break
        if not judge.play(script):
            break
    return judge.run(played)


class _Judge:
    """Collects what a run shows, step by step."""

    def __init__(self, player: Player, keep_steps: bool) -> None:
        self.player = player
        self.keep_steps = keep_steps
        self.looking = True
        self.steps: list[Step] = []
        self.unmet: dict[tuple[int, str], str] = {}
        self.audit = audit(player.allocator, player.ledger)
        self.first_bad: tuple[int, Audit] | None = None
        self.raised: tuple[int, str, bool] | None = None
        self.starved = False

    def play(self, script: Iterable[Op], first: int = 1) -> bool:
        """Play all steps; False if the run cannot go on."""
        for number, op in enumerate(script, start=first):
            before = fingerprint(self.player.allocator)
            try:
                self.player.play(op)
            except ScriptError as error:
                raise ScriptError(f"step {number}: {error}") from None
            except Starved:
                self.starved = True
                self._look(number, op)
                if self.first_bad is None:
                    raise ScriptError(
                        f"step {number}: {describe(op)}: the pool is too small, pages that wait "
                        f"for the end of the group are not free yet"
                    ) from None
                return False
            except RAISED as error:  # of SGLang's code: a result, not a crash
                self._look(number, op)
                same = is_refusal(error, before, fingerprint(self.player.allocator))
                self.raised = (number, told(error), same)
                return False
            if self.looking or isinstance(op, ops.Expect):
                self._look(number, op)
        return True

    def tidy(self) -> bool:
        """Between two rounds, free every node that is left."""
        return all(self.play([op], first=0) for op in list(self.player.leftovers()))

    def _look(self, number: int, op: Op) -> None:
        ledger = self.player.ledger
        reading = read(self.player.allocator.state())
        self.audit = audit_of(reading, ledger)
        if self.audit.violations and self.first_bad is None:
            self.first_bad = (number, self.audit)
        if self.keep_steps:
            before = self.steps[-1].pages if self.steps else ()
            pages = picture(reading, ledger, before)
            self.steps.append(Step(op, self.audit, ledger.in_group, pages))
        if isinstance(op, ops.Expect):
            for name in ("physical", "mapped"):
                wanted, there = getattr(op, name), getattr(self.audit, name)
                if wanted is not None and wanted != there:
                    said = f"step {number} expects {name} {wanted}, found {there}"
                    self.unmet.setdefault((number, name), said)

    def run(self, played: int) -> Run:
        """Return the outcome: what was lost first, then what was raised."""
        bad_step, bad = self.first_bad or (None, self.audit)
        verdicts = {self.audit.verdict, bad.verdict}
        verdict: str = next(v for v in ("leak", "corrupt", "clean") if v in verdicts)
        raised = None
        if self.raised:
            step, raised, same = self.raised
            if bad_step is None or bad_step == step:
                verdict, bad_step = ("refused" if same else "error"), step
        return Run(
            verdict=verdict,
            audit=self.audit if self.audit.violations or self.raised else bad,
            failed_at=bad_step,
            raised=raised,
            unmet=tuple(self.unmet.values()),
            starved=self.starved,
            repeats=played,
            substituted=tuple(self.player.allocator.substituted.items()),
            steps=tuple(self.steps),
        )


class Starved(Exception):
    """A pool ran dry although, by the ledger, it should not have."""


class Player:
    """Carries out operations on an allocator and enters them in a ledger.

    Holds, per node, the tensor of its full slots (int64[n]). ``overwritten``: nodes for which the
    caller's buffer has to be a tensor of its own, because the script overwrites it later.
    """

    def __init__(self, allocator: Allocator, overwritten: Iterable[str] = ()) -> None:
        self.allocator = allocator
        self.ledger = Ledger(allocator.page_size)
        self.slots: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.overwritten = frozenset(overwritten)
        state = allocator.state()
        self.full_pages, self.swa_pages = state.full_pages, state.swa_pages

    def play(self, op: Op) -> None:
        """Check, call, enter. Raises ``ScriptError``, ``Starved``, or what the allocator raises."""
        self.ledger.check(op)
        fresh = _CALLS[type(op)](self, op)
        gone = [getattr(op, "node", ""), getattr(op, "source", ""), *self.ledger.freed]
        self.ledger.apply(op, fresh)
        for name in gone:
            if not self.ledger.knows(name):
                self.slots.pop(name, None)
                self.buffers.pop(name, None)

    def leftovers(self) -> Iterator[Op]:
        """Yield what frees every node that is left, group and all."""
        if self.ledger.in_group:
            yield ops.Group("end")
        for name in list(self.ledger.ghosts):
            yield ops.FreeSwa(name)
        for name, node in list(self.ledger.nodes.items()):
            yield ops.FreeFull(name) if node.tombstone else ops.Free(name)

    def _room(self, op: Op, full: int, swa: int) -> None:
        """Raise ``ScriptError`` if, by the ledger, the pools are too small for ``op``."""
        for pool, has, owned, asked in (
            ("full", self.full_pages, self.ledger.full_pages(), full),
            ("SWA", self.swa_pages, self.ledger.swa_pages(), swa),
        ):
            if owned + asked > has:
                raise ScriptError(
                    f"{describe(op)}: the {pool} pool is too small, "
                    f"{asked} pages asked for, {has - owned} of {has} free"
                )

    def _alloc(self, op: ops.Alloc) -> None:
        self._room(op, op.pages, op.pages)
        self._enter(op.node, self.allocator.alloc(op.pages))

    def _alloc_tail(self, op: ops.AllocTail) -> None:
        self._room(op, op.pages, op.tail)
        self._enter(op.node, self.allocator.alloc_tail(op.pages, op.tail))

    def _enter(self, name: str, full: Tensor | None) -> None:
        if full is None:
            raise Starved
        self.slots[name] = full
        first = full[:: self.allocator.page_size]
        self.ledger.allocated(
            name, Node(self._pages(first), self._peers(first), slots=full.numel())
        )

    def _extend(self, op: ops.Extend | ops.Decode) -> None:
        size = self.ledger.page_size
        node = self.ledger.nodes.get(op.node) or Node([], [], 0)
        tokens = op.tokens if isinstance(op, ops.Extend) else 1
        pages = -(-(node.slots + tokens) // size) - len(node.full)
        self._room(op, pages, pages)
        before = self.slots.get(op.node) if node.slots else None
        last = None if before is None else before[-1:]
        if isinstance(op, ops.Decode):
            assert last is not None
            more = self.allocator.decode(node.slots, last)
        else:
            more = self.allocator.extend(node.slots, last, tokens)
        if more is None:
            raise Starved
        slots = self.slots[op.node] = more if before is None else torch.cat((before, more))
        first = slots[len(node.full) * size :: size]
        full, swa = node.full + self._pages(first), node.swa + self._peers(first)
        self.ledger.allocated(op.node, Node(full, swa, node.slots + tokens))

    def _pages(self, slots: Tensor) -> list[int]:
        pages: list[int] = (slots // self.allocator.page_size).tolist()
        return pages

    def _peers(self, first: Tensor) -> list[int | None]:
        swa = self.allocator.translate(first)
        pages = self._pages(swa)
        return [page if slot else None for page, slot in zip(pages, swa.tolist(), strict=True)]

    def _free(self, op: ops.FreeOp) -> None:
        call: Callable[[Tensor], None] = getattr(self.allocator, op.key)
        slots = self.slots[op.node]
        part = slots if op.part is None else slots[op.part.slots(len(slots), self.ledger.page_size)]
        if op.node in self.overwritten:
            self.buffers[op.node] = part = part.clone()
        call(part)
        if op.part is not None and not isinstance(op, ops.FreeSwa):
            self._keep_rest(op)

    def _keep_rest(self, op: ops.FreeOp) -> None:
        size, slots = self.ledger.page_size, self.slots[op.node]
        gone = self.ledger.pages_of(self.ledger.nodes[op.node], op.part)
        rest = torch.cat((slots[: gone.start * size], slots[gone.stop * size :]))
        if rest.numel():  # a node that is gone altogether may still be adopted in this group
            self.slots[op.node] = rest

    def _recover(self, op: ops.Recover) -> None:
        source = self.slots[op.source]
        self.allocator.point(self.slots[op.node], self.allocator.translate(source))
        self.allocator.clear_mapping(source)
        self.allocator.free_full_pool(source)

    def _adopt(self, op: ops.Adopt) -> None:
        source = self.slots[op.source]
        self.allocator.point(self.slots[op.node], self.allocator.translate(source))
        self.allocator.clear_mapping(source)

    def _replace(self, op: ops.Replace) -> None:
        tombstone = self.ledger.nodes[op.node].tombstone
        (self.allocator.free_full if tombstone else self.allocator.free)(self.slots[op.node])
        self.slots[op.node] = self.slots.pop(op.source)

    def _load_back(self, op: ops.LoadBack) -> list[int | None]:
        node = self.ledger.nodes[op.node]
        self._room(op, 0, len(node.full))
        swa = self.allocator.alloc_swa(len(node.full))
        if swa is None:
            raise Starved
        slots = self.slots[op.node]
        self.allocator.point(slots, swa[: len(slots)])
        return list(self._pages(swa[:: self.ledger.page_size]))

    def _overwrite(self, op: ops.Overwrite) -> None:
        buffer, source = self.buffers.get(op.node), self.slots[op.source]
        if buffer is None:
            raise ScriptError(f"overwrite {op.node}: it was not passed to any free yet")
        if buffer.shape != source.shape:
            raise ScriptError(f"overwrite: lengths differ, {len(buffer)} and {len(source)} slots")
        buffer.copy_(source)

    def _group(self, op: ops.Group) -> None:
        (self.allocator.group_begin if op.edge == "begin" else self.allocator.group_end)()

    def _expect(self, op: ops.Expect) -> None:
        """Nothing to call: the judge looks."""


_CALLS: dict[type[Any], Callable[[Player, Any], list[int | None] | None]] = {
    ops.Alloc: Player._alloc,
    ops.AllocTail: Player._alloc_tail,
    ops.Extend: Player._extend,
    ops.Decode: Player._extend,
    **dict.fromkeys(ops.FREES, Player._free),
    ops.Recover: Player._recover,
    ops.Adopt: Player._adopt,
    ops.Replace: Player._replace,
    ops.LoadBack: Player._load_back,
    ops.Overwrite: Player._overwrite,
    ops.Group: Player._group,
    ops.Expect: Player._expect,
}

Fingerprint = list[tuple[object, int]]


def fingerprint(allocator: Allocator) -> Fingerprint:
    """Return something that is the same as long as nothing in the allocator has been written.

    Costs no copy and no synchronisation: tensors are told by identity and version counter, and
    whatever a part keeps in lists, dicts or sets is looked at one by one.
    """
    marks: Fingerprint = []
    for part in allocator.parts():
        for name, value in vars(part).items():
            marks.append((name, 0))
            _mark(value, marks)
    return marks


def _mark(value: object, marks: Fingerprint) -> None:
    if isinstance(value, Tensor):
        marks.append((value, value._version))
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        marks.append((None, len(value)))
        for item in value:
            _mark(item, marks)
    elif isinstance(value, dict):
        marks.append((None, len(value)))
        for key, item in value.items():
            marks.append((key, 0))
            _mark(item, marks)
    elif value is None or isinstance(value, (bool, int, float, str)):
        marks.append((value, 0))


def unchanged(before: Fingerprint, after: Fingerprint) -> bool:
    """Whether two fingerprints are of one state."""
    return len(before) == len(after) and all(
        (a is b or (not isinstance(a, Tensor) and a == b)) and m == n
        for (a, m), (b, n) in zip(before, after, strict=True)
    )


# what a mistake in the code raises, and no author of a check
MISTAKES = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    RecursionError,
    SystemExit,
    TypeError,
)


def is_refusal(error: BaseException, before: Fingerprint, after: Fingerprint) -> bool:
    """Whether an allocator that raised has refused: on purpose, and with nothing changed."""
    return not isinstance(error, MISTAKES) and unchanged(before, after)
