"""What the shell completes: names of scenarios, strategies and targets. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from swaleak.script import catalogue
from swaleak.script.scenario import STRATEGIES as OURS
from swaleak.sglang.release import RELEASES

TARGETS = ("auto", "builtin", "installed", *RELEASES)
STRATEGIES = (*OURS, "shipped")


def scenarios(incomplete: str) -> list[str]:
    """Names in the catalogue, and TOML files."""
    return _names(catalogue.names(), incomplete) + _paths(incomplete, ".toml")


def strategies(incomplete: str) -> list[str]:
    """Short names of strategies."""
    return _names(STRATEGIES, incomplete)


def targets(incomplete: str) -> list[str]:
    """Names of targets, wheels and folders."""
    return _names(TARGETS, incomplete) + _paths(incomplete, ".whl")


def releases(incomplete: str) -> list[str]:
    """Releases of SGLang."""
    return _names(RELEASES, incomplete)


def _names(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _paths(incomplete: str, suffix: str) -> list[str]:
    """Return files of this ending, and folders, once something of a path has been typed."""
    if not incomplete:
        return []
    head, slash, _ = incomplete.rpartition("/")
    try:
        entries = sorted(Path(head + slash or ".").iterdir())
    except OSError:
        return []
    shown = (
        f"{head}{slash}{entry.name}{'/' if entry.is_dir() else ''}"
        for entry in entries
        if entry.is_dir() or entry.suffix == suffix
    )
    return [path for path in shown if path.startswith(incomplete)]
