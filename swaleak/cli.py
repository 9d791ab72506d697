"""The commands. Each reads its options, calls one function and prints one report.

Torch is imported inside the commands that need it, so that ``--help`` and ``list`` are quick.
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swaleak import __version__, complete
from swaleak.errors import SwaleakError, UsageError, unknown
from swaleak.gather import (
    about,
    caches_of,
    caches_or_why_not,
    cases_of,
    open_targets,
    sizes_of,
    start_torch,
    strategies_of,
    timelines_of,
    trace_strategies,
    tree_cases_of,
)
from swaleak.script import catalogue as scenarios
from swaleak.script import tree as trees

if TYPE_CHECKING:
    from swaleak.report.report import Report

MOST = 1_000_000  # of anything that is done over and over

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


class Contract(StrEnum):
    """Which operations are legal."""

    production = "production"
    latent = "latent"


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
        "Repeatable. The report shows both, as shipped and patched.",
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
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Also write it: .json, .md, .svg, .html; .xml (JUnit) where scenarios are run.",
    ),
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
    patch: Patches = None,
    device: Device = "auto",
    page_size: PageSizes = None,
    steps: Annotated[bool, typer.Option("--steps", help="Show every step.")] = False,
    repeat: Annotated[
        int, typer.Option("--repeat", min=1, max=MOST, metavar="N", help="Rounds on one allocator.")
    ] = 1,
    format: Formats = Format.table,
    output: Output = None,
) -> None:
    """Replay scenarios: physical and mapped SWA pages, and who lost what.

    Exit code 0: it came out as the scenario declares. 1: it did not.
    """
    _check_output(output, runs=True)
    chosen = [
        scenarios.load(name) for name in names or [scenarios.DEFAULT] if not trees.is_tree(name)
    ]
    chosen_trees = [trees.load(name) for name in names or [] if trees.is_tree(name)]
    if chosen_trees and (repeat > 1 or patch):
        raise UsageError("--repeat and --patch are for an allocator's scenarios, not for a cache's")
    targets = open_targets(on, device, patch)
    caches = caches_of(targets[0]) if chosen_trees else None
    from swaleak.report.cases import repro_report

    asked = strategy or (["shipped"] if patch else None)
    cases = [
        case
        for tree in chosen_trees
        for name in strategies_of(targets[0], strategy)
        for case in tree_cases_of(tree, caches, targets[0], name, page_size, steps=steps)
    ]
    cases += [
        case
        for scenario in chosen
        for target in targets
        for name in strategies_of(target, asked)
        for case in cases_of(
            scenario, target, name, page_size or scenario.page_sizes, steps=steps, repeat=repeat
        )
    ]
    looked_at = steps or _is_looked_at(format, output)
    strips = timelines_of(cases, targets, repeat, every_step=steps) if looked_at else None
    _finish(repro_report(about(targets), cases, strips), format, output)


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
    _check_output(output, runs=True)
    catalogue = scenarios.catalogue()
    [target] = open_targets(on, device)
    from swaleak.report.cases import verify_report

    cases = [
        case
        for scenario in catalogue
        for name in strategies_of(target, None)
        for case in cases_of(scenario, target, name, sizes_of(scenario, page_size))
    ]
    caches, note = caches_or_why_not(target)
    cases += [
        case
        for tree in trees.catalogue()
        for name in strategies_of(target, None)
        for case in tree_cases_of(tree, caches, target, name, page_size)
    ]
    report = verify_report(about([target]), cases)
    _finish(report.with_line(note) if note else report, format, output)


@app.command()
def check(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET...",
            help="What --on takes; as many as you like.",
            autocompletion=complete.targets,
        ),
    ],
    patch: Patches = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Judge by the latent scenarios as well.")
    ] = False,
    device: Device = "auto",
    page_size: PageSizes = None,
    format: Formats = Format.table,
    output: Output = None,
) -> None:
    """Judge candidates: with SGLang's code as it is, every scenario must be clean or refused.

    Exit code 0: all are. 1: one is not. 125: a target cannot be loaded, so that
    `git bisect run swaleak check .` skips that commit.
    """
    _check_output(output, runs=True)
    catalogue = scenarios.catalogue()
    opened = [
        target for name in dict.fromkeys(targets) for target in open_targets(name, device, patch)
    ]
    from swaleak.report.cases import check_report

    judged = [s for s in catalogue if strict or s.reach == "production"]
    cases = [
        case
        for scenario in judged
        for target in opened
        for case in cases_of(scenario, target, "shipped", sizes_of(scenario, page_size))
    ]
    left_out = len(catalogue) - len(judged)
    notes = []
    for target in opened:
        caches, note = caches_or_why_not(target)
        notes.append(note)
        for tree in trees.catalogue():
            if strict or tree.about.reach == "production":
                cases += tree_cases_of(tree, caches, target, "shipped", page_size)
    report = check_report(about(opened), cases, left_out)
    for note in dict.fromkeys(filter(None, notes)):
        report = report.with_line(note)
    _finish(report, format, output)


@app.command("list")
def list_(format: Formats = Format.table, output: Output = None) -> None:
    """List the catalogue of scenarios."""
    _check_output(output)
    from swaleak.report.catalogue import list_report

    shown = [*scenarios.catalogue(), *(tree.shown for tree in trees.catalogue())]
    _finish(list_report(shown), format, output)


@app.command()
def show(
    name: Name,
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


@app.command()
def bench(
    baseline: Annotated[
        str,
        typer.Option(metavar="NAME", help="A strategy, or a target as shipped."),
    ] = "deferred",
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="As --baseline; repeatable. Default: enqueue and barrier."
        ),
    ] = None,
    on: On = "auto",
    patch: Patches = None,
    device: Device = "auto",
    page_size: PageSizes = None,
    calls: Annotated[
        list[int] | None,
        typer.Option(min=1, metavar="N", help="Calls of free_swa a group; repeatable."),
    ] = None,
    pages: Annotated[
        list[int] | None, typer.Option(min=1, metavar="N", help="Pages a call; repeatable.")
    ] = None,
    warmup: Annotated[
        int, typer.Option(min=0, max=MOST, metavar="N", help="Rounds that do not count.")
    ] = 50,
    samples: Annotated[
        int, typer.Option(max=MOST, metavar="N", help="Rounds that do, a case.")
    ] = 500,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the order and the intervals.")] = 0,
    whole: Annotated[bool, typer.Option("--whole", help="With the physical release.")] = False,
    recover: Annotated[bool, typer.Option("--recover", help="With a recovery a group.")] = False,
    segment: Annotated[
        bool, typer.Option("--segment", help="Through free_swa_segment, as caches do since 0.5.20.")
    ] = False,
    format: Formats = Format.table,
    output: Output = None,
) -> None:
    """Measure what each strategy costs: medians of a free group, interleaved.

    Without --page-size, --calls and --pages: the seven published cases. --patch changes the
    candidates that are targets; without any, the baseline. Exit code 0: measured.
    """
    _check_output(output)
    start_torch()
    from functools import cache

    from swaleak import bench as engine
    from swaleak.device import choose_device
    from swaleak.report.bench import bench_report, with_bar
    from swaleak.target import open_target

    where = choose_device(device)
    settings = engine.Settings(warmup, samples, whole, recover, segment, seed)
    shapes = engine.shapes(page_size, calls, pages)
    open_ = cache(lambda name: open_target(name, where))
    patched = cache(lambda name: open_target(name, where, patch)) if patch else open_
    asked = candidate or ([baseline] if patch else None)
    contestants = engine.contestants(baseline, asked, lambda: open_(on), open_, patched)
    steps: list[engine.Step] = []
    interrupted = False
    try:
        for step in with_bar(engine.run(contestants, shapes, settings, engine.clock_for(where))):
            steps.append(step)
    except KeyboardInterrupt:
        interrupted = True
    results = engine.results(steps, seed)
    if not results:
        raise KeyboardInterrupt
    report = bench_report(contestants, results, settings, where, asked=len(shapes))
    _print(report, format, output)
    raise typer.Exit(130 if interrupted else 0)


@app.command()
def diagnose(
    log: Annotated[
        str, typer.Argument(metavar="[FILE|-]", help="A server log; - is standard input.")
    ] = "-",
    page_size: Annotated[
        int | None,
        typer.Option(
            "--page-size", min=1, metavar="N", help="Of the server, where the log does not say."
        ),
    ] = None,
    format: Formats = Format.table,
    output: Output = None,
) -> None:
    """Find leak messages in a server log: slots, pages, what they mean, which faults fit.

    Exit code 0: found. 1: no leak message in it.
    """
    _check_output(output)
    if log == "-" and sys.stdin.isatty():
        raise UsageError("diagnose: name a log file, or pipe one in")
    from swaleak.diagnose import diagnose
    from swaleak.report.diagnose import diagnose_report

    try:
        if log == "-":
            found = diagnose(sys.stdin.buffer, page_size)
        else:
            with open(log, "rb", buffering=0) as file:
                found = diagnose(file, page_size)
    except OSError as error:
        raise UsageError(f"{log}: {error.strerror or error}") from None
    name = "standard input" if log == "-" else log
    _finish(diagnose_report(name, found), format, output)


@app.command()
def export(
    name: Name,
    unittest: Annotated[
        bool, typer.Option("--unittest", help="As a unittest for SGLang's own suite.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it: .py.")
    ] = None,
) -> None:
    """Export a scenario as a regression test that needs SGLang and nothing else."""
    if not unittest:
        raise UsageError("export: say as what; --unittest is what there is")
    if output is not None and output.suffix.lower() != ".py":
        raise UsageError(f"-o {output}: a unittest is a .py file")
    if trees.is_tree(name):
        raise UsageError(f"{name}: only an allocator's scenario can be exported, not a cache's")
    from swaleak.report.files import check_place, write_text
    from swaleak.report.unittest_file import unittest_file

    if output is not None:
        check_place("-o", output)
    text = unittest_file(scenarios.load(name))
    if output is None:
        sys.stdout.write(text)
    else:
        write_text(text, output)


@app.command()
def explore(
    on: On = "auto",
    patch: Patches = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            "-s",
            metavar="NAME",
            help="shipped, eager, deferred, enqueue or barrier. Default: shipped; deferred on the "
            "built-in model, which ships nothing.",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes", min=1, max=64, help="Nodes that live at once. Default: 3; 8 with --random."
        ),
    ] = None,
    depth: Annotated[
        int, typer.Option("--depth", min=1, max=64, help="Operations in an order, at most.")
    ] = 8,
    contract: Annotated[
        Contract, typer.Option("--contract", help="Which operations are legal.")
    ] = Contract.production,
    page_size: PageSizes = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "cpu",
    every: Annotated[
        bool,
        typer.Option("--all", help="Do not stop at a failure: one order for each way."),
    ] = False,
    at_random: Annotated[
        bool, typer.Option("--random", help="Long random scripts, shrunk, in place of every order.")
    ] = False,
    steps: Annotated[
        int, typer.Option("--steps", min=1, max=100_000, help="--random: operations a script.")
    ] = 200,
    seed: Annotated[int, typer.Option("--seed", min=0, help="--random: seed of the first.")] = 0,
    scripts: Annotated[
        int, typer.Option("--scripts", min=1, help="--random: how many, a seed each.")
    ] = 100,
    shard: Annotated[
        str, typer.Option("--shard", metavar="I/N", help="Do part I of N: seeds, or first orders.")
    ] = "1/1",
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="FILE", help="Write the failure as a scenario (.toml)."),
    ] = None,
    format: Formats = Format.table,
    output: Output = None,
) -> None:
    """Try every legal order of operations, and show the shortest that fails.

    Exit code 0: none fails. 1: one does. 130: interrupted; what was tried by then is shown.
    """
    _check_output(output)
    if save is not None:
        from swaleak.report.files import check_scenario

        check_scenario("--save", save)
    from swaleak.search.survey import shard_of

    part = shard_of(shard)
    targets = open_targets(on, device, patch)
    target = targets[-1]
    from swaleak.report.explore import ProgressLine, explore_report
    from swaleak.search.legal import Rules
    from swaleak.search.survey import AtRandom, Exhaustive, Where, has_segments, survey
    from swaleak.target import strategy_of

    ships = "shipped" in target.strategies()
    name = strategy_of(strategy or ("shipped" if ships else "deferred"))
    segments = has_segments(target, name)
    plan: AtRandom | Exhaustive
    if at_random:
        rules = Rules(contract.value, nodes or 8, pages=3, segments=segments, growth=True)
        plan = AtRandom(steps, seed, scripts)
    else:
        rules = Rules(contract.value, nodes or 3, segments=segments)
        plan = Exhaustive(depth, every)
    surveys = []
    with ProgressLine() as line:
        for size in dict.fromkeys(page_size or [1]):
            surveys.append(survey(Where(target, name, size, rules, part), plan, line.show))
            if surveys[-1].interrupted:
                break
    report = explore_report(about([target]), surveys)
    _print(report, format, output)
    failed = [found for found in surveys if found.witnesses]
    if save is not None and failed:
        from swaleak.report.files import write_text
        from swaleak.script.write import to_toml

        write_text(to_toml(failed[0].scenario()), save)
    interrupted = any(found.interrupted for found in surveys)
    raise typer.Exit(130 if interrupted else 0 if report.ok else 1)


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

    _print(record_report(written, status), format, None)
    raise typer.Exit(status)


@app.command()
def replay(
    trace: Trace,
    strategy: TraceStrategies = None,
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
    [target] = open_targets(on, device)
    from swaleak.check.follow import follow
    from swaleak.report.traces import Replayed, replay_report

    runs = []
    for name in trace_strategies(target, strategy, header.fix):
        reader = TraceReader(trace)
        followed = follow(reader, lambda sizes, name=name: target.make(name, sizes))  # type: ignore[misc]
        runs.append(Replayed(target.name, name, target.origin(name), followed))
    if reader.torn:
        print(f"swaleak: warning: {reader.torn}", file=sys.stderr)
    _finish(replay_report(about([target]), trace, runs), format, output)


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
    from swaleak.report.files import check_scenario
    from swaleak.script.trace import read_header

    check_scenario("-o", output)
    header = read_header(trace)
    [target] = open_targets(on, device)
    from swaleak.report.files import write_text
    from swaleak.report.traces import shrink_report
    from swaleak.script.write import to_toml
    from swaleak.search.reduce import reduce

    (name,) = trace_strategies(target, [strategy] if strategy else None, header.fix)
    small, followed = reduce(trace, target, name)
    write_text(to_toml(small), output)
    report = shrink_report(about([target]), trace, output, small, followed)
    _finish(report, format, None)


def main() -> None:
    """Run the command line. The only place where an error becomes an exit code."""
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    if sys.stdout is None:  # `swaleak … >&-`
        sys.stdout = io.StringIO()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that the terminal cannot show
        sys.stdout.reconfigure(errors="replace")
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except SwaleakError as error:
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):  # Typer's own releases differ in what they make of it
        code = 130
    except BrokenPipeError:  # `swaleak … | head`: nobody reads on
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        _fail(_disk(error), 2)
    except MemoryError:
        _fail("out of memory", 2)
    except Exception as error:
        # torch's own; it may not be imported here
        if type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error):
            _fail("out of memory: " + " ".join(str(error).split()), 2)
        usage = getattr(error, "format_message", None)  # Typer's own: an option it cannot read
        if usage is None:
            raise
        _fail(" ".join(usage().split()), 2)
    sys.exit(code or 0)


def _disk(error: OSError) -> str:
    """Return a sentence for a file that cannot be used, or for an output that takes no more."""
    if error.filename is None:
        with contextlib.suppress(OSError):
            sys.stdout.close()  # or Python tries once more as it ends, and complains at length
    return f"{error.filename or 'standard output'}: {error.strerror or error}"


def _fail(message: str, code: int) -> None:
    print(f"swaleak: {message}", file=sys.stderr)
    sys.exit(code)


def _is_looked_at(format: Format, output: Path | None) -> bool:
    """Whether a person will see the report: on a terminal, or as a picture."""
    picture = output is not None and output.suffix.lower() in (".svg", ".html")
    return picture or (format is Format.table and sys.stdout.isatty())


def _check_output(output: Path | None, *, runs: bool = False) -> None:
    if output is not None:
        from swaleak.report.files import check_ending

        check_ending(output, runs=runs)


def _finish(report: Report, format: Format, output: Path | None) -> None:
    """Print the report, write it if asked to, and leave with its exit code."""
    _print(report, format, output)
    raise typer.Exit(0 if report.ok else 1)


def _print(report: Report, format: Format, output: Path | None) -> None:
    if format is Format.json:
        sys.stdout.write(report.as_json())
    elif format is Format.markdown:
        sys.stdout.write(report.as_markdown())
    else:
        from rich.console import Console

        report.print_to(Console(highlight=False))
    if output is not None:  # last, so that a disk that is full takes nothing from the reader
        sys.stdout.flush()
        from swaleak.report.files import write

        write(report, output)
