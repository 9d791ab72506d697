"""Scenario files: TOML on disk, ``Scenario`` in memory. Reading one never imports torch."""

from __future__ import annotations

import io
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from swaleak.errors import ScriptError, UsageError, unknown
from swaleak.script import ops
from swaleak.script.ops import Op, Part

SCHEMA = 1
MAX_SLOTS = 2**31
MAX_PAGE_SIZE = 4096
MAX_STEPS = 100_000
MAX_FILE_BYTES = 8 * 2**20
MAX_DOTS = 10**7  # squares of the dots a line, added up: a key of n parts costs its parser n * n
DEFAULT = "tombstone-recovery"
REACHES = ("production", "latent")
STRATEGIES = ("eager", "deferred", "enqueue", "barrier")
VERDICTS = ("clean", "leak", "corrupt", "refused", "error")
KINDS = ("leak", "lost", "stale", "dangling", "double-free", "reserved", "shared", "misaligned")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run is declared to come out as; what is ``None`` or empty is not declared."""

    verdict: str
    physical: int | None = None
    mapped: int | None = None
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Known:
    """Releases in which SGLang as shipped is known to fail.

    ``fixed``: the first release that does not (else read off ``versions``). ``fix``: the pull
    request that mended it.
    """

    versions: SpecifierSet
    outcome: Outcome
    page_sizes: tuple[int, ...] = ()
    fixed: str | None = None
    fix: str | None = None

    def covers(self, version: str, page_size: int) -> bool:
        """Say whether this failure is known for ``version`` at ``page_size``."""
        sized = not self.page_sizes or page_size in self.page_sizes
        return sized and self.versions.contains(version, prereleases=True)

    @property
    def when(self) -> str:
        """``fixed in 0.5.19``, as far as a release has it."""
        ends = [spec.version for spec in self.versions if spec.operator == "<"]
        fixed = self.fixed or next(iter(ends), None)
        return f"fixed in {fixed}" if fixed else f"known in {self.versions}"

    def __str__(self) -> str:
        """Return ``fixed in 0.5.19, #36381``."""
        return ", ".join([self.when] + ([self.fix] if self.fix else []))


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scripted case. ``full_pages`` and ``swa_pages`` are pool sizes, without page 0."""

    name: str
    title: str
    steps: tuple[Op, ...]
    reach: str = "production"
    story: str = ""
    upstream: tuple[str, ...] = ()
    full_pages: int = 8
    swa_pages: int = 8
    page_sizes: tuple[int, ...] = (1, 4, 256)
    expect: dict[str, Outcome] = field(default_factory=dict)
    known: tuple[Known, ...] = ()
    source: str = ""

    def declared(self, strategy: str) -> Outcome:
        """Return what this scenario declares for one of our strategies."""
        return self.expect.get(strategy) or self.expect.get("every") or Outcome("clean")

    def known_failure(self, version: str | None, page_size: int) -> Known | None:
        """Return what is known to fail here in SGLang ``version`` as shipped."""
        if version is None:
            return None
        return next((known for known in self.known if known.covers(version, page_size)), None)


def check_page_size(size: int) -> None:
    """Raise ``UsageError`` for a page size, in slots, that no pool can have."""
    if not 1 <= size <= MAX_PAGE_SIZE:
        raise UsageError(f"page size {size}: must be from 1 to {MAX_PAGE_SIZE}")


def folder() -> Path:
    """Return the folder of the shipped scenarios: in the wheel, or beside an editable install."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "scenarios"
    return inside if inside.is_dir() else package.parent / "scenarios"


def names() -> list[str]:
    """Return the names in the catalogue, sorted."""
    return sorted(path.stem for path in folder().glob("*.toml"))


def catalogue() -> list[Scenario]:
    """Return every shipped scenario; production ones first, the default one at the top."""
    scenarios = [load(name) for name in names()]
    return sorted(scenarios, key=lambda s: (s.name != DEFAULT, s.reach != "production", s.name))


