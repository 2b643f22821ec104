"""Host memory: saved ranges and checkpoints at the nodes of the radix tree, and prefixes on their way out to files. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from paceline.kv_cache.device_cells import Cut, DeviceCells, Save, SaveState
from paceline.kv_cache.interfaces import CacheTelemetry, KVCacheLimits
from paceline.kv_cache.offload import RangeSaver
from paceline.kv_cache.prefix_match import PrefixSegment, host_segments, longest_owner
from paceline.kv_cache.prompt_layout import TEXT_LAYOUT, PromptLayout
from paceline.kv_cache.radix_tree import TOKEN_BYTES, HostBlock, Namespace, Node, RadixTree, SavedState, TreeMatch


class HostCache:
    """Evicts the least recently used block where the capacity is spent; never a range before those behind it."""

    def __init__(self, limits: KVCacheLimits, tree: RadixTree, telemetry: CacheTelemetry) -> None:
        self._limits, self._tree, self._telemetry = limits, tree, telemetry

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self._tree.num_bytes

    def put(self, save: Save | Cut, data: SavedState, now_s: float) -> None:
        """Take in saved cells; a block larger than the capacity is dropped, as it would evict all others and then itself."""
        if data.nbytes > self._limits.host_bytes:
            return
        if save.start:  # a node has to begin there
            self._tree.insert(save.namespace, save.tokens[: save.start * TOKEN_BYTES])
        end = self._tree.insert(save.namespace, save.tokens)
        nodes = [node for node in end.path() if node.start >= save.start]
        self._tree.put_block(nodes, HostBlock(save.start, save.end, data))
        self._evict_to_capacity(now_s)

    def put_state(self, save: SaveState, data: SavedState, now_s: float) -> None:
        """Take in a saved state; dropped where it is larger than the capacity."""
        if data.nbytes <= self._limits.host_bytes:
            self._tree.put_state(self._tree.insert(save.namespace, save.tokens), data)
            self._evict_to_capacity(now_s)

    def import_ranges(
        self, namespace: Namespace, tokens: bytes, ranges: tuple[tuple[int, int, SavedState], ...], now_s: float
    ) -> None:
        """Take in saved ranges of a path that come from a file; an empty one is a state, and where there are no cells any."""
        has_cells = self._limits.can_share_part or self._limits.has_state_apart
        if self._limits.has_state_apart and all(start < end for start, end, _ in ranges):
            return  # cells without a state: of another kind of memory
        for start, end, data in ranges:
            path = tokens[: end * TOKEN_BYTES]
            if has_cells and start < end:
                self.put(Save(0, start, end, namespace, path), data, now_s)
            else:
                self.put_state(SaveState(0, end, namespace, path), data, now_s)

    def forget(self, is_forgotten: Callable[[Namespace], bool], now_s: float) -> None:
        """Drop what is kept of the forgotten namespaces."""
        for node in reversed(self._tree.below(is_forgotten)):
            if node.has_host:
                self._drop(node, now_s)

    def _evict_to_capacity(self, now_s: float) -> None:
        while self._tree.num_bytes > self._limits.host_bytes:
            node = self._tree.least_recent_host()
            assert node is not None  # noqa: S101 - bytes belong to nodes
            self._drop(node, now_s)

    def _drop(self, node: Node, now_s: float) -> None:
        self._tree.free_host(node)
        self._tree.prune(node)
        self._telemetry.evicted(node.end - node.start, "host", now_s)


@dataclass(slots=True, eq=False)
class PrefixExport:
    """A requested export.

    layout: of the path. num_device: tokens of the path on the device when it was requested. num_tried, num_cut: up to where
    saving and cutting were tried once.
    """

    key: int
    namespace: Namespace
    tokens: bytes
    layout: PromptLayout
    num_device: int
    num_tried: int = 0
    num_cut: int = 0


class PrefixExporter:
    """Brings requested prefixes to host memory, a part a tick, until all of them can be handed out.

    find: match a path in the radix tree now. has_cells, has_states: what memory consists of: ranges of cells, states behind
    them, or states alone. exports: those under way; read-only.
    """

    def __init__(
        self, cells: DeviceCells, find: Callable[[Namespace, bytes], TreeMatch], *, has_cells: bool, has_states: bool
    ) -> None:
        self._cells, self._find, self._has_cells, self._has_states = cells, find, has_cells, has_states
        self.exports: list[PrefixExport] = []

    def request(self, key: int, namespace: Namespace, tokens: bytes, layout: PromptLayout = TEXT_LAYOUT) -> None:
        """Request what there is of a path now; `take_done` returns it when it is in host memory."""
        match = self._find(namespace, tokens)
        _, num_device = longest_owner(match.nodes, match.length)
        self.exports.append(PrefixExport(key, namespace, tokens, layout, layout.shareable(num_device)))

    def save_part(self, max_tokens: int, make_room: Callable[[int], bool]) -> None:
        """Add the saves of a tick, at most as many tokens. make_room: free cells, and return whether there are as many."""
        for export in self.exports:
            seq_id, missing = self._missing(export)
            saver = RangeSaver(
                seq_id=seq_id,
                namespace=export.namespace,
                tokens=export.tokens,
                layout=export.layout,
                num_tried=export.num_tried,
            )
            saves = saver.next_saves(missing, max_tokens)
            export.num_tried = saver.num_tried
            self._cells.operations += saves
            max_tokens -= sum(one.end - one.start for one in saves)
            if not missing:
                max_tokens -= self._cut_part(export, max_tokens, make_room)

    def _cut_part(self, export: PrefixExport, max_tokens: int, make_room: Callable[[int], bool]) -> int:
        """Cut the next parts of larger blocks, and return of how many tokens."""
        num_tokens = 0
        for part in self._uncut(export):
            if num_tokens >= max_tokens:
                break
            export.num_cut = part.end
            if not make_room(part.block.end - part.block.start):
                break
            tokens = export.tokens[: part.end * TOKEN_BYTES]
            cut = Cut(part.block.data, part.start, part.end, export.namespace, tokens, export.layout)
            self._cells.operations.append(cut)
            num_tokens += part.end - part.start
        return num_tokens

    def take_done(self) -> list[tuple[int, list[SavedState]]]:
        """Return key and ranges of exports that are complete, after the saves of a tick were carried out."""
        done = [one for one in self.exports if not (self._missing(one)[1] or self._uncut(one))]
        self.exports = [one for one in self.exports if one not in done]
        return [(one.key, self.saved_ranges(one.namespace, one.tokens)) for one in done]

    def saved_ranges(self, namespace: Namespace, tokens: bytes) -> list[SavedState]:
        """Return what host memory has of a path, from its first token on, and the last checkpoint, where there are states."""
        match = self._find(namespace, tokens)
        if not self._has_states:
            return [one.block.data for one in _whole_segments(match, match.length)]
        for node in _checkpoints(match):
            segments = _whole_segments(match, node.end) if self._has_cells else []
            if not self._has_cells or _reach(segments) == node.end:
                assert node.state is not None  # noqa: S101 - a checkpoint's
                return [*(one.block.data for one in segments), node.state]
        return []

    def _missing(self, export: PrefixExport) -> tuple[int, list[tuple[int, int]]]:
        """Return the sequence id to save from and the ranges that are missing; none where the next was tried before."""
        if not self._has_cells:
            return 0, []
        match = self._find(export.namespace, export.tokens)
        length = match.length
        if self._has_states:  # cells behind the last checkpoint are of no use
            length = next((node.end for node in _checkpoints(match)), 0)
        source, num_device = longest_owner(match.nodes, min(length, export.num_device))
        if source is None or source.seq_id is None:
            return 0, []
        nodes = [node for node in match.nodes if node.start < num_device]
        missing = [(one.start, min(one.end, num_device)) for one in nodes if not _is_saved_alone(one, num_device)]
        is_stuck = bool(missing) and missing[0][0] < export.num_tried
        return source.seq_id, [] if is_stuck else missing

    def _uncut(self, export: PrefixExport) -> list[PrefixSegment]:
        """Return what would go out and is part of larger blocks; nothing where the next was tried before."""
        if not self._has_cells:
            return []
        match = self._find(export.namespace, export.tokens)
        ends = [node.end for node in _checkpoints(match)] if self._has_states else [match.length]
        found = (host_segments(match.nodes, 0, end) for end in ends)
        segments = next(
            (one for one, end in zip(found, ends, strict=True) if not self._has_states or _reach(one) == end), ()
        )
        parts = [one for one in segments if not _is_whole(one)]
        return [] if parts and parts[0].start < export.num_cut else parts


def _reach(segments: Sequence[PrefixSegment]) -> int:
    return segments[-1].end if segments else 0


def _is_whole(segment: PrefixSegment) -> bool:
    return (segment.start, segment.end) == (segment.block.start, segment.block.end)


def _checkpoints(match: TreeMatch) -> list[Node]:
    """Return the nodes of a match with a state, the deepest first."""
    return [node for node in reversed(match.nodes) if node.state is not None and node.end <= match.length]


def _whole_segments(match: TreeMatch, length: int) -> list[PrefixSegment]:
    """Return the first host blocks of a path of as many tokens, up to the first that is part of a larger one."""
    return list(takewhile(_is_whole, host_segments(match.nodes, 0, length)))


def _is_saved_alone(node: Node, num_tokens: int) -> bool:
    """Return whether a host block is exactly this range of a path of as many tokens, and not part of a larger one."""
    return node.block is not None and (node.block.start, node.block.end) == (node.start, min(node.end, num_tokens))
