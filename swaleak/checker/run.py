"""The run: makes calls on an allocator and on its shadow, compares the two, gives the verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from swaleak.checker.compare import (
    Comparison,
    Violation,
    compare,
    compare_pages,
    read,
)
from swaleak.checker.page_map import Page, page_map
from swaleak.checker.shadow import Shadow
from swaleak.checker.snapshot import Marks, marks, unchanged
from swaleak.errors import RAISED, ScriptError, format_error
from swaleak.scenario import steps
from swaleak.scenario.calls import Call, PoolExhausted, WrongAllocation
from swaleak.scenario.contract import ALLOCATES, check_room, check_size, is_legal, refusal
from swaleak.scenario.steps import Step
from swaleak.scenario.toml import CALLER
from swaleak.targets.driver import Driver

MISTAKES_KEPT = 100  # of one run
# what a mistake in the code raises, and no check that was written on purpose
MISTAKES = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    RecursionError,
    SystemExit,
    TypeError,
    WrongAllocation,
)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step left behind: the comparison after it, and the SWA pages that are not free."""

    step: object
    comparison: Comparison
    in_group: bool
    pages: tuple[Page, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """What came out. ``verdict``: clean, leak, corrupt, refused or error.

    ``comparison``: at the end. ``failed_at``: the step (from 1) from which on something holds that
    is wrong at the end, or at which the allocator raised. ``healed``: what was wrong in between,
    each with the step after which it was first seen. ``raised``: what the allocator said.
    ``unmet``: expectations of the script that were not met. ``exhausted``: a pool ran dry although
    there should have been room. ``mistakes``: of the caller, each with its step.
    """

    verdict: str
    comparison: Comparison
    failed_at: int | None = None
    healed: tuple[tuple[int, Violation], ...] = ()
    raised: str | None = None
    unmet: tuple[str, ...] = ()
    exhausted: bool = False
    repeats: int = 1
    substituted: tuple[tuple[str, str], ...] = ()
    steps: tuple[StepResult, ...] = ()
    mistakes: tuple[tuple[int, Violation], ...] = ()

    @property
    def signature(self) -> tuple[str, frozenset[tuple[str, str | None]]]:
        """How it fails: two runs with the same signature fail in the same way."""
        violations = (*self.comparison.violations, *(mistake for _, mistake in self.mistakes))
        return self.verdict, frozenset((one.kind, one.pool) for one in violations)

    @property
    def seen(self) -> tuple[Violation, ...]:
        """What was wrong with the allocator, or a cache, at any time."""
        return (*self.comparison.violations, *(violation for _, violation in self.healed))

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of violations and mistakes that were seen at any time."""
        mistakes = (mistake for _, mistake in self.mistakes)
        return frozenset(violation.kind for violation in (*self.seen, *mistakes))

    @property
    def by_caller(self) -> bool:
        """Whether the caller has made mistakes, and all that went wrong comes of them."""
        return bool(self.mistakes) and all(one.fault == CALLER for one in self.seen)


class Execution:
    """An allocator and its shadow, call by call."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        state = driver.state()
        self.shadow = Shadow(state.full_pages, state.swa_pages, state.page_size)

    def step(self, step: Step) -> None:
        """Make a step's calls. Raises ``ScriptError`` for a step that makes no sense now.

        Also raises ``PoolExhausted``, and what the allocator raises.
        """
        reason = refusal(step, self.shadow)
        if reason is not None:
            raise ScriptError(reason)
        check_room(step, self.shadow)
        self.make(step)

    def is_legal(self, step: Step) -> bool:
        """Whether a step makes sense now, and is no mistake of the caller."""
        return is_legal(step, self.shadow)

    def make(self, step: Step) -> None:
        """Make the calls of a step that is known to be legal."""
        for call in step.lower(self.shadow):
            call.make(self.driver, self.shadow)
        step.rename(self.shadow)

    def call(self, call: Call) -> None:
        """Make one call, of a trace. Raises as ``step``."""
        if call.allocates and not check_size(call, self.shadow):
            raise PoolExhausted
        call.make(self.driver, self.shadow)

    def leftovers(self) -> Iterable[Step]:
        """Yield what frees every node that is left, group and all."""
        if self.shadow.in_group:
            yield steps.Group("end")
        for name in self.shadow.orphans():
            yield steps.FreeSwa(name)
        for name, node in list(self.shadow.nodes.items()):
            peers = any(self.shadow.peers(node))
            yield steps.Free(name) if peers else steps.FreeFull(name)


class Findings:
    """What comparisons have shown so far, and what follows from it."""

    def __init__(self) -> None:
        self.comparison = Comparison(0, 0, 0)
        self.since: dict[Violation, int] = {}  # what is wrong now, and since when
        self.first: dict[Violation, int] = {}  # what was ever wrong
        self.raised: tuple[int, str, bool] | None = None
        self.exhausted: int | None = None
        self.mistakes: list[tuple[int, Violation]] = []

    def called(self, number: int, shadow: Shadow) -> None:
        """Enter a caller's mistakes in step or line ``number``; of a step, those of one round."""
        if shadow.mistakes:
            known = {(at, mistake.kind, mistake.pool) for at, mistake in self.mistakes}
            for kind, pool, pages in shadow.mistakes:
                if (number, kind, pool) not in known and len(self.mistakes) < MISTAKES_KEPT:
                    self.mistakes.append((number, Violation(kind, pages, pool, fault=CALLER)))
            shadow.mistakes.clear()

    def compared(self, number: int, comparison: Comparison, *, in_group: bool = False) -> None:
        """Enter a comparison after step or line ``number``."""
        if in_group:  # nothing is due yet
            self.comparison = replace(comparison, violations=self.comparison.violations)
            return
        same = comparison.violations == self.comparison.violations
        self.comparison = comparison
        if same:
            return
        wrong = {one for violation in comparison.violations for one in _single(violation)}
        self.since = {one: self.since.get(one, number) for one in wrong}
        for one in wrong:
            self.first.setdefault(one, number)

    @property
    def verdict(self) -> str:
        """The worst that was seen; what was raised counts where nothing was wrong before.

        Of what comes of a caller's mistake, only a leak counts.
        """
        wrong = [one for one in self.first if one.kind == "leak" or one.fault != CALLER]
        if self.raised and not any(self.first[one] < self.raised[0] for one in wrong):
            return "refused" if self.raised[2] else "error"
        if wrong:
            return "leak" if any(one.kind == "leak" for one in wrong) else "corrupt"
        return "error" if self.exhausted else "clean"

    @property
    def failed_at(self) -> int | None:
        """From where on something holds that is wrong at the end, or where it was raised."""
        raised = self.raised[0] if self.raised else None
        return min(self.since.values(), default=raised)

    @property
    def healed(self) -> tuple[tuple[int, Violation], ...]:
        """What was wrong once and is not any more."""
        gone = [(at, one) for one, at in self.first.items() if one not in self.since]
        joined: dict[tuple[int, Violation], list[int]] = {}
        for at, one in sorted(gone, key=lambda pair: (pair[0], pair[1].pages)):
            joined.setdefault((at, replace(one, pages=())), []).extend(one.pages)
        return tuple((at, replace(one, pages=tuple(pages))) for (at, one), pages in joined.items())

    def run(self, **rest: Any) -> Run:
        """Return the outcome; ``rest``: the other fields of ``Run``."""
        rest |= {"healed": self.healed, "mistakes": tuple(self.mistakes)}
        return Run(self.verdict, self.comparison, self.failed_at, **rest)


def _single(violation: Violation) -> Iterable[Violation]:
    """Yield a violation page by page: pages come and go one by one."""
    for page in violation.pages:
        yield replace(violation, pages=(page,))


def run_script(
    driver: Driver, script: Iterable[Step], *, keep_steps: bool = False, repeat: int = 1
) -> Run:
    """Run a script and judge it.

    The allocator is compared with its shadow after every step outside a group, and whenever it
    raises; it raising ends the run. With ``repeat`` the script runs again on the same allocator,
    after all nodes that are left have been freed; of the rounds between the first and the last
    one, only steps that expect something are compared, or all if they are kept. Raises
    ``ScriptError`` (with the step) for a step that makes no sense.
    """
    script = tuple(script)
    runner = _ScriptRunner(driver, keep_steps)
    for made in range(1, repeat + 1):
        runner.comparing = keep_steps or made in (1, repeat)
        if made > 1 and not all(runner.make([s], first=0) for s in runner.execution.leftovers()):
            break
        if not runner.make(script):
            break
    return runner.run(made)


def unmet_expectations(number: int, step: steps.Expect, seen: Comparison) -> dict[str, str]:
    """Return what step ``number`` expects and a comparison did not show: count -> sentence."""
    return {
        name: f"step {number} expects {name} {wanted}, found {getattr(seen, name)}"
        for name in ("physical", "mapped")
        if (wanted := getattr(step, name)) not in (None, getattr(seen, name))
    }


class _ScriptRunner:
    """Collects what a run shows, step by step."""

    def __init__(self, driver: Driver, keep_steps: bool) -> None:
        self.execution = Execution(driver)
        self.keep_steps = keep_steps
        self.comparing = True
        self.steps: list[StepResult] = []
        self.unmet: dict[tuple[int, str], str] = {}
        self.findings = Findings()
        self.findings.compared(0, compare(driver.state(), self.execution.shadow))

    def make(self, script: Iterable[Step], first: int = 1) -> bool:
        """Make all steps; False if the run cannot go on."""
        execution, findings = self.execution, self.findings
        for number, step in enumerate(script, start=first):
            before = marks(execution.driver)
            try:
                execution.step(step)
            except ScriptError as error:
                raise ScriptError(f"step {number}: {error}") from None
            except PoolExhausted:
                findings.exhausted = number
                self._compare(number, step)
                if not findings.first:
                    raise ScriptError(
                        f"step {number}: {step}: the pool is too small, pages that wait for the "
                        f"end of the group are not free yet"
                    ) from None
                return False
            except RAISED as error:  # of SGLang's code: a result, not a crash
                self._compare(number, step)
                refused = is_refusal(step, error, before, marks(execution.driver))
                findings.raised = (number, format_error(error), refused)
                return False
            finally:
                findings.called(number, execution.shadow)
            if self.comparing or isinstance(step, steps.Expect):
                self._compare(number, step)
        return True

    def _compare(self, number: int, step: Step) -> None:
        shadow, state = self.execution.shadow, self.execution.driver.state()
        if self.keep_steps:
            reading = read(state, shadow.orphaned)
            comparison = compare_pages(reading, shadow)
            pages = page_map(reading, shadow, self.steps[-1].pages if self.steps else ())
            self.steps.append(StepResult(step, comparison, shadow.in_group, pages))
        else:
            comparison = compare(state, shadow)
        self.findings.compared(number, comparison, in_group=shadow.in_group)
        if isinstance(step, steps.Expect):
            for name, sentence in unmet_expectations(number, step, comparison).items():
                self.unmet.setdefault((number, name), sentence)

    def run(self, made: int) -> Run:
        """Return the outcome."""
        findings = self.findings
        return findings.run(
            raised=findings.raised[1] if findings.raised else None,
            unmet=tuple(self.unmet.values()),
            exhausted=findings.exhausted is not None,
            repeats=made,
            substituted=tuple(self.execution.driver.substituted.items()),
            steps=tuple(self.steps),
        )


def is_refusal(step: Step, error: BaseException, before: Marks, after: Marks) -> bool:
    """Whether an allocator that raised has refused: on purpose, and with nothing changed.

    Refusing an allocation is always an error: a script asks for no more than there is.
    """
    on_purpose = not isinstance(error, MISTAKES) and not isinstance(step, ALLOCATES)
    return on_purpose and unchanged(before, after)
