"""Scenario files: a script, the pools it is for, and what is declared to come of it.

Reading one never imports torch. Whatever makes no sense is refused with file, place and reason.
"""

from __future__ import annotations

import json
import re
import textwrap
import tomllib
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from swaleak.errors import ScriptError, UsageError, releases_text, unknown
from swaleak.scenario.cache_steps import CACHE_STEPS, CacheStep
from swaleak.scenario.calls import MAX_PAGE_SIZE, MAX_SLOTS, Count, PageSize
from swaleak.scenario.contract import CONTRACTS
from swaleak.scenario.steps import STEPS, FreeStep, FromZero, Step

SCHEMA = 1
MAX_STEPS = 100_000
STRATEGIES = ("eager", "deferred", "enqueue", "barrier")
CACHES = ("swa", "unified")
VERDICTS = ("clean", "leak", "corrupt", "refused", "error")
ALLOCATOR, CACHE, CALLER = FAULTS = ("allocator", "cache", "caller")
KINDS = (
    *("leak", "lost", "stale", "dangling", "double-free", "reserved", "shared", "misaligned"),
    *("stolen", "miscounted"),
    *("freed-twice", "not-owned", "overwritten", "orphaned"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run is declared to come out as; what is ``None`` or empty is not declared.

    ``versions``: the releases whose cache brings it about; None for all.
    """

    verdict: str
    physical: int | None = None
    mapped: int | None = None
    kinds: tuple[str, ...] = ()
    versions: SpecifierSet | None = None

    def covers(self, version: str | None) -> bool:
        """Whether it is declared of an allocator below SGLang ``version``."""
        return not (self.versions and version) or self.versions.contains(version, prereleases=True)


@dataclass(frozen=True, slots=True)
class Known:
    """Releases in which SGLang as shipped is known to fail.

    ``fixed``: the first release that does not (else read off ``versions``). ``fix``: the pull
    request that mended it. ``fault``: whose it is; a fault of the cache (``cache``) is there with
    every strategy.
    """

    versions: SpecifierSet
    outcome: Outcome
    page_sizes: tuple[int, ...] = ()
    fixed: str | None = None
    fix: str | None = None
    fault: str = "allocator"

    def covers(self, version: str, page_size: int) -> bool:
        """Say whether this failure is known for ``version`` at ``page_size``."""
        sized = not self.page_sizes or page_size in self.page_sizes
        return sized and self.versions.contains(version, prereleases=True)

    @property
    def when(self) -> str:
        """``fixed in 0.5.19``, as far as a release has it."""
        ends = [spec.version for spec in self.versions if spec.operator == "<"]
        fixed = self.fixed or next(iter(ends), None)
        if fixed:
            return f"fixed in {fixed}"
        return f"known {'in ' if self.releases[:1].isdigit() else ''}{self.releases}"

    @property
    def releases(self) -> str:
        """``from 0.5.18, before 0.5.19``, or ``0.5.18``."""
        return releases_text(str(self.versions))

    def __str__(self) -> str:
        return ", ".join([self.when] + ([self.fix] if self.fix else []))


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scripted case. ``full_pages`` and ``swa_pages`` are pool sizes, without page 0.

    ``caches``: the radix caches that the script is for; it is an allocator's if there are none.
    ``window``: the sliding window of a cache, in pages; ``window_tokens``: in tokens, if it is not
    whole pages. ``eagle``: the cache's keys are pairs of tokens, as with EAGLE.
    """

    name: str
    title: str
    steps: tuple[Step, ...]
    reach: str = "production"
    story: str = ""
    upstream: tuple[str, ...] = ()
    full_pages: int = 8
    swa_pages: int = 8
    page_sizes: tuple[int, ...] = (1, 4, 256)
    expect: dict[str, Outcome] = field(default_factory=dict)
    known: tuple[Known, ...] = ()
    source: str = ""
    caches: tuple[str, ...] = ()
    window: int = 1
    window_tokens: int | None = None
    eagle: bool = False

    def declared(self, strategy: str, version: str | None = None) -> Outcome:
        """Return what this scenario declares for one of our strategies on SGLang ``version``."""
        for key in (strategy, "every"):
            outcome = self.expect.get(key)
            if outcome and outcome.covers(version):
                return outcome
        return Outcome("clean")

    def known_failure(self, version: str | None, page_size: int) -> Known | None:
        """Return what is known to fail here in SGLang ``version`` as shipped."""
        if version is None:
            return None
        return next((known for known in self.known if known.covers(version, page_size)), None)

    def on(self, cache: str) -> Scenario:
        """Return it under the name that reports show for one cache."""
        return replace(self, name=f"{self.name}:{cache}")


def check_page_size(size: int) -> None:
    """Raise ``UsageError`` for a page size, in slots, that no pool can have."""
    if not 1 <= size <= MAX_PAGE_SIZE:
        raise UsageError(f"page size {size}: must be from 1 to {MAX_PAGE_SIZE}")


# the tables of a file, as msgspec checks them; docs/scenarios.md lists their keys
PageSizes = Annotated[list[PageSize], Meta(min_length=1)]


class PoolsTable(Struct, forbid_unknown_fields=True):
    """``[pools]``."""

    full_pages: Count = 8
    swa_pages: Count = 8
    page_sizes: PageSizes | None = None


class OutcomeTable(Struct, forbid_unknown_fields=True):
    """An outcome."""

    verdict: str
    physical: FromZero | None = None
    mapped: FromZero | None = None
    kinds: list[str] = []


class ExpectTable(OutcomeTable, forbid_unknown_fields=True, kw_only=True):
    """An outcome in ``[expect]``."""

    versions: str | None = None


class KnownTable(OutcomeTable, forbid_unknown_fields=True, kw_only=True):
    """One of ``[[known]]``."""

    versions: str
    page_sizes: PageSizes | None = None
    fixed: str | None = None
    fix: str | None = None
    fault: str = "allocator"


class FileTable(Struct, forbid_unknown_fields=True):
    """The file."""

    schema: Any = None
    title: str | None = None
    upstream: list[str] = []
    reach: str = "production"
    story: str = ""
    caches: list[str] | None = None
    window: Count = 1
    window_tokens: Count | None = None
    eagle: bool = False
    steps: Any = None
    pools: dict[str, Any] = {}
    expect: dict[str, Any] = {}
    known: list[Any] = []


T = TypeVar("T")


def parse(text: str, *, name: str, source: str) -> Scenario:
    """Return the scenario that ``text`` (TOML) describes; ``source`` is the file in errors."""
    return _Reader(source).scenario(name, text)


class _Reader:
    """Turns tables into frozen data; every error has the file and the place in it."""

    def __init__(self, source: str) -> None:
        self.source = source

    def fail(self, place: str, reason: str) -> ScriptError:
        place = f"{place}: " if place else ""
        return ScriptError(f"{self.source}: {place}{reason}")

    def table(self, place: str, value: Any, kind: type[T]) -> T:
        """Return a table as ``kind``, whatever is wrong with it in one sentence."""
        if not isinstance(value, dict):
            raise self.fail(place, "must be a table")
        known = list(kind.__struct_encode_fields__)  # type: ignore[attr-defined]
        for key in value:
            if key not in known:
                raise self.fail(place, unknown("key", key, known))
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            where, reason = explain(str(error))
            dot = ": " if " " in place else "."  # "step 2" is no key
            raise self.fail(dot.join(filter(None, (place, where))), reason) from None

    def choice(self, place: str, value: str, known: tuple[str, ...]) -> str:
        if value not in known:
            raise self.fail(place, unknown("value", value, known))
        return value

    def scenario(self, name: str, text: str) -> Scenario:
        try:
            data = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
            raise self.fail("", f"broken TOML: {error}") from None
        file = self.table("", data, FileTable)
        if file.schema != SCHEMA:
            raise self.fail("schema", f"this swaleak reads schema = {SCHEMA}")
        pools = self.table("pools", file.pools, PoolsTable)
        asked = _of_caches(file) if file.caches is None else file.caches
        caches = tuple(self.choice("caches", cache, CACHES) for cache in asked)
        default = [1, 4] if caches else [1, 4, 256]  # caches: what a test can afford
        page_sizes = tuple(dict.fromkeys(pools.page_sizes or default))
        for key in ("full_pages", "swa_pages"):
            if getattr(pools, key) * max(page_sizes) > MAX_SLOTS:
                raise self.fail(f"pools.{key}", f"over the limit of {MAX_SLOTS} slots per pool")
        for strategy in file.expect:
            if strategy not in (*STRATEGIES, "every"):
                reason = unknown("key", strategy, (*STRATEGIES, "every"))
                raise self.fail("expect", reason)
        steps = self.steps(file.steps, CACHE_STEPS if caches else STEPS)
        return Scenario(
            name=name,
            title=(name if file.title is None else file.title).strip(),
            steps=steps,
            reach=self.choice("reach", file.reach, CONTRACTS),
            story=file.story.strip(),
            upstream=tuple(item.strip() for item in file.upstream),
            full_pages=pools.full_pages,
            swa_pages=pools.swa_pages,
            page_sizes=page_sizes,
            expect={
                key: self.expected(f"expect.{key}", value) for key, value in file.expect.items()
            },
            known=tuple(self.known(f"known[{at}]", value) for at, value in enumerate(file.known)),
            source=self.source,
            caches=caches,
            window=file.window,
            window_tokens=file.window_tokens,
            eagle=file.eagle,
        )

    def outcome(self, place: str, table: OutcomeTable) -> Outcome:
        for kind in table.kinds:
            self.choice(f"{place}.kinds", kind, KINDS)
        verdict = self.choice(f"{place}.verdict", table.verdict, VERDICTS)
        return Outcome(verdict, table.physical, table.mapped, tuple(table.kinds))

    def expected(self, place: str, value: Any) -> Outcome:
        table = self.table(place, value, ExpectTable)
        outcome = self.outcome(place, table)
        if table.versions is None:
            return outcome
        return replace(outcome, versions=self.versions(place, table.versions))

    def versions(self, place: str, text: str) -> SpecifierSet:
        try:
            return SpecifierSet(text)
        except InvalidSpecifier:
            raise self.fail(f"{place}.versions", _not_a_range(text)) from None

    def known(self, place: str, value: Any) -> Known:
        table = self.table(place, value, KnownTable)
        outcome = self.outcome(place, table)
        versions = self.versions(place, table.versions)
        fault = self.choice(f"{place}.fault", table.fault, (ALLOCATOR, CACHE))
        sizes = tuple(table.page_sizes or ())
        return Known(versions, outcome, sizes, table.fixed, table.fix, fault)

    def steps(self, value: Any, known: dict[str, type[Any]]) -> tuple[Step, ...]:
        if not isinstance(value, list) or not value:
            raise self.fail("steps", "needs a non-empty array of tables")
        if len(value) > MAX_STEPS:
            raise self.fail("steps", f"{len(value)} steps, at most {MAX_STEPS} are read")
        steps = [self.step(f"step {at}", step, known) for at, step in enumerate(value, start=1)]
        locked: list[str] = []
        for at, step in enumerate(steps, start=1):
            if isinstance(step, CacheStep) and step.key == "lock":
                locked.append(str(step.value))
            elif isinstance(step, CacheStep) and step.key == "unlock":
                if step.value not in locked:
                    raise self.fail(f"step {at}", f"{step.value!r} is not locked at this point")
                locked.remove(str(step.value))
        return tuple(steps)

    def step(self, place: str, value: Any, known: dict[str, type[Any]]) -> Step:
        if not isinstance(value, dict) or not value:
            raise self.fail(place, "must be a table such as { alloc = 'node' }")
        key = next(iter(value))
        if key not in known:
            raise self.fail(place, unknown("step", key, known))
        if others := [other for other in list(value)[1:] if other in known]:
            raise self.fail(place, f"two steps in one, {key} and {others[0]}; give each its table")
        for unit in ("pages", "slots"):
            if issubclass(known[key], FreeStep) and not isinstance(value.get(unit, ""), str):
                raise self.fail(place, f'{unit} must be a slice such as "0:1" or "-1:"')
        data = value[key] if key == "expect" else value
        step: Step = self.table(place, data, known[key])
        reason = _nonsense(step)
        if reason:
            raise self.fail(place, reason)
        return step


def _of_caches(file: FileTable) -> tuple[str, ...]:
    """Return the caches of a scenario that does not say which: all, if its steps are a cache's."""
    steps = file.steps if isinstance(file.steps, list) else []
    keys = {next(iter(step), "") for step in steps if isinstance(step, dict)}
    return CACHES if keys & (CACHE_STEPS.keys() - STEPS.keys()) else ()


def _nonsense(step: Any) -> str | None:
    """Return why a step makes no sense whatever came before, None if it may."""
    nodes = step.nodes()
    for name in nodes:
        if not name.isprintable():
            return "needs the name of a node: 1 to 80 printable characters"
    if len(nodes) == 2 and nodes[0] == nodes[1]:
        return f"{step.key} {nodes[0]} from itself makes no sense"
    if isinstance(step, FreeStep):
        if step.pages is not None and step.slots is not None:
            return "takes pages or slots, not both"
        try:
            _ = step.part
        except (ValueError, TypeError):
            unit = "slots" if step.pages is None else "pages"
            return f'{unit} must be a slice such as "0:1" or "-1:"'
    match step.key:
        case "alloc_tail" if step.tail > step.pages:
            return f"tail = {step.tail} is longer than pages = {step.pages}"
        case "group" if step.edge not in ("begin", "end"):
            return "group: " + unknown("value", step.edge, ("begin", "end"))
        case "expect" if step.physical is None and step.mapped is None:
            return "expect needs physical, mapped or both"
    reason: str | None = step.nonsense()
    return reason


def _not_a_range(text: str) -> str:
    """Return the sentence for ``versions`` that cannot be read."""
    try:
        Version(text)
    except InvalidVersion:
        return f"{text!r} is no range of releases, such as '>=0.5.18,<0.5.19'"
    return f"{text!r} is no range of releases; did you mean '=={text}'?"


_NOUNS = {
    "int": "a whole number",
    "str": "a string",
    "array": "an array",
    "object": "a table",
    "bool": "true or false",
    "float": "a number with a fraction",
    "null": "nothing",
}


def explain(message: str) -> tuple[str, str]:
    """Return the place and the sentence of what msgspec says of a value."""
    message, _, path = message.partition(" - at `")
    place = path.removesuffix("`").removeprefix("$").removeprefix(".")
    if missing := re.match(r"Object missing required field `(.+)`", message):
        return place, f"needs {missing[1]} = {'NAME' if missing[1] == 'from' else '…'}"
    message = message.replace(" | null`", "`")
    for name, noun in _NOUNS.items():
        message = message.replace(f"`{name}`", noun)
    message = message.replace("`", "")
    return place, message[0].lower() + message[1:]


def to_toml(scenario: Scenario) -> str:
    """Return a scenario as TOML, keys in the order of the shipped files; ``parse`` reads it."""
    story = "\n".join(textwrap.wrap(" ".join(scenario.story.split()), 98, break_long_words=False))
    lines = [f"schema = {SCHEMA}", f"title = {_value(scenario.title)}"]
    if scenario.upstream:
        lines.append(f"upstream = {_value(scenario.upstream)}")
    lines += [f"reach = {_value(scenario.reach)}", f'story = """\n{_escaped(story)}\n"""']
    if scenario.caches:
        lines += [f"caches = {_value(scenario.caches)}", f"window = {scenario.window}"]
        if scenario.window_tokens is not None:
            lines.append(f"window_tokens = {scenario.window_tokens}")
        if scenario.eagle:
            lines.append("eagle = true")
    lines += [
        "steps = [",
        *(f"  {_value(step_table(step))}," for step in scenario.steps),
        "]",
        "",
        "[pools]",
        f"full_pages = {scenario.full_pages}",
        f"swa_pages = {scenario.swa_pages}",
        f"page_sizes = {_value(scenario.page_sizes)}",
    ]
    if scenario.expect:
        lines += ["", "[expect]"]
        lines += [f"{name} = {_value(_outcome(o))}" for name, o in scenario.expect.items()]
    for known in scenario.known:
        lines += ["", "[[known]]", *(f"{k} = {_value(v)}" for k, v in _known(known).items())]
    return "\n".join(lines) + "\n"


def step_table(step: Step) -> dict[str, Any]:
    """Return a step as the table that a scenario file has for it."""
    table: dict[str, Any] = msgspec.to_builtins(step)
    return {"expect": table} if step.key == "expect" else table


def _outcome(outcome: Outcome) -> dict[str, Any]:
    table = {
        "verdict": outcome.verdict,
        "physical": outcome.physical,
        "mapped": outcome.mapped,
        "kinds": outcome.kinds or None,
        "versions": None if outcome.versions is None else str(outcome.versions),
    }
    return _present(table)


def _known(known: Known) -> dict[str, Any]:
    where = {
        "versions": str(known.versions),
        "page_sizes": known.page_sizes or None,
        "fixed": known.fixed,
        "fix": known.fix,
        "fault": None if known.fault == "allocator" else known.fault,
    }
    return _present(where) | _outcome(known.outcome)


def _present(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None}


def _value(value: Any) -> str:
    """Return a value as TOML: its strings are JSON's, but for one control character."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(v)}" for key, v in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)


def _escaped(text: str) -> str:
    """Return lines of text as they may be in a multi-line string."""
    return "\n".join(_value(line)[1:-1] for line in text.split("\n"))
