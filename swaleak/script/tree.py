"""Scripts at the level of the radix cache: TOML under ``scenarios/tree/``, ``TreeScenario`` here.

A prompt is a word, one letter a page: ``AB`` is a prompt of two pages, and it shares its first page
with ``AC``. Reading one never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from swaleak.errors import ScriptError, unknown
from swaleak.script.catalogue import folder, read_text
from swaleak.script.ops import Expect, Group, TreeOp
from swaleak.script.read import Reader
from swaleak.script.scenario import MAX_PAGE_SIZE, MAX_SLOTS, Scenario

PREFIX = "tree/"
CACHES = ("swa", "unified")
DEFAULT = "tree/recovery"
MAX_PROMPT = 1000  # pages

TreeStep = TreeOp | Group | Expect


@dataclass(frozen=True, slots=True)
class TreeScenario:
    """A script for a cache.

    ``about``: what it shares with other scenarios, without steps. ``caches``: of ``CACHES``.
    ``window``: the sliding window, in pages.
    """

    about: Scenario
    steps: tuple[TreeStep, ...]
    caches: tuple[str, ...]
    window: int

    def on(self, cache: str) -> Scenario:
        """Return ``about`` under the name that reports show for one cache."""
        return replace(self.about, name=f"{self.about.name}:{cache}")

    @property
    def shown(self) -> Scenario:
        """Return ``about`` with these steps, to be listed and shown; no allocator plays them."""
        return replace(self.about, steps=cast(Any, self.steps))


def is_tree(name: str) -> bool:
    """Say whether a name given on the command line means one of these."""
    return name.startswith(PREFIX) or "/tree/" in name


def names() -> list[str]:
    """Return the names in the catalogue, sorted."""
    return sorted(f"{PREFIX}{path.stem}" for path in (folder() / "tree").glob("*.toml"))


def catalogue() -> list[TreeScenario]:
    """Return every shipped script, the default one first."""
    return [load(name) for name in sorted(names(), key=lambda name: (name != DEFAULT, name))]


def load(name: str) -> TreeScenario:
    """Return a script by its name in the catalogue, or by the path of a TOML file.

    Raises ``ScriptError`` with file, step and reason.
    """
    if name.endswith(".toml"):
        path = Path(name)
    elif name in names():
        path = folder() / f"{name}.toml"
    else:
        raise ScriptError(unknown("scenario", name, names()))
    return parse(read_text(path), name=f"{PREFIX}{path.stem}", source=str(path))


def parse(text: str, *, name: str, source: str) -> TreeScenario:
    """Return the script that ``text`` (TOML) describes; ``source`` names it in errors."""
    reader = _TreeReader(source)
    data = reader.data(text, "caches", "window")
    caches = reader.texts("caches", data.get("caches", list(CACHES)))
    for cache in caches:
        reader.choice("caches", cache, CACHES)
    window = reader.integer("window", data.get("window", 1), 1, MAX_SLOTS // MAX_PAGE_SIZE)
    steps = reader.tree_steps(data.get("steps"))
    # the rest is written as in every scenario; these have page sizes that a test can afford
    if isinstance(pools := data.setdefault("pools", {}), dict):
        pools.setdefault("page_sizes", [1, 4])
    return TreeScenario(reader.scenario(name, data, steps=()), steps, caches, window)


class _TreeReader(Reader):
    def tree_steps(self, value: Any) -> tuple[TreeStep, ...]:
        steps = tuple(
            self.tree_step(f"step {i}", step)
            for i, step in enumerate(self.step_tables(value), start=1)
        )
        locked: list[str] = []
        for i, step in enumerate(steps, start=1):
            if isinstance(step, TreeOp) and step.key == "lock":
                locked.append(str(step.what))
            elif isinstance(step, TreeOp) and step.key == "unlock":
                if step.what not in locked:
                    raise self.fail(f"step {i}", f"{step.what!r} is not locked at this point")
                locked.remove(str(step.what))
        return steps

    def tree_step(self, place: str, step: Any) -> TreeStep:
        key = self.first_key(place, step)
        if key not in STEPS:
            raise self.fail(place, unknown("operation", key, STEPS))
        self.keys(place, step, (key,))
        return STEPS[key](self, place, key, step[key])

    def prompt(self, place: str, key: str, value: Any) -> TreeOp:
        good = isinstance(value, str) and value.isalpha() and value.isascii()
        if not good or len(value) > MAX_PROMPT:
            raise self.fail(place, f'{key} needs a prompt: letters, one a page, such as "AB"')
        return TreeOp(key, value)

    def pages(self, place: str, key: str, value: Any) -> TreeOp:
        return TreeOp(key, self.integer(f"{place}: {key}", value, 1, MAX_SLOTS // MAX_PAGE_SIZE))

    def edge(self, place: str, key: str, value: Any) -> Group:
        return Group(self.choice(f"{place}: {key}", value, ("begin", "end")))

    def counts(self, place: str, key: str, value: Any) -> Expect:
        return self.expectation(place, {key: value})


STEPS: dict[str, Callable[[_TreeReader, str, str, Any], TreeStep]] = {
    "alloc": _TreeReader.prompt,
    "insert": _TreeReader.prompt,
    "match": _TreeReader.prompt,
    "lock": _TreeReader.prompt,
    "unlock": _TreeReader.prompt,
    "evict_swa": _TreeReader.pages,
    "evict_full": _TreeReader.pages,
    "group": _TreeReader.edge,
    "expect": _TreeReader.counts,
}
