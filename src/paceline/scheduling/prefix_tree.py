"""Which token sequences lie where: a radix tree over the tokens of everything that runs or is kept.

    root ── "You are helpful." ──┬── "What is"... (running, seq id 3)
                                 └── "Tell me"... (host blob)

A node stands for a range of a path: tokens `start` to `end`. Its `holders` have, or will have, that range under a sequence
id on the device; its `blob` has it in host memory. Namespaces (adapters, tenant, salt) share nothing, so they cannot even
tell each other's prefixes by how long something takes.

Pure; tokens are kept as bytes, four a token, which compare fast.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

Namespace = tuple[object, ...]
WIDTH = 4


class Saved(Protocol):
    """What a backend made of saved cells; only it can read them."""

    @property
    def nbytes(self) -> int: ...  # noqa: D102


class Holder(Protocol):
    """Something that has tokens under a sequence id: a running sequence, or a kept path."""

    @property
    def seq_id(self) -> int | None: ...  # noqa: D102
    @property
    def num_computed(self) -> int: ...  # noqa: D102


@dataclass(slots=True, eq=False)
class Blob:
    """A range of a path in host memory, as the backend saved it. Several nodes may be parts of one range."""

    start: int
    end: int
    data: Saved
    num_nodes: int = 1


@dataclass(slots=True, eq=False)
class Node:
    """Tokens [start, end) of every path that goes through it. end: kept beside the tokens, since it is asked for often."""

    start: int
    tokens: bytes
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)
    holders: dict[Holder, None] = field(default_factory=dict)
    blob: Blob | None = None
    is_snapshot: bool = False  # the blob is a whole state at `end`, not a range
    namespace: Namespace | None = None  # of a root
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.start + len(self.tokens) // WIDTH

    def path(self) -> list[Node]:
        """From the first node under the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class Match:
    """How far a path is known. nodes: those that it goes through, the last one perhaps only in part; length: in tokens.

    cached: the length of a known path through the last node, a recent one: how much longer what is known goes on.
    """

    nodes: tuple[Node, ...]
    length: int
    cached: int


