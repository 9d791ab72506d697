"""Runs as JSON: the entries of ``results`` in a report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from swaleak.script.ops import describe

if TYPE_CHECKING:
    from swaleak.check.audit import Violation
    from swaleak.check.case import Case
    from swaleak.check.picture import Page
    from swaleak.check.replay import Step


def case_json(case: Case) -> dict[str, Any]:
    """Return one entry of ``results``."""
    run = case.run
    entry: dict[str, Any] = {
        "scenario": case.scenario.name,
        "reach": case.scenario.reach,
        "target": case.target,
        "strategy": case.strategy,
        "origin": case.origin,
        "page_size": case.page_size,
        "physical": case.physical,
        "mapped": case.mapped,
        "verdict": case.verdict,
        "violations": violations_json(run.audit.violations),
        "declared": case.declared.verdict if case.declared else None,
        "as_declared": case.as_declared,
        "known": case.known.when if case.known else None,
    }
    if run.raised:
        entry["raised"] = run.raised
    if case.open_group:
        entry["open_group"] = True
    if run.unmet:
        entry["unmet"] = list(run.unmet)
    if run.substituted:
        entry["substituted"] = dict(run.substituted)
    if run.repeats > 1:
        entry["repeats"] = run.repeats
        entry["leaked_per_repeat"] = (case.physical - case.mapped) / run.repeats
    if run.steps:
        entry["steps"] = [_step_json(i, step) for i, step in enumerate(run.steps, start=1)]
    return entry


def violations_json(violations: Iterable[Violation]) -> list[dict[str, Any]]:
    """Return violations as JSON: kind, pool or owner, pages."""
    return [
        {"kind": v.kind, "pool": v.pool, "pages": list(v.pages)}
        if v.owner is None
        else {"kind": v.kind, "owner": v.owner, "pages": list(v.pages)}
        for v in violations
    ]


def _step_json(number: int, step: Step) -> dict[str, Any]:
    return {
        "step": number,
        "op": describe(step.op),
        "physical": step.audit.physical,
        "mapped": step.audit.mapped,
        "violations": violations_json(step.audit.violations),
        "pages": [_page_json(page) for page in step.pages],
    }


def _page_json(page: Page) -> dict[str, Any]:
    """Return one SWA page of one step; pages that are simply free are left out."""
    return {
        "page": page.page,
        "owners": list(page.owners),
        "free": not page.held,
        "mapped": page.mapped,
        "queued": page.queued,
    }
