"""Scenario file -> scenario. Whatever makes no sense is refused with file, place and reason."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from swaleak.errors import ScriptError, unknown
from swaleak.script import ops
from swaleak.script.fields import Fields
from swaleak.script.ops import Op, Part
from swaleak.script.scenario import (
    KINDS,
    MAX_PAGE_SIZE,
    MAX_SLOTS,
    MAX_STEPS,
    REACHES,
    SCHEMA,
    STRATEGIES,
    VERDICTS,
    Known,
    Outcome,
    Scenario,
)


def parse(text: str, *, name: str, source: str) -> Scenario:
    """Return the scenario that ``text`` (TOML) describes; ``source`` names it in errors."""
    reader = Reader(source)
    data = reader.data(text)
    return reader.scenario(name, data, reader.steps(data.get("steps")))


# what docs/scenarios.md lists, table by table
KEYS = ("schema", "title", "upstream", "reach", "story", "steps", "pools", "expect", "known")
POOL_KEYS = ("full_pages", "swa_pages", "page_sizes")
OUTCOME_KEYS = ("verdict", "physical", "mapped", "kinds")
KNOWN_KEYS = ("versions", "page_sizes", "fixed", "fix")


class Reader(Fields):
    """Turns tables into frozen data; every complaint names the file and the place in it."""

    def data(self, text: str, *more: str) -> dict[str, Any]:
        """Return the tables of a file. ``more``: keys that it alone may have."""
        try:
            data = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
            raise ScriptError(f"{self.source}: broken TOML: {error}") from None
        self.keys("", data, (*KEYS, *more))
        if data.get("schema") != SCHEMA:
            raise self.fail("schema", f"this swaleak reads schema = {SCHEMA}")
        return data

    def scenario(self, name: str, data: dict[str, Any], steps: tuple[Op, ...]) -> Scenario:
        """Return the scenario of these tables, with ``steps``."""
        pools = self.table("pools", data.get("pools", {}), POOL_KEYS)
        sizes = self.ints(
            "pools.page_sizes", pools.get("page_sizes", [1, 4, 256]), 1, MAX_PAGE_SIZE
        )
        limit = MAX_SLOTS // max(sizes)
        expect = self.table("expect", data.get("expect", {}), (*STRATEGIES, "every"))
        return Scenario(
            name=name,
            title=self.text("title", data.get("title", name)),
            steps=steps,
            reach=self.choice("reach", data.get("reach", "production"), REACHES),
            story=self.text("story", data.get("story", "")),
            upstream=self.texts("upstream", data.get("upstream", [])),
            full_pages=self.integer("pools.full_pages", pools.get("full_pages", 8), 1, limit),
            swa_pages=self.integer("pools.swa_pages", pools.get("swa_pages", 8), 1, limit),
            page_sizes=sizes,
            expect={k: self.outcome(f"expect.{k}", v) for k, v in expect.items()},
            known=tuple(self.known(f"known[{i}]", k) for i, k in self.array("known", data)),
            source=self.source,
        )

    def outcome(self, place: str, value: Any, also: tuple[str, ...] = ()) -> Outcome:
        """Return a table as an outcome. ``also``: keys it may have besides an outcome's."""
        table = self.table(place, value, (*OUTCOME_KEYS, *also))
        counts = {
            key: None
            if key not in table
            else self.integer(f"{place}.{key}", table[key], 0, MAX_SLOTS)
            for key in ("physical", "mapped")
        }
        kinds = self.texts(f"{place}.kinds", table.get("kinds", []))
        for kind in kinds:
            self.choice(f"{place}.kinds", kind, KINDS)
        verdict = self.choice(f"{place}.verdict", table.get("verdict"), VERDICTS)
        return Outcome(verdict, counts["physical"], counts["mapped"], kinds)

    def known(self, place: str, value: Any) -> Known:
        """Return a table of ``known``."""
        outcome = self.outcome(place, value, KNOWN_KEYS)
        try:
            versions = SpecifierSet(self.text(f"{place}.versions", value.get("versions")))
        except InvalidSpecifier as error:
            raise self.fail(f"{place}.versions", str(error)) from None
        sizes = value.get("page_sizes")
        notes = {k: self.text(f"{place}.{k}", value[k]) for k in ("fixed", "fix") if k in value}
        return Known(
            versions,
            outcome,
            () if sizes is None else self.ints(f"{place}.page_sizes", sizes, 1, MAX_PAGE_SIZE),
            **notes,
        )

    def step_tables(self, value: Any) -> list[Any]:
        """Return the array of steps, each still to be looked at."""
        if not isinstance(value, list) or not value:
            raise self.fail("steps", "needs a non-empty array of tables")
        if len(value) > MAX_STEPS:
            raise self.fail("steps", f"{len(value)} steps, at most {MAX_STEPS} are read")
        return value

    def steps(self, value: Any) -> tuple[Op, ...]:
        """Return the operations of a script."""
        tables = self.step_tables(value)
        return tuple(self.step(f"step {i}", step) for i, step in enumerate(tables, start=1))

    def first_key(self, place: str, step: Any) -> str:
        """Return the first key of a step: its operation."""
        if not isinstance(step, dict) or not step:
            raise self.fail(place, "must be a table such as { alloc = 'node' }")
        return str(next(iter(step)))

    def step(self, place: str, step: Any) -> Op:
        """Return one operation."""
        key = self.first_key(place, step)
        if key not in STEPS:
            raise self.fail(place, unknown("operation", key, STEPS))
        build, extra = STEPS[key]
        self.keys(place, step, (key, *extra))
        return build(self, place, step)

    def part(self, place: str, step: dict[str, Any]) -> Part | None:
        """Return which part of a node a step names, None for all of it."""
        units = [unit for unit in ("pages", "slots") if unit in step]
        if not units:
            return None
        if len(units) == 2:
            raise self.fail(place, "takes pages or slots, not both")
        unit = units[0]
        bounds = step[unit].split(":") if isinstance(step[unit], str) else []
        try:
            start, stop = (int(bound) if bound.strip() else None for bound in bounds)
        except ValueError:
            raise self.fail(place, f'{unit} must be a slice such as "0:1" or "-1:"') from None
        return Part(unit, start, stop)

    def name(self, place: str, value: Any) -> str:
        """Return the name of a node."""
        if not isinstance(value, str) or not value or len(value) > 80 or not value.isprintable():
            raise self.fail(place, "needs the name of a node: 1 to 80 printable characters")
        return value

    def source_of(self, place: str, step: dict[str, Any]) -> str:
        """Return the node that a step takes from."""
        if "from" not in step:
            raise self.fail(place, "needs from = NAME")
        return self.name(place, step["from"])

    def count(self, place: str, step: dict[str, Any], key: str, low: int = 1) -> int:
        """Return the number under ``key``, 1 if it is not there."""
        return self.integer(f"{place}: {key}", step.get(key, 1), low, MAX_SLOTS)

    def expectation(self, place: str, step: dict[str, Any]) -> ops.Expect:
        """Return the counts that a step expects."""
        table = self.table(place, step["expect"], ("physical", "mapped"))
        if not table:
            raise self.fail(place, "expect needs physical, mapped or both")
        return ops.Expect(**{k: self.integer(place, v, 0, MAX_SLOTS) for k, v in table.items()})


