"""The radix tree as it can be shown: its nodes from the roots down, as many as were asked for. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, cast

import msgspec

from paceline.kv_cache.interfaces import CacheSequence
from paceline.kv_cache.radix_tree import Namespace, Node

MOST_VISITED: Final = 4096
"""Nodes that one view looks at, shown or only counted, which takes a millisecond or two."""


class NodeView(msgspec.Struct, frozen=True):
    """Tokens start to end of all paths through a node.

    id: the same as long as the node exists; parent: the id of the node above, None where it begins a prompt. running: the
    sequences that have it, or are about to; num_cached: the cached prefixes that do.
    """

    id: int
    parent: int | None
    start: int
    end: int
    running: tuple[CacheSequence, ...]
    num_cached: int
    on_device: bool
    on_host: bool
    has_state: bool


@dataclass(slots=True)
class TreeView:
    """The nodes of one group of namespaces, each behind its parent. num_nodes, num_tokens: with those that are not shown."""

    nodes: list[NodeView] = field(default_factory=list)
    num_nodes: int = 0
    num_tokens: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether all nodes that were counted are shown."""
        return len(self.nodes) == self.num_nodes


def view_tree(
    roots: Iterable[tuple[Namespace, Node]],
    running: Collection[CacheSequence],
    number_of: Callable[[Node], int],
    group_of: Callable[[Namespace], str],
    max_nodes: int,
) -> tuple[dict[str, TreeView], bool]:
    """Return the nodes by group, at most max_nodes of each, breadth first, and whether `MOST_VISITED` was enough for all."""
    views: dict[str, TreeView] = {}
    pending: deque[tuple[Node, int | None, TreeView]] = deque()
    for namespace, root in roots:
        view = views.setdefault(group_of(namespace), TreeView())
        pending += [(node, None, view) for node in root.children.values()]
    num_left = MOST_VISITED
    while pending and num_left:
        num_left -= 1
        node, parent, view = pending.popleft()
        number = number_of(node)
        if len(view.nodes) < max_nodes:
            view.nodes.append(_view_of(node, number, parent, running))
        view.num_nodes += 1
        view.num_tokens += node.end - node.start
        pending += [(child, number, view) for child in node.children.values()]
    return views, not pending


def _view_of(node: Node, number: int, parent: int | None, running: Collection[CacheSequence]) -> NodeView:
    owners = node.owners
    having = tuple([cast(CacheSequence, owner) for owner in owners if owner in running])
    return NodeView(
        id=number,
        parent=parent,
        start=node.start,
        end=node.end,
        running=having,
        num_cached=len(owners) - len(having),
        on_device=bool(owners),
        on_host=node.block is not None,
        has_state=node.state is not None,
    )
