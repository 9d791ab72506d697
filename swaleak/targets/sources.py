"""An installed SGLang, a release, a wheel or a checkout -> a source tree, read as text.

Nothing of SGLang is imported or run here. A release is fetched once with the user's own pip, and a
small zip in the layout of a wheel is kept of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.version import InvalidVersion, Version

from swaleak.errors import TargetError, UsageError, unknown
from swaleak.files import sweep, write_whole

MEM_CACHE = "sglang/srt/mem_cache"
ALLOCATOR = f"{MEM_CACHE}/allocator"
# what the caches need from elsewhere, and run
OUTSIDE = ("sglang/srt/environ.py", "sglang/srt/session/streaming_session.py")
UTILS = "sglang/srt/utils"
# Triton kernels that the allocator package calls; the older place, then the newer one
KERNELS = (f"{MEM_CACHE}/triton_ops/allocator.py", "sglang/kernels/ops/memory/allocator.py")
MAX_SOURCE_BYTES = 4 * 2**20  # the largest file that is read has 0.2 MB

_VERSION_FILES = ("sglang/_version.py", "sglang/version.py")
# memory pools, host pools, storage, HiCache and the cores in other languages, none of which is run
_NOT_RUN = re.compile(
    rf"{MEM_CACHE}/(?:__init__\.py$"
    r"|(?:storage|pool_host|rust_tree_core|sparsity|cpp_\w+|hybrid_cache|layout|triton_ops)/"
    r"|buffer_mode/(?!storage_existence_cache)|\w*(?:pool|hicache|hiradix|host|deepseek|embedding|configurator|mamba_|kv_|dsa_|vmm)\w*\.py$)"
)

# release -> SHA-256 of the files that are read of it, see ``digest``; docs/digests.py writes it
DIGESTS = {
    "0.5.13.post1": "7f0901d3a7429cdb6d2b7d242f69fdebfba8e9786318449b1ada6be15f0146d0",
    "0.5.14": "70336b7d0c021f378b9a4f26f72b9e471e1bb6eb174a2bc90ea7c4f529887c71",
    "0.5.15.post1": "817476e44e9cb2064bced8a37be2524a63f8b670454ed7083c987a3376da3214",
    "0.5.16": "2004193cd551b2407dfcd0a6831b7095a372d6760295a7c9ed67120f2010cc2d",
    "0.5.17": "91164b1bde7e58e4b6f1452fa3360a50c2d61f32547dd2feddcc3795b70431d7",
    "0.5.18": "9ef6ab88394d5004e2dcb9e0a71833836d018c5594ca224c49ecce346e67f071",
    "0.5.19": "cee10c1451ea3ab1b649fc83c849ff4c7e76e53d2cc0c51c55ff4b41143c1ce5",
    "0.5.20": "043ecea8f14111d873b6a50c2598ed4b05acdd3277cfdad160bab50f29758068",
    "0.5.21": "422303b7ec20982fa4b00f62e21d781eb20e2571b7dff9ad744ffd66f09b4ef0",
    "0.5.22": "0f049c7e51cfaa060a1e71468850b1dd4aa1fd46cea2638142d07346af5c6ee6",
    "0.5.23": "10353ffb874deb5f4f7b2257310758a5b4b05b15955b484adbc9f44090c89696",
}
RELEASES = tuple(DIGESTS)
FIRST = RELEASES[0]  # the first release with the allocator package

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
_KEPT = "sglang-{}.sources-2.zip"  # the number changes with what is kept
_MODULES = "modules.txt"  # in a kept release: every Python file of the wheel
_SCRATCH = ".fetch-"  # how a download that is under way is called
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


@dataclass(frozen=True, slots=True)
class SourceTree:
    """The sources of one SGLang, as far as allocator and caches need them.

    ``files``: path from ``sglang/…`` -> text. ``modules``: every Python file there is, also those
    that are not read. ``version``: of the release that these files are, byte for byte; None for any
    other source. ``place``: the wheel or folder they come from. ``patched``: the files that a patch
    has changed, ``added``: those that it has made.
    """

    files: dict[str, str]
    modules: frozenset[str]
    version: str | None
    place: str
    label: str
    patched: frozenset[str] = field(default=frozenset())
    added: frozenset[str] = field(default=frozenset())


def is_read(path: str) -> bool:
    """Say whether a file of SGLang belongs into a source tree."""
    if path in KERNELS or path in OUTSIDE:
        return True
    folder, _, name = path.rpartition("/")
    inside = path.startswith(f"{MEM_CACHE}/") and not _NOT_RUN.match(path)
    return name.endswith(".py") and (inside or folder == UTILS)


def digest(files: dict[str, str]) -> str:
    """Return the SHA-256 of a tree's files, whatever their line ends."""
    hashed = hashlib.sha256()
    for path, text in sorted(files.items()):
        of_file = hashlib.sha256(text.replace("\r\n", "\n").encode()).hexdigest()
        hashed.update(f"{path} {of_file}\n".encode())
    return hashed.hexdigest()


