"""What a verdict costs at production sizes: the same scenario on pools of three sizes, in one run.

    python benchmarks/sizes.py [--runs N] [--on TARGET]...

Each run is a process of its own; the three sizes alternate. Prints medians of the whole command's
time, its ratio to the small case, and the peak memory above the small case's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--on", action="append", metavar="TARGET")
    options = parser.parse_args()
    print("| target | pools | median, s | times small | peak above small, MB |")
    print("| --- | --- | --: | --: | --: |")
    for on in options.on or ["builtin"]:
        runs: dict[str, list[Measured]] = {name: [] for name in SIZES}
        for turn in range(options.runs + 1):
            for name, size in SIZES.items():
                measured = measure(size, on)
                if turn:  # the first turn fills the disk cache
                    runs[name].append(measured)
        small = next(iter(runs.values()))
        for name, seen in runs.items():
            seconds = statistics.median(run.seconds for run in seen)
            pairs = zip(seen, small, strict=True)
            ratio = statistics.median(a.seconds / b.seconds for a, b in pairs)
            above = max(r.memory for r in seen) - min(r.memory for r in small)
            print(
                f"| {Path(on).name} | {name} | {seconds:.2f} | {ratio:.2f} | {above / 2**20:.0f} |"
            )


if __name__ == "__main__":
    main()
