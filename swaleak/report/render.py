"""The forms of a report: terminal, Markdown, JSON, SVG, HTML and JUnit. No torch here."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from swaleak import __version__
from swaleak.errors import UsageError, unknown
from swaleak.files import check_writable, write_text
from swaleak.report.model import Grid, Report, TestResult, grouped, visible

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 80  # columns of an SVG or HTML picture
FONTS = "ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"
ASCII = str.maketrans("●○·✗…", "*o.x~")
# what XML 1.0 cannot hold, not even escaped
FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def print_to(report: Report, console: Console) -> None:
    """Print tables that are readable at 80 columns and without colour."""
    if console.is_terminal:
        _print(report, console)
        return
    with console.capture() as captured:
        _print(report, console)
    # in a file or a pull request, what a table fills its last column with is noise
    lines = captured.get().splitlines(keepends=True)
    console.file.write("".join(f"{line.rstrip()}\n" for line in lines))


def _print(report: Report, console: Console) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    marks = ASCII if console.options.ascii_only else {}

    def text(line: str, style: str = "") -> Text:
        return Text(visible(line).translate(marks), style=style)

    one_line = not report.sections  # as for grep: what is folded is not found
    console.print(text(report.header, "" if one_line else "dim"), soft_wrap=one_line)
    if report.verdict:
        console.print(text(*report.verdict))
    for section in report.sections:
        if section.title or not section.grid or marks:  # a table begins with a blank line
            console.print()
        if section.title:
            console.print(text(section.title, "bold"))
        for grid in section.grid.parts(console.width) if section.grid else ():
            table = Table(box=box.SIMPLE_HEAD, padding=(0, grid.gap), pad_edge=False)
            for name in grid.columns:
                justify: Any = "right" if name in grid.right else "left"
                table.add_column(name, justify=justify, overflow="fold")
            for row in grid.rows:
                table.add_row(*(text(*cell) for cell in row))
            console.print(table)
        if section.sentence:
            console.print(text(*section.sentence))
            if section.lines:
                console.print()
        for line in section.lines:
            console.print(text(line))


def as_json(report: Report) -> str:
    """Return one JSON object, ``swaleak/1``."""
    envelope = {
        "schema": "swaleak/1",
        "command": report.command,
        "version": __version__,
        "torch": report.torch,
        "device": report.device,
        "ok": report.ok,
    }
    return json.dumps(envelope | report.body, indent=1) + "\n"


def as_markdown(report: Report) -> str:
    """Return Markdown that can be pasted into a pull request."""
    blocks = [report.header, *([f"**{report.verdict.text}**"] if report.verdict else [])]
    for section in report.sections:
        blocks += [f"**{section.title}**"] if section.title else []
        blocks += [_markdown_table(section.grid)] if section.grid else []
        blocks += [section.sentence.text] if section.sentence else []
        if section.lines:
            blocks.append("\n".join(f"- {line}" if line else "" for line in section.lines))
    return visible("\n\n".join(blocks) + "\n")


def _markdown_table(grid: Grid) -> str:
    def line(texts: Iterable[str]) -> str:
        escaped = (text.replace("|", "\\|").replace("\n", "<br>") for text in texts)
        return f"| {' | '.join(escaped)} |"

    rules = ("--:" if name in grid.right else "---" for name in grid.columns)
    rows = (line(cell.text for cell in row) for row in grid.rows)
    return "\n".join([line(grid.columns), f"| {' | '.join(rules)} |", *rows])


def _recorded(report: Report) -> Console:
    from rich.console import Console

    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    print_to(report, console)
    return console


def as_svg(report: Report) -> str:
    """Return Rich's SVG without the fonts it would fetch from elsewhere."""
    svg = _recorded(report).export_svg(title=f"swaleak {report.command}")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code, monospace", FONTS)


def as_html(report: Report) -> str:
    """Return Rich's page of HTML, with a title."""
    from rich.terminal_theme import SVG_EXPORT_THEME

    page = _recorded(report).export_html(theme=SVG_EXPORT_THEME, inline_styles=True)
    return page.replace("<head>", f"<head>\n<title>swaleak {report.command}</title>", 1)


def as_junit(report: Report) -> str:
    """Return JUnit XML, UTF-8: a suite per target, a test case per run.

    The baseline of a patch is a suite of its own, all of it skipped: whoever reads the XML alone
    has to come to the verdict of the exit code.
    Raises ``UsageError`` for a report that has no runs.
    """
    if not report.tests:
        raise UsageError(
            f"{report.command} runs no scenario, so there is nothing to write as JUnit .xml"
        )
    root = ElementTree.Element("testsuites", name=f"swaleak {report.command}")
    for name, tests in grouped((test.suite, test) for test in report.tests).items():
        if all(test.passed is None for test in tests):
            name += " (baseline, not judged)"
        suite = ElementTree.SubElement(root, "testsuite", {"name": _xml(name)} | _totals(tests))
        for test in tests:
            _add(suite, test)
    root.attrib |= _totals(report.tests)
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _totals(tests: Sequence[TestResult]) -> dict[str, str]:
    passed = [test.passed for test in tests]
    failures, skipped = str(passed.count(False)), str(passed.count(None))
    return {"tests": str(len(tests)), "failures": failures, "errors": "0", "skipped": skipped}


def _add(suite: ElementTree.Element, test: TestResult) -> None:
    names = {"classname": _xml(test.group), "name": _xml(test.name)}
    entry = ElementTree.SubElement(suite, "testcase", names)
    message = _xml(test.message)
    if test.passed is None:
        said = f"baseline, as shipped, not judged: {message}"
        ElementTree.SubElement(entry, "skipped", message=said)
    elif not test.passed:
        failure = ElementTree.SubElement(entry, "failure", type=test.kind, message=message)
        failure.text = _xml(test.text)


def _xml(text: str) -> str:
    return FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)


FORMATS: dict[str, Callable[[Report], str]] = {
    ".json": as_json,
    ".md": as_markdown,
    ".svg": as_svg,
    ".html": as_html,
    ".xml": as_junit,
}


def check_ending(path: Path, *, runs: bool) -> None:
    """Raise ``UsageError`` for a path no report can be written to, before any work is done.

    ``runs``: whether the report will be one of runs of scenarios, which is what JUnit is about.
    """
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"-o {path}: " + unknown("ending", path.suffix or "(none)", FORMATS))
    if path.suffix.lower() == ".xml" and not runs:
        raise UsageError(f"-o {path}: JUnit is for runs of scenarios, this command has none")
    check_writable("-o", path)


def write(report: Report, path: Path) -> None:
    """Write ``report`` in the form that the ending of ``path`` names; never half a file."""
    write_text(FORMATS[path.suffix.lower()](report), path)
