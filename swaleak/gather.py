"""What commands have in common: open targets, run scenarios on them, say what was driven.

Torch, and whatever imports it, is imported inside the functions: ``--help`` comes this way too.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from swaleak import __version__
from swaleak.errors import SwaleakError, UsageError
from swaleak.script import tree as trees
from swaleak.script.scenario import check_page_size

if TYPE_CHECKING:
    from swaleak.check.case import Case
    from swaleak.report.report import About, Section
    from swaleak.script.scenario import Scenario
    from swaleak.script.tree import TreeScenario
    from swaleak.sglang.tree import Caches
    from swaleak.target import Target

MAX_PICTURED = 200_000  # pages times steps; what is more is drawn only if --steps asks for it


def open_targets(on: str, device: str, patches: list[str] | None = None) -> list[Target]:
    """Return the target, and after it the same one patched if there are patches."""
    start_torch()
    from swaleak.device import choose_device
    from swaleak.target import open_target

    on_device = choose_device(device)
    shipped = open_target(on, on_device)
    return [shipped, open_target(on, on_device, patches)] if patches else [shipped]


def start_torch() -> None:
    """Import torch, and set it up for what happens here: many calls on small tensors."""
    gc.disable()  # it would walk torch's modules again and again while they load
    import torch

    gc.freeze()
    gc.enable()
    # threads bring nothing to small tensors, and on a busy machine they wait for each other
    torch.set_num_threads(1)


def strategies_of(target: Target, asked: list[str] | None) -> list[str]:
    """Return short names. Without any asked for: all four, one of which may be the target's own."""
    from swaleak.target import strategy_of

    if asked:
        return list(dict.fromkeys(strategy_of(name) for name in asked))
    return [name for name in target.strategies() if name != "shipped"]


def trace_strategies(target: Target, asked: list[str] | None, fix: str | None) -> list[str]:
    """Return short names. Without any asked for: the one it was recorded under, or 0.5.18's."""
    if asked or fix:
        return strategies_of(target, asked or [str(fix)])
    return [target.ships or "deferred"]


def sizes_of(scenario: Scenario, asked: list[int] | None) -> tuple[int, ...]:
    """Return the page sizes to run at; none below those that the scenario is made for.

    Raises ``UsageError`` for a size that no scenario has.
    """
    for size in asked or ():
        check_page_size(size)
    least = min(scenario.page_sizes)
    return tuple(size for size in asked or scenario.page_sizes if size >= least)


def cases_of(
    scenario: Scenario,
    target: Target,
    strategy: str,
    page_sizes: list[int] | tuple[int, ...],
    *,
    steps: bool = False,
    repeat: int = 1,
) -> list[Case]:
    """Run one scenario at these page sizes."""
    from swaleak.check.case import run_case

    return [
        run_case(scenario, target, strategy, size, keep_steps=steps, repeat=repeat)
        for size in page_sizes
    ]


def caches_of(target: Target) -> Caches:
    """Return the caches of the installed SGLang; raises ``UsageError`` for any other target."""
    if not target.is_installed:
        raise UsageError(
            f"{trees.PREFIX}… drives the caches of an installed SGLang, not {target.name}; "
            f"use --on installed"
        )
    from swaleak.sglang.tree import Caches

    return Caches(target.device)


def caches_or_why_not(target: Target) -> tuple[Caches | None, str]:
    """Return the caches, if the target has any, and the line that says what was left out."""
    try:
        caches = caches_of(target)
    except SwaleakError as error:
        reason = (
            "they need the installed SGLang, --on installed"
            if isinstance(error, UsageError)
            else str(error)
        )
        return None, f"Left out: the scenarios of the radix caches, {trees.PREFIX}…; {reason}."
    why = "; ".join(f"{cache}: {reason}" for cache, reason in caches.left_out.items())
    return caches, f"Left out: {why}." if why else ""


def tree_cases_of(
    scenario: TreeScenario,
    caches: Caches | None,
    target: Target,
    strategy: str,
    page_size: list[int] | None,
    *,
    steps: bool = False,
) -> list[Case]:
    """Run a script of the radix caches on every cache there is; none where there are none."""
    if caches is None:
        return []
    from swaleak.check.trees import tree_cases

    sizes = sizes_of(scenario.about, page_size)
    return tree_cases(scenario, caches, target, strategy, sizes, keep_steps=steps)


def _pages_times_steps(scenario: Scenario) -> int:
    asked = sum(getattr(op, "pages", 1) for op in scenario.steps)
    return asked * len(scenario.steps)


def timelines_of(
    cases: list[Case], targets: list[Target], repeat: int, *, every_step: bool
) -> dict[str, list[Section]]:
    """Return page timelines of all cases, or, played once more, of those that failed."""
    from swaleak.check.case import run_case
    from swaleak.report.timeline import timelines

    if every_step:
        return timelines(cases, every_step=True)
    failed = (
        case
        for case in cases
        if case.verdict in ("leak", "corrupt", "error")
        and not trees.is_tree(case.scenario.name)
        and _pages_times_steps(case.scenario) * repeat <= MAX_PICTURED
    )
    of = {target.name: target for target in targets}
    again = (
        run_case(
            case.scenario,
            of[case.target],
            case.strategy,
            case.page_size,
            keep_steps=True,
            repeat=repeat,
        )
        for case in failed
    )
    return timelines(again, every_step=False)


def about(targets: list[Target]) -> About:
    """Return what a report says of its targets: what was driven, on which device."""
    import torch

    from swaleak.device import describe
    from swaleak.report.report import About

    device = targets[0].device
    driven = [
        ("the built-in model" if target.name == "builtin" else target.name)
        + (f" (ships {target.ships})" if target.ships else "")
        for target in targets
    ]
    where = f"{describe(device)}, torch {torch.__version__}"
    header = f"swaleak {__version__}: {', '.join(driven)} on {where}"
    notes = tuple(note for target in targets for note in target.notes)
    return About(header, notes, str(torch.__version__), device)