_Build = Callable[[Reader, str, dict[str, Any]], Op]


def _free(kind: type[ops.Free | ops.FreeSwa | ops.FreeFull]) -> tuple[_Build, tuple[str, ...]]:
    def build(reader: Reader, place: str, step: dict[str, Any]) -> Op:
        return kind(reader.name(place, step[kind.key]), reader.part(place, step))

    return build, ("pages", "slots")


def _pair(
    kind: type[ops.Recover | ops.Adopt | ops.Replace | ops.Overwrite],
) -> tuple[_Build, tuple[str, ...]]:
    def build(reader: Reader, place: str, step: dict[str, Any]) -> Op:
        node, source = reader.name(place, step[kind.key]), reader.source_of(place, step)
        if node == source:
            raise reader.fail(place, f"{kind.key} {node} from itself makes no sense")
        return kind(node, source)

    return build, ("from",)


def _alloc(reader: Reader, place: str, step: dict[str, Any]) -> Op:
    return ops.Alloc(reader.name(place, step["alloc"]), reader.count(place, step, "pages"))


def _alloc_tail(reader: Reader, place: str, step: dict[str, Any]) -> Op:
    pages, tail = reader.count(place, step, "pages"), reader.count(place, step, "tail", low=0)
    if tail > pages:
        raise reader.fail(place, f"tail = {tail} is longer than pages = {pages}")
    return ops.AllocTail(reader.name(place, step["alloc_tail"]), pages, tail)


def _extend(reader: Reader, place: str, step: dict[str, Any]) -> Op:
    return ops.Extend(reader.name(place, step["extend"]), reader.count(place, step, "tokens"))


def _group(reader: Reader, place: str, step: dict[str, Any]) -> Op:
    return ops.Group(reader.choice(f"{place}: group", step["group"], ("begin", "end")))


# operation -> how to build it, and the extra keys that it takes
STEPS: dict[str, tuple[_Build, tuple[str, ...]]] = {
    "alloc": (_alloc, ("pages",)),
    "alloc_tail": (_alloc_tail, ("pages", "tail")),
    "extend": (_extend, ("tokens",)),
    "decode": (lambda r, at, step: ops.Decode(r.name(at, step["decode"])), ()),
    **{kind.key: _free(kind) for kind in ops.FREES},
    **{kind.key: _pair(kind) for kind in ops.PAIRS},
    "load_back": (lambda r, at, step: ops.LoadBack(r.name(at, step["load_back"])), ()),
    "group": (_group, ()),
    "expect": (lambda r, at, step: r.expectation(at, step), ()),
}
