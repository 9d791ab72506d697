"""Which targets a command opens, and which cases it runs.

Torch, and whatever imports it, is imported inside the functions: a name that means nothing is
refused before it is loaded, and ``--help`` comes this way too.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swaleak import __version__
from swaleak.cli_app import interruptible
from swaleak.errors import SwaleakError, TargetError, UsageError
from swaleak.scenario import catalogue
from swaleak.scenario.toml import Scenario, check_page_size

if TYPE_CHECKING:
    from swaleak.checker.case import Case
    from swaleak.report.model import About, Section
    from swaleak.targets.open import Target

MAX_MAPPED_PAGES = 200_000  # pages times steps; a larger page map is drawn only for --steps


@dataclass(frozen=True, slots=True)
class Batch:
    """Cases, and ``notes``: what was left out, and why."""

    cases: list[Case]
    notes: tuple[str, ...] = ()


def target_output() -> AbstractContextManager[object]:
    """Return a context for a target's own code: what it prints goes to standard error."""
    return redirect_stdout(sys.stderr)


def start_torch() -> None:
    """Import torch, and set it up for what happens here: many calls on small tensors."""
    gc.disable()  # it would walk torch's modules again and again while they load
    import torch

    gc.freeze()
    gc.enable()
    # threads bring nothing to small tensors, and on a busy machine they wait for each other
    torch.set_num_threads(1)


def open_targets(
    names: Sequence[str], device: str, patches: list[str] | None = None
) -> list[Target]:
    """Return these targets, and after each the same one patched if there are patches.

    Raises ``UsageError`` for a name that means nothing or a device that is not there,
    ``TargetError`` for a target that cannot be loaded.
    """
    if not all(name.strip() for name in names):
        raise UsageError("a target without a name; name one, such as builtin, 0.5.18 or a path")
    start_torch()
    from swaleak.targets import open as targets

    return targets.open_targets(names, targets.choose_device(device), patches)


def open_one(name: str, device: str, patches: list[str] | None = None) -> Target:
    """Return one target, patched if there are patches. Raises as ``open_targets``."""
    start_torch()
    from swaleak.targets.open import choose_device, open_target

    return open_target(name, choose_device(device), patches)


def strategies_of(target: Target, asked: list[str] | None) -> list[str]:
    """Return short names. Without any asked for: all four, one of which may be the target's own.

    Raises ``UsageError`` for an unknown name.
    """
    from swaleak.targets.open import strategy_of

    if asked:
        return list(dict.fromkeys(strategy_of(name) for name in asked))
    return [name for name in target.strategies() if name != "shipped"]


def trace_strategies(target: Target, asked: list[str] | None, fix: str | None) -> list[str]:
    """Return short names. Without any asked for: the one it was recorded under, or 0.5.18's."""
    if asked or fix:
        return strategies_of(target, asked or [str(fix)])
    return [target.ships or "deferred"]


def about(targets: Sequence[Target]) -> About:
    """Return what a report says of its targets: what was run, on which device.

    A patch ships nothing; whatever strategy its code looks like, the scenarios are what judges it.
    """
    import torch

    from swaleak.report.model import About
    from swaleak.targets.open import describe_device

    shown = [
        ("the built-in model" if target.name == "builtin" else target.name)
        + (f" (ships {target.ships})" if target.ships and not is_patched(target) else "")
        for target in targets
    ]
    where = f"{describe_device(targets[0].device)}, torch {torch.__version__}"
    header = f"swaleak {__version__}: {', '.join(shown)} on {where}"
    notes = tuple(note for target in targets for note in target.notes)
    patched = frozenset(target.name for target in targets if is_patched(target))
    stand_ins = {target.name: target.stand_ins for target in targets if target.stand_ins}
    return About(header, notes, str(torch.__version__), targets[0].device, patched, stand_ins)


def is_patched(target: Target) -> bool:
    """Whether ``--patch`` has changed it."""
    return target.origin("shipped") == "patched"


def choose(names: list[str] | None) -> list[Scenario]:
    """Return these scenarios, each once, or the default one. Raises ``ScriptError``."""
    return [catalogue.load(name) for name in dict.fromkeys(names or [catalogue.DEFAULT])]


