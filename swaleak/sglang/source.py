"""Finds SGLang's allocator sources, and reads them as text. Nothing is imported or run here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from swaleak.errors import TargetError, UsageError

ALLOCATOR = "sglang/srt/mem_cache/allocator"
# Triton kernels that the allocator package calls; the older place, then the newer one
KERNELS = ("sglang/srt/mem_cache/triton_ops/allocator.py", "sglang/kernels/ops/memory/allocator.py")
MAX_SOURCE = 4 * 2**20  # bytes; the largest file of the package has 0.1 MB


@dataclass(frozen=True, slots=True)
class SourceTree:
    """The allocator sources of one SGLang.

    ``files``: path from ``sglang/…`` -> text. ``version``: of the release, None for a checkout
    between releases. ``place``: the wheel or folder they come from.
    """

    files: dict[str, str]
    version: str | None
    place: str
    label: str


def from_wheel(path: Path) -> SourceTree:
    """Read a wheel. Raises ``TargetError`` if it is damaged or holds no SWA allocator."""
    try:
        with zipfile.ZipFile(path) as wheel:
            names = {info.filename: info for info in wheel.infolist()}

            def text(name: str) -> str:
                if names[name].file_size > MAX_SOURCE:
                    raise TargetError(f"{path}: {name} is larger than any SGLang source")
                return wheel.read(name).decode("utf-8")

            files = _pick(names, text)
            version = _wheel_version(names, text) or _file_version(files)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise TargetError(f"{path}: not a wheel that can be read ({error})") from None
    except UnicodeDecodeError:
        raise TargetError(f"{path}: its sources are not UTF-8 text") from None
    except (OSError, RuntimeError) as error:
        raise TargetError(f"{path}: {error}") from None
    return _tree(files, version, str(path))


def from_folder(path: Path) -> SourceTree:
    """Read a checkout (``python/sglang/…``) or an unpacked wheel (``sglang/…``)."""
    root = next((r for r in (path / "python", path) if (r / ALLOCATOR).is_dir()), None)
    if root is None:
        raise TargetError(f"{path}: no SGLang there, {ALLOCATOR}/ is missing")
    try:
        found = [file.relative_to(root).as_posix() for file in (root / ALLOCATOR).glob("*.py")]
        others = [*KERNELS, "sglang/version.py", "sglang/_version.py"]
        found += [name for name in others if (root / name).is_file()]
        files = _pick(found, lambda name: (root / name).read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise TargetError(f"{path}: its sources are not UTF-8 text") from None
    except OSError as error:
        raise TargetError(f"{path}: {error}") from None
    described = _describe(root)
    tagged = re.fullmatch(r"v(\d[\w.]*)", described or "")
    version = tagged.group(1) if tagged else None if described else _file_version(files)
    label = f"sglang {described}" if described and not tagged else None
    return _tree(files, version, str(path), label)


def from_installed() -> SourceTree:
    """Read the SGLang of this environment, found without importing it."""
    package = _installed()
    if package is None:
        raise UsageError("SGLang is not installed here; name a release, a wheel or a checkout")
    tree = from_folder(package.parent)
    try:
        version: str | None = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        version = tree.version
    return _tree(tree.files, version, tree.place)


def is_installed() -> bool:
    """Whether this environment has an SGLang, told without importing it."""
    return _installed() is not None


def _installed() -> Path | None:
    """Return the folder of the package ``sglang``, if there is one to import."""
    try:
        spec = importlib.util.find_spec("sglang")
    except ValueError:  # a half-initialised module of that name
        return None
    if spec is None or spec.origin is None:  # none, or any folder of that name, such as a clone
        return None
    return Path(spec.origin).parent


def _pick(names: Iterable[str], text: Callable[[str], str]) -> dict[str, str]:
    wanted = {*KERNELS, "sglang/version.py", "sglang/_version.py"}
    return {
        name: text(name)
        for name in sorted(names)
        if name in wanted or (name.endswith(".py") and str(PurePosixPath(name).parent) == ALLOCATOR)
    }


def _tree(
    files: dict[str, str], version: str | None, place: str, label: str | None = None
) -> SourceTree:
    if f"{ALLOCATOR}/swa.py" not in files:
        raise TargetError(
            f"{place}: no SGLang with an SWA allocator, {ALLOCATOR}/swa.py is missing"
        )
    label = label or (f"sglang {version}" if version else f"sglang at {place}")
    return SourceTree(files, version, place, label)


def _describe(path: Path) -> str | None:
    """Return what git calls the commit of a checkout, such as ``v0.5.18-3-g1a2b3c4-dirty``.

    ``path``: the folder that holds ``sglang/``. None if no repository tracks what is in it.
    """
    tracked = ("ls-files", "--error-unmatch", f"{ALLOCATOR}/swa.py")
    if _git(path, *tracked) is None:
        return None
    return _git(path, "describe", "--tags", "--always", "--dirty", "--match=v*") or None


def _git(path: Path, *command: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(path), *command], capture_output=True, text=True, errors="replace"
        )
    except OSError:  # no git here: then nobody knows
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _wheel_version(names: Iterable[str], text: Callable[[str], str]) -> str | None:
    for name in names:
        if re.fullmatch(r"sglang-[^/]+\.dist-info/METADATA", name):
            found = re.search(r"^Version: *(\S+)", text(name), re.MULTILINE)
            return found.group(1) if found else None
    return None


def _file_version(files: dict[str, str]) -> str | None:
    for name in ("sglang/_version.py", "sglang/version.py"):
        found = re.search(
            r"^(?:__version__ *=[^\n]*?|version *= *)['\"](\d[^'\"]*)['\"]",
            files.get(name, ""),
            re.MULTILINE,
        )
        if found:
            return found[1]
    return None
