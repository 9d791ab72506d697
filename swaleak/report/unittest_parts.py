"""The parts of an exported unittest that are the same for all scenarios, as text.

``HEAD`` and ``TAIL`` are in every file, of ``OPTIONAL`` the methods that its steps call.
"""

from __future__ import annotations

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
DTYPES = torch.int64, torch.int32  # slots in the radix caches, and in the request table


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
        """Return a fresh allocator, to be passed slots of this dtype."""
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

    def alloc(self, pages):
        """Allocate whole pages from both pools; return their full and their SWA slots."""
        allocator, slots = self.allocator, pages * self.page_size
        if self.page_size == 1:
            full = allocator.alloc(slots)
        else:
            full = allocator.full_attn_allocator.alloc(slots)
            swa = allocator.swa_attn_allocator.alloc(slots)
            allocator.set_full_to_swa_mapping(full, swa)
        return full.to(self.dtype), allocator.translate_loc_from_full_to_swa(full).clone()
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
        peers = self.allocator.translate_loc_from_full_to_swa(full)
        return full.to(self.dtype), peers.clone()
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
            whole = torch.equal(slots.long().sort().values, everything)
            self.assertTrue(whole, f"{name} slots that are owned or free are not all, each once")

    def live(self, nodes, adopted):
        """Return the SWA slots of all nodes."""
        return [swa[swa > 0] for _, _, swa in [*nodes, *adopted]]


if __name__ == "__main__":
    unittest.main()
'''
