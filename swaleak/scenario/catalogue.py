"""The scenarios that are shipped, and how any scenario is found: by its name, or by its path."""

from __future__ import annotations

import io
from pathlib import Path

from swaleak.errors import ScriptError, unknown
from swaleak.scenario.toml import Scenario, parse

MAX_FILE_BYTES = 8 * 2**20
MAX_DOTS = 10**7  # squares of the dots per line, added up: a key of n parts costs its parser n * n
DEFAULT = "tombstone-recovery"


def folder() -> Path:
    """Return the folder of the shipped scenarios: in the wheel, or beside an editable install."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "scenarios"
    return inside if inside.is_dir() else package.parent / "scenarios"


def names() -> list[str]:
    """Return the names in the catalogue, sorted; those in a folder of it with the folder's name."""
    root = folder()
    paths = (path.relative_to(root).with_suffix("") for path in root.rglob("*.toml"))
    return sorted(path.as_posix() for path in paths)


def catalogue() -> list[Scenario]:
    """Return every shipped scenario: an allocator's first, then production, the default on top."""
    return sorted(
        map(load, names()),
        key=lambda s: (bool(s.caches), s.name != DEFAULT, s.reach != "production", s.name),
    )


def load(name: str) -> Scenario:
    """Return a scenario by its name in the catalogue, or by the path of a TOML file.

    Raises ``ScriptError`` with file, step and reason.
    """
    if name.endswith(".jsonl"):
        raise ScriptError(f"{name}: a trace, not a scenario; `swaleak replay {name}` replays it")
    if name in names():
        return parse(read_text(path := folder() / f"{name}.toml"), name=name, source=str(path))
    if name.endswith(".toml") or "/" in name:
        path = Path(name)
        return parse(read_text(path), name=path.stem, source=str(path))
    raise ScriptError(unknown("scenario", name, names()))


def read_text(path: Path) -> str:
    """Return what a scenario file holds; raises ``ScriptError``."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ScriptError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in its name
        raise ScriptError(f"{str(path)!r}: {error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ScriptError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB, no scenario is")
    if sum(line.count(b".") ** 2 for line in data.splitlines()) > MAX_DOTS:
        raise ScriptError(f"{path}: keys of too many parts, no scenario has them")
    try:
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()
    except UnicodeDecodeError:
        raise ScriptError(f"{path}: not a UTF-8 text file") from None
