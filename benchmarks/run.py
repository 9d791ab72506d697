"""All benchmarks in one run, and their table in benchmarks/README.md.

    python -m benchmarks.run [--only PART]... [--sglang-python PATH] [--quick] [--write]

Each figure is a ratio to a baseline that took turns with it. ``--sglang-python`` is an interpreter
with a full SGLang (tests/requirements-sglang.txt), which the part ``plugin`` needs; without it, and
for parts that ``--only`` leaves out, the table keeps what it had and says so. ``--quick`` shows
that everything runs, measures nothing, and leaves the table alone unless ``--write`` is given.

Exit code 1: a part failed; the table is then as it was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from benchmarks import explore, plugin, replay, sizes, startup
from benchmarks.figures import Figures, Row, environment, ratios, table, take_turns
from swaleak.cli_cases import start_torch
from swaleak.files import write_text

PAGE = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- written by python -m benchmarks.run -->\n", "<!-- end of what it wrote -->\n"
HEAD = ("part", "measured", "figure", "baseline", "ratio", "alone")
EARLIER = " (from an earlier run)"
HASTY = "a quick run, no measurement: "


@dataclass(frozen=True, slots=True)
class Effort:
    """How much of everything is done. ``turns`` and ``runs`` are those of the paired ratios."""

    startup_runs: int = startup.RUNS
    explore_turns: int = explore.TURNS
    depth: int = explore.DEPTH
    examples: int = explore.EXAMPLES
    replay_turns: int = 5
    calls: int = 20_000
    sizes_runs: int = sizes.RUNS
    rounds: int = plugin.ROUNDS
    requests: int = plugin.REQUESTS


QUICK = Effort(1, 1, 4, 10, 1, 500, 1, 1, 80)


@dataclass(frozen=True, slots=True)
class Options:
    """What is to be measured. ``targets``: the first one alone, all of them in the catalogue."""

    effort: Effort
    targets: tuple[str, ...]
    sglang_python: str | None


def replayed(turns: int, calls: int) -> Figures:
    """Replay traces of two kinds at three page sizes, beside the same without a shadow."""
    start_torch()  # as the command does
    rows = []
    for page_size, decode in product((1, 4, 256), (0, 16)):

        def once(_: str, page_size: int = page_size, decode: int = decode) -> replay.Measured:
            return replay.measured(page_size, decode, calls)

        [seen] = take_turns(once, ["replay"], turns).values()
        each = 1e6 / seen[0].run.calls
        growth = f", {decode} tokens decoded per request" if decode else ""
        rows.append(
            Row(
                f"`swaleak replay`: per call, page size {page_size}{growth}",
                f"{statistics.median(one.replay for one in seen) * each:.1f} us",
                "the same without shadow and comparison",
                f"{statistics.median(one.bare for one in seen) * each:.1f} us",
                ratios([one.replay for one in seen], [one.bare for one in seen]),
            )
        )
    note = f"{turns} turns of {calls:,} calls, the built-in model, barrier, 512 pages per pool"
    return Figures(tuple(rows), f"{note}, CPU time of one thread; {environment()}")


def plugged(python: str, rounds: int, requests: int) -> Figures:
    """Measure the plugin under an interpreter that has SGLang."""
    command = [python, "-m", "benchmarks.plugin", "--json"]
    command += ["--rounds", str(rounds), "--requests", str(requests)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{python}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
    return Figures.of_data(json.loads(done.stdout.splitlines()[-1]))


def _startup(options: Options) -> Figures:
    return startup.measure(options.targets, options.effort.startup_runs)


def _explore(options: Options) -> Figures:
    effort = options.effort
    return explore.measure(
        options.targets[0], depth=effort.depth, examples=effort.examples, turns=effort.explore_turns
    )


def _replay(options: Options) -> Figures:
    return replayed(options.effort.replay_turns, options.effort.calls)


def _sizes(options: Options) -> Figures:
    return sizes.figures(("builtin", options.targets[0]), options.effort.sizes_runs)


def _plugin(options: Options) -> Figures:
    assert options.sglang_python
    return plugged(options.sglang_python, options.effort.rounds, options.effort.requests)


PARTS: dict[str, Callable[[Options], Figures]] = {
    "startup": _startup,
    "explore": _explore,
    "replay": _replay,
    "sizes": _sizes,
    "plugin": _plugin,
}


def section(part: str, figures: Figures) -> list[str]:
    """Return a part's lines of the table, and its note as the last one."""
    alone = f"`python -m benchmarks.run --only {part}`"
    lines = table((), [(part, *row.cells(), alone) for row in figures.rows])[2:]
    return [*lines, f"* {part}: {figures.note}"]


def kept(part: str, page: str) -> list[str]:
    """Return a part's lines as they are on the page, marked as not of this run."""
    of_part = (f"| {part} |", f"* {part}: ")
    lines = [line for line in page.splitlines() if line.startswith(of_part)]
    if not lines:
        return [f"| {part} | not measured yet | | | | |", f"* {part}: not measured yet"]
    return [*lines[:-1], lines[-1].removesuffix(EARLIER) + EARLIER]


def with_table(page: str, found: dict[str, Figures]) -> str:
    """Return the page with the figures between its two marks, and nothing else changed."""
    before, begin, rest = page.partition(BEGIN)
    old, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"no {BEGIN.strip()} … {END.strip()} to write between")
    parts = [section(p, found[p]) if p in found else kept(p, old) for p in PARTS]
    lines = [
        *table(HEAD, []),
        *(line for part in parts for line in part[:-1]),
        "",
        *(part[-1] for part in parts),
    ]
    return before + begin + "\n" + "\n".join(lines) + "\n\n" + end + after


def measure(parts: Sequence[str], options: Options) -> tuple[dict[str, Figures], dict[str, str]]:
    """Return what came out, and why the others failed."""
    found: dict[str, Figures] = {}
    failed: dict[str, str] = {}
    for part in parts:
        print(f"{part} …", file=sys.stderr, flush=True)
        try:
            found[part] = PARTS[part](options)
        except Exception as error:  # whatever it is, the other parts are still worth their time
            failed[part] = f"{type(error).__name__}: {error}"
    return found, failed


def main(arguments: Sequence[str] | None = None, page: Path = PAGE) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=PARTS, metavar="PART")
    parser.add_argument("--on", action="append", metavar="TARGET", help="default: eleven releases")
    parser.add_argument("--sglang-python", metavar="PATH")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args(arguments)
    parts = asked.only or [part for part in PARTS if part != "plugin" or asked.sglang_python]
    if "plugin" in parts and not asked.sglang_python:
        parser.error("plugin needs --sglang-python")
    targets = tuple(asked.on or startup.TARGETS)
    options = Options(QUICK if asked.quick else Effort(), targets, asked.sglang_python)
    writes = asked.write or not asked.quick
    if writes:  # a page that cannot take the table is found out before anything is measured
        try:
            with_table(page.read_text(encoding="utf-8"), {})
        except (OSError, ValueError) as error:
            parser.error(f"{page}: {error}")
    found, failed = measure(parts, options)
    if asked.quick:
        found = {part: replace(one, note=HASTY + one.note) for part, one in found.items()}
    for part, figures in found.items():
        print("\n".join(section(part, figures)))
    for part, why in failed.items():
        print(f"{part} failed: {why}", file=sys.stderr)
    if failed:
        return 1
    if writes:
        write_text(with_table(page.read_text(encoding="utf-8"), found), page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
