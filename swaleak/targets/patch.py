"""Patches as a pull request gives them, applied to a private copy of the sources.

Applied here and not by ``git apply``, which takes no diff without context safely, no colours, and
no ``diff -u old new`` that leaves out where in SGLang its file is.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from swaleak.errors import UsageError
from swaleak.targets.sources import MEM_CACHE, SourceTree, is_read

MAX_PATCH_BYTES = 64 * 2**20
MAX_PATHS_SHOWN = 3  # of those that were left out
NOWHERE = "/dev/null"

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[mK]")
# what a copy is called beside its original, as in `diff -u swa.py.orig swa.py`
_COPY = re.compile(r"\.(?:orig|old|new|bak)$|~$")


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines ``old``, the first of which has the number ``line``, become lines ``new``."""

    line: int
    old: list[str]
    new: list[str]
    context: bool  # whether some of them stay; those of ``git diff -U0`` all change


@dataclass(slots=True)
class FilePatch:
    """The part of a diff that changes one file.

    ``old``, ``new``: its paths as they stand there, ``a/`` and all, ``/dev/null`` for none.
    ``blob``: git's hash of the file before, as far as it is given. ``plain``: not made by git.
    """

    old: str
    new: str
    plain: bool
    blob: str = ""
    hunks: list[Hunk] = field(default_factory=list)

    @property
    def shown(self) -> str:
        """The file as a message calls it."""
        return re.sub(r"^[ab]/", "", self.old if self.new == NOWHERE else self.new)


def patched(tree: SourceTree, names: list[str]) -> tuple[SourceTree, tuple[str, ...]]:
    """Return the tree with the diffs in files ``names`` applied ("-": standard input).

    Also, in one piece of text or none, which paths were left out because they are neither files
    that are read nor new modules. Line ends are made LF on both sides: mail and Windows turn a good
    diff into one that applies nowhere. Raises ``UsageError`` with file and hunk if one does not
    apply.
    """
    files = {path: text.replace("\r\n", "\n") for path, text in tree.files.items()}
    before = dict(files)
    left_out: list[str] = []
    modules = set(tree.modules)
    for name in names:
        file = "standard input" if name == "-" else name
        touched = set()
        for part in split(_COLOUR.sub("", _read(name)).replace("\r\n", "\n"), file):
            old, new = _inner(part.old), _inner(part.new)
            if part.plain and NOWHERE not in (old, new):
                old, new = _sides(part, files, file)
            if old == NOWHERE:
                modules.add(new)
            if not (old in files or (old == NOWHERE and _is_taken(new))):
                left_out.append(part.shown)
                continue
            text = _apply(part, files.pop(old, ""), f"{file}: the hunk at {old}", tree.label)
            if new != NOWHERE:
                files[new] = text
            touched |= {old, new}
        if not any(path.startswith(f"{MEM_CACHE}/") for path in touched):
            raise UsageError(f"{file}: no hunk of it changes {MEM_CACHE}/")
    shown = " + ".join(Path(name).name if name != "-" else "patch" for name in names)
    result = replace(
        tree,
        files=files,
        modules=frozenset((modules - before.keys()) | files.keys()),
        version=None,
        label=f"{tree.label} + {shown}",
        # a place of its own: line caches tell modules by it, and Triton compiles from those
        place=f"{tree.place} + {shown}",
        patched=frozenset(path for path in files if files[path] != before.get(path)),
        added=frozenset(files.keys() - before.keys()),
    )
    return result, _counted(list(dict.fromkeys(left_out)))


def split(diff: str, file: str) -> Iterator[FilePatch]:
    """Yield a unified diff file by file; what stands around it (mail headers) is dropped.

    Raises ``UsageError`` if a hunk of it is damaged; ``file``: how a message calls the diff.
    """
    lines = iter(diff.splitlines(keepends=True))
    part: FilePatch | None = None
    old = ""
    for line in lines:
        if header := re.match(r"diff --git (\S+) (\S+)", line):
            if part:
                yield part
            part = FilePatch(header[1], header[2], plain=False)
        elif line.startswith("--- "):
            old = _path(line)
        elif line.startswith("+++ ") and old:
            if part is None or part.plain or part.hunks:
                if part:
                    yield part
                part = FilePatch(old, "", plain=True)
            part.old, part.new, old = old, _path(line), ""
        elif part and (hunk := _HUNK.match(line)):
            part.hunks.append(_hunk(hunk, lines, f"{file}: {part.shown}"))
        elif part and not part.plain and not part.hunks:
            if line.startswith("new file mode"):
                part.old = NOWHERE
            elif line.startswith("deleted file mode"):
                part.new = NOWHERE
            elif blob := re.match(r"index ([0-9a-f]+)\.\.", line):
                part.blob = blob[1]
    if part:
        yield part


def _path(line: str) -> str:
    return line[4:].split("\t")[0].strip()


