"""A radix tree over the tokens of every sequence that runs, is cached on the device or lies in host memory, and its view.

    root ── "You are helpful." ──┬── "What is"... (running, seq id 3)
                                 └── "Tell me"... (host block)

A node stands for tokens [start, end) of a path. Its `owners` have, or will have, that range under a sequence id on the device;
its `block` has it in host memory. If memory is more than cells, its `state` is the rest of the memory that a sequence needs to
continue at `end`. Namespaces (adapters, tenant, salt) share nothing, so that no caller can learn another namespace's prefixes
from the time that a request takes.

Pure. Tokens are kept as bytes, four a token, which compare fast.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Final, Protocol

import msgspec

Namespace = tuple[object, ...]
TOKEN_BYTES = 4
MAX_DIGEST_PREFIXES = 1 << 16
_NODES_PER_PREFIX = 16


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Return token ids as the tree keeps them."""
    return array("i", token_ids).tobytes()


def hash_prefix(namespace: Namespace, tokens: bytes) -> str:
    """Return the hash by which a digest names a prefix: BLAKE2b of a version, its namespace and its packed tokens."""
    hasher = _namespace_hasher(namespace)
    hasher.update(tokens)
    return hasher.hexdigest()


def hash_blocks(namespace: Namespace, tokens: bytes, block_tokens: int) -> Iterator[str]:
    """Yield the hash of each prefix of these packed tokens that is a whole number of blocks, the shortest first."""
    hasher, size = _namespace_hasher(namespace), block_tokens * TOKEN_BYTES
    for end in range(size, len(tokens) + 1, size):
        hasher.update(tokens[end - size : end])
        yield hasher.hexdigest()


def _namespace_hasher(namespace: Namespace) -> hashlib.blake2b:
    return hashlib.blake2b(f"paceline 1 {namespace!r}\0".encode(), digest_size=16)


@dataclass(frozen=True, slots=True)
class HashedPrefix:
    """A cached prefix.

    Attributes:
        hash: Its hash by `prefix_hash`, in hexadecimal digits.
        num_tokens: Its number of tokens.
    """

    hash: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixDigest:
    """The cached prefixes of an engine, up to the branches and ends of its sequences, or in whole blocks of tokens.

    Attributes:
        prefixes: The prefixes with the fewest branches before their ends first; of blocks the shortest first.
        is_complete: Whether the maximum left out no prefix.
    """

    prefixes: tuple[HashedPrefix, ...] = ()
    is_complete: bool = True


class SavedState(Protocol):
    """Saved cells as the backend made them; only the backend can read them."""

    @property
    def nbytes(self) -> int: ...  # noqa: D102


class Owner(Protocol):
    """A holder of tokens under a sequence id: a running sequence, or a cached prefix."""

    @property
    def seq_id(self) -> int | None: ...  # noqa: D102
    @property
    def num_computed_tokens(self) -> int: ...  # noqa: D102


@dataclass(slots=True, eq=False)
class HostBlock:
    """Tokens [start, end) of a path in host memory, as the backend saved them; several nodes may be parts of one block."""

    start: int
    end: int
    data: SavedState
    num_nodes: int = 1


