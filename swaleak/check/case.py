"""One case: a scenario on a target, under a strategy, at a page size; and was that declared?"""

from __future__ import annotations

import gc
from dataclasses import dataclass

from swaleak.check.replay import Run, replay
from swaleak.errors import ScriptError, UsageError
from swaleak.script import ops
from swaleak.script.ops import Op
from swaleak.script.scenario import MAX_SLOTS, Known, Outcome, Scenario, check_page_size
from swaleak.target import Sizes, Target

LARGE = 2**20  # slots
CANDIDATES = ("shipped", "patched")  # origins that are judged as SGLang's, not as our strategies


@dataclass(frozen=True, slots=True)
class Case:
    """What came out, beside what was declared.

    ``declared``: None where nothing is declared. ``known``: the failure that is known to happen
    here in SGLang as shipped. ``open_group``: all steps were done and a free group is open, so
    that what waits for its end is not judged.
    """

    scenario: Scenario
    target: str
    strategy: str
    origin: str
    page_size: int
    run: Run
    declared: Outcome | None
    known: Known | None
    open_group: bool = False

    @property
    def verdict(self) -> str:
        """Clean, leak, corrupt, refused or error."""
        return self.run.verdict

    @property
    def physical(self) -> int:
        """SWA pages that are not in the free list, at the end."""
        return self.run.audit.physical

    @property
    def mapped(self) -> int:
        """SWA pages that the mapping points at, at the end."""
        return self.run.audit.mapped

    @property
    def safe(self) -> bool:
        """Whether a candidate may come out like this: clean, or it refused what is misuse."""
        refused = self.verdict == "refused" and self.scenario.reach == "latent"
        return (self.verdict == "clean" or refused) and not self.run.unmet

    @property
    def as_declared(self) -> bool:
        """Whether it came out as declared; True where nothing is."""
        if self.run.unmet:
            return False
        if self.declared is None:
            return True
        if self.origin in CANDIDATES and self.known is None:
            return self.safe
        return self.verdict == self.declared.verdict and self._counts() and self._kinds()

    def _counts(self) -> bool:
        declared = self.declared
        assert declared is not None
        if declared.physical is None or declared.mapped is None:
            return declared.physical in (None, self.physical) and declared.mapped in (
                None,
                self.mapped,
            )
        # every round leaks what the first one leaked
        lost = (declared.physical - declared.mapped) * (self.run.repeats - 1)
        expected = (declared.physical + lost, declared.mapped)
        return (self.physical, self.mapped) == expected

    def _kinds(self) -> bool:
        assert self.declared is not None
        found = {violation.kind for violation in self.run.audit.violations}
        return found.issuperset(self.declared.kinds)


def run_case(
    scenario: Scenario,
    target: Target,
    strategy: str,
    page_size: int,
    *,
    keep_steps: bool = False,
    repeat: int = 1,
) -> Case:
    """Run one case. Raises ``ScriptError`` with the file and step that make no sense."""
    origin = target.origin(strategy)
    sizes = sizes_for(scenario, page_size, repeat)
    try:
        run = replay(
            target.make(strategy, sizes), scenario.steps, keep_steps=keep_steps, repeat=repeat
        )
    except ScriptError as error:
        raise ScriptError(f"{scenario.source or scenario.name}: {error}") from None
    if (sizes.full_pages + sizes.swa_pages) * page_size > LARGE:
        gc.collect()  # an allocator and its parts point at each other: free it before the next one
    known = None
    declared: Outcome | None = scenario.declared(strategy)
    if origin in CANDIDATES:
        known = scenario.known_failure(target.version, page_size)
        judged = target.version is not None or origin == "patched"
        declared = known.outcome if known else Outcome("clean") if judged else None
    open_group = ops.ends_in_group(scenario.steps) and not (run.raised or run.starved)
    return Case(
        scenario, target.name, strategy, origin, page_size, run, declared, known, open_group
    )


def sizes_for(scenario: Scenario, page_size: int, repeat: int = 1) -> Sizes:
    """Return the pools a scenario asks for, and room for what ``repeat`` rounds can leak.

    Raises ``UsageError`` for a size over the limits.
    """
    check_page_size(page_size)
    asked = sum(_asked(op, page_size) for op in scenario.steps) if repeat > 1 else 0
    spare = (repeat - 1) * asked
    full, swa = scenario.full_pages + spare, scenario.swa_pages + spare
    if max(full, swa) * page_size > MAX_SLOTS:
        raise UsageError(
            f"{scenario.name}: {max(full, swa)} pages of {page_size} slots are over the limit of "
            f"{MAX_SLOTS} slots a pool"
        )
    return Sizes(full, swa, page_size)


def _asked(op: Op, page_size: int) -> int:
    """Return how many pages an operation may take."""
    if isinstance(op, ops.Extend | ops.Decode):
        return -(-getattr(op, "tokens", 1) // page_size)
    return getattr(op, "pages", 0)
