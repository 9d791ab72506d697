"""Candidates that are broken in ways nobody thought of: judged or left out, never passed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swaleak.allocator.hybrid import HybridAllocator
from swaleak.allocator.strategies import STRATEGIES, Enqueue
from swaleak.targets.driver import Driver, graft, shipped_strategy
from tests.conftest import USER_CLASS, Cli

HEAD = USER_CLASS.format(strategy="Enqueue")
FREE_SWA = HEAD + "    def free_swa(self, free_index):\n        {}\n"

# name -> module, exit code of check, what it says
CANDIDATES = {
    "well": (HEAD, 0, "14 runs, all clean."),
    "typo": (FREE_SWA.format("self.chek()"), 1, "AttributeError: 'Mine' object has no attribute"),
    "name": (FREE_SWA.format("no_such_name"), 1, "NameError: name 'no_such_name' is not defined"),
    "deep": (FREE_SWA.format("self.free_swa(free_index)"), 1, "RecursionError: "),
    "leaves": (FREE_SWA.format("raise SystemExit(0)"), 1, "SystemExit: 0"),
    "refuses": (FREE_SWA.format("raise ValueError('no')"), 1, "refused: ValueError: no"),
    "ungrouped": (
        HEAD + "    def free_group_begin(self):\n        raise RuntimeError('no groups')\n",
        1,
        "refused: RuntimeError: no groups",
    ),
    "stingy": (
        HEAD + "    def alloc(self, need_size):\n        return None\n",
        1,
        "step 1 error: WrongAllocation: alloc was given nothing, with 8 full and 8 SWA pages",
    ),
    "scant": (
        HEAD + "    def alloc(self, need_size):\n        return super().alloc(need_size)[:0]\n",
        1,
        "step 1 error: WrongAllocation: alloc was given 0 slots, not 1",
    ),
    "unwilling": (
        HEAD + "    def alloc(self, need_size):\n        raise ValueError('no')\n",
        1,
        "step 1 error: ValueError: no",
    ),
    "gone": ("raise SystemExit(0)", 125, "gone_:Mine: SystemExit: 0"),
    "unmade": (HEAD + "        raise SystemExit(3)\n", 125, "SystemExit: 3"),
    "blank": (
        HEAD + "        del self.full_to_swa_index_mapping\n",
        125,
        "its allocator cannot be made: AttributeError",
    ),
    "odd": (
        HEAD + "        self.full_to_swa_index_mapping = [0]\n",
        125,
        "its allocator cannot be made: ",
    ),
}

ROOT_OF_ALL = "class Raised(BaseException):\n    pass\n"
SEALED = "    def __init_subclass__(cls):\n        raise TypeError('sealed')\n"
FLAT = """        class Flat:
            __slots__ = ("size", "free_pages", "alloc", "free", "available_size")
        flat = Flat()
        for name in Flat.__slots__:
            setattr(flat, name, getattr(pool, name))
"""
UNREADABLE = """        class Unreadable(Exception):
            def __str__(self):
                raise ValueError
        raise Unreadable
