"""A scenario as a unittest for SGLang's own suite: one file that needs SGLang and nothing else.

The calls are those that ``sglang/adapter.py`` makes, written out; what is expected is what the
ledger expects, and it is worked out here, so that the file can be read without it.
"""

from __future__ import annotations

import json
import keyword
import re
import textwrap
from collections.abc import Iterable, Iterator

from swaleak import __version__
from swaleak.check.ledger import Ledger, Node
from swaleak.errors import ScriptError
from swaleak.script import ops
from swaleak.script.ops import Op, Part, describe
from swaleak.script.scenario import Scenario

MAX_STEPS = 1000

# HEAD and TAIL are in every file, of OPTIONAL the methods that its steps call
HEAD = '''\
"""{title}

{about}
"""

import unittest

import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FULL_PAGES, SWA_PAGES = {full_pages}, {swa_pages}


class FakeSWAKVPool(BaseSWAKVPool):
    """Stores no KV: all that the allocator asks of it is to keep the mapping."""

    def __init__(self):
        self.full_to_swa_index_mapping = None

    def register_mapping(self, full_to_swa_index_mapping):
        self.full_to_swa_index_mapping = full_to_swa_index_mapping

    def translate_loc_from_full_to_swa(self, kv_indices):
        return self.full_to_swa_index_mapping[kv_indices]


# It has no buffers, so the accessors of buffers, which differ between releases, stay abstract.
FakeSWAKVPool.__abstractmethods__ = frozenset()


class {class_name}(unittest.TestCase):
    def start(self, page_size):
        """Return a fresh allocator."""
        self.page_size = page_size
        self.allocator = SWATokenToKVPoolAllocator(
            size=FULL_PAGES * page_size,
            size_swa=SWA_PAGES * page_size,
            page_size=page_size,
            dtype=torch.bfloat16,
            device=DEVICE,
            kvcache=FakeSWAKVPool(),
            need_sort=False,
        )
        return self.allocator

    def alloc(self, pages):
        """Allocate whole pages from both pools; return their full and their SWA slots."""
        allocator, slots = self.allocator, pages * self.page_size
        if self.page_size == 1:
            full = allocator.alloc(slots)
        else:
            full = allocator.full_attn_allocator.alloc(slots)
            swa = allocator.swa_attn_allocator.alloc(slots)
            allocator.set_full_to_swa_mapping(full, swa)
        return full, allocator.translate_loc_from_full_to_swa(full).clone()
'''
OPTIONAL = {
    "alloc_tail": '''
    def alloc_tail(self, pages, tail):
        """Allocate full pages for one request, with SWA pages for the last of them only."""
        tokens = pages * self.page_size
        prefix, total = torch.tensor([0]), torch.tensor([tokens])
        full = self.allocator.alloc_extend_swa_tail(
            prefix.to(DEVICE),
            prefix,
            total.to(DEVICE),
            total,
            torch.tensor([-1], device=DEVICE),
            tokens,
            tail * self.page_size,
        )
        return full, self.allocator.translate_loc_from_full_to_swa(full).clone()
''',
    "free_full": '''
    def free_full(self, full):
        """Free a tombstone; releases without free_full do it with free."""
        getattr(self.allocator, "free_full", self.allocator.free)(full)
''',
    "free_segment": '''
    def free_segment(self, full):
        """Free the slots of one request, with free where a release has no free_segment."""
        if hasattr(self.allocator, "free_segment"):
            self.allocator.free_segment(full, start_pos=0)
        else:
            self.allocator.free(full)
''',
    "free_swa_segment": '''
    def free_swa_segment(self, full):
        """Free the SWA side of one request, with free_swa where there is no free_swa_segment."""
        if hasattr(self.allocator, "free_swa_segment"):
            self.allocator.free_swa_segment(full, start_pos=0)
        else:
            self.allocator.free_swa(full)
''',
    "without": '''
    def without(self, swa, pages):
        """Return the SWA slots of a node after some of its pages have become tombstones."""
        swa = swa.clone()
        swa[pages.start * self.page_size : pages.stop * self.page_size] = 0
        return swa

''',
    "rest": '''
    def rest(self, slots, pages):
        """Return the slots of a node after some of its pages have been freed."""
        start, stop = pages.start * self.page_size, pages.stop * self.page_size
        return torch.cat((slots[:start], slots[stop:]))
''',
}
TAIL = '''
    def assert_owned(self, nodes, adopted=()):
        """Check both pools. `nodes`: name, full slots, SWA slots, 0 for none.

        `adopted`: the same for nodes that are freed and whose SWA slots are live again.
        """
        allocator, page_size = self.allocator, self.page_size
        live = {slot // page_size for swa in self.live(nodes, adopted) for slot in swa.tolist()}
        mapping = allocator.full_to_swa_index_mapping[:-1]
        mapped = set((mapping[mapping > 0] // page_size).tolist())
        physical = SWA_PAGES - allocator.swa_available_size() // page_size
        full_pages = FULL_PAGES - allocator.full_available_size() // page_size
        self.assertEqual(physical, len(mapped), "physical SWA pages, mapped SWA pages")
        self.assertEqual(mapped, live, "SWA pages that are mapped, SWA pages of live nodes")
        for name, full, swa in [*nodes, *adopted]:
            peers = allocator.translate_loc_from_full_to_swa(full)
            self.assertEqual(peers.tolist(), swa.tolist(), f"SWA peers of {name}")
        used = sum(len(full) for _, full, _ in nodes) // page_size
        self.assertEqual(full_pages, used, "full pages in use, full pages of nodes")

    def assert_handed_out_once(self, nodes, adopted=()):
        """Check that what is left in the pools is nobody's, and no page is there twice."""
        allocator, page_size = self.allocator, self.page_size
        for name, pool, owned, pages in (
            ("full", allocator.full_attn_allocator, [full for _, full, _ in nodes], FULL_PAGES),
            ("SWA", allocator.swa_attn_allocator, self.live(nodes, adopted), SWA_PAGES),
        ):
            free = pool.available_size()
            slots = torch.cat([*owned, *([pool.alloc(free)] if free else [])])
            everything = torch.arange(page_size, (pages + 1) * page_size, device=DEVICE)
            whole = torch.equal(slots.sort().values, everything)
            self.assertTrue(whole, f"{name} slots that are owned or free are not all, each once")

    def live(self, nodes, adopted):
        """Return the SWA slots of all nodes."""
        return [swa[swa > 0] for _, _, swa in [*nodes, *adopted]]


if __name__ == "__main__":
    unittest.main()
'''


