"""What this machine has, for a bug report or a first look."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version
from typing import Any

import torch

from swaleak import __version__
from swaleak.checker.case import run_case
from swaleak.errors import Interrupted, SwaleakError
from swaleak.report.model import Grid, Report, Section, cells
from swaleak.scenario import catalogue
from swaleak.targets import sources
from swaleak.targets.open import (
    SHIPPED,
    ClassTarget,
    Target,
    choose_device,
    describe_device,
    open_target,
)


def doctor_report(on: str) -> Report:
    """Return versions, devices, the installed SGLang, and what stands in for the rest of a target.

    ``on``: the target's name. ``ok`` is False if the installed SGLang cannot be read.
    """
    device = choose_device("auto")
    every = catalogue.catalogue()
    caches = sum(bool(scenario.caches) for scenario in every)
    facts: dict[str, Any] = {
        "swaleak": __version__,
        "python": f"{sys.version.split()[0]} on {platform.system()} {platform.machine()}",
        "torch": str(torch.__version__),
        "typer": version("typer"),
        "rich": version("rich"),
        "devices": ["cpu", *_cuda_devices()],
        "default device": device,
        "scenarios": f"{len(every)} in {catalogue.folder()} "
        f"({len(every) - caches} of an allocator, {caches} of the caches)",
    }
    kept = sources.kept_releases()
    facts["cache"] = f"{', '.join(kept) or 'no releases'} in {sources.cache_folder()}"
    ok = True
    try:
        facts["sglang"] = _installed(device)
    except Interrupted:
        raise
    except SwaleakError as error:
        ok, facts["sglang"] = False, str(error)
    rows = tuple(cells(k, ", ".join(v) if isinstance(v, list) else v) for k, v in facts.items())
    sections = [Section("", Grid(("what", "here"), rows))]
    if ok and (on != "auto" or sources.is_installed()):
        target = open_target(on, device)
        facts["stand_ins"] = names = _stand_ins(target)
        title = f"Names of SGLang that swaleak provides itself when {target.name} runs"
        sections.append(Section(title, lines=tuple(names or ["none"])))
    body = {"results": [facts]}
    header = f"swaleak {__version__}"
    return Report("doctor", ok, header, tuple(sections), body, str(torch.__version__), device)


def _stand_ins(target: Target) -> list[str]:
    """Run the scenarios of its caches, and return what swaleak has provided for them."""
    if isinstance(target, ClassTarget) and target.modules:
        for scenario in catalogue.catalogue():
            for cache in scenario.caches:
                if cache not in target.caches.left_out:
                    run_case(scenario, target, SHIPPED, 4, cache=cache)
    return list(target.stand_ins)


def _cuda_devices() -> list[str]:
    if not torch.cuda.is_available():
        return []
    count = torch.cuda.device_count()
    return [describe_device(f"cuda:{i}") for i in range(count)]


def _installed(device: str) -> str:
    if not sources.is_installed():
        return "not installed (not needed: --on takes a wheel or a checkout)"
    target = open_target("installed", device)
    return f"{target.name} in {sources.from_installed().place}, ships {target.ships}"
