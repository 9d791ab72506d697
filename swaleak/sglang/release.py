"""A release by its number: its wheel, fetched once with the user's own pip, and what is kept of it.

A kept release is a small zip in the layout of a wheel, with nothing but the allocator's sources
and the version in it, so that it is read by the same code.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from packaging.version import InvalidVersion, Version

from swaleak.errors import TargetError, UsageError, unknown
from swaleak.files import sweep, write_whole
from swaleak.sglang.source import SourceTree, from_wheel

FIRST = "0.5.13.post1"  # the first release with the allocator package
RELEASES = (
    FIRST,
    "0.5.14",
    "0.5.15.post1",
    *(f"0.5.{patch}" for patch in range(16, 24)),
)
# SGLang's wheels are for CPython 3.11 on Linux; sources are all that is read, so that one will do
_ANY_WHEEL = (
    "--only-binary=:all:",
    "--python-version=3.11",
    "--implementation=cp",
    "--abi=cp311",
    "--abi=abi3",
    "--abi=none",
    *(f"--platform=manylinux_2_{minor}_x86_64" for minor in (39, 38, 35, 34, 31, 28, 17)),
    "--platform=manylinux2014_x86_64",
)
_SCRATCH = ".fetch-"  # how a download that is under way is called
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def is_version(name: str) -> bool:
    """Whether ``name`` can be the number of a release, such as ``0.5.18`` or ``v0.5.18``."""
    try:
        Version(name)
    except InvalidVersion:
        return False
    return True


def cache_folder() -> Path:
    """Return where releases are kept: ``$SWALEAK_CACHE``, else the user's cache folder."""
    if chosen := os.environ.get("SWALEAK_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    return (Path(base) if base else Path.home() / ".cache") / "swaleak"


def from_release(name: str) -> SourceTree:
    """Return the sources of a release, from the cache if they are there.

    Raises ``UsageError`` if there is no such release, ``TargetError`` if it cannot be fetched or
    has no allocator package.
    """
    version = str(Version(name))
    if Version(version) < Version(FIRST.partition(".post")[0]):
        raise TargetError(f"sglang {version} has no allocator package; it came with {FIRST}")
    folder = cache_folder()
    kept = folder / f"sglang-{version}.zip"
    if kept.is_file():
        with contextlib.suppress(TargetError):  # damaged on the disk: fetch it again
            return _named(from_wheel(kept), version)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder, _SCRATCH)
        scratch = tempfile.mkdtemp(prefix=_SCRATCH, dir=folder)
    except OSError:  # no cache to be had: fetch it for this run only
        scratch = tempfile.mkdtemp(prefix="swaleak-")
    try:
        tree = _named(from_wheel(_download(version, Path(scratch))), version)
        with contextlib.suppress(OSError):
            _keep(tree, kept)
        return tree
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _named(tree: SourceTree, version: str) -> SourceTree:
    return SourceTree(tree.files, version, f"sglang-{version}", f"sglang {version}")


def _keep(tree: SourceTree, kept: Path) -> None:
    """Write what is kept of a release. Raises ``OSError``."""
    small = io.BytesIO()
    with zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in sorted(tree.files.items()):
            archive.writestr(zipfile.ZipInfo(name), text)
        metadata = f"sglang-{tree.version}.dist-info/METADATA"
        archive.writestr(zipfile.ZipInfo(metadata), f"Version: {tree.version}\n")
    write_whole(kept, small.getvalue(), _SCRATCH)


def _download(version: str, folder: Path) -> Path:
    command = [*_pip(), "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    command += [*_ANY_WHEEL, "--retries=1", "--dest", str(folder), f"sglang=={version}"]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", preexec_fn=_dies_with_us()
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    raise _explain(version, done.stdout + done.stderr)


def _dies_with_us() -> Callable[[], None] | None:
    """Return what a child runs first, so that it is killed when this process is.

    Else a pip goes on filling a folder that nobody will read. Linux only.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: little is safe after a fork
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _pip() -> list[str]:
    probe = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True)
    if probe.returncode == 0:
        return [sys.executable, "-m", "pip"]
    if found := shutil.which("pip") or shutil.which("pip3"):
        return [found]
    raise TargetError("no pip here to fetch a release with; give the path of a wheel instead")


def _explain(version: str, output: str) -> UsageError | TargetError:
    """Return the error for what pip said: no such release, no network, or its own last words."""
    listed = re.search(r"\(from versions: ([^)]*)\)", output)
    offered = [v.strip() for v in listed.group(1).split(",")] if listed else []
    if offered and offered != ["none"]:
        return UsageError(unknown("SGLang release", version, [*reversed(offered)][:12]))
    broken = ("connection broken", "NewConnectionError", "Max retries", "timed out", "ProxyError")
    if listed or any(sign in output for sign in broken):
        return TargetError(
            f"sglang {version} is not in {cache_folder()} and pip cannot reach a package index; "
            f"give the path of a wheel instead"
        )
    lines = output.strip().splitlines() or ["pip failed"]
    errors = [line for line in lines if line.startswith("ERROR")]
    if not errors or errors[-1].strip() == "ERROR: Exception:":  # its traceback; the end says what
        errors = lines
    return TargetError(f"sglang {version} cannot be fetched: {' '.join(errors[-1].split())}")
