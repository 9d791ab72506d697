"""The steps of requests on a cache, as SGLang's scheduler takes them; the cache makes the calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, ClassVar

from msgspec import Meta, field

from swaleak.errors import ScriptError
from swaleak.scenario.calls import Count
from swaleak.scenario.steps import Name, Step

OUTPUT = 0  # every decoded token, at every page size
MAX_PROMPT_PAGES = 1000
_PART = re.compile(r"([A-Za-z])(?:/(\d{1,4}))?")

Prompt = Annotated[str, Meta(min_length=1, max_length=6 * MAX_PROMPT_PAGES)]


def tokens_of(prompt: str, page_size: int) -> list[int]:
    """Return the tokens of a prompt: a letter is a page of them, ``A/3`` the first three of page A.

    Raises ``ScriptError`` for a part that is no part of a page of ``page_size`` tokens.
    """
    tokens: list[int] = []
    for letter, part in _PART.findall(prompt):
        count = int(part) if part else page_size
        if not 1 <= count < page_size + (not part):
            raise ScriptError(f"{letter}/{part} is no part of a page of {page_size} tokens")
        first = ord(letter) * page_size
        tokens += range(first, first + count)
    return tokens


def prompt_of(tokens: Sequence[int], page_size: int) -> str:
    """Return the prompt of tokens; ``A/2:4``: from the middle of a page; ``+3``: output."""
    parts, at = [], 0
    while at < len(tokens):
        page, first = divmod(tokens[at], page_size)
        left, stop = page_size - first, at + 1
        if page == OUTPUT:
            while stop < len(tokens) and tokens[stop] == OUTPUT:
                stop += 1
            parts.append(f"+{stop - at}")
        elif at + left <= len(tokens) and tokens[at + left - 1] == tokens[at] + left - 1:
            stop = at + left
            parts.append(chr(page) + (f"/{first}:{page_size}" if first else ""))
        else:
            while stop < len(tokens) and tokens[stop] == tokens[stop - 1] + 1:
                stop += 1
            bounds = f"{first}:{first + stop - at}" if first else str(stop - at)
            parts.append(f"{chr(page)}/{bounds}")
        at = stop
    return "".join(parts)


def prompt_nonsense(key: str, prompt: str) -> str | None:
    """Return why a prompt cannot be used, None if it can."""
    if re.fullmatch(rf"(?:{_PART.pattern})+", prompt):
        return None
    return f'{key} needs a prompt: letters, one per page, such as "AB"; "A/3" is a part of a page'


class RequestStep(Step, frozen=True):
    """A step of a request, or of all of them."""


class OneRequest(RequestStep, frozen=True):
    """A step of one request."""

    request: Name

    def __str__(self) -> str:
        return f"{self.key} {self.request}"


class Admit(OneRequest, frozen=True):
    """A request is matched, its prefix locked, and slots for the rest of its prompt allocated."""

    request: Name = field(name="admit")
    prompt: Prompt

    def nonsense(self) -> str | None:
        return prompt_nonsense("prompt", self.prompt)

    def __str__(self) -> str:
        return f"admit {self.request}, prompt {self.prompt}"


class Grow(OneRequest, frozen=True):
    """A request gets slots: for the next chunk of its prompt (``by``), or for decoded tokens."""

    request: Name = field(name="grow")
    by: Prompt | None = None
    tokens: Count = 1

    def nonsense(self) -> str | None:
        if self.by is not None and self.tokens != 1:
            return "takes by or tokens, not both"
        return None if self.by is None else prompt_nonsense("by", self.by)

    def __str__(self) -> str:
        tokens = "1 token" if self.tokens == 1 else f"{self.tokens} tokens"
        return f"grow {self.request} by {self.by or tokens}"


class Chunk(OneRequest, frozen=True):
    """What a request has computed of its prompt goes into the cache."""

    request: Name = field(name="chunk")


class Slide(OneRequest, frozen=True):
    """The SWA side of what has left a decoding request's window is freed."""

    request: Name = field(name="slide")


class ReleaseWindow(OneRequest, frozen=True):
    """The SWA part of a request's lock is given up, its window has moved past the prefix."""

    request: Name = field(name="release_window")


class Finish(OneRequest, frozen=True):
    """A request ends, and what it holds goes into the cache."""

    request: Name = field(name="finish")


class Abort(OneRequest, frozen=True):
    """A request ends, and what it holds is freed."""

    request: Name = field(name="abort")


class Retract(OneRequest, frozen=True):
    """A decoding request is put back to wait; what it holds is freed."""

    request: Name = field(name="retract")


class Flush(RequestStep, frozen=True):
    """Cache and allocator are cleared, as a server does that is idle."""

    flush: bool

    key: ClassVar[str] = "flush"

    def nonsense(self) -> str | None:
        return None if self.flush else "flush takes true"

    def __str__(self) -> str:
        return "flush"


_STEPS = (Admit, Grow, Chunk, Slide, ReleaseWindow, Finish, Abort, Retract, Flush)
for _step in _STEPS:
    _step.key = _step.key or _step.__struct_encode_fields__[0]
REQUEST_STEPS: dict[str, type[RequestStep]] = {step.key: step for step in _STEPS}
ENDS = (Finish, Abort, Retract)
