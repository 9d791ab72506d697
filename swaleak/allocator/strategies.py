"""The strategies: *when* does a grouped free decide which SWA page it owns?

They are written one under the other so that the bug can be seen. Each is two hooks:

* ``on_free(full)``: a free arrives inside a group; what does it put into the queue?
* ``on_flush()``: the group ends; what becomes of the queue?

``barrier`` adds ``before_write``: somebody is about to write the full-to-SWA mapping.

``owner.resolve(full)`` looks up the SWA peers of full slots and clears their mapping;
``owner.release(swa)`` puts SWA slots back into the free list. Between the two nobody else can
reach those slots: the free owns them.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor


class Owner(Protocol):
    """What a strategy needs from the allocator it serves."""

    full_attn_allocator: Any

    def resolve(self, full: Tensor) -> Tensor:
        """``full``: int64[n], full slots. Return int64[m], their SWA slots (0: no peer)."""

    def release(self, swa: Tensor) -> None:
        """``swa``: int64[n], SWA slots to give back; zeros and repetitions are ignored."""


class Queue(list[Tensor]):
    """Slots that wait for the end of the group, int64[n] each."""

    def __copy__(self) -> Queue:
        return Queue(self)

    def take(self) -> Tensor:
        """Empty the queue. Return all slots, int64[m]."""
        slots = self[0] if len(self) == 1 else torch.cat(self)
        self.clear()
        return slots


class Strategy:
    """Base. ``queue``: what ``on_free`` queued; ``full_queue``: full slots without their peers."""

    name: ClassVar[str]
    long_name: ClassVar[str]

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.clear()

    def clear(self) -> None:
        """Forget what is queued: the pools are reset."""
        self.queue = Queue()
        self.full_queue = Queue()

    def on_free(self, full: Tensor) -> None:
        """The SWA side of a free. ``full``: int64[n], full slots, the caller's buffer."""
        raise NotImplementedError

    def on_flush(self) -> None:
        """The group ends: release the SWA pages of what is queued."""
        raise NotImplementedError

    def before_write(self) -> None:
        """Somebody is about to write the mapping."""

    def on_free_full(self, full: Tensor) -> None:
        """The full side of a free, which does not depend on the mapping: it waits for the end."""
        self.full_queue.append(full.clone())

    def on_flush_full(self) -> None:
        """The group ends: release the full pages of what is queued."""
        if self.full_queue:
            self.owner.full_attn_allocator.free(self.full_queue.take())


class Eager(Strategy):
    """No batching: what a free means. The executable specification; also used outside groups."""

    name = long_name = "eager"

    def on_free(self, full: Tensor) -> None:
        """Resolve and release **at once**."""
        self.owner.release(self.owner.resolve(full))

    def on_flush(self) -> None:
        """Nothing waits."""

    def on_free_full(self, full: Tensor) -> None:
        """Release at once."""
        self.owner.full_attn_allocator.free(full)


class Deferred(Strategy):
    """Queue *full* slots, look their peers up when the group ends.

    SGLang v0.5.18, the bug: a mapping write in between decides whose peer ``on_flush`` finds
    (sgl-project/sglang #36081).
    """

    name, long_name = "deferred", "deferred-resolve"

    def on_free(self, full: Tensor) -> None:
        """Queue the full slots."""
        self.queue.append(full.clone())

    def on_flush(self) -> None:
        """Resolve **now**, by the mapping of now, and release."""
        if self.queue:
            self.owner.release(self.owner.resolve(self.queue.take()))


class Enqueue(Strategy):
    """Look the peers up when the free is called, queue *SWA* slots.

    Follows sgl-project/sglang #36381, released in 0.5.19.
    """

    name, long_name = "enqueue", "enqueue-snapshot"

    def on_free(self, full: Tensor) -> None:
        """Resolve **now**, queue the SWA slots: the free owns them from here on."""
        self.queue.append(self.owner.resolve(full))

    def on_flush(self) -> None:
        """Release."""
        if self.queue:
            self.owner.release(self.queue.take())


class Barrier(Deferred):
    """``Deferred``, but resolve the queue before **any** mapping write.

    Follows sgl-project/sglang #36135. One look-up for the whole queue, and only when somebody
    is about to change its answer; in a group without a write it does what ``Deferred`` does.
    """

    name, long_name = "barrier", "barrier-snapshot"

    def clear(self) -> None:
        """Forget both queues."""
        super().clear()
        self.resolved = Queue()

    def before_write(self) -> None:
        """Resolve **before** the answer changes; keep the SWA slots for the end."""
        if self.queue:
            self.resolved.append(self.owner.resolve(self.queue.take()))

    def on_flush(self) -> None:
        """Release what a write made us resolve, and what no write has disturbed."""
        if not self.resolved:
            super().on_flush()
            return
        self.before_write()
        self.owner.release(self.resolved.take())


STRATEGIES: dict[str, type[Strategy]] = {s.name: s for s in (Eager, Deferred, Enqueue, Barrier)}