def unittest_file(scenario: Scenario) -> str:
    """Return the text of the file.

    Raises ``ScriptError`` for a script that makes no sense, asks for more pages than there are,
    or is longer than ``MAX_STEPS``.
    """
    if len(scenario.steps) > MAX_STEPS:
        raise ScriptError(
            f"{scenario.source or scenario.name}: {len(scenario.steps)} steps make no test that "
            f"anybody reads, {MAX_STEPS} at most; shrink it first"
        )
    bodies: dict[str, list[int]] = {}
    for size in scenario.page_sizes:
        bodies.setdefault("\n".join(_Writer(scenario, size).lines()), []).append(size)
    tests = "".join(_test(body, sizes) for body, sizes in bodies.items())
    used = [text for name, text in OPTIONAL.items() if f"self.{name}(" in tests]
    head = HEAD.format(
        title=_prose(scenario.title, "."),
        about="\n\n".join(_about(scenario)),
        full_pages=scenario.full_pages,
        swa_pages=scenario.swa_pages,
        class_name="Test"
        + "".join(w.capitalize() for w in re.findall(r"[A-Za-z0-9]+", scenario.name)),
    )
    return head + "".join(text.rstrip("\n") + "\n" for text in used) + tests + TAIL


def _about(scenario: Scenario) -> Iterator[str]:
    if scenario.story:
        yield textwrap.fill(_prose(scenario.story), 88)
    if scenario.upstream:
        yield "See " + ", ".join(f"sgl-project/sglang {ref}" for ref in scenario.upstream) + "."
    yield f"Written by swaleak {__version__} from the scenario {_prose(scenario.name)}."


def _prose(text: str, end: str = "") -> str:
    """Return text that can stand in a docstring."""
    text = " ".join(text.split()).replace("\\", "\\\\").replace('"', "'")
    return text if not text or text[-1] in ".?!" else text + end


def _test(body: str, sizes: list[int]) -> str:
    name = "_".join(map(str, sizes))
    plural = "s" if len(sizes) > 1 else ""
    listed = ", ".join(map(str, sizes)) + ("," if len(sizes) == 1 else "")
    return f"""
    def test_page_size{plural}_{name}(self):
        for page_size in ({listed}):
            with self.subTest(page_size=page_size):
                self.replay_{name}(page_size)

    def replay_{name}(self, page_size):
        allocator = self.start(page_size)
{textwrap.indent(body, " " * 8)}
"""


