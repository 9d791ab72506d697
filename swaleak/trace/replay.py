"""A trace is replayed: its calls on an allocator and a shadow, judged after each free group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from swaleak.checker.compare import Violation, compare
from swaleak.checker.run import Execution, Findings
from swaleak.errors import RAISED, ScriptError, format_error
from swaleak.scenario.calls import GroupEnd, Header, Line, PoolExhausted
from swaleak.targets.driver import Driver


@dataclass(frozen=True, slots=True)
class GroupResult:
    """A free group of a trace has ended. Counts are SWA pages; ``recorded``: those of the trace."""

    group: int
    line: int
    physical: int
    mapped: int
    recorded: tuple[int | None, int | None]
    violations: tuple[Violation, ...]


@dataclass(slots=True)
class TraceRun:
    """What came out of a trace so far.

    ``first_bad``: the first group after which something was wrong. ``differ``: groups after which
    the counts were not as recorded. ``raised``: what the allocator raised, and at which line.
    ``exhausted``: the line at which a pool ran dry. ``mistakes``: of the callers, by line.
    """

    groups: int = 0
    calls: int = 0
    last: GroupResult | None = None
    first_bad: GroupResult | None = None
    differ: int = 0
    raised: tuple[int, str] | None = None
    exhausted: int | None = None
    verdict: str = "clean"
    mistakes: list[tuple[int, Violation]] = field(default_factory=list)


def run_trace(
    trace: Iterable[Header | Line],
    make: Callable[[Header], Driver],
    until: Callable[[TraceRun], bool] = lambda _: False,
) -> TraceRun:
    """Make every call of a trace on an allocator from ``make``, and judge after each group.

    Stops early where the allocator raises, where a pool runs dry, or when ``until`` says so after
    a group. Raises ``ScriptError`` (with the line) for a trace that makes no sense.
    """
    findings = Findings()
    result = TraceRun(mistakes=findings.mistakes)
    execution: Execution | None = None
    for item in trace:
        if isinstance(item, Header):
            execution = Execution(make(item))
            continue
        assert execution is not None  # a reader yields a header first
        number, call = item
        result.calls += 1
        try:
            execution.call(call)
            if isinstance(call, GroupEnd):
                _judge_group(execution, number, call, result, findings)
        except ScriptError as error:
            raise ScriptError(f"line {number}: {error}") from None
        except PoolExhausted:
            findings.exhausted = result.exhausted = number
            break
        except RAISED as error:  # whatever SGLang's code raises is a result, not a crash
            result.raised = (number, format_error(error))
            findings.raised = (*result.raised, False)
            break
        finally:
            findings.called(number, execution.shadow)
        if isinstance(call, GroupEnd) and until(result):
            break
    result.verdict = findings.verdict
    return result


def _judge_group(
    execution: Execution, number: int, end: GroupEnd, result: TraceRun, findings: Findings
) -> None:
    seen = compare(execution.driver.state(), execution.shadow)
    findings.compared(number, seen)
    result.groups += 1
    # a recorder takes pages that are about to be mapped for mapped
    mapped = seen.mapped + len(execution.shadow.unmapped)
    recorded, counts = (end.physical, end.mapped), (seen.physical, mapped)
    result.last = GroupResult(result.groups, number, *counts, recorded, seen.violations)
    result.differ += recorded not in (counts, (None, None))
    result.verdict = findings.verdict
    if seen.violations and result.first_bad is None:
        result.first_bad = result.last
