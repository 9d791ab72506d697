"""SGLang's own allocator, loaded alone: nothing else runs, nothing else changes."""

from __future__ import annotations

import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swaleak.allocator.hybrid import HybridAllocator
from swaleak.allocator.page_pool import new_pages
from swaleak.allocator.strategies import Eager
from swaleak.checker.case import run_case
from swaleak.errors import StandInError, TargetError
from swaleak.scenario import catalogue as scenarios
from swaleak.targets import sources
from swaleak.targets.driver import Driver, Sizes
from swaleak.targets.loader import ModuleLoader
from swaleak.targets.open import open_target
from swaleak.targets.sources import ALLOCATOR, RELEASES
from tests.conftest import USER_CLASS, sglang, unpack, wheel


def class_of(tree: sources.SourceTree) -> type:
    return ModuleLoader(tree, "cpu").allocator_class


@pytest.mark.wheels
def test_sys_modules_is_left_alone_and_two_releases_live_side_by_side() -> None:
    before = dict(sys.modules)
    old, new = (class_of(sources.from_wheel(wheel(v))) for v in ("0.5.18", "0.5.19"))
    assert not [name for name in sys.modules if name.split(".")[0] == "sglang"]
    assert {k: v for k, v in sys.modules.items() if k in before} == before
    assert (hasattr(old, "free_full"), hasattr(new, "free_full")) == (False, True)


@pytest.mark.wheels
@pytest.mark.parametrize("below", ["python", "."])
def test_a_checkout_has_either_root(below: str, tmp_path: Path) -> None:
    target = open_target(str(unpack("0.5.18", tmp_path, below)), "cpu")
    assert (target.version, target.ships) == ("0.5.18", "deferred")


@pytest.mark.wheels
def test_a_hostile_tree_runs_nothing_but_allocator_and_caches(tmp_path: Path) -> None:
    """Not its packages, not its helpers as a whole, no storage, no `.pth`, no build script."""
    hostile, mark = tmp_path / "sglang-0.5.18-py3-none-any.whl", tmp_path / "ran"
    bomb = f"open({str(mark)!r}, 'w').close()\n"
    with zipfile.ZipFile(wheel("0.5.18")) as real, zipfile.ZipFile(hostile, "w") as wheel_:
        names = ["setup.py", "evil.pth", "../escaped.py", "/absolute.py", f"{ALLOCATOR}/../up.py"]
        for name in [*names, *(n for n in real.namelist() if n.endswith(".py"))]:
            text = b"" if name in names else real.read(name)
            runs = sources.is_read(name) and not name.startswith("sglang/srt/utils/")
            wheel_.writestr(name, text if runs else bomb.encode() + text)
        for name in ("storage/a", "rust_tree_core/b", "__init__", "../__init__", "../../__init__"):
            wheel_.writestr(f"sglang/srt/mem_cache/{name}.py", bomb)
    before = {path for path in tmp_path.parent.rglob("*") if path != mark}
    target = open_target(str(hostile), "cpu")
    target.make("barrier", Sizes(4, 4, 1))
    for cache in ("swa", "unified"):
        target.caches.make(cache, "barrier", Sizes(4, 4, 1), 1)
    assert (target.ships, mark.exists()) == ("deferred", False)
    assert set(tmp_path.parent.rglob("*")) == before


NEEDS = {  # the text of swa.py -> why it cannot be loaded
    "from sglang.srt.utils import is_npu, is_moon": (
        "ImportError: cannot import name 'is_moon' from 'sglang.srt.utils' (unknown location)"
    ),
    "from sglang.srt.nowhere import a": "ModuleNotFoundError: No module named 'sglang.srt.nowhere'",
    "from sglang.srt.utils import *": (
        "ImportError: from sglang.srt.utils import *, which swaleak does not run"
    ),
    "import not_installed_here": "ModuleNotFoundError: No module named 'not_installed_here'",
    "raise ValueError('two\\nlines')": "ValueError: two lines",
    "from sglang.srt.other import f\n@f\ndef g(): ...": (
        "it uses sglang.srt.other.f, which swaleak does not provide"
    ),
    "from sglang.srt.other import C\nclass D(C): ...": (
        "it uses sglang.srt.other.C, which swaleak does not provide"
    ),
}


