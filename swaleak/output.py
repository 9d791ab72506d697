"""Where a report goes: to standard output in the format asked for, to a file, to the exit code.

What prints and writes is imported inside the functions: ``--help`` comes this way too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from swaleak.options import Format

if TYPE_CHECKING:
    from swaleak.report.model import Report


def check_output(output: Path | None, *, runs: bool = False) -> None:
    """Raise ``UsageError`` if no report can be written there; see ``render.check_ending``."""
    if output is not None:
        from swaleak.report.render import check_ending

        check_ending(output, runs=runs)


def is_looked_at(format: Format, output: Path | None) -> bool:
    """Whether a person will see the report: on a terminal, or as a picture."""
    picture = output is not None and output.suffix.lower() in (".svg", ".html")
    return picture or (format is Format.table and sys.stdout.isatty())


def finish(
    report: Report, format: Format, output: Path | None = None, code: int | None = None
) -> NoReturn:
    """Print the report, write it if asked to, and leave: with ``code``, or 0 or 1 as it is ok."""
    print_report(report, format, output)
    raise typer.Exit(int(not report.ok) if code is None else code)


def print_report(report: Report, format: Format, output: Path | None = None) -> None:
    """Print the report, and write it if asked to."""
    from swaleak.report.render import as_json, as_markdown, print_to, write

    if format is Format.json:
        sys.stdout.write(as_json(report))
    elif format is Format.markdown:
        sys.stdout.write(as_markdown(report))
    else:
        from rich.console import Console

        print_to(report, Console(highlight=False))
    if output is not None:  # last, so that a disk that is full takes nothing from the reader
        sys.stdout.flush()
        write(report, output)
