"""What lies in host memory: saved ranges and states, at the nodes of the prefix tree, within a budget of bytes. Pure."""

from __future__ import annotations

from paceline.scheduling.limits import Limits
from paceline.scheduling.plan import Save
from paceline.scheduling.prefix_tree import WIDTH, Blob, Namespace, PrefixTree, Saved
from paceline.scheduling.reports import Reports


class Host:
    """Where the budget is spent, what was used longest ago goes; never a range before those behind it."""

    def __init__(self, limits: Limits, tree: PrefixTree, reports: Reports) -> None:
        self._limits, self._tree, self._reports = limits, tree, reports

    @property
    def num_bytes(self) -> int:
        """Of everything."""
        return self._tree.num_bytes

    def saved(self, operation: Save, data: Saved, now_s: float) -> None:
        """A save was carried out. What is larger than the budget would drive all else out, and then go itself."""
        if data.nbytes > self._limits.host_bytes:
            return
        if operation.start:  # a node has to begin there
            self._tree.insert(operation.namespace, operation.tokens[: operation.start * WIDTH])
        end = self._tree.insert(operation.namespace, operation.tokens)
        assert end is not None  # noqa: S101 - there are tokens
        if operation.is_whole:
            self._tree.put_blob([end], Blob(0, operation.end, data), is_snapshot=True)
        else:
            nodes = [node for node in end.path() if node.start >= operation.start]
            self._tree.put_blob(nodes, Blob(operation.start, operation.end, data))
        self._fit(now_s)

    def take_in(
        self, namespace: Namespace, tokens: bytes, ranges: tuple[tuple[int, int, Saved], ...], now_s: float
    ) -> None:
        """Saved ranges of a path come from outside."""
        is_whole = not self._limits.can_share_part
        for start, end, data in ranges:
            self.saved(Save(0, start, end, namespace, tokens[: end * WIDTH], is_whole=is_whole), data, now_s)

    def _fit(self, now_s: float) -> None:
        while self._tree.num_bytes > self._limits.host_bytes:
            node = self._tree.oldest()
            assert node is not None  # noqa: S101 - bytes are some node's
            self._tree.drop_blob(node)
            self._tree.prune(node)
            self._reports.watch.evicted(node.end - node.start, "host", now_s)
