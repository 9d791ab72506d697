"""A report as JUnit XML: a test suite a target, a test case a run. No torch here."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from swaleak.errors import UsageError
from swaleak.report.facts import explain
from swaleak.report.report import Report

if TYPE_CHECKING:
    from swaleak.check.case import Case

# what XML 1.0 cannot hold, not even escaped
FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def as_junit(report: Report) -> str:
    """Return the report as JUnit XML, UTF-8.

    In a ``check`` report a case fails that is not safe, elsewhere one that did not come out as
    declared. Raises ``UsageError`` for a report that has no cases.
    """
    if not report.cases:
        raise UsageError(
            f"{report.command} runs no scenario, so there is nothing to write as JUnit .xml"
        )
    root = ElementTree.Element("testsuites", name=f"swaleak {report.command}")
    for target in dict.fromkeys(case.target for case in report.cases):
        cases = [case for case in report.cases if case.target == target]
        suite = ElementTree.SubElement(root, "testsuite", name=_clean(target))
        wrong = [case for case in cases if not _passes(report, case)]
        _count(suite, len(cases), len(wrong))
        for case in cases:
            _add(suite, case, case not in wrong)
    _count(root, len(report.cases), sum(not _passes(report, case) for case in report.cases))
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _passes(report: Report, case: Case) -> bool:
    return case.safe if report.command == "check" else case.as_declared


def _count(element: ElementTree.Element, tests: int, failures: int) -> None:
    counts = {"tests": tests, "failures": failures, "errors": 0, "skipped": 0}
    for key, value in counts.items():
        element.set(key, str(value))


def _add(suite: ElementTree.Element, case: Case, passed: bool) -> None:
    """Append one test case; a failure says what came out and who lost what."""
    name = f"{case.scenario.name} [{case.strategy}, page size {case.page_size}]"
    place = _clean(case.scenario.name)
    entry = ElementTree.SubElement(suite, "testcase", classname=place, name=_clean(name))
    if passed:
        return
    wanted = case.declared.verdict if case.declared else "clean or refused"
    message = f"{case.verdict}, {case.physical} physical and {case.mapped} mapped SWA pages"
    failure = ElementTree.SubElement(entry, "failure", type=case.verdict, message=_clean(message))
    facts = explain([case]) or ("the counts are not those that are declared",)
    lines = [case.scenario.title, f"declared: {wanted}; came out: {case.verdict}", *facts]
    failure.text = _clean("\n".join(lines))


def _clean(text: str) -> str:
    return FORBIDDEN.sub("�", text)
