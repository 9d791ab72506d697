"""Reports on runs of scenarios: a table per scenario (`repro`), or one of all (`verify`, `check`).

What went wrong is said in sentences: who lost what, what was refused, what was called instead.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from swaleak.checker.case import Case, change, passes
from swaleak.errors import counted, plural
from swaleak.report.model import (
    SHIPPED,
    STYLES,
    About,
    Cell,
    Grid,
    Report,
    Section,
    TestResult,
    cells,
    dated_json,
    grouped,
    mistakes_text,
    outcome_text,
    run_json,
    step_json,
    strategy_text,
    violations_text,
)

if TYPE_CHECKING:
    from swaleak.checker.page_map import Page

MARKS = {  # by whether the sources are patched
    False: "! as shipped: not what is known of that release.",
    True: "! as patched: neither clean nor refused as misuse; known faults excuse no patch.",
}
OPEN_GROUP = "The group is still open; what waits for its end is not judged."


def repro_report(
    about: About, cases: Sequence[Case], page_maps: Mapping[str, Sequence[Section]] | None = None
) -> Report:
    """One table per scenario, a row per strategy and page size; below it, its page maps."""
    columns = ("strategy", "origin", "page size", "physical", "mapped", "verdict", "declared")
    right = frozenset({"page size", "physical", "mapped"})
    sections = []
    for name, mine in grouped((case.scenario.name, case) for case in cases).items():
        grid = Grid(columns, tuple(_repro_row(about, case) for case in mine), right)
        lines = (
            *explain(mine),
            *([OPEN_GROUP] if any(case.open_group for case in mine) else []),
            *_grafted_on_patched(about, mine),
            *_substitutions(mine),
            *_baseline(about, mine),
        )
        sections.append(Section(f"{name}: {mine[0].scenario.title}", grid, lines))
        sections += (page_maps or {}).get(name, ())
    return _report("repro", about, cases, sections, _as_declared, "as declared")


def verify_report(about: About, cases: Sequence[Case]) -> Report:
    """A row per scenario, a column per strategy."""
    shipped = {case.strategy for case in cases if case.origin == "shipped"}
    columns = {c.strategy: f"{c.strategy}{'*' * (c.strategy in shipped)}" for c in cases}
    lines = ["Cells: physical/mapped SWA pages and the verdict."]
    if shipped:
        lines.append("* SGLang's own class, untouched; the others are grafted on it.")
    lines += dict.fromkeys(
        f"known: {case.scenario.name} {case.verdict} in {case.target} ({case.known})"
        for case in cases
        if case.known
    )
    wrong = [case for case in cases if not case.as_declared]
    lines += [f"! not as declared: {line}" for line in explain(wrong)]
    lines += _substitutions(cases)
    grid = _matrix(cases, columns, lambda case: case.strategy)
    sections = [Section("", grid, tuple(lines))]
    return _report("verify", about, cases, sections, _as_declared, "as declared")


def check_report(about: About, cases: Sequence[Case], baselines: Mapping[str, str]) -> Report:
    """A row per scenario, a column per target. ``baselines``: of a target, by their labels.

    Where there are baselines, only the targets that have one are judged.
    """
    columns = {case.target: _short(case.target) for case in cases}
    of = {(c.scenario.name, c.page_size, c.target): c for c in cases}

    def before(case: Case) -> Case | None:
        return of.get((case.scenario.name, case.page_size, baselines.get(case.target, "")))

    def changed(case: Case) -> str:
        return change(case, before(case)) if case.target in baselines else ""

    lines = [*failures(cases), *_by_target(cases, _refusal), *_substitutions(cases), *_marks(cases)]
    lines += _compared(cases, baselines, changed)
    grid = _matrix(cases, columns, lambda case: case.target, changed, series=True)
    refused = any(case.verdict == "refused" and case.safe for case in cases)
    wanted = "clean, or refused as misuse" if refused else "clean"
    if any(changed(case) == "unchanged" for case in cases):
        wanted += ", or no worse than before"
    sections = [Section("", grid, tuple(lines))]
    return _report(
        *("check", about, cases, sections, lambda case: passes(case, before(case)), wanted),
        judged=baselines.keys() or columns.keys(),
        more=lambda case: {"change": changed(case)} if changed(case) else {},
    )


def explain(cases: Sequence[Case]) -> list[str]:
    """Return a line for each way in which something went wrong: who lost what."""
    facts = {id(case): [*_facts(case), *_mismatch(case)] for case in cases}
    failed = [case for case in cases if facts[id(case)]]
    several = len({case.scenario.name for case in failed}) > 1
    # also where only one of them failed: the reader has to know which
    targets = {case.target for case in cases}

    def who(case: Case) -> str:
        scenario = [case.scenario.name] if several else []
        target = [case.target] if len(targets) > 1 else []
        own = [_strategy(case)] if not target or case.strategy != SHIPPED else []
        return ", ".join([*scenario, *target, *own])

    lines = grouped((f"{who(case)}: {fact}", case) for case in failed for fact in facts[id(case)])
    return [
        line if _sizes(found) == _sizes(cases) else f"{line} (page size {_sizes(found)})"
        for line, found in lines.items()
    ]


def failures(cases: Sequence[Case]) -> list[str]:
    """Return a line for each way a scenario fails a candidate's test, and in which targets."""
    return _by_target(cases, lambda case: "" if case.safe else "; ".join(_facts(case)))


