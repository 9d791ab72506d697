"""A scenario as a unittest for SGLang's own suite: one file that needs SGLang and nothing else.

The steps are made on the built-in model, and each call is written down as a line of Python; what
is expected is what the shadow holds, so that the file can be read without swaleak.
"""

from __future__ import annotations

import json
import keyword
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from swaleak import __version__
from swaleak.allocator.hybrid import HybridAllocator
from swaleak.allocator.strategies import Eager
from swaleak.checker.run import Execution
from swaleak.checker.shadow import Node
from swaleak.errors import ScriptError
from swaleak.scenario import steps
from swaleak.scenario.calls import Call, FreeCall, Slots
from swaleak.scenario.contract import check_room, in_production, refusal
from swaleak.scenario.steps import Step
from swaleak.scenario.toml import Scenario
from swaleak.targets.driver import Driver

MAX_STEPS = 1000
WIDTH = 100
TAKEN = ("self", "allocator", "page_size", "mapping", "mapped", "torch")


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
    return head + "".join(used) + tests + TAIL


def _about(scenario: Scenario) -> Iterator[str]:
    if scenario.story:
        yield textwrap.fill(_prose(scenario.story), 88)
    if scenario.upstream:
        yield "See " + ", ".join(f"sgl-project/sglang {ref}" for ref in scenario.upstream) + "."
    yield f"Written by swaleak {__version__} from the scenario {_prose(scenario.name)}."


def _prose(text: str, end: str = "") -> str:
    """Return text that can be part of a docstring."""
    text = " ".join(text.split()).replace("\\", "\\\\").replace('"', "'")
    return text if not text or text[-1] in ".?!" else text + end


def _test(body: str, sizes: list[int]) -> str:
    name = "_".join(map(str, sizes))
    plural = "s" if len(sizes) > 1 else ""
    listed = ", ".join(map(str, sizes)) + ("," if len(sizes) == 1 else "")
    return f"""
    def test_page_size{plural}_{name}(self):
        for page_size in ({listed}):
            # callers pass int64 tensors, and int32 slices of the request table
            for dtype in (torch.int64, torch.int32):
                with self.subTest(page_size=page_size, dtype=dtype):
                    self.replay_{name}(page_size, dtype)

    def replay_{name}(self, page_size, dtype):
        allocator = self.start(page_size, dtype)
{textwrap.indent(body, " " * 8)}
"""


