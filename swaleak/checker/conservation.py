"""Conservation: every page belongs to somebody; the caches say to whom.

A radix cache makes the calls itself. Who should own what is read off its nodes and the requests
that run, entered in a shadow, and compared with the allocator.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from swaleak.checker.compare import Comparison, compare_pages, read
from swaleak.checker.page_map import page_map
from swaleak.checker.run import Findings, Run, StepResult, unmet_expectations
from swaleak.checker.shadow import Shadow
from swaleak.errors import RAISED, ScriptError, format_error
from swaleak.scenario.calls import PoolExhausted
from swaleak.scenario.steps import Expect, Step


def run_cache_script(tree: Any, script: Iterable[Step], *, keep_steps: bool = False) -> Run:
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
    except PoolExhausted as error:
        raise ScriptError(f"step {number}: {error}") from None
    except RAISED as error:  # whatever SGLang's code raises is a result, not a crash
        raised = format_error(error)
        look()
        findings.raised = (number, raised, False)
    return findings.run(raised=raised, unmet=tuple(unmet), steps=tuple(results))


def shadow_of(tree: Any) -> Shadow:
    """Return a shadow in which everybody owns what they should."""
    state = tree.state()
    shadow = Shadow(state.full_pages, state.swa_pages, state.page_size)
    shadow.in_group = tree.in_group
    for name, owned in tree.owners().items():
        shadow.own(name, owned.full, owned.swa, owned.slots)
    return shadow
