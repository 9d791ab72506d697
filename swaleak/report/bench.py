"""What `swaleak bench` prints: a table per clock, Markdown to paste, and JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from swaleak import __version__
from swaleak.benchmark.measure import Contestant, Settings
from swaleak.benchmark.statistics import Result
from swaleak.report.model import STYLES, Cell, Grid, Report, Section
from swaleak.targets.open import SHIPPED

TITLES = {"gpu": "GPU time, us per group", "wall": "wall time, us per group"}
OWN_CODE = "SGLang's own code"
LEFT = ("recovery", "strategy")
RIGHT = ("size", "calls", "pages", "median", "95 % interval")


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
    samples = " to ".join(map(str, sorted({result.samples for result in results})))
    lines = (
        *_notes(contestants, results, settings),
        f"{'' if complete else 'interrupted: '}{len(results)} of {asked} cases, {samples} samples "
        f"each, {settings.warmup} warm-ups, seed {settings.seed}",
        "machine: " + ", ".join(fact for fact in machine.values() if fact),
    )
    body = {
        "complete": complete,
        "machine": machine,
        "settings": asdict(settings),
        "baseline": contestants[0].label,
        "cases": [_case_json(contestants, result) for result in results],
    }
    names = [one.target.name for one in contestants if one.strategy != SHIPPED]
    models = ["the built-in model" if name == "builtin" else name for name in dict.fromkeys(names)]
    header = (
        f"swaleak {__version__}: {contestants[0].label} against "
        f"{', '.join(one.label for one in contestants[1:])} "
        f"on {', '.join(models or [OWN_CODE])}, "
        f"{device}, torch {torch.__version__}"
    )
    sections = [_section(contestants, results, clock) for clock in results[0].timings]
    sections.append(Section("", None, lines))
    return Report("bench", complete, header, tuple(sections), body, str(torch.__version__), device)


def machine_facts(device: str) -> dict[str, str | None]:
    """Return what a reader of the figures needs to know about this machine."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if "model name" in line]
    except OSError:
        names = []
    cpu = names[0] if names else platform.processor() or platform.machine()
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    return {
        "cpu": f"{cpu} ({os.cpu_count()} cores)",
        "gpu": gpu and f"{gpu}, CUDA {torch.version.cuda}",
        "python": f"Python {platform.python_version()}",
        "system": f"{platform.system()} {platform.machine()}",
    }


def _section(contestants: Sequence[Contestant], results: Sequence[Result], clock: str) -> Section:
    rows = [row for result in results for row in _rows(contestants, result, clock)]
    columns = (*RIGHT[:3], *LEFT, *RIGHT[3:], "verdict")
    noise = f"{max(result.timings[clock][-1].noise for result in results):.1%}"
    line = f"noise: A/A, the baseline against itself, differs by at most {noise[:-1]} %"
    # a blank between cells is enough, and leaves room for the labels of wheels and checkouts
    grid = Grid(columns, tuple(rows), frozenset(RIGHT), gap=0)
    return Section(TITLES[clock], grid, (line,))


def _rows(
    contestants: Sequence[Contestant], result: Result, clock: str
) -> Iterator[tuple[Cell, ...]]:
    case, timings = result.case, result.timings[clock]
    sizes = [
        str(case.page_size),
        str(case.calls),
        str(case.pages),
        "yes" if case.recovery else "no",
    ]
    labels = [*(one.label for one in contestants), "A/A"]
    verdicts = [*result.verdicts, "clean"]
    for i, (label, timing, judged) in enumerate(zip(labels, timings, verdicts, strict=True)):
        interval = f"{_percent(timing.low)}..{_percent(timing.high)} %" if i else ""
        verdict = timing.verdict(timings[-1].noise) if i else "baseline"
        clean = judged == "clean"
        yield (
            *(Cell(text) for text in (sizes if i == 0 else [""] * len(sizes))),
            *(Cell(text) for text in (label, f"{timing.us:.1f}", interval)),
            Cell(verdict) if clean else Cell(f"{verdict}, {judged}", STYLES[judged]),
        )


def _percent(ratio: float) -> str:
    more = 100 * (ratio - 1)
    return f"{more:+z.1f}" if abs(more) < 99.95 else f"{more:+.0f}"


def _notes(
    contestants: Sequence[Contestant], results: Sequence[Result], settings: Settings
) -> Iterator[str]:
    call = "free_swa_segment" if settings.segment else "free_swa"
    yield (
        f"size: slots per page; calls: {call} calls per group; pages: per call; "
        f"recovery: whether the group ends with the recovery of a tombstone"
    )
    yield f"timed: one free group, {'with' if settings.whole else 'without'} the physical release"
    for i, one in enumerate(contestants):
        for recovery, where in ((False, "without"), (True, "with")):
            seen = {r.verdicts[i] for r in results if r.case.recovery is recovery} - {"clean"}
            if seen:
                fault = "loses" if "leak" in seen else "corrupts"
                yield (
                    f"INCORRECT: {one.label} {fault} pages in groups {where} a recovery; "
                    f"its timings there are not comparable"
                )
    origins = {one.label: one.target.origin(one.strategy) for one in contestants}
    shipped = [label for label, origin in origins.items() if origin in ("shipped", "patched")]
    grafted = [label for label, origin in origins.items() if origin == "grafted"]
    if shipped and grafted:
        yield (
            f"{', '.join(shipped)}: {OWN_CODE}; {', '.join(grafted)}: grafted on it, with "
            f"swaleak's own look-ups, which differ too"
        )


def _case_json(contestants: Sequence[Contestant], result: Result) -> dict[str, Any]:
    def entry(i: int) -> dict[str, Any]:
        found: dict[str, dict[str, Any]] = {
            clock: {**asdict(timings[i]), "verdict": timings[i].verdict(timings[-1].noise)}
            for clock, timings in result.timings.items()
        }
        times = {f"{clock}_us": found.get(clock, {}).pop("us", None) for clock in ("wall", "gpu")}
        return {**times, **found["wall"], "gpu": found.get("gpu")}

    return {
        **asdict(result.case),
        "samples": result.samples,
        "strategies": {
            one.label: {
                "target": one.target.name,
                "origin": one.target.origin(one.strategy),
                "audit": verdict,
                **entry(i),
            }
            for i, (one, verdict) in enumerate(zip(contestants, result.verdicts, strict=True))
        },
        "a_a": entry(len(contestants)),
        "noise": result.timings["wall"][-1].noise,
        "gpu_noise": result.timings["gpu"][-1].noise if "gpu" in result.timings else None,
    }
