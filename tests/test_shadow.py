"""The shadow against a dictionary: few slots and many, whole pages and torn ones."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swaleak.checker import slot_table
from swaleak.checker.compare import agree, compare, compare_pages, read
from swaleak.checker.run import Execution
from swaleak.checker.shadow import MISSING, TORN, Shadow
from swaleak.checker.slot_table import span_of
from swaleak.errors import ScriptError
from swaleak.scenario import steps
from swaleak.targets.driver import Sizes, State
from swaleak.targets.open import Builtin

PAGES = 4


class Plain:
    """What ``Shadow`` is about, slot by slot."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.mapping: dict[int, int] = {}
        self.owned: set[int] = set()

    def write(self, full: list[int], swa: list[int]) -> None:
        for slot, peer in zip(full, swa, strict=True):
            self.mapping[slot] = peer

    def release(self, full: list[int], owner: bool, peers: bool) -> None:
        pages = {slot // self.size for slot in full}
        if owner:
            self.owned -= pages
        if peers:
            self.mapping = {s: p for s, p in self.mapping.items() if s // self.size not in pages}

    def mapped(self) -> list[int]:
        pairs = {(s // self.size, p // self.size) for s, p in self.mapping.items() if p > 0}
        times = Counter(peer for _, peer in pairs)
        return [times[page] for page in range(1, PAGES + 1)]

    def torn(self) -> set[int]:
        rows = {page: self.row(page) for page in range(PAGES + 1)}
        return {page for page, row in rows.items() if not self.regular(row)}

    def row(self, page: int) -> list[int]:
        return [self.mapping.get(page * self.size + i, 0) for i in range(self.size)]

    def regular(self, row: list[int]) -> bool:
        starts = {peer - at for at, peer in enumerate(row) if peer}
        return not starts or (len(starts) == 1 and min(starts) > 0 and not min(starts) % self.size)


def slots(draw: st.DrawFn, size: int, *, whole: bool) -> list[int]:
    pages = draw(st.lists(st.integers(1, PAGES), min_size=1, max_size=PAGES, unique=True))
    if whole:
        return [page * size + i for page in pages for i in range(size)]
    some = st.lists(st.sampled_from(pages), min_size=1, max_size=6)
    return [page * size + draw(st.integers(0, size - 1)) for page in draw(some)]


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[tuple[str, list[int], list[int]]]]:
    size = draw(st.sampled_from([1, 2, 4]))
    history = []
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["took", "took", "bare", "point", "free", "free_swa", "clear"]))
        full = slots(draw, size, whole=draw(st.booleans()))
        swa = (slots(draw, size, whole=draw(st.booleans())) * len(full))[: len(full)]
        if draw(st.booleans()):
            swa[-1] = 0
        history.append((kind, full, swa))
    return size, history


@given(history=histories())
@settings(deadline=None, max_examples=600)
def test_it_holds_what_was_said_last(
    history: tuple[int, list[tuple[str, list[int], list[int]]]],
) -> None:
    size, calls = history
    plain, shadow = Plain(size), Shadow(PAGES, PAGES, size)
    first = 1
    for kind, full, swa in calls:
        told, peers = torch.tensor(full), torch.tensor(swa)
        match kind:
            case "took":
                shadow.allocate(first, told, first, peers)
                plain.write(full, swa)
            case "bare":
                shadow.allocate(first, told)
                plain.write(full, [0] * len(full))
            case "point":
                shadow.point(span_of(told, size), span_of(peers, size))
                plain.write(full, swa)
            case "clear":
                shadow.clear_mapping(span_of(told, size))
                plain.write(full, [0] * len(full))
            case _:
                owner = kind == "free"
                shadow.free(span_of(told, size), full_side=owner, swa_side=True)
                plain.release(full, owner, True)
        if kind in ("took", "bare"):
            plain.owned |= {slot // size for slot in full}
        first += len(full)
        assert shadow.mapping.tensor.tolist() == [
            plain.mapping.get(slot, 0) for slot in range((PAGES + 1) * size)
        ]
        assert shadow.mapped.tensor.tolist()[1:] == plain.mapped()
        assert shadow.shared == sum(times > 1 for times in plain.mapped())
        assert {p for p in range(1, PAGES + 1) if shadow.owned.cells[p]} == plain.owned
        assert size == 1 or shadow.torn == plain.torn()
        assert all(shadow.peer.cells[page] == TORN for page in shadow.torn)


@pytest.mark.parametrize("page", [-1, PAGES + 1, 10**12])
def test_a_page_that_no_pool_has_is_the_allocators_fault(page: int) -> None:
    with pytest.raises(IndexError, match=f"handed out page {page} of {PAGES}"):
        Shadow(PAGES, PAGES, 1).allocate(1, torch.tensor([1, page]))


@pytest.mark.parametrize("size", [1, 4])
def test_a_slot_that_is_handed_out_without_the_peer_it_is_due_is_missed(size: int) -> None:
    shadow = Shadow(PAGES, PAGES, size)
    full, swa = torch.arange(size, 2 * size), torch.zeros(size, dtype=torch.int64)
    shadow.allocate(1, full, 1, swa, size)
    assert shadow.mapping.tensor[full].tolist() == [MISSING] * size


def test_only_the_last_owner_of_a_page_can_refer_to_it() -> None:
    shadow = Shadow(PAGES, PAGES, 4)

    def took(first: int, full: list[int], swa: list[int]) -> None:
        shadow.allocate(first, torch.tensor(full), first, torch.tensor(swa))

    took(1, [4, 5], [8, 9])
    took(3, [6], [10])  # the same pages, further on
    assert shadow.full.find(((1, 3),)).slots.tolist() == [4, 5, 6]
    assert shadow.swa.find(((2, 2),)).slots.tolist() == [9, 10]
    shadow.free(shadow.full.find(((3, 1),)), full_side=True, swa_side=True)  # all of page 1
    for table in (shadow.full, shadow.swa):
        with pytest.raises(ScriptError, match="nobody holds the slots numbered from 1"):
            table.find(((1, 1),))
    took(4, [4, 5, 6, 7], [8, 9, 10, 11])
    with pytest.raises(ScriptError, match="nobody holds the slots numbered from 3"):
        shadow.full.find(((3, 1),))
    found = shadow.full.find(((4, 4),))
    assert found.slots.tolist() == [4, 5, 6, 7]
    shadow.free(found, full_side=True, swa_side=True)
    with pytest.raises(ScriptError, match="nobody holds the slots numbered from 4"):
        shadow.full.find(((5, 1),))


@pytest.mark.parametrize("sweep", [1, 3])
def test_what_nobody_can_refer_to_is_forgotten(sweep: int) -> None:
    with mock.patch.object(slot_table, "SWEEP", sweep):
        shadow = Shadow(2, 2, 1)
        shadow.full.limit = sweep
        shadow.allocate(1, torch.tensor([1]))
        for number in range(2, 200):
            shadow.allocate(number, torch.tensor([2]))
            shadow.free(shadow.full.find(((number, 1),)), full_side=True, swa_side=True)
    assert len(shadow.full.spans) <= 8
    assert shadow.full.find(((1, 1),)).slots.tolist() == [1]


@given(data=st.data(), page_size=st.sampled_from([1, 4]))
@settings(deadline=None, max_examples=300)
def test_both_comparisons_say_the_same(data: st.DataObject, page_size: int) -> None:
    """``agree`` in a few kernels, and page by page; of healthy states and of damaged ones."""
    execution = Execution(Builtin("cpu").make("eager", Sizes(PAGES, PAGES, page_size)))
    for name in "ab":
        execution.step(steps.Alloc(name))
    if data.draw(st.booleans()):
        execution.step(steps.FreeSwa("a"))
    state = execution.driver.state()
    mapping, lists = state.mapping.clone(), [state.full_free.clone(), state.swa_free.clone()]
    for _ in range(data.draw(st.integers(0, 2))):
        if data.draw(st.booleans()):
            at = data.draw(st.integers(page_size, len(mapping) - 2))
            mapping[at] = data.draw(st.integers(0, (PAGES + 1) * page_size - 1))
        else:
            which = data.draw(st.sampled_from([0, 1]))
            lists[which] = torch.tensor(
                data.draw(st.lists(st.integers(-1, PAGES + 1), max_size=5)), dtype=torch.int64
            )
    damaged = State(page_size, mapping, *lists, PAGES, PAGES)
    page_by_page = compare_pages(read(damaged), execution.shadow)
    assert compare(damaged, execution.shadow) == page_by_page
    assert agree(damaged, execution.shadow) == (not page_by_page.violations)
