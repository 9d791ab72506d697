"""The steps of a scenario of caches or requests: the cache makes the calls, they lower to none."""

from __future__ import annotations

from typing import Any

import msgspec

from swaleak.scenario.calls import MAX_PAGE_SIZE, MAX_SLOTS
from swaleak.scenario.request_steps import MAX_PROMPT_PAGES, REQUEST_STEPS
from swaleak.scenario.steps import Expect, Group, Step

LETTER_STEPS = ("alloc", "insert", "match", "lock", "unlock")
PAGE_STEPS = ("evict_swa", "evict_full")


class CacheStep(Step, frozen=True):
    """A step of a cache's scenario: the cache makes the calls, so it lowers to none.

    ``value``: a prompt, one letter per page, so that ``AB`` and ``AC`` share their first page; or a
    number of pages to evict.
    """

    value: str | int

    def nonsense(self) -> str | None:
        value = self.value
        if isinstance(value, int):
            in_range = 1 <= value <= MAX_SLOTS // MAX_PAGE_SIZE
            return None if in_range else f"{self.key}: must be a whole number from 1"
        if value.isalpha() and value.isascii() and len(value) <= MAX_PROMPT_PAGES:
            return None
        return f'{self.key} needs a prompt: letters, one per page, such as "AB"'

    def __str__(self) -> str:
        if isinstance(self.value, int):
            return f"{self.key} {self.value} page{'' if self.value == 1 else 's'}"
        return f"{self.key} {self.value}"


def _cache_step(key: str, kind: type) -> type[Any]:
    """Return the class of a cache's step, whose value stands under its name."""
    name = "".join(word.capitalize() for word in key.split("_"))
    return msgspec.defstruct(
        f"Cache{name}",
        [("value", kind, msgspec.field(name=key))],
        bases=(CacheStep,),
        namespace={"key": key},
        frozen=True,
    )


CACHE_STEPS: dict[str, type[Any]] = {
    **{key: _cache_step(key, str) for key in LETTER_STEPS},
    **{key: _cache_step(key, int) for key in PAGE_STEPS},
    **REQUEST_STEPS,
    "group": Group,
    "expect": Expect,
}
