"""The commands. Each reads its options, calls one function and prints one report.

Torch is imported inside the commands that need it, so that ``--help`` and ``list`` are quick.
"""

from __future__ import annotations

import sys
import warnings
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swaleak import __version__
from swaleak.errors import SwaleakError, UsageError, unknown
from swaleak.script import scenario as scenarios
from swaleak.script import tree as trees

if TYPE_CHECKING:
    from swaleak.check.case import Case
    from swaleak.report.tables import Report
    from swaleak.script.scenario import Scenario
    from swaleak.script.tree import TreeScenario
    from swaleak.sglang.tree import Caches
    from swaleak.target import Target

app = typer.Typer(
    name="swaleak",
    help="Reproduce SGLang's SWA page leak, and find out whether a fix for it holds.",
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Format(StrEnum):
    """How a report is printed."""

    table = "table"
    markdown = "markdown"
    json = "json"


Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SCENARIO]...", help="Names from `swaleak list`, or TOML files."),
]
Strategies = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy",
        "-s",
        metavar="NAME",
        help="eager, deferred, enqueue, barrier or shipped; repeatable. Default: all four.",
    ),
]
On = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="TARGET",
        help="Whose allocator: builtin, installed, or the path of an SGLang wheel or checkout. "
        "auto: the installed SGLang if there is one, else the built-in model.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
PageSizes = Annotated[
    list[int] | None,
    typer.Option("--page-size", metavar="N", help="Slots a page; repeatable."),
]
Formats = Annotated[Format, typer.Option("--format", "-f", help="How to print the report.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Also write it: .json, .md, .svg, .html."),
]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"swaleak {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def repro(
    names: Names = None,
    strategy: Strategies = None,
    on: On = "auto",
    device: Device = "auto",
    page_size: PageSizes = None,
    steps: Annotated[bool, typer.Option("--steps", help="Show every step.")] = False,
    repeat: Annotated[
        int, typer.Option("--repeat", min=1, metavar="N", help="Rounds on one allocator.")
    ] = 1,
    format: Formats = Format.table,
    output: Output = None,
) -> None:
    """Replay scenarios: physical and mapped SWA pages, and who lost what.

    Exit code 0: it came out as the scenario declares. 1: it did not.
    """
    _check_output(output)
    chosen = [
        scenarios.load(name) for name in names or [scenarios.DEFAULT] if not trees.is_tree(name)
    ]
    chosen_trees = [trees.load(name) for name in names or [] if trees.is_tree(name)]
    if chosen_trees and repeat > 1:
        raise UsageError("--repeat is for an allocator's scenarios, not for a cache's")
    target = _open(on, device)
    caches = _caches(target) if chosen_trees else None
    from swaleak.report.tables import repro_report

    cases = [
        case
        for tree in chosen_trees
        for name in _strategies(target, strategy)
        for case in _tree_cases(tree, caches, target, name, page_size, steps=steps)
    ]
    cases += [
        case
        for scenario in chosen
        for name in _strategies(target, strategy)
        for case in _cases(
            scenario, target, name, page_size or scenario.page_sizes, steps=steps, repeat=repeat
        )
    ]
    _finish(repro_report(_header(target), cases, **_where(target)), format, output)


@app.command()
def verify(
    on: On = "auto",
    device: Device = "auto",
    page_size: PageSizes = None,
    format: Formats = Format.table,
    output: Output = None,
) -> None:
    """Run the whole catalogue under every strategy: what leaks must leak, the fixes must hold.

    Exit code 0: all came out as declared. 1: something did not.
    """
    _check_output(output)
    catalogue = scenarios.catalogue()
    target = _open(on, device)
    from swaleak.report.tables import verify_report

    cases = [
        case
        for scenario in catalogue
        for name in _strategies(target, None)
        for case in _cases(scenario, target, name, _sizes_of(scenario, page_size))
    ]
    caches, note = _caches_or_why_not(target)
    cases += [
        case
        for tree in trees.catalogue()
        for name in _strategies(target, None)
        for case in _tree_cases(tree, caches, target, name, page_size)
    ]
    if not cases:
        raise UsageError("no scenario runs at this page size; `swaleak list` shows which do")
    report = verify_report(_header(target), cases, **_where(target))
    _finish(report.with_line(note) if note else report, format, output)


