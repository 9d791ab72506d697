"""Which cases a command runs: some scenarios or the whole catalogue, of allocators and of caches.

Torch, and whatever imports it, is imported inside the functions: a name that means nothing is
refused before it is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swaleak.driven import interruptible, strategies_of
from swaleak.errors import SwaleakError, UsageError
from swaleak.script import catalogue as scenarios
from swaleak.script import tree as trees
from swaleak.script.scenario import Scenario, check_page_size
from swaleak.script.tree import TreeScenario

if TYPE_CHECKING:
    from swaleak.check.case import Case
    from swaleak.report.model import Section
    from swaleak.sglang.tree import Caches
    from swaleak.target import Target

MAX_PICTURED = 200_000  # pages times steps; what is more is drawn only if --steps asks for it


@dataclass(frozen=True, slots=True)
class Chosen:
    """The scenarios that somebody named: those of an allocator, and those of the caches."""

    scenarios: tuple[Scenario, ...]
    trees: tuple[TreeScenario, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Cases of the catalogue.

    ``notes``: why some scenarios of the caches are not among them. ``left_out``: how many latent
    scenarios of an allocator are not.
    """

    cases: list[Case]
    notes: tuple[str, ...]
    left_out: int


def choose(names: list[str] | None) -> Chosen:
    """Return the scenarios of these names, or the default one. Raises ``ScriptError``."""
    asked = names or [scenarios.DEFAULT]
    return Chosen(
        tuple(scenarios.load(name) for name in asked if not trees.is_tree(name)),
        tuple(trees.load(name) for name in asked if trees.is_tree(name)),
    )


def chosen_cases(
    chosen: Chosen,
    targets: Sequence[Target],
    strategies: list[str] | None,
    page_sizes: list[int] | None,
    *,
    steps: bool,
    repeat: int,
) -> list[Case]:
    """Run these scenarios on every target; those of the caches on the first one.

    ``steps``: keep them. Raises ``UsageError`` for what cannot be run like this.
    """
    cases: list[Case] = []
    if chosen.trees:
        first = targets[0]
        caches = _caches_of(first)
        for tree in chosen.trees:
            for name in strategies_of(first, strategies):
                cases += _tree_cases(tree, caches, first, name, page_sizes, steps=steps)
    return cases + [
        _run(scenario, target, name, size, keep_steps=steps, repeat=repeat)
        for scenario in chosen.scenarios
        for target in targets
        for name in strategies_of(target, strategies)
        for size in page_sizes or scenario.page_sizes
    ]


def catalogue_cases(
    targets: Sequence[Target],
    strategies: list[str] | None,
    page_sizes: list[int] | None,
    *,
    latent: bool = True,
) -> Batch:
    """Run the catalogue on every target; ``latent``: with what only the signature allows."""
    catalogue = scenarios.catalogue()
    judged = [scenario for scenario in catalogue if latent or scenario.reach == "production"]
    cases = [
        _run(scenario, target, name, size)
        for scenario in judged
        for target in targets
        for name in strategies_of(target, strategies)
        for size in _sizes_of(scenario, page_sizes)
    ]
    notes = []
    for target in targets:
        caches, note = _caches_or_why_not(target)
        notes.append(note)
        for tree in trees.catalogue():
            if caches and (latent or tree.about.reach == "production"):
                for name in strategies_of(target, strategies):
                    cases += _tree_cases(tree, caches, target, name, page_sizes)
    return Batch(cases, tuple(dict.fromkeys(filter(None, notes))), len(catalogue) - len(judged))


def page_maps_of(
    cases: list[Case], targets: list[Target], repeat: int, *, every_step: bool
) -> dict[str, list[Section]]:
    """Return page maps of all cases, or, played once more, of those that failed."""
    from swaleak.report.page_map import page_maps

    if every_step:
        return page_maps(cases, every_step=True)
    failed = (
        case
        for case in cases
        if case.verdict in ("leak", "corrupt", "error")
        and not trees.is_tree(case.scenario.name)
        and _pages_times_steps(case.scenario) * repeat <= MAX_PICTURED
    )
    of = {target.name: target for target in targets}
    again = (
        _run(
            case.scenario,
            of[case.target],
            case.strategy,
            case.page_size,
            keep_steps=True,
            repeat=repeat,
        )
        for case in failed
    )
    return page_maps(again, every_step=False)


def _run(scenario: Scenario, target: Target, strategy: str, size: int, **wishes: Any) -> Case:
    """Run one case, as ``run_case`` does. Raises ``Interrupted`` that says which."""
    from swaleak.check.case import run_case

    with interruptible(_place(scenario.name, target, strategy, f"page size {size}")):
        return run_case(scenario, target, strategy, size, **wishes)


def _place(scenario: str, target: Target, strategy: str, sizes: str) -> str:
    return f"{scenario} on {target.name}, strategy {strategy}, {sizes}"


def _sizes_of(scenario: Scenario, asked: list[int] | None) -> tuple[int, ...]:
    """Return the page sizes to run at; none below those that the scenario is made for.

    Raises ``UsageError`` for a size that no scenario has.
    """
    for size in asked or ():
        check_page_size(size)
    least = min(scenario.page_sizes)
    return tuple(size for size in asked or scenario.page_sizes if size >= least)


def _caches_of(target: Target) -> Caches:
    """Return the caches of the installed SGLang; raises ``UsageError`` for any other target."""
    if not target.is_installed:
        raise UsageError(
            f"{trees.PREFIX}… drives the caches of an installed SGLang, not {target.name}; "
            f"use --on installed"
        )
    from swaleak.sglang.tree import Caches

    return Caches(target.device)


def _caches_or_why_not(target: Target) -> tuple[Caches | None, str]:
    """Return the caches, if the target has any, and the line that says what was left out."""
    try:
        caches = _caches_of(target)
    except SwaleakError as error:
        reason = (
            "they need the installed SGLang, --on installed"
            if isinstance(error, UsageError)
            else str(error)
        )
        return None, f"Left out: the scenarios of the radix caches, {trees.PREFIX}…; {reason}."
    why = "; ".join(f"{cache}: {reason}" for cache, reason in caches.left_out.items())
    return caches, f"Left out: {why}." if why else ""


def _tree_cases(
    tree: TreeScenario,
    caches: Caches,
    target: Target,
    strategy: str,
    page_sizes: list[int] | None,
    *,
    steps: bool = False,
) -> list[Case]:
    """Run a script of the radix caches on every cache there is."""
    from swaleak.check.trees import tree_cases

    sizes = _sizes_of(tree.about, page_sizes)
    told = f"page size {' or '.join(map(str, sizes))}"
    with interruptible(_place(tree.about.name, target, strategy, told)):
        return tree_cases(tree, caches, target, strategy, sizes, keep_steps=steps)


def _pages_times_steps(scenario: Scenario) -> int:
    asked = sum(getattr(op, "pages", 1) for op in scenario.steps)
    return asked * len(scenario.steps)
