"""Conservation: every page belongs to somebody; the caches say to whom.

A radix cache makes the calls itself. Who should own what is read off its nodes and the requests
that run, entered in a shadow, and compared with the allocator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from swaleak.checker.compare import Comparison, Reading, Violation, compare_pages, read
from swaleak.checker.page_map import page_map
from swaleak.checker.run import Findings, Run, StepResult, unmet_expectations
from swaleak.checker.shadow import Shadow
from swaleak.errors import RAISED, ScriptError, StandInError, TargetError, format_error
from swaleak.scenario.calls import PoolExhausted
from swaleak.scenario.request_steps import prompt_of
from swaleak.scenario.steps import Expect, Step
from swaleak.targets.radix_cache import UNMAPPED, RadixCache, Reader

CACHE = "cache"

def run_cache_script(tree: RadixCache, script: Iterable[Step], *, keep_steps: bool = False) -> Run:
    """Make all steps on a cache (see ``targets/radix_cache.py``), drop its locks, and judge.

    Raises ``ScriptError`` (with the step) if a pool is too small for the script.
    """
    findings = Findings()
    results: list[StepResult] = []
    unmet: list[str] = []
    raised: str | None = None
    number = 0

    def look(step: Step | None = None) -> Comparison:
        reading, shadow = read(tree.state()), shadow_of(tree)
        comparison = compare_pages(reading, shadow)
        if not tree.in_group:
            violations = (*comparison.violations, *unkept(tree, reading))
            comparison = replace(comparison, violations=violations)
        findings.compared(number, comparison, in_group=tree.in_group)
        if keep_steps and step is not None:
            pages = page_map(reading, shadow, results[-1].pages if results else ())
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


def unkept(tree: RadixCache, reading: Reading) -> Iterator[Violation]:
    """Yield what a cache does not keep: every page with one owner, what requests read, its sums."""
    nodes = [(tokens, node, tree.held(node)) for tokens, node in tree.nodes()]
    owners: dict[int, int] = {}
    for owned in tree.owners().values():
        for page in owned.full:
            owners[page] = owners.get(page, 0) + 1
    if shared := tuple(sorted(page for page, count in owners.items() if count > 1)):
        yield Violation("shared", shared, "full", fault=CACHE)
    for reader in tree.readers():
        yield from _stolen(tree, reader, nodes, reading)
    yield from _miscounted(tree, nodes)


def _stolen(tree: RadixCache, reader: Reader, nodes: list[Any], reading: Reading) -> Iterator[Any]:
    """Yield the pages that somebody reads and that were taken: freed, or another's now.

    It reads its whole prefix in the full pool, and in the SWA pool the last tokens of a window.
    """
    size, prefix, slots = tree.page_size, reader.prefix, reader.slots
    there = [UNMAPPED] * prefix  # by position, the slot that the tree has there
    for path, _, held in nodes:
        start, stop = len(path) - len(held.full), min(len(path), prefix)
        if start < prefix and path[:stop] == reader.tokens[:stop]:
            there[start:stop] = held.full.tolist()[: stop - start]
    free, swa_free = reading.full_times, reading.swa_times
    taken: dict[str, set[int]] = {"full": set(), "swa": set()}
    for at, slot in enumerate(slots):
        if (at < prefix and there[at] != slot) or free[slot // size]:
            taken["full"].add(at // size)
    for at in range(max(0, reader.start), prefix):
        peer = int(reading.mapping[slots[at]])
        if not peer or swa_free[peer // size]:
            taken["swa"].add(at // size)
    for pool, pages in taken.items():
        if pages:
            yield Violation("stolen", tuple(sorted(pages)), pool, reader.name, CACHE)


def _miscounted(tree: RadixCache, nodes: list[Any]) -> Iterator[Violation]:
    """Yield the sums and locks of a cache that are not those of its nodes."""
    sums = dict.fromkeys(("full_evictable", "full_protected", "swa_evictable", "swa_protected"), 0)
    locks = {id(node): 0 for _, node, _ in nodes}
    by_number = {node.id: node for _, node, _ in nodes}
    for reader in tree.readers():
        node = by_number.get(getattr(reader.node, "id", reader.node))
        while node is not None and id(node) in locks:
            locks[id(node)] += 1
            node = node.parent
    for tokens, node, held in nodes:
        sums["full_protected" if held.full_locks else "full_evictable"] += len(held.full)
        if not held.tombstone:
            sums["swa_protected" if held.swa_locks else "swa_evictable"] += len(held.full)
        if locks[id(node)] != held.full_locks:
            pages = tuple(range(len(held.full) // tree.page_size))
            owner = prompt_of(tokens, tree.page_size)
            yield Violation("miscounted", pages, "locks", owner, CACHE)
    for name, count in sums.items():
        if getattr(tree.cache, f"{name}_size")() != count:
            yield Violation("miscounted", (), name, fault=CACHE)


def shadow_of(tree: RadixCache) -> Shadow:
    """Return a shadow in which everybody owns what they should."""
    state = tree.state()
    shadow = Shadow(state.full_pages, state.swa_pages, state.page_size)
    shadow.in_group = tree.in_group
    for name, owned in tree.owners().items():
        shadow.own(name, owned.full, owned.swa, owned.slots)
    return shadow
