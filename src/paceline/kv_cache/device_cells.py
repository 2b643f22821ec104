"""Device memory of one context: limits, sequences, sequence ids, exact counts of cells, and operations for the executor.

    seq id 0:  [segment of 100]──[segment of 20]
    seq id 1:  [the same 100  ]──[another of 5 ]          125 cells

A copied prefix lies under several sequence ids and counts once. An operation takes effect here when it is queued, and on the
device before the next pass. Pure arithmetic on lengths; the radix tree knows the tokens.

Operations count cells. A layout gives the positions of the cells, by which the backend addresses them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection
from dataclasses import dataclass, field

from paceline.kv_cache.prompt_layout import TEXT_LAYOUT, PromptLayout
from paceline.kv_cache.radix_tree import TOKEN_BYTES, Namespace, SavedState, pack_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheLimits:
    """Sizes of one context's memory.

    Attributes:
        num_seq_ids: Sequence ids for running sequences and cached prefixes.
        num_cells: Cells that all sequences share; None if memory is not made of cells.
        can_share_part: Whether a sequence can take over any part of another's memory.
        has_state_apart: If not, whether it can take over part of the cells, and beside them a whole state; otherwise a sequence
            takes over all of the memory or nothing.
        host_bytes: Capacity of host memory.
        itl_target_s: Inter-token latency target; transfers get a share of it.
        boundary_ids: Control tokens between the messages of a chat.
    """

    num_seq_ids: int
    num_cells: int | None
    can_share_part: bool
    host_bytes: int
    itl_target_s: float
    has_state_apart: bool = False
    boundary_ids: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The request of one or more sequences.

    Attributes:
        key: Number of the request, for reports.
        is_paused: Whether its sequences do not compute, so that no other sequence waits for their prefixes.
        is_matched: Set by the cache at the first match.
    """

    key: int
    is_paused: bool = False
    is_matched: bool = False


