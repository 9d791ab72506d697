"""The same verdicts on a GPU, with the release's own Triton kernels: ``pytest -m cuda``."""

from __future__ import annotations

import pytest
import torch

from swaleak.checker.case import run_case
from swaleak.checker.compare import compare
from swaleak.checker.shadow import Shadow
from swaleak.scenario import catalogue as scenarios
from swaleak.targets.driver import Sizes
from swaleak.targets.open import Builtin, open_target
from swaleak.targets.sources import RELEASES
from tests.conftest import Cli, wheel
from tests.test_loader import grow

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]

ALLOCATOR_SCENARIOS = [s for s in scenarios.catalogue() if not s.caches]


@pytest.mark.parametrize("strategy", ["eager", "deferred", "enqueue", "barrier"])
def test_the_model_on_a_gpu_is_the_model_on_a_cpu(strategy: str) -> None:
    for scenario in ALLOCATOR_SCENARIOS:
        for size in scenario.page_sizes:
            gpu, cpu = (
                run_case(scenario, Builtin(device), strategy, size, keep_steps=True).run
                for device in ("cuda", "cpu")
            )
            assert (gpu.verdict, gpu.comparison, gpu.steps) == (
                cpu.verdict,
                cpu.comparison,
                cpu.steps,
            )


@pytest.mark.wheels
@pytest.mark.parametrize("version", RELEASES)
def test_every_release_on_a_gpu(version: str) -> None:
    target = open_target(str(wheel(version)), "cuda")
    wrong = [
        (scenario.name, strategy, size, case.run)
        for scenario in ALLOCATOR_SCENARIOS
        for strategy in target.strategies()
        for size in scenario.page_sizes
        if not (case := run_case(scenario, target, strategy, size)).as_declared
    ]
    assert wrong == []


@pytest.mark.wheels
@pytest.mark.parametrize("version", ["0.5.13.post1", "0.5.18", "0.5.23"])
def test_the_release_s_own_kernels_extend_as_the_stand_in_does(version: str) -> None:
    sizes = Sizes(40, 40, 16)
    gpu = open_target(str(wheel(version)), "cuda").make("shipped", sizes)
    assert grow(gpu, 0) == grow(Builtin("cpu").make("eager", sizes), 0)


def test_three_copies_to_the_host_per_comparison() -> None:
    """The mapping and the two free lists come to the host once each."""
    driver, shadow = Builtin("cuda").make("barrier", Sizes(4096, 4096, 16)), Shadow(4096, 4096, 16)
    compare(driver.state(), shadow)  # kernels are loaded
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        compare(driver.state(), shadow)
    copies = [event for event in profile.events() if "Memcpy DtoH" in event.name]
    assert len(copies) == 3


def test_the_command_says_which_gpu(cli: Cli) -> None:
    answer = cli("repro", "--device", "cuda:0", "--page-size", "256", "--on", "builtin")
    assert (answer.code, torch.cuda.get_device_name(0) in answer.out) == (0, True)
