"""Runs a command with the plugin switched on, and finds what its processes recorded."""

from __future__ import annotations

import glob
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from swaleak.errors import UsageError
from swaleak.live.plugin import VARIABLE, Settings

STOPS = (signal.SIGINT, signal.SIGTERM)


def record(command: Sequence[str], path: Path, fix: str | None = None) -> tuple[int, list[Path]]:
    """Run ``command`` to its end. Returns its exit code and the traces that were written.

    Ctrl-C and SIGTERM stop the command, not this: there is a report to come. Raises
    ``UsageError`` if the command cannot be run, or if nothing was recorded.
    """
    path = path.absolute()
    if "," in str(path):
        raise UsageError(f"-o {path}: {VARIABLE} cannot name a path with a comma in it")
    if not path.parent.is_dir():
        raise UsageError(f"-o {path}: there is no folder {path.parent}")
    before = set(_traces(path))
    settings = Settings(record=str(path), fix=fix)
    try:
        status = _run(command, {**os.environ, VARIABLE: str(settings)})
    except OSError as error:
        raise UsageError(f"{command[0]}: {error.strerror or error}") from None
    written = sorted(set(_traces(path)) - before)
    if not written:
        raise UsageError(
            f"nothing was recorded: no process of `{' '.join(command)}` (exit code {status}) "
            f"built an SWA allocator with this swaleak installed"
        )
    return status, written


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    """Return the exit code of ``command``, as a shell gives it.

    What should stop this process stops the command, in its own time; what comes a second time
    kills it. Raises ``OSError`` if it cannot be run.
    """
    asked: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def stop(number: int, _frame: object) -> None:
        again = number in asked
        asked.append(number)
        if child is None:  # not there yet: below
            return
        if again:
            child.kill()
        elif number != signal.SIGINT or not _in_foreground():
            child.send_signal(number)

    # what is ignored, as in a background job of a script, stays ignored
    before = {number: signal.getsignal(number) for number in STOPS}
    heard = [number for number in STOPS if before[number] is not signal.SIG_IGN]
    for number in heard:
        signal.signal(number, stop)
    try:
        child = subprocess.Popen(command, env=environment)
        for early in list(asked):
            child.send_signal(early)
        status = child.wait()
    finally:
        for number in heard:
            signal.signal(number, before[number])
    return status if status >= 0 else 128 - status


def _in_foreground() -> bool:
    """Whether a terminal's Ctrl-C reaches this process's group, the command with it.

    It must not hear it twice: to a server the second one means "at once".
    """
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)


def _traces(path: Path) -> list[Path]:
    stem, suffix = glob.escape(path.stem), glob.escape(path.suffix)
    return list(path.parent.glob(f"{stem}.*{suffix}"))