def from_wheel(path: Path) -> SourceTree:
    """Read a wheel. Raises ``TargetError`` if it is damaged or holds no SWA allocator."""
    tree, said = _read_wheel(path)
    return _as_release(tree, said)


def from_folder(path: Path) -> SourceTree:
    """Read a checkout (``python/sglang/…``) or an unpacked wheel (``sglang/…``)."""
    root = next((r for r in (path / "python", path) if (r / ALLOCATOR).is_dir()), None)
    if root is None:
        raise TargetError(f"{path}: no SGLang there, {ALLOCATOR}/ is missing")
    found = [
        f"{Path(folder).relative_to(root).as_posix()}/{name}"
        for folder, _, names in os.walk(root / "sglang")
        for name in names
    ]
    found += [path.relative_to(root).as_posix() for path in root.glob("*.dist-info/METADATA")]
    tree, said = _pick(found, lambda name: (root / name).read_bytes(), str(path))
    described = _describe(root)
    tagged = re.fullmatch(r"v(\d[\w.]*)", described or "")
    if described and not tagged:  # between releases, or changed
        return replace(tree, label=f"sglang {described}")
    return _as_release(tree, tagged.group(1) if tagged else said)


def from_installed() -> SourceTree:
    """Read the SGLang of this environment, found without importing it."""
    package = _installed()
    if package is None:
        raise UsageError("SGLang is not installed here; name a release, a wheel or a checkout")
    return from_folder(package.parent)


def from_release(name: str) -> SourceTree:
    """Return the sources of a release, from the cache if they are there.

    Raises ``UsageError`` if there is no such release, ``TargetError`` if it cannot be fetched or
    has no allocator package.
    """
    version = str(Version(name))
    if Version(version) < Version(FIRST.partition(".post")[0]):
        raise TargetError(f"sglang {version} has no allocator package; it came with {FIRST}")
    folder = cache_folder()
    kept = folder / _KEPT.format(version)
    if kept.is_file():
        with contextlib.suppress(TargetError):
            tree = _released(_read_wheel(kept)[0], version)
            if DIGESTS.get(version, digest(tree.files)) == digest(tree.files):
                return tree  # else it was damaged on the disk: fetch it again
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder, _SCRATCH)
        scratch = tempfile.mkdtemp(prefix=_SCRATCH, dir=folder)
    except OSError:  # no cache to be had: fetch it for this run only
        scratch = tempfile.mkdtemp(prefix="swaleak-")
    try:
        tree = _released(_read_wheel(_download(version, Path(scratch)))[0], version)
        with contextlib.suppress(OSError):
            _keep(tree, kept)
        return tree
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def is_installed() -> bool:
    """Say whether this environment has an SGLang, without importing it."""
    return _installed() is not None


def is_version(name: str) -> bool:
    """Say whether ``name`` can be the number of a release, such as ``0.5.18`` or ``v0.5.18``."""
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


def kept_releases() -> list[str]:
    """Return the releases in the cache, sorted by their numbers."""
    start, end = _KEPT.split("{}")
    names = (path.name for path in cache_folder().glob(_KEPT.format("*")))
    return sorted((n.removeprefix(start).removesuffix(end) for n in names), key=Version)