"""
MAPPING = "        self.full_to_swa_index_mapping = self.full_to_swa_index_mapping{}\n"
POOL = "        pool = self.swa_attn_allocator\n"
# as above, for `verify`, which also grafts strategies on the class
OTHERS = {
    "derived": (HEAD, 0, "80 runs, all as declared."),
    "sealed": (HEAD + SEALED, 125, "eager cannot be grafted, it allows no subclass: "),
    "no_class": ("Mine = 3", 125, "no_class_:Mine: is no class"),
    "raises": (ROOT_OF_ALL + "raise Raised('why')", 125, "raises_:Mine: Raised: why"),
    "made": (ROOT_OF_ALL + HEAD + "        raise Raised", 125, "cannot be made: Raised"),
    "speechless": (HEAD + UNREADABLE, 125, "its allocator cannot be made: Unreadable"),
    "short": (HEAD + MAPPING.format("[:2]"), 125, "its mapping has 2 entries, for "),
    "real": (HEAD + MAPPING.format(".float()"), 125, "its mapping is no int64[n], but torch.float"),
    "square": (HEAD + MAPPING.format("[None]"), 125, "its mapping is no int64[n], but torch.int64"),
    "away": (HEAD + MAPPING.format(".to('meta')"), 125, "its mapping is on meta, not on cpu"),
    "pages": (
        HEAD + POOL + "        pool.free_pages = pool.free_pages[None]\n",
        125,
        "its free list is no int64[n], but torch.int64 of [1, ",
    ),
    "flat": (
        HEAD + POOL + FLAT + "        self.swa_attn_allocator = flat\n",
        125,
        "Flat keeps its state in slots, not in attributes",
    ),
    "rows": (
        HEAD + "    def alloc(self, n):\n        return [1] * n\n",
        1,
        "TypeError: an allocation returned list, not slots",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_verify(name: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, code, said = OTHERS[name]
    (tmp_path / f"{name}_.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    answer = cli("verify", "--on", f"{name}_:Mine", "--page-size", "1")
    words = " ".join((answer.out + answer.err).split())
    assert (answer.code, said in words, answer.err.count("\n")) == (code, True, int(code > 2)), (
        words
    )


def test_a_grafted_strategy_replaces_that_of_a_class_of_the_same_kind() -> None:
    class Mine(HybridAllocator):
        def __init__(self, size: int) -> None:
            super().__init__(size, size, 1, "cpu", Enqueue)

        def free_swa(self, free_index: object) -> None:
            raise AssertionError("what it frees by itself")

    shipped = {name: shipped_strategy(Driver(graft(Mine, s)(4))) for name, s in STRATEGIES.items()}
    assert shipped == {name: name for name in STRATEGIES}


@pytest.mark.parametrize("name", CANDIDATES)
def test_check(name: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, code, said = CANDIDATES[name]
    (tmp_path / f"{name}_.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    answer = cli("check", f"{name}_:Mine")
    words = " ".join((answer.out + answer.err).split())
    assert (answer.code, said in words, answer.err.count("\n")) == (code, True, int(code > 2))


RAISES = [
    ("typo", "AttributeError"),
    ("leaves", "SystemExit"),
    ("refuses", "ValueError: no"),
    ("ungrouped", "RuntimeError: no groups"),
    ("stingy", "WrongAllocation: alloc was given nothing"),
    ("scant", "WrongAllocation: alloc was given 0 slots"),
    ("unwilling", "ValueError: no"),
]


@pytest.mark.parametrize(("name", "raised"), RAISES)
@pytest.mark.parametrize("how", [("--depth", "4"), ("--random", "--steps", "20")])
def test_explore_finds_what_raises(
    name: str, raised: str, how: tuple[str, ...], cli: Cli, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / f"explored_{name}.py").write_text(CANDIDATES[name][0])
    monkeypatch.syspath_prepend(str(tmp_path))
    answer = cli("explore", "--on", f"explored_{name}:Mine", *how, "-f", "json")
    [result] = json.loads(answer.out)["results"]
    assert (answer.code, raised in json.dumps(result)) == (1, True)


TRACE = """\
{"schema": "swaleak-trace/1", "page_size": 1, "full_pages": 8, "swa_pages": 8}
{"op": "alloc", "full": 1, "swa": 1, "n": 1}
{"op": "begin"}
{"op": "free_swa", "full": [[1, 1]]}
{"op": "end", "physical": 0, "mapped": 0}
"""


@pytest.mark.parametrize("command", ["replay", "bench"])
def test_code_that_leaves_is_no_success(command: str, cli: Cli, tmp_path, monkeypatch) -> None:
    (tmp_path / "left_.py").write_text(CANDIDATES["leaves"][0])
    (tmp_path / "run.jsonl").write_text(TRACE)
    monkeypatch.syspath_prepend(str(tmp_path))
    calls = {
        "replay": ("replay", tmp_path / "run.jsonl", "--on", "left_:Mine", "-s", "shipped"),
        "bench": ("bench", "--candidate", "left_:Mine", "--samples", 20),
    }
    answer = cli(*calls[command])
    words = " ".join((answer.out + answer.err).split())
    code, said = {
        "replay": (1, "line 4: the allocator raised SystemExit: 0"),
        "bench": (2, "left_:Mine cannot be measured"),
    }[command]
    assert (answer.code, said in words) == (code, True), words


CHATTY = (
    "print('loaded')\n"
    + HEAD
    + "        print('made')\n"
    + "    def free_group_end(self):\n        super().free_group_end()\n        print('ended')\n"
)


@pytest.mark.parametrize(
    "call",
    [
        "repro --on {} -s shipped",
        "check {}",
        "explore --on {} --depth 3",
        "bench --candidate {} --samples 20 --calls 1 --page-size 1",
        "replay run.jsonl --on {} -s shipped",
    ],
)
def test_what_a_target_prints_is_no_part_of_the_report(
    call: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"chatty_{call.split()[0]}"
    (tmp_path / f"{module}.py").write_text(CHATTY)
    (tmp_path / "run.jsonl").write_text(TRACE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    answer = cli(*call.format(f"{module}:Mine").split(), "-f", "json")
    assert json.loads(answer.out)["command"] == call.split()[0]
    assert {"loaded", "made", "ended"} == set(answer.err.split())


@pytest.mark.parametrize("command", ["check sizes_:Mine", "verify", "repro"])
@pytest.mark.parametrize("size", ["0", "-5", "4097"])
def test_a_page_size_that_nothing_has(command: str, size: str, cli: Cli, tmp_path, monkeypatch):
    (tmp_path / "sizes_.py").write_text(HEAD)
    monkeypatch.syspath_prepend(str(tmp_path))
    answer = cli(*command.split(), "--page-size", 4, "--page-size", size)
    said = f"swaleak: page size {size}: must be from 1 to 4096\n"
    assert (answer.code, answer.out, answer.err) == (2, "", said)


LONG = "a" * 300


@pytest.mark.parametrize(
    "call",
    [
        f"repro --on {LONG}",
        f"repro --on ./{LONG}",
        f"repro -o {LONG}/x.json",
        f"repro -o {LONG}.json",
        f"explore --on builtin --save {LONG}/x.toml",
        f"export steady-group --unittest -o {LONG}.py",
        "repro -o folder.json",
        "explore --on builtin --save folder.toml",
        "bench -o x.xml",
        "export tree/recovery --unittest",
        "repro --repeat 1000001",
        "bench --samples 1000001",
    ],
)
def test_one_line_before_any_work(call: str, cli: Cli, tmp_path: Path, monkeypatch) -> None:
    for name in ("folder.json", "folder.toml"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    answer = cli(*call.split())
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1)


def test_an_output_that_is_closed_or_full(tmp_path: Path) -> None:
    command = f"{sys.executable} -m swaleak list"
    for redirect, code in ((">&-", 0), (">/dev/full", 2)):
        if "full" in redirect and not Path("/dev/full").exists():
            continue
        done = subprocess.run(
            ["bash", "-c", f"{command} {redirect}"], capture_output=True, text=True
        )
        assert (done.returncode, done.stderr.count("\n")) == (code, int(code > 0)), done.stderr
