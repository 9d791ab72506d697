"""What is legal: the one place that says which step or call may come now, and what it needs.

A step is *possible* if it makes sense at all: ``refusal`` gives the reason why not. Of the
possible ones, ``production`` allows what SGLang's caches and scheduler do; ``latent`` adds what
only the allocator's signature allows. What is left are mistakes of the caller: a script may make
them, and is told so (``Shadow.mistakes``); no search does. The rules look at the shadow alone,
never at an allocator, so that every target is asked the same questions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count, product
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from swaleak.errors import ScriptError, counted
from swaleak.scenario import request_steps, steps
from swaleak.scenario.cache_steps import CACHE_STEPS, PAGE_STEPS
from swaleak.scenario.calls import Call
from swaleak.scenario.request_steps import RequestStep
from swaleak.scenario.steps import FreeStep, Step

if TYPE_CHECKING:
    from swaleak.checker.shadow import Node, Shadow
    from swaleak.targets.radix_cache import RadixCache
    from swaleak.targets.requests import Requests

PRODUCTION, LATENT = "production", "latent"
CONTRACTS = (PRODUCTION, LATENT)
_NOTHING: Mapping[str, int] = MappingProxyType({})


class Misuse(str):
    """Why a step makes no sense now, though its calls can be made: it is a caller's mistake."""


def refusal(step: Step, shadow: Shadow) -> str | None:
    """Return why a step makes no sense now, None if it does, or is a mistake of the caller."""
    reason = _judge(step, shadow)[0]
    return None if isinstance(reason, Misuse) else reason


def is_legal(step: Step, shadow: Shadow) -> bool:
    """Whether a step makes sense now, and is no mistake of the caller."""
    return _judge(step, shadow)[0] is None


def in_production(step: Step, shadow: Shadow) -> bool:
    """Whether a step makes sense, and is one that SGLang's caches and scheduler make."""
    return _judge(step, shadow)[1]


def _judge(step: Step, shadow: Shadow) -> tuple[str | None, bool]:
    """Return why a step makes no sense now, if it does not, and whether it is in production."""
    nodes, freed = shadow.nodes, shadow.freed
    match step:
        case FreeStep(node):
            if node not in nodes:
                orphan = node in freed and any(shadow.peers(freed[node]))
                if step.call.full_side or not orphan:
                    if node in shadow.gone:
                        return Misuse(f"{step.key} {node}: it was freed before"), False
                    return _absent(step, node)
            peers = _peers(step, shadow)
            if not peers:
                return f"{step.key} {node}: {step.part} refers to no slot", False
            if not isinstance(step, steps.FreeFull):
                return None, all(peers)  # the caches know a tombstone, and call free_full for it
            if any(peers):
                return Misuse(f"free_full {node}: it still has SWA pages"), False
        case steps.Group(edge):
            return None, shadow.in_group == (edge == "end")
        case steps.Recover(node, source) | steps.Adopt(node, source):
            adopts = isinstance(step, steps.Adopt)
            tombstone = nodes.get(node) or (freed.get(node) if adopts else None)
            if tombstone is None or (node not in nodes and any(shadow.peers(tombstone))):
                return _absent(step, node)
            if source not in nodes:
                return _absent(step, source)
            giver = nodes[source]
            if not all(shadow.peers(giver)):
                return f"{step.key}: {source!r} has no SWA pages to give", False
            if tombstone.slots != giver.slots:
                counts = f"{tombstone.slots} and {giver.slots} slots"
                return f"{step.key}: lengths differ, {counts}", False
            if any(shadow.peers(tombstone)):
                return _no_tombstone(step, node), False
            return None, not adopts
        case steps.Replace(node, source):
            for name in (node, source):
                if name not in nodes:
                    return _absent(step, name)
            old, new = nodes[node], nodes[source]
            empty = not any(shadow.peers(old))
            return None, empty and all(shadow.peers(new)) and old.slots == new.slots
        case steps.LoadBack(node):
            if node not in nodes:
                return _absent(step, node)
            if any(shadow.peers(nodes[node])):
                return _no_tombstone(step, node), False
            return None, not shadow.in_group
        case steps.Overwrite(_, source):
            return (None, False) if source in nodes else _absent(step, source)
        case steps.Extend(node) | steps.Decode(node) if node in nodes:
            there = nodes[node]
            if there.slots % shadow.page_size and not shadow.peers(there)[-1]:
                return f"{step.key} {node}: its last page has no SWA peer to go on in", False
            return _no_orphan(shadow)
        case steps.Decode(node):
            return _absent(step, node)
        case steps.AllocTail() if shadow.page_size == 1:
            return "alloc_tail needs a page size above 1", False
        case steps.Alloc(node) | steps.AllocTail(node) | steps.Extend(node):
            if node in nodes or node in shadow.orphans():
                return f"node {node!r} is allocated already", False
            return _no_orphan(shadow)
    return None, True


