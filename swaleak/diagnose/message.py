"""What one line of a log says, in any wording that SGLang has had.

SGLang's checks add up what each pool can account for, and complain where the sum is not the size
of the pool.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from swaleak.diagnose.finding import MISSING, TWICE, Finding

# several pools in one line: a log of JSON objects, or lines that were joined
PART = re.compile(r"\\n|(?=\[[\w-]{1,20}\]\s+total=)")
# a check that logs every balanced sum writes millions of these; they are told without more ado
NUMBER = rb"=(-?\d+)"
SUM = re.compile(
    rb"total%b, available%b, evictable%b, protected%b(?:, session_held%b, uncached%b)?"
    % ((NUMBER,) * 6)
)
TAG = re.compile(r"\[(full|swa|mamba[\w-]*)\]")
PAIR = re.compile(r"(?<![\w.])([A-Za-z_][\w.]{0,99})(?:\(\))?=(-?\d{1,18})\b")
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
REQUESTS = "req_to_token"
SUB_POOLS = ("full", "swa")
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


def findings_in(text: str) -> Iterator[Finding]:
    """Yield what a line says, piece by piece, balanced sums included."""
    for part in PART.split(text):
        yield from _findings(part)


def overfull_in(text: str) -> Finding | None:
    """Return what a line says if it fails: that no more is free in a pool than there is."""
    found = OVERFULL.search(text)
    return Finding("overfull", found[1], TWICE) if found else None


def _findings(text: str) -> Iterator[Finding]:
    """Yield what one piece of a line says."""
    if found := DOUBLE_FREE.search(text):
        index, pages = int(found[1]), int(found[2])
        pool = SUB_POOLS[index] if index < len(SUB_POOLS) else None
        yield Finding("double-free", pool, TWICE, terms=(("duplicate pages", pages),))
    if found := USE_AFTER_FREE.search(text):
        refs = ("references to free pages", int(found[1]))
        yield Finding("use-after-free", "full", TWICE, terms=(refs,))
    if "dcp_physical_page_slack_allowed" not in text and (sum_ := _sum(text)):
        yield sum_


def _sum(text: str) -> Finding | None:
    """Return what a pool adds up to, of any wording: a total, and terms one of which is free."""
    total: tuple[int, str | None] | None = None
    pools: list[str] = []
    terms: dict[str, int] = {}
    for name, digits in PAIR.findall(text):
        last = name.rpartition(".")[2]
        owner = ".".join(name.split(".")[-2:])
        key = last if last in TOTALS else owner
        if key in TOTALS:
            total = int(digits), TOTALS[key]
        elif term := TERM.fullmatch(last):
            pools += [term[1]] if term[1] else []
            terms.setdefault(term[2], int(digits))
    if total is None or "available" not in terms:
        return None
    tag = TAG.search(text)
    pool = pools[0] if pools else tag[1] if tag else total[1]
    if "req_to_token_pool memory leak" in text:
        pool = REQUESTS
    accounted = sum(terms.values())
    meaning = MISSING if accounted < total[0] else TWICE
    return Finding("sum", pool, meaning, total[0], accounted, tuple(terms.items()))
