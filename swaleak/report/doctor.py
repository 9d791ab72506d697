"""What this machine has, for a bug report or a first look."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version
from typing import Any

import torch

from swaleak import __version__
from swaleak.errors import Interrupted, SwaleakError
from swaleak.report.model import Grid, Report, Section, cells
from swaleak.scenario import catalogue
from swaleak.targets import sources
from swaleak.targets.open import choose_device, describe_device, open_target


def doctor_report() -> Report:
    """Return versions, devices and the installed SGLang; ``ok`` is False if that cannot be read."""
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
    section = Section("", Grid(("what", "here"), rows))
    body = {"results": [facts]}
    header = f"swaleak {__version__}"
    return Report("doctor", ok, header, (section,), body, str(torch.__version__), device)


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
