"""Faults of the machine: full disks, read-only folders, no memory, and killed processes."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.sizes import SIZES, measure
from swaleak.allocator.hybrid import HybridAllocator
from swaleak.allocator.strategies import STRATEGIES
from swaleak.checker import case
from swaleak.checker.run import Execution
from swaleak.errors import ScriptError, TargetError
from swaleak.files import STALE_SECONDS, write_text
from swaleak.live import plugin
from swaleak.live.instrument import EVERY_CALL, POOL_CALLS
from swaleak.report.catalogue import list_report, show_report
from swaleak.report.render import FORMATS, write
from swaleak.scenario import catalogue as scenarios
from swaleak.targets import open as targets
from swaleak.targets import sources
from swaleak.targets.driver import Driver
from swaleak.targets.open import Builtin
from swaleak.targets.sources import from_release
from swaleak.trace.format import TraceReader
from swaleak.trace.replay import run_trace
from swaleak.trace.to_scenario import sizes_of
from tests.conftest import ROOT, Cli, wheel

KILLS = 50
LEAK = scenarios.load("tombstone-recovery")
SIZE = 512 * 2**10  # bytes of a small disk
MAIN = "import sys; from swaleak.cli import main; sys.argv = ['swaleak', *sys.argv[1:]]; main()"


# --- disks ----------------------------------------------------------------------------------------


def mounted(folder: Path) -> Iterator[Path]:
    """A small disk of its own; skips where this user may not mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user may not mount a tmpfs here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "disk")


def fill(folder: Path, leave: int = 0) -> None:
    """Leave ``leave`` bytes, in whole blocks, of a disk."""
    with (folder / "rest").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)) == 4096:
                pass
        except OSError:
            file.truncate(max(0, file.tell() - leave))


