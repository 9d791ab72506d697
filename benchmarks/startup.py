"""How much swaleak adds to a bare ``import torch``: whole commands, in turns, in one run.

    python -m benchmarks.startup [--runs N] [TARGET]...

The first target is replayed alone, which is a verdict on real code; all of them together go
through one ``check --strict``, which is the catalogue. Without any: 0.5.18, then the other
releases.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import Figures, Row, environment, markdown, ratios, take_turns
from swaleak.targets.sources import RELEASES

LEAKS = "0.5.18"  # the release that the tool is about
TARGETS = (LEAKS, *(release for release in RELEASES if release != LEAKS))
RUNS = 11
BARE = "import torch"


def seconds(command: Sequence[str]) -> float:
    """Return how long a command takes. Raises ``RuntimeError`` if it comes to no verdict."""
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    took = time.perf_counter() - start
    # 1 is the verdict on a release that leaks, and what Python leaves a crash with
    if done.returncode not in (0, 1) or "Traceback" in done.stderr:
        raise RuntimeError(f"{' '.join(command[1:])}: {done.stderr.strip()}")
    return took


def commands(targets: Sequence[str]) -> dict[str, list[str]]:
    """Return what is timed, the baseline first."""
    swaleak = [sys.executable, "-m", "swaleak"]
    on = Path(targets[0]).name
    return {
        f"`{BARE}`": [sys.executable, "-c", BARE],
        "`swaleak --help`": [*swaleak, "--help"],
        "`swaleak list`": [*swaleak, "list"],
        "`swaleak repro --on builtin`": [*swaleak, "repro", "--on", "builtin"],
        f"`swaleak repro --on {on}`: a verdict on real code": [
            *[*swaleak, "repro", "--on"],
            targets[0],
        ],
        f"`swaleak check --strict`: the catalogue, {len(targets)} targets": [
            *[*swaleak, "check", "--strict"],
            *targets,
        ],
    }


def measure(targets: Sequence[str] = TARGETS, runs: int = RUNS) -> Figures:
    """Time whole commands in turns with a bare ``import torch``."""
    timed = commands(targets)
    took = take_turns(lambda name: seconds(timed[name]), list(timed), runs)
    [(bare, base), *others] = took.items()
    rows = (
        Row(
            name,
            f"{statistics.median(times):.2f} s",
            bare,
            f"{statistics.median(base):.2f} s",
            ratios(times, base),
        )
        for name, times in others
    )
    names = ", ".join(Path(target).name for target in targets)
    return Figures(tuple(rows), f"{runs} turns of whole commands on {names}; {environment()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", help="wheels or releases")
    parser.add_argument("--runs", type=int, default=RUNS)
    asked = parser.parse_args()
    print(markdown(measure(asked.targets or TARGETS, asked.runs)))


if __name__ == "__main__":
    main()
