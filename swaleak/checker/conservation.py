"""Conservation: every page belongs to somebody; the caches say to whom.

A radix cache makes the calls itself. Who should own what is read off its nodes and the requests
that run, entered in a shadow, and compared with the allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from swaleak.checker.compare import Comparison, Violation, compare, read
from swaleak.checker.page_map import page_map
from swaleak.checker.run import Findings, Run, StepResult, unmet_expectations
from swaleak.checker.shadow import Shadow
from swaleak.errors import RAISED, ScriptError, StandInError, TargetError, format_error
from swaleak.scenario.calls import PoolExhausted
from swaleak.scenario.steps import Expect, Step
from swaleak.scenario.toml import ALLOCATOR, CACHE
from swaleak.targets.driver import State
from swaleak.targets.radix_cache import UNMAPPED, Held, Look, RadixCache, Reader

EAGER = "eager"


def run_on_cache(
    make: Callable[[str], RadixCache],
    strategy: str,
    script: Sequence[Step],
    *,
    keep_steps: bool = False,
) -> Run:
    """Run a script on a cache from ``make(strategy)``, and say whose fault it is if it fails.

    An allocator that carries out every call at once does what it is told: what goes wrong with
    that too, in the same way, is the fault of the cache, and the rest the allocator's. Raises as
    ``run_cache_script``.
    """
    run = run_cache_script(make(strategy), script, keep_steps=keep_steps)
    if not run.kinds:
        return run
    kinds = (run if strategy == EAGER else run_cache_script(make(EAGER), script)).kinds

    def blamed(violation: Violation) -> Violation:
        return replace(violation, fault=CACHE if violation.kind in kinds else ALLOCATOR)

    violations = tuple(map(blamed, run.comparison.violations))
    healed = tuple((at, blamed(violation)) for at, violation in run.healed)
    return replace(run, comparison=replace(run.comparison, violations=violations), healed=healed)


def run_cache_script(tree: RadixCache, script: Iterable[Step], *, keep_steps: bool = False) -> Run:
    """Make all steps on a cache (see ``targets/radix_cache.py``), end what runs, and judge.

    Whose fault it is, is not asked. Raises ``ScriptError`` (with the step) for a step that makes
    no sense, or a pool that is too small, ``TargetError`` where SGLang uses a stand-in in a way
    that it cannot answer.
    """
    findings = Findings()
    results: list[StepResult] = []
    unmet: list[str] = []
    raised: str | None = None
    number = 0

    def look(step: Step | None = None) -> Comparison:
        state, there = tree.state(), tree.look()
        shadow = shadow_of(tree, there)
        comparison = judge(tree, state, shadow, there)
        findings.compared(number, comparison, in_group=tree.in_group)
        if keep_steps and step is not None:
            pages = page_map(read(state), shadow, results[-1].pages if results else ())
            results.append(StepResult(step, comparison, tree.in_group, pages))
        return comparison

    seen = look()
    try:
        for number, step in enumerate(script, start=1):
            if isinstance(step, Expect):
                unmet += unmet_expectations(number, step, seen).values()
            else:
                tree.play(step)
            seen = look(step)
        tree.settle()
    except (PoolExhausted, ScriptError) as error:
        raise ScriptError(f"step {number}: {error}") from None
    except StandInError as error:
        raise TargetError(f"step {number}: {error}") from None
    except RAISED as error:  # whatever SGLang's code raises is a result, not a crash
        raised = format_error(error)
        look()
        findings.raised = (number, raised, False)
    return findings.run(raised=raised, unmet=tuple(unmet), steps=tuple(results))


def shadow_of(tree: RadixCache, there: Look | None = None) -> Shadow:
    """Return a shadow in which everybody owns what they should."""
    sizes = tree.sizes
    shadow = Shadow(sizes.full_pages, sizes.swa_pages, sizes.page_size)
    shadow.in_group = tree.in_group
    for name, owned in (there or tree.look()).owners.items():
        shadow.own(name, owned.full, owned.swa, owned.slots)
    return shadow


def judge(tree: RadixCache, state: State, shadow: Shadow, there: Look) -> Comparison:
    """Compare an allocator with its shadow, and what a cache keeps with what it has to keep."""
    comparison = compare(state, shadow)
    if tree.in_group or not (unkept := tuple(_unkept(tree, state, there))):
        return comparison
    return replace(comparison, violations=(*comparison.violations, *unkept))


def _unkept(tree: RadixCache, state: State, there: Look) -> Iterator[Violation]:
    """Yield what a cache does not keep: every page with one owner, what requests read, its sums."""
    pages = [page for owned in there.owners.values() for page in owned.full]
    if len(set(pages)) < len(pages):
        shared = sorted({page for page in pages if pages.count(page) > 1})
        yield Violation("shared", tuple(shared), "full")
    if there.readers:
        free, swa_free = set(state.full_free.tolist()), set(state.swa_free.tolist())
        for reader in there.readers:
            yield from _stolen(tree, reader, there.nodes, free, swa_free)
    yield from _miscounted(tree, there)


def _stolen(
    tree: RadixCache, reader: Reader, nodes: list[Held], free: set[int], swa_free: set[int]
) -> Iterator[Violation]:
    """Yield the pages that somebody reads and that were taken: freed, or another's now.

    It reads its whole prefix in the full pool, and in the SWA pool the last tokens of a window.
    """
    size, prefix, slots = tree.page_size, reader.prefix, reader.slots
    here = [UNMAPPED] * prefix  # by position, the slot that the tree has there
    for held in nodes:
        start, stop = held.stop - len(held.full), min(held.stop, prefix)
        length = len(held.tokens) if stop == held.stop else stop
        if start < prefix and held.tokens[:length] == reader.tokens[:length]:
            here[start:stop] = held.full[: stop - start]
    if here != slots[:prefix] or not free.isdisjoint([slot // size for slot in slots]):
        taken = {
            at // size
            for at, slot in enumerate(slots)
            if (at < prefix and here[at] != slot) or slot // size in free
        }
        yield Violation("stolen", tuple(sorted(taken)), "full", reader.name)
    start = max(0, reader.start)
    if start < prefix:
        peers = tree.driver.peers(torch.tensor(slots[start:prefix], device="cpu")).tolist()
        taken = {
            at // size
            for at, peer in enumerate(peers, start=start)
            if not peer or peer // size in swa_free
        }
        if taken:
            yield Violation("stolen", tuple(sorted(taken)), "swa", reader.name)


def _miscounted(tree: RadixCache, there: Look) -> Iterator[Violation]:
    """Yield the sums and locks of a cache that are not those of its nodes."""
    locks = {held.node.id: 0 for held in there.nodes}
    parents = {held.node.id: held.node.parent for held in there.nodes}
    for reader in there.readers:
        number = getattr(reader.node, "id", reader.node)
        while number in locks:
            locks[number] += 1
            number = parents[number].id
    sums = dict.fromkeys(("full_evictable", "full_protected", "swa_evictable", "swa_protected"), 0)
    for held in there.nodes:
        count = len(held.full)
        sums["full_protected" if held.full_locks else "full_evictable"] += count
        if not held.tombstone:
            sums["swa_protected" if held.swa_locks else "swa_evictable"] += count
        if locks[held.node.id] != held.full_locks:
            pages = tuple(range(count // tree.page_size))
            yield Violation("miscounted", pages, "locks", held.name)
    for name, count in sums.items():
        if getattr(tree.cache, f"{name}_size")() != count:
            yield Violation("miscounted", (), name)
