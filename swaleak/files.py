"""Files that are whole or absent, whenever this process is killed."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
import time
from pathlib import Path

STALE = 24 * 3600  # seconds after which what a killed run has left is swept up


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
            if time.time() - abandoned.stat().st_mtime <= STALE:
                continue
            if abandoned.is_dir():
                shutil.rmtree(abandoned, ignore_errors=True)
            else:
                abandoned.unlink()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
