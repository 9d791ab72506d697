"""One case at the level of the radix cache: a tree script on a cache, and was that declared?"""

from __future__ import annotations

from swaleak.check.audit import Reading, audit_of, read
from swaleak.check.case import Case, sizes_for
from swaleak.check.ledger import Ledger, Node
from swaleak.check.picture import picture
from swaleak.check.replay import Run, Step, unmet
from swaleak.errors import RAISED, ScriptError, told
from swaleak.script.ops import Expect
from swaleak.script.scenario import Outcome
from swaleak.script.tree import TreeScenario
from swaleak.sglang.tree import Caches, PoolEmpty, Tree
from swaleak.target import SHIPPED, Target


def tree_cases(
    scenario: TreeScenario,
    caches: Caches,
    target: Target,
    strategy: str,
    page_sizes: tuple[int, ...],
    *,
    keep_steps: bool = False,
) -> list[Case]:
    """Run a script on every cache it names and the installed SGLang has.

    ``target``: the same SGLang's allocator; it knows the release and the strategy it ships. The
    strategy that SGLang ships runs its class untouched, or as the plugin has left it
    (``SWALEAK=fix:…``), which is then shown as grafted.
    """
    return [
        _case(scenario, caches, target, strategy, cache, page_size, keep_steps)
        for cache in scenario.caches
        if cache not in caches.left_out
        for page_size in page_sizes
    ]


def _case(
    scenario: TreeScenario,
    caches: Caches,
    target: Target,
    strategy: str,
    cache: str,
    page_size: int,
    keep_steps: bool,
) -> Case:
    about = scenario.on(cache)
    sizes = sizes_for(about, page_size)
    untouched = target.origin(strategy) == SHIPPED
    repaired = caches.repaired_by if strategy == SHIPPED else None
    # asked for by its name, a strategy is what it says, whatever the plugin has done to the class
    asked = strategy if not untouched or (caches.repaired_by and strategy != SHIPPED) else None
    tree = caches.make(cache, asked, sizes.full_pages, sizes.swa_pages, page_size, scenario.window)
    run = _play(scenario, tree, keep_steps)
    known = None
    if repaired or asked:
        declared: Outcome | None = scenario.about.declared(repaired or strategy)
    else:
        known = about.known_failure(target.version, page_size)
        declared = known.outcome if known else Outcome("clean") if target.version else None
    origin = "grafted" if repaired or asked else SHIPPED
    open_group = tree.in_group and not run.raised
    return Case(about, target.name, strategy, origin, page_size, run, declared, known, open_group)


def _play(scenario: TreeScenario, tree: Tree, keep_steps: bool) -> Run:
    """Play all steps, drop the locks, let the cache check itself."""
    steps: list[Step] = []
    missed: list[str] = []
    failed_at: int | None = None
    reading, ledger = _look(tree)
    seen = audit_of(reading, ledger)
    raised: str | None = None
    number = 0
    try:
        for number, step in enumerate(scenario.steps, start=1):
            if isinstance(step, Expect):
                missed += unmet(number, step, seen).values()
            else:
                tree.play(step)
                reading, ledger = _look(tree)
                seen = audit_of(reading, ledger)
            if seen.violations and failed_at is None:
                failed_at = number
            if keep_steps:
                pages = picture(reading, ledger, steps[-1].pages if steps else ())
                steps.append(Step(step, seen, tree.in_group, pages))
        tree.settle()
    except PoolEmpty as error:
        raise ScriptError(
            f"{scenario.about.source or scenario.about.name}: step {number}: {error}"
        ) from None
    except RAISED as error:  # whatever SGLang's code raises is a result, not a crash
        raised = told(error)
        failed_at = failed_at or number
        seen = audit_of(*_look(tree))
    verdict = seen.verdict if seen.violations or not raised else "error"
    return Run(
        verdict=verdict,
        audit=seen,
        failed_at=failed_at,
        raised=raised,
        unmet=tuple(missed),
        steps=tuple(steps),
    )


def _look(tree: Tree) -> tuple[Reading, Ledger]:
    """Return what the allocator says, and what the tree says that it should."""
    nodes = {name: Node(*owned) for name, owned in tree.owners().items()}
    ledger = Ledger(tree.page_size, nodes, in_group=tree.in_group)
    return read(tree.state()), ledger
