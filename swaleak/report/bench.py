"""What `swaleak bench` prints: a table a clock, Markdown to paste, and JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from swaleak import __version__
from swaleak.bench.cases import Settings
from swaleak.bench.contestant import Contestant
from swaleak.bench.figures import Result, Timing
from swaleak.report.model import STYLES, Cell, Grid, Report, Section
from swaleak.target import SHIPPED

AGAIN = "A/A"  # the baseline's second self


def bench_report(
    contestants: Sequence[Contestant],
    results: Sequence[Result],
    settings: Settings,
    device: str,
    asked: int,
) -> Report:
    """Return the report. ``asked``: how many cases were to be measured."""
    machine = machine_facts(device)
    complete = len(results) == asked and all(r.samples == settings.samples for r in results)
    sections = [_section("wall time, us a group", contestants, results, "wall")]
    if results[0].gpu:
        sections.insert(0, _section("GPU time, us a group", contestants, results, "gpu"))
    lines = (
        *_notes(contestants, results, settings),
        f"{'' if complete else 'interrupted: '}{_counts(results, asked)}, "
        f"{settings.warmup} warm-ups, seed {settings.seed}",
        "machine: " + ", ".join(f"{value}" for value in machine.values() if value),
    )
    body = {
        "complete": complete,
        "machine": machine,
        "settings": asdict(settings),
        "baseline": contestants[0].label,
        "cases": [_case_json(contestants, result) for result in results],
    }
    header = (
        f"swaleak {__version__}: {contestants[0].label} against "
        f"{', '.join(one.label for one in contestants[1:])} on {_where(contestants)}, "
        f"{device}, torch {torch.__version__}"
    )
    sections.append(Section("", None, lines))
    return Report("bench", complete, header, tuple(sections), body, str(torch.__version__), device)


def machine_facts(device: str) -> dict[str, str | None]:
    """Return what a reader of the figures wants to know of this machine."""
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    return {
        "cpu": f"{_cpu()} ({os.cpu_count()} cores)",
        "gpu": gpu and f"{gpu}, CUDA {torch.version.cuda}",
        "python": f"Python {platform.python_version()}",
        "system": f"{platform.system()} {platform.machine()}",
    }


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _section(
    title: str, contestants: Sequence[Contestant], results: Sequence[Result], clock: str
) -> Section:
    rows = [row for result in results for row in _rows(contestants, result, clock)]
    columns = ("size", "calls", "pages", "strategy", "median", "95 % interval", "verdict")
    right = frozenset({"size", "calls", "pages", "median", "95 % interval"})
    noise = max(timings[-1].noise for r in results if (timings := getattr(r, clock)))
    line = f"noise: {AGAIN}, the baseline against itself, differs by at most {noise:.1%}".replace(
        "%", " %"
    )
    return Section(title, Grid(columns, tuple(rows), right), (line,))


def _rows(
    contestants: Sequence[Contestant], result: Result, clock: str
) -> Iterator[tuple[Cell, ...]]:
    timings: tuple[Timing, ...] = getattr(result, clock)
    shape, noise = result.shape, timings[-1].noise
    case = [str(shape.page_size), str(shape.calls), str(shape.pages)]
    labels = [*(one.label for one in contestants), AGAIN]
    for i, (label, timing) in enumerate(zip(labels, timings, strict=True)):
        audit = result.audits[i % len(contestants)]
        said = [timing.verdict(noise) if i else "baseline"]
        if audit != "clean" and label != AGAIN:
            said.append(audit)
        interval = f"{_percent(timing.low)}..{_percent(timing.high)} %"
        yield (
            *(Cell(text) for text in case),
            Cell(label),
            Cell(f"{timing.us:.1f}"),
            Cell(interval if i else ""),
            Cell(", ".join(said), STYLES[audit] if audit != "clean" else ""),
        )
        case = ["", "", ""]


def _percent(ratio: float) -> str:
    more = 100 * (ratio - 1)
    return f"{more:+z.1f}" if abs(more) < 99.95 else f"{more:+.0f}"


def _notes(
    contestants: Sequence[Contestant], results: Sequence[Result], settings: Settings
) -> Iterator[str]:
    call = "free_swa_segment" if settings.segment else "free_swa"
    yield f"size: slots a page; calls: {call} calls a group; pages: a call"
    yield (
        f"timed: {'a group with a recovery in it' if settings.recover else 'a group'}, "
        f"{'with' if settings.whole else 'without'} the physical release"
    )
    wrong = [
        f"{one.label} ({audit})"
        for one, audit in zip(contestants, results[0].audits, strict=True)
        if audit != "clean"
    ]
    if wrong:
        yield f"WRONG: {', '.join(wrong)}; what loses pages is no bargain"
    shipped = [one.label for one in contestants if one.origin in ("shipped", "patched")]
    grafted = [one.label for one in contestants if one.origin == "grafted"]
    if shipped and grafted:
        yield (
            f"{', '.join(shipped)}: SGLang's own code; {', '.join(grafted)}: grafted on it, with "
            f"look-ups of swaleak's, which differ too"
        )


def _counts(results: Sequence[Result], asked: int) -> str:
    samples = sorted({result.samples for result in results})
    return f"{len(results)} of {asked} cases, {' to '.join(map(str, samples))} samples each"


def _where(contestants: Sequence[Contestant]) -> str:
    names = dict.fromkeys(one.target.name for one in contestants if one.strategy != SHIPPED)
    if not names:
        return "SGLang's own code"
    return ", ".join("the built-in model" if name == "builtin" else name for name in names)


def _case_json(contestants: Sequence[Contestant], result: Result) -> dict[str, Any]:
    entries = [_timing_json(result, i) for i in range(len(contestants) + 1)]
    return {
        **asdict(result.shape),
        "samples": result.samples,
        "strategies": {
            one.label: {"target": one.target.name, "origin": one.origin, "audit": audit, **entry}
            for one, audit, entry in zip(contestants, result.audits, entries, strict=False)
        },
        "a_a": entries[-1],
        "noise": result.wall[-1].noise,
        "gpu_noise": result.gpu[-1].noise if result.gpu else None,
    }


def _timing_json(result: Result, i: int) -> dict[str, Any]:
    wall, gpu = result.wall[i], result.gpu[i] if result.gpu else None
    return {
        "wall_us": wall.us,
        "gpu_us": gpu.us if gpu else None,
        "ratio": wall.ratio,
        "low": wall.low,
        "high": wall.high,
        "verdict": wall.verdict(result.wall[-1].noise),
        "gpu": {
            "ratio": gpu.ratio,
            "low": gpu.low,
            "high": gpu.high,
            "verdict": gpu.verdict(result.gpu[-1].noise),
        }
        if gpu and result.gpu
        else None,
    }
