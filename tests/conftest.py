"""What several tests share: the command line in-process, and SGLang's wheels."""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from swaleak.cli import main
from swaleak.targets.open import Target, open_target
from swaleak.targets.sources import is_read

ROOT = Path(__file__).resolve().parent.parent

# the class that a target `module:Mine` means; to be formatted with the name of a strategy's class
USER_CLASS = """
from swaleak.allocator.hybrid import HybridAllocator
from swaleak.allocator.strategies import {strategy}

class Mine(HybridAllocator):
    def __init__(self, size, size_swa, page_size, dtype, device, kvcache, need_sort):
        super().__init__(size, size_swa, page_size, device, {strategy})
"""


@dataclass(frozen=True)
class Answer:
    """What a command left behind."""

    code: int
    out: str
    err: str


class Cli(Protocol):
    def __call__(self, *args: str | Path) -> Answer: ...


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run ``swaleak ARGS`` in this process, as the console script does."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*args: str | Path) -> Answer:
        monkeypatch.setattr("sys.argv", ["swaleak", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        captured = capsys.readouterr()
        return Answer(int(left.value.code or 0), captured.out, captured.err)

    return run


def wheel(version: str) -> Path:
    """Return the wheel of a release in the folder ``SWALEAK_WHEELS``.

    Skips the test where that names no folder; where it does, a missing wheel is a failure.
    """
    folder = os.environ.get("SWALEAK_WHEELS")
    if not folder:
        pytest.skip("SWALEAK_WHEELS names no folder with SGLang's wheels")
    found = sorted(Path(folder).glob(f"sglang-{version}-*.whl"))
    if not found:
        pytest.fail(f"no wheel of sglang {version} in {folder}")
    return found[0]


GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")


def unpack(version: str, into: Path, below: str = ".") -> Path:
    """Unpack what is read of a wheel, and its metadata; ``python`` is where a checkout has it."""
    with zipfile.ZipFile(wheel(version)) as archive:
        for name in archive.namelist():
            if is_read(name) or name.endswith("/METADATA"):
                archive.extract(name, into / below)
    return into


_opened: dict[str, Target] = {}


def sglang(version: str) -> Target:
    """Return a release as a target on the CPU, loaded once."""
    if version not in _opened:
        _opened[version] = open_target(str(wheel(version)), "cpu")
    return _opened[version]
