"""Bad input at scale: whatever is fed in, one line and an exit code come out, and no file does.

Mutations are seeded, so a failure can be run again. ``SWALEAK_FUZZ`` scales how many are tried.
"""

from __future__ import annotations

import io
import os
import random
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from swaleak.allocator.hybrid import HybridAllocator
from swaleak.allocator.strategies import STRATEGIES
from swaleak.checker.run import Execution
from swaleak.cli import main
from swaleak.errors import SwaleakError
from swaleak.live import plugin
from swaleak.scenario import catalogue as scenarios
from swaleak.targets.driver import Driver
from swaleak.targets.sources import ALLOCATOR
from tests.conftest import ROOT

SCALE = float(os.environ.get("SWALEAK_FUZZ", "1"))
LIMIT = 2.0  # seconds of the processor that an input may take
TOKENS = [b"0", b"-1", b"1e9", b"9" * 19, b"9" * 400, b"nan", b'""', b"[", b"]", b"{", b"}", b"\n"]
TOKENS += [
    b"\x00",
    b"\xff",
    "ü".encode(),
    b"=" * 50,
    b"true",
    b'"node"',
    b"group",
    b"free_swa",
    b":",
]
SCENARIOS = [path.read_bytes() for path in sorted((ROOT / "scenarios").glob("*.toml"))]
LOGS = [
    b"[2026-08-23 13:33:20] server_args=ServerArgs(page_size=256)\n"
    b"ValueError: pool memory leak detected! [full] total=911616, available=235264, "
    b"evictable=676352, protected=0, session_held=0, uncached=0\n[swa] total=911616, "
    b"available=235264, evictable=676096, protected=0, session_held=0, uncached=0\n",
    b"token_to_kv_pool_allocator memory leak detected! self.max_total_num_tokens=10, "
    b"available_size=5, evictable_size=4, protected_size=0\n",
    b"KV double free: sub-pool swa pages [1, 2]\nTraceback (most recent call last):\n"
    b"    self.swa_attn_allocator.available_size() <= self.swa_attn_allocator.size\n"
    b"AssertionError\n",
]
SWA = b"""\
from swaleak.allocator.hybrid import HybridAllocator
from swaleak.allocator.strategies import Deferred as Strategy

class SWATokenToKVPoolAllocator(HybridAllocator):
    def __init__(self, size, size_swa, page_size, dtype, device, kvcache, need_sort):
        super().__init__(size, size_swa, page_size, device, Strategy)
"""
PATCH = f"""\
diff --git a/python/{ALLOCATOR}/swa.py b/python/{ALLOCATOR}/swa.py
--- a/python/{ALLOCATOR}/swa.py
+++ b/python/{ALLOCATOR}/swa.py
@@ -1,4 +1,4 @@
 from swaleak.allocator.hybrid import HybridAllocator
-from swaleak.allocator.strategies import Deferred as Strategy
+from swaleak.allocator.strategies import Barrier as Strategy
{" "}
 class SWATokenToKVPoolAllocator(HybridAllocator):
""".encode()


def wheel() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{ALLOCATOR}/swa.py", SWA)
        archive.writestr("sglang-0.5.18.dist-info/METADATA", "Version: 0.5.18\n")
    return file.getvalue()


def mutate(seed: bytes, pick: random.Random) -> bytes:
    """Return ``seed`` after a few cuts, copies, flips and pasted tokens."""
    data = bytearray(seed)
    for _ in range(pick.choice((1, 1, 1, 2, 3, 6))):
        at, to = sorted(pick.randrange(len(data) + 1) for _ in range(2))
        to = min(to, at + pick.choice((1, 4, 16, 64, 10_000)))
        match pick.randrange(6):
            case 0:
                del data[at:to]
            case 1:
                data[at:at] = data[at:to] * pick.choice((1, 1, 2, 20))
            case 2:
                data[at:at] = pick.choice(TOKENS)
            case 3:
                data[at:to] = pick.choice(TOKENS)
            case 4 if data:
                data[at % len(data)] = pick.randrange(256)
            case _:
                lines = bytes(data).splitlines(keepends=True)
                pick.shuffle(lines)
                data = bytearray(b"".join(lines))
        del data[200_000:]
    return bytes(data)