class _Writer:
    """Writes the steps of a scenario as Python, beside a ledger that knows who owns what."""

    def __init__(self, scenario: Scenario, page_size: int) -> None:
        self.scenario = scenario
        self.steps = scenario.steps
        self.ledger = Ledger(page_size)
        self.pages = 0  # handed out so far; their numbers only have to differ
        self.overwritten = {op.node for op in self.steps if isinstance(op, ops.Overwrite)}
        self.variables: dict[str, str] = {}

    def lines(self) -> Iterator[str]:
        """Yield the lines of one replay."""
        for number, op in enumerate(self.steps, start=1):
            self._check(number, op)
            calls, then = list(self._calls(op)), list(self._then(op))
            yield f"# {number}: {describe(op)}"
            if calls and self._may_be_refused(op):
                yield "try:"
                yield from (f"    {line}" for line in calls)
                yield "except Exception:  # right as well, if nothing has changed"
                yield from (f"    {line}" for line in self._refused())
                yield "    return"
            else:
                yield from calls
            yield from then
            self.ledger.apply(op, self._enter(op))
            self._check_room(number, op)
            if not self.ledger.in_group and not isinstance(op, ops.Alloc | ops.AllocTail):
                yield from self._assert("assert_owned")
        if self.ledger.in_group:
            yield "# the group that is still open"
            yield "allocator.free_group_end()"
            yield from self._assert("assert_owned")
        yield from self._assert("assert_handed_out_once")

    def _check(self, number: int, op: Op) -> None:
        try:
            self.ledger.check(op)
        except ScriptError as error:
            raise self._fail(number, str(error)) from None

    def _check_room(self, number: int, op: Op) -> None:
        full, swa = self.ledger.full_pages(), self.ledger.swa_pages()
        if full > self.scenario.full_pages or swa > self.scenario.swa_pages:
            raise self._fail(number, f"{describe(op)}: the pools are too small")

    def _fail(self, number: int, reason: str) -> ScriptError:
        where = self.scenario.source or self.scenario.name
        return ScriptError(f"{where}: step {number}: {reason}")

    def _calls(self, op: Op) -> Iterator[str]:
        """Yield what is called."""
        x = self._variable(getattr(op, "node", ""))
        y = self._variable(getattr(op, "source", ""))
        match op:
            case ops.Alloc(_, pages):
                yield f"{x}, {x}_swa = self.alloc({pages})"
            case ops.AllocTail(_, pages, tail):
                yield f"{x}, {x}_swa = self.alloc_tail({pages}, {tail})"
            case ops.FreeOp(name, part):
                slots = x + _slice(part)
                if name in self.overwritten:
                    yield f"{x}_buffer = {slots}.clone()"
                    slots = f"{x}_buffer"
                own = op.key in ("free_full", "free_segment", "free_swa_segment")
                yield f"{'self' if own else 'allocator'}.{op.key}({slots})"
            case ops.Recover() | ops.Adopt():
                peers = f"allocator.translate_loc_from_full_to_swa({y})"
                yield f"allocator.set_full_to_swa_mapping({x}, {peers})"
                yield f"allocator.full_to_swa_index_mapping[{y}] = 0"
                if isinstance(op, ops.Recover):
                    yield f"allocator.full_attn_allocator.free({y})"
            case ops.Replace(name):
                tombstone = self.ledger.nodes[name].tombstone
                yield f"{'self.free_full' if tombstone else 'allocator.free'}({x})"
            case ops.LoadBack():
                yield f"{x}_swa = allocator.swa_attn_allocator.alloc(len({x}))"
                yield f"allocator.set_full_to_swa_mapping({x}, {x}_swa)"
            case ops.Overwrite():
                yield f"{x}_buffer.copy_({y})"
            case ops.Group(edge):
                yield f"allocator.free_group_{edge}()"

    def _then(self, op: Op) -> Iterator[str]:
        """Yield what is to be expected from here on."""
        x = self._variable(getattr(op, "node", ""))
        y = self._variable(getattr(op, "source", ""))
        match op:
            case ops.FreeSwa(_, None):
                yield f"{x}_swa = torch.zeros_like({x}_swa)"
            case ops.FreeSwa(name, part):
                pages = self.ledger.pages_of(self._node(name), part)
                yield f"{x}_swa = self.without({x}_swa, {pages})"
            case ops.Free(name, part) | ops.FreeFull(name, part) if part is not None:
                node = self._node(name)
                pages = self.ledger.pages_of(node, part)
                if len(pages) < len(node.full):
                    yield f"{x}, {x}_swa = self.rest({x}, {pages}), self.rest({x}_swa, {pages})"
            case ops.Recover():
                yield f"{x}_swa = {y}_swa"
            case ops.Adopt():
                yield f"{x}_swa, {y}_swa = {y}_swa, torch.zeros_like({y}_swa)"
            case ops.Replace():
                yield f"{x}, {x}_swa = {y}, {y}_swa"
            case ops.Expect(physical, mapped):
                if physical is not None:
                    used = "SWA_PAGES - allocator.swa_available_size() // page_size"
                    yield f'self.assertEqual({used}, {physical}, "physical SWA pages")'
                if mapped is not None:
                    yield "mapping = allocator.full_to_swa_index_mapping[:-1]"
                    yield "mapped = set((mapping[mapping > 0] // page_size).tolist())"
                    yield f'self.assertEqual(len(mapped), {mapped}, "mapped SWA pages")'

    def _enter(self, op: Op) -> list[int | None] | None:
        """Enter an allocation in the ledger; for ``load_back``, return its pages."""
        match op:
            case ops.Alloc(name, pages):
                self.ledger.allocated(name, self._fresh(pages, pages))
            case ops.AllocTail(name, pages, tail):
                self.ledger.allocated(name, self._fresh(pages, tail))
            case ops.LoadBack(name):
                return self._fresh(0, len(self.ledger.nodes[name].full)).swa
        return None

    def _fresh(self, full: int, swa: int) -> Node:
        numbers = range(self.pages, self.pages + max(full, swa))
        self.pages += len(numbers)
        peers: list[int | None] = [None] * (full - swa)
        peers += list(numbers[len(numbers) - swa :])
        return Node(list(numbers[:full]), peers, full * self.ledger.page_size)

    def _node(self, name: str) -> Node:
        return self.ledger.nodes[name] if name in self.ledger.nodes else self.ledger.ghosts[name]

    def _may_be_refused(self, op: Op) -> bool:
        """Whether SGLang's caches never do this, so that an allocator may refuse it."""
        in_group = self.ledger.in_group
        match op:
            case ops.Group(edge):
                return (edge == "begin") == in_group
            case ops.FreeFull():
                return False
            case ops.FreeOp(name, part):
                node = self._node(name)
                return all(node.swa[i] is None for i in self.ledger.pages_of(node, part))
            case ops.Adopt() | ops.LoadBack():
                return in_group
        return False

    def _refused(self) -> Iterator[str]:
        if self.ledger.in_group:
            yield "allocator.free_group_end()"
        yield from self._assert("assert_owned")

    def _assert(self, name: str) -> Iterator[str]:
        """Yield an assertion about everybody the ledger knows."""
        nodes, adopted = self._listed(self.ledger.nodes), self._listed(self.ledger.ghosts)
        line = f"self.{name}({nodes}{f', {adopted}' if self.ledger.ghosts else ''})"
        if len(line) <= 92:
            yield line
            return
        yield f"self.{name}("
        for owners in [self.ledger.nodes, *([self.ledger.ghosts] if self.ledger.ghosts else [])]:
            yield "    ["
            yield from (f"        {self._entry(owner)}," for owner in owners)
            yield "    ],"
        yield ")"

    def _listed(self, names: Iterable[str]) -> str:
        return "[" + ", ".join(self._entry(name) for name in names) + "]"

    def _entry(self, name: str) -> str:
        x = self._variable(name)
        return f"({json.dumps(name, ensure_ascii=False)}, {x}, {x}_swa)"

    def _variable(self, name: str) -> str:
        """Return the name of a node as a variable; no two nodes share one."""
        if name not in self.variables:
            plain = re.sub(r"\W", "_", name, flags=re.ASCII)
            taken = {
                "self",
                "allocator",
                "page_size",
                "mapping",
                "mapped",
                "torch",
                *self.variables.values(),
            }
            if not plain.isidentifier() or keyword.iskeyword(plain) or plain.startswith("_"):
                plain = f"node_{plain}"
            suffixes = ("_swa", "_buffer")
            while plain in taken or plain.endswith(suffixes):
                plain += "_1" if not plain[-1].isdigit() else "1"
            self.variables[name] = plain
        return self.variables[name]


def _slice(part: Part | None) -> str:
    """Return the subscript of a part of a node's slots."""
    if part is None:
        return ""
    if part.unit == "slots":
        bounds = ["" if bound is None else str(bound) for bound in (part.start, part.stop)]
        return f"[{bounds[0]}:{bounds[1]}]"
    start = "" if part.start is None else f"{part.start} * page_size "
    stop = "" if part.stop is None else f" {part.stop} * page_size"
    return f"[{start}:{stop}]"