class PrefixTree:
    """The tree of all namespaces. `num_bytes`: of all blobs."""

    def __init__(self) -> None:
        self._roots: dict[Namespace, Node] = {}
        self._by_age: OrderedDict[Node, None] = OrderedDict()  # nodes with blobs; a node is younger than all below it
        self.num_bytes = 0

    def match(self, namespace: Namespace, tokens: bytes) -> Match:
        """The longest known beginning of these tokens."""
        node = self._roots.get(namespace)
        if node is None:
            return Match((), 0, 0)
        nodes: list[Node] = []
        at = 0
        while at < len(tokens):
            child = node.children.get(tokens[at : at + WIDTH])
            if child is None:
                break
            shared = common(child.tokens, tokens, at)
            nodes.append(child)
            at += shared
            node = child
            if shared < len(child.tokens):
                break
        return Match(tuple(nodes), at // WIDTH, _longest(nodes[-1]) if nodes else 0)

    def insert(self, namespace: Namespace, tokens: bytes) -> Node | None:
        """The node at whose end these tokens end; made, and others split, where that is needed. None for no tokens."""
        if not tokens:
            return None
        return self._descend(self._root(namespace), tokens)

    def hold(self, holder: Holder, end: Node) -> None:
        """The holder has, or will have, the path to the end of this node."""
        for node in end.path():
            node.holders[holder] = None

    def grow(self, holder: Holder, end: Node, tokens: bytes) -> Node:
        """More tokens of a holder behind its end; answers where it ends now."""
        if not end.children and end.blob is None and len(end.holders) == 1:
            end.tokens += tokens
            end.end += len(tokens) // WIDTH
            return end
        grown = self._descend(end, tokens)
        self.hold(holder, grown)
        return grown

    def let_go(self, holder: Holder, end: Node) -> None:
        """The holder has it no longer; nodes that nothing speaks for go away."""
        for node in end.path():
            node.holders.pop(holder, None)
        self.prune(end)

    def put_blob(self, nodes: list[Node], blob: Blob, *, is_snapshot: bool = False) -> None:
        """The range of these nodes, one below the other, is in host memory now, or the state at the end of the one."""
        for node in nodes:
            self.drop_blob(node)
            node.blob, node.is_snapshot = blob, is_snapshot
        blob.num_nodes = len(nodes)
        self.num_bytes += blob.data.nbytes
        self.touch(nodes[-1])

    def drop_blob(self, node: Node) -> None:
        """It is there no longer."""
        blob = node.blob
        if blob is None:
            return
        node.blob, node.is_snapshot = None, False
        self._by_age.pop(node, None)
        blob.num_nodes -= 1
        if not blob.num_nodes:
            self.num_bytes -= blob.data.nbytes

    def touch(self, node: Node) -> None:
        """The path to this node was used."""
        for one in reversed(node.path()):
            if one.blob is not None:
                self._by_age[one] = None
                self._by_age.move_to_end(one)

    def oldest(self) -> Node | None:
        """The node with a blob that was used longest ago; nothing below it has one that is younger."""
        return next(iter(self._by_age), None)

    def prune(self, node: Node | None) -> None:
        """Takes this node and those above it away as far as nothing speaks for them."""
        while node is not None and node.parent is not None:
            if node.holders or node.blob is not None or node.children:
                return
            parent = node.parent
            del parent.children[node.tokens[:WIDTH]]
            node.parent = None
            node = parent
        if node is not None and node.namespace is not None and not node.children:
            self._roots.pop(node.namespace, None)

    def nodes(self) -> Iterator[Node]:
        """All nodes, for checks."""
        waiting = [child for root in self._roots.values() for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def _root(self, namespace: Namespace) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(0, b"", None, namespace=namespace)
        return root

    def _descend(self, node: Node, tokens: bytes) -> Node:
        """The node below this one at whose end these tokens end; made, and others split, where that is needed."""
        at = 0
        while at < len(tokens):
            child = node.children.get(tokens[at : at + WIDTH])
            if child is None:
                made = Node(node.end, tokens[at:], node)
                node.children[tokens[at : at + WIDTH]] = made
                return made
            shared = common(child.tokens, tokens, at)
            node = child if shared == len(child.tokens) else self._split(child, shared)
            at += shared
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Divides a node after `at` bytes; the upper part is new and answered."""
        assert node.parent is not None  # noqa: S101 - a root has no tokens
        upper = Node(node.start, node.tokens[:at], node.parent, holders=dict(node.holders))
        node.parent.children[node.tokens[:WIDTH]] = upper
        node.start, node.tokens, node.parent = upper.end, node.tokens[at:], upper
        upper.children[node.tokens[:WIDTH]] = node
        if node.blob is not None and not node.is_snapshot:
            upper.blob = node.blob
            node.blob.num_nodes += 1
            self.touch(node)
        return upper

    def check(self) -> None:
        """Asserts what must hold."""
        blobs = set()
        for node in self.nodes():
            assert node.tokens  # noqa: S101 - our own invariants
            assert node.end == node.start + len(node.tokens) // WIDTH  # noqa: S101
            assert node.parent is not None  # noqa: S101
            assert node.parent.children[node.tokens[:WIDTH]] is node  # noqa: S101
            assert node.start == node.parent.end  # noqa: S101
            assert node.holders or node.blob is not None or node.children  # noqa: S101
            for child in node.children.values():
                assert set(child.holders) <= set(node.holders)  # noqa: S101 - who has a path has its beginning
            if node.blob is not None:
                assert node in self._by_age  # noqa: S101
                blobs.add(node.blob)
        assert sum(blob.data.nbytes for blob in blobs) == self.num_bytes  # noqa: S101
        assert all(node.blob is not None for node in self._by_age)  # noqa: S101


def common(edge: bytes, tokens: bytes, at: int) -> int:
    """How many bytes of an edge agree with the tokens from `at` on: a multiple of a token's."""
    low, high = 0, min(len(edge), len(tokens) - at)
    if edge[:high] == tokens[at : at + high]:
        return high
    while high - low > WIDTH:  # [0, low) agrees, [0, high) does not
        middle = low + (high - low) // (2 * WIDTH) * WIDTH
        if edge[low:middle] != tokens[at + low : at + middle]:
            high = middle
        else:
            low = middle
    return low


def _longest(node: Node) -> int:
    """Where a path through this node ends: at every fork the way on that is known the shortest time."""
    while node.children:
        node = next(reversed(node.children.values()))
    return node.end
