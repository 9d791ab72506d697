"""Values out of a TOML file, each checked; one of another kind is refused with its place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from swaleak.errors import ScriptError, unknown


class Fields:
    """Checks values of the file ``source``. All raise ``ScriptError`` with file and place."""

    def __init__(self, source: str) -> None:
        self.source = source

    def fail(self, place: str, reason: str) -> ScriptError:
        """Return the error for something that is wrong at ``place``."""
        return ScriptError(
            f"{self.source}: {place}: {reason}" if place else f"{self.source}: {reason}"
        )

    def keys(self, place: str, table: dict[str, Any], allowed: Iterable[str]) -> None:
        """Raise ``ScriptError`` for a key that is not ``allowed``."""
        allowed = list(allowed)
        for key in table:
            if key not in allowed:
                raise self.fail(place, unknown("key", key, allowed))

    def table(self, place: str, value: Any, allowed: Iterable[str]) -> dict[str, Any]:
        """Return a table that has no key but those ``allowed``."""
        if not isinstance(value, dict):
            raise self.fail(place, "must be a table")
        self.keys(place, value, allowed)
        return value

    def array(self, place: str, data: dict[str, Any]) -> enumerate[Any]:
        """Return the tables of the array ``place``, numbered from 0; none if it is not there."""
        value = data.get(place, [])
        if not isinstance(value, list):
            raise self.fail(place, f"must be an array of tables, [[{place}]]")
        return enumerate(value)

    def text(self, place: str, value: Any) -> str:
        """Return a string, without blanks around it."""
        if not isinstance(value, str):
            raise self.fail(place, "must be a string")
        return value.strip()

    def texts(self, place: str, value: Any) -> tuple[str, ...]:
        """Return an array of strings."""
        if not isinstance(value, list):
            raise self.fail(place, "must be an array of strings")
        return tuple(self.text(place, item) for item in value)

    def choice(self, place: str, value: Any, known: tuple[str, ...]) -> str:
        """Return one of the strings that are ``known``."""
        if not isinstance(value, str) or value not in known:
            shown = value if isinstance(value, str) else repr(value)
            raise self.fail(place, unknown("value", shown, known))
        return value

    def integer(self, place: str, value: Any, low: int, high: int) -> int:
        """Return a whole number from ``low`` to ``high``."""
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(place, f"must be a whole number from {low} to {high}")
        return value

    def ints(self, place: str, value: Any, low: int, high: int) -> tuple[int, ...]:
        """Return a non-empty array of whole numbers, each once."""
        if not isinstance(value, list) or not value:
            raise self.fail(place, "must be a non-empty array of whole numbers")
        return tuple(dict.fromkeys(self.integer(place, item, low, high) for item in value))