WRITERS: dict[str, tuple[str, ...]] = {
    **{f"report{suffix}": ("repro", "--on", "builtin", "-o") for suffix in FORMATS},
    "saved.toml": (
        *("explore", "--on", "builtin", "-s", "deferred", "--nodes", "3", "--depth", "6"),
        "--save",
    ),
    "test_it.py": ("export", "tombstone-recovery", "--unittest", "-o"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_takes_no_report_and_keeps_the_old_one(name: str, cli: Cli, disk: Path) -> None:
    file = disk / name
    file.write_text("an older one")
    fill(disk)
    answer = cli(*WRITERS[name], file)
    assert (answer.code, answer.err, file.read_text(), sorted(os.listdir(disk))) == (
        2,
        f"swaleak: {file}: cannot be written: No space left on device\n",
        "an older one",
        sorted([name, "rest"]),
    )


def limited(limits: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run ``swaleak ARGS`` in a process under a limit, such as ``RLIMIT_FSIZE, 1000``."""
    code = (
        f"import resource, torch; from resource import *; kind, most = {limits}; "
        f"setrlimit(kind, (most, most)); {MAIN}"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_a_report_over_the_limit_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    done = limited("RLIMIT_FSIZE, 1000", "list", "-o", file)
    assert (done.returncode, done.stderr, os.listdir(tmp_path)) == (
        2,
        f"swaleak: {file}: cannot be written: File too large\n",
        [],
    )


@pytest.mark.parametrize("format", ["table", "markdown", "json"])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_an_output_that_is_full(format: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", MAIN, "list", "-f", format],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
    assert (done.returncode, done.stderr) == (
        2,
        "swaleak: standard output: No space left on device\n",
    )


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel("0.5.18").parent))


@pytest.mark.wheels
def test_a_full_cache_keeps_nothing_and_says_so(
    disk: Path, shop: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWALEAK_CACHE", str(disk))
    fill(disk)
    with pytest.raises(TargetError) as raised:
        from_release("0.5.18")
    said = str(raised.value)
    assert (said.count("\n"), "No space left on device" in said, os.listdir(disk)) == (
        0,
        True,
        ["rest"],
    )


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder nobody can write to; root heeds no permissions, but a disk that is read-only."""
    if os.geteuid():
        folder = tmp_path / "folder"
        folder.mkdir(mode=0o555)
        yield folder
        return
    for folder in mounted(tmp_path / "folder"):
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        yield folder


@pytest.mark.wheels
def test_a_read_only_cache_is_done_without(
    read_only: Path, shop: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWALEAK_CACHE", str(read_only))
    assert (from_release("0.5.18").version, os.listdir(read_only)) == ("0.5.18", [])


def test_a_read_only_folder_takes_no_report(read_only: Path, cli: Cli) -> None:
    answer = cli("list", "-o", read_only / "report.json")
    assert (answer.code, answer.err.count("\n"), os.listdir(read_only)) == (2, 1, [])
    assert answer.err.endswith(f": the folder {read_only} cannot be written to\n")


LONG = "a" * 5000
TOO_LONG = [
    ("repro", "--on", LONG),
    ("repro", "--on", f"/{LONG}.whl"),
    ("repro", f"{LONG}.toml"),
    ("replay", LONG),
    ("diagnose", LONG),
    ("list", "-o", f"/{LONG}/x.json"),
    ("check", "builtin", "--patch", LONG),
]


@pytest.mark.parametrize("args", TOO_LONG, ids=lambda args: " ".join(args)[:20])
def test_a_path_too_long_for_the_system(args: tuple[str, ...], cli: Cli) -> None:
    answer = cli(*args)
    assert (answer.code, answer.err.count("\n"), answer.err[:9]) == (2, 1, "swaleak: ")


def test_a_cache_whose_path_is_too_long(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWALEAK_CACHE", f"/{LONG}")
    answer = cli("check", "0.5.18")
    assert (answer.code, answer.err.count("\n"), answer.err[:9]) == (2, 1, "swaleak: ")


# --- a recorder on a disk that fills up -----------------------------------------------------------


def play_recorded(file: Path, rounds: int) -> list[bool]:
    """Play the leak on a recorded allocator, again and again; whether it then still allocates."""
    class_ = plugin.watched_by(HybridAllocator, plugin.Settings(record=str(file)), None)
    allocator = class_(64, 64, 4, "cpu", STRATEGIES["deferred"])
    gave = []
    for _ in range(rounds):
        execution = Execution(Driver(allocator))
        for step in LEAK.steps:
            execution.step(step)
        gave.append(execution.driver.alloc_pages(4) is not None)
        allocator.clear()
    return gave


def read_back(path: Path) -> int | None:
    """Groups of a trace that replay to what was recorded; None if it holds no complete line."""
    target = Builtin("cpu")
    try:
        followed = run_trace(
            TraceReader(path), lambda header: target.make("deferred", sizes_of(header))
        )
    except ScriptError as error:
        assert str(error).endswith("holds no complete line, nothing was recorded")
        return None
    assert (followed.differ, followed.raised, followed.exhausted) == (0, None, None)
    return followed.groups


@pytest.mark.parametrize("leave", [0, 4096])
def test_a_recorder_on_a_full_disk_never_raises(
    leave: int, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(disk, leave)
    gave = play_recorded(disk / "t.jsonl", 20)
    [trace] = disk.glob("t.*.jsonl")
    failed = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert (gave, failed, (read_back(trace) or 0) in range(20)) == (
        [True] * 20,
        ["swaleak: watching failed and has stopped; the server is not affected"],
        True,
    )
    assert (read_back(trace) is None) == (leave == 0)


def test_a_recorder_over_the_limit_of_a_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        gave = play_recorded(tmp_path / "t.jsonl", 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    [trace] = tmp_path.glob("t.*.jsonl")
    failed = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert (gave, failed, trace.stat().st_size) == (
        [True] * 20,
        ["swaleak: watching failed and has stopped; the server is not affected"],
        1000,
    )
    assert read_back(trace) in range(1, 20)


# --- kill -9 --------------------------------------------------------------------------------------


def killed(work: Callable[[Path], None], folder: Path, moment: float) -> None:
    """Run ``work`` in a fork of this process, and kill it after ``moment`` seconds."""
    process = multiprocessing.get_context("fork").Process(target=work, args=(folder,))
    process.start()
    process.join(moment)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def record_for_ever(folder: Path) -> None:
    play_recorded(folder / "t.jsonl", 10**9)


def test_recordings_that_are_killed_read_back(tmp_path: Path) -> None:
    pick = random.Random("recordings")
    groups = []
    for number in range(KILLS):
        folder = tmp_path / str(number)
        folder.mkdir()
        killed(record_for_ever, folder, pick.uniform(0, 0.1))
        groups += [read_back(trace) for trace in folder.iterdir()]
    assert len(groups) <= KILLS and sum(filter(None, groups)) > KILLS


REPORTS = (list_report(scenarios.catalogue()), show_report(LEAK))


def report_for_ever(folder: Path) -> None:
    while True:
        for report in REPORTS:
            write(report, folder / "report.svg")


def test_reports_that_are_killed_are_whole_or_absent(tmp_path: Path) -> None:
    file, pick = tmp_path / "report.svg", random.Random("reports")
    whole = {FORMATS[".svg"](report) for report in REPORTS}
    seen, half = [], 0
    for _ in range(KILLS):
        file.unlink(missing_ok=True)
        killed(report_for_ever, tmp_path, pick.uniform(0, 0.15))
        seen += [file.read_text() in whole] if file.exists() else []
        half = sum(path != file for path in tmp_path.iterdir())
    assert (all(seen), len(seen) > KILLS // 3, half <= KILLS) == (True, True, True)


def test_what_killed_runs_left_beside_a_report_is_swept_after_a_day(tmp_path: Path) -> None:
    old, young, other = (
        tmp_path / name
        for name in (".r.json.swaleak-old", ".r.json.swaleak-young", ".q.json.swaleak-old")
    )
    for path in (old, young, other):
        path.write_text("half")
    for path in (old, other):
        os.utime(path, (time.time() - STALE_SECONDS - 60,) * 2)
    write_text("whole", tmp_path / "r.json")
    assert {path.name for path in tmp_path.iterdir()} == {young.name, other.name, "r.json"}


# stands for pip, for one that takes for ever: it keeps a pipe open for as long as it lives
ENDLESS = """
import os, signal, sys
if "download" in sys.argv:
    pipe = open(os.environ["PIPE"], "w", buffering=1)
    print(os.getpid(), file=pipe)
    while True:
        signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a child can outlive its parent here")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_download_ends_with_who_asked_for_it(number: int, tmp_path: Path) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(ENDLESS)
    os.mkfifo(tmp_path / "pipe")
    code = "from swaleak.targets.sources import from_release; from_release('0.5.18')"
    environment = {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
        "PIPE": str(tmp_path / "pipe"),
        "SWALEAK_CACHE": str(tmp_path / "cache"),
    }
    asking = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **environment})
    with open(tmp_path / "pipe") as pipe:
        pip = int(pipe.readline())
        asking.send_signal(number)
        asking.wait()
        ended, _, _ = select.select([pipe], [], [], 60)  # its end of the pipe is closed
    if not ended:
        os.kill(pip, signal.SIGKILL)
    assert ended


@pytest.mark.wheels
def test_downloads_that_are_killed_leave_a_whole_release_or_none(
    tmp_path: Path, shop: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("SWALEAK_CACHE", str(cache))
    kept = cache / sources._KEPT.format("0.5.18")
    code = "from swaleak.targets.sources import from_release; from_release('0.5.18')"

    def fetch(limit: float | None) -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and the pip that it has started
            process.wait()

    start = time.monotonic()
    fetch(None)
    takes, whole = time.monotonic() - start, kept.read_bytes()
    pick = random.Random("downloads")
    for _ in range(KILLS):
        kept.unlink(missing_ok=True)
        fetch(pick.uniform(0, 1.05) * takes)
        results = [path for path in cache.iterdir() if not path.name.startswith(".fetch-")]
        assert [path.read_bytes() for path in results] in ([], [whole])
    left = [path for path in cache.iterdir() if path != kept]
    for path in left:
        os.utime(path, (time.time() - STALE_SECONDS - 60,) * 2)
    kept.unlink(missing_ok=True)
    assert (from_release("0.5.18").version, list(cache.iterdir()), len(left) > 0) == (
        "0.5.18",
        [kept],
        True,
    )


# --- memory ---------------------------------------------------------------------------------------


@pytest.fixture
def little_memory() -> Iterator[None]:
    """This process may take 256 MB more than it has, no more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has + 2**28, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


MANY = 10**18
HEADER = {"schema": "swaleak-trace/1", "page_size": 4, "full_pages": 8, "swa_pages": 8}
ALLOC = {"op": "alloc_both", "full": 1, "swa": 1, "n": 4}
HUGE = 100_000_000  # bytes of a line


def scenario(steps: str = "[{ alloc = 'a' }]", pools: str = "", top: str = "") -> bytes:
    return f"schema = 1\n{top}\nsteps = {steps}\n[pools]\n{pools}\n".encode()


def trace(*lines: dict[str, object]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def free(*ranges: list[int]) -> bytes:
    return trace(HEADER, ALLOC, {"op": "free", "full": list(ranges)})


# what is fed in -> the command, the file's bytes, the exit code, a part of what is said
OVERSIZED: dict[str, tuple[str, Callable[[], bytes], int, str]] = {
    "a pool of 10^18 slots": (
        "repro",
        lambda: scenario(pools=f"full_pages = {MANY}"),
        2,
        "pools.full_pages: expected a whole number <= 2147483648",
    ),
    "page size 0": (
        "repro",
        lambda: scenario(pools="page_sizes = [0]"),
        2,
        "pools.page_sizes[0]: expected a whole number >= 1",
    ),
    "an allocation of 10^18 pages": (
        "repro",
        lambda: scenario(f"[{{ alloc = 'a', pages = {MANY} }}]"),
        2,
        "step 1: pages: expected a whole number <= 2147483648",
    ),
    "a million steps": (
        "repro",
        lambda: scenario("[" + "{decode='a'}," * 10**6 + "]"),
        2,
        "larger than 8 MiB",
    ),
    "100,001 steps": (
        "repro",
        lambda: scenario("[" + "{decode='a'}," * 100_001 + "]"),
        2,
        "100001 steps, at most 100000 are read",
    ),
    "a scenario of one line": ("repro", lambda: b"#" * HUGE, 2, "larger than 8 MiB"),
    "a key of a million parts": (
        "repro",
        lambda: scenario(top="a." * 10**6 + "a = 1"),
        2,
        "keys of too many parts",
    ),
    "a trace of one line": ("replay", lambda: b"[" * HUGE, 2, "line 1: longer than 16 MiB"),
    "a trace of 10^18 pages": (
        "replay",
        lambda: trace(HEADER | {"full_pages": MANY}),
        2,
        "line 1: header: full_pages: expected a whole number <= 2147483648",
    ),
    "a trace of page size 0": (
        "replay",
        lambda: trace(HEADER | {"page_size": 0}),
        2,
        "line 1: header: page_size: expected a whole number >= 1",
    ),
    "a trace with an unknown fix": (
        "replay",
        lambda: trace(HEADER | {"fix": "prayer"}),
        2,
        "unknown strategy 'prayer'",
    ),
    "a trace with a fix that is a list": (
        "replay",
        lambda: trace(HEADER | {"fix": [1]}),
        2,
        "line 1: header: fix: expected a string, got an array",
    ),
    "a free of 10^18 slots": (
        "replay",
        lambda: free([1, MANY]),
        2,
        "nobody holds the slot with number 5",
    ),
    "a free of 10^18 slots of nobody": (
        "replay",
        lambda: free([0, MANY]),
        2,
        "more slots than the pool has",
    ),
    "a free of the same slot a million times": (
        "replay",
        lambda: free(*[[1, 4]] * 10**6),
        1,
        "",
    ),
    "an allocation of 10^18 slots in a trace": (
        "replay",
        lambda: trace(HEADER, ALLOC | {"n": MANY}),
        1,
        "",
    ),
    "a log of one line": ("diagnose", lambda: b"memory leak detected! " * (HUGE // 22), 1, ""),
}


@pytest.mark.parametrize("what", OVERSIZED)
def test_sizes_are_checked_before_anything_is_made(
    what: str, cli: Cli, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    command, make, code, said = OVERSIZED[what]
    file = tmp_path / ("input.toml" if command == "repro" else "input")
    file.write_bytes(make())
    request.getfixturevalue("little_memory")
    answer = cli(command, file, *([] if command == "diagnose" else ["--on", "builtin"]))
    lines = answer.err.count("\n")
    assert (answer.code, lines, said in answer.err) == (code, int(code == 2), True), answer.err


def test_a_file_without_an_end_is_not_read_to_its_end(cli: Cli, little_memory: None) -> None:
    answer = cli("repro", "/dev/zero", "--on", "builtin")
    assert (answer.code, answer.err) == (
        2,
        "swaleak: /dev/zero: larger than 8 MiB, no scenario is\n",
    )


GROUPS = {  # the files of a container's memory controller -> bytes that are free in it
    "the limit less what is used": ({"memory.max": "3000", "memory.current": "1000"}, 2000),
    "cached files can be dropped": (
        {"memory.max": "3000", "memory.current": "1000", "memory.stat": "inactive_file 400"},
        2400,
    ),
    "more used than the limit": ({"memory.max": "3000", "memory.current": "3500"}, 0),
    "version 1": (
        {"memory/memory.limit_in_bytes": "3000", "memory/memory.usage_in_bytes": "500"},
        2500,
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_a_container_has_what_its_limit_leaves(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, free = GROUPS[name]
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(targets, "CGROUP", tmp_path)
    assert targets.free_memory("cpu") == free


def out_of_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee docs.")


def test_a_device_that_is_full_when_the_pools_are_made(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HybridAllocator, "__init__", out_of_memory)
    answer = cli("repro", "--on", "builtin", "--page-size", "4")
    assert (answer.code, answer.out, answer.err) == (
        2,
        "",
        "swaleak: 8 full and 8 SWA pages of 4 slots do not fit into the device's memory\n",
    )


def test_a_device_that_is_full_later(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case, "run_script", out_of_memory)
    answer = cli("repro", "--on", "builtin", "--page-size", "4")
    assert (answer.code, answer.out, answer.err) == (
        2,
        "",
        "swaleak: out of memory: CUDA out of memory. Tried to allocate 2.00 GiB. See docs.\n",
    )


def test_pools_that_do_not_fit_into_memory(tmp_path: Path) -> None:
    file = tmp_path / "large.toml"
    file.write_bytes(scenario(pools="page_sizes = [256]\nfull_pages = 1000000"))
    has = "int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()"
    done = limited(f"RLIMIT_AS, {has} + 2**29", "repro", file, "--on", "builtin")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "1000000 full and 8 SWA pages" in done.stderr


# --- production sizes -----------------------------------------------------------------------------


def test_production_sizes_give_the_same_verdicts_in_little_memory() -> None:
    small, *large = [measure(size, "builtin") for size in SIZES.values()]

    def outcome(results: list[dict[str, object]]) -> list[tuple[object, ...]]:
        return [(r["strategy"], r["verdict"], r["physical"], r["mapped"]) for r in results]

    expected = [
        (name, "leak" if name == "deferred" else "clean", 2, 1 if name == "deferred" else 2)
        for name in STRATEGIES
    ]
    assert [outcome(m.results) for m in (small, *large)] == [expected] * 3
    assert [m.memory - small.memory <= 200 * 2**20 for m in large] == [True, True]


# --- hooks on an allocator that misbehaves --------------------------------------------------------

NONSENSE, ERROR = object(), RuntimeError("the allocator's own")
SETTINGS = [
    plugin.Settings(audit=True),
    plugin.Settings(record="t.jsonl"),
    plugin.Settings(record="t.jsonl", audit=True),
]
ARGUMENTS: list[tuple[object, ...]] = [
    (),
    (None,),
    (object(), "x", 3),
    (torch.tensor([4, 5]), torch.tensor([4, 5])),
    (torch.tensor([10**9]), torch.tensor([-7])),
    (torch.tensor([0.5]),),
]


def misbehave(self: HybridAllocator, how: str) -> object:
    if how == "raises":
        raise ERROR
    if how == "breaks":
        vars(self).update(full_to_swa_index_mapping=None, swa_attn_allocator=None)
    return torch.tensor([10**12]) if how == "out of range" else NONSENSE


def odd(name: str, how: str, settings: plugin.Settings) -> HybridAllocator:
    """A watched allocator whose call ``name`` (or that of a pool) does something unheard of."""
    pool, _, call = name.rpartition(".")

    def __init__(self: HybridAllocator) -> None:
        HybridAllocator.__init__(self, 64, 64, 4, "cpu", STRATEGIES["deferred"])
        if pool:
            there = getattr(self, f"{pool}_attn_allocator")
            setattr(there, call, lambda *_, **__: misbehave(self, how))
        self.armed = True

    def method(self: HybridAllocator, *args: object, **kwargs: object) -> object:
        if vars(self).get("armed"):
            return misbehave(self, how)
        return getattr(HybridAllocator, call)(self, *args, **kwargs)

    base = type(
        "Odd", (HybridAllocator,), {"__init__": __init__} | ({} if pool else {call: method})
    )
    made: HybridAllocator = plugin.watched_by(base, settings, None)()
    return made


def outcome_of(call: Callable[..., object], args: tuple[object, ...]) -> object:
    try:
        return call(*args)
    except Exception as error:
        return error


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("how", ["raises", "returns nonsense", "out of range", "breaks"])
@pytest.mark.parametrize("name", [*EVERY_CALL, *POOL_CALLS])
def test_hooks_never_raise_into_a_server(
    name: str,
    how: str,
    settings: plugin.Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = []
    for args in ARGUMENTS:
        allocator = odd(name, how, settings)
        allocator.free_group_begin() if name != "free_group_begin" else None
        pool, _, call = name.rpartition(".")
        owner = getattr(allocator, f"{pool}_attn_allocator") if pool else allocator
        outcome = outcome_of(getattr(owner, call), args)
        # once more, now that hooks may have given up, and the end of the group after it
        seen += [outcome, outcome_of(getattr(owner, call), args)]
        if how != "breaks" and name != "free_group_end":
            outcome_of(allocator.free_group_end, ())
    if how == "out of range":
        assert all(torch.equal(result, torch.tensor([10**12])) for result in seen)
    else:
        assert seen == [ERROR if how == "raises" else NONSENSE] * len(seen)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(
    "missing", ["page_size", "full_to_swa_index_mapping", "swa_attn_allocator"]
)
def test_an_allocator_of_another_shape_is_left_alone(
    missing: str,
    settings: plugin.Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)

    class Other:
        def __init__(self) -> None:
            there = HybridAllocator(64, 64, 4, "cpu", STRATEGIES["deferred"])
            vars(self).update(vars(there))
            vars(self).pop(missing)

        def free(self, _slots: object) -> object:
            return NONSENSE

    allocator = plugin.watched_by(Other, settings, None)()
    told = [record.getMessage() for record in caplog.records]
    assert (allocator.free(None), told) == (
        NONSENSE,
        ["swaleak: watching failed and has stopped; the server is not affected"],
    )


def test_a_trace_that_cannot_be_made_is_no_matter_to_a_server(tmp_path: Path) -> None:
    assert play_recorded(tmp_path / "nowhere" / "t.jsonl", 2) == [True, True]