class CacheSequence:
    """A sequence, waiting or running, as the cache sees it; schedulers and drafters derive their sequences from it.

    Attributes:
        token_ids: Tokens so far. An owner that removes some removes them from `packed`, too.
        packed: The first tokens in the form of the radix tree, as far as they were asked for.
        layout: Cells and positions of the tokens.
        num_prompt_tokens: Number of tokens at the start.
        request: The request of the sequence, which sibling sequences share.
        seq_id: Set by the cache; None while the sequence waits.
        num_computed_tokens: Set by the cache.
        waits_for: Set by the cache: the prefix that another sequence is about to compute.
        lookup: Set by the cache: the search on a disk for its prompt.
        awaited: Set by the cache: this search, or that of a sequence that begins alike.
        computes_all: Set by the cache after a failed load, until the sequence ends.
    """

    __slots__ = (
        "awaited", "computes_all", "layout", "lookup", "num_computed_tokens", "num_prompt_tokens", "packed", "request",
        "seq_id", "token_ids", "waits_for",
    )  # fmt: skip

    request: SequenceGroup

    def __init__(self, token_ids: list[int], packed: bytes, layout: PromptLayout) -> None:
        self.token_ids, self.packed, self.layout = token_ids, bytearray(packed), layout
        self.num_prompt_tokens = len(token_ids)
        self.num_computed_tokens = 0
        self.seq_id: int | None = None
        self.waits_for: PendingPrefix | None = None
        self.lookup: DiskLookup | None = None
        self.awaited: DiskLookup | None = None
        self.computes_all = False

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far."""
        return len(self.token_ids)

    @property
    def is_running(self) -> bool:
        """Whether it has cells, or is about to get some."""
        return self.seq_id is not None

    @property
    def scored_from(self) -> int | None:
        """Number of tokens before the next pass that computes log-probabilities of prompt tokens; None: there is none left."""
        return None

    @property
    def max_cached_tokens(self) -> int:
        """Most tokens that may come from the cache: neither the last nor scored tokens, and none after a failed load."""
        if self.computes_all:
            return 0
        most, scored_from = self.num_tokens - 1, self.scored_from
        return most if scored_from is None else min(most, scored_from)

    @property
    def writes_cache(self) -> bool:
        """Whether its tokens may be cached for others."""
        raise NotImplementedError

    @property
    def namespace(self) -> Namespace:
        """Namespace within which it shares prefixes."""
        raise NotImplementedError

    @property
    def turn_key(self) -> tuple[float, int]:
        """Order of admission."""
        raise NotImplementedError

    def token_bytes(self, num_tokens: int) -> bytes:
        """Return the first tokens in the form of the radix tree."""
        have = len(self.packed) // TOKEN_BYTES
        if have < num_tokens:
            self.packed += pack_tokens(self.token_ids[have:num_tokens])
        return bytes(self.packed[: num_tokens * TOKEN_BYTES])


@dataclass(frozen=True, slots=True)
class PendingPrefix:
    """The first `end` tokens of a prompt, which a running sequence is about to have computed."""

    sequence: CacheSequence
    end: int

    @property
    def is_pending(self) -> bool:
        """Whether the sequence still runs and has not computed that far."""
        by = self.sequence
        return by.is_running and not by.request.is_paused and by.num_computed_tokens < self.end


@dataclass(slots=True, eq=False, kw_only=True)
class DiskLookup:
    """The search on a disk for the rest of a prompt.

    Attributes:
        tokens: The prompt, as bytes, without its last token.
        num_known: Tokens that a sequence can take over without the disk.
        num_cells: Tokens with cells that need not be read.
        token_s: Seconds to compute a token. What takes longer to read is not read.
        max_bytes: Most bytes to read.
        due_s: When the sequence starts without it, on the engine's clock.
        is_done: Whether nothing more comes.
        num_read: Tokens that were read and that no sequence has taken over yet.
    """

    namespace: Namespace
    tokens: bytes
    num_known: int
    num_cells: int
    token_s: float
    max_bytes: int
    due_s: float
    is_done: bool = False
    num_read: int = 0


@dataclass(frozen=True, slots=True)
class Copy:
    """Share the first num_tokens of one sequence id with another, which is empty.

    cells_only: without the state that lies beside the cells; loads of cells and of a state follow.
    """

    from_seq_id: int
    to_seq_id: int
    num_tokens: int
    cells_only: bool = False
    layout: PromptLayout = TEXT_LAYOUT


@dataclass(frozen=True, slots=True)
class Remove:
    """Empty a sequence id."""

    seq_id: int


@dataclass(frozen=True, slots=True)
class Truncate:
    """Keep the first num_tokens of a sequence id, and free the later cells."""

    seq_id: int
    num_tokens: int
    layout: PromptLayout = TEXT_LAYOUT


@dataclass(frozen=True, slots=True)
class Save:
    """Save the cells of tokens [start, end) of a sequence id to host memory.

    namespace, tokens: the path to `end` in the radix tree, tokens as bytes. cut_from: a saved range that has these tokens and is
    cut in place of a sequence id, by way of free cells for all of it.
    """

    seq_id: int
    start: int
    end: int
    namespace: Namespace
    tokens: bytes
    layout: PromptLayout = TEXT_LAYOUT
    cut_from: SavedState | None = None


@dataclass(frozen=True, slots=True)
class SaveState:
    """Save the state of a sequence id that holds num_tokens to host memory.

    If memory keeps no cells apart from the state, the state is all memory of the id. namespace, tokens: as in `Save`.
    """

    seq_id: int
    num_tokens: int
    namespace: Namespace
    tokens: bytes
    layout: PromptLayout = TEXT_LAYOUT


@dataclass(frozen=True, slots=True)
class LoadState:
    """Give a sequence id the state that continues after num_tokens; if cells are kept apart, the id holds them already."""

    seq_id: int
    data: SavedState
    num_tokens: int
    layout: PromptLayout = TEXT_LAYOUT


@dataclass(frozen=True, slots=True)
class Load:
    """Append tokens [start, end) of a saved state to a sequence id that holds exactly the tokens before `start`."""

    seq_id: int
    data: SavedState
    start: int
    end: int
    layout: PromptLayout = TEXT_LAYOUT


Operation = Copy | Remove | Truncate | Save | Load | SaveState | LoadState


@dataclass(slots=True)
class TransferOutput:
    """Outcome of a tick's operations.

    Attributes:
        saved: The successful saves of cells, with their data.
        saved_states: The successful saves of states, with their data.
        failed_seq_ids: Sequence ids with a failed copy or load.
        failed_loads: The failed loads, except loads that failed because of an earlier failure.
        saving_s: Seconds spent on saving cells.
        loading_s: Seconds spent on loading cells.
        state_saving_s: Seconds spent on saving states.
    """

    saved: list[tuple[Save, SavedState]] = field(default_factory=list)
    saved_states: list[tuple[SaveState, SavedState]] = field(default_factory=list)
    failed_seq_ids: set[int] = field(default_factory=set)
    failed_loads: list[Load | LoadState] = field(default_factory=list)
    saving_s: float = 0.0
    loading_s: float = 0.0
    state_saving_s: float = 0.0


class SeqIds:
    """Allocates the ids 0 to num - 1, the lowest free id first, so that few are in use."""

    def __init__(self, num: int) -> None:
        self._free = list(range(num))
        self._num = num

    @property
    def num_free(self) -> int:
        """Number of ids that can be allocated."""
        return len(self._free)

    def allocate(self) -> int:
        """Return a free id. Raises `IndexError` if there is none."""
        return heapq.heappop(self._free)

    def release(self, seq_id: int) -> None:
        """Make an allocated id free."""
        heapq.heappush(self._free, seq_id)

    def check(self, allocated: list[int]) -> None:
        """Assert that the allocated and the free ids are all ids, each once."""
        assert sorted([*self._free, *allocated]) == list(range(self._num)), (self._free, allocated)  # noqa: S101


@dataclass(slots=True, eq=False)
class Segment:
    """A run of cells that belongs to the same sequence ids from its first to its last."""

    length: int
    num_owners: int = 1


class DeviceCells:
    """The cells under each sequence id, and pending operations. num_used: cells in use."""

    def __init__(self, num_seq_ids: int) -> None:
        self.seq_ids = SeqIds(num_seq_ids)
        self.operations: list[Operation] = []
        self.num_used = 0
        self._segments: dict[int, list[Segment]] = {}

    def length(self, seq_id: int) -> int:
        """Return the number of tokens under a sequence id."""
        return sum(segment.length for segment in self._segments.get(seq_id, ()))

    def extend(self, seq_id: int, num_tokens: int) -> None:
        """Count tokens that were computed at the end of a sequence."""
        segments = self._segments.setdefault(seq_id, [])
        if segments and segments[-1].num_owners == 1:
            segments[-1].length += num_tokens
        else:
            segments.append(Segment(num_tokens))
        self.num_used += num_tokens

    def truncate(self, truncate: Truncate) -> None:
        """Free the last cells of a sequence, which no other shares."""
        self.operations.append(truncate)
        segments, left = self._segments[truncate.seq_id], truncate.num_tokens
        excess = self.length(truncate.seq_id) - left
        while excess > 0:
            last = segments[-1]
            assert last.num_owners == 1  # noqa: S101 - computed just now, and copied to no other
            num_freed = min(excess, last.length)
            last.length -= num_freed
            if not last.length:
                segments.pop()
            self.num_used -= num_freed
            excess -= num_freed

    def load(self, load: Load) -> None:
        """Append a saved range to a sequence."""
        self.operations.append(load)
        self.extend(load.seq_id, load.end - load.start)

    def load_state(self, load: LoadState, *, has_cells: bool) -> None:
        """Give a sequence a state. has_cells: whether the state has the cells of its tokens, and brings them."""
        self.operations.append(load)
        if has_cells:
            self.extend(load.seq_id, load.num_tokens)

    def copy(self, copy: Copy) -> None:
        """Share the first tokens of a sequence with an empty one."""
        self.operations.append(copy)
        self.share(copy.from_seq_id, copy.to_seq_id, copy.num_tokens)

    def share(self, from_seq_id: int, to_seq_id: int, num_tokens: int) -> None:
        """Count a copy."""
        shared: list[Segment] = []
        source, left = self._segments[from_seq_id], num_tokens
        for index, segment in enumerate(source):
            if left < segment.length:
                source[index : index + 1] = [
                    Segment(left, segment.num_owners),
                    Segment(segment.length - left, segment.num_owners),
                ]
                self._split_elsewhere(from_seq_id, segment, source[index : index + 2])
                segment = source[index]  # noqa: PLW2901 - the part that is shared
            segment.num_owners += 1
            shared.append(segment)
            left -= segment.length
            if left == 0:
                break
        self._segments[to_seq_id] = shared

    def free(self, seq_id: int) -> None:
        """Empty and release a sequence id; cells that others share stay."""
        self.operations.append(Remove(seq_id))
        for segment in self._segments.pop(seq_id, ()):
            segment.num_owners -= 1
            if not segment.num_owners:
                self.num_used -= segment.length
        self.seq_ids.release(seq_id)

    def num_under(self, seq_ids: list[int]) -> int:
        """Return the number of cells that lie under any of these sequence ids."""
        segments = {segment for seq_id in seq_ids for segment in self._segments.get(seq_id, ())}
        return sum(segment.length for segment in segments)

    def num_own(self, seq_id: int) -> int:
        """Return the number of cells that no other sequence id shares; freeing the id frees these cells."""
        return sum(segment.length for segment in self._segments.get(seq_id, ()) if segment.num_owners == 1)

    @property
    def pending_saves(self) -> list[Save | SaveState]:
        """The pending saves of memory; those that are cut from a saved range do not count."""
        return [
            operation
            for operation in self.operations
            if isinstance(operation, SaveState) or (isinstance(operation, Save) and operation.cut_from is None)
        ]

    def take_operations(self) -> list[Operation]:
        """Return the pending operations, in order, for the executor."""
        operations = list(self.operations)
        self.operations.clear()
        return operations

    def _split_elsewhere(self, seq_id: int, segment: Segment, parts: list[Segment]) -> None:
        """Replace a segment by its parts under all other ids that share it."""
        if segment.num_owners == 1:
            return
        for other, segments in self._segments.items():
            if other != seq_id and segment in segments:
                at = next(index for index, shared in enumerate(segments) if shared is segment)
                segments[at : at + 1] = parts


_LOW = 4  # cells are low if less than this fraction (1/4) is free


class CellBudget:
    """Free and promised cells, and for how many ticks they last. running: the live collection of running sequences."""

    def __init__(self, num_cells: int | None, cells: DeviceCells, running: Collection[CacheSequence]) -> None:
        self._num_cells, self._cells, self._running = num_cells, cells, running

    def fits(self, num_tokens: int) -> bool:
        """Return whether this many cells are free beside the next cells of running sequences."""
        if self._num_cells is None:
            return True
        promised = sum(sequence.num_tokens - sequence.num_computed_tokens + 1 for sequence in self._running)
        return self._cells.num_used + promised + num_tokens <= self._num_cells

    @property
    def num_free(self) -> float:
        """Cells not in use; infinite if memory is not made of cells."""
        return math.inf if self._num_cells is None else self._num_cells - self._cells.num_used

    @property
    def is_low(self) -> bool:
        """True when less than a quarter of the cells are free."""
        return self._num_cells is not None and _LOW * (self._num_cells - self._cells.num_used) < self._num_cells

    @property
    def ticks_left(self) -> float:
        """Number of ticks until no cell is free; infinite while cells are not low."""
        return self._ticks(self._cells.num_used) if self.is_low else math.inf

    @property
    def ticks_left_for_running(self) -> float:
        """As `ticks_left`, if running sequences alone had cells."""
        return self._ticks(self._cells.num_under(self.seq_ids)) if self.is_low else math.inf

    @property
    def seq_ids(self) -> list[int]:
        """Sequence ids of running sequences."""
        return [sequence.seq_id for sequence in self._running if sequence.seq_id is not None]

    def _ticks(self, num_used: int) -> float:
        """Estimate the ticks: running sequences compute the rest of their prompts, then one token a tick each."""
        assert self._num_cells is not None  # noqa: S101 - else they are never low
        left = sum([sequence.num_tokens - sequence.num_computed_tokens for sequence in self._running])
        return (self._num_cells - num_used - left) / max(1, len(self._running))
