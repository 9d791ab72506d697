"""What can go wrong, each with the exit code it ends in. Only ``exits.py`` makes exits of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence


class SwaleakError(Exception):
    """Base of all errors that are meant for the person at the keyboard: one line each."""

    exit_code = 2


class UsageError(SwaleakError):
    """An option or argument that cannot be used."""


class ScriptError(SwaleakError):
    """A scenario or trace that makes no sense: which file, which step, why."""


class TargetError(SwaleakError):
    """A target that exists but cannot be loaded (125, so that ``git bisect run`` skips it)."""

    exit_code = 125


class StandInError(BaseException):
    """SGLang's code has used a name that swaleak does not provide; 125, as ``TargetError``.

    No ``Exception``, or the code that was stopped might go on as if nothing had happened.
    """

    exit_code = 125


class Interrupted(SwaleakError):
    """Somebody has stopped this, and there is nothing yet to show for it.

    ``where``: what it was about, so that somebody knows what hangs.
    """

    exit_code = 130

    def __init__(self, where: str = "") -> None:
        super().__init__(f"interrupted: {where}" if where else "interrupted")


# whatever the code of a target may raise: a result or a sentence, never the end of this program
RAISED = (Exception, SystemExit)


def format_error(error: BaseException) -> str:
    """Return what was raised as one line, ``ValueError: why``."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # the __str__ of somebody else's class
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the sentence for a name nobody knows, with the nearest ones that exist."""
    known = list(known)
    near = [other for other in known if name and other.startswith(name)]
    near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    meant = " or ".join(map(repr, near))
    hint = f"did you mean {meant}?" if near else "known: " + ", ".join(known)
    return f"unknown {kind} {name!r}; {hint}"


_BOUNDS = {"==": "", ">=": "from ", ">": "after ", "<=": "up to ", "<": "before ", "!=": "not "}


def releases_text(specifiers: str) -> str:
    """Return ``from 0.5.18, before 0.5.19`` for ``>=0.5.18,<0.5.19``."""
    bounds = [re.match(r"\s*([=<>!~]+)\s*(\S+)", one) for one in specifiers.split(",")]
    texts = [(_BOUNDS.get(one[1], one[1]), one[2]) for one in bounds if one]
    texts.sort(key=lambda text: (text[0] in ("up to ", "before "), text))
    return ", ".join(word + version for word, version in texts)


_PLURALS = {"is": "are", "was": "were", "has": "have", "it": "them", "maps": "map", "does": "do"}


def plural(word: str, count: float) -> str:
    """Return a word as it agrees with a count: ``page``, ``pages``; ``is``, ``are``."""
    return word if count == 1 else _PLURALS.get(word, f"{word}s")


def counted(count: int, thing: str) -> str:
    """Return ``1 run``, ``2 runs``, ``1,000 runs``."""
    return f"{count:,} {plural(thing, count)}"


def page_list(pages: Sequence[int], most: int = 6) -> str:
    """Return ``page 3`` or ``pages 3, 4``; of a long list the first ones and ``and 9 more``."""
    more = f" and {len(pages) - most} more" if len(pages) > most else ""
    return f"{plural('page', len(pages))} {', '.join(map(str, pages[:most]))}{more}"
