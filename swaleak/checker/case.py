"""One case: a scenario on a target, under a strategy, at a page size; and was that declared?"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from dataclasses import dataclass

from swaleak.checker.conservation import run_on_cache
from swaleak.checker.run import Run, run_script
from swaleak.errors import ScriptError, TargetError, UsageError
from swaleak.scenario import steps
from swaleak.scenario.calls import MAX_SLOTS
from swaleak.scenario.toml import Known, Outcome, Scenario, check_page_size
from swaleak.targets.driver import Sizes
from swaleak.targets.open import Target
from swaleak.targets.radix_cache import RadixCache

LARGE = 2**20  # slots, and bytes of a block of memory
M_MMAP_THRESHOLD = -3  # see mallopt(3)
CANDIDATES = ("shipped", "patched")  # origins that are judged as SGLang's, not as our strategies


@dataclass(frozen=True, slots=True)
class Case:
    """What came out, beside what was declared.

    ``declared``: of our strategies what the scenario declares; of SGLang's own code the failure
    that is known of that very release (``known``), and clean otherwise. ``open_group``: all steps
    were made and a free group is open, so that what waits for its end is not judged.
    """

    scenario: Scenario
    target: str
    strategy: str
    origin: str
    page_size: int
    run: Run
    declared: Outcome
    known: Known | None = None
    open_group: bool = False

    @property
    def verdict(self) -> str:
        """Clean, leak, corrupt, refused or error."""
        return self.run.verdict

    @property
    def physical(self) -> int:
        """SWA pages that are not in the free list, at the end."""
        return self.run.comparison.physical

    @property
    def mapped(self) -> int:
        """SWA pages that the mapping reaches, at the end."""
        return self.run.comparison.mapped

    @property
    def safe(self) -> bool:
        """Whether a candidate may come out like this: clean, or it refused what is misuse.

        What comes of a caller's mistake is not its fault.
        """
        refused = self.verdict == "refused" and self.scenario.reach == "latent"
        return (self.verdict == "clean" or refused or self.run.by_caller) and not self.run.unmet

    @property
    def as_declared(self) -> bool:
        """Whether it came out as declared."""
        if self.run.unmet:
            return False
        if self.origin in CANDIDATES and self.known is None:
            return self.safe
        same = self.verdict == self.declared.verdict and self._counts()
        return same and self.run.kinds.issuperset(self.declared.kinds)

    def _counts(self) -> bool:
        declared = self.declared
        if declared.physical is None or declared.mapped is None:
            return declared.physical in (None, self.physical) and declared.mapped in (
                None,
                self.mapped,
            )
        # every round leaks what the first one leaked
        lost = (declared.physical - declared.mapped) * (self.run.repeats - 1)
        expected = (declared.physical + lost, declared.mapped)
        return (self.physical, self.mapped) == expected


def change(case: Case, baseline: Case | None) -> str:
    """Return what a candidate's case is beside its baseline's.

    ``clean``, or ``failing`` where there is no baseline; else ``new``, ``fixed`` or ``unchanged``.
    """
    if baseline is None or (case.safe and baseline.safe):
        return "clean" if case.safe else "failing"
    if case.safe:
        return "fixed"
    same = not baseline.safe and case.run.signature == baseline.run.signature
    return "unchanged" if same else "new"


def passes(case: Case, baseline: Case | None) -> bool:
    """Whether a candidate passes: clean in production, and nothing latent worse than before."""
    if case.scenario.reach == "production":
        return case.safe
    return change(case, baseline) not in ("failing", "new")


def run_case(
    scenario: Scenario,
    target: Target,
    strategy: str,
    page_size: int,
    *,
    cache: str | None = None,
    keep_steps: bool = False,
    repeat: int = 1,
) -> Case:
    """Run one case; of a cache's scenario, on ``cache``.

    Raises ``ScriptError`` with the file and step that make no sense, ``UsageError`` for pools
    over the limits.
    """
    origin = target.origin(strategy)
    sizes = sizes_for(scenario, page_size, repeat)
    if (sizes.full_pages + sizes.swa_pages) * page_size > LARGE:
        _prepare_large()
    try:
        if cache is None:
            driver = target.make(strategy, sizes)
            run = run_script(driver, scenario.steps, keep_steps=keep_steps, repeat=repeat)
        else:

            def make(strategy: str) -> RadixCache:
                tokens, eagle = scenario.window_tokens, scenario.eagle
                return target.caches.make(
                    cache, strategy, sizes, scenario.window, tokens=tokens, eagle=eagle
                )

            run = run_on_cache(make, strategy, scenario.steps, keep_steps=keep_steps)
    except (ScriptError, TargetError) as error:
        raise type(error)(f"{scenario.source or scenario.name}: {error}") from None
    known = scenario.known_failure(target.version, page_size)
    if origin not in CANDIDATES and known and known.fault == "allocator":
        known = None  # a strategy has taken the place of what is known to fail
    declared = scenario.declared(strategy, target.version)
    if known or origin in CANDIDATES:
        declared = known.outcome if known else Outcome("clean")
    open_group = steps.ends_in_group(scenario.steps) and not (run.raised or run.exhausted)
    shown = scenario.on(cache) if cache else scenario
    return Case(shown, target.name, strategy, origin, page_size, run, declared, known, open_group)


def _prepare_large() -> None:
    """Keep the memory of large pools low."""
    gc.collect()  # an allocator and its parts point at each other: free those of the last case
    with contextlib.suppress(AttributeError):  # glibc keeps freed blocks of up to 32 MiB
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE)


def sizes_for(scenario: Scenario, page_size: int, repeat: int = 1) -> Sizes:
    """Return the pools a scenario asks for, and room for what ``repeat`` rounds can leak.

    Raises ``UsageError`` for a size over the limits.
    """
    check_page_size(page_size)
    asked = sum(_pages(step, page_size) for step in scenario.steps) if repeat > 1 else 0
    spare = (repeat - 1) * asked
    full, swa = scenario.full_pages + spare, scenario.swa_pages + spare
    if max(full, swa) * page_size > MAX_SLOTS:
        raise UsageError(
            f"{scenario.name}: {max(full, swa)} pages of {page_size} slots are over the limit of "
            f"{MAX_SLOTS} slots per pool"
        )
    return Sizes(full, swa, page_size)


def _pages(step: steps.Step, page_size: int) -> int:
    """Return how many pages a step may leak in one round."""
    if isinstance(step, steps.Extend | steps.Decode):
        return -(-step.tokens // page_size)
    pages = getattr(step, "pages", 0)
    return pages if isinstance(pages, int) else 0