def cell_of(cases: Sequence[Case], note: Callable[[Case], str] = lambda _: "") -> Cell:
    """Return one cell for a case at all its page sizes; of a failure, only where it fails.

    ``!`` marks what was not declared. ``note``: what else to say of a case.
    """

    def outcome(case: Case) -> str:
        counts = f"{case.physical}/{case.mapped}"
        text = {"clean": f"ok {counts}", "refused": "refused"}.get(case.verdict)
        text = ("" if case.as_declared else "!") + (text or f"{counts} {case.verdict}")
        return text if note(case) in ("", "clean") else f"{text} {note(case)}"

    worst_first = sorted(cases, key=lambda case: case.safe)
    shown = grouped((outcome(case), case) for case in worst_first)
    bad = {text: found for text, found in shown.items() if not all(case.safe for case in found)}
    lines = [
        text if len(found) == len(cases) else f"{text} at {_sizes(found)}"
        for text, found in (bad or shown).items()
    ]
    worst = max((case.verdict for case in cases), key=list(STYLES).index, default="clean")
    return Cell("\n".join(lines), STYLES[worst])


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
        **run_json(run),
        "declared": case.declared.verdict,
        "as_declared": case.as_declared,
        "known": case.known.when if case.known else None,
    }
    steps = [
        step_json(at, step) | {"pages": [_page_json(page) for page in step.pages]}
        for at, step in enumerate(run.steps, start=1)
    ]
    there_if_any = {
        "raised": run.raised,
        "open_group": case.open_group,
        "unmet": list(run.unmet),
        "healed": dated_json(case.run.healed),
        "substituted": dict(run.substituted),
        "steps": steps,
    }
    entry |= {key: value for key, value in there_if_any.items() if value}
    if run.repeats > 1:
        entry |= {"repeats": run.repeats, "leaked_per_repeat": _lost_per_round(case)}
    return entry


def _page_json(page: Page) -> dict[str, Any]:
    return {
        "page": page.page,
        "owners": list(page.owners),
        "free": not page.held,
        "mapped": page.mapped,
        "queued": page.queued,
    }


def _as_declared(case: Case) -> bool:
    return case.as_declared


