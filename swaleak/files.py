"""Files that are whole or absent, whenever this process is killed."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
import time
from pathlib import Path

from swaleak.errors import UsageError

STALE_SECONDS = 24 * 3600  # after which what a killed run has left is swept up


def check_writable(option: str, path: Path, ending: str = "", what: str = "") -> None:
    """Raise ``UsageError`` if no file can be written at ``path``, before any work is done.

    ``ending``: the one that ``what`` has to have.
    """
    if ending and path.suffix.lower() != ending:
        raise UsageError(f"{option} {path}: {what} is a {ending} file")
    try:
        path.lstat()  # a name that no file can have is told apart from one that is free
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(f"{option} {str(path)[:60]}: {error.strerror or error}") from None
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"{option} {path}: the folder {path.parent} cannot be written to")


def write_text(text: str, path: Path) -> None:
    """Write ``text`` (UTF-8) beside ``path`` and rename it into place.

    Raises ``UsageError`` if the disk does not take it; an older file is then still whole.
    """
    try:
        write_whole(path, text.encode(), prefix=f".{path.name}.swaleak-")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None


def write_whole(path: Path, data: bytes, prefix: str) -> None:
    """Write ``data`` beside ``path``, under a name with ``prefix``, and rename it into place.

    Raises ``OSError`` if the disk does not take it; an older file is then still whole.
    """
    sweep(path.parent, prefix)
    handle, name = tempfile.mkstemp(prefix=prefix, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:  # a Ctrl-C as well
        Path(name).unlink(missing_ok=True)
        raise


def sweep(folder: Path, prefix: str) -> None:
    """Remove files and folders with ``prefix`` that killed runs have left in ``folder``."""
    for abandoned in folder.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError):  # another run may have swept it
            if time.time() - abandoned.stat().st_mtime <= STALE_SECONDS:
                continue
            if abandoned.is_dir():
                shutil.rmtree(abandoned, ignore_errors=True)
            else:
                abandoned.unlink()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
