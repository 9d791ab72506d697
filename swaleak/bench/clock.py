"""How long one piece of work takes, on the host and on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch


class Sample(NamedTuple):
    """The time of one group, in nanoseconds. ``gpu``: None where there is no GPU."""

    wall: int
    gpu: int | None = None


class Clock(Protocol):
    """Measures one piece of work."""

    def measure(self, work: Callable[[], None]) -> Sample:
        """Run ``work`` to its end, on the device too, and return what it took."""


class HostClock:
    """Wall time where everything runs on the CPU."""

    def measure(self, work: Callable[[], None]) -> Sample:
        """Run ``work`` between two looks at the clock."""
        start = time.perf_counter_ns()
        work()
        return Sample(time.perf_counter_ns() - start)


class CudaClock:
    """GPU time by two events on the current stream, wall time until the device is done.

    ``cuda``: ``torch.cuda``, or what stands in for it.
    """

    def __init__(self, device: str, cuda: Any = torch.cuda) -> None:
        self.device = device
        self.cuda = cuda
        with cuda.device(device):
            self.start = cuda.Event(enable_timing=True)
            self.end = cuda.Event(enable_timing=True)

    def measure(self, work: Callable[[], None]) -> Sample:
        """Run ``work`` between two events, on a device that was idle before."""
        self.cuda.synchronize(self.device)
        stream = self.cuda.current_stream(self.device)
        start = time.perf_counter_ns()
        self.start.record(stream)
        work()
        self.end.record(stream)
        self.cuda.synchronize(self.device)
        wall = time.perf_counter_ns() - start
        return Sample(wall, round(self.start.elapsed_time(self.end) * 1e6))  # from milliseconds


def clock_for(device: str) -> Clock:
    """Return the clock for a torch device."""
    return CudaClock(device) if device.startswith("cuda") else HostClock()
