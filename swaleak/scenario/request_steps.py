"""The steps of requests on a cache, as SGLang's scheduler takes them; the cache makes the calls."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, ClassVar

from msgspec import Meta, field

from swaleak.errors import ScriptError
from swaleak.scenario.calls import Count
from swaleak.scenario.steps import Step

OUTPUT = 0  # every decoded token, at every page size
MAX_PROMPT_PAGES = 1000
_PART = re.compile(r"([A-Za-z])(?:/(\d{1,4}))?")

RequestName = Annotated[str, Meta(min_length=1, max_length=80)]
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


@lru_cache(maxsize=2**14)
def prompt_of(tokens: tuple[int, ...], page_size: int) -> str:
    """Return the prompt of tokens; ``A/2:4``: from the middle of a page; ``+3``: output."""
    parts: list[tuple[int, int, int]] = []  # page, first token in it, count
    for token in tokens:
        page, at = divmod(token, page_size)
        if token < page_size:
            page, at = OUTPUT, 0
        if parts and parts[-1][0] == page and (not page or sum(parts[-1][1:]) == at):
            parts[-1] = (page, parts[-1][1], parts[-1][2] + 1)
        else:
            parts.append((page, at, 1))
    return "".join(_part_text(*part, page_size) for part in parts)


def _part_text(page: int, at: int, count: int, page_size: int) -> str:
    if page == OUTPUT:
        return f"+{count}"
    if at:
        return f"{chr(page)}/{at}:{at + count}"
    return chr(page) + ("" if count == page_size else f"/{count}")


def prompt_nonsense(key: str, prompt: str) -> str | None:
    """Return why a prompt cannot be used, None if it can."""
    if re.fullmatch(rf"(?:{_PART.pattern})+", prompt) and len(prompt) <= 6 * MAX_PROMPT_PAGES:
        return None
    return f'{key} needs a prompt: letters, one per page, such as "AB"; "A/3" is a part of a page'


class RequestStep(Step, frozen=True):
    """A step of a request, or of all of them."""

    def nonsense(self) -> str | None:
        """Return why its values cannot be used, None if they can."""
        return None


class OneRequest(RequestStep, frozen=True):
    """A step of one request."""

    request: RequestName

    def nonsense(self) -> str | None:
        return None if self.request.isprintable() else f"{self.key} needs the name of a request"

    def __str__(self) -> str:
        return f"{self.key} {self.request}"


class Admit(OneRequest, frozen=True):
    """A request is matched, its prefix locked, and slots for the rest of its prompt allocated."""

    request: RequestName = field(name="admit")
    prompt: Prompt

    def nonsense(self) -> str | None:
        return OneRequest.nonsense(self) or prompt_nonsense("prompt", self.prompt)

    def __str__(self) -> str:
        return f"admit {self.request}, prompt {self.prompt}"


class Grow(OneRequest, frozen=True):
    """A request gets slots: for the next chunk of its prompt (``by``), or for decoded tokens."""

    request: RequestName = field(name="grow")
    by: Prompt | None = None
    tokens: Count = 1

    def nonsense(self) -> str | None:
        if self.by is not None and self.tokens != 1:
            return "takes by or tokens, not both"
        wrong = None if self.by is None else prompt_nonsense("by", self.by)
        return OneRequest.nonsense(self) or wrong

    def __str__(self) -> str:
        tokens = "1 token" if self.tokens == 1 else f"{self.tokens} tokens"
        return f"grow {self.request} by {self.by or tokens}"


class Chunk(OneRequest, frozen=True):
    """What a request has computed of its prompt goes into the cache."""

    request: RequestName = field(name="chunk")


class Slide(OneRequest, frozen=True):
    """The SWA side of what has left a decoding request's window is freed."""

    request: RequestName = field(name="slide")


class ReleaseWindow(OneRequest, frozen=True):
    """The SWA part of a request's lock is given up, its window has moved past the prefix."""

    request: RequestName = field(name="release_window")


class Finish(OneRequest, frozen=True):
    """A request ends, and what it holds goes into the cache."""

    request: RequestName = field(name="finish")


class Abort(OneRequest, frozen=True):
    """A request ends, and what it holds is freed."""

    request: RequestName = field(name="abort")


class Retract(OneRequest, frozen=True):
    """A decoding request is put back to wait; what it holds is freed."""

    request: RequestName = field(name="retract")


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