def request_refusal(step: RequestStep, requests: Requests, *, in_group: bool) -> str | None:
    """Return why SGLang's scheduler does not make a step now, None if it may."""
    if isinstance(step, request_steps.Flush):
        busy = next(iter(requests.running), None)
        if in_group:
            return "flush: a free group is open"
        return f"flush: {busy} is running, and only an idle server is flushed" if busy else None
    assert isinstance(step, request_steps.OneRequest)
    name = step.request
    request = requests.running.get(name)
    if isinstance(step, request_steps.Admit | request_steps.Grow) and in_group:
        return f"{step.key} {name}: a free group is open, in which nothing is allocated"
    if isinstance(step, request_steps.Admit):
        return f"admit {name}: it is running already" if request else None
    if request is None:
        return f"{step.key}: there is no request {name!r} at this point"
    state, decoded = request.state, request.decode_batch_idx
    reason = None
    match step:
        case request_steps.Grow() if state == "prefilled":
            reason = "chunk it first, what it has computed is not in the cache"
        case request_steps.Grow(by=str()) if state == "decoding":
            reason = "it decodes, its prompt does not grow any more"
        case request_steps.Chunk() if state != "prefilled":
            reason = "nothing of its prompt is new"
        case request_steps.Finish() if state == "cached":
            reason = "it has computed nothing since it was cached; grow it first, or abort it"
        case request_steps.Slide() | request_steps.Retract() if state != "decoding":
            reason = "it does not decode yet"
        case request_steps.ReleaseWindow() if not requests.releases:
            reason = "this release has no way to do that"
        case request_steps.ReleaseWindow() if decoded < requests.window:
            reason = f"it has decoded {decoded} tokens of a window of {requests.window}"
        case request_steps.ReleaseWindow() if request.swa_released or not requests.locks_swa(
            request
        ):
            reason = "it holds no SWA lock that ends inside its prefix"
    return reason and f"{step.key} {name}: {reason}"


@dataclass(frozen=True, slots=True)
class RequestRules:
    """The bounds of a search over requests.

    ``requests``: how many run at once. ``pages``: of a prompt, at most, its pages called ``A`` and
    ``B``. ``parts``: prompts also end, and differ, inside a page. ``grouped``: steps in one free
    group, at most.
    """

    requests: int = 2
    pages: int = 3
    parts: bool = False
    grouped: int = 3

    contract: ClassVar[str] = PRODUCTION
    latent: ClassVar[bool] = False

    @property
    def bounds(self) -> str:
        """The bounds as a part of a sentence."""
        return f"{counted(self.requests, 'request')} and prompts of 1 to {self.pages} pages"