def _read_wheel(path: Path) -> tuple[SourceTree, str | None]:
    """Return a wheel's tree, and the release that it says it is."""
    try:
        with zipfile.ZipFile(path) as wheel:
            sizes = {info.filename: info.file_size for info in wheel.infolist()}

            def read(name: str) -> bytes:
                if sizes[name] > MAX_SOURCE_BYTES:
                    raise TargetError(f"{path}: {name} is larger than any SGLang source")
                return wheel.read(name)

            return _pick(sizes, read, str(path))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise TargetError(f"{path}: not a wheel that can be read ({error})") from None
    except (OSError, RuntimeError) as error:
        raise TargetError(f"{path}: {error}") from None


def _pick(
    names: Iterable[str], read: Callable[[str], bytes], place: str
) -> tuple[SourceTree, str | None]:
    """Return the tree among files ``names``, and the release that it says it is."""
    modules = {name for name in names if name.startswith("sglang/") and name.endswith(".py")}
    info = [name for name in names if re.fullmatch(r"sglang-[^/]+\.dist-info/METADATA", name)]
    try:
        files = {name: read(name).decode() for name in sorted(modules) if is_read(name)}
        version_texts = [read(name).decode() for name in _VERSION_FILES if name in modules]
        metadata = "".join(read(name).decode() for name in info)
        if _MODULES in names:
            modules = set(read(_MODULES).decode().split())
    except UnicodeDecodeError:
        raise TargetError(f"{place}: its sources are not UTF-8 text") from None
    except OSError as error:
        raise TargetError(f"{place}: {error}") from None
    if f"{ALLOCATOR}/swa.py" not in files:
        raise TargetError(
            f"{place}: no SGLang with an SWA allocator, {ALLOCATOR}/swa.py is missing"
        )
    version = r"(?m)^(?:__version__ *=[^\n]*?|version *= *)['\"](\d[^'\"]*)['\"]"
    found = [re.search(r"(?m)^Version: *(\S+)", metadata)]
    found += [re.search(version, text) for text in version_texts]
    said = next((match[1] for match in found if match), None)
    return SourceTree(files, frozenset(modules), None, place, f"sglang at {place}"), said


def _as_release(tree: SourceTree, version: str | None) -> SourceTree:
    """Return the tree as the release that it says it is, if its files are those of the release."""
    if version is None:
        return replace(tree, version=None, label=f"sglang at {tree.place}")
    if DIGESTS.get(version) == digest(tree.files):
        return replace(tree, version=version, label=f"sglang {version}")
    changed = "changed, " if version in DIGESTS else ""
    return replace(tree, version=None, label=f"sglang {version} ({changed}{tree.place})")


def _released(tree: SourceTree, version: str) -> SourceTree:
    return replace(tree, version=version, place=f"sglang-{version}", label=f"sglang {version}")


def _installed() -> Path | None:
    """Return the folder of the package ``sglang``, if there is one to import."""
    try:
        spec = importlib.util.find_spec("sglang")
    except ValueError:  # a half-initialised module of that name
        return None
    if spec is None or spec.origin is None:  # none, or any folder of that name, such as a clone
        return None
    return Path(spec.origin).parent


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
    except OSError:  # no git here
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _keep(tree: SourceTree, kept: Path) -> None:
    """Write what is kept of a release. Raises ``OSError``."""
    small = io.BytesIO()
    with zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in sorted(tree.files.items()):
            archive.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)
        modules = "\n".join(sorted(tree.modules))
        archive.writestr(zipfile.ZipInfo(_MODULES), modules, zipfile.ZIP_DEFLATED)
    write_whole(kept, small.getvalue(), _SCRATCH)


def _download(version: str, folder: Path) -> Path:
    if sys.stderr.isatty():  # tens of megabytes, of which pip says nothing here
        print(
            f"fetching sglang {version} with pip, to keep it in {cache_folder()}", file=sys.stderr
        )
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
