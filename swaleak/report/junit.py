"""A report as JUnit XML: a test suite a target, a test case a run. No torch here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from swaleak.errors import UsageError
from swaleak.report.facts import explain, strategy_shown
from swaleak.report.report import Judged, Report

# what XML 1.0 cannot hold, not even escaped
FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def as_junit(report: Report) -> str:
    """Return the report as JUnit XML, UTF-8.

    What failed there is a failure here. The baseline of a patch is in a suite of its own that says
    so, all of it skipped: whoever reads the XML alone has to come to the verdict of the exit code.
    Raises ``UsageError`` for a report that has no cases.
    """
    if not report.cases:
        raise UsageError(
            f"{report.command} runs no scenario, so there is nothing to write as JUnit .xml"
        )
    root = ElementTree.Element("testsuites", name=f"swaleak {report.command}")
    for target in dict.fromkeys(one.case.target for one in report.cases):
        cases = [one for one in report.cases if one.case.target == target]
        only_shown = all(one.passed is None for one in cases)
        name = f"{target} (baseline, not judged)" if only_shown else target
        suite = ElementTree.SubElement(root, "testsuite", name=_clean(name))
        _count(suite, cases)
        for one in cases:
            _add(suite, one)
    _count(root, report.cases)
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _count(element: ElementTree.Element, cases: Sequence[Judged]) -> None:
    passed = [one.passed for one in cases]
    failed, skipped = passed.count(False), passed.count(None)
    counts = {"tests": len(cases), "failures": failed, "errors": 0, "skipped": skipped}
    for key, value in counts.items():
        element.set(key, str(value))


def _add(suite: ElementTree.Element, one: Judged) -> None:
    """Append one test case; a failure says what came out and who lost what."""
    case = one.case
    name = f"{case.scenario.name} [{strategy_shown(case)}, page size {case.page_size}]"
    place = _clean(case.scenario.name)
    entry = ElementTree.SubElement(suite, "testcase", classname=place, name=_clean(name))
    if one.passed:
        return
    safe = "clean" if case.scenario.reach == "production" else "clean or refused"
    wanted = case.declared.verdict if case.declared else safe
    message = f"{case.verdict}, {case.physical} physical and {case.mapped} mapped SWA pages"
    if one.passed is None:
        told = f"baseline, as shipped, not judged: {message}"
        ElementTree.SubElement(entry, "skipped", message=_clean(told))
        return
    failure = ElementTree.SubElement(entry, "failure", type=case.verdict, message=_clean(message))
    facts = explain([case])
    lines = [case.scenario.title, f"declared: {wanted}; came out: {case.verdict}", *facts]
    failure.text = _clean("\n".join(lines))


def _clean(text: str) -> str:
    return FORBIDDEN.sub("�", text)
