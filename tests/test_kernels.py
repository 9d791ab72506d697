"""The release's own Triton kernels, interpreted on the CPU, beside the stand-ins in torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT, wheel

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.wheels,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

COMPARE = """
import sys
import torch
from pathlib import Path
from swaleak.targets import shims, sources
from swaleak.targets.driver import Driver, Sizes
from swaleak.targets.loader import ModuleLoader
from swaleak.targets.open import Builtin
from tests.test_loader import grow

modules = ModuleLoader(sources.from_wheel(Path(sys.argv[1])), "cpu")
modules.triton = True
class_ = modules.allocator_class
files = {getattr(m, "__file__", ""): m for m in modules.modules.values()}
[kernels] = [m for file, m in files.items() if file.endswith(sources.KERNELS)]
assert "Interpreted" in type(kernels.alloc_extend_kernel).__name__
for size in (4, 16):
    for seed in range(3):
        slots = 40 * size
        real = Driver(class_(slots, slots, page_size=size, dtype=torch.bfloat16, device="cpu",
                             kvcache=shims.BaseSWAKVPool(), need_sort=False))
        assert grow(real, seed) == grow(Builtin("cpu").make("eager", Sizes(40, 40, size)), seed)
if hasattr(kernels, "get_and_clear_swa_pages"):
    one = torch.arange(100, 200)
    one[20:24] = 0
    other, pages = one.clone(), torch.tensor([4, 20, 40])
    theirs = kernels.get_and_clear_swa_pages(pages, one, 4)
    ours = shims.get_and_clear_swa_pages(pages, other, 4)
    assert [a.tolist() for a in theirs[:2]] == [b.tolist() for b in ours[:2]]
    assert torch.equal(one, other)
print("same")
"""


@pytest.mark.parametrize("version", ["0.5.13.post1", "0.5.18", "0.5.21", "0.5.23"])
def test_the_stand_ins_do_what_the_kernels_do(version: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPARE, str(wheel(version))],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert (done.returncode, done.stdout) == (0, "same\n"), done.stderr
