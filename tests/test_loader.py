"""SGLang's own allocator, loaded alone: nothing else runs, nothing else changes."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swaleak.allocator.hybrid import HybridAllocator
from swaleak.allocator.pool import new_pages
from swaleak.allocator.strategy import Eager
from swaleak.check.case import run_case
from swaleak.errors import TargetError
from swaleak.script import catalogue as scenarios
from swaleak.targets import source
from swaleak.sglang.adapter import Driver
from swaleak.targets.loader import load
from swaleak.targets.sources import RELEASES
from swaleak.targets.open import Sizes, open_target
from tests.conftest import USER_CLASS, sglang, wheel


@pytest.mark.wheels
def test_sys_modules_is_left_alone_and_two_releases_live_side_by_side() -> None:
    before = dict(sys.modules)
    old, new = (load(source.from_wheel(wheel(v)), "cpu") for v in ("0.5.18", "0.5.19"))
    assert not [name for name in sys.modules if name.split(".")[0] == "sglang"]
    assert {k: v for k, v in sys.modules.items() if k in before} == before
    assert (hasattr(old, "free_full"), hasattr(new, "free_full")) == (False, True)


def unpack(version: str, into: Path, below: str) -> Path:
    """Unpack the allocator sources of a wheel the way a checkout has them."""
    with zipfile.ZipFile(wheel(version)) as archive:
        for name in archive.namelist():
            if name.startswith(source.ALLOCATOR) and name.endswith(".py"):
                file = into / below / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(archive.read(name))
    return into


@pytest.mark.wheels
@pytest.mark.parametrize("below", ["python", "."])
def test_a_checkout_has_either_root(below: str, tmp_path: Path) -> None:
    target = open_target(str(unpack("0.5.18", tmp_path, below)), "cpu")
    assert (target.name, target.version, target.ships) == (
        f"sglang at {tmp_path}",
        None,
        "deferred",
    )


@pytest.mark.wheels
def test_a_hostile_wheel_runs_nothing_but_the_allocator(tmp_path: Path) -> None:
    hostile, mark = tmp_path / "sglang-0.5.18-py3-none-any.whl", tmp_path / "ran"
    bomb = f"open({str(mark)!r}, 'w').close()\n"
    with zipfile.ZipFile(wheel("0.5.18")) as real, zipfile.ZipFile(hostile, "w") as wheel_:
        for name in real.namelist():
            if name.startswith(source.ALLOCATOR):
                wheel_.writestr(name, real.read(name))
        names = ["sglang/__init__.py", "sglang/srt/__init__.py", "sglang/srt/mem_cache/__init__.py"]
        names += ["sglang/srt/utils/__init__.py", "sglang/version.py", "setup.py", "evil.pth"]
        for name in [*names, "../escaped.py", "/absolute.py", f"{source.ALLOCATOR}/../up.py"]:
            wheel_.writestr(name, bomb)
    before = {path for path in tmp_path.parent.rglob("*") if path != mark}
    target = open_target(str(hostile), "cpu")
    target.make("barrier", Sizes(4, 4, 1))
    assert (target.ships, mark.exists()) == ("deferred", False)
    assert set(tmp_path.parent.rglob("*")) == before


def test_a_name_that_is_missing_is_said(tmp_path: Path) -> None:
    folder = tmp_path / source.ALLOCATOR
    folder.mkdir(parents=True)
    said = {}
    for text in (
        "from sglang.srt.utils import is_npu, is_moon",
        "from sglang.srt.nowhere import thing",
        "import sglang.srt.utils",
        "import not_installed_here",
        "raise ValueError('two\\nlines')",
        "x = 1",
    ):
        (folder / "swa.py").write_text(text)
        with pytest.raises(TargetError) as caught:
            load(source.from_folder(tmp_path), "cpu")
        said[text] = str(caught.value).removeprefix(f"sglang at {tmp_path}: ")
    needs = "its allocator needs {}which swaleak does not provide"
    where = f"{source.ALLOCATOR}/swa.py"
    assert list(said.values()) == [
        needs.format("sglang.srt.utils.is_moon "),
        needs.format("sglang.srt.nowhere "),
        needs.format("sglang.srt.utils, imported whole, "),
        f"{where} cannot be loaded: ModuleNotFoundError: No module named 'not_installed_here'",
        f"{where} cannot be loaded: ValueError: two lines",
        f"{where} has no class SWATokenToKVPoolAllocator",
    ]


def grow(driver: Driver, seed: int) -> list[list[int]]:
    """Extend and decode a batch of two requests, then one with an SWA tail; slots of each call."""
    made = []
    random = torch.Generator().manual_seed(seed)
    prefix, last = torch.zeros(2, dtype=torch.int64), torch.full((2,), -1)
    allocator, size = driver.allocator, driver.page_size
    for _ in range(4):
        seq = prefix + torch.randint(1, 2 * size + 2, (2,), generator=random)
        total = int((seq - prefix).sum())
        slots = allocator.alloc_extend(prefix, prefix, seq, seq, last, total)
        ends = (seq - prefix).cumsum(0) - 1
        decoded = allocator.alloc_decode(seq + 1, seq + 1, slots[ends])
        made += [slots.tolist(), decoded.tolist()]
        prefix, last = seq + 1, decoded
    none, tail = torch.tensor([0]), torch.tensor([3 * size])
    tailed = allocator.alloc_extend_swa_tail(
        none, none, tail, tail, torch.tensor([-1]), 3 * size, size + 1
    )
    return [*made, tailed.tolist(), allocator.full_to_swa_index_mapping.tolist()]


@pytest.mark.wheels
@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("page_size", [4, 256])
def test_extend_decode_and_tail_on_every_release(version: str, page_size: int) -> None:
    """The stand-in for the Triton kernels hands out what the built-in model hands out."""
    sizes = Sizes(40, 40, page_size)
    model = Driver(HybridAllocator(40 * page_size, 40 * page_size, page_size, "cpu", Eager))
    for seed in range(5):
        real = grow(sglang(version).make("shipped", sizes), seed)
        assert real == grow(model, seed)
        model.allocator.clear()


@given(st.data())
@settings(deadline=None)
def test_extended_slots_go_on_in_the_page_and_fill_new_ones(data: st.DataObject) -> None:
    """Token i of a request lies at i % page_size, in a page of that request only."""
    size = data.draw(st.sampled_from([1, 4, 16]))
    bs = data.draw(st.integers(1, 4))
    lens = st.lists(st.integers(0, 40), min_size=bs, max_size=bs)
    prefix = torch.tensor(data.draw(lens))
    seq = prefix + torch.tensor(data.draw(lens))
    allocator = HybridAllocator(1000, 1000, size, "cpu", Eager)
    zero, last = torch.zeros_like(prefix), torch.full_like(prefix, -1)
    head = allocator.alloc_extend(zero, zero, prefix, prefix, last, int(prefix.sum()))
    assert head is not None
    starts = prefix.cumsum(0)
    last = torch.where(prefix > 0, head[(starts - 1).clamp(min=0)] if len(head) else last, last)
    rest = allocator.alloc_extend(prefix, prefix, seq, seq, last, int((seq - prefix).sum()))
    assert rest is not None
    pages: dict[int, set[int]] = {}
    for i in range(bs):
        row = [*head.split(prefix.tolist())[i], *rest.split((seq - prefix).tolist())[i]]
        slots = [int(slot) for slot in row]
        assert [slot % size for slot in slots] == [t % size for t in range(len(slots))]
        assert len(set(slots)) == len(slots) == int(seq[i])
        pages[i] = {slot // size for slot in slots}
        assert len(pages[i]) == new_pages(torch.tensor([0]), seq[i : i + 1], size)
    assert sum(map(len, pages.values())) == len(set().union(*pages.values()))


@pytest.mark.parametrize(("strategy", "verdict"), [("Deferred", "leak"), ("Barrier", "clean")])
def test_a_class_of_the_users(strategy: str, verdict: str, tmp_path: Path, monkeypatch) -> None:
    module = f"my_{strategy.lower()}"
    (tmp_path / f"{module}.py").write_text(USER_CLASS.format(strategy=strategy))
    monkeypatch.chdir(tmp_path)
    target = open_target(f"{module}:Mine", "cpu")
    case = run_case(scenarios.load("tombstone-recovery"), target, "shipped", 4)
    assert (target.ships, case.verdict, case.origin) == (strategy.lower(), verdict, "shipped")


def test_a_folder_called_sglang_is_no_installed_one(tmp_path: Path, monkeypatch) -> None:
    there = source.is_installed()
    (tmp_path / "sglang" / "python").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert source.is_installed() == there
