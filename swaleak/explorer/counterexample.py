"""A failing order made presentable: who owned what after each step, and a scenario to keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile

from packaging.specifiers import SpecifierSet

from swaleak.allocator.strategies import STRATEGIES
from swaleak.checker.case import run_case
from swaleak.checker.conservation import run_on_cache
from swaleak.checker.run import Execution, Run, run_script
from swaleak.errors import RAISED
from swaleak.explorer.shrink import renamed
from swaleak.scenario import steps
from swaleak.scenario.steps import Step
from swaleak.scenario.toml import Known, Outcome, Scenario
from swaleak.targets.driver import Driver, Sizes
from swaleak.targets.open import SHIPPED, Builtin, Target
from swaleak.targets.radix_cache import RadixCache

Owners = dict[str, tuple[tuple[int, int | None], ...]]  # node -> per page, full page and SWA page


@dataclass(frozen=True, slots=True)
class Counterexample:
    """An order, what came of it (``run`` keeps its steps), and who owned what after each step.

    ``owners`` is what the shadow holds, to be compared with what the allocator says. A last step
    that raised has none. ``scenario``: the one of the catalogue that is this order, if any.
    """

    order: tuple[Step, ...]
    run: Run
    owners: tuple[Owners, ...]
    scenario: str | None


def counterexample(
    fresh: Callable[[], Driver], order: Sequence[Step], catalogue: Iterable[Scenario]
) -> Counterexample:
    """Run an order on a fresh allocator, with nodes called n1, n2 and so on."""
    order = renamed(order)
    execution = Execution(fresh())

    def owners() -> Owners:
        shadow = execution.shadow
        return {
            name: tuple(
                (page, peer or None)
                for page, peer in zip(node.pages, shadow.peers(node), strict=True)
            )
            for name, node in (shadow.nodes | shadow.orphans()).items()
        }

    along = tuple(_along(order, execution.make, owners))
    run = run_script(fresh(), order, keep_steps=True)
    return Counterexample(order, run, along, same_order(order, catalogue))


def cache_counterexample(
    make: Callable[[str], RadixCache],
    strategy: str,
    order: Sequence[Step],
    catalogue: Iterable[Scenario],
) -> Counterexample:
    """Run an order of requests on a fresh cache, with requests called r1, r2 and so on."""
    order = renamed(order)
    tree = make(strategy)

    def owners() -> Owners:
        there = tree.look().owners.items()
        return {name: tuple(zip(owned.full, owned.swa, strict=True)) for name, owned in there}

    along = tuple(_along(order, tree.play, owners))
    run = run_on_cache(make, strategy, order, keep_steps=True)
    known = (s.name for s in catalogue if s.caches and renamed(s.steps) == order)
    return Counterexample(order, run, along, next(known, None))


def _along(
    order: Iterable[Step], make: Callable[[Step], None], owners: Callable[[], Owners]
) -> Iterator[Owners]:
    """Make the steps of an order, and yield the owners after each."""
    for step in order:
        try:
            make(step)
        except RAISED:  # the run says what it raised
            return
        yield owners()


def scenario_of(
    found: Counterexample,
    target: Target,
    strategy: str,
    sizes: Sizes,
    reach: str,
    cache: str | None = None,
) -> Scenario:
    """Return a scenario that runs to the same verdict on the same target.

    ``cache``: the one that its requests run on.
    """
    how = f"swaleak explore on {target.name} ({strategy})"
    bare = Scenario(
        name="explored",
        title=f"{target.name}, {strategy}: {found.run.verdict} after {len(found.order)} steps",
        steps=found.order,
        reach=reach,
        story=f"Found by {how}. " + "; ".join(str(v) for v in found.run.comparison.violations),
        full_pages=sizes.full_pages,
        swa_pages=sizes.swa_pages,
        page_sizes=(sizes.page_size,),
        caches=(cache,) if cache else (),
    )
    return declared(bare, found.run, target, strategy)


def declared(bare: Scenario, run: Run, target: Target, strategy: str) -> Scenario:
    """Return a scenario of one page size with what comes out of it declared.

    For our four strategies that is what the built-in model does with them; ``run``, of ``target``
    under ``strategy``, is known of the release if that is SGLang as shipped. Of a candidate
    nothing is declared: it has to be clean.
    """
    model, [page_size] = Builtin(target.device), bare.page_sizes
    expect = {}
    if not bare.caches:  # the model has none
        for name in STRATEGIES:
            expect[name] = outcome_of(run_case(bare, model, name, page_size).run)
    known: tuple[Known, ...] = ()
    if target.origin(strategy) in ("builtin", "grafted"):
        expect[strategy] = outcome_of(run)
    elif target.origin(strategy) == SHIPPED and target.version:
        faults = {violation.fault for violation in run.comparison.violations}
        fault = "allocator" if "allocator" in faults or not bare.caches else "cache"
        where = SpecifierSet(f"=={target.version}")
        known = (Known(where, outcome_of(run), fault=fault),)
    return replace(bare, expect=expect, known=known)


def outcome_of(run: Run) -> Outcome:
    """Return what a run came out as, to be declared."""
    kinds = tuple(dict.fromkeys(violation.kind for violation in run.comparison.violations))
    return Outcome(run.verdict, run.comparison.physical, run.comparison.mapped, kinds)


def same_order(order: Sequence[Step], catalogue: Iterable[Scenario]) -> str | None:
    """Return the scenario that is this order, but for bystanders, names and checks, if any."""
    shape = _shape(order)
    return next((s.name for s in catalogue if not s.caches and _shape(s.steps) == shape), None)


def _shape(script: Sequence[Step]) -> tuple[Step, ...]:
    """Return a script without bystanders and checks, first allocations in the order of use."""
    script = [step for step in script if not isinstance(step, steps.Expect)]
    rest = list(dropwhile(lambda step: isinstance(step, steps.Alloc), script))
    first = script[: len(script) - len(rest)]
    used = list(dict.fromkeys(name for step in rest for name in step.nodes()))
    needed = [step for name in used for step in first if name in step.nodes()]
    return renamed([*needed, *rest])
