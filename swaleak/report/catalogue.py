"""Reports about scenarios themselves: the list, and one in full. No torch here."""

from __future__ import annotations

import textwrap
from typing import Any

from swaleak.errors import counted
from swaleak.report.model import Grid, Report, Section, cells, outcome_text
from swaleak.scenario.toml import Known, Outcome, Scenario


def list_report(catalogue: list[Scenario]) -> Report:
    """One row a scenario."""
    rows = tuple(cells(s.name, s.reach, s.title) for s in catalogue)
    lines = (
        "production: seen in a server. latent: only the allocator's contract allows it.",
        "tree/…: of the radix caches, which make the calls on the allocator.",
        "`swaleak show NAME` tells the story, `swaleak repro NAME` replays it.",
    )
    body = {"results": [_scenario_json(s) for s in catalogue]}
    section = Section("", Grid(("scenario", "reach", "what happens"), rows), lines)
    return Report("list", True, f"{len(catalogue)} scenarios", (section,), body)


def show_report(scenario: Scenario) -> Report:
    """Story, steps, declarations."""
    about = [f"reach: {scenario.reach}"]
    if scenario.upstream:
        about.append(
            "public record: " + ", ".join(f"sgl-project/sglang {u}" for u in scenario.upstream)
        )
    if scenario.caches:
        window = counted(scenario.window, "page")
        about.append(f"caches: {', '.join(scenario.caches)}, a sliding window of {window}")
    about.append("page sizes: " + ", ".join(map(str, scenario.page_sizes)))
    about.append(f"pools: {scenario.full_pages} full pages, {scenario.swa_pages} SWA pages")
    story = tuple(textwrap.wrap(" ".join(scenario.story.split()), 78)) or ("(no story)",)
    steps = tuple(cells(i, str(step)) for i, step in enumerate(scenario.steps, start=1))
    declared = [f"{name}: {outcome_text(o)}" for name, o in scenario.expect.items()]
    declared += ["every other strategy: clean"] if "every" not in scenario.expect else []
    declared += [
        f"SGLang {known.releases} as shipped: {outcome_text(known.outcome)} ({known})"
        for known in scenario.known
    ]
    sections = (
        Section("", None, story),
        Section("", None, tuple(about)),
        Section("steps", Grid(("#", "step"), steps, frozenset("#"))),
        Section("declared", None, tuple(declared)),
    )
    header = f"{scenario.name}: {scenario.title}"
    return Report("show", True, header, sections, {"results": [_scenario_json(scenario)]})


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "verdict": outcome.verdict,
        "physical": outcome.physical,
        "mapped": outcome.mapped,
        "kinds": list(outcome.kinds),
    }


def _known_json(known: Known) -> dict[str, Any]:
    sizes = list(known.page_sizes) or None
    notes = {"page_sizes": sizes, "fixed": known.fixed, "fix": known.fix}
    return {"versions": str(known.versions)} | notes | _outcome_json(known.outcome)


def _scenario_json(scenario: Scenario) -> dict[str, Any]:
    return {
        "scenario": scenario.name,
        "reach": scenario.reach,
        "title": scenario.title,
        "story": " ".join(scenario.story.split()),
        "upstream": list(scenario.upstream),
        "caches": list(scenario.caches),
        "page_sizes": list(scenario.page_sizes),
        "full_pages": scenario.full_pages,
        "swa_pages": scenario.swa_pages,
        "steps": [str(step) for step in scenario.steps],
        "expect": {name: _outcome_json(o) for name, o in scenario.expect.items()},
        "known": [_known_json(known) for known in scenario.known],
    }
