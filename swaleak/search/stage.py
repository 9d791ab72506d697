"""An allocator that can be put back to an earlier point.

Going back costs a few microseconds where playing the script again costs hundreds. What is put
back is what ``Allocator.parts`` shows: attributes are put back by reference, lists and other
containers as fresh ones, and a tensor's content only if its version counter says that somebody
wrote it. Tensors keep their identity, so that who shares storage with whom stays true. State in
objects of other kinds is not seen here; ``Explorer`` finds that out by playing from the start.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from swaleak.allocator.mapping import plain
from swaleak.check.ledger import Node
from swaleak.check.player import Allocator, Player
from swaleak.errors import TargetError
from swaleak.script.ops import Op
from swaleak.search.key import Keys
from swaleak.search.queues import CONTAINERS, Kinds, Queues, entries, storage


class _Everyone(frozenset[str]):
    """The set that every name is in: each node's buffer is a tensor of its own."""

    def __contains__(self, name: object) -> bool:
        """Return True."""
        return True


@dataclass(slots=True)
class _Written:
    """A tensor (int64[n]), its content when it was saved, and its version counter by then."""

    tensor: Tensor
    content: Tensor
    version: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A point to go back to. ``kept``: see ``Stage.kept``."""

    parts: tuple[tuple[dict[str, Any], dict[str, Any], tuple[tuple[str, Any], ...]], ...]
    tensors: tuple[_Written, ...]
    nodes: tuple[tuple[str, Node], ...]
    freed: tuple[tuple[str, Node], ...]
    ghosts: tuple[tuple[str, Node], ...]
    in_group: bool
    slots: dict[str, Tensor]
    buffers: dict[str, Tensor]
    kept: dict[str, int]


class Stage:
    """A player and its allocator.

    ``kinds``: what the numbers in the allocator's queues are, see ``queue_kinds``. ``latent``:
    whether nodes freed in a group, and callers' index buffers, may still be named: in the
    production contract neither is.
    """

    def __init__(self, allocator: Allocator, kinds: Kinds, *, latent: bool) -> None:
        self.allocator = allocator
        self.player = Player(allocator)
        if latent:
            self.player.overwritten = _Everyone()
        self._names = [frozenset(vars(part)) for part in allocator.parts()]
        self._queues = Queues(allocator)
        self._keys = Keys(allocator, self._queues, kinds, latent=latent)

    def play(self, op: Op) -> None:
        """Play one operation; raises what ``Player.play`` raises."""
        self.player.play(op)

    def save(self) -> Saved:
        """Return a point to go back to. Its cost is paid here, so that going back is cheap.

        Raises ``TargetError`` for an allocator that has grown an attribute since the start.
        """
        parts = []
        tensors: dict[int, Tensor] = {}
        for part, names in zip(self.allocator.parts(), self._names, strict=True):
            live = vars(part)
            for name in live.keys() - names:
                raise TargetError(
                    f"explore cannot follow {type(part).__name__}.{name}, which is not there from "
                    f"the start"
                )
            held = tuple((n, copy(v)) for n, v in live.items() if isinstance(v, CONTAINERS))
            parts.append((live, dict(live), held))
            for value in live.values():
                for _, item in entries(value):
                    if item is not None:
                        tensors[id(item)] = item
        player, ledger = self.player, self.player.ledger
        for mine in (player.slots, player.buffers):
            tensors.update((id(tensor), tensor) for tensor in mine.values())
        plains = [plain(tensor) for tensor in tensors.values()]
        return Saved(
            tuple(parts),
            tuple(_Written(tensor, tensor.clone(), tensor._version) for tensor in plains),
            _copies(ledger.nodes.items()),
            _copies(ledger.freed.items()),
            _copies(ledger.ghosts.items()),
            ledger.in_group,
            dict(player.slots),
            dict(player.buffers),
            self.kept(),
        )

    def restore(self, saved: Saved) -> None:
        """Go back."""
        for live, attributes, held in saved.parts:
            if len(live) != len(attributes):
                for name in live.keys() - attributes.keys():
                    del live[name]
            live.update(attributes)
            for name, items in held:
                live[name] = items[:] if type(items) is list else copy(items)
        written = [w for w in saved.tensors if w.tensor._version != w.version]
        for w in written:
            w.tensor.copy_(w.content)
        for w in written:  # views share a counter: read it when all have been written
            w.version = w.tensor._version
        player, ledger = self.player, self.player.ledger
        ledger.nodes = dict(_copies(saved.nodes))
        ledger.freed = dict(_copies(saved.freed)) if saved.freed else {}
        ledger.ghosts = dict(_copies(saved.ghosts)) if saved.ghosts else {}
        ledger.in_group = saved.in_group
        player.slots = dict(saved.slots)
        player.buffers = dict(saved.buffers)

    def kept(self) -> dict[str, int]:
        """Return the nodes whose buffer shares storage with what the allocator holds: lengths."""
        buffers = self.player.buffers
        if not buffers:
            return {}
        entries = (entry for _, _, entries in self._queues.held() for entry in entries)
        held = {storage(item) for _, item in entries if item is not None}
        return {name: len(b) for name, b in buffers.items() if storage(b) in held}

    def key(self) -> bytes:
        """Return 16 bytes that tell this state apart; see ``Keys.key``."""
        return self._keys.key(self.player)


def _copies(nodes: Any) -> tuple[tuple[str, Node], ...]:
    return tuple([(name, Node(node.full[:], node.swa[:], node.slots)) for name, node in nodes])
