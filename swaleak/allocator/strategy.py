"""The strategies: *when* does a grouped free decide which SWA page it owns?

They stand under each other so that the bug can be seen. All have the same four methods:

* ``free(full)``: a free arrives inside a group.
* ``before_write()``: somebody is about to write the full-to-SWA mapping.
* ``flush()``: the group ends.
* ``clear()``: the pool is reset; forget what is queued.

``owner.resolve(full)`` looks up the SWA peers of full slots and clears their mapping;
``owner.release(swa)`` puts SWA slots back into the free list. Between the two, nobody else can
reach those slots: they are owned by the free.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor


class Owner(Protocol):
    """What a strategy needs from the allocator it serves."""

    def resolve(self, full: Tensor) -> Tensor:
        """``full``: int64[n], full slots. Return int64[m], their SWA slots (0: no peer)."""

    def release(self, swa: Tensor) -> None:
        """``swa``: int64[n], SWA slots to give back; zeros and repetitions are ignored."""


class Strategy:
    """Base: a queue of int64 tensors, and a ``before_write`` that does nothing."""

    name: ClassVar[str]
    long_name: ClassVar[str]
    batches: ClassVar[bool] = True

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.queue: list[Tensor] = []

    def free(self, full: Tensor) -> None:
        """Take a free inside a group. ``full``: int64[n], full slots, the caller's buffer."""
        raise NotImplementedError

    def before_write(self) -> None:
        """Hear that the mapping is about to be written."""

    def flush(self) -> None:
        """Release what is queued: the group ends."""

    def clear(self) -> None:
        """Forget what is queued."""
        self.queue = []


class Eager(Strategy):
    """No batching: what a grouped free means. The executable specification."""

    name, long_name, batches = "eager", "eager", False

    def free(self, full: Tensor) -> None:
        """Resolve and release at once."""
        self.owner.release(self.owner.resolve(full))


class Deferred(Strategy):
    """Queue *full* slots, look their peers up at the end of the group.

    SGLang v0.5.18, the bug: ``before_write`` does nothing, so a write in between decides whose
    peer ``flush`` finds (sgl-project/sglang #36081).
    """

    name, long_name = "deferred", "deferred-resolve"

    def free(self, full: Tensor) -> None:
        """Queue the full slots."""
        self.queue.append(full.clone())

    def flush(self) -> None:
        """Resolve **now**, by the mapping of now, and release."""
        if self.queue:
            queue, self.queue = self.queue, []
            self.owner.release(self.owner.resolve(_join(queue)))


class Enqueue(Strategy):
    """Look the peers up when the free is called, queue *SWA* slots.

    Follows sgl-project/sglang #36381, released in 0.5.19.
    """

    name, long_name = "enqueue", "enqueue-snapshot"

    def free(self, full: Tensor) -> None:
        """Resolve **now**, queue the SWA slots: they are ours from here on."""
        self.queue.append(self.owner.resolve(full))

    def flush(self) -> None:
        """Release."""
        if self.queue:
            queue, self.queue = self.queue, []
            self.owner.release(_join(queue))


class Barrier(Deferred):
    """``Deferred``, but resolve the queue before **any** mapping write.

    Follows sgl-project/sglang #36135. One look-up for the whole queue, and only when somebody
    is about to change its answer; in a group without a write it does what ``Deferred`` does.
    """

    name, long_name = "barrier", "barrier-snapshot"

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self.owned: list[Tensor] = []

    def before_write(self) -> None:
        """Resolve **before** the answer changes; keep the SWA slots for the end."""
        if self.queue:
            queue, self.queue = self.queue, []
            self.owned.append(self.owner.resolve(_join(queue)))

    def flush(self) -> None:
        """Resolve what no write has disturbed, and release all; without a write, as above."""
        if self.owned:
            self.before_write()
            owned, self.owned = self.owned, []
            self.owner.release(_join(owned))
        elif self.queue:
            queue, self.queue = self.queue, []
            self.owner.release(self.owner.resolve(_join(queue)))

    def clear(self) -> None:
        """Forget both queues."""
        super().clear()
        self.owned = []


STRATEGIES: dict[str, type[Strategy]] = {s.name: s for s in (Eager, Deferred, Enqueue, Barrier)}


def _join(queue: list[Tensor]) -> Tensor:
    return queue[0] if len(queue) == 1 else torch.cat(queue)