def _hunk(header: re.Match[str], lines: Iterator[str], where: str) -> Hunk:
    """Read the lines of a hunk: as many as its header says."""
    counts = [1 if count is None else int(count) for count in header.group(2, 3)]
    old: list[str] = []
    new: list[str] = []
    context = False
    last: list[list[str]] = []
    while len(old) < counts[0] or len(new) < counts[1]:
        line = next(lines, "")
        kind, text = (" ", line) if line == "\n" else (line[:1], line[1:])
        if kind == "\\":  # "No newline at end of file"
            for side in last:
                side[-1] = side[-1].removesuffix("\n")
            continue
        last = {" ": [old, new], "-": [old], "+": [new]}.get(kind, [])
        if not last:
            raise UsageError(f"{where}: corrupt patch, the hunk {header[0]} is cut off")
        context |= kind == " "
        for side in last:
            side.append(text)
    return Hunk(int(header[1]), old, new, context)


def _apply(part: FilePatch, text: str, hunk_at: str, label: str) -> str:
    """Return the text with all hunks applied, each at the fitting place next to its line number."""
    data = text.encode()
    blob = hashlib.sha1(b"blob %d\0%s" % (len(data), data)).hexdigest()
    same = bool(part.blob) and blob.startswith(part.blob)
    lines = text.splitlines(keepends=True)
    shift = done = 0
    for hunk in part.hunks:
        count = len(hunk.old)
        wanted = hunk.line + shift - (1 if count else 0)
        places = [wanted]
        if hunk.context:
            fits = (i for i in range(done, len(lines) - count + 1) if lines[i] == hunk.old[0])
            places = sorted(fits, key=lambda i: abs(i - wanted)) if count else [0]
        # without context only its line number says where it goes: never into other sources
        sure = hunk.context or bool(count) or same or not part.blob or part.old == NOWHERE
        at = next((i for i in places if lines[i : i + count] == hunk.old), None) if sure else None
        if at is None:
            raise UsageError(f"{hunk_at}:{hunk.line} does not apply to {label}")
        lines[at : at + count] = hunk.new
        shift += len(hunk.new) - count + at - wanted
        done = at + len(hunk.new)
    return "".join(lines)


def _inner(path: str) -> str:
    """Return a path from ``sglang/…``, or as it is."""
    found = re.search(r"(?:^|/)(sglang/.*)", path)
    return found[1] if found else path


def _is_taken(path: str) -> bool:
    """Say whether a module that a patch makes is taken: from anywhere in SGLang, if not barred."""
    barred = path.startswith(f"{MEM_CACHE}/") and not is_read(path)
    return path.startswith("sglang/") and path.endswith(".py") and not barred


def _sides(part: FilePatch, files: dict[str, str], file: str) -> tuple[str, str]:
    """Return the file that a plain ``diff -u old new`` changes, before and after.

    ``diff -N`` says nothing of a file that is made or removed but that one side has no lines.
    """
    paths = [_inner(part.new), _inner(part.old)]
    if not any(path.startswith("sglang/") for path in paths):
        paths.insert(0, _meant(part, files, file))
    path = next((path for path in paths if path in files), paths[0])
    made = path not in files and not any(hunk.old for hunk in part.hunks)
    removed = path in files and files[path] == "".join(part.hunks[0].old if part.hunks else [])
    removed = removed and not part.hunks[0].new
    return NOWHERE if made else path, NOWHERE if removed else path


def _meant(part: FilePatch, files: dict[str, str], file: str) -> str:
    """Return the file that a plain ``diff -u old new`` means, by its name and by its content."""
    texts = ["".join(hunk.old) for hunk in part.hunks]
    called = {_COPY.sub("", Path(name).name) for name in (part.old, part.new)}
    by_name = [path for path in files if Path(path).name in called]
    found = [p for p in by_name or files if all(old in files[p] for old in texts)]
    found = found or by_name
    if len(found) > 1:
        raise UsageError(
            f"{file}: {part.shown} can be {' or '.join(found[:3])}; give it its path in SGLang"
        )
    return found[0] if found else part.new


def _counted(paths: list[str]) -> tuple[str, ...]:
    """Return one line for any number of files; a diff of a whole pull request has dozens."""
    if len(paths) <= MAX_PATHS_SHOWN:
        return (", ".join(paths),) if paths else ()
    return (f"{len(paths)} files, {', '.join(paths[:MAX_PATHS_SHOWN])} and so on",)


def _read(name: str) -> str:
    try:
        if name == "-":
            data = _standard_input(sys.stdin.buffer)
        else:
            with open(name, "rb") as file:
                data = file.read(MAX_PATCH_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--patch {name}: {error.strerror or error}") from None
    if len(data) > MAX_PATCH_BYTES:
        raise UsageError(f"--patch {name}: larger than {MAX_PATCH_BYTES >> 20} MiB, no patch is")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"--patch {name}: not a UTF-8 text file") from None


@lru_cache(maxsize=1)
def _standard_input(stream: BinaryIO) -> bytes:
    """Return what was piped in. It can be read once, and several targets may need it."""
    return stream.read(MAX_PATCH_BYTES + 1)