@app.command("list")
def list_(format: Formats = Format.table, output: Output = None) -> None:
    """List the catalogue of scenarios."""
    _check_output(output)
    from swaleak.report.catalogue import list_report

    shown = [*scenarios.catalogue(), *(tree.shown for tree in trees.catalogue())]
    _finish(list_report(shown), format, output)


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="SCENARIO", help="A name, or a TOML file.")],
    format: Formats = Format.table,
    output: Output = None,
) -> None:
    """Show one scenario: its story, its steps, and what is declared."""
    _check_output(output)
    from swaleak.report.catalogue import show_report

    scenario = trees.load(name).shown if trees.is_tree(name) else scenarios.load(name)
    _finish(show_report(scenario), format, output)


@app.command()
def doctor(format: Formats = Format.table, output: Output = None) -> None:
    """Say what this machine has: torch, devices, an installed SGLang and what it ships."""
    _check_output(output)
    from swaleak.report.doctor import doctor_report

    _finish(doctor_report(), format, output)


Trace = Annotated[Path, typer.Argument(metavar="FILE", help="A trace, as `record` writes it.")]


@app.command()
def record(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="What starts the server.")
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="FILE.jsonl; one is made a process."),
    ],
    fix: Annotated[
        str | None, typer.Option("--fix", metavar="NAME", help="Also repair: barrier or enqueue.")
    ] = None,
    format: Formats = Format.table,
) -> None:
    """Run a command that starts SGLang, and record what happens to its SWA allocator.

    The exit code is the command's own.
    """
    from swaleak.sglang import launch, plugin

    if fix is not None and fix not in plugin.FIXES:
        raise UsageError(unknown("fix", fix, plugin.FIXES))
    status, written = launch.record(command, output, fix)
    from swaleak.report.traces import record_report

    report = record_report(written, status)
    try:
        _finish(report, format, None)
    except typer.Exit:
        raise typer.Exit(status) from None


@app.command()
def replay(
    trace: Trace,
    strategy: Strategies = None,
    on: On = "auto",
    device: Device = "auto",
    format: Formats = Format.table,
    output: Output = None,
) -> None:
    """Replay a recorded run on an allocator, and judge it after every free group.

    Exit code 0: it is clean. 1: a violation.
    """
    _check_output(output)
    from swaleak.script.trace import TraceReader, read_header

    header = read_header(trace)
    target = _open(on, device)
    from swaleak.check.follow import follow
    from swaleak.report.traces import Replayed, replay_report

    runs = []
    for name in _trace_strategies(target, strategy, header.fix):
        reader = TraceReader(trace)
        followed = follow(reader, lambda sizes, name=name: target.make(name, sizes))  # type: ignore[misc]
        runs.append(Replayed(target.name, name, target.origin(name), followed))
    if reader.torn:
        print(f"swaleak: warning: {reader.torn}", file=sys.stderr)
    _finish(replay_report(_header(target), trace, runs, **_where(target)), format, output)


@app.command()
def shrink(
    trace: Trace,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="SCENARIO.toml", help="Where to write it.")
    ],
    strategy: Annotated[
        str | None, typer.Option("--strategy", "-s", metavar="NAME", help="As for replay; one.")
    ] = None,
    on: On = "auto",
    device: Device = "auto",
    format: Formats = Format.table,
) -> None:
    """Reduce a recorded run that fails to a small scenario that fails in the same way."""
    if output.suffix != ".toml" or not output.parent.is_dir():
        raise UsageError(f"-o {output}: needs the path of a .toml file in a folder that exists")
    from swaleak.script.trace import read_header

    header = read_header(trace)
    target = _open(on, device)
    from swaleak.report.files import write_text
    from swaleak.report.traces import shrink_report
    from swaleak.script.write import to_toml
    from swaleak.search.reduce import reduce

    (name,) = _trace_strategies(target, [strategy] if strategy else None, header.fix)
    small, followed = reduce(trace, target, name)
    write_text(to_toml(small), output)
    report = shrink_report(_header(target), trace, output, small, followed, **_where(target))
    _finish(report, format, None)


def main() -> None:
    """Run the command line. The only place where an error becomes an exit code."""
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except SwaleakError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:  # `swaleak … | head`: nobody reads on
        sys.stderr.close()
        sys.exit(1)
    except Exception as error:
        usage = getattr(error, "format_message", None)  # Typer's own: an option it cannot read
        if usage is None:
            raise
        _fail(" ".join(usage().split()), 2)
    sys.exit(code or 0)


