"""Which operations are legal, by contract: the rules that every search here plays by.

``production`` is what SGLang's caches do. ``latent`` adds what only the allocator's signature
allows. The rules look at the ledger alone, never at an allocator, so that every target is asked
the same questions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType

from swaleak.check.ledger import Ledger, Node
from swaleak.script import ops
from swaleak.script.ops import Op, Part

PRODUCTION, LATENT = "production", "latent"
_NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Rules:
    """A contract and the size of its playground.

    ``nodes``: how many live at once. ``pages``: the largest allocation. ``segments``: the target
    has calls of its own for the slots of one request. ``growth``: nodes may be allocated and
    grown token by token, and with SWA peers for their tail only.
    """

    contract: str = PRODUCTION
    nodes: int = 3
    pages: int = 2
    segments: bool = False
    growth: bool = False

    @property
    def latent(self) -> bool:
        """Whether what only the allocator's signature allows is legal too."""
        return self.contract == LATENT


def legal(ledger: Ledger, rules: Rules, kept: Mapping[str, int] = _NOTHING) -> Iterator[Op]:
    """Yield every legal operation, in an order that depends on nothing but the arguments.

    ``kept``: nodes whose index buffer the allocator still holds, so that overwriting it may
    matter, and the buffer's length in slots. Whether the pools have room is for the caller to find
    out.
    """
    yield from _allocations(ledger, rules)
    for name, node in ledger.nodes.items():
        yield from _frees(name, node, rules)
    for name in ledger.ghosts:
        yield ops.FreeSwa(name)
    yield from _pairs(ledger, rules)
    for name, node in ledger.nodes.items():
        if node.tombstone and (rules.latent or not ledger.in_group):
            yield ops.LoadBack(name)
    if ledger.in_group:
        for name, slots in kept.items():
            for other, node in ledger.nodes.items():
                if other != name and node.slots == slots:
                    yield ops.Overwrite(name, other)
    if rules.latent or not ledger.in_group:
        yield ops.Group("begin")
    if rules.latent or ledger.in_group:
        yield ops.Group("end")


def _allocations(ledger: Ledger, rules: Rules) -> Iterator[Op]:
    if ledger.ghosts:
        return
    if len(ledger.nodes) < rules.nodes:
        name = next(f"n{i}" for i in count(1) if not ledger.knows(f"n{i}"))
        for pages in range(1, rules.pages + 1):
            yield ops.Alloc(name, pages)
        if rules.growth:
            for tokens in _growths(ledger.page_size):
                yield ops.Extend(name, tokens)
            if ledger.page_size > 1:
                for pages in range(1, rules.pages + 1):
                    yield from (ops.AllocTail(name, pages, tail) for tail in range(pages))
    if rules.growth:
        for name, node in ledger.nodes.items():
            if node.swa[-1] is not None and len(node.full) < rules.pages:
                yield ops.Decode(name)
                for tokens in _growths(ledger.page_size):
                    yield ops.Extend(name, tokens)


def _growths(page_size: int) -> list[int]:
    """Return numbers of tokens that end in the middle of a page, at its end, and beyond it."""
    return sorted({1, page_size // 2, page_size, page_size + 1} - {0})


def _frees(name: str, node: Node, rules: Rules) -> Iterator[Op]:
    """A page with a peer may be freed whole or on its SWA side, a tombstone on its full side.

    The caches know which is which, and call ``free_full`` for a tombstone; mixing them up is
    ``latent``.
    """
    for part, pages in _parts(len(node.full)):
        peers = [node.swa[i] is not None for i in pages]
        if not any(peers):
            yield ops.FreeFull(name, part)
        if all(peers) or rules.latent:
            yield ops.Free(name, part)
            yield ops.FreeSwa(name, part)
            if rules.segments:
                yield ops.FreeSegment(name, part)
                yield ops.FreeSwaSegment(name, part)


def _parts(pages: int) -> Iterator[tuple[Part | None, range]]:
    """The whole node, then every run of its pages."""
    yield None, range(pages)
    for start in range(pages):
        for stop in range(start + 1, pages + 1):
            if stop - start < pages:
                yield Part("pages", start, stop), range(start, stop)


def _pairs(ledger: Ledger, rules: Rules) -> Iterator[Op]:
    live = {name: node.slots for name, node in ledger.nodes.items() if node.live}
    for name, node in ledger.nodes.items():
        if node.tombstone:
            for source, slots in live.items():
                if slots == node.slots:
                    yield ops.Recover(name, source)
                    yield ops.Replace(name, source)
                    if rules.latent:
                        yield ops.Adopt(name, source)
    if rules.latent and ledger.freed:
        owned = {page for node in ledger.nodes.values() for page in node.full}
        for name, node in ledger.freed.items():
            if owned.isdisjoint(node.full):  # else somebody has its slots already
                for source, slots in live.items():
                    if slots == node.slots:
                        yield ops.Adopt(name, source)


def in_production(op: Op, ledger: Ledger) -> bool:
    """Whether an operation that makes sense to the ledger is one that SGLang's caches do.

    The same rules as ``legal``'s, asked the other way round: for scripts that come from elsewhere,
    or that have been cut short.
    """
    match op:
        case ops.Group(edge):
            return ledger.in_group == (edge == "end")
        case ops.LoadBack():
            return not ledger.in_group
        case ops.Replace(name, source):
            node, giver = ledger.nodes[name], ledger.nodes[source]
            return node.tombstone and giver.live and node.slots == giver.slots
        case ops.Adopt() | ops.Overwrite():
            return False
        case ops.Free(name, part) | ops.FreeSwa(name, part):
            node = ledger.nodes[name] if name in ledger.nodes else ledger.ghosts[name]
            return all(node.swa[i] is not None for i in ledger.pages_of(node, part))
        case _:
            return True


def needs(op: Op, ledger: Ledger) -> tuple[int, int]:
    """Return how many pages of the full pool and of the SWA pool an operation takes."""
    match op:
        case ops.Alloc(_, pages):
            return pages, pages
        case ops.AllocTail(_, pages, tail):
            return pages, tail
        case ops.Extend(name) | ops.Decode(name):
            node = ledger.nodes.get(name)
            slots, has = (node.slots, len(node.full)) if node else (0, 0)
            tokens = op.tokens if isinstance(op, ops.Extend) else 1
            pages = -(-(slots + tokens) // ledger.page_size) - has
            return pages, pages
        case ops.LoadBack(name):
            return 0, len(ledger.nodes[name].full)
        case _:
            return 0, 0
