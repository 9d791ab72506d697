"""What came out, in sentences: who lost what, what was refused, what was done in place of what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from swaleak.words import named

if TYPE_CHECKING:
    from swaleak.check.audit import Violation
    from swaleak.check.case import Case
    from swaleak.script.scenario import Outcome


SHIPPED = "shipped"  # the strategy that is asked for; whose it is, is in a case's origin
OPEN_GROUP = "The group is still open; what waits for its end is not judged."


def explain(cases: Sequence[Case]) -> tuple[str, ...]:
    """Return a line for each way in which something went wrong: who lost what."""
    lines: dict[str, list[Case]] = {}
    failed = [case for case in cases if _facts(case)]
    scenarios = {case.scenario.name for case in failed}
    # also where only one of them failed: the reader has to know which
    targets = {case.target for case in cases}
    for case in failed:
        scenario = [case.scenario.name] if len(scenarios) > 1 else []
        target = [case.target] if len(targets) > 1 else []
        own = [strategy_shown(case)] if not target or case.strategy != SHIPPED else []
        who = ", ".join([*scenario, *target, *own])
        for fact in _facts(case):
            lines.setdefault(f"{who}: {fact}", []).append(case)
    everywhere = {case.page_size for case in cases}
    return tuple(
        line
        if {c.page_size for c in same} == everywhere
        else f"{line} (page size {listed_sizes(same)})"
        for line, same in lines.items()
    )


def failures(cases: Sequence[Case]) -> list[str]:
    """Return a line for each way a scenario fails the gate, and in which targets."""
    same: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        if not case.safe:
            same.setdefault((case.scenario.name, "; ".join(_facts(case))), []).append(case)
    lines = []
    for (scenario, facts), found in same.items():
        targets = ", ".join(dict.fromkeys(c.target.removeprefix("sglang ") for c in found))
        tried = {c.page_size for c in cases if c.scenario.name == scenario}
        sizes = (
            "" if {c.page_size for c in found} == tried else f" at page size {listed_sizes(found)}"
        )
        lines.append(f"{scenario} in {targets}{sizes}: {facts}")
    return lines


def refusals(cases: Sequence[Case]) -> list[str]:
    """Return a line for each way in which allocators refused, and where."""
    same: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        if case.verdict == "refused":
            key = (case.scenario.name, f"step {case.run.failed_at} refused: {case.run.raised}")
            same.setdefault(key, []).append(case.target.removeprefix("sglang "))
    return [
        f"{scenario} in {', '.join(dict.fromkeys(targets))}: {fact}"
        for (scenario, fact), targets in same.items()
    ]


def substitutions(cases: Sequence[Case]) -> list[str]:
    """Return a line for each call that was made in place of one that a target lacks."""
    made = dict.fromkeys((c.target, *pair) for c in cases for pair in c.run.substituted)
    lacking: dict[tuple[str, str], list[str]] = {}
    for target, missing, done in made:
        lacking.setdefault((missing, done), []).append(target.removeprefix("sglang "))
    return [
        f"{' and '.join(targets)} {'have' if len(targets) > 1 else 'has'} no method {missing}; "
        f"where a scenario calls it, {done} is called."
        for (missing, done), targets in lacking.items()
    ]


def strategy_shown(case: Case) -> str:
    """Return the strategy that a report shows for a case; see ``own_name``."""
    return own_name(case.strategy, case.origin)


def own_name(strategy: str, origin: str) -> str:
    """Return the strategy; of a patched target that is asked for its own, ``patched``."""
    return "patched" if (strategy, origin) == (SHIPPED, "patched") else strategy


def _facts(case: Case) -> list[str]:
    run = case.run
    facts = [*run.unmet]
    if run.raised:
        facts.append(f"step {run.failed_at} {case.verdict}: {run.raised}")
    if run.audit.violations:
        told = "; ".join(tell(violation) for violation in run.audit.violations)
        facts.append(
            told if run.raised or not run.failed_at else f"from step {run.failed_at}: {told}"
        )
    if run.repeats > 1:
        lost = (case.physical - case.mapped) / run.repeats
        facts.append(f"SWA pages lost a round: {lost:g}, over {run.repeats} rounds")
    if case.declared and not case.as_declared and case.verdict == case.declared.verdict:
        counts = f"physical {case.physical}, mapped {case.mapped}"
        once = ", in one round," if run.repeats > 1 else ""
        came = ", ".join([counts, *dict.fromkeys(v.kind for v in run.audit.violations)])
        facts.append(f"declared{once}: {outcome_told(case.declared)}; came out: {came}")
    if run.starved:
        facts.append(f"the pool ran dry in round {run.repeats}")
    if facts and case.known and case.as_declared:
        facts[-1] += f" ({case.known})"
    return facts


def outcome_told(outcome: Outcome) -> str:
    """Return an outcome as it is declared: ``leak, physical 2, mapped 1, with lost``."""
    counts = (("physical", outcome.physical), ("mapped", outcome.mapped))
    words = [outcome.verdict, *(f"{what} {count}" for what, count in counts if count is not None)]
    return ", ".join(words) + (f", with {', '.join(outcome.kinds)}" if outcome.kinds else "")


def tell(violation: Violation) -> str:
    """Return a violation as a piece of a sentence."""
    pages = named(violation.pages)
    verb = "" if len(violation.pages) > 1 else "s"
    pool = {"swa": "SWA", "full": "full"}.get(violation.pool or "", "")
    match violation.kind, violation.owner:
        case "lost", owner:
            return f"{owner} lost the SWA side of its {pages}"
        case "stale", None:
            return f"stale: full {pages} of nobody's still map{verb}"
        case "stale", owner:
            return f"stale: {owner}'s {pages} still map{verb}"
        case "misaligned", owner:
            return f"misaligned: {owner}'s {pages}"
        case "leak", _:
            return f"{pool} {pages} leaked"
        case "dangling", _:
            return f"dangling: {pool} {pages} in use and in the free list"
        case "double-free", _:
            return f"{pool} {pages} twice in the free list"
        case "reserved", _:
            return f"reserved {pool} {pages} in the free list"
        case _:
            return f"{violation.kind}: {pool} {pages}"


def listed_sizes(cases: Sequence[Case]) -> str:
    """Return the page sizes of cases, each once: ``1, 4``."""
    return ", ".join(dict.fromkeys(str(case.page_size) for case in cases))
