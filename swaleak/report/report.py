"""Reports as data, and their shapes: a Rich table, Markdown to paste, JSON to read by machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from swaleak import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from swaleak.check.case import Case

STYLES = {
    "clean": "green",
    "leak": "bold red",
    "corrupt": "bold magenta",
    "refused": "yellow",
    "error": "bold red",
}
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but for tabs and line ends
PLAIN = str.maketrans("●○·✗…", "*o.x~")  # for a terminal that knows ASCII only


class Cell(NamedTuple):
    """A piece of text, and the style of a verdict."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table.

    ``right``: the columns that hold numbers. ``series``: one subject a column. ``gap``: blanks
    around a cell.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    right: frozenset[str] = frozenset()
    series: bool = False
    gap: int = 1

    def parts(self, width: int) -> Iterator[Grid]:
        """Yield the table, a series in pieces no wider than ``width`` that repeat column one."""
        if not self.series:
            yield self
            return
        texts = zip(self.columns, *([cell.text for cell in row] for row in self.rows), strict=True)
        widths = [3 + max(len(line) for t in column for line in t.split("\n")) for column in texts]
        start = 1
        while start < len(self.columns):
            stop, room = start + 1, width - widths[0] - widths[start]
            while stop < len(self.columns) and (room := room - widths[stop]) >= 0:
                stop += 1
            yield Grid(
                (self.columns[0], *self.columns[start:stop]),
                tuple((row[0], *row[start:stop]) for row in self.rows),
            )
            start = stop


@dataclass(frozen=True, slots=True)
class Section:
    """A title, a table, what it comes to in one sentence, and lines under it."""

    title: str = ""
    grid: Grid | None = None
    lines: tuple[str, ...] = ()
    moral: Cell | None = None


@dataclass(frozen=True, slots=True)
class About:
    """What was driven: the first line of a report, notes on the targets, torch and device.

    ``patched``: the names of the targets that ``--patch`` has changed.
    """

    header: str
    notes: tuple[str, ...]
    torch: str
    device: str
    patched: frozenset[str] = frozenset()


class Judged(NamedTuple):
    """A case, and whether it passed: None for a baseline, which a patch is only shown beside."""

    case: Case
    passed: bool | None


@dataclass(frozen=True, slots=True)
class Report:
    """Everything one command has to say. ``body``: what the JSON holds besides the envelope.

    ``cases``: the runs of scenarios that it is about; where there are any, ``ok`` is that none of
    them failed.
    """

    command: str
    ok: bool
    header: str
    sections: tuple[Section, ...]
    body: dict[str, Any]
    torch: str | None = None
    device: str | None = None
    cases: tuple[Judged, ...] = field(default=())

    def with_lines(self, lines: Sequence[str]) -> Report:
        """Return the same with more lines before the last one; the JSON has the last of them."""
        if not lines:
            return self
        *first, last = self.sections
        section = replace(last, lines=(*last.lines[:-1], *lines, *last.lines[-1:]))
        return replace(self, sections=(*first, section), body={**self.body, "note": lines[-1]})

    def as_json(self) -> str:
        """Return one JSON object, ``swaleak/1``."""
        envelope = {
            "schema": "swaleak/1",
            "command": self.command,
            "version": __version__,
            "torch": self.torch,
            "device": self.device,
            "ok": self.ok,
        }
        return json.dumps(envelope | self.body, indent=1) + "\n"

    def as_markdown(self) -> str:
        """Return Markdown that can be pasted into a pull request."""
        blocks = [self.header]
        for section in self.sections:
            if section.title:
                blocks.append(f"**{section.title}**")
            if section.grid:
                blocks.append(_markdown_table(section.grid))
            if section.moral:
                blocks.append(section.moral.text)
            if section.lines:
                blocks.append("\n".join(f"- {line}" if line else "" for line in section.lines))
        return visible("\n\n".join(blocks) + "\n")

    def print_to(self, console: Console) -> None:
        """Print tables that are readable at 80 columns and without colour."""
        if console.is_terminal:
            self._print_to(console)
            return
        with console.capture() as captured:
            self._print_to(console)
        # in a file or a pull request, what a table fills its last column with is noise
        lines = captured.get().splitlines(keepends=True)
        console.file.write("".join(f"{line.rstrip()}\n" for line in lines))

    def _print_to(self, console: Console) -> None:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        marks = PLAIN if console.options.ascii_only else {}

        def text(words: str, style: str = "") -> Text:
            return Text(visible(words).translate(marks), style=style)

        console.print(text(self.header, "dim"), soft_wrap=False)
        for section in self.sections:
            console.print()
            if section.title:
                console.print(text(section.title, "bold"))
            for grid in section.grid.parts(console.width) if section.grid else ():
                table = Table(box=box.SIMPLE_HEAD, padding=(0, grid.gap), pad_edge=False)
                for name in grid.columns:
                    justify: Any = "right" if name in grid.right else "left"
                    table.add_column(name, justify=justify, overflow="fold")
                for row in grid.rows:
                    table.add_row(*(text(*cell) for cell in row))
                console.print(table)
            if section.moral:
                console.print(text(*section.moral))
                if section.lines:
                    console.print()
            for line in section.lines:
                console.print(text(line))


def visible(text: str) -> str:
    """Return a text whose control characters are written out: a title is no terminal's program."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _markdown_table(grid: Grid) -> str:
    def line(cells: Iterable[str]) -> str:
        return (
            "| "
            + " | ".join(cell.replace("|", "\\|").replace("\n", "<br>") for cell in cells)
            + " |"
        )

    rules = ("--:" if name in grid.right else "---" for name in grid.columns)
    rows = (line(cell.text for cell in row) for row in grid.rows)
    return "\n".join([line(grid.columns), "| " + " | ".join(rules) + " |", *rows])
