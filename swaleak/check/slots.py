"""A ledger of slots: what each full slot should map to, and which pages have an owner.

Most calls are about a few pages. Those are entered one by one, which is faster than a dozen
kernels; many, by kernels. Both see the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from swaleak.check.names import Named, Names, listed, listed_pair
from swaleak.column import Column
from swaleak.script.trace import Ranges


class SlotLedger:
    """What each full slot should map to, and the names of both pools' slots.

    ``want``: by full slot, its SWA slot, 0 for none. The rest is by page. ``owned``: 1 while
    somebody has the full page. ``aims``: the SWA page that a full page's slots want, 0 for none,
    -1 for several, which are ``torn``. ``pointed``: how many full pages want an SWA page, and one
    more while it is taken for later (``later``, by its first number).
    """

    def __init__(self, slots: int, full_pages: int, swa_pages: int, page_size: int) -> None:
        self.size = page_size
        self.want = Column(slots)
        self.rows = self.want.tensor[: (full_pages + 1) * page_size].view(-1, page_size)
        self.owned = Column(full_pages + 1)
        # with one slot a page, that slot's peer is the page's
        self.aims = self.want if page_size == 1 else Column(full_pages + 1)
        self.pointed = Column(swa_pages + 1)
        self.owned.cells[0] = self.pointed.cells[0] = 1  # the padding is never free
        self.one = torch.ones(1, dtype=torch.int64)
        self.torn: dict[int, set[int]] = {}
        self.full = Names(full_pages, page_size, self.owned, self.aims)
        self.swa = Names(swa_pages, page_size, self.pointed)
        self.later: dict[int, Named] = {}
        self.most = max(full_pages + 1, swa_pages + 1) * page_size  # slots a call can be about
        self.nothing = Column(page_size).cells
        every = Column((swa_pages + 1) * page_size if page_size > 1 else 1)
        torch.arange(len(every.cells), out=every.tensor)
        self.every_swa_slot = every.cells

    def took(self, full: Tensor, first: int, peers: Tensor | None, swa_first: int) -> None:
        """Full slots (int64[n]) were handed out, numbered from ``first``, perhaps with peers."""
        if peers is None:
            named = listed(full, self.size)
            self.full.add(first, named)
            self.forget(named)
        else:
            named, named_peers = listed_pair(full, peers, self.size)
            self.full.add(first, named)
            self.swa.add(swa_first, named_peers)
            self._aim(named, named_peers)
        if named.pages is None:
            self.owned.tensor.index_fill_(0, full // self.size, 1)
        else:
            owned = self.owned.cells
            for page in named.pages:
                owned[page] = 1

    def took_swa(self, swa: Tensor, first: int) -> None:
        """SWA slots (int64[n]) were handed out that nothing maps to yet."""
        self.later[first] = listed(swa, self.size)
        self.swa.add(first, self.later[first])
        self.pointed.tensor[self.swa.touched(swa)] += 1

    def point(self, full: Named, swa: Named, ranges: Ranges) -> None:
        """Full slots should map to SWA slots, as many, from now on; ``ranges`` name those."""
        self._aim(full, swa)
        for first, length in ranges:
            if length < self._not_later(first):
                self.swa.pinned.add(first)  # the rest of it was never mapped

    def gave_back_swa(self, ranges: Ranges) -> None:
        """SWA slots went back into their pool, past the allocator."""
        for first, _ in ranges:
            self._not_later(first)

    def release(self, full: Named, *, owner: bool, peers: bool) -> None:
        """The whole pages of full slots lose their owners, their peers, or both."""
        if full.pages is None:
            pages = self.full.touched(full.slots)
            if owner:
                self.owned.tensor.index_fill_(0, pages, 0)
                self.owned.cells[0] = 1
            if peers:
                self._drop_many(pages)
            return
        owned, aims = self.owned.cells, self.aims.cells
        for page in full.pages:
            if owner:
                owned[page] = 0
            if peers and aims[page]:
                self._drop(page)

    def forget(self, full: Named) -> None:
        """These full slots should map to nothing any more."""
        if full.pages is None or not full.whole:
            if self.wants(full):
                self._write(full.slots, torch.zeros_like(full.slots))
            return
        aims = self.aims.cells
        for page in full.pages:
            if aims[page]:
                self._drop(page)

    def wants(self, full: Named) -> bool:
        """Whether any of these full slots should map to something."""
        if full.pages is None or not full.whole:
            return bool(self.want.tensor[full.slots].any())
        aims = self.aims.cells
        return any(aims[page] for page in full.pages)

    def taken_for_later(self) -> Iterator[Tensor]:
        """Yield SWA slots, int64[n], that were handed out and never mapped yet."""
        for allocation in self.later.values():
            yield allocation.slots

    def _not_later(self, first: int) -> int:
        """These are mapped now, or gone. Return how many slots were taken for later with them."""
        taken = self.later.pop(first, None)
        if taken is None:
            return 0
        self.pointed.tensor[self.swa.touched(taken.slots)] -= 1
        return len(taken.slots)

    def _aim(self, full: Named, swa: Named) -> None:
        """Full slots want these SWA slots, one each, and nothing else."""
        if full.whole and swa.whole and full.pages is not None and swa.pages is not None:
            self._aim_pages(full.pages, swa.pages)
        elif full.cells is not None and swa.cells is not None:
            for slot, peer in zip(full.cells, swa.cells, strict=True):
                self._aim_slot(slot, peer)
        else:
            self._write(full.slots, swa.slots)

    def _aim_pages(self, pages: list[int], peers: list[int]) -> None:
        aims, pointed, want, size = self.aims.cells, self.pointed.cells, self.want.cells, self.size
        every = self.every_swa_slot
        for page, peer in zip(pages, peers, strict=True):
            if aims[page]:
                self._drop(page)
            if peer:
                aims[page] = peer
                pointed[peer] += 1
                if size > 1:
                    row = every[peer * size : peer * size + size]
                    want[page * size : page * size + size] = row

    def _aim_slot(self, slot: int, peer: int) -> None:
        aims, want = self.aims.cells, self.want.cells
        page, peer_page = slot // self.size, peer // self.size
        if want[slot] or (peer and aims[page] not in (0, peer_page)):
            self._write(torch.tensor([slot]), torch.tensor([peer]))
        elif peer:
            want[slot] = peer
            if not aims[page]:
                aims[page] = peer_page
                self.pointed.cells[peer_page] += 1

    def _drop(self, page: int) -> None:
        """A full page that wants something wants nothing any more."""
        aims, pointed, size = self.aims.cells, self.pointed.cells, self.size
        if aims[page] > 0:
            pointed[aims[page]] -= 1
        else:
            for peer in self.torn.pop(page):
                pointed[peer] -= 1
        aims[page] = 0
        if size > 1:
            self.want.cells[page * size : (page + 1) * size] = self.nothing

    def _drop_many(self, pages: Tensor) -> None:
        """Full pages, int64[n], each once, want nothing any more."""
        self._count(pages, -1)
        self.rows.index_fill_(0, pages, 0)
        self.aims.tensor.index_fill_(0, pages, 0)

    def _write(self, full: Tensor, swa: Tensor) -> None:
        """Full slots want SWA slots, int64[n] each, whatever pages they are in."""
        pages = self.full.touched(full)
        self._count(pages, -1)
        want = self.want.tensor.index_copy_(0, full, swa)
        written = want.index_select(0, full)
        if not torch.equal(written, swa):  # a slot came twice: the last one counts
            for slot, peer in zip(full.tolist(), swa.tolist(), strict=True):
                self.want.cells[slot] = peer
        if self.size > 1:
            peers = self.rows[pages] // self.size
            most = peers.amax(1)
            one = ((peers == most[:, None]) | (peers == 0)).all(1)
            self.aims.tensor[pages] = torch.where(one, most, -1)
            for page, row in zip(pages[~one].tolist(), peers[~one].tolist(), strict=True):
                self.torn[page] = {*row} - {0}
        self._count(pages, 1)

    def _count(self, pages: Tensor, by: int) -> None:
        """Count what full pages, int64[n], each once, want."""
        aims = self.aims.tensor.index_select(0, pages)
        once = self.one.expand(len(pages))
        self.pointed.tensor.index_add_(0, aims.clamp(min=0), once, alpha=by)
        self.pointed.cells[0] = 1
        for page in pages[aims < 0].tolist() if self.torn else ():
            for peer in self.torn[page] if by > 0 else self.torn.pop(page):
                self.pointed.cells[peer] += by
