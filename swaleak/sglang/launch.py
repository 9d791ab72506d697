"""Runs a command with the plugin switched on, and finds what its processes recorded."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from swaleak.errors import UsageError
from swaleak.sglang.plugin import VARIABLE, Wish


def record(command: Sequence[str], path: Path, fix: str | None = None) -> tuple[int, list[Path]]:
    """Run ``command`` to its end. Returns its exit code and the traces that were written.

    Raises ``UsageError`` if the command cannot be run, or if nothing was recorded.
    """
    path = path.absolute()
    if "," in str(path):
        raise UsageError(f"-o {path}: {VARIABLE} cannot name a path with a comma in it")
    if not path.parent.is_dir():
        raise UsageError(f"-o {path}: there is no folder {path.parent}")
    before = set(_traces(path))
    wish = Wish(record=str(path), fix=fix)
    try:
        status = subprocess.run(command, env={**os.environ, VARIABLE: str(wish)}).returncode
    except OSError as error:
        raise UsageError(f"{command[0]}: {error.strerror or error}") from None
    written = sorted(set(_traces(path)) - before)
    if not written:
        raise UsageError(
            f"nothing was recorded: no process of `{' '.join(command)}` (exit code {status}) "
            f"built an SWA allocator with this swaleak installed"
        )
    return status if status >= 0 else 128 - status, written


def _traces(path: Path) -> list[Path]:
    return list(path.parent.glob(f"{path.stem}.*{path.suffix}"))