def _fail(message: str, code: int) -> None:
    print(f"swaleak: {message}", file=sys.stderr)
    sys.exit(code)


def _open(on: str, device: str) -> Target:
    from swaleak.target import choose_device, open_target

    return open_target(on, choose_device(device))


def _strategies(target: Target, asked: list[str] | None) -> list[str]:
    """Return short names. Without any asked for: all four, one of which may be the target's own."""
    from swaleak.target import strategy_of

    if asked:
        return list(dict.fromkeys(strategy_of(name) for name in asked))
    return [name for name in target.strategies() if name != "shipped"]


def _trace_strategies(target: Target, asked: list[str] | None, fix: str | None) -> list[str]:
    """Return short names. Without any asked for: the one it was recorded under, or 0.5.18's."""
    if asked:
        return _strategies(target, asked)
    return [fix or target.ships or "deferred"]


def _sizes_of(scenario: Scenario, asked: list[int] | None) -> tuple[int, ...]:
    """Return the scenario's page sizes, of which those that were asked for."""
    return tuple(size for size in scenario.page_sizes if not asked or size in asked)


def _cases(
    scenario: Scenario,
    target: Target,
    strategy: str,
    page_sizes: list[int] | tuple[int, ...],
    *,
    steps: bool = False,
    repeat: int = 1,
) -> list[Case]:
    from swaleak.check.case import run_case

    return [
        run_case(scenario, target, strategy, size, keep_steps=steps, repeat=repeat)
        for size in page_sizes
    ]


def _caches(target: Target) -> Caches:
    """Return the caches of the installed SGLang; raises ``UsageError`` for any other target."""
    if not getattr(target, "is_installed", False):
        raise UsageError(
            f"{trees.PREFIX}… drives the caches of an installed SGLang, not {target.name}; "
            f"use --on installed"
        )
    from swaleak.sglang.tree import Caches

    return Caches(target.device)


def _caches_or_why_not(target: Target) -> tuple[Caches | None, str]:
    """Return the caches, if the target has any, and the line that says what was left out."""
    try:
        caches = _caches(target)
    except SwaleakError as error:
        reason = (
            "they need the installed SGLang, --on installed"
            if isinstance(error, UsageError)
            else str(error)
        )
        return None, f"Left out: the scenarios of the radix caches, {trees.PREFIX}…; {reason}."
    why = "; ".join(f"{cache}: {reason}" for cache, reason in caches.left_out.items())
    return caches, f"Left out: {why}." if why else ""


def _tree_cases(
    scenario: TreeScenario,
    caches: Caches | None,
    target: Target,
    strategy: str,
    page_size: list[int] | None,
    *,
    steps: bool = False,
) -> list[Case]:
    if caches is None:
        return []
    from swaleak.check.trees import tree_cases

    sizes = _sizes_of(scenario.about, page_size)
    return tree_cases(scenario, caches, target, strategy, sizes, keep_steps=steps)


def _where(target: Target) -> dict[str, str]:
    import torch

    return {"torch": str(torch.__version__), "device": target.device}


def _header(target: Target) -> str:
    """Return the first line of a report: what was driven, on which device."""
    import torch

    what = "the built-in model" if target.name == "builtin" else target.name
    ships = f" (ships {target.ships})" if target.ships else ""
    device = target.device
    if device.startswith("cuda"):
        device = f"{device} ({torch.cuda.get_device_name(device)})"
    return f"swaleak {__version__}: {what}{ships} on {device}, torch {torch.__version__}"


def _check_output(output: Path | None) -> None:
    if output is not None:
        from swaleak.report.files import check_ending

        check_ending(output)


def _finish(report: Report, format: Format, output: Path | None) -> None:
    """Print the report, write it if asked to, and leave with its exit code."""
    if output is not None:
        from swaleak.report.files import write

        write(report, output)
    if format is Format.json:
        sys.stdout.write(report.as_json())
    elif format is Format.markdown:
        sys.stdout.write(report.as_markdown())
    else:
        from rich.console import Console

        report.print_to(Console(highlight=False))
    raise typer.Exit(0 if report.ok else 1)
