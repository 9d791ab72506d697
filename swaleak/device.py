"""The device that allocators live on."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from swaleak.errors import UsageError, unknown


def choose_device(name: str) -> str:
    """Return the torch device for ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises ``UsageError`` for a device that is not there.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and (kind == "cpu" or not index.isdecimal())):
        raise UsageError(unknown("device", name, ("auto", "cpu", "cuda", "cuda:0")))
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise UsageError(f"--device {name}: torch {torch.__version__} sees no CUDA device here")
        if index and int(index) >= count:
            raise UsageError(
                f"--device {name}: there are {count} CUDA devices, cuda:0 is the first"
            )
    return name


def free_memory(device: str) -> int | None:
    """Return free bytes on a device, None where nobody says."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")
        )
    except (OSError, StopIteration, ValueError):
        return None
    limits = [
        Path("/sys/fs/cgroup/memory.max"),
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    ]
    for limit in limits:  # a container may have less than the machine
        with contextlib.suppress(OSError, ValueError):
            free = min(free, int(limit.read_text()))
    return free


def describe(device: str) -> str:
    """Return ``cuda:0 (NVIDIA H200)``, or the bare name of a CPU."""
    if device.startswith("cuda"):
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return device
