"""How much swaleak adds to a bare ``import torch``: whole commands, interleaved, in one run.

    python benchmarks/startup.py [--runs N] WHEEL_OR_RELEASE...

The first target is replayed alone, all of them together in one ``check --strict``. Prints medians
and the ratio to ``import torch``, whose runs alternate with the others.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    took = time.perf_counter() - start
    if done.returncode not in (0, 1):
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="+", help="wheels or releases")
    parser.add_argument("--runs", type=int, default=11)
    options = parser.parse_args()
    python, swaleak = sys.executable, [sys.executable, "-m", "swaleak"]
    commands = {
        "import torch": [python, "-c", "import torch"],
        "swaleak --help": [*swaleak, "--help"],
        "swaleak list": [*swaleak, "list"],
        "swaleak repro": [*swaleak, "repro", "--on", "builtin"],
        "swaleak repro --on SGLANG": [*swaleak, "repro", "--on", options.targets[0]],
        f"swaleak check --strict, {len(options.targets)} targets": [
            *[*swaleak, "check", "--strict"],
            *options.targets,
        ],
    }
    took: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(options.runs + 1):
        for name, command in commands.items():
            spent = seconds(command)
            if turn:  # the first turn fills the disk cache
                took[name].append(spent)
    base = took["import torch"]
    print("| command | median, s | times `import torch` |\n| --- | --: | --: |")
    for name, times in took.items():
        ratio = statistics.median(t / b for t, b in zip(times, base, strict=True))
        print(f"| `{name}` | {statistics.median(times):.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
