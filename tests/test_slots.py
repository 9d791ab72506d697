"""The ledger of slots against a dictionary: few slots and many, whole pages and torn ones."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from swaleak.check import names
from swaleak.check.slots import SlotLedger

from swaleak.errors import ScriptError

PAGES = 4


class Plain:
    """What ``SlotLedger`` is about, slot by slot."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.want: dict[int, int] = {}
        self.owned: set[int] = set()

    def write(self, full: list[int], swa: list[int]) -> None:
        for slot, peer in zip(full, swa, strict=True):
            self.want[slot] = peer

    def release(self, full: list[int], owner: bool, peers: bool) -> None:
        pages = {slot // self.size for slot in full}
        if owner:
            self.owned -= pages
        if peers:
            self.want = {s: p for s, p in self.want.items() if s // self.size not in pages}

    def pointed(self) -> list[int]:
        aims = {(s // self.size, p // self.size) for s, p in self.want.items() if p}
        times = Counter(peer for _, peer in aims)
        return [times[page] for page in range(1, PAGES + 1)]


def slots(draw: st.DrawFn, size: int, *, whole: bool) -> list[int]:
    pages = draw(st.lists(st.integers(1, PAGES), min_size=1, max_size=PAGES, unique=True))
    if whole:
        return [page * size + i for page in pages for i in range(size)]
    some = st.lists(st.sampled_from(pages), min_size=1, max_size=6)
    return [page * size + draw(st.integers(0, size - 1)) for page in draw(some)]


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[tuple[str, list[int], list[int]]]]:
    size = draw(st.sampled_from([1, 2, 4]))
    steps = []
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["took", "took", "bare", "point", "free", "free_swa", "clear"]))
        full = slots(draw, size, whole=draw(st.booleans()))
        swa = (slots(draw, size, whole=draw(st.booleans())) * len(full))[: len(full)]
        if draw(st.booleans()):
            swa[-1] = 0
        steps.append((kind, full, swa))
    return size, steps


@pytest.mark.parametrize("few", [0, 3, 64])
@given(history=histories())
@settings(deadline=None, max_examples=300)
def test_it_wants_what_was_said_last(
    few: int, history: tuple[int, list[tuple[str, list[int], list[int]]]]
) -> None:
    size, steps = history
    plain = Plain(size)
    with mock.patch.object(names, "FEW", few):
        ledger = SlotLedger((PAGES + 1) * size + 1, PAGES, PAGES, size)
        first = 1
        for kind, full, swa in steps:
            told, peers = torch.tensor(full), torch.tensor(swa)
            match kind:
                case "took":
                    ledger.took(told, first, peers, first)
                    plain.write(full, swa)
                case "bare":
                    ledger.took(told, first, None, 0)
                    plain.write(full, [0] * len(full))
                case "point":
                    ledger.point(names.listed(told, size), names.listed(peers, size), [])
                    plain.write(full, swa)
                case "clear":
                    ledger.forget(names.listed(told, size))
                    plain.write(full, [0] * len(full))
                case _:
                    owner = kind == "free"
                    ledger.release(names.listed(told, size), owner=owner, peers=True)
                    plain.release(full, owner, True)
            if kind in ("took", "bare"):
                plain.owned |= {slot // size for slot in full}
            first += len(full)
            assert ledger.want.tensor.tolist()[:-1] == [
                plain.want.get(slot, 0) for slot in range((PAGES + 1) * size)
            ]
            assert ledger.pointed.tensor.tolist()[1:] == plain.pointed()
            assert {p for p in range(1, PAGES + 1) if ledger.owned.cells[p]} == plain.owned


@pytest.mark.parametrize("few", [0, 64])
@pytest.mark.parametrize("page", [-1, PAGES + 1, 10**12])
def test_a_page_that_no_pool_has_is_the_allocators_fault(few: int, page: int) -> None:
    with mock.patch.object(names, "FEW", few):
        ledger = SlotLedger(PAGES + 2, PAGES, PAGES, 1)
        with pytest.raises(IndexError, match=f"handed out page {page} of {PAGES}"):
            ledger.took(torch.tensor([1, page]), 1, None, 0)


@pytest.mark.parametrize("few", [0, 64])
def test_only_the_last_owner_of_a_page_can_name_it(few: int) -> None:
    with mock.patch.object(names, "FEW", few):
        ledger = SlotLedger(PAGES * 4 + 5, PAGES, PAGES, 4)
        ledger.took(torch.tensor([4, 5]), 1, torch.tensor([8, 9]), 1)
        ledger.took(torch.tensor([6]), 3, torch.tensor([10]), 3)  # the same pages, further on
        assert ledger.full.find([[1, 3]]).slots.tolist() == [4, 5, 6]
        assert ledger.swa.find([[2, 2]]).slots.tolist() == [9, 10]
        ledger.release(ledger.full.find([[3, 1]]), owner=True, peers=True)  # all of page 1
        for names_of in (ledger.full, ledger.swa):
            with pytest.raises(ScriptError, match="nobody holds the slot with number 1"):
                names_of.find([[1, 1]])
        ledger.took(torch.tensor([4, 5, 6, 7]), 4, torch.tensor([8, 9, 10, 11]), 4)
        with pytest.raises(ScriptError, match="nobody holds the slot with number 3"):
            ledger.full.find([[3, 1]])
        found = ledger.full.find_last([[4, 4]])
        assert found.slots.tolist() == [4, 5, 6, 7]
        ledger.release(found, owner=True, peers=True)
        with pytest.raises(ScriptError, match="nobody holds the slot with number 5"):
            ledger.full.find([[5, 1]])
