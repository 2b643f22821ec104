"""The radix tree as it is shown to watchers: its nodes from the roots down, by tenant. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

import msgspec

from paceline.kv_cache.interfaces import CacheSequence
from paceline.kv_cache.radix_tree import Namespace, Node

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
    running: Collection[CacheSequence],
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