def legal_requests(tree: RadixCache, rules: RequestRules, grouped: int) -> Iterator[Step]:
    """Yield every step that SGLang's scheduler may make now, within the bounds.

    ``grouped``: how many were made since a free group has begun. Whether there is room is for the
    caller to find out.
    """
    requests, size = tree.requests, tree.page_size
    running, parts = requests.running, _parts_of_a_page(rules, size)
    steps_: list[Step] = []
    if not tree.in_group:
        new = next(name for name in map("r{}".format, count(1)) if name not in running)
        if len(running) < rules.requests:
            steps_ += [request_steps.Admit(new, prompt) for prompt in _prompts(rules, size)]
        for name, request in running.items():
            if len(request.origin_input_ids) <= (rules.pages - 1) * size:
                steps_ += [request_steps.Grow(name, by) for by in (*"AB", *parts)]
            steps_.append(request_steps.Grow(name))
        steps_.append(steps.Group("begin"))
    if tree.in_group and grouped:
        steps_.append(steps.Group("end"))
    if not tree.in_group or grouped < rules.grouped:
        plain = (request_steps.Chunk, request_steps.Slide, *request_steps.ENDS)
        steps_ += [kind(name) for name in running for kind in plain]
        steps_ += [CACHE_STEPS[key](pages) for key in PAGE_STEPS for pages in (1, 2)]
    for step in steps_:
        if not isinstance(step, RequestStep) or not request_refusal(
            step, requests, in_group=tree.in_group
        ):
            yield step


@cache
def _parts_of_a_page(rules: RequestRules, page_size: int) -> tuple[str, ...]:
    """Return prompts of less than a page."""
    parts = sorted({1, page_size - 1} - {0}) if rules.parts and page_size > 1 else []
    return tuple(f"A/{part}" for part in parts)


@cache
def _prompts(rules: RequestRules, page_size: int) -> tuple[str, ...]:
    whole = ["".join(word) for n in range(1, rules.pages + 1) for word in product("AB", repeat=n)]
    parts = _parts_of_a_page(rules, page_size)
    ends = [word + part for word in ("", *whole) for part in parts if len(word) < rules.pages]
    splits = [part + word for part in parts for word in whole if len(word) < rules.pages]
    return *whole, *ends, *splits