def chosen_cases(
    scenarios: Sequence[Scenario],
    targets: Sequence[Target],
    strategies: list[str] | None,
    page_sizes: list[int] | None,
    *,
    keep_steps: bool = False,
    repeat: int = 1,
) -> Batch:
    """Run these scenarios at the page sizes asked for, or their own.

    Raises ``UsageError`` for what cannot be run like this, and if nothing could be run at all.
    """
    if repeat > 1 and any(scenario.caches for scenario in scenarios):
        raise UsageError("--repeat is for an allocator's scenarios, not for a cache's")
    cases: list[Case] = []
    left_out: list[str] = []
    for scenario in scenarios:
        for target in targets:
            for name in strategies_of(target, strategies):
                for size in dict.fromkeys(page_sizes or scenario.page_sizes):
                    cases += _run(
                        scenario, target, name, size, left_out, keep_steps=keep_steps, repeat=repeat
                    )
    return _batch(cases, left_out)


def catalogue_cases(
    targets: Sequence[Target],
    strategies: list[str] | None,
    page_sizes: list[int] | None,
    *,
    latent: bool = True,
) -> Batch:
    """Run the catalogue on every target; ``latent``: with what only the signature allows."""
    every = catalogue.catalogue()
    judged = [scenario for scenario in every if latent or scenario.reach == "production"]
    for size in page_sizes or ():
        check_page_size(size)
    cases: list[Case] = []
    left_out: list[str] = []
    for scenario in judged:
        least = min(scenario.page_sizes)
        for target in targets:
            for name in strategies_of(target, strategies):
                for size in dict.fromkeys(page_sizes or scenario.page_sizes):
                    if size >= least:
                        cases += _run(scenario, target, name, size, left_out)
    allocators = sum(not s.caches and s not in judged for s in every)
    if allocators:
        plural = "s" if allocators > 1 else ""
        left_out.append(f"{allocators} latent scenario{plural}, --strict judges by them too")
    return _batch(cases, left_out)


def page_maps(
    cases: list[Case], targets: Sequence[Target], repeat: int, *, every_step: bool
) -> dict[str, list[Section]]:
    """Return page maps of all cases, or, run once more, of those that failed."""
    from swaleak.report.page_map import page_maps

    if every_step:
        return page_maps(cases, every_step=True)
    failed = (
        case
        for case in cases
        if case.verdict in ("leak", "corrupt", "error")
        and not case.scenario.caches
        and _pages_times_steps(case.scenario) * repeat <= MAX_MAPPED_PAGES
    )
    of = {target.name: target for target in targets}
    again: Iterator[Case] = (
        one
        for case in failed
        for one in _run(
            case.scenario,
            of[case.target],
            case.strategy,
            case.page_size,
            [],
            keep_steps=True,
            repeat=repeat,
        )
    )
    return page_maps(again, every_step=False)


def _run(
    scenario: Scenario,
    target: Target,
    strategy: str,
    size: int,
    left_out: list[str],
    **options: Any,
) -> Iterator[Case]:
    """Run one case; a cache's scenario on each of its caches that the target has.

    What the target lacks is added to ``left_out``. Raises ``Interrupted`` that says which case.
    """
    from swaleak.checker.case import run_case

    caches: list[str | None] = [None]
    if scenario.caches:
        caches = []
        try:
            missing = target.caches.left_out
        except SwaleakError as error:
            missing = dict.fromkeys(scenario.caches, str(error))
        for cache in scenario.caches:
            if cache in missing:
                left_out.append(f"the {cache} cache of {target.name}: {missing[cache]}")
            else:
                caches.append(cache)
        options.pop("repeat", None)
    for which in caches:
        place = f"{scenario.name} on {target.name}, strategy {strategy}, page size {size}"
        with interruptible(place):
            yield run_case(scenario, target, strategy, size, cache=which, **options)


def _batch(cases: list[Case], left_out: list[str]) -> Batch:
    reasons = list(dict.fromkeys(left_out))
    if not cases:
        why = "; ".join(reasons) or "no scenario has that page size"
        raise (TargetError if reasons else UsageError)(f"nothing was run: {why}")
    return Batch(cases, tuple(f"Left out: {reason}." for reason in reasons))


def _pages_times_steps(scenario: Scenario) -> int:
    pages = (getattr(step, "pages", 1) for step in scenario.steps)
    return sum(n if isinstance(n, int) else 1 for n in pages) * len(scenario.steps)