class _Writer:
    """Writes the calls of a scenario as Python. ``full``, ``swa``: first number -> variable."""

    def __init__(self, scenario: Scenario, page_size: int) -> None:
        self.scenario = scenario
        self.page_size = page_size
        sizes = (scenario.full_pages * page_size, scenario.swa_pages * page_size)
        self.execution = Execution(Driver(HybridAllocator(*sizes, page_size, "cpu", Eager)))
        self.shadow = self.execution.shadow
        self.overwritten = {s.node for s in scenario.steps if isinstance(s, steps.Overwrite)}
        self.full: dict[int, tuple[str, int]] = {}
        self.swa: dict[int, tuple[str, int]] = {}
        self.swa_numbers: dict[int, int] = {0: 0}  # SWA slot of the model -> number
        self.variables: dict[str, str] = {}

    def lines(self) -> Iterator[str]:
        """Yield the lines of one replay."""
        for number, step in enumerate(self.scenario.steps, start=1):
            reason = refusal(step, self.shadow)
            if reason is not None:
                raise self._fail(number, reason)
            try:
                check_room(step, self.shadow)
            except ScriptError as error:
                raise self._fail(number, str(error)) from None
            may_be_refused = self._may_be_refused(step)
            was_in_group, nodes = self.shadow.in_group, dict(self.shadow.nodes)
            before = list(self._asserts(nodes))
            made = list(self._make(step))
            yield f"# {number}: {step}"
            if made and may_be_refused:
                yield "try:"
                yield from (f"    {line}" for line in made)
                yield "except Exception:  # right as well, if nothing has changed"
                if was_in_group:
                    yield "    allocator.free_group_end()"
                yield from (f"    {line}" for line in before)
                yield "    return"
            else:
                yield from made
            yield from self._expect(step)
            allocates = isinstance(step, steps.Alloc | steps.AllocTail)
            if not self.shadow.in_group and not allocates:
                yield from self._asserts(self.shadow.nodes)
        if self.shadow.in_group:
            yield "# the group that is still open"
            yield "allocator.free_group_end()"
            yield from self._asserts(self.shadow.nodes)
        yield from self._asserts(self.shadow.nodes, "assert_handed_out_once")

    def _make(self, step: Step) -> Iterator[str]:
        """Make the calls of a step, and yield them as Python."""
        execution, shadow = self.execution, self.shadow
        for call in step.lower(shadow):
            swa = shadow.swa.next
            yield from self._write(call, step)
            if not isinstance(step, steps.Group | steps.Overwrite):
                call.make(execution.driver, shadow)
            elif isinstance(step, steps.Group):  # the model refuses what other allocators allow
                shadow.group(opens=step.edge == "begin")
            for number in range(swa, shadow.swa.next):
                if slot := shadow.swa.slot(number):  # 0: a full slot without a peer
                    self.swa_numbers[slot] = number
        step.rename(shadow)

    def _write(self, call: Call, step: Step) -> Iterator[str]:
        """Yield a call as Python, its slots as variables."""
        values: dict[str, Any] = {}
        for name in call.__struct_fields__:
            value = getattr(call, name)
            if name in ("full", "source", "last") and isinstance(value, tuple):
                values[name] = self._slots(value, self.full)
            elif name == "swa" and isinstance(value, tuple):
                values[name] = self._slots(value, self.swa)
            elif name in ("n", "tail"):
                values[name] = self._pages(value)
            elif name in ("prefix", "seq"):
                values[name] = "[" + ", ".join(self._pages(v) for v in value) + "]"
            elif name == "buffer" and value is not None:
                values[name] = f"{self._variable(value)}_buffer"
        if isinstance(call, FreeCall):
            passed = values["passed"] = f"self.index({values['full']})"
            if step.nodes()[0] in self.overwritten:
                yield f"{values['buffer']} = {passed}"
                values["passed"] = values["buffer"]
        node = next(iter(step.nodes()), "")
        if call.allocates:
            values["new"] = self._fresh(node, "", getattr(call, "full", 0), call, self.full)
            new_swa = self._fresh(node, "_swa", getattr(call, "swa", 0), call, self.swa)
            values["new_swa"] = new_swa
        yield call.code.format(**values)
        if call.allocates and hasattr(call, "full") and hasattr(call, "swa"):
            peers = f"allocator.translate_loc_from_full_to_swa({values['new']}).clone()"
            yield f"{values['new_swa']} = {peers}"

    def _fresh(
        self, node: str, suffix: str, first: int, call: Any, known: dict[int, tuple[str, int]]
    ) -> str:
        """Return a new variable for what a call hands out."""
        if not first:
            return ""
        used = {name for name, _ in (*self.full.values(), *self.swa.values())}
        stem = name = self._variable(node) + suffix
        at = 2
        while name in used:
            name, at = f"{stem}_{at}", at + 1
        known[first] = (name, call.n)
        return name

    def _slots(self, numbers: Slots, known: dict[int, tuple[str, int]]) -> str:
        """Return slots as an expression; number 0 is no slot."""
        parts = []
        for first, count in numbers:
            while count:
                if first == 0:
                    parts.append(f"self.no_slots({self._pages(count)})")
                    break
                start = max(number for number in known if number <= first)
                name, length = known[start]
                low = first - start
                high = min(length, low + count)
                whole = low == 0 and high == length
                bounds = f"{self._pages(low) if low else ''}:{self._pages(high)}"
                parts.append(name if whole else f"{name}[{bounds}]")
                first, count = first + high - low, count - (high - low)
        return parts[0] if len(parts) == 1 else f"torch.cat([{', '.join(parts)}])"

    def _pages(self, slots: int) -> str:
        """Return a number of slots, by the page size where it is whole pages."""
        pages, rest = divmod(slots, self.page_size)
        if rest or not pages:
            return str(slots)
        return "page_size" if pages == 1 else f"{pages} * page_size"

    def _expect(self, step: Step) -> Iterator[str]:
        if not isinstance(step, steps.Expect):
            return
        if step.physical is not None:
            used = "SWA_PAGES - allocator.swa_available_size() // page_size"
            yield f'self.assertEqual({used}, {step.physical}, "physical SWA pages")'
        if step.mapped is not None:
            yield "mapping = allocator.full_to_swa_index_mapping[:-1]"
            yield "mapped = set((mapping[mapping > 0] // page_size).tolist())"
            yield f'self.assertEqual(len(mapped), {step.mapped}, "mapped SWA pages")'

    def _may_be_refused(self, step: Step) -> bool:
        """Whether SGLang's caches never do this, so that an allocator may refuse it."""
        return not in_production(step, self.shadow) and not isinstance(step, steps.Overwrite)

    def _asserts(self, nodes: dict[str, Node], name: str = "assert_owned") -> Iterator[str]:
        """Yield an assertion about all owners."""
        orphans = self.shadow.orphans()
        listed, adopted = self._entries(nodes), self._entries(orphans)
        line = f"self.{name}([{', '.join(listed)}]"
        line += f", [{', '.join(adopted)}])" if orphans else ")"
        if len(line) <= WIDTH - 8:
            yield line
            return
        yield f"self.{name}("
        for entries in [listed, *([adopted] if orphans else [])]:
            yield "    ["
            yield from (f"        {entry}," for entry in entries)
            yield "    ],"
        yield ")"

    def _entries(self, nodes: dict[str, Node]) -> list[str]:
        return [self._entry(name, node) for name, node in nodes.items()]

    def _entry(self, name: str, node: Node) -> str:
        shown = json.dumps(name, ensure_ascii=False)
        full = self.shadow.full.find(node.numbers)
        peers = self.shadow.mapping.tensor[full.slots].tolist()
        numbers = _ranges(self.swa_numbers[peer] for peer in peers)
        return (
            f"({shown}, {self._slots(node.numbers, self.full)}, {self._slots(numbers, self.swa)})"
        )

    def _fail(self, number: int, reason: str) -> ScriptError:
        where = self.scenario.source or self.scenario.name
        return ScriptError(f"{where}: step {number}: {reason}")

    def _variable(self, name: str) -> str:
        """Return the name of a node as a variable; no two nodes share one."""
        if name not in self.variables:
            plain = re.sub(r"\W", "_", name, flags=re.ASCII)
            taken = {*TAKEN, *self.variables.values()}
            if not plain.isidentifier() or keyword.iskeyword(plain) or plain.startswith("_"):
                plain = f"node_{plain}"
            while plain in taken or re.search(r"(_swa|_buffer|_swa_\d+)$", plain):
                plain += "_1" if not plain[-1].isdigit() else "1"
            self.variables[name] = plain
        return self.variables[name]