def _report(
    command: str,
    about: About,
    cases: Sequence[Case],
    sections: Sequence[Section],
    accepts: Callable[[Case], bool],
    wanted: str,
    judged: Container[str] = (),
    more: Callable[[Case], dict[str, Any]] = lambda _: {},
) -> Report:
    """Judge the cases, and put that first.

    ``judged``: the targets that count; without any, the patched ones if there are some.
    ``more``: what else the JSON says of a case.
    """
    judged = judged or about.patched or {case.target for case in cases}
    tests = []
    for case in cases:
        tests.append(_test_result(case, accepts(case) if case.target in judged else None))
    passed = [test.passed for test in tests if test.passed is not None]
    runs, failed = counted(len(passed), "run"), passed.count(False)
    verdict = (
        Cell(f"{failed} of {runs} not {wanted}.", "bold red")
        if failed
        else Cell(f"{runs}, {'all ' * (len(passed) > 1)}{wanted}.", "green")
    )
    results = [case_json(case) | more(case) for case in cases]
    return about.report(command, not failed, sections, results, verdict=verdict, tests=tuple(tests))


def _test_result(case: Case, passed: bool | None) -> TestResult:
    text = ""
    if passed is False:
        outcome = f"declared: {case.declared.verdict}; came out: {case.verdict}"
        said = [outcome] if case.as_declared else []  # else it is among what is explained
        text = "\n".join([case.scenario.title, *said, *explain([case])])
    return TestResult(
        case.target,
        case.scenario.name,
        f"{case.scenario.name} [{_strategy(case)}, page size {case.page_size}]",
        passed,
        case.verdict,
        f"{case.verdict}, {case.physical} physical and {case.mapped} mapped SWA pages",
        text,
    )


def _repro_row(about: About, case: Case) -> tuple[Cell, ...]:
    on_patched = case.target in about.patched and case.origin == "grafted"
    declared = case.declared.verdict
    if case.as_declared and case.run.by_caller and case.verdict != declared:
        declared = "caller's fault"
    return cells(
        _strategy(case),
        "on patched" if on_patched else case.origin,
        case.page_size,
        case.physical,
        case.mapped,
        Cell(case.verdict, STYLES[case.verdict]),
        declared if case.as_declared else Cell(f"{declared} MISMATCH", "bold red"),
    )


def _matrix(
    cases: Sequence[Case],
    columns: dict[str, str],
    column: Callable[[Case], str],
    note: Callable[[Case], str] = lambda _: "",
    *,
    series: bool = False,
) -> Grid:
    """Return a row per scenario; ``columns``: the key of each column, and its title."""
    found = grouped(((case.scenario.name, column(case)), case) for case in cases)
    names = dict.fromkeys(case.scenario.name for case in cases)
    rows = (
        cells(name, *(cell_of(found.get((name, key), ()), note) for key in columns))
        for name in names
    )
    return Grid(("scenario", *columns.values()), tuple(rows), series=series)


def _facts(case: Case) -> list[str]:
    """Return what went wrong in one run, what is still wrong at its end first."""
    run = case.run
    facts = [*run.unmet, *mistakes_text(run.mistakes)]
    if run.raised:
        facts.append(f"step {run.failed_at} {case.verdict}: {run.raised}")
    of_cache = bool(case.scenario.caches)
    if wrong := violations_text(run.comparison.violations, of_cache=of_cache):
        since = "" if run.raised or not run.failed_at else f"from step {run.failed_at}: "
        facts.append(since + wrong)
    for at, healed in grouped(case.run.healed).items():
        facts.append(
            f"at step {at}: {violations_text(healed, of_cache=of_cache)}; healed by the end"
        )
    if run.repeats > 1:
        lost = _lost_per_round(case)
        pages = f"{lost:g} SWA {plural('page', lost)}"
        facts.append(f"{pages} lost per round, over {run.repeats:,} rounds")
    if run.exhausted:
        facts.append(f"a pool was exhausted in round {run.repeats:,}")
    if facts and case.known and case.as_declared:
        facts[-1] += f" ({case.known})"
    return facts


def _mismatch(case: Case) -> list[str]:
    """Return the line that says what was declared, where something else came out."""
    if case.as_declared:
        return []
    if case.verdict != case.declared.verdict:
        return [f"{case.verdict} (MISMATCH: declared {case.declared.verdict})"]
    if case.run.unmet:
        return []
    counts = f"{case.verdict}, physical {case.physical}, mapped {case.mapped}"
    kinds = dict.fromkeys(violation.kind for violation in case.run.comparison.violations)
    once = " for one round" if case.run.repeats > 1 else ""
    declared = outcome_text(case.declared) + once
    return [f"{', '.join([counts, *kinds])} (MISMATCH: declared {declared})"]


