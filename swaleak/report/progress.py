"""How far a search or a measurement is: on standard error, if that is a terminal, while it runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from swaleak.errors import counted
from swaleak.explorer.breadth_first import Progress
from swaleak.explorer.random_walk import Walks

if TYPE_CHECKING:
    from swaleak.benchmark.measure import Round

REFRESH_SECONDS = 0.1
CLEAR = "\r\x1b[2K"


class ProgressLine:
    """One line on a terminal that says how far a search is, and is gone afterwards.

    Where ``file`` is no terminal, nothing is written.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self.file = file or sys.stderr
        self.shown = self.file.isatty()
        self.last = 0.0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self._write("")

    def show(self, progress: Progress | Walks) -> None:
        """Show how far the search is, if that was not done a moment ago."""
        self.show_text(progress_text(progress))

    def show_bytes(self, read: int, total: int) -> None:
        """Show how much of a file has been read."""
        self.show_text(f"{read >> 20:,} of {total >> 20:,} MiB, {100 * read // max(1, total)} %")

    def show_text(self, text: str) -> None:
        """Show a text, if none was shown a moment ago."""
        now = time.monotonic()
        if self.shown and now - self.last >= REFRESH_SECONDS:
            self.last = now
            self._write(text[:79])

    def _write(self, text: str) -> None:
        if self.shown:
            self.file.write(CLEAR + text)
            self.file.flush()


def progress_text(progress: Progress | Walks) -> str:
    """Return the line, without its end."""
    seconds = max(progress.seconds, 1e-9)
    if isinstance(progress, Progress):
        states = counted(progress.states, "state")
        transitions = counted(progress.transitions, "transition")
        rate = progress.transitions / seconds
        return f"depth {progress.depth}: {states}, {transitions}, {rate:,.0f}/s"
    scripts, steps = counted(progress.scripts, "script"), counted(progress.steps, "step")
    return f"{scripts}, {steps}, {progress.steps / seconds:,.0f}/s"


def with_bar(rounds: Iterator[Round]) -> Iterator[Round]:
    """Pass ``rounds`` on, with a bar and the time left on stderr if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console, drawn = Console(stderr=True), 0.0
    hidden = not console.is_terminal
    # no thread of its own: it would run beside what is measured
    with Progress(console=console, auto_refresh=False, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=None)
        for one in rounds:
            if time.monotonic() - drawn > REFRESH_SECONDS:
                case = str(one.case)
                bar.update(
                    task, description=case, completed=one.done, total=one.total, refresh=True
                )
                drawn = time.monotonic()
            yield one
