"""What one line of a log says, in any wording that SGLang has had.

SGLang's checks add up what each pool can account for, and complain where the sum is not the size
of the pool.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from swaleak.diagnose.finding import MISSING, TWICE, Finding

# several pools in one line: a log of JSON objects, or lines that were joined
PART = re.compile(
    r"\\n|(?=\[[\w-]{1,20}\]\s+total=)|(?=(?:self\.|\b)(?:full|swa)_tokens_per_layer=)"
)
# a check that logs every balanced sum writes millions of these; they are told without more ado
NUMBER = rb"=(-?\d+)"
SUM = re.compile(
    rb"total%b, available%b, evictable%b, protected%b(?:, session_held%b, uncached%b)?"
    % ((NUMBER,) * 6)
)
TAG = re.compile(r"\[(full|swa|mamba[\w-]*)\]")
SUM_BEGINS = re.compile(rf"{TAG.pattern}\s+total=")
# a number is whole where something ends it; 911,616 is none, and neither is one that another
# process has written into
PAIR = re.compile(
    r"(?<![\w.])([A-Za-z_][\w.]{0,99})(?:\(\))?=(-?\d{1,18})"
    r"(?=[\s;\"'\\)}\]|<]|,(?!\d)|\.(?!\d)|$)"
)
SEPARATED = re.compile(r"=(\d{1,3}(?:[,.'\u2019_ \u00a0\u202f]\d{3})+)(?!\d)")
TOO_LONG = re.compile(r"=-?\d{19}")
CUT = re.compile(r",\s*[\w.]{0,60}(?:\(\)?)?=?-?")  # the beginning of one more name=number
TERM = re.compile(
    r"(?:(full|swa|mamba)_)?(available|evictable|protected|session_held|uncached)"
    r"(?:_(?:size|full|swa))*"
)
TOTALS = {  # name -> pool, None where it does not say
    "total": None,
    "total_size": None,
    "max_total_num_tokens": "full",
    "full_tokens_per_layer": "full",
    "swa_tokens_per_layer": "swa",
    "token_to_kv_pool_allocator.size": "full",
    "mamba_pool.size": "mamba",
}
# what every release from 0.5.12 to 0.5.23 writes behind total=, all in one piece; those before had
# fewer at the end. Other wordings name the total first or last
FIELDS = ("available", "evictable", "protected", "session_held", "uncached")
REQUESTS = "req_to_token"
SUB_POOLS = ("full", "swa")
# the line that raises it is in tracebacks as well
ANNOUNCED = re.compile(
    r"(?:(?:pool|allocator) memory leak|Pool Mem Leak) [Dd]etec(?!ted!(?:\"$|\"\s|\s*\{))"
)
FREED_TWICE = re.compile(r"KV (?:double free|page use-after-free): (?!.*\{)")
ANNOUNCEMENT = "pool memory leak detected!"
# colours that what wrote the log has escaped once more: JSON, Python, rsyslog, `cat -v`
ESCAPED = re.compile(r"(?:\\u001[bB]|\\x1[bB]|\\033|\\e|#033|\^\[)\[[0-9;:]{0,20}[A-Za-z]")
DOUBLE_FREE = re.compile(r"KV double free: sub-pool (\d+) has (\d+) duplicate pages")
USE_AFTER_FREE = re.compile(r"KV page use-after-free: (\d+) owner page refs")
OVERFULL = re.compile(r"(?:(full|swa)_attn_allocator\.)?available_size\(\)\s*<=\s*[\w.]*size\b")


def is_balanced(data: bytes, first: int, last: int) -> bool:
    """Whether there is one sum between ``first`` and ``last``, and it is right."""
    found = SUM.search(data, first, last)
    if not found or data.find(b"total=", found.end(), last) >= 0:
        return False
    total, *terms = (int(number or 0) for number in found.groups())
    return total == sum(terms)


def as_text(data: bytes) -> str:
    """Return a line as text, without colours that are written out."""
    return ESCAPED.sub("", data.decode("utf-8", "replace"))


def findings_in(text: str, ended: bool) -> Iterator[Finding | str]:
    """Yield what a line says, piece by piece, balanced sums included; why, where it is unreadable.

    ``ended``: whether the end of the line is there; else its last number may be cut off.
    """
    *pieces, last = PART.split(text)
    for piece in pieces:
        yield from _findings(piece, not piece[-1:].isdigit() or f"{piece}\\n" in text)
    yield from _findings(last, ended)


def is_announced(text: str) -> bool:
    """Whether a line says that there is a leak, whatever it says of it."""
    return ANNOUNCED.search(text) is not None


def is_cut_announcement(text: str) -> bool:
    """Whether a line ends within the words that say that there is a leak."""
    ends = (ANNOUNCEMENT[:n] for n in range(len("pool memory le"), len("pool memory leak detec")))
    wordings = (end for e in ends for end in (e, e.replace("pool", "allocator")))
    return text.endswith(tuple(wordings))


def has_numbers(text: str) -> bool:
    """Whether a line has numbers behind what says that there is a leak."""
    found = ANNOUNCED.search(text)
    return bool(found and PAIR.search(found.string, found.end()))


def why_unreadable(text: str) -> str:
    """Return why nothing can be read from a line that says there is a leak."""
    if found := SEPARATED.search(text):
        return f"its numbers have separators ({found[1]}), and SGLang writes none"
    return f'cut off behind "{text.rstrip()[-40:].lstrip()}"'


def overfull_in(text: str) -> Finding | None:
    """Return what a line says if it fails: that no more is free in a pool than there is."""
    found = OVERFULL.search(text) if "available_size()" in text else None
    return Finding("overfull", found[1], TWICE) if found else None


def _findings(text: str, ended: bool) -> Iterator[Finding | str]:
    """Yield what one piece of a line says."""
    twice, used = DOUBLE_FREE.search(text), USE_AFTER_FREE.search(text)
    if twice:
        index, pages = int(twice[1]), int(twice[2])
        pool = SUB_POOLS[index] if index < len(SUB_POOLS) else None
        yield Finding("double-free", pool, TWICE, terms=(("duplicate pages", pages),))
    if used:
        refs = ("references to free pages", int(used[1]))
        yield Finding("use-after-free", "full", TWICE, terms=(refs,))
    if not twice and not used and FREED_TWICE.search(text):
        yield why_unreadable(text)
    # sums that SGLang itself says need not be right
    if "dcp_physical_page_slack_allowed" in text or "leak-check skipped" in text:
        return
    if sum_ := _sum(text, ended):
        yield sum_
    elif SUM_BEGINS.search(text):
        yield why_unreadable(text)


def _sum(text: str, ended: bool) -> Finding | str | None:
    """Return what a pool adds up to, of any wording: a total, and terms one of which is free.

    Why not, if the message is cut off: what is missing is not 0.
    """
    total: tuple[int, str | None] | None = None
    pools: list[str] = []
    terms: dict[str, int] = {}
    plain = total_last = False
    behind, last_number = 0, ""
    for pair in PAIR.finditer(text):
        name, number = pair.groups()
        last = name.rpartition(".")[2]
        owner = ".".join(name.split(".")[-2:])
        key = last if last in TOTALS else owner
        if key in TOTALS:
            total = int(number), TOTALS[key]
            plain, total_last = key == "total", bool(terms)
        elif term := TERM.fullmatch(last):
            pools += [term[1]] if term[1] else []
            terms.setdefault(term[2], int(number))
        else:
            continue
        behind, last_number = pair.end(), number
    if total is None or "available" not in terms:
        return None
    # a wording that has the total last has no more terms, and none was lost before it
    if "evictable" not in terms and (plain or not total_last):
        return why_unreadable(text)
    absent = tuple(name for name in FIELDS if name not in terms) if plain else ()
    rest = text[behind:]
    if rest.strip() == ",":
        cut = bool(absent) or not ended
    elif rest:
        cut = CUT.fullmatch(rest) is not None
    else:  # only a 0 has no further digits
        cut = not ended and (not plain or bool(absent) or last_number != "0")
    if cut:
        return _cut(text, rest, last_number)
    tag = TAG.search(text)
    pool = pools[0] if pools else tag[1] if tag else total[1]
    if "req_to_token_pool memory leak" in text:
        pool = REQUESTS
    accounted = sum(terms.values())
    meaning = MISSING if accounted < total[0] else TWICE
    return Finding("sum", pool, meaning, total[0], accounted, tuple(terms.items()), absent)


def _cut(text: str, rest: str, number: str) -> str:
    if rest:
        return why_unreadable(text)
    return (
        f"the log ends in {number} without a newline, so that it may be cut off; if that is the "
        "whole message, end it with a newline"
    )