def run(*args: str) -> tuple[int, str]:
    """Run a command in this process; its exit code and what it said on stderr."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["swaleak", *args]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as left:
        return int(left.code or 0), err.getvalue()
    finally:
        sys.argv = before
    raise AssertionError("main() returned")


def inputs(seeds: list[bytes], count: int, salt: str) -> Iterator[bytes]:
    pick = random.Random(salt)
    for _ in range(max(1, int(count * SCALE))):
        yield mutate(pick.choice(seeds), pick)


def read(name: str) -> tuple[int, str]:
    """Only read a scenario, as every command does first."""
    try:
        scenarios.load(name)
    except SwaleakError as error:
        return error.exit_code, f"swaleak: {error}\n"
    return 0, ""


def trace() -> bytes:
    """Record calls of every kind that the built-in model has, with the two groups of a leak."""
    with TemporaryDirectory() as folder:
        for name in (
            "tombstone-recovery",
            "steady-group",
            "hicache-load-back",
            "free-of-a-tombstone",
        ):
            class_ = plugin.watched_by(
                HybridAllocator, plugin.Settings(f"{folder}/{name}.jsonl"), None
            )
            execution = Execution(Driver(class_(32, 32, 4, "cpu", STRATEGIES["deferred"])))
            for step in scenarios.load(name).steps:
                execution.step(step)
        return b"".join(path.read_bytes() for path in sorted(Path(folder).iterdir()))


def replayed(file: str) -> tuple[int, str]:
    code, said = run("replay", file, "--on", "builtin")
    torn = f"swaleak: warning: {file}: its last line, "
    return code, "" if code < 2 and said.startswith(torn) and said.count("\n") == 1 else said


# kind -> seeds, how many mutations, the file's ending, what is done with it
KINDS: dict[str, tuple[list[bytes], int, str, Callable[[str], tuple[int, str]]]] = {
    "scenarios, read": (SCENARIOS, 5000, "toml", read),
    "scenarios, shown": (SCENARIOS, 500, "toml", lambda f: run("show", f, "-f", "json")),
    "scenarios, replayed": (
        SCENARIOS,
        2000,
        "toml",
        lambda f: run("repro", f, "--on", "builtin", "-s", "deferred", "--page-size", "4"),
    ),
    "logs": (LOGS, 2000, "log", lambda f: run("diagnose", f)),
    "traces": ([trace()], 1500, "jsonl", replayed),
    "wheels": ([wheel()], 1000, "whl", lambda f: run("check", f, "--page-size", "1")),
    "patches": ([PATCH], 500, "diff", lambda f: run("check", "TREE", "--patch", f)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_input(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tree = tmp_path / "TREE" / ALLOCATOR
    tree.mkdir(parents=True)
    (tree / "swa.py").write_bytes(SWA)
    seeds, count, suffix, command = KINDS[kind]
    file = tmp_path / f"input.{suffix}"
    before = {path for path in tmp_path.rglob("*") if "__pycache__" not in str(path)} | {file}
    codes: set[int] = set()
    for data in inputs(seeds, count, kind):
        file.write_bytes(data)
        start = time.process_time()  # another program's share of the machine is no matter
        code, said = command(file.name)
        took = time.process_time() - start
        assert code in (0, 1, 2, 125), (code, data)
        assert (said.count("\n"), said[:9]) == (1, "swaleak: ") if code > 1 else not said, (
            said,
            data,
        )
        assert took < LIMIT, (took, data)
        codes.add(code)
    assert {path for path in tmp_path.rglob("*") if "__pycache__" not in str(path)} == before
    assert (tree / "swa.py").read_bytes() == SWA
    assert len(codes) > 1, "every mutation came out the same"