@dataclass(slots=True, eq=False)
class Node:
    """Tokens [start, end) of every path that goes through it. end: stored, since it is read often."""

    start: int
    tokens: bytes
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)
    owners: dict[Owner, None] = field(default_factory=dict)
    block: HostBlock | None = None
    state: SavedState | None = None  # a checkpoint at `end`
    namespace: Namespace | None = None  # of a root
    number: int = 0  # by which `RadixTree.number_of` tells it from others; 0: never asked for
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.start + len(self.tokens) // TOKEN_BYTES

    def has_cells(self) -> bool:
        """Return whether its tokens are in host memory or computed on the device."""
        return self.block is not None or any(owner.num_computed_tokens >= self.end for owner in self.owners)

    @property
    def has_host(self) -> bool:
        """Whether it has something in host memory."""
        return self.block is not None or self.state is not None

    def path(self) -> list[Node]:
        """Return the nodes from the first one under the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(slots=True)
class _Walk:
    """A walk down a path: its node, the tokens walked, their hasher, and the last whole block among them."""

    node: Node
    at: int
    hasher: hashlib.blake2b
    last_hash: str = ""
    num_hashed: int = 0

    def next_stop(self, block_tokens: int) -> int:
        """Return the next stop: the end of a block or of the node."""
        return min(self.node.end, self.at - self.at % block_tokens + block_tokens)

    def advance(self, stop: int, block_tokens: int) -> bool:
        """Take in the tokens up to there, and return whether a block ends there."""
        start = self.node.start
        self.hasher.update(self.node.tokens[(self.at - start) * TOKEN_BYTES : (stop - start) * TOKEN_BYTES])
        is_block = stop > self.at and stop % block_tokens == 0
        self.at = stop
        if is_block:
            self.last_hash, self.num_hashed = self.hasher.hexdigest(), stop
        return is_block

    @property
    def has_state(self) -> bool:
        """Whether the walk is at a checkpoint."""
        return self.at == self.node.end and self.node.state is not None

    def onward(self, *, needs_cells: bool) -> list[_Walk]:
        """Return the walks that continue from here: this walk, or walks into the cached children."""
        if self.at < self.node.end:
            return [self]
        children = [child for child in self.node.children.values() if not needs_cells or child.has_cells()]
        return [_Walk(child, self.at, self.hasher.copy(), self.last_hash, self.num_hashed) for child in children]


def _hashed(found: dict[str, int]) -> tuple[HashedPrefix, ...]:
    return tuple(HashedPrefix(hash_, num_tokens) for hash_, num_tokens in found.items())


@dataclass(frozen=True, slots=True)
class TreeMatch:
    """The longest known prefix of some tokens.

    nodes: on its path, the last one perhaps only in part; length: in tokens; path_length: of the most recent path through
    the last node, so how far the tree continues past the match.
    """

    nodes: tuple[Node, ...]
    length: int
    path_length: int


class RadixTree:
    """The tree of all namespaces. `num_bytes`: of all host blocks and states."""

    def __init__(self) -> None:
        self._roots: dict[Namespace, Node] = {}
        self._by_age: OrderedDict[Node, None] = (
            OrderedDict()
        )  # nodes with blocks or states; a node is younger than all below it
        self._numbers = count(1)
        self.num_bytes = 0

    def match(self, namespace: Namespace, tokens: bytes) -> TreeMatch:
        """Find the longest known prefix of these tokens."""
        node = self._roots.get(namespace)
        if node is None:
            return TreeMatch((), 0, 0)
        nodes: list[Node] = []
        at = 0
        while at < len(tokens):
            child = node.children.get(tokens[at : at + TOKEN_BYTES])
            if child is None:
                break
            shared = common_prefix_bytes(child.tokens, tokens, at)
            nodes.append(child)
            at += shared
            node = child
            if shared < len(child.tokens):
                break
        return TreeMatch(tuple(nodes), at // TOKEN_BYTES, _most_recent_end(nodes[-1]) if nodes else 0)

    def digest(
        self, max_prefixes: int, *, needs_cells: bool, needs_state: bool, private: Container[Namespace] = ()
    ) -> PrefixDigest:
        """Hash the cached prefixes up to the end of each node, breadth first.

        needs_cells, needs_state: whether a sequence that starts at the end of a node needs the cells of its path, and a state.
        Leaves out private namespaces. Ends after 16 nodes for each prefix, since few nodes are cached if states are needed.
        """
        found: list[HashedPrefix] = []
        shared = (entry for entry in self._roots.items() if entry[0] not in private)
        pending = deque((root, _namespace_hasher(namespace)) for namespace, root in shared)
        num_left = _NODES_PER_PREFIX * max_prefixes
        while pending:
            parent, above = pending.popleft()
            for node in parent.children.values():
                num_left -= 1
                if num_left < 0:
                    return PrefixDigest(tuple(found), is_complete=False)
                if needs_cells and not node.has_cells():  # nothing below it is cached, either
                    continue
                is_cached = not needs_state or node.state is not None
                if is_cached and len(found) == max_prefixes:
                    return PrefixDigest(tuple(found), is_complete=False)
                hasher = above.copy()
                hasher.update(node.tokens)
                if is_cached:
                    found.append(HashedPrefix(hasher.hexdigest(), node.end))
                pending.append((node, hasher))
        return PrefixDigest(tuple(found))

    def block_digest(
        self,
        max_prefixes: int,
        block_tokens: int,
        *,
        needs_cells: bool,
        needs_state: bool,
        private: Container[Namespace] = (),
    ) -> PrefixDigest:
        """Hash the cached prefixes of whole blocks, the shortest first; parameters as in `digest`.

        If a state is needed, a node with a state counts as the last whole block before its end.
        """
        found: dict[str, int] = {}
        order = count()
        roots = [entry for entry in self._roots.items() if entry[0] not in private]
        pending = [(0, next(order), _Walk(root, 0, _namespace_hasher(namespace))) for namespace, root in roots]
        num_left = _NODES_PER_PREFIX * max_prefixes
        while pending:
            at, _, walk = heappop(pending)
            is_block = walk.advance(at, block_tokens)
            if (walk.has_state if needs_state else is_block) and walk.last_hash not in found and walk.num_hashed:
                if len(found) == max_prefixes:
                    return PrefixDigest(_hashed(found), is_complete=False)
                found[walk.last_hash] = walk.num_hashed
            for following in walk.onward(needs_cells=needs_cells):
                num_left -= 1
                if num_left < 0:
                    return PrefixDigest(_hashed(found), is_complete=False)
                heappush(pending, (following.next_stop(block_tokens), next(order), following))
        return PrefixDigest(_hashed(found))

    def insert(self, namespace: Namespace, tokens: bytes) -> Node:
        """Return the node that ends with these tokens (at least one), creating and splitting nodes as needed."""
        assert tokens  # noqa: S101 - our own invariant
        return self._descend(self._root(namespace), tokens)

    def add_owner(self, owner: Owner, end: Node) -> None:
        """Note that an owner has, or will have, the path to the end of this node."""
        for node in end.path():
            node.owners[owner] = None

    def extend(self, owner: Owner, end: Node, tokens: bytes) -> Node:
        """Add tokens after an owner's last node and return its new last node."""
        if not end.children and not end.has_host and len(end.owners) == 1:
            end.tokens += tokens
            end.end += len(tokens) // TOKEN_BYTES
            return end
        extended = self._descend(end, tokens)
        self.add_owner(owner, extended)
        return extended

    def remove_owner(self, owner: Owner, end: Node) -> None:
        """Take an owner off its path, and prune nodes that neither an owner nor a block needs."""
        for node in end.path():
            node.owners.pop(owner, None)
        self.prune(end)

    def put_block(self, nodes: list[Node], block: HostBlock) -> None:
        """Attach a block to these nodes of one path."""
        for node in nodes:
            self._drop_block(node)
            node.block = block
        block.num_nodes = len(nodes)
        self.num_bytes += block.data.nbytes
        self.touch(nodes[-1])

    def put_state(self, node: Node, state: SavedState) -> None:
        """Attach a checkpoint to the node at its place."""
        self._drop_state(node)
        node.state = state
        self.num_bytes += state.nbytes
        self.touch(node)

    def free_host(self, node: Node) -> None:
        """Detach a node's block and state; the bytes of a block are freed with its last node."""
        self._drop_block(node)
        self._drop_state(node)
        self._by_age.pop(node, None)

    def discard(self, data: SavedState) -> None:
        """Detach a block or a state that cannot be loaded from all nodes that have it."""
        for node in [
            node for node in self.nodes() if node.state is data or (node.block is not None and node.block.data is data)
        ]:
            if node.state is data:
                self._drop_state(node)
            else:
                self._drop_block(node)
            if not node.has_host:
                del self._by_age[node]
                self.prune(node)

    def _drop_block(self, node: Node) -> None:
        block = node.block
        if block is None:
            return
        node.block = None
        block.num_nodes -= 1
        if not block.num_nodes:
            self.num_bytes -= block.data.nbytes

    def _drop_state(self, node: Node) -> None:
        if node.state is not None:
            self.num_bytes -= node.state.nbytes
            node.state = None

    def touch(self, node: Node) -> None:
        """Mark all blocks and states on the path to this node as most recently used."""
        for ancestor in reversed(node.path()):
            if ancestor.has_host:
                self._by_age[ancestor] = None
                self._by_age.move_to_end(ancestor)

    def least_recent_host(self) -> Node | None:
        """Return the node with something in host memory that was used longest ago; none below it was used later."""
        return next(iter(self._by_age), None)

    def below(self, is_wanted: Callable[[Namespace], bool]) -> list[Node]:
        """Return the nodes of the wanted namespaces, each before its children."""
        nodes: list[Node] = []
        pending = [root for namespace, root in self._roots.items() if is_wanted(namespace)]
        while pending:
            children = list(pending.pop().children.values())
            nodes += children
            pending += children
        return nodes

    def prune(self, node: Node | None) -> None:
        """Remove this node and its ancestors as far as no owner, block, state or child needs them."""
        while node is not None and node.parent is not None:
            if node.owners or node.has_host or node.children:
                return
            parent = node.parent
            del parent.children[node.tokens[:TOKEN_BYTES]]
            node.parent = None
            node = parent
        if node is not None and node.namespace is not None and not node.children:
            self._roots.pop(node.namespace, None)

    @property
    def roots(self) -> Iterable[tuple[Namespace, Node]]:
        """The namespaces with their roots, which have no tokens; read-only."""
        return self._roots.items()

    def number_of(self, node: Node) -> int:
        """Return a number that no other node has had; of a node that is split, the lower part keeps it."""
        if not node.number:
            node.number = next(self._numbers)
        return node.number

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes, for checks."""
        pending = [child for root in self._roots.values() for child in root.children.values()]
        while pending:
            node = pending.pop()
            yield node
            pending += node.children.values()

    def check(self) -> None:
        """Assert the tree's invariants."""
        blocks, state_bytes = set(), 0
        for node in self.nodes():
            assert node.tokens  # noqa: S101 - our own invariants
            assert node.end == node.start + len(node.tokens) // TOKEN_BYTES  # noqa: S101
            assert node.parent is not None  # noqa: S101
            assert node.parent.children[node.tokens[:TOKEN_BYTES]] is node  # noqa: S101
            assert node.start == node.parent.end  # noqa: S101
            assert node.owners or node.has_host or node.children  # noqa: S101
            for child in node.children.values():
                assert set(child.owners) <= set(node.owners)  # noqa: S101 - an owner of a path owns its prefix
            assert (node in self._by_age) == node.has_host  # noqa: S101
            if node.block is not None:
                blocks.add(node.block)
            if node.state is not None:
                state_bytes += node.state.nbytes
        assert sum(block.data.nbytes for block in blocks) + state_bytes == self.num_bytes  # noqa: S101
        assert all(node.has_host for node in self._by_age)  # noqa: S101

    def _root(self, namespace: Namespace) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(0, b"", None, namespace=namespace)
        return root

    def _descend(self, node: Node, tokens: bytes) -> Node:
        """Return the node below this node that ends with these tokens, creating and splitting nodes as needed."""
        at = 0
        while at < len(tokens):
            child = node.children.get(tokens[at : at + TOKEN_BYTES])
            if child is None:
                created = Node(node.end, tokens[at:], node)
                node.children[tokens[at : at + TOKEN_BYTES]] = created
                return created
            shared = common_prefix_bytes(child.tokens, tokens, at)
            node = child if shared == len(child.tokens) else self._split(child, shared)
            at += shared
        return node

    def _split(self, node: Node, at: int) -> Node:
        assert node.parent is not None  # noqa: S101 - a root has no tokens
        upper = Node(node.start, node.tokens[:at], node.parent, owners=dict(node.owners))
        node.parent.children[node.tokens[:TOKEN_BYTES]] = upper
        node.start, node.tokens, node.parent = upper.end, node.tokens[at:], upper
        upper.children[node.tokens[:TOKEN_BYTES]] = node
        if node.block is not None:
            upper.block = node.block
            node.block.num_nodes += 1
            self.touch(node)
        return upper


