"""A failing order made presentable: who owned what after each step, and a scenario to keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile

from packaging.specifiers import SpecifierSet

from swaleak.allocator.strategy import STRATEGIES
from swaleak.check.case import run_case
from swaleak.check.player import Allocator, Player
from swaleak.check.replay import Run, replay
from swaleak.errors import RAISED
from swaleak.script import ops
from swaleak.script.ops import Op
from swaleak.script.scenario import Known, Outcome, Scenario
from swaleak.search.shrink import nodes_of, renamed
from swaleak.target import SHIPPED, Builtin, Target

Owners = dict[str, tuple[tuple[int, int | None], ...]]  # node -> per page, full page and SWA page


@dataclass(frozen=True, slots=True)
class Witness:
    """An order, what came of it (``run`` keeps its steps), and who owned what after each step.

    ``owners`` is the ledger's view, so that it can be held against what the allocator says. A
    last step that raised has none.
    """

    order: tuple[Op, ...]
    run: Run
    owners: tuple[Owners, ...]


def witness(make: Callable[[], Allocator], order: Sequence[Op]) -> Witness:
    """Replay an order on a fresh allocator, with nodes called n1, n2 and so on."""
    order = renamed(order)
    buffers = [op.node for op in order if isinstance(op, ops.Overwrite)]
    player = Player(make(), buffers)
    owners: list[Owners] = []
    for op in order:
        try:
            player.play(op)
        except RAISED:  # the run says what it raised
            break
        owners.append(
            {
                name: tuple(zip(node.full, node.swa, strict=True))
                for name, node in (*player.ledger.nodes.items(), *player.ledger.ghosts.items())
            }
        )
    return Witness(order, replay(make(), order, keep_steps=True), tuple(owners))


def scenario_of(
    found: Witness, target: Target, strategy: str, page_size: int, pages: int, reach: str, how: str
) -> Scenario:
    """Return a scenario that replays to the same verdict on the same target.

    What it declares for our four strategies is what the built-in model does with them; for
    SGLang as shipped, the release it was found in. ``how``: the search, for the story. ``pages``:
    the size of both pools.
    """
    bare = Scenario(
        name="explored",
        title=f"{target.name}, {strategy}: {found.run.verdict} after {len(found.order)} steps",
        steps=found.order,
        reach=reach,
        story=f"Found by {how}. " + "; ".join(str(v) for v in found.run.audit.violations),
        full_pages=pages,
        swa_pages=pages,
        page_sizes=(page_size,),
    )
    return declared(bare, found.run, target, strategy)


def declared(bare: Scenario, run: Run, target: Target, strategy: str) -> Scenario:
    """Return a scenario of one page size with what comes out of it declared.

    For our four strategies that is what the built-in model does with them; ``run``, of ``target``
    under ``strategy``, is known of the release if that is SGLang as shipped.
    """
    model, [page_size] = Builtin(target.device), bare.page_sizes
    expect = {name: outcome_of(run_case(bare, model, name, page_size).run) for name in STRATEGIES}
    known: tuple[Known, ...] = ()
    origin = target.origin(strategy)
    if origin == SHIPPED and target.version:
        known = (Known(SpecifierSet(f"=={target.version}"), outcome_of(run)),)
    elif origin != SHIPPED:
        expect[strategy] = outcome_of(run)
    return replace(bare, expect=expect, known=known)


def outcome_of(run: Run) -> Outcome:
    """Return what a run came out as, to be declared."""
    kinds = tuple(dict.fromkeys(violation.kind for violation in run.audit.violations))
    return Outcome(run.verdict, run.audit.physical, run.audit.mapped, kinds)


def described_by(order: Sequence[Op], catalogue: Iterable[Scenario]) -> str | None:
    """Return the scenario that is this order, but for bystanders, names and checks, if any."""
    shape = _shape(order)
    return next((s.name for s in catalogue if _shape(s.steps) == shape), None)


def _shape(script: Sequence[Op]) -> tuple[Op, ...]:
    """Return a script without bystanders and checks, first allocations in the order of use."""
    script = [op for op in script if not isinstance(op, ops.Expect)]
    rest = list(dropwhile(lambda op: isinstance(op, ops.Alloc), script))
    first = script[: len(script) - len(rest)]
    used = list(dict.fromkeys(name for op in rest for name in nodes_of(op)))
    needed = [op for name in used for op in first if name in nodes_of(op)]
    return renamed([*needed, *rest])
