"""Pieces of sentences that engines and reports both need."""

from __future__ import annotations

from collections.abc import Sequence


def numbers(pages: Sequence[int], most: int = 6) -> str:
    """Return ``1, 2``, and of a long list the first ones and ``and 9 more``."""
    more = f" and {len(pages) - most} more" if len(pages) > most else ""
    return ", ".join(map(str, pages[:most])) + more


def named(pages: Sequence[int]) -> str:
    """Return ``page 3``, or ``pages 3, 4``; a long list as ``numbers`` has it."""
    return f"page{'s' if len(pages) > 1 else ''} {numbers(pages)}"


def counted(number: int, thing: str) -> str:
    """Return ``1 run``, ``2 runs``, ``1,000 runs``."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")
