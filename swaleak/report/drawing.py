"""A report as it is drawn: what a terminal would show, as SVG or as a page of HTML."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from swaleak.report.report import Report

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 80  # columns of an SVG or HTML picture
FONTS = "ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"
HTML = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="UTF-8">
<meta name="viewport" content="width=device-width">
<title>TITLE</title>
<style>
{stylesheet}
body {{ color: {foreground}; background-color: {background}; margin: 2em; }}
pre {{ font: 15px/1.3 FONTS; }}
</style>
</head>
<body>
<pre><code style="font-family:inherit">{code}</code></pre>
</body>
</html>
""".replace("FONTS", FONTS)


def _recorded(report: Report) -> Console:
    from rich.console import Console

    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    report.print_to(console)
    return console


def as_svg(report: Report) -> str:
    """Return Rich's SVG without the fonts it would fetch from elsewhere."""
    svg = _recorded(report).export_svg(title=f"swaleak {report.command}")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code, monospace", FONTS)


def as_html(report: Report) -> str:
    """Return a page that stands alone."""
    from rich.terminal_theme import SVG_EXPORT_THEME

    page = HTML.replace("TITLE", f"swaleak {report.command}")
    return _recorded(report).export_html(
        theme=SVG_EXPORT_THEME, inline_styles=True, code_format=page
    )
