"""Offload: save cached prefixes and the next victim's tokens to host memory, keep them there, and export them to files.

Idle prefixes are saved in parts when a tick has time for it, and at once when memory is full, least recently used first. The
tokens of a running sequence are saved before it is preempted (eager offload). The cost of transfers is learnt, so that transfers
keep to a share of the inter-token latency target.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise, takewhile
from typing import Protocol

from paceline.kv_cache.device_cells import (
    CacheSequence,
    DeviceCells,
    KVCacheLimits,
    Load,
    Operation,
    Save,
    SaveState,
    TransferOutput,
)
from paceline.kv_cache.prompt_layout import TEXT_LAYOUT, PromptLayout
from paceline.kv_cache.radix_tree import (
    TOKEN_BYTES,
    HostBlock,
    Namespace,
    Node,
    PrefixSegment,
    RadixTree,
    SavedState,
    TreeMatch,
    host_segments,
    longest_owner,
)

BLOCK_TOKENS = 512
"""Tokens that are saved as one host block: it stays, and needs cells for a moment when it is loaded, as a whole."""
MIN_CACHED_TOKENS = 16
"""Computing fewer takes less than saving and loading them."""

_UNLIMITED = 2**31
_IDLE_BLOCK_TOKENS = 16 * BLOCK_TOKENS  # in a tick in which no sequence decodes
_MIN_TRANSFER_TOKENS = 32  # fewer are not worth an operation
_IDLE_SHARE = 0.1  # of the inter-token latency target, for prefixes that no sequence needs the cells of
_PRESSURE_SHARE = 0.5  # of it, for prefixes whose cells a waiting sequence needs
_CHEAP_SHARE = 0.02  # of what computing a token takes: saving it for less is worth it, used again or not
_NUM_SETTLED = 4  # ticks with saves that show what they take
_NUM_RECENT = 7  # of those that count for it: the median of so many ignores one that took several times as long
_RETRY_TICKS = 8  # after which a range that host memory had no room for is tried again
_GAIN = 0.3


class ComputeCost(Protocol):
    """The cost of computing, to be weighed against transfers."""

    @property
    def idle_cell_s(self) -> float:
        """Seconds that an idle cell adds to each row of a pass; 0 if that was not measured, or is too little to measure."""

    def seconds(self, num_tokens: int, num_cells: int) -> float:
        """Return the expected time of a pass over `num_tokens` tokens while `num_cells` cells are in use."""


class CacheTelemetry(Protocol):
    """Receives events of the cache."""

    def evicted(self, num_tokens: int, source: str, now_s: float) -> None:
        """Report tokens that left `source`: "device" or "host"."""

    def prefix_instability(self, key: int, num_cached: int, num_matched: int, now_s: float) -> None:
        """Report a request with a prompt that diverges early from a long cached prefix."""


class TransferRate:
    """Seconds a token of one kind of transfer, as a running mean."""

    def __init__(self) -> None:
        self._token_s: float | None = None
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a transfer."""
        if not num_tokens:
            return
        found = seconds / num_tokens
        self._token_s = found if self._token_s is None else self._token_s + _GAIN * (found - self._token_s)
        self._recent.append(found)

    @property
    def usual_token_s(self) -> float:
        """The median of the last few, which a single slow one does not change; 0 before there are four."""
        return sorted(self._recent)[(len(self._recent) - 1) // 2] if len(self._recent) >= _NUM_SETTLED else 0.0

    def seconds(self, num_tokens: int) -> float:
        """Return the expected time; 0 before the first transfer."""
        return num_tokens * (self._token_s or 0.0)

    def tokens_within(self, seconds: float) -> int:
        """Return how many tokens can be transferred in this time; a block before the first transfer."""
        if self._token_s is None:
            return BLOCK_TOKENS
        return max(_MIN_TRANSFER_TOKENS, int(seconds / self._token_s)) if self._token_s > 0 else _UNLIMITED


class TransferCost:
    """The expected time of saving and loading, and the number of tokens that fits into a tick.

    Loading is cheap: it moves every cell once, while each later token reads all cells. Saving takes about ten times as long,
    since it writes to new host memory.

    Attributes:
        state_bytes: Size of the last saved state.
        token_bytes: Size of a token in the last saved cells.
        is_failing: Whether a save of the last tick with saves failed.
    """

    def __init__(self, itl_target_s: float) -> None:
        self._itl_target_s = itl_target_s
        self._saving, self._loading, self._saving_states = TransferRate(), TransferRate(), TransferRate()
        self.state_bytes = 0
        self.token_bytes = 0.0
        self.is_failing = False

    def observe(self, operations: Sequence[Operation], output: TransferOutput) -> None:
        """Learn from a tick's transfers."""
        self._saving.observe(sum(save.end - save.start for save, _ in output.saved), output.saving_s)
        if num_saves := sum(isinstance(operation, Save) for operation in operations):
            self.is_failing = len(output.saved) < num_saves
        self._loading.observe(_num_loaded(operations), output.loading_s)
        if output.saved:
            save, data = output.saved[-1]
            self.token_bytes = data.nbytes / (save.end - save.start)
        if output.saved_states:
            self._saving_states.observe(len(output.saved_states), output.state_saving_s)
            self.state_bytes = output.saved_states[-1][1].nbytes

    def seconds(self, operations: Iterable[Operation]) -> float:
        """Return the expected time of these operations."""
        saves = sum(operation.end - operation.start for operation in operations if isinstance(operation, Save))
        states = sum(isinstance(operation, SaveState) for operation in operations)
        return self._saving.seconds(saves) + self._loading.seconds(_num_loaded(operations)) + self.state_seconds(states)

    def state_seconds(self, num_states: int) -> float:
        """Return the expected time to save as many states; 0 before the first."""
        return self._saving_states.seconds(num_states)

    def load_seconds(self, num_tokens: int) -> float:
        """Return the expected time to load as many tokens: that of saving them before the first load, 0 before the first save."""
        return self._loading.seconds(num_tokens) or self._saving.seconds(num_tokens)

    def round_trip_seconds(self, num_tokens: int) -> float:
        """Return the expected time to save as many tokens and to load them again."""
        return self._saving.seconds(num_tokens) + self._loading.seconds(num_tokens)

    def is_saving_cheap(self, token_s: float) -> bool:
        """Return whether saving a token costs next to nothing beside token_s, the time to compute a token.

        True before the first saves; False if the last saves failed.
        """
        return not self.is_failing and self._saving.usual_token_s <= _CHEAP_SHARE * token_s

    def idle_tokens(self, *, is_generating: bool) -> int:
        """Return how many tokens of idle prefixes may be saved in a tick."""
        if not is_generating:  # a request may come meanwhile
            return min(_IDLE_BLOCK_TOKENS, self._saving.tokens_within(_PRESSURE_SHARE * self._itl_target_s))
        return min(BLOCK_TOKENS, self._saving.tokens_within(_IDLE_SHARE * self._itl_target_s))

    def pressure_tokens(self, *, is_generating: bool) -> int:
        """Return how many tokens may be saved in a tick to free cells for a waiting sequence."""
        return self._saving.tokens_within(_PRESSURE_SHARE * self._itl_target_s) if is_generating else _UNLIMITED


def _num_loaded(operations: Iterable[Operation]) -> int:
    return sum(operation.end - operation.start for operation in operations if isinstance(operation, Load))


@dataclass(slots=True, eq=False, kw_only=True)
class RangeSaver:
    """Saves the path under a sequence id part by part. Parts begin and end at places where its layout can be cut.

    Attributes:
        tokens: The path, as bytes.
        num_tried: Number of tokens that an attempt to save has covered.
    """

    seq_id: int
    namespace: Namespace
    tokens: bytes
    layout: PromptLayout = TEXT_LAYOUT
    num_tried: int = 0

    @staticmethod
    def of(sequence: CacheSequence, num_tokens: int) -> RangeSaver:
        """Return a saver of the first num_tokens of a running sequence."""
        assert sequence.seq_id is not None  # noqa: S101 - it runs
        return RangeSaver(
            seq_id=sequence.seq_id,
            namespace=sequence.namespace,
            tokens=sequence.token_bytes(num_tokens),
            layout=sequence.layout,
        )

    def next_saves(self, missing: Iterable[tuple[int, int]], max_tokens: int) -> list[Save]:
        """Return saves for the next missing ranges, at most max_tokens together; a media item is never split.

        Empty if nothing is missing, or if the next range was tried before: it did not fit into host memory, and later ranges
        would be of no use without it.
        """
        saves: list[Save] = []
        for start, end in missing:
            bounds = [self.layout.shareable(start)]
            if max_tokens <= 0 or (not saves and bounds[0] < self.num_tried):
                break
            self.num_tried = self.layout.cut(bounds[0], min(end, bounds[0] + max_tokens))
            max_tokens -= self.num_tried - bounds[0]
            while bounds[-1] < self.num_tried:
                bounds.append(self.layout.cut(bounds[-1], min(self.num_tried, bounds[-1] + BLOCK_TOKENS)))
            saves += [self.save(first, last) for first, last in pairwise(bounds)]
        return saves

    def save(self, start: int, end: int, cut_from: SavedState | None = None) -> Save:
        """Return the save of a range of the path; cut_from: see `Save`."""
        path = self.tokens[: end * TOKEN_BYTES]
        return Save(self.seq_id, start, end, self.namespace, path, self.layout, cut_from)


@dataclass(slots=True, eq=False, kw_only=True)
class CachedPrefix(RangeSaver):
    """A prefix on the device that no running sequence holds.

    Attributes:
        node: Its end in the radix tree.
        tried_tick: The last tick in which a part of it was saved.
        used_row: Value of `Offloader.num_rows` when the prefix was last used.
    """

    num_computed_tokens: int
    node: Node
    tried_tick: int = 0
    used_row: int = 0


class Eviction(Enum):
    """Outcome of `Offloader.try_evict`."""

    DONE = auto()
    PENDING = auto()  # a prefix is being saved, as much of it as fits the tick
    NOTHING_CACHED = auto()


class Offloader:
    """Evicts and offloads the cached prefixes of one device.

    Attributes:
        prefixes: The cached prefixes, least recently used first; read-only.
        tick: The owner counts it up; limits of saving under pressure are per tick.
        num_rows: Rows of passes so far. The owner counts it up; it is the clock by which prefixes grow old.
    """

    def __init__(self, cells: DeviceCells, tree: RadixTree, telemetry: CacheTelemetry, *, has_host: bool) -> None:
        self._cells, self._tree, self._telemetry, self._has_host = cells, tree, telemetry, has_host
        self.prefixes: OrderedDict[CachedPrefix, None] = OrderedDict()
        self.tick = self.num_rows = 0
        self._offloading: CachedPrefix | None = None
        self._tokens_left = 0  # that may still be saved under pressure in `_pressure_tick`
        self._pressure_tick = -1
        self._part_saved_tick = -1  # when a part of the offloading one was saved under pressure
        self._eager: RangeSaver | None = None
        self._eager_sequence: CacheSequence | None = None

    def __len__(self) -> int:
        return len(self.prefixes)

    @property
    def seq_ids(self) -> list[int]:
        """Sequence ids of the cached prefixes."""
        return [prefix.seq_id for prefix in self.prefixes]

    def find(self, seq_id: int) -> CachedPrefix | None:
        """Return the cached prefix under a sequence id."""
        return next((prefix for prefix in self.prefixes if prefix.seq_id == seq_id), None)

    def add(self, prefix: CachedPrefix) -> None:
        """Cache a prefix, as most recently used."""
        self._tree.add_owner(prefix, prefix.node)
        self.prefixes[prefix], prefix.used_row = None, self.num_rows

    def touch(self, prefix: CachedPrefix) -> None:
        """Mark a prefix as most recently used."""
        self.prefixes.move_to_end(prefix)
        prefix.used_row = self.num_rows
        if self._offloading is prefix:
            self._offloading = None

    # ---- eviction

    def evict(self, now_s: float) -> bool:
        """Evict the least recently used prefix before the next pass; return whether there was one."""
        prefix = self._least_recent()
        if prefix is not None:
            self.save_and_drop(prefix, now_s)
        return prefix is not None

    def try_evict(self, max_tokens: int, now_s: float) -> Eviction:
        """As `evict`, but over several ticks if more than max_tokens in a tick would have to be saved."""
        prefix = self._least_recent()
        if prefix is None:
            return Eviction.NOTHING_CACHED
        if self._pressure_tick != self.tick:
            self._pressure_tick, self._tokens_left = self.tick, max_tokens
        num_missing = self.num_missing(prefix)
        if num_missing <= self._tokens_left:
            self._tokens_left -= num_missing
            self.save_and_drop(prefix, now_s)
            return Eviction.DONE
        if self._tokens_left > 0:
            self._offloading = prefix
            if not self._save_part(prefix, self._tokens_left):
                self.drop(prefix, now_s)
                return Eviction.DONE
            self._tokens_left, self._part_saved_tick = 0, self.tick
        return Eviction.PENDING

    def save_and_drop(self, prefix: CachedPrefix, now_s: float) -> None:
        """Save the tokens of a prefix that host memory lacks and take it off the device, all before the next pass."""
        prefix.num_tried = 0
        self._save_part(prefix, _UNLIMITED)
        self.drop(prefix, now_s)

    def drop(self, prefix: CachedPrefix, now_s: float) -> None:
        """Take a prefix off the device."""
        if self._offloading is prefix:
            self._offloading = None
        del self.prefixes[prefix]
        self._tree.remove_owner(prefix, prefix.node)
        num_own = self._cells.num_own(prefix.seq_id)
        self._cells.free(prefix.seq_id)
        self._telemetry.evicted(num_own, "device", now_s)

    def num_missing(self, prefix: CachedPrefix) -> int:
        """Return the number of tokens of a prefix that host memory lacks; 0 without host memory."""
        return sum(end - start for start, end in self._missing(prefix))

    # ---- offload

    def offload_idle(
        self,
        max_idle_cells: int,
        max_idle_rows: float,
        running: list[int],
        max_tokens: int,
        ticks_left: float,
        now_s: float,
    ) -> None:
        """Save the least recently used prefixes, at most max_tokens together, and drop each in the tick after its last part.

        A prefix is due if idle cells exceed max_idle_cells, or if more than max_idle_rows were computed since its last use. The
        first prefix is also due if saving it, max_tokens in a tick, would take longer than the ticks_left until memory is full.
        """
        if self._part_saved_tick == self.tick or (first := self._offloading or self._least_recent()) is None:
            return
        num_excess, being_saved = self._num_idle(running) - max_idle_cells, set[Node]()
        for prefix in (first, *(prefix for prefix in self.prefixes if prefix is not first)):
            is_due = num_excess > 0 or self.num_rows - prefix.used_row > max_idle_rows
            if prefix is first:
                is_due = is_due or self._offloading is first or self._takes_longer(first, max_tokens, ticks_left)
            if not is_due or (prefix is not first and max_tokens < _MIN_TRANSFER_TOKENS):
                return
            num_excess -= self._cells.num_own(prefix.seq_id)
            missing = {node for node in prefix.node.path() if node.block is None}
            if missing & being_saved:  # what it shares with one before it is in host memory in the next tick
                continue
            self._offloading = prefix
            num_saved = self._save_part(prefix, max_tokens)
            if not num_saved:  # it is saved, or host memory has no room for it
                self.drop(prefix, now_s)
            else:
                being_saved |= missing
                max_tokens -= num_saved

    def save_idle(self, max_tokens: int) -> bool:
        """Save a part of a prefix that host memory lacks, and keep the prefix; return False if nothing is left to save.

        The most recently used prefix comes first: the time at the end of an engine may not suffice for all.
        """
        return any(self._save_part(prefix, max_tokens) for prefix in reversed(self.prefixes))

    def offload_eagerly(self, sequence: CacheSequence, end: Node, max_tokens: int, ticks_left: float) -> None:
        """Save a part of a running sequence if saving max_tokens in a tick would take longer than ticks_left.

        end: the sequence's last node in the radix tree.
        """
        num_tokens = sequence.layout.shareable(sequence.num_computed_tokens)
        missing = ranges_without_block(end, num_tokens)
        num_missing = sum(stop - start for start, stop in missing)
        if num_missing < MIN_CACHED_TOKENS or num_missing <= max_tokens * (ticks_left - 1):
            return
        num_tried = self._eager.num_tried if self._eager and self._eager_sequence is sequence else 0
        self._eager_sequence, self._eager = sequence, RangeSaver.of(sequence, num_tokens)
        self._eager.num_tried = num_tried
        self._cells.operations += self._eager.next_saves(missing, max_tokens)

    def end_eager_offload(self, sequence: CacheSequence) -> None:
        """Note that a sequence runs no longer."""
        if self._eager_sequence is sequence:
            self._eager = self._eager_sequence = None

    def _least_recent(self) -> CachedPrefix | None:
        return next(iter(self.prefixes), None)

    def _num_idle(self, running: list[int]) -> int:
        return self._cells.num_used - self._cells.num_under(running)

    def _takes_longer(self, prefix: CachedPrefix, max_tokens: int, ticks_left: float) -> bool:
        return not math.isinf(ticks_left) and self.num_missing(prefix) > max_tokens * (ticks_left - 1)

    def _missing(self, prefix: CachedPrefix) -> list[tuple[int, int]]:
        return ranges_without_block(prefix.node, prefix.num_computed_tokens) if self._has_host else []

    def _save_part(self, prefix: CachedPrefix, max_tokens: int) -> int:
        """Save the next missing part and return its number of tokens, 0 if nothing was saved."""
        if self.tick - prefix.tried_tick > _RETRY_TICKS:
            prefix.num_tried = 0
        prefix.tried_tick = self.tick
        saves = prefix.next_saves(self._missing(prefix), max_tokens)
        self._cells.operations += saves
        return sum(save.end - save.start for save in saves)


def prompt_token_s(cost: ComputeCost) -> float:
    """Return the expected seconds to compute a token of a prompt, in a pass of a block."""
    return cost.seconds(BLOCK_TOKENS, 0) / BLOCK_TOKENS


def ranges_without_block(end: Node, num_tokens: int) -> list[tuple[int, int]]:
    """Return the ranges among the first tokens of the path to this node that host memory lacks."""
    return [
        (node.start, min(node.end, num_tokens)) for node in end.path() if node.block is None and node.start < num_tokens
    ]


class HostCache:
    """Evicts the least recently used block when the capacity is spent; never a range before its continuations."""

    def __init__(self, limits: KVCacheLimits, tree: RadixTree, telemetry: CacheTelemetry) -> None:
        self._limits, self._tree, self._telemetry = limits, tree, telemetry

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self._tree.num_bytes

    def put(self, save: Save, data: SavedState, now_s: float) -> None:
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
        """Take in a saved state; drop it if it is larger than the capacity."""
        if data.nbytes <= self._limits.host_bytes:
            self._tree.put_state(self._tree.insert(save.namespace, save.tokens), data)
            self._evict_to_capacity(now_s)

    def import_ranges(
        self, namespace: Namespace, tokens: bytes, ranges: tuple[tuple[int, int, SavedState], ...], now_s: float
    ) -> None:
        """Take in saved ranges of a path from a file. An empty range is a state; without cells, any range is."""
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
        """Drop all blocks and states of the forgotten namespaces."""
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


@dataclass(slots=True, eq=False, kw_only=True)
class PrefixExport(RangeSaver):
    """A requested export.

    Attributes:
        num_device: Tokens of the path that were on the device at the time of the request.
        num_cut: Number of tokens that an attempt to cut them from larger blocks has covered.
    """

    key: int
    seq_id: int = 0  # set before each save
    num_device: int
    num_cut: int = 0


class PrefixExporter:
    """Brings requested prefixes to host memory, a part in each tick, until a whole prefix can be handed out.

    find: match a path in the radix tree now. has_cells, has_states: whether memory has ranges of cells, and states beside them.
    exports: the unfinished exports; read-only.
    """

    def __init__(
        self, cells: DeviceCells, find: Callable[[Namespace, bytes], TreeMatch], *, has_cells: bool, has_states: bool
    ) -> None:
        self._cells, self._find, self._has_cells, self._has_states = cells, find, has_cells, has_states
        self.exports: list[PrefixExport] = []

    def request(self, key: int, namespace: Namespace, tokens: bytes, layout: PromptLayout = TEXT_LAYOUT) -> None:
        """Request the cached part of a path; `take_done` returns it after it has reached host memory."""
        match = self._find(namespace, tokens)
        _, num_device = longest_owner(match.nodes, match.length)
        num_device = layout.shareable(num_device)
        export = PrefixExport(key=key, namespace=namespace, tokens=tokens, layout=layout, num_device=num_device)
        self.exports.append(export)

    def save_part(self, max_tokens: int, make_room: Callable[[int], bool]) -> None:
        """Add the saves of a tick, at most as many tokens. make_room: free cells, and return whether there are as many."""
        for export in self.exports:
            export.seq_id, missing = self._missing(export)
            saves = export.next_saves(missing, max_tokens)
            self._cells.operations += saves
            max_tokens -= sum(save.end - save.start for save in saves)
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
            self._cells.operations.append(export.save(part.start, part.end, part.block.data))
            num_tokens += part.end - part.start
        return num_tokens

    def take_done(self) -> list[tuple[int, list[SavedState]]]:
        """Return key and ranges of exports that are complete, after the saves of a tick were carried out."""
        done = [export for export in self.exports if not (self._missing(export)[1] or self._uncut(export))]
        self.exports = [export for export in self.exports if export not in done]
        return [(export.key, self.saved_ranges(export.namespace, export.tokens)) for export in done]

    def saved_ranges(self, namespace: Namespace, tokens: bytes) -> list[SavedState]:
        """Return host memory's ranges of a path from its first token on, with the last checkpoint if there are states."""
        match = self._find(namespace, tokens)
        if not self._has_states:
            return [segment.block.data for segment in _whole_segments(match, match.length)]
        for node in _checkpoints(match):
            segments = _whole_segments(match, node.end) if self._has_cells else []
            if not self._has_cells or _reach(segments) == node.end:
                assert node.state is not None  # noqa: S101 - a checkpoint's
                return [*(segment.block.data for segment in segments), node.state]
        return []

    def _missing(self, export: PrefixExport) -> tuple[int, list[tuple[int, int]]]:
        """Return the sequence id to save from and the missing ranges; no ranges if the next was tried before."""
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
        missing = [(node.start, min(node.end, num_device)) for node in nodes if not _is_saved_alone(node, num_device)]
        is_stuck = bool(missing) and missing[0][0] < export.num_tried
        return source.seq_id, [] if is_stuck else missing

    def _uncut(self, export: PrefixExport) -> list[PrefixSegment]:
        """Return the segments to export that are parts of larger blocks; none if the next was tried before."""
        if not self._has_cells:
            return []
        match = self._find(export.namespace, export.tokens)
        ends = [node.end for node in _checkpoints(match)] if self._has_states else [match.length]
        found = (host_segments(match.nodes, 0, end) for end in ends)
        segments = next(
            (
                found_segments
                for found_segments, end in zip(found, ends, strict=True)
                if not self._has_states or _reach(found_segments) == end
            ),
            (),
        )
        parts = [segment for segment in segments if not _is_whole(segment)]
        return [] if parts and parts[0].start < export.num_cut else parts


def _reach(segments: Sequence[PrefixSegment]) -> int:
    return segments[-1].end if segments else 0


def _is_whole(segment: PrefixSegment) -> bool:
    return (segment.start, segment.end) == (segment.block.start, segment.block.end)


def _checkpoints(match: TreeMatch) -> list[Node]:
    """Return the nodes of a match with a state, the deepest first."""
    return [node for node in reversed(match.nodes) if node.state is not None and node.end <= match.length]


def _whole_segments(match: TreeMatch, length: int) -> list[PrefixSegment]:
    """Return the first host blocks of a path, up to the first segment that is part of a larger block."""
    return list(takewhile(_is_whole, host_segments(match.nodes, 0, length)))


def _is_saved_alone(node: Node, num_tokens: int) -> bool:
    """Return whether a node's host block is exactly the node's range, and not part of a larger block."""
    return node.block is not None and (node.block.start, node.block.end) == (node.start, min(node.end, num_tokens))
