"""What a search found, what it tried, and what that leaves open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from swaleak.report.entries import violations_json
from swaleak.report.facts import own_name, tell
from swaleak.report.report import About, Cell, Grid, Report, Section
from swaleak.script.ops import describe
from swaleak.search.explore import Coverage
from swaleak.search.fuzz import Tried
from swaleak.search.nearest import Likeness
from swaleak.search.survey import Survey
from swaleak.search.witness import Owners, Witness
from swaleak.words import counted

OWNERS = "owners is what should be, by the ledger; physical and mapped are the allocator's."
SHOWN = 10  # failures a page size that are printed; the JSON holds all


def explore_report(about: About, surveys: Sequence[Survey]) -> Report:
    """One section a page size: what fails, step by step, and what was tried."""
    sections = [Section("", None, about.notes)] if about.notes else []
    for survey in surveys:
        failures = len(survey.witnesses)
        shown = range(min(failures, SHOWN))
        sections += [_witness_section(survey, number) for number in shown]
        if failures > SHOWN:
            left_out = f"{failures - SHOWN} of {failures} failures not shown"
            how = "-f json prints all, -o FILE.json keeps them"
            sections.append(Section(lines=(f"{left_out}; {how}.",)))
        sections.append(Section("" if survey.witnesses else _title(survey), None, _covered(survey)))
    ok = not any(survey.witnesses for survey in surveys)
    body = {"results": [_survey_json(survey) for survey in surveys]}
    return Report("explore", ok, about.header, tuple(sections), body, about.torch, about.device)


def _title(survey: Survey) -> str:
    where = survey.where
    strategy = own_name(where.strategy, where.target.origin(where.strategy))
    return f"{strategy}, page size {where.page_size}, {where.rules.contract} contract"


def _witness_section(survey: Survey, number: int) -> Section:
    found = survey.witnesses[number]
    run = found.run
    rows = tuple(
        (
            Cell(str(at)),
            Cell(describe(step.op)),
            Cell(str(step.audit.physical)),
            Cell(str(step.audit.mapped)),
            Cell(_owners(found.owners[at - 1]) if at <= len(found.owners) else "(raised)"),
        )
        for at, step in enumerate(run.steps, start=1)
    )
    grid = Grid(
        ("step", "operation", "physical", "mapped", "owners, full>SWA page"),
        rows,
        frozenset({"step", "physical", "mapped"}),
    )
    said = [tell(violation) for violation in run.audit.violations]
    if run.raised:
        said.append(f"step {run.failed_at} raised {run.raised}")
    lines = [f"{run.verdict}: {'; '.join(said)}"]
    lines += [
        f"This allocator has no method {missing}; {done} was called in its place."
        for missing, done in run.substituted
    ]
    if scenario := survey.known[number]:
        lines.append(f"In the catalogue: {scenario}.")
    else:
        likeness = _likeness(survey.similar[number])
        lines.append(f"Step by step it is none of the catalogue's scenarios; {likeness}")
    lines.append(OWNERS)
    return Section(f"{_title(survey)}: {_how_short(survey, found)}", grid, tuple(lines))


def _likeness(similar: Likeness | None) -> str:
    if similar is None:
        return "and none of them fails like this here."
    if similar.same:
        return f"it fails as {similar.scenario} does."
    return f"the nearest is {similar.scenario}: the same re-pointing, some other violations."


def _how_short(survey: Survey, found: Witness) -> str:
    steps = counted(len(found.order), "operation")
    if isinstance(survey.covered, Tried):
        failure = survey.covered.failure
        assert failure is not None
        length = counted(failure.length, "operation")
        return f"seed {failure.seed} fails, {length} shrunk to {steps}"
    return f"fails after {steps}"


def _owners(owners: Owners) -> str:
    return "  ".join(
        f"{name} " + " ".join(f"{full}>{'-' if swa is None else swa}" for full, swa in pages)
        for name, pages in owners.items()
    )


def _covered(survey: Survey) -> tuple[str, ...]:
    covered, lines = survey.covered, []
    if survey.interrupted:
        lines.append("Interrupted: what follows is what had been tried by then.")
    if isinstance(covered, Coverage):
        lines += _every_order(survey, covered)
        # where nothing is left to try, longer orders come to states that were seen
        longer = [] if covered.exhausted else ["longer orders"]
        open_ = ", ".join([*longer, "more nodes, parts of pages, growing requests (--random)"])
    else:
        lines += _random_scripts(survey, covered)
        open_ = "what chance did not come upon"
    if not survey.witnesses:
        lines.append(f"Not covered: {open_}, pools that run dry, races between streams.")
    return tuple(lines)


def _every_order(survey: Survey, covered: Coverage) -> Iterator[str]:
    rules, shard = survey.where.rules, survey.where.shard
    if not survey.witnesses:
        operations = counted(covered.depth, "operation")
        upto = "any length" if covered.exhausted else f"up to {operations}"
        nodes = counted(rules.nodes, "node")
        yield f"no order of {upto} fails, with up to {nodes} of 1 to {rules.pages} pages."
    yield (
        f"{counted(covered.states, 'state')}, {counted(covered.transitions, 'transition')} in "
        f"{covered.seconds:.1f} s, {_rates(covered)['transitions_per_second']:,.0f}/s, "
        f"{covered.bytes_per_state:.0f} bytes a state."
    )
    if covered.refused:
        were = "was" if covered.refused == 1 else "were"
        yield f"{counted(covered.refused, 'transition')} {were} refused and changed nothing."
    if covered.split_at is not None:
        yield (
            f"Part {shard.index} of {shard.count}: from depth {covered.split_at} on, "
            f"only its share of the orders."
        )


def _random_scripts(survey: Survey, covered: Tried) -> Iterator[str]:
    if not survey.witnesses:
        yield (
            "the one random script does not fail."
            if covered.scripts == 1
            else f"none of {covered.scripts:,} random scripts fails."
        )
    yield (
        f"{counted(covered.scripts, 'script')}, {counted(covered.operations, 'operation')} in "
        f"{covered.seconds:.1f} s, {_rates(covered)['transitions_per_second']:,.0f}/s."
    )


def _rates(covered: Coverage | Tried) -> dict[str, float]:
    seconds = max(covered.seconds, 1e-9)
    if isinstance(covered, Tried):
        return {"transitions_per_second": covered.operations / seconds}
    return {
        "transitions_per_second": covered.transitions / seconds,
        "states_per_second": covered.states / seconds,
    }


def _survey_json(survey: Survey) -> dict[str, Any]:
    where, covered = survey.where, survey.covered
    entry: dict[str, Any] = {
        "target": where.target.name,
        "strategy": where.strategy,
        "origin": where.target.origin(where.strategy),
        "page_size": where.page_size,
        "contract": where.rules.contract,
        "nodes": where.rules.nodes,
        "shard": f"{where.shard.index}/{where.shard.count}",
        "interrupted": survey.interrupted,
        "seconds": covered.seconds,
    }
    if isinstance(covered, Coverage):
        entry |= {
            "states": covered.states,
            "transitions": covered.transitions,
            "depth": covered.depth,
            "exhausted": covered.exhausted,
            "refused": covered.refused,
            "dry": covered.dry,
            "split_at": covered.split_at,
            "bytes_per_state": covered.bytes_per_state,
        }
    else:
        entry |= {
            "seed": covered.seed,
            "scripts": covered.scripts,
            "operations": covered.operations,
        }
        if covered.failure:
            entry |= {
                "failing_seed": covered.failure.seed,
                "failing_length": covered.failure.length,
            }
    entry |= _rates(covered)
    failures = zip(survey.witnesses, survey.known, survey.similar, strict=True)
    return entry | {"failures": [_witness_json(*failure) for failure in failures]}


def _witness_json(found: Witness, scenario: str | None, similar: Likeness | None) -> dict[str, Any]:
    run = found.run
    return {
        "verdict": run.verdict,
        "physical": run.audit.physical,
        "mapped": run.audit.mapped,
        "violations": violations_json(run.audit.violations),
        "raised": run.raised,
        "scenario": scenario,
        "nearest": similar.scenario if similar else scenario,
        "fails_as": similar.scenario if similar and similar.same else scenario,
        "steps": [
            {
                "step": at,
                "op": describe(step.op),
                "physical": step.audit.physical,
                "mapped": step.audit.mapped,
                "owners": {
                    name: {"full": [f for f, _ in pages], "swa": [s for _, s in pages]}
                    for name, pages in (
                        found.owners[at - 1] if at <= len(found.owners) else {}
                    ).items()
                },
                "violations": violations_json(step.audit.violations),
            }
            for at, step in enumerate(run.steps, start=1)
        ],
    }