def _lost_per_round(case: Case) -> float:
    return (case.physical - case.mapped) / case.run.repeats


def _refusal(case: Case) -> str:
    refused = case.verdict == "refused"
    return f"step {case.run.failed_at} refused: {case.run.raised}" if refused else ""


def _by_target(cases: Sequence[Case], fact: Callable[[Case], str]) -> list[str]:
    """Return a line per scenario and fact: in which targets, and at which page sizes if not all."""
    found = grouped(((case.scenario.name, fact(case)), case) for case in cases)
    tried = grouped((case.scenario.name, case) for case in cases)
    return [
        f"{name} in {', '.join(dict.fromkeys(_short(case.target) for case in same))}"
        + ("" if _sizes(same) == _sizes(tried[name]) else f" at page size {_sizes(same)}")
        + f": {text}"
        for (name, text), same in found.items()
        if text
    ]


def _substitutions(cases: Iterable[Case]) -> list[str]:
    """Return a line for each call that was made in place of one that a target lacks."""
    made = dict.fromkeys((pair, _short(c.target)) for c in cases for pair in c.run.substituted)
    return [
        f"{' and '.join(targets)} {plural('has', len(targets))} no method {missing}; "
        f"where a scenario calls it, {called} is called."
        for (missing, called), targets in grouped(made).items()
    ]


def _grafted_on_patched(about: About, cases: Sequence[Case]) -> list[str]:
    """Return the line that says which rows of a patched target are not of the patch's code."""
    grafted = [c.strategy for c in cases if c.target in about.patched and c.origin == "grafted"]
    if not grafted:
        return []
    has_own = any(case.origin == "patched" for case in cases)
    return [
        f"{' and '.join(dict.fromkeys(grafted))} on patched: swaleak's frees replace the patched "
        f"ones, so this row does not measure the patch{'.' if has_own else '; -s shipped does.'}"
    ]


def _baseline(about: About, cases: Iterable[Case]) -> list[str]:
    """Return the line that says what is not judged, where there is something patched that is."""
    names = list(dict.fromkeys(_short(c.target) for c in cases if c.target not in about.patched))
    shown = f"{' and '.join(names)} {plural('is', len(names))} shown for comparison"
    return [f"{shown}; only the patched sources are judged."] if about.patched and names else []


def _compared(
    cases: Sequence[Case], baselines: Mapping[str, str], changed: Callable[[Case], str]
) -> list[str]:
    """Return the lines that say what the baseline is, and what differs from it."""
    lines = []
    names = dict.fromkeys(_short(name) for name in baselines.values())
    if names:
        judged = " and ".join(dict.fromkeys(_short(name) for name in baselines))
        verb = plural("is", len(names))
        lines.append(
            f"{' and '.join(names)} {verb} shown for comparison; only {judged} "
            f"{plural('is', len(baselines))} judged, by the latent scenarios only for what is new."
        )
    for what in ("new", "fixed", "unchanged"):
        found = dict.fromkeys(case.scenario.name for case in cases if changed(case) == what)
        if found:
            lines.append(f"{what}: {', '.join(found)}")
    return lines


def _marks(cases: Iterable[Case]) -> list[str]:
    """Return what ``!`` means, of the columns that have one."""
    marked = {case.origin == "patched" for case in cases if not case.as_declared}
    return [MARKS[patched] for patched in sorted(marked)]


def _strategy(case: Case) -> str:
    return strategy_text(case.strategy, case.origin)


def _short(target: str) -> str:
    return target.removeprefix("sglang ")


def _sizes(cases: Iterable[Case]) -> str:
    """Return the page sizes of cases, each once: ``1, 4``."""
    return ", ".join(dict.fromkeys(str(case.page_size) for case in cases))