@dataclass(frozen=True, slots=True)
class Rules:
    """A contract and the bounds of a search.

    ``nodes``: how many exist at once. ``pages``: the largest allocation. ``segments``: the target
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

    @property
    def bounds(self) -> str:
        """The bounds as a part of a sentence."""
        return f"{counted(self.nodes, 'node')} of 1 to {self.pages} pages"


def legal(shadow: Shadow, rules: Rules, kept: Mapping[str, int] = _NOTHING) -> Iterator[Step]:
    """Yield every legal step, in an order that depends on nothing but the arguments.

    ``kept``: nodes whose index buffer the allocator still holds, so that overwriting it may
    matter, and the buffer's length in slots. Whether the pools have room is for the caller to
    find out.
    """
    for step in _candidates(shadow, rules, kept):
        reason, production = _judge(step, shadow)
        if reason is None and (production or rules.latent):
            yield step


def pages_needed(step: Step, shadow: Shadow) -> tuple[int, int]:
    """Return how many pages the full and the SWA pool have to hand out for a step."""
    if not isinstance(step, ALLOCATES):
        return 0, 0
    full = swa = 0
    for call in step.lower(shadow):
        more_full, more_swa = call.pages_needed(shadow.page_size)
        full, swa = full + more_full, swa + more_swa
    return full, swa


def check_room(step: Step, shadow: Shadow) -> None:
    """Raise ``ScriptError`` if an allocator without groups had too few free pages for a step."""
    needed = pages_needed(step, shadow)
    if not any(needed):
        return
    sizes, in_use = (shadow.full_pages, shadow.swa_pages), shadow.pages_in_use()
    for pool, has, used, asked in zip(("full", "SWA"), sizes, in_use, needed, strict=True):
        if used + asked > has:
            raise ScriptError(
                f"{step}: the {pool} pool is too small, "
                f"{asked} pages asked for, {has - used} of {has} free"
            )


def check_size(call: Call, shadow: Shadow) -> bool:
    """Whether a call asks for no more pages than the pools have in all."""
    full, swa = call.pages_needed(shadow.page_size)
    return full <= shadow.full_pages + 1 and swa <= shadow.swa_pages + 1


ALLOCATES = (steps.Alloc, steps.AllocTail, steps.Extend, steps.Decode, steps.LoadBack)


def _candidates(shadow: Shadow, rules: Rules, kept: Mapping[str, int]) -> Iterator[Step]:
    """Yield every step that may be legal within the bounds.

    Some that are not are left out, since most of a search is spent in here.
    """
    nodes = shadow.nodes
    peers = {name: shadow.peers(node) for name, node in nodes.items()}
    live = [name for name in nodes if all(peers[name])]
    tombstones = [name for name in nodes if not any(peers[name])]
    frees: tuple[type[FreeStep], ...] = (steps.FreeFull, steps.Free, steps.FreeSwa)
    if rules.segments:
        frees += (steps.FreeSegment, steps.FreeSwaSegment)
    yield from _allocations(shadow, rules)
    for name, node in nodes.items():
        possible = frees[1:] if name in live else frees
        if name in tombstones and not rules.latent:
            possible = (steps.FreeFull,)
        for part in _parts(len(node.pages)):
            for free in possible:
                yield free(name, part)
    for name in shadow.freed:
        if name not in nodes:
            yield steps.FreeSwa(name)
    for name in tombstones:
        for source in live:
            if nodes[name].slots == nodes[source].slots:
                yield steps.Recover(name, source)
                yield steps.Replace(name, source)
                if rules.latent:
                    yield steps.Adopt(name, source)
    if rules.latent:
        for name, node in shadow.freed.items():
            if name not in nodes and _untaken(node, nodes.values()):
                for source in live:
                    yield steps.Adopt(name, source)
    for name in tombstones:
        yield steps.LoadBack(name)
    if shadow.in_group:
        for name, slots in kept.items():
            for source, node in nodes.items():
                if source != name and node.slots == slots:
                    yield steps.Overwrite(name, source)
    yield steps.Group("begin")
    yield steps.Group("end")


def _allocations(shadow: Shadow, rules: Rules) -> Iterator[Step]:
    size, nodes = shadow.page_size, shadow.nodes
    if len(nodes) < rules.nodes:
        names = (f"n{i}" for i in count(1))
        name = next(name for name in names if name not in nodes and name not in shadow.freed)
        for pages in range(1, rules.pages + 1):
            yield steps.Alloc(name, pages)
        if rules.growth:
            for tokens in _growths(size):
                yield steps.Extend(name, tokens)
            for pages in range(1, rules.pages + 1):
                yield from (steps.AllocTail(name, pages, tail) for tail in range(pages))
    if rules.growth:
        for name, node in nodes.items():
            if shadow.peers(node)[-1] and len(node.pages) < rules.pages:
                yield steps.Decode(name)
                for tokens in _growths(size):
                    yield steps.Extend(name, tokens)


def _growths(page_size: int) -> list[int]:
    """Return numbers of tokens that end in the middle of a page, at its end, and beyond it."""
    return sorted({1, page_size // 2, page_size, page_size + 1} - {0})


@cache
def _parts(pages: int) -> tuple[str | None, ...]:
    """Return the whole node, then every run of its pages, as slices."""
    runs = [(start, stop) for start in range(pages) for stop in range(start + 1, pages + 1)]
    return None, *(f"{start}:{stop}" for start, stop in runs if stop - start < pages)


def _no_orphan(shadow: Shadow) -> tuple[str | None, bool]:
    """Judge an allocation: nothing may be allocated while a freed node has SWA pages."""
    orphan = next(iter(shadow.orphans()), None)
    if orphan is None:
        return None, True
    return (
        f"the SWA pages of {orphan!r} belong to full slots that are free; "
        f"free_swa it before anything is allocated"
    ), False


def _no_tombstone(step: Step, node: str) -> Misuse:
    return Misuse(f"{step.key} {node}: it is no tombstone, free_swa it first")


def _absent(step: Step, node: str) -> tuple[str, bool]:
    return f"{step.key}: there is no node {node!r} at this point", False


def _peers(step: FreeStep, shadow: Shadow) -> list[int]:
    """Return the SWA pages of the pages that a free touches, 0 for none."""
    node = step.owner(shadow)
    peers, touched = shadow.peers(node), step.touched(shadow, node)
    return peers if len(touched) == len(peers) else peers[touched.start : touched.stop]


def _untaken(node: Node, others: Iterable[Node]) -> bool:
    """Whether nobody has been given the pages of a node that was freed."""
    return all(set(node.pages).isdisjoint(other.pages) for other in others)
