"""The SGLang plugin: record, audit and repair a live server. Named in ``sglang.srt.plugins``.

SGLang loads it in its main and scheduler processes, before the pools are built. It does nothing,
and imports nothing, unless the environment variable ``SWALEAK`` asks for it: ``record:FILE``,
``audit``, ``fix:barrier`` or ``fix:enqueue``, combined with commas.

The class is patched where every importer sees it: its ``__new__`` makes instances of a subclass
of it, so ``isinstance`` and the subclasses that SGLang itself has keep working.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swaleak.live.auditor import Release

VARIABLE = "SWALEAK"
FIXES = ("barrier", "enqueue")
logger = logging.getLogger("swaleak")


@dataclass(frozen=True, slots=True)
class Settings:
    """What ``SWALEAK`` asks for. ``record``: a path; ``fix``: one of ``FIXES``."""

    record: str | None = None
    audit: bool = False
    fix: str | None = None

    def __str__(self) -> str:
        parts = [f"record:{self.record}"] if self.record else []
        parts += ["audit"] if self.audit else []
        parts += [f"fix:{self.fix}"] if self.fix else []
        return ",".join(parts)


def read_settings(text: str) -> Settings:
    """Return what ``text`` asks for. Raises ``ValueError`` with a sentence."""
    parts = [part for part in map(str.strip, text.split(",")) if part]
    if not parts:
        raise ValueError(f"{VARIABLE}={text}: it asks for nothing; it takes {_TAKES}")
    record, audit, fix = None, False, None
    once: set[str] = set()
    for part in parts:
        word, _, value = part.partition(":")
        if value and word in once:  # which of two fixes a server is to have is not for us to guess
            raise ValueError(f"{VARIABLE}={text}: {word} is there twice")
        once.add(word)
        if word == "record" and value:
            record = value
        elif part == "audit":
            audit = True
        elif word == "fix" and value in FIXES:
            fix = value
        elif word == "record":
            raise ValueError(f"{VARIABLE}={text}: record needs a file, as in record:run.jsonl")
        else:
            raise ValueError(f"{VARIABLE}={text}: {part!r} is none of {_TAKES}")
    return Settings(record, audit, fix)


_TAKES = ", ".join(("record:FILE", "audit", *(f"fix:{fix}" for fix in FIXES)))


def activate() -> None:
    """The entry point. Never raises: a server must start whatever is wrong here."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return
    try:
        settings = read_settings(text)
        if settings.record:
            _check_place(settings.record)
        _install(settings)
    except ValueError as error:
        logger.error("swaleak does nothing: %s", error)
    except Exception:
        logger.exception("swaleak does nothing: it does not fit this SGLang")


def _check_place(record: str) -> None:
    """Raise ``ValueError`` where no trace can be made: while it is still one line in the log."""
    folder = os.path.dirname(os.path.abspath(record))
    if not os.path.isdir(folder):
        raise ValueError(f"{VARIABLE}: record:{record}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{VARIABLE}: record:{record}: the folder {folder} cannot be written to")


def _install(settings: Settings) -> None:
    """Patch SGLang's class in place. Raises ``ImportError`` where SGLang is not what we know."""
    from sglang.srt.mem_cache.allocator.swa import (  # type: ignore[import-not-found]
        SWATokenToKVPoolAllocator as base,
    )

    from swaleak.allocator.strategies import STRATEGIES
    from swaleak.targets.driver import graft

    release = _release(settings)
    fix = settings.fix
    if fix and release and not release.needs_fix:
        logger.warning(
            "swaleak: this SGLang already frees by %s; fix:%s is not needed",
            release.ships["free_swa"],
            fix,
        )
        fix = None
    settings = replace(settings, fix=fix)
    if settings == Settings():
        return
    made: type[Any] = graft(base, STRATEGIES[fix]) if fix else base
    made = watched_by(made, settings, fix, release)
    logger.warning("swaleak: loaded, for every %s that is made: %s", base.__name__, settings)
    if fix:
        logger.warning(
            "swaleak: %s frees by %s from now on, in place of SGLang's own free groups",
            base.__name__,
            STRATEGIES[fix].long_name,
        )

    def __new__(kind: type[Any], *args: Any, **kwargs: Any) -> Any:
        return object.__new__(made if kind is base else kind)

    base.__new__ = __new__


def _release(settings: Settings) -> Release | None:
    """Return what the installed SGLang is, its strategies tried on a copy of its class.

    None where that cannot be tried and no fix depends on it.
    """
    from swaleak.live.auditor import Release
    from swaleak.targets.driver import Sizes, shipped_strategy
    from swaleak.targets.open import open_target

    def tried(free: str) -> str:
        return shipped_strategy(target.make("shipped", Sizes(4, 4, 1)), free)

    try:
        target = open_target("installed", "cpu")
        return Release(target.version, {free: tried(free) for free in ("free_swa", "free")})
    except Exception:
        if settings.fix:
            raise
        return None


def watched_by(
    base: type[Any], settings: Settings, fix: str | None, release: Release | None = None
) -> type[Any]:
    """Return ``base`` with what ``settings`` asks for, each instance announced in the log.

    ``fix``: what is grafted on it. ``release``: what it is without, where that is known.
    """
    from swaleak.live.auditor import Auditor, Gauge, connect
    from swaleak.live.instrument import Hooks, watched
    from swaleak.live.recorder import Recorder

    def add(allocator: Any, hooks: Hooks) -> None:
        if settings.audit or settings.record:
            gauge = Gauge(allocator)
            observers: list[Any] = [Auditor(gauge, fix, release)] if settings.audit else []
            if settings.record:
                observers.append(Recorder(allocator, gauge, settings.record, fix))
            connect(gauge, hooks, [observer.ended for observer in observers])
            for observer in observers:
                observer.connect(hooks)
        logger.warning(
            "swaleak: attached to a %s of %d full and %d SWA slots, page size %d: %s",
            base.__name__,
            allocator.full_attn_allocator.size,
            allocator.swa_attn_allocator.size,
            allocator.page_size,
            settings,
        )

    calls = None if settings.record else Auditor.CALLS if settings.audit else ()
    return watched(base, add, calls)
