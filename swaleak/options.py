"""What commands take on the command line: arguments and options that several of them share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from swaleak import complete
from swaleak.errors import UsageError

MOST = 1_000_000  # of anything that is done over and over


class Format(StrEnum):
    """How a report is printed."""

    table = "table"
    markdown = "markdown"
    json = "json"


class Contract(StrEnum):
    """Which operations are legal."""

    production = "production"
    latent = "latent"


def named(text: str) -> Path:
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
    return named(text)


Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SCENARIO]...",
        help="Names from `swaleak list`, or TOML files.",
        autocompletion=complete.scenarios,
    ),
]
Name = Annotated[
    str,
    typer.Argument(
        metavar="SCENARIO",
        help="A name, or a TOML file.",
        autocompletion=complete.scenarios,
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
        autocompletion=complete.strategies,
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
        autocompletion=complete.strategies,
    ),
]
On = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="TARGET",
        help="Whose allocator: builtin, installed, a release such as 0.5.18, the path of a wheel "
        "or checkout, or module:Class. auto: installed if SGLang is, else builtin.",
        autocompletion=complete.targets,
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
    typer.Option("--page-size", metavar="N", help="Slots a page; repeatable."),
]
Formats = Annotated[Format, typer.Option("--format", "-f", help="How to print the report.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Also write it: .json, .md, .svg or .html.",
        parser=named,
    ),
]
OutputOfRuns = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Also write it: .json, .md, .svg, .html or .xml (JUnit).",
        parser=named,
    ),
]
