"""Drives a script through an allocator, beside a ledger, and says what came out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swaleak.check.audit import Audit, audit, audit_of, read
from swaleak.check.picture import Page, picture
from swaleak.check.player import Allocator, Player, Starved
from swaleak.check.refusal import fingerprint, is_refusal
from swaleak.errors import RAISED, ScriptError, told
from swaleak.script import ops
from swaleak.script.ops import Op, TreeOp, describe


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a run: what was done, what the audit then said, and the SWA pages by then."""

    op: Op | TreeOp
    audit: Audit
    in_group: bool
    pages: tuple[Page, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """What came out. ``verdict``: clean, leak, corrupt, refused or error.

    ``audit``: at the end. ``failed_at``: first step (from 1) after which the audit disagreed, or
    at which the allocator raised. ``raised``: what it said. ``unmet``: expectations in the script
    that were not met. ``starved``: the pool ran dry although the ledger says there is room.
    """

    verdict: str
    audit: Audit
    failed_at: int | None = None
    raised: str | None = None
    unmet: tuple[str, ...] = ()
    starved: bool = False
    repeats: int = 1
    substituted: tuple[tuple[str, str], ...] = ()
    steps: tuple[Step, ...] = ()


def replay(
    allocator: Allocator, script: Iterable[Op], *, keep_steps: bool = False, repeat: int = 1
) -> Run:
    """Run a script and judge it.

    The allocator is audited after every step outside a group, and whenever it raises; it raising
    ends the run. With ``repeat`` the script runs again on the same allocator, after all nodes
    that are left have been freed; of the rounds between the first and the last one, only steps
    that expect something are audited, or all if they are kept. Raises ``ScriptError`` (with the
    step) for a step that makes no sense.
    """
    script = tuple(script)
    overwritten = {op.node for op in script if isinstance(op, ops.Overwrite)}
    judge = _Judge(Player(allocator, overwritten), keep_steps)
    for played in range(1, repeat + 1):
        judge.looking = keep_steps or played in (1, repeat)
        if played > 1 and not judge.tidy():
            break
        if not judge.play(script):
            break
    return judge.run(played)


def unmet(number: int, step: ops.Expect, seen: Audit) -> dict[str, str]:
    """Return what step ``number`` expects and an audit did not see: count -> sentence."""
    return {
        name: f"step {number} expects {name} {wanted}, found {getattr(seen, name)}"
        for name in ("physical", "mapped")
        if (wanted := getattr(step, name)) not in (None, getattr(seen, name))
    }


class _Judge:
    """Collects what a run shows, step by step."""

    def __init__(self, player: Player, keep_steps: bool) -> None:
        self.player = player
        self.keep_steps = keep_steps
        self.looking = True
        self.steps: list[Step] = []
        self.unmet: dict[tuple[int, str], str] = {}
        self.audit = audit(player.allocator, player.ledger)
        self.first_bad: tuple[int, Audit] | None = None
        self.raised: tuple[int, str, bool] | None = None
        self.starved = False

    def play(self, script: Iterable[Op], first: int = 1) -> bool:
        """Play all steps; False if the run cannot go on."""
        for number, op in enumerate(script, start=first):
            before = fingerprint(self.player.allocator)
            try:
                self.player.play(op)
            except ScriptError as error:
                raise ScriptError(f"step {number}: {error}") from None
            except Starved:
                self.starved = True
                self._look(number, op)
                if self.first_bad is None:
                    raise ScriptError(
                        f"step {number}: {describe(op)}: the pool is too small, pages that wait "
                        f"for the end of the group are not free yet"
                    ) from None
                return False
            except RAISED as error:  # of SGLang's code: a result, not a crash
                self._look(number, op)
                same = is_refusal(op, error, before, fingerprint(self.player.allocator))
                self.raised = (number, told(error), same)
                return False
            if self.looking or isinstance(op, ops.Expect):
                self._look(number, op)
        return True

    def tidy(self) -> bool:
        """Between two rounds, free every node that is left."""
        return all(self.play([op], first=0) for op in list(self.player.leftovers()))

    def _look(self, number: int, op: Op) -> None:
        ledger = self.player.ledger
        reading = read(self.player.allocator.state())
        self.audit = audit_of(reading, ledger)
        if self.audit.violations and self.first_bad is None:
            self.first_bad = (number, self.audit)
        if self.keep_steps:
            before = self.steps[-1].pages if self.steps else ()
            pages = picture(reading, ledger, before)
            self.steps.append(Step(op, self.audit, ledger.in_group, pages))
        if isinstance(op, ops.Expect):
            for name, said in unmet(number, op, self.audit).items():
                self.unmet.setdefault((number, name), said)

    def run(self, played: int) -> Run:
        """Return the outcome: what was lost first, then what was raised."""
        bad_step, bad = self.first_bad or (None, self.audit)
        verdicts = {self.audit.verdict, bad.verdict}
        verdict: str = next(v for v in ("leak", "corrupt", "clean") if v in verdicts)
        raised = None
        if self.raised:
            step, raised, same = self.raised
            if bad_step is None or bad_step == step:
                verdict, bad_step = ("refused" if same else "error"), step
        return Run(
            verdict=verdict,
            audit=self.audit if self.audit.violations or self.raised else bad,
            failed_at=bad_step,
            raised=raised,
            unmet=tuple(self.unmet.values()),
            starved=self.starved,
            repeats=played,
            substituted=tuple(self.player.allocator.substituted.items()),
            steps=tuple(self.steps),
        )