def common_prefix_bytes(edge: bytes, tokens: bytes, at: int) -> int:
    """Return how many bytes of an edge equal the tokens from byte `at` on: a multiple of a token's."""
    low, high = 0, min(len(edge), len(tokens) - at)
    if edge[:high] == tokens[at : at + high]:
        return high
    while high - low > TOKEN_BYTES:  # [0, low) is equal, [0, high) is not
        middle = low + (high - low) // (2 * TOKEN_BYTES) * TOKEN_BYTES
        if edge[low:middle] != tokens[at + low : at + middle]:
            high = middle
        else:
            low = middle
    return low


def _most_recent_end(node: Node) -> int:
    """Return the end of a path through this node that follows the newest child at every fork."""
    while node.children:
        node = next(reversed(node.children.values()))
    return node.end


MOST_VISITED: Final = 4096
"""Nodes that one view visits, shown or only counted; that takes a millisecond or two."""

MOST_OWNERS: Final = 32
"""Running sequences that are named at one node."""

SequenceName = tuple[int, int]
"""Key of the request and number of the choice."""


class TreeNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the radix tree: the tokens from start to end of all paths through it.

    id: stays the same as long as the node exists. parent: id of the node above; None if the node begins a prompt. running:
    sequences that hold it or are about to, at most `MOST_OWNERS`. num_cached: cached prefixes that hold it.
    """

    id: int
    parent: int | None
    start: int
    end: int
    running: tuple[SequenceName, ...]
    num_cached: int
    on_device: bool
    on_host: bool
    has_state: bool


class TenantTree(msgspec.Struct, kw_only=True):
    """A tenant's part of the radix tree; each node comes after its parent.

    num_nodes, num_tokens: of all visited nodes, shown or not. is_complete: whether every node of the tenant is shown.
    """

    tenant: str
    nodes: list[TreeNode] = msgspec.field(default_factory=list)
    num_nodes: int = 0
    num_tokens: int = 0
    is_complete: bool = True


def view_tree(
    roots: Iterable[tuple[Namespace, Node]],
    running: Collection[Owner],
    number_of: Callable[[Node], int],
    tenant_of: Callable[[Namespace], str],
    names: Mapping[object, SequenceName],
    max_nodes: int,
) -> tuple[TenantTree, ...]:
    """Return the tree of each tenant, breadth first, with at most max_nodes nodes. names: of running sequences."""
    trees: dict[str, TenantTree] = {}
    pending: deque[tuple[Node, int | None, TenantTree]] = deque()
    for namespace, root in roots:
        tenant = tenant_of(namespace)
        tree = trees.setdefault(tenant, TenantTree(tenant=tenant))
        pending += [(node, None, tree) for node in root.children.values()]
    num_left = MOST_VISITED
    while pending and num_left:
        num_left -= 1
        node, parent, tree = pending.popleft()
        number = number_of(node)
        if len(tree.nodes) < max_nodes:
            having = [owner for owner in node.owners if owner in running]
            tree.nodes.append(
                TreeNode(
                    id=number,
                    parent=parent,
                    start=node.start,
                    end=node.end,
                    running=tuple([names[owner] for owner in having[:MOST_OWNERS] if owner in names]),
                    num_cached=len(node.owners) - len(having),
                    on_device=bool(node.owners),
                    on_host=node.block is not None,
                    has_state=node.state is not None,
                )
            )
        tree.num_nodes += 1
        tree.num_tokens += node.end - node.start
        pending += [(child, number, tree) for child in node.children.values()]
    for tree in trees.values():
        tree.is_complete = not pending and len(tree.nodes) == tree.num_nodes
    return tuple(trees.values())


class PrefixSegment(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a host block, to be loaded."""

    block: HostBlock
    start: int
    end: int


def longest_owner(nodes: Iterable[Node], length: int, own: Owner | None = None) -> tuple[Owner | None, int]:
    """Return the owner, other than `own`, that has most of the first `length` tokens computed, and how many."""
    best: Owner | None = None
    most = 0
    for node in reversed(tuple(nodes)):
        reach = min(node.end, length)
        if reach <= most:
            break
        for owner in node.owners:
            if owner is not own and owner.seq_id is not None and min(owner.num_computed_tokens, reach) > most:
                best, most = owner, min(owner.num_computed_tokens, reach)
    return best, most


def host_segments(nodes: Iterable[Node], start: int, length: int) -> tuple[PrefixSegment, ...]:
    """Return the ranges in host memory from `start` on without a gap; nodes of one block give one segment."""
    segments: list[PrefixSegment] = []
    at = start
    for node in nodes:
        if node.end <= at:
            continue
        if node.block is None or at >= length:
            break
        end = min(node.end, length)
        if segments and segments[-1].block is node.block:
            segments[-1] = PrefixSegment(node.block, segments[-1].start, end)
        else:
            segments.append(PrefixSegment(node.block, at, end))
        at = end
    return tuple(segments)
