"""What a verdict costs at production sizes: the same scenario on pools of three sizes, in one run.

    python -m benchmarks.sizes [--runs N] [--on TARGET]...

Each run is a process of its own; the sizes take turns. The baseline is the small case, in time and
in peak memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.figures import Figures, Row, environment, markdown, ratios, take_turns

# the peak of this program alone: what getrusage says begins with that of whoever started it
CODE = """
import sys
from swaleak.cli import main
try:
    main()
finally:
    lines = open("/proc/self/status")
    print(next(line.split()[1] for line in lines if line.startswith("VmHWM")), file=sys.stderr)
"""
TARGETS = ("builtin", "0.5.18")
RUNS = 7
SCENARIO = Path(__file__).parent.parent / "scenarios" / "tombstone-recovery.toml"


class Size(NamedTuple):
    """Pools of ``full`` and ``swa`` slots, ``page`` of them a page."""

    full: int
    swa: int
    page: int


SIZES = {
    "8 pages of 256 slots": Size(2_048, 2_048, 256),
    "9,116,160 full, 911,616 SWA, page 256": Size(9_116_160, 911_616, 256),
    "2,000,000 full, 2,000,000 SWA, page 1": Size(2_000_000, 2_000_000, 1),
}


class Measured(NamedTuple):
    """``seconds``: of the whole command. ``memory``: its peak, bytes. ``results``: its report's."""

    seconds: float
    memory: int
    results: list[dict[str, object]]


def scenario(size: Size) -> str:
    """Return tombstone-recovery on pools of this size."""
    pools = {"full_pages": size.full // size.page, "swa_pages": size.swa // size.page}
    lines = [f"{key} = {value}" for key, value in pools.items()]
    return (
        SCENARIO.read_text() + f"\n[pools]\npage_sizes = [{size.page}]\n" + "\n".join(lines) + "\n"
    )


def measure(size: Size, on: str) -> Measured:
    """Run ``swaleak repro`` under all strategies in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tombstone-recovery.toml"
        file.write_text(scenario(size))
        command = [sys.executable, "-c", CODE, "repro", str(file), "--on", on, "-f", "json"]
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(done.stderr)
    peak = int(done.stderr.splitlines()[-1])
    return Measured(seconds, peak * 1024, json.loads(done.stdout)["results"])


def figures(targets: Sequence[str] = TARGETS, runs: int = RUNS) -> Figures:
    """Time a verdict at all sizes, in turns."""
    rows = []
    for on in targets:

        def run(name: str, on: str = on) -> Measured:
            return measure(SIZES[name], on)

        [(small, base), *others] = take_turns(run, list(SIZES), runs).items()
        base_seconds = [one.seconds for one in base]
        least = min(one.memory for one in base)
        for name, seen in others:
            above = max(one.memory for one in seen) - least
            times = [one.seconds for one in seen]
            rows.append(
                Row(
                    f"`repro --on {Path(on).name}`, all strategies, {name}",
                    f"{statistics.median(times):.2f} s, {above / 2**20:.0f} MB more",
                    small,
                    f"{statistics.median(base_seconds):.2f} s",
                    ratios(times, base_seconds),
                )
            )
    return Figures(tuple(rows), f"{runs} turns of whole commands, peak memory; {environment()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--on", action="append", metavar="TARGET")
    asked = parser.parse_args()
    print(markdown(figures(asked.on or TARGETS, asked.runs)))


if __name__ == "__main__":
    main()
