"""Writes a report to a file, in the form its ending names; never half a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from swaleak.errors import UsageError, unknown
from swaleak.files import write_whole
from swaleak.report.drawing import as_html, as_svg
from swaleak.report.junit import as_junit
from swaleak.report.report import Report
from swaleak.script.scenario import Scenario
from swaleak.script.write import to_toml

FORMATS: dict[str, Callable[[Report], str]] = {
    ".json": Report.as_json,
    ".md": Report.as_markdown,
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
    check_place("-o", path)


def check_kind(option: str, path: Path, ending: str, what: str) -> None:
    """Raise ``UsageError`` unless ``what`` can be written to ``path``, a file with this ending."""
    if path.suffix.lower() != ending:
        raise UsageError(f"{option} {path}: {what} is a {ending} file")
    check_place(option, path)


def check_place(option: str, path: Path) -> None:
    """Raise ``UsageError`` if no file can be written at ``path``."""
    try:
        path.lstat()  # a name that no file can have is told apart from one that is free
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(f"{option} {str(path)[:60]}: {error.strerror or error}") from None
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"{option} {path}: the folder {path.parent} cannot be written to")


def write(report: Report, path: Path) -> None:
    """Write ``report`` beside ``path`` and rename it into place."""
    write_text(FORMATS[path.suffix.lower()](report), path)


def write_scenario(scenario: Scenario, path: Path) -> None:
    """Write ``scenario`` as TOML; see ``write_text``."""
    write_text(to_toml(scenario), path)


def write_text(text: str, path: Path) -> None:
    """Write ``text`` (UTF-8) beside ``path`` and rename it into place.

    Raises ``UsageError`` if the disk does not take it; an older file is then still whole.
    """
    try:
        write_whole(path, text.encode(), prefix=f".{path.name}.swaleak-")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None
