"""Patches as a pull request gives them, applied to a private copy of the sources."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from swaleak.errors import UsageError
from swaleak.sglang.source import ALLOCATOR, KERNELS, SourceTree

MAX_PATCH = 64 * 2**20  # bytes
SHOWN = 3  # paths that are named of those left out


@dataclass(frozen=True, slots=True)
class FilePatch:
    """The part of a diff that changes one file. ``path`` as it stands there, ``a/`` and all."""

    path: str
    text: str

    @property
    def strip(self) -> int:
        """How many leading folders lie before ``sglang/…``; -1 if it is none of our files."""
        parts = self.path.split("/")
        for depth in range(len(parts)):
            inner = "/".join(parts[depth:])
            if inner in KERNELS or (
                inner.startswith(f"{ALLOCATOR}/") and inner.count("/") == ALLOCATOR.count("/") + 1
            ):
                return depth
        return -1


def patched(tree: SourceTree, names: list[str]) -> tuple[SourceTree, tuple[str, ...]]:
    """Return the tree with the diffs in files ``names`` applied ("-": standard input).

    Also, in one piece of text or none, which paths were left out because they lie outside the
    allocator package. Line ends are made LF on both sides: mail and Windows turn a good diff into
    one that applies nowhere. Raises ``UsageError`` with file and hunk if one does not apply.
    Nothing but a temporary folder is written.
    """
    left_out: list[str] = []
    with tempfile.TemporaryDirectory(prefix="swaleak-") as folder:
        root = Path(folder)
        for path, text in tree.files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(_with_lf(text), encoding="utf-8", newline="")
        for name in names:
            parts = list(split(_with_lf(_read(name))))
            mine = [part for part in parts if part.strip >= 0]
            if not mine:
                raise UsageError(f"{name}: no hunk of it changes {ALLOCATOR}/")
            left_out += [_shown(part.path) for part in parts if part.strip < 0]
            for part in mine:
                _apply(part, root, "standard input" if name == "-" else name, tree.label)
        files = {
            path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
            for path in sorted(root.rglob("*.py"))
            if not path.is_symlink()
        }
    shown = " + ".join(Path(name).name if name != "-" else "patch" for name in names)
    label = f"{tree.label} + {shown}"
    # a place of its own: line caches tell modules by it, and Triton compiles from those
    place = f"{tree.place} + {shown}"
    changed = replace(tree, files=files, version=None, label=label, place=place)
    return changed, _counted(list(dict.fromkeys(left_out)))


def split(diff: str) -> Iterator[FilePatch]:
    """Yield a unified diff file by file; what stands around it (mail headers) is dropped."""
    lines = diff.splitlines(keepends=True)
    starts = list(_starts(lines))
    for start, stop in pairwise([*starts, len(lines)]):
        chunk = lines[start:stop]
        path = _path_of(chunk)
        if path:
            yield FilePatch(path, "".join(chunk))


def _starts(lines: list[str]) -> Iterator[int]:
    """Yield where files begin, hunk lengths counted so that no changed line is taken for one."""
    old = new = 0
    in_header = False
    for i, line in enumerate(lines):
        if old > 0 or new > 0:
            old -= line[:1] in (" ", "-", "\n")
            new -= line[:1] in (" ", "+", "\n")
        elif line.startswith("diff --git "):
            in_header = True
            yield i
        elif line.startswith("--- ") and lines[i + 1 : i + 2] and lines[i + 1].startswith("+++ "):
            if not in_header:
                yield i
            in_header = False
        elif hunk := re.match(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", line):
            old, new = (1 if count is None else int(count) for count in hunk.groups())
            in_header = False


def _path_of(chunk: list[str]) -> str | None:
    """Return the file that a part of a diff changes; for a deletion, the file that goes."""
    found: dict[str, str] = {}
    for line in chunk:
        if line.startswith("@@"):
            break
        if header := re.match(r"(--- |\+\+\+ )([^\t\n]+)", line):
            found[header.group(1)[0]] = header.group(2).strip()
        elif header := re.match(r"diff --git (\S+) (\S+)", line):
            found["git"] = header.group(2)
    new = found.get("+", "")
    return found.get("-") if new == "/dev/null" else new or found.get("git")


def _apply(part: FilePatch, root: Path, name: str, label: str) -> None:
    strip = f"-p{part.strip}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {"GIT_CEILING_DIRECTORIES": str(root.parent), "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", strip, "-"],
            cwd=root,
            input=part.text.encode(),
            capture_output=True,
            env=environment,
        )
    except FileNotFoundError:
        raise UsageError("--patch needs git, and there is none on the PATH") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace")
        hunk = re.search(r"patch failed: (\S+:\d+)", said)
        if hunk:
            raise UsageError(f"{name}: the hunk at {hunk.group(1)} does not apply to {label}")
        reason = next(iter(said.strip().splitlines()), "git apply refused it")
        raise UsageError(f"{name}: {_shown(part.path)}: {reason.removeprefix('error: ')}")


def _with_lf(text: str) -> str:
    return text.replace("\r\n", "\n")


def _counted(paths: list[str]) -> tuple[str, ...]:
    """Return one line for any number of files; a diff of a whole pull request has dozens."""
    if len(paths) <= SHOWN:
        return (", ".join(paths),) if paths else ()
    return (f"{len(paths)} files, {', '.join(paths[:SHOWN])} and so on",)


def _shown(path: str) -> str:
    return re.sub(r"^[ab]/", "", path)


def _read(name: str) -> str:
    try:
        if name == "-":
            data = sys.stdin.buffer.read(MAX_PATCH + 1)
        else:
            with open(name, "rb") as file:
                data = file.read(MAX_PATCH + 1)
    except OSError as error:
        raise UsageError(f"--patch {name}: {error.strerror or error}") from None
    if len(data) > MAX_PATCH:
        raise UsageError(f"--patch {name}: larger than {MAX_PATCH >> 20} MiB, no patch is")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"--patch {name}: not a UTF-8 text file") from None
