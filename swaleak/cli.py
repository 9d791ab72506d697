"""The commands. Each reads its options, calls one function and prints one report.

What a command needs is imported inside it, torch above all: ``--help`` and ``list`` are quick.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from swaleak import __version__, cli_app
from swaleak.cli_app import (
    App,
    Commands,
    check_output,
    finish,
    given,
    interruptible,
    is_looked_at,
    print_report,
    time_limit,
)
from swaleak.cli_cases import (
    about,
    is_patched,
    open_one,
    open_targets,
    start_torch,
    target_output,
    trace_strategies,
)
from swaleak.cli_options import (
    MAX_REPEATS,
    Contract,
    Device,
    Format,
    Formats,
    Name,
    Names,
    On,
    Output,
    OutputOfRuns,
    PageSizes,
    Patches,
    Strategies,
    Timeout,
    Trace,
    TraceStrategies,
    complete_releases,
    complete_scenarios,
    complete_targets,
    file_path,
)
from swaleak.errors import Interrupted, TargetError, UsageError, unknown
from swaleak.scenario import catalogue
from swaleak.scenario.toml import CACHES

app = App(
    name="swaleak",
    cls=Commands,
    help="Reproduce SGLang's SWA page leak, and find out whether a fix for it holds.",
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 as declared, 1 not, 2 bad input, 124 a run that passed --timeout, 125 a "
    "target that cannot be loaded, 130 interrupted. A reader that leaves early, as `head` does, "
    "changes none of them.",
)
FOR_RANDOM = ("steps", "seed", "scripts", "shard")  # options of explore
FOR_EXHAUSTIVE = ("depth", "every", "jobs")
FOR_REQUESTS = ("cache",)  # options of explore with --requests, and without
FOR_NODES = ("nodes", "every", "jobs", "contract")


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
        int,
        typer.Option(
            "--repeat", min=1, max=MAX_REPEATS, metavar="N", help="Rounds on one allocator."
        ),
    ] = 1,
    timeout: Timeout = None,
    format: Formats = Format.table,
    output: OutputOfRuns = None,
) -> None:
    """Replay scenarios: physical and mapped SWA pages, and who lost what.

    Exit code 0: it came out as the scenario declares. 1: it did not.
    """
    check_output(output, runs=True)
    from swaleak import cli_cases

    chosen = cli_cases.choose(names)
    looked_at = steps or is_looked_at(format, output)
    asked = strategy or (["shipped"] if patch else None)
    with target_output(), time_limit(timeout):
        targets = open_targets([on], device, patch)
        from swaleak.report.cases import repro_report

        batch = cli_cases.chosen_cases(
            chosen, targets, asked, page_size, keep_steps=steps, repeat=repeat
        )
        maps = None
        if looked_at:
            maps = cli_cases.page_maps(batch.cases, targets, repeat, every_step=steps)
        report = repro_report(about(targets), batch.cases, maps)
    finish(report.with_notes(batch.notes), format, output)


@app.command()
def verify(
    on: On = "auto",
    device: Device = "auto",
    page_size: PageSizes = None,
    timeout: Timeout = None,
    format: Formats = Format.table,
    output: OutputOfRuns = None,
) -> None:
    """Run the whole catalogue under every strategy: what leaks must leak, the fixes must hold.

    Exit code 0: all came out as declared. 1: something did not.
    """
    check_output(output, runs=True)
    with target_output(), time_limit(timeout):
        targets = open_targets([on], device)
        from swaleak import cli_cases
        from swaleak.report.cases import verify_report

        batch = cli_cases.catalogue_cases(targets, None, page_size)
        report = verify_report(about(targets), batch.cases).with_notes(batch.notes)
    finish(report, format, output)


@app.command()
def check(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET...",
            help="What --on takes; as many as you like.",
            autocompletion=complete_targets,
        ),
    ],
    patch: Patches = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Judge by the latent scenarios as well.")
    ] = False,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            metavar="TARGET",
            help="Judge the latent scenarios by what is new since this target. Default: with "
            "--patch, the sources without it.",
            autocompletion=complete_targets,
        ),
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            "--scenario",
            metavar="SCENARIO",
            help="Judge by this one, a name or a TOML file, not by the catalogue; repeatable.",
            autocompletion=complete_scenarios,
        ),
    ] = None,
    device: Device = "auto",
    page_size: PageSizes = None,
    timeout: Timeout = None,
    format: Formats = Format.table,
    output: OutputOfRuns = None,
) -> None:
    """Judge candidates: with SGLang's code as it is, every scenario must be clean.

    A latent scenario may be refused as well: it is misuse. With a baseline, what fails there in
    the same way is unchanged, and only what is new counts.

    With --patch only the patched sources are judged; as shipped is shown for comparison.
    Exit code 0: all are clean. 1: one is not. 125: a target cannot be loaded, so that
    `git bisect run swaleak check .` skips that commit.
    """
    check_output(output, runs=True)
    from swaleak import cli_cases

    chosen = cli_cases.choose(scenario) if scenario else None
    with target_output(), time_limit(timeout):
        opened = open_targets(targets, device, patch)
        before = open_targets([baseline], device) if baseline else []
        for target in (*opened, *before):
            if "shipped" not in target.strategies():
                raise UsageError(
                    "check: the built-in model is no candidate, it ships nothing; name a release, "
                    "a wheel, a checkout or module:Class (`swaleak verify` tries the model)"
                )
        from swaleak.report.cases import check_report

        every = [*before, *opened]
        if chosen:
            batch = cli_cases.chosen_cases(chosen, every, ["shipped"], page_size)
        else:
            batch = cli_cases.catalogue_cases(every, ["shipped"], page_size, latent=strict)
        baselines: dict[str, str] = {}
        if before:
            judged = [target for target in opened if not patch or is_patched(target)]
            baselines = {target.name: before[0].name for target in judged}
        elif patch:
            baselines = {b.name: a.name for a, b in zip(opened[::2], opened[1::2], strict=True)}
        report = check_report(about(opened), batch.cases, baselines)
    finish(report.with_notes(batch.notes), format, output)


@app.command("list")
def list_(format: Formats = Format.table, output: Output = None) -> None:
    """List the catalogue of scenarios."""
    check_output(output)
    from swaleak.report.catalogue import list_report

    finish(list_report(catalogue.catalogue()), format, output)


@app.command()
def show(
    name: Name,
    format: Formats = Format.table,
    output: Output = None,
) -> None:
    """Show one scenario: its story, its steps, and what is declared."""
    check_output(output)
    from swaleak.report.catalogue import show_report

    finish(show_report(catalogue.load(name)), format, output)


@app.command()
def doctor(on: On = "auto", format: Formats = Format.table, output: Output = None) -> None:
    """Say what this machine has: torch, devices, an installed SGLang and what it ships.

    Also which names of SGLang swaleak provides itself when the target's code runs.
    """
    check_output(output)
    with target_output():
        start_torch()
        from swaleak.report.doctor import doctor_report

        report = doctor_report(on)
    finish(report, format, output)


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
        typer.Option(
            min=1, max=100_000, metavar="N", help="Calls of free_swa per group; repeatable."
        ),
    ] = None,
    pages: Annotated[
        list[int] | None, typer.Option(min=1, metavar="N", help="Pages per call; repeatable.")
    ] = None,
    warmup: Annotated[
        int, typer.Option(min=0, max=MAX_REPEATS, metavar="N", help="Rounds that do not count.")
    ] = 50,
    samples: Annotated[
        int, typer.Option(min=20, max=MAX_REPEATS, metavar="N", help="Rounds that do, per case.")
    ] = 500,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the order and the intervals.")] = 0,
    whole: Annotated[bool, typer.Option("--whole", help="With the physical release.")] = False,
    recover: Annotated[
        bool | None,
        typer.Option(
            "--recover/--no-recover",
            help="Only groups with a recovery, or only groups without. Default: both.",
        ),
    ] = None,
    segment: Annotated[
        bool, typer.Option("--segment", help="Through free_swa_segment, as caches do since 0.5.20.")
    ] = False,
    format: Formats = Format.table,
    output: Output = None,
) -> None:
    """Measure what each strategy costs: medians of a free group, interleaved.

    Without --page-size, --calls and --pages: the seven published cases. Each is measured without
    and with a recovery in the group. --patch changes the candidates that are targets; without any,
    the baseline. Exit code 0: measured.
    """
    check_output(output)
    with target_output():
        start_torch()
        from functools import cache

        from swaleak.benchmark import measure, statistics
        from swaleak.report.bench import bench_report
        from swaleak.report.progress import with_bar
        from swaleak.targets.open import choose_device

        where = choose_device(device)
        settings = measure.Settings(warmup, samples, whole, recover, segment, seed)
        cases = measure.cases(page_size, calls, pages, recover)
        open_ = cache(lambda name: open_targets([name], where)[0])
        patched = cache(lambda name: open_targets([name], where, patch)[1]) if patch else open_
        asked = candidate or ([baseline] if patch else None)
        them = measure.contestants(baseline, asked, lambda: open_(on), open_, patched)
        rounds: list[measure.Round] = []
        interrupted = False
        try:
            for one in with_bar(measure.run(them, cases, settings, measure.clock_for(where))):
                rounds.append(one)
        except KeyboardInterrupt:
            interrupted = True
        results = statistics.results(rounds, seed)
        if not results:
            raise Interrupted("the first case of " + ", ".join(one.label for one in them))
        report = bench_report(them, results, settings, where, asked=len(cases))
    finish(report, format, output, 130 if interrupted else 0)


def _release(text: str) -> str:
    from packaging.version import InvalidVersion, Version

    try:
        return str(Version(text.removeprefix("v")))
    except InvalidVersion:
        raise UsageError(f"--release {text}: no release, as 0.5.18 is one") from None


@app.command()
def diagnose(
    log: Annotated[
        str, typer.Argument(metavar="[FILE|-]", help="A server log; - is standard input.")
    ] = "-",
    page_size: Annotated[
        int | None,
        typer.Option(
            "--page-size",
            min=1,
            metavar="N",
            help="Of the server; not used where the log says it.",
        ),
    ] = None,
    release: Annotated[
        str | None,
        typer.Option(
            "--release",
            metavar="X",
            help="Of SGLang, as 0.5.18; not used where the log says it.",
            autocompletion=complete_releases,
            parser=_release,
        ),
    ] = None,
    format: Formats = Format.table,
    output: Output = None,
) -> None:
    """Find leak messages in a server log: slots, pages, which known faults fit, and what to do.

    A log may be coloured, in UTF-16 or packed with gzip.

    Exit code 0: a leak message was found, even one that is cut off.

    Exit code 1: there is none. Exit code 2: the log cannot be read.
    """
    check_output(output)
    file_path(log)
    if log == "-" and sys.stdin.isatty():
        raise UsageError("diagnose: name a log file, or pipe one in")
    from swaleak.log_diagnosis.parser import diagnose
    from swaleak.report.diagnose import diagnose_report

    try:
        if log == "-":
            found = diagnose(sys.stdin.buffer, page_size, release)
        else:
            with open(log, "rb", buffering=0) as file:
                found = diagnose(file, page_size, release)
    except OSError as error:
        raise UsageError(f"{log}: {error.strerror or error}") from None
    name = "standard input" if log == "-" else log
    finish(diagnose_report(name, found), format, output)


@app.command()
def export(
    name: Name,
    unittest: Annotated[
        bool, typer.Option("--unittest", help="As a unittest for SGLang's own suite.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write it: .py.", parser=file_path),
    ] = None,
) -> None:
    """Export a scenario as a regression test that needs SGLang and nothing else."""
    if not unittest:
        raise UsageError("export: say as what; --unittest is what there is")
    from swaleak.files import check_writable, write_text

    if output is not None:
        check_writable("-o", output, ".py", "a unittest")
    scenario = catalogue.load(name)
    if scenario.caches:
        raise UsageError(f"{name}: only an allocator's scenario can be exported, not a cache's")
    from swaleak.report.unittest_export import unittest_file

    text = unittest_file(scenario)
    if output is None:
        sys.stdout.write(text)
    else:
        write_text(text, output)


@app.command()
def explore(
    context: typer.Context,
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
            "--nodes",
            min=1,
            max=64,
            metavar="N",
            help="Nodes that live at once. Default: 3; 8 with --random.",
        ),
    ] = None,
    depth: Annotated[
        int,
        typer.Option(
            "--depth", min=1, max=64, metavar="N", help="Operations in an order, at most."
        ),
    ] = 8,
    contract: Annotated[
        Contract, typer.Option("--contract", help="Which operations are legal.")
    ] = Contract.production,
    page_size: PageSizes = None,
    device: Device = "cpu",
    every: Annotated[
        bool,
        typer.Option("--all", help="Do not stop at a failure: one order for each way."),
    ] = False,
    at_random: Annotated[
        bool, typer.Option("--random", help="Long random scripts, shrunk, in place of every order.")
    ] = False,
    requests: Annotated[
        bool,
        typer.Option(
            "--requests", help="Search over requests on the target's radix caches: who takes what."
        ),
    ] = False,
    cache: Annotated[
        list[str] | None,
        typer.Option(
            "--cache", metavar="NAME", help="--requests: swa or unified; repeatable. Default: both."
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            "--steps", min=1, max=100_000, metavar="N", help="--random: operations a script."
        ),
    ] = 200,
    seed: Annotated[
        int, typer.Option("--seed", min=0, metavar="N", help="--random: seed of the first.")
    ] = 0,
    scripts: Annotated[
        int, typer.Option("--scripts", min=1, metavar="N", help="--random: how many, a seed each.")
    ] = 100,
    shard: Annotated[
        str, typer.Option("--shard", metavar="I/N", help="--random: do part I of N of the seeds.")
    ] = "1/1",
    jobs: Annotated[
        int,
        typer.Option("--jobs", "-j", min=1, max=256, metavar="N", help="Processes to search in."),
    ] = 1,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save",
            metavar="FILE",
            help="Write the failure as a scenario: .toml.",
            parser=file_path,
        ),
    ] = None,
    timeout: Timeout = None,
    format: Formats = Format.table,
    output: Output = None,
) -> None:
    """Try every legal order of steps, and show the shortest that fails.

    With --requests the steps are those of requests on a radix cache, as SGLang's scheduler takes
    them: two requests, or three with --random. Without --page-size: at page size 1.

    Exit code 0: none fails. 1: one does. 130: interrupted; what was tried by then is shown.
    """
    check_output(output)
    if save is not None:
        from swaleak.files import check_writable

        check_writable("--save", save, ".toml", "a scenario")
    for flag, is_on, idle in (
        ("--random", at_random, FOR_EXHAUSTIVE if at_random else FOR_RANDOM),
        ("--requests", requests, FOR_NODES if requests else FOR_REQUESTS),
    ):
        for name in given(context, *idle):
            option = "--all" if name == "every" else f"--{name}"
            raise UsageError(f"explore: {option} means nothing with{'' if is_on else 'out'} {flag}")
    for name in cache or ():
        if name not in CACHES:
            raise UsageError(unknown("cache", name, CACHES))
    with target_output(), time_limit(timeout):
        target = open_one(on, device, patch)
        from swaleak.explorer.search import (
            AtRandom,
            Exhaustive,
            Place,
            has_segments,
            search,
            shard_of,
        )
        from swaleak.report.explore import explore_report
        from swaleak.report.progress import ProgressLine
        from swaleak.scenario.contract import RequestRules, Rules
        from swaleak.targets.open import strategy_of

        ships = "shipped" in target.strategies()
        name = strategy_of(strategy or ("shipped" if ships else "deferred"))
        plan: AtRandom | Exhaustive
        rules: Rules | RequestRules
        searched: list[str | None] = [None]
        if at_random:
            plan = AtRandom(steps, seed, scripts, shard_of(shard))
        else:
            plan = Exhaustive(depth, every, jobs)
        if requests:
            rules = RequestRules(3, parts=True) if at_random else RequestRules()
            searched = [one for one in cache or CACHES if one not in target.caches.left_out]
            if not searched:
                raise TargetError(f"{target.name}: {'; '.join(target.caches.left_out.values())}")
        else:
            segments = has_segments(target, name)
            if at_random:
                rules = Rules(contract.value, nodes or 8, pages=3, segments=segments, growth=True)
            else:
                rules = Rules(contract.value, nodes or 3, segments=segments)
        found = []
        with ProgressLine() as line:
            for of, size in product(searched, dict.fromkeys(page_size or [1])):
                with interruptible(f"explore on {target.name}, strategy {name}, page size {size}"):
                    found.append(search(Place(target, name, size, rules, of), plan, line.show))
                if found[-1].interrupted:
                    break
        report = explore_report(about([target]), found)
    print_report(report, format, output)
    failed = [one for one in found if one.counterexamples]
    if save is not None and failed:
        from swaleak.files import write_text
        from swaleak.scenario.toml import to_toml

        with target_output():
            scenario = failed[0].scenario()
        write_text(to_toml(scenario), save)
    interrupted = any(one.interrupted for one in found)
    raise typer.Exit(130 if interrupted else 0 if report.ok else 1)


@app.command()
def record(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="What starts the server.")
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="RUN.jsonl; each process writes its own, RUN.PID.jsonl.",
            parser=file_path,
        ),
    ],
    fix: Annotated[
        str | None, typer.Option("--fix", metavar="NAME", help="Also repair: barrier or enqueue.")
    ] = None,
    format: Formats = Format.table,
) -> None:
    """Run a command that starts SGLang, and record what happens to its SWA allocator.

    The exit code is the command's own, 128 + N where signal N ended it; 2 where nothing was
    recorded.
    """
    from swaleak.files import check_writable
    from swaleak.live import launch, plugin

    check_writable("-o", output, ".jsonl", "a trace")
    if fix is not None and fix not in plugin.FIXES:
        raise UsageError(unknown("fix", fix, plugin.FIXES))
    status, written = launch.record(command, output, fix)
    from swaleak.report.traces import record_report

    finish(record_report(written, status), format, code=status)


@app.command()
def replay(
    trace: Trace,
    strategy: TraceStrategies = None,
    on: On = "auto",
    device: Device = "auto",
    timeout: Timeout = None,
    format: Formats = Format.table,
    output: Output = None,
) -> None:
    """Replay a recorded run on an allocator, and judge it after every free group.

    Exit code 0: it is clean. 1: a violation.
    """
    check_output(output)
    from swaleak.trace.format import TraceReader, read_header

    header = read_header(trace)
    with target_output(), time_limit(timeout):
        [target] = open_targets([on], device)
        from swaleak.report.progress import ProgressLine
        from swaleak.report.traces import Replayed, replay_report
        from swaleak.trace.replay import run_trace
        from swaleak.trace.to_scenario import sizes_of

        replayed = []
        for name in trace_strategies(target, strategy, header.fix):
            with (
                interruptible(f"{trace.name} on {target.name}, strategy {name}"),
                ProgressLine() as line,
            ):
                reader = TraceReader(trace, line.show_bytes)
                run = run_trace(reader, lambda head: target.make(name, sizes_of(head)))  # noqa: B023
            replayed.append(Replayed(target.name, name, target.origin(name), run))
        report = replay_report(about([target]), trace, replayed)
    if reader.torn:
        print(f"swaleak: warning: {reader.torn}", file=sys.stderr)
    finish(report, format, output)


@app.command()
def shrink(
    trace: Trace,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="Write it: .toml.", parser=file_path),
    ],
    strategy: Annotated[
        str | None, typer.Option("--strategy", "-s", metavar="NAME", help="As for replay; one.")
    ] = None,
    on: On = "auto",
    device: Device = "auto",
    format: Formats = Format.table,
) -> None:
    """Reduce a recorded run that fails to a small scenario that fails in the same way."""
    from swaleak.files import check_writable
    from swaleak.trace.format import read_header

    check_writable("-o", output, ".toml", "a scenario")
    header = read_header(trace)
    with target_output():
        [target] = open_targets([on], device)
        from swaleak.files import write_text
        from swaleak.report.traces import shrink_report
        from swaleak.scenario.toml import to_toml
        from swaleak.trace.to_scenario import reduce

        (name,) = trace_strategies(target, [strategy] if strategy else None, header.fix)
        with interruptible(f"{trace.name} on {target.name}, strategy {name}"):
            small = reduce(trace, target, name)
        write_text(to_toml(small.scenario), output)
        report = shrink_report(about([target]), trace, output, small)
    finish(report, format)


def main() -> None:
    """Run the command line."""
    cli_app.run(app)
