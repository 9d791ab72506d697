"""The ledger: who should own what. It applies every operation at once, as if no group existed.

A free group is batching only, so outside a group an allocator has to agree with the ledger about
which node holds which pages. The ledger never looks into an allocator: it is told which pages a
call handed out, and works out the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swaleak.errors import ScriptError
from swaleak.script import ops
from swaleak.script.ops import Op, Part


@dataclass(slots=True)
class Node:
    """An owner. ``full`` and ``swa``: page numbers, one pair a page; ``None``: a tombstone page.

    ``slots``: how many slots it holds; only its last page may be partly filled.
    """

    full: list[int]
    swa: list[int | None]
    slots: int

    @property
    def tombstone(self) -> bool:
        """Whether no page has an SWA peer."""
        return all(page is None for page in self.swa)

    @property
    def live(self) -> bool:
        """Whether every page has an SWA peer."""
        return all(page is not None for page in self.swa)


@dataclass(slots=True)
class Ledger:
    """The state the specification says an allocator is in.

    ``nodes`` own full slots. ``freed`` were freed in the group that is open. ``ghosts`` are freed
    nodes whose SWA side was adopted afterwards: their full slots are free, their peers live.
    """

    page_size: int
    nodes: dict[str, Node] = field(default_factory=dict)
    freed: dict[str, Node] = field(default_factory=dict)
    ghosts: dict[str, Node] = field(default_factory=dict)
    in_group: bool = False

    def check(self, op: Op) -> None:
        """Raise ``ScriptError`` with the reason if ``op`` makes no sense now."""
        match op:
            case ops.Alloc(name) | ops.AllocTail(name):
                if name in self.nodes or name in self.ghosts:
                    raise ScriptError(f"node {name!r} is allocated already")
                self._no_ghost()
                if isinstance(op, ops.AllocTail) and self.page_size == 1:
                    raise ScriptError("alloc_tail needs a page size above 1")
            case ops.Extend(name) if name not in self.nodes:
                self.check(ops.Alloc(name))
            case ops.Extend(name) | ops.Decode(name):
                node = self._node(name, op)
                if node.slots % self.page_size and node.swa[-1] is None:
                    raise ScriptError(f"{op.key} {name}: its last page has no SWA peer to go on in")
                self._no_ghost()
            case ops.FreeOp(name, part):
                node = self._holder(name, op)
                pages = self.pages_of(node, part)
                if not pages:
                    raise ScriptError(f"{op.key} {name}: {part} names nothing")
                if isinstance(op, ops.FreeFull) and any(node.swa[i] is not None for i in pages):
                    raise ScriptError(f"free_full {name}: it still has SWA pages")
            case ops.Recover(name, source) | ops.Adopt(name, source):
                node = self._tombstone(name, op)
                self._same_length(op, node, self._live(source, op))
            case ops.Replace(name, source):
                self._node(name, op)
                self._node(source, op)
            case ops.LoadBack(name):
                self._tombstone(name, op)
            case ops.Overwrite(_, source):
                self._node(source, op)

    def allocated(self, name: str, node: Node) -> None:
        """Enter what an allocation handed out."""
        self.nodes[name] = node
        if self.freed:  # what was freed and is handed out again is nobody's to adopt
            taken = set(node.full)
            self.freed = {
                k: v for k, v in self.freed.items() if k != name and taken.isdisjoint(v.full)
            }

    def knows(self, name: str) -> bool:
        """Whether any of its pages may still be named."""
        return name in self.nodes or name in self.freed or name in self.ghosts

    def apply(self, op: Op, fresh: list[int | None] | None = None) -> None:
        """Enter any other operation. ``fresh``: the SWA pages that ``load_back`` was given."""
        match op:
            case ops.Free(name, part) | ops.FreeFull(name, part):
                node = self.nodes[name]
                self._drop(name, node, self.pages_of(node, part))
            case ops.FreeSwa(name, part):
                node = self.nodes[name] if name in self.nodes else self.ghosts[name]
                for i in self.pages_of(node, part):
                    node.swa[i] = None
                if name in self.ghosts and node.tombstone:
                    del self.ghosts[name]
            case ops.Recover(name, source):
                self.nodes[name].swa = self.nodes.pop(source).swa
            case ops.Adopt(name, source):
                giver = self.nodes[source]
                if name in self.nodes:
                    self.nodes[name].swa = giver.swa
                else:
                    ghost = self.freed.pop(name)
                    self.ghosts[name] = Node(ghost.full, giver.swa, ghost.slots)
                giver.swa = [None] * len(giver.full)
            case ops.Replace(name, source):
                self.nodes[name] = self.nodes.pop(source)
            case ops.LoadBack(name):
                assert fresh is not None
                self.nodes[name].swa = fresh
            case ops.Group(edge):
                self.in_group = edge == "begin"
                if not self.in_group:
                    self.freed.clear()

    def pages_of(self, node: Node, part: Part | None) -> range:
        """Return which of the node's pages a part touches; a whole page goes for one slot."""
        if part is None:
            return range(len(node.full))
        slots = part.slots(node.slots, self.page_size)
        if slots.start >= slots.stop:
            return range(0)
        return range(slots.start // self.page_size, -(-slots.stop // self.page_size))

    def full_pages(self) -> int:
        """Return how many full pages are owned."""
        return sum(len(node.full) for node in self.nodes.values())

    def swa_pages(self) -> int:
        """Return how many SWA pages are owned."""
        owners = [*self.nodes.values(), *self.ghosts.values()]
        return sum(page is not None for node in owners for page in node.swa)

    def _drop(self, name: str, node: Node, gone: range) -> None:
        kept = [i for i in range(len(node.full)) if i not in gone]
        if not kept:
            del self.nodes[name]
            if self.in_group:
                self.freed[name] = Node(node.full, [None] * len(node.full), node.slots)
            return
        partly = node.slots % self.page_size
        last_kept = kept[-1] == len(node.full) - 1
        node.slots = len(kept) * self.page_size
        if partly and last_kept:
            node.slots += partly - self.page_size
        node.full = [node.full[i] for i in kept]
        node.swa = [node.swa[i] for i in kept]

    def _no_ghost(self) -> None:
        if self.ghosts:
            ghost = next(iter(self.ghosts))
            raise ScriptError(
                f"the SWA pages of {ghost!r} hang on full slots that are free; "
                f"free_swa it before anything is allocated"
            )

    def _node(self, name: str, op: Op | ops.FreeOp) -> Node:
        if name not in self.nodes:
            raise ScriptError(f"{op.key}: there is no node {name!r} at this point")
        return self.nodes[name]

    def _holder(self, name: str, op: ops.FreeOp) -> Node:
        if name in self.ghosts and isinstance(op, ops.FreeSwa):
            return self.ghosts[name]
        return self._node(name, op)

    def _tombstone(self, name: str, op: Op) -> Node:
        if isinstance(op, ops.Adopt) and name in self.freed:
            return self.freed[name]
        node = self._node(name, op)
        if not node.tombstone:
            raise ScriptError(f"{op.key} {name}: it is no tombstone, free_swa it first")
        return node

    def _live(self, name: str, op: Op) -> Node:
        node = self._node(name, op)
        if not node.live:
            raise ScriptError(f"{op.key}: {name!r} has no SWA pages to give")
        return node

    def _same_length(self, op: Op, node: Node, source: Node) -> None:
        if node.slots != source.slots:
            raise ScriptError(f"{op.key}: lengths differ, {node.slots} and {source.slots} slots")