def _ranges(numbers: Iterable[int]) -> Slots:
    """Return numbers as ranges; zeros are a range of their own."""
    ranges: list[list[int]] = []
    for number in numbers:
        if (ranges and number and ranges[-1][0] and number == sum(ranges[-1])) or (
            ranges and not number and not ranges[-1][0]
        ):
            ranges[-1][1] += 1
        else:
            ranges.append([number, 1])
    return tuple((first, count) for first, count in ranges)


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
    def start(self, page_size, dtype):
        """Return a fresh allocator."""
        self.page_size, self.dtype = page_size, dtype
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

    def index(self, full):
        """Return full slots as a caller passes them to a free: in a tensor of its own."""
        if self.dtype == torch.int64:
            return full.clone()
        table = torch.zeros((2, len(full) + 2), dtype=torch.int32, device=DEVICE)
        table[1, 1:-1] = full
        return table[1, 1:-1]
'''
OPTIONAL = {
    "alloc_pages": '''
    def alloc_pages(self, slots):
        """Allocate whole pages from both pools; return their full slots."""
        allocator = self.allocator
        full = allocator.full_attn_allocator.alloc(slots)
        allocator.set_full_to_swa_mapping(full, allocator.swa_attn_allocator.alloc(slots))
        return full
''',
    "growth": '''
    def growth(self, prefix_lens, seq_lens, last):
        """Return what alloc_extend takes for requests that grow; `last`: slot 0 for none."""
        prefix, seq = torch.tensor(prefix_lens), torch.tensor(seq_lens)
        last_loc = torch.where(last > 0, last, -1)
        return prefix.to(DEVICE), prefix, seq.to(DEVICE), seq, last_loc
''',
    "free_full": '''
    def free_full(self, full):
        """Free a tombstone; releases without free_full do it with free."""
        getattr(self.allocator, "free_full", self.allocator.free)(full)
''',
    "segment": '''
    def segment(self, name, otherwise, full):
        """Free the slots of one request; releases without that call do it with another."""
        if hasattr(self.allocator, name):
            getattr(self.allocator, name)(full, start_pos=0)
        else:
            getattr(self.allocator, otherwise)(full)
''',
    "no_slots": '''
    def no_slots(self, count):
        """Return `count` times slot 0: no peer."""
        return torch.zeros(count, dtype=torch.int64, device=DEVICE)
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
        used = len({slot // page_size for _, full, _ in nodes for slot in full.tolist()})
        self.assertEqual(full_pages, used, "full pages in use, full pages of nodes")

    def assert_handed_out_once(self, nodes, adopted=()):
        """Check that what is left in the pools is nobody's, and no page is there twice."""
        allocator, page_size = self.allocator, self.page_size
        for name, pool, owned, pages in (
            ("full", allocator.full_attn_allocator, [full for _, full, _ in nodes], FULL_PAGES),
            ("SWA", allocator.swa_attn_allocator, self.live(nodes, adopted), SWA_PAGES),
        ):
            free = pool.available_size()
            rest = pool.alloc(free).tolist() if free else []
            used = {slot // page_size for slots in owned for slot in slots.tolist()}
            listed = sorted([*used, *(slot // page_size for slot in rest[::page_size])])
            everything = list(range(1, pages + 1))
            self.assertEqual(listed, everything, f"{name} pages, owned or free, each once")

    def live(self, nodes, adopted):
        """Return the SWA slots of all nodes."""
        return [swa[swa > 0] for _, _, swa in [*nodes, *adopted]]


if __name__ == "__main__":
    unittest.main()
'''
