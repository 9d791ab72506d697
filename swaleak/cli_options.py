"""What commands take on the command line, and what the shell completes of it. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from swaleak.errors import UsageError
from swaleak.scenario import catalogue
from swaleak.scenario.toml import STRATEGIES as OURS
from swaleak.targets.sources import RELEASES

MAX_REPEATS = 1_000_000  # of anything that is done over and over
TARGETS = ("auto", "builtin", "installed", *RELEASES)
STRATEGIES = (*OURS, "shipped")


def complete_scenarios(incomplete: str) -> list[str]:
    """Return names in the catalogue, and TOML files."""
    return _names(catalogue.names(), incomplete) + _paths(incomplete, ".toml")


def complete_strategies(incomplete: str) -> list[str]:
    """Return short names of strategies."""
    return _names(STRATEGIES, incomplete)


def complete_targets(incomplete: str) -> list[str]:
    """Return names of targets, wheels and folders."""
    return _names(TARGETS, incomplete) + _paths(incomplete, ".whl")


def complete_releases(incomplete: str) -> list[str]:
    """Return releases of SGLang."""
    return _names(RELEASES, incomplete)


def _names(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _paths(incomplete: str, suffix: str) -> list[str]:
    """Return files of this ending, and folders, once something of a path has been typed."""
    if not incomplete:
        return []
    head, slash, _ = incomplete.rpartition("/")
    try:
        entries = sorted(Path(head + slash or ".").iterdir())
    except OSError:
        return []
    shown = (
        f"{head}{slash}{entry.name}{'/' if entry.is_dir() else ''}"
        for entry in entries
        if entry.is_dir() or entry.suffix == suffix
    )
    return [path for path in shown if path.startswith(incomplete)]


class Format(StrEnum):
    """How a report is printed."""

    table = "table"
    markdown = "markdown"
    json = "json"


class Contract(StrEnum):
    """Which steps are legal."""

    production = "production"
    latent = "latent"


def file_path(text: str) -> Path:
    """Return the path of a file; raises ``UsageError`` for an empty one, a variable left unset."""
    if not text:
        raise UsageError("a file without a name; is a variable empty?")
    return Path(text)


def _trace(text: str) -> Path:
    """Return the path of a trace. Raises ``UsageError`` for what is none by its name."""
    if text == "-":
        raise UsageError("-: a trace is read more than once, which standard input cannot be")
    if text.endswith(".toml"):
        raise UsageError(f"{text}: a scenario, not a trace; `swaleak repro {text}` replays it")
    return file_path(text)


Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SCENARIO]...",
        help="Names from `swaleak list`, or TOML files.",
        autocompletion=complete_scenarios,
    ),
]
Name = Annotated[
    str,
    typer.Argument(
        metavar="SCENARIO",
        help="A name, or a TOML file.",
        autocompletion=complete_scenarios,
    ),
]
Trace = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="A trace, as `record` writes it.", parser=_trace),
]
Strategies = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy",
        "-s",
        metavar="NAME",
        help="eager, deferred, enqueue, barrier or shipped; repeatable. Default: all four.",
        autocompletion=complete_strategies,
    ),
]
TraceStrategies = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy",
        "-s",
        metavar="NAME",
        help="eager, deferred, enqueue, barrier or shipped; repeatable. Default: the fix it was "
        "recorded under, else the target's own, else deferred.",
        autocompletion=complete_strategies,
    ),
]
On = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="TARGET",
        help="Whose allocator: builtin, installed, a release such as 0.5.18, the path of a wheel "
        "or checkout, or module:Class. auto: installed if SGLang is, else builtin.",
        autocompletion=complete_targets,
    ),
]
Patches = Annotated[
    list[str] | None,
    typer.Option(
        "--patch",
        metavar="FILE",
        help="A diff to apply to a private copy of the sources first; - for standard input. "
        "Repeatable. check and repro show both, as shipped and patched, and judge the patched; "
        "explore searches the patched; bench measures it as a candidate.",
    ),
]
Device = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")
]
PageSizes = Annotated[
    list[int] | None,
    typer.Option("--page-size", metavar="N", help="Slots per page; repeatable."),
]
Formats = Annotated[Format, typer.Option("--format", "-f", help="How to print the report.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Also write it: .json, .md, .svg or .html.",
        parser=file_path,
    ),
]
OutputOfRuns = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Also write it: .json, .md, .svg, .html or .xml (JUnit).",
        parser=file_path,
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        min=0.001,
        metavar="SECONDS",
        help="End with exit code 124 after so long; says what was being run.",
    ),
]
