"""How far a search or a measurement is: on standard error, if that is a terminal, while it runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from swaleak.search.explore import Progress
from swaleak.search.fuzz import Played
from swaleak.words import counted

if TYPE_CHECKING:
    from swaleak.benchmark.measure import Round

EVERY = 0.1  # seconds between two looks at the progress line
CLEAR = "\r\x1b[2K"
REFRESH = 0.2  # seconds between two looks of the bar; it draws between rounds only


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self.shown:
            self.file.write(CLEAR)
            self.file.flush()

    def show(self, progress: Progress | Played) -> None:
        """Show how far the search is, if that was not done a moment ago."""
        now = time.monotonic()
        if self.shown and now - self.last >= EVERY:
            self.last = now
            self.file.write(CLEAR + progress_text(progress)[:79])
            self.file.flush()


def progress_text(progress: Progress | Played) -> str:
    """Return the line, without its end."""
    if isinstance(progress, Progress):
        rate = progress.transitions / max(progress.seconds, 1e-9)
        return (
            f"depth {progress.depth}: {counted(progress.states, 'state')}, "
            f"{counted(progress.transitions, 'transition')}, {rate:,.0f}/s"
        )
    rate = progress.operations / max(progress.seconds, 1e-9)
    scripts, operations = (
        counted(progress.scripts, "script"),
        counted(progress.operations, "operation"),
    )
    return f"{scripts}, {operations}, {rate:,.0f}/s"


def with_bar(rounds: Iterator[Round]) -> Iterator[Round]:
    """Pass ``rounds`` on, with a bar and the time left on stderr if that is a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        yield from rounds
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    # no thread of its own: it would run beside what is measured
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task, drawn = bar.add_task("", total=None), 0.0
        for one in rounds:
            if time.monotonic() - drawn > REFRESH:
                bar.update(
                    task,
                    description=str(one.case),
                    completed=one.done,
                    total=one.total,
                    refresh=True,
                )
                drawn = time.monotonic()
            yield one
