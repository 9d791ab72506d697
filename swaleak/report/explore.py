"""What a search found, what it tried, and what that leaves open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from swaleak.errors import counted, plural
from swaleak.explorer.breadth_first import Coverage, Failure
from swaleak.explorer.counterexample import Counterexample, Owners
from swaleak.explorer.random_walk import Walks
from swaleak.explorer.search import AtRandom, Search
from swaleak.report.model import (
    About,
    Grid,
    Report,
    Section,
    cells,
    run_json,
    step_cells,
    step_json,
    strategy_text,
    violations_text,
)
from swaleak.scenario.contract import RequestRules, Rules

NEW = "New: no catalogue scenario has these steps."
OWNERS = "owners: what should be; physical and mapped: what the allocator holds."
SHOWN = 10  # failures per page size that are printed; the JSON holds all


def explore_report(about: About, searches: Sequence[Search]) -> Report:
    """One section per page size: what fails, step by step, and what was tried."""
    sections = []
    for search in searches:
        failures = search.counterexamples
        sections += [_failure_section(search, at) for at in range(min(len(failures), SHOWN))]
        if len(failures) > SHOWN:
            left_out = f"{len(failures) - SHOWN} of {len(failures)} failures not shown"
            how = "-f json prints all, -o FILE.json keeps them"
            sections.append(Section(lines=(f"{left_out}; {how}.",)))
        sections.append(Section("" if failures else _title(search), None, _covered(search)))
    ok = not any(search.counterexamples for search in searches)
    return about.report("explore", ok, sections, [_search_json(search) for search in searches])


def _title(search: Search) -> str:
    place = search.place
    strategy = strategy_text(place.strategy, place.target.origin(place.strategy))
    if place.cache:
        return f"requests on the {place.cache} cache, {strategy}, page size {place.page_size}"
    return f"{strategy}, page size {place.page_size}, {place.rules.contract} contract"


def _failure_section(search: Search, at: int) -> Section:
    found, failure = search.counterexamples[at], search.failures[at]
    run = found.run
    rows = (
        (*step_cells(number, step), *cells(_owners_text(_owners(found, number))))
        for number, step in enumerate(run.steps, start=1)
    )
    columns = ("#", "step", "physical", "mapped", "owners, full>SWA page")
    wrong = run.comparison.violations or [violation for _, violation in run.healed]
    said = [violations_text(wrong, of_cache=bool(search.place.cache))] if wrong else []
    if run.raised:
        said.append(f"step {run.failed_at} raised {run.raised}")
    lines = [
        f"{run.verdict}: {'; '.join(said)}",
        *(
            f"This allocator has no method {missing}; {called} was called in its place."
            for missing, called in run.substituted
        ),
        f"In the catalogue: {found.scenario}." if found.scenario else NEW,
        OWNERS,
    ]
    grid = Grid(columns, tuple(rows), frozenset({"#", "physical", "mapped"}))
    return Section(f"{_title(search)}: {_how_short(failure, found)}", grid, tuple(lines))


def _how_short(failure: Failure, found: Counterexample) -> str:
    steps = counted(len(found.order), "step")
    if failure.length is not None:
        return f"seed {failure.seed} fails, {counted(failure.length, 'step')} shrunk to {steps}"
    return f"fails after {steps}"


def _owners(found: Counterexample, number: int) -> Owners | None:
    """Return who owned what after a step; None of a last step that raised."""
    return found.owners[number - 1] if number <= len(found.owners) else None


def _owners_text(owners: Owners | None) -> str:
    if owners is None:
        return "(raised)"
    return "  ".join(
        f"{name} " + " ".join(f"{full}>{'-' if swa is None else swa}" for full, swa in pages)
        for name, pages in owners.items()
    )


def _covered(search: Search) -> tuple[str, ...]:
    covered, lines = search.coverage, []
    if search.interrupted:
        lines.append("Interrupted: what follows is what had been tried by then.")
    if isinstance(covered, Coverage):
        lines += _every_order(search, covered)
        # where nothing is left to try, longer orders come to states that were seen
        longer = [] if covered.exhausted else ["longer orders"]
        more = "more requests, parts of pages, pools that run dry (--random)"
        if isinstance(search.place.rules, Rules):
            more = "more nodes, parts of pages, growing requests (--random)"
        untried = ", ".join([*longer, more])
    else:
        lines += _random_scripts(search, covered)
        untried = "scripts that were not drawn"
    if not search.counterexamples:
        lines.append(f"Not covered: {untried}, exhausted pools, races between streams.")
    return tuple(lines)


def _every_order(search: Search, covered: Coverage) -> Iterator[str]:
    rules = search.place.rules
    if not search.counterexamples:
        steps = "any length" if covered.exhausted else f"up to {counted(covered.depth, 'step')}"
        yield f"No order of {steps} fails, with up to {rules.bounds}."
    yield (
        f"{counted(covered.states, 'state')}, {counted(covered.transitions, 'transition')} in "
        f"{covered.seconds:.1f} s, {_rates(covered)['transitions_per_second']:,.0f}/s"
        + (f", {covered.bytes_per_state:.0f} bytes per state." if covered.bytes_per_state else ".")
    )
    if covered.refused:
        refused = counted(covered.refused, "transition")
        yield f"{refused} {plural('was', covered.refused)} refused and changed nothing."


def _random_scripts(search: Search, covered: Walks) -> Iterator[str]:
    if not search.counterexamples:
        scripts = counted(covered.scripts, "random script")
        yield f"{scripts} {plural('does', covered.scripts)} not fail."
    yield (
        f"{counted(covered.scripts, 'script')}, {counted(covered.steps, 'step')} in "
        f"{covered.seconds:.1f} s, {_rates(covered)['transitions_per_second']:,.0f}/s."
    )


def _rates(covered: Coverage | Walks) -> dict[str, float]:
    seconds = max(covered.seconds, 1e-9)
    if isinstance(covered, Walks):
        return {"transitions_per_second": covered.steps / seconds}
    return {
        "transitions_per_second": covered.transitions / seconds,
        "states_per_second": covered.states / seconds,
    }


def _search_json(search: Search) -> dict[str, Any]:
    place, covered = search.place, search.coverage
    rules = place.rules
    counts = {f.name: getattr(covered, f.name) for f in fields(covered)}
    if isinstance(covered, Walks):
        counts["operations"] = counts.pop("steps")
        for failed in search.failures:
            counts |= {"failing_seed": failed.seed, "failing_length": failed.length}
    plan = search.plan
    shard = plan.shard if isinstance(plan, AtRandom) else None
    return {
        "target": place.target.name,
        "strategy": place.strategy,
        "origin": place.target.origin(place.strategy),
        "page_size": place.page_size,
        "contract": place.rules.contract,
        **({"nodes": rules.nodes} if isinstance(rules, Rules) else {}),
        **({"requests": rules.requests} if isinstance(rules, RequestRules) else {}),
        **({"cache": place.cache} if place.cache else {}),
        "shard": f"{shard.index}/{shard.count}" if shard else "1/1",
        "interrupted": search.interrupted,
        **counts,
        **_rates(covered),
        "failures": [_failure_json(found) for found in search.counterexamples],
    }


def _failure_json(found: Counterexample) -> dict[str, Any]:
    steps = []
    for number, step in enumerate(found.run.steps, start=1):
        owners = {
            name: {"full": [full for full, _ in pages], "swa": [swa for _, swa in pages]}
            for name, pages in (_owners(found, number) or {}).items()
        }
        steps.append(step_json(number, step) | {"owners": owners})
    return run_json(found.run) | {
        "raised": found.run.raised,
        "scenario": found.scenario,
        "steps": steps,
    }