def load(name: str) -> Scenario:
    """Return a scenario by its name in the catalogue, or by the path of a TOML file.

    Raises ``ScriptError`` with file, step and reason.
    """
    if name.endswith(".toml") or "/" in name:
        path = Path(name)
    elif name in names():
        path = folder() / f"{name}.toml"
    else:
        raise ScriptError(unknown("scenario", name, names()))
    return parse(read_text(path), name=path.stem, source=str(path))


def read_text(path: Path) -> str:
    """Return what a scenario file holds; raises ``ScriptError``."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ScriptError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in its name
        raise ScriptError(f"{str(path)!r}: {error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ScriptError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB, no scenario is")
    if sum(line.count(b".") ** 2 for line in data.splitlines()) > MAX_DOTS:
        raise ScriptError(f"{path}: keys of too many parts, no scenario has them")
    try:
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()
    except UnicodeDecodeError:
        raise ScriptError(f"{path}: not a UTF-8 text file") from None


def parse(text: str, *, name: str, source: str) -> Scenario:
    """Return the scenario that ``text`` (TOML) describes; ``source`` names it in errors."""
    reader = _Reader(source)
    data = reader.data(text)
    return reader.scenario(name, data, reader.steps(data.get("steps")))


_KEYS = ("schema", "title", "upstream", "reach", "story", "steps", "pools", "expect", "known")


class _Reader:
    """Turns tables into frozen data; every complaint names the file and the place in it."""

    def __init__(self, source: str) -> None:
        self.source = source

    def data(self, text: str, *more: str) -> dict[str, Any]:
        try:
            data = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
            raise ScriptError(f"{self.source}: broken TOML: {error}") from None
        self.keys("", data, (*_KEYS, *more))
        if data.get("schema") != SCHEMA:
            raise self.fail("schema", f"this swaleak reads schema = {SCHEMA}")
        return data

    def fail(self, place: str, reason: str) -> ScriptError:
        return ScriptError(
            f"{self.source}: {place}: {reason}" if place else f"{self.source}: {reason}"
        )

    def scenario(self, name: str, data: dict[str, Any], steps: tuple[Op, ...]) -> Scenario:
        pools = self.table(
            "pools", data.get("pools", {}), ("full_pages", "swa_pages", "page_sizes")
        )
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
        table = self.table(place, value, ("verdict", "physical", "mapped", "kinds", *also))
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
        also = ("versions", "page_sizes", "fixed", "fix")
        outcome = self.outcome(place, value, also)
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
        if not isinstance(value, list) or not value:
            raise self.fail("steps", "needs a non-empty array of tables")
        if len(value) > MAX_STEPS:
            raise self.fail("steps", f"{len(value)} steps, at most {MAX_STEPS} are read")
        return value

    def steps(self, value: Any) -> tuple[Op, ...]:
        tables = self.step_tables(value)
        return tuple(self.step(f"step {i}", step) for i, step in enumerate(tables, start=1))

    def first_key(self, place: str, step: Any) -> str:
        if not isinstance(step, dict) or not step:
            raise self.fail(place, "must be a table such as { alloc = 'node' }")
        return str(next(iter(step)))

    def step(self, place: str, step: Any) -> Op:
        key = self.first_key(place, step)
        if key not in _STEPS:
            raise self.fail(place, unknown("operation", key, _STEPS))
        build, extra = _STEPS[key]
        self.keys(place, step, (key, *extra))
        return build(self, place, step)

    def part(self, place: str, step: dict[str, Any]) -> Part | None:
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
        if not isinstance(value, str) or not value or len(value) > 80 or not value.isprintable():
            raise self.fail(place, "needs the name of a node: 1 to 80 printable characters")
        return value

    def source_of(self, place: str, step: dict[str, Any]) -> str:
        if "from" not in step:
            raise self.fail(place, "needs from = NAME")
        return self.name(place, step["from"])

    def count(self, place: str, step: dict[str, Any], key: str, low: int = 1) -> int:
        return self.integer(f"{place}: {key}", step.get(key, 1), low, MAX_SLOTS)

    def expectation(self, place: str, step: dict[str, Any]) -> ops.Expect:
        table = self.table(place, step["expect"], ("physical", "mapped"))
        if not table:
            raise self.fail(place, "expect needs physical, mapped or both")
        return ops.Expect(**{k: self.integer(place, v, 0, MAX_SLOTS) for k, v in table.items()})

    def keys(self, place: str, table: dict[str, Any], allowed: Iterable[str]) -> None:
        allowed = list(allowed)
        for key in table:
            if key not in allowed:
                raise self.fail(place, unknown("key", key, allowed))

    def table(self, place: str, value: Any, allowed: Iterable[str]) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.fail(place, "must be a table")
        self.keys(place, value, allowed)
        return value

    def array(self, place: str, data: dict[str, Any]) -> enumerate[Any]:
        value = data.get(place, [])
        if not isinstance(value, list):
            raise self.fail(place, f"must be an array of tables, [[{place}]]")
        return enumerate(value)

    def text(self, place: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self.fail(place, "must be a string")
        return value.strip()

    def texts(self, place: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise self.fail(place, "must be an array of strings")
        return tuple(self.text(place, item) for item in value)

    def choice(self, place: str, value: Any, known: tuple[str, ...]) -> str:
        if not isinstance(value, str) or value not in known:
            shown = value if isinstance(value, str) else repr(value)
            raise self.fail(place, unknown("value", shown, known))
        return value

    def integer(self, place: str, value: Any, low: int, high: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(place, f"must be a whole number from {low} to {high}")
        return value

    def ints(self, place: str, value: Any, low: int, high: int) -> tuple[int, ...]:
        if not isinstance(value, list) or not value:
            raise self.fail(place, "must be a non-empty array of whole numbers")
        return tuple(dict.fromkeys(self.integer(place, item, low, high) for item in value))


_Build = Callable[[_Reader, str, dict[str, Any]], Op]


def _free(kind: type[ops.FreeOp]) -> tuple[_Build, tuple[str, ...]]:
    def build(reader: _Reader, place: str, step: dict[str, Any]) -> Op:
        return kind(reader.name(place, step[kind.key]), reader.part(place, step))  # type: ignore[return-value]

    return build, ("pages", "slots")


def _pair(
    kind: type[ops.Recover | ops.Adopt | ops.Replace | ops.Overwrite],
) -> tuple[_Build, tuple[str, ...]]:
    def build(reader: _Reader, place: str, step: dict[str, Any]) -> Op:
        node, source = reader.name(place, step[kind.key]), reader.source_of(place, step)
        if node == source:
            raise reader.fail(place, f"{kind.key} {node} from itself makes no sense")
        return kind(node, source)

    return build, ("from",)


def _alloc(reader: _Reader, place: str, step: dict[str, Any]) -> Op:
    return ops.Alloc(reader.name(place, step["alloc"]), reader.count(place, step, "pages"))


def _alloc_tail(reader: _Reader, place: str, step: dict[str, Any]) -> Op:
    pages, tail = reader.count(place, step, "pages"), reader.count(place, step, "tail", low=0)
    if tail > pages:
        raise reader.fail(place, f"tail = {tail} is longer than pages = {pages}")
    return ops.AllocTail(reader.name(place, step["alloc_tail"]), pages, tail)


def _extend(reader: _Reader, place: str, step: dict[str, Any]) -> Op:
    return ops.Extend(reader.name(place, step["extend"]), reader.count(place, step, "tokens"))


def _group(reader: _Reader, place: str, step: dict[str, Any]) -> Op:
    return ops.Group(reader.choice(f"{place}: group", step["group"], ("begin", "end")))


# operation -> how to build it, and the extra keys that it takes
_STEPS: dict[str, tuple[_Build, tuple[str, ...]]] = {
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