def tree_of(folder: Path, text: str) -> sources.SourceTree:
    """Return a tree with this allocator, some helpers, and a module that nobody runs."""
    files = {
        f"{ALLOCATOR}/swa.py": text,
        "sglang/__init__.py": "raise SystemError('ran')\n",
        "sglang/srt/utils/__init__.py": "from sglang.srt.utils.common import *\n",
        "sglang/srt/utils/common.py": HELPERS,
        "sglang/srt/other.py": "raise SystemError('ran')\n",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return sources.from_folder(folder)


HELPERS = """
import functools
import a_library_that_is_not_there
raise SystemError("ran")

LIMIT: int = 2 * 21

def double(x: "Unknown") -> int:
    return 2 * x

@functools.lru_cache
def ceil_halves(x):
    return min(LIMIT, double(-(-x // 4)))

def far():
    return a_library_that_is_not_there.answer()
"""


@pytest.mark.parametrize("text", NEEDS)
def test_what_is_missing_is_said(text: str, tmp_path: Path) -> None:
    with pytest.raises(TargetError) as caught:
        class_of(tree_of(tmp_path, text))
    where = f"sglang at {tmp_path}: {ALLOCATOR}/swa.py"
    assert str(caught.value) == f"{where} cannot be loaded: {NEEDS[text]}"


def test_no_class_and_no_syntax(tmp_path: Path) -> None:
    said = []
    for text in ("x = 1", "x = 1\ndef"):
        with pytest.raises(TargetError) as caught:
            class_of(tree_of(tmp_path, text))
        said.append(str(caught.value).removeprefix(f"sglang at {tmp_path}: {ALLOCATOR}/swa.py"))
    assert said == [" has no class SWATokenToKVPoolAllocator", ":2: invalid syntax"]


def namespace(folder: Path, text: str) -> dict:
    return vars(
        ModuleLoader(tree_of(folder, text), "cpu").module(f"{ALLOCATOR.replace('/', '.')}.swa")
    )


def test_one_definition_of_a_helper_runs_without_its_file(tmp_path: Path) -> None:
    text = "from sglang.srt.utils import ceil_halves, far\nimport sglang.srt.utils.common as c"
    found = namespace(tmp_path, text)
    assert [found["ceil_halves"](n) for n in (1, 9, 1000)] == [2, 6, 42]
    assert found["c"].ceil_halves is found["ceil_halves"]
    with pytest.raises(StandInError, match=r"common\.a_library_that_is_not_there"):
        found["far"]()


def test_a_patched_helper_takes_the_place_of_a_shim(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, "from sglang.srt.utils import next_power_of_2 as f")
    mine = tree.files | {"sglang/srt/utils/common.py": "def next_power_of_2(n): return 'mine'"}
    swa = f"{ALLOCATOR.replace('/', '.')}.swa"
    patched = replace(tree, files=mine, patched=frozenset({"sglang/srt/utils/common.py"}))
    found = [ModuleLoader(one, "cpu").module(swa).f(5) for one in (tree, patched)]
    assert found == [8, "mine"]


USES = {
    "called": lambda x: x(),
    "an attribute called": lambda x: x.y.z(1),
    "iterated": list,
    "compared": lambda x: x == 1,
    "ordered": lambda x: x < 1,
    "asked whether it is true": bool,
    "asked for its length": len,
    "subclassed": lambda x: type("C", (x,), {}) if isinstance(x, type) else _subclass(x),
    "added to": lambda x: 1 + x,
    "an index": lambda x: [1, 2][x],
    "written to": lambda x: x.__setitem__(0, 1),
}


def _subclass(base: object) -> object:
    class Sub(base):  # type: ignore[misc, valid-type]
        pass

    return Sub


@pytest.mark.parametrize("use", USES)
def test_a_placeholder_that_is_used_names_itself(use: str, tmp_path: Path) -> None:
    thing = namespace(tmp_path, "from sglang.srt.other import thing")["thing"]
    with pytest.raises(StandInError, match=r"^it uses sglang\.srt\.other\.thing"):
        USES[use](thing)


def test_a_placeholder_may_be_held_named_and_asked_for_instances(tmp_path: Path) -> None:
    text = """
from typing import Optional, Union
from dataclasses import dataclass
from sglang.srt.other import A, B, C
@dataclass
class D:
    a: A = A.DEFAULT
    b: "A | None" = None
kinds = {A.ONE: 1, A.TWO: 2}[A.TWO]
def f(x: Optional[A], y: A | None, z: Union[B, int], u: dict[C, A]) -> A: ...
answers = isinstance(1, B), isinstance(1, (B, int)), issubclass(int, C)
"""
    loader = ModuleLoader(tree_of(tmp_path, text), "cpu")
    found = vars(loader.module(f"{ALLOCATOR.replace('/', '.')}.swa"))
    assert (found["kinds"], found["answers"]) == (2, (False, True, False))
    assert loader.touched == {f"sglang.srt.other.{name}" for name in "ABC"}
    assert loader.stand_ins == {f"sglang.srt.other.{name}": "placeholder" for name in "ABC"}


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
    there = sources.is_installed()
    (tmp_path / "sglang" / "python").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert sources.is_installed() == there
