"""The memory of a llama.cpp context without a model: cells by sequence id, with the rules of each kind.

attention         cells of one pool, shared by copies; any prefix can be copied
sliding_window    the same cells, and a state: the last `window` tokens of each sequence in a second pool
hybrid            the same cells, and a state of one size
recurrent         states alone, no cells
compressed        cells that can only be copied, saved and loaded with all that belongs to them

Cells are addressed by positions, as in llama.cpp: those of a media item share the position where it begins.

A state belongs to one place, the end of its sequence. It is copied with all of a sequence, or saved and loaded; cells that were
copied or loaded without it cannot be continued until it is there.

Behind the last tokens that were appended, memory can be cut, where a window still has what it needs. Recurrent states are
taken back whole to where these began, unless no more than `rollback` tokens are cut at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Literal

from paceline.errors import InvalidParams, NoKvSlot, Unsupported
from paceline.kv_cache import MediaItem

Kind = Literal["attention", "sliding_window", "hybrid", "recurrent", "compressed"]

_STATE_BYTES = 128  # of recurrent layers, whatever the number of tokens

_MASK = 2**64 - 1


def mix(value: int) -> int:
    """Hash a number to 64 bits that depend on every bit of it (the finaliser of SplitMix64)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def _num_before(ends: SequenceOf[int], position: int) -> int:
    index = bisect_left(ends, position)
    if index == len(ends) or ends[index] != position:
        raise InvalidParams(f"cells cannot be cut at position {position}")
    return index + 1


@dataclass(slots=True)
class FakeSequence:
    """What a sequence id holds: its cells, a hash of its tokens up to each of them, and its state, if it has one.

    ends: the position at which the sequence goes on behind each cell. row_start: the number of cells before those that were
    appended last, while a recurrent state can be taken back there. window_start: of the cells, the first that a window has.
    """

    cells: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    state: FakeState | None = None
    row_start: int | None = None
    window_start: int = 0

    @property
    def next_position(self) -> int:
        """The position at which it goes on."""
        return self.ends[-1] if self.ends else 0

    def num_before(self, position: int) -> int:
        """Return how many cells lie before a position. Raises `InvalidParams` where memory cannot be cut there."""
        return _num_before(self.ends, position) if position else 0

    @property
    def last_hash(self) -> int:
        """The hash of all its tokens; another one where cells and state are not of the same tokens."""
        last = self.hashes[-1] if self.hashes else 0
        if self.state is None or self.state.window == tuple(self.hashes[-len(self.state.window) :]):
            return last
        return mix(self.state.window[-1])


@dataclass(frozen=True, slots=True)
class FakeState:
    """Saved tokens, from position `start` on, eight bytes each; without tokens the state beside the cells before `start`.

    ends: the position behind each token. window: of a state beside cells, hashes up to each of its last tokens. size: in
    bytes, where it does not follow from these.
    """

    start: int
    hashes: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    window: tuple[int, ...] = ()
    size: int | None = None

    @property
    def end(self) -> int:
        """The position behind the last token."""
        return self.ends[-1] if self.ends else self.start

    def num_before(self, position: int) -> int:
        """Return how many of the tokens lie before a position. Raises `InvalidParams` where they cannot be cut there."""
        return _num_before(self.ends, position) if position > self.start else 0

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return 8 * len(self.hashes) + 8 * len(self.window) if self.size is None else self.size


class FakeMemory:
    """The cells of one context. A sequence reads from it a hash of the tokens that its cells really hold.

    rollback: tokens that can be cut from a recurrent state at once.
    """

    def __init__(self, num_cells: int, num_seq_ids: int, kind: Kind, window: int, rollback: int = 0) -> None:
        self.num_cells, self.kind, self.window, self.rollback = num_cells, kind, window, rollback
        self._sequences = [FakeSequence() for _ in range(num_seq_ids)]
        self._free = list(range(num_cells - 1, -1, -1))
        self._num_owners = [0] * num_cells

    @property
    def num_used(self) -> int:
        """Cells that hold a token."""
        return self.num_cells - len(self._free)

    @property
    def num_seq_ids(self) -> int:
        """Number of sequence ids."""
        return len(self._sequences)

    def length(self, seq_id: int) -> int:
        """Return the number of tokens that a sequence id holds."""
        return len(self._sequence(seq_id).hashes)

    def hashes(self, seq_id: int) -> list[int]:
        """Return the hashes of a sequence's tokens up to each of them."""
        return self._sequence(seq_id).hashes

    def needs(self, num_tokens: int) -> None:
        """Raise `NoKvSlot` where this many more tokens do not fit."""
        if self.kind != "recurrent" and num_tokens > len(self._free):
            raise NoKvSlot(f"{num_tokens} cells are needed and {len(self._free)} are free")

    def next_position(self, seq_id: int) -> int:
        """Return the position at which a sequence goes on."""
        return self._sequence(seq_id).next_position

    def append(
        self,
        seq_id: int,
        position: int,
        token_ids: list[int],
        adapters: int = 0,
        part: tuple[MediaItem, int] | None = None,
    ) -> int:
        """Append tokens to a sequence, and return the hash of all that it holds then.

        adapters: a hash of the adapters in use, which change what a token leaves in memory. part: the media item that begins at
        `position`, and which of its cells is the first of these.
        """
        held = self._sequence(seq_id)
        if position != held.next_position:
            raise InvalidParams(f"sequence {seq_id} continues at {held.next_position}, not at {position}")
        if self.has_state_apart and held.hashes and held.state is None:
            raise InvalidParams(f"sequence {seq_id} has {len(held.hashes)} cells without their state")
        held.row_start = len(held.hashes)
        held.window_start = max(held.window_start, len(held.hashes) - self.window)
        last = held.last_hash
        item, offset = part or (None, 0)
        begin = position + offset - len(held.hashes) << 32  # 0 where positions are cells
        for token_id in token_ids:
            last = mix(last * 0x9E3779B97F4A7C15 + token_id + 1 + adapters + begin & _MASK)
            held.hashes.append(last)
        if item is None:
            held.ends += range(position + 1, position + 1 + len(token_ids))
        else:
            held.ends += [position] * len(token_ids)
            if offset + len(token_ids) == item.num_cells:
                held.ends[-1] = position + item.num_positions
        if self.kind != "recurrent":
            held.cells += [self._take_cell() for _ in token_ids]
        if self.has_state_apart:
            held.state = self._state_of(held)
        return last

    @property
    def has_state_apart(self) -> bool:
        """Whether cells can be shared in any part, and a state lies beside them."""
        return self.kind in ("sliding_window", "hybrid")

    def _state_of(self, held: FakeSequence) -> FakeState:
        if self.kind == "hybrid":
            return FakeState(held.next_position, window=tuple(held.hashes[-1:]), size=_STATE_BYTES)
        return FakeState(held.next_position, window=tuple(held.hashes[-self.window :]))

    def copy(self, from_seq_id: int, to_seq_id: int, end: int) -> None:
        """Share the positions before `end` of one sequence id with another."""
        source = self._sequence(from_seq_id)
        if end < source.next_position and self.kind != "attention":
            raise Unsupported(
                f"{self.kind} memory can only be copied whole, not {end} of {source.next_position} tokens"
            )
        self._share(from_seq_id, to_seq_id, end)
        target = self._sequence(to_seq_id)
        target.state, target.window_start = source.state, max(0, len(target.hashes) - self.window)

    def copy_cells(self, from_seq_id: int, to_seq_id: int, end: int) -> None:
        """Share the cells before position `end`, without the state beside them."""
        if not self.has_state_apart:
            raise Unsupported(f"{self.kind} memory has no cells apart from a state")
        self._share(from_seq_id, to_seq_id, end)

    def _share(self, from_seq_id: int, to_seq_id: int, end: int) -> None:
        source, target = self._sequence(from_seq_id), self._sequence(to_seq_id)
        if target.hashes or not 0 < end <= source.next_position:
            raise InvalidParams(f"{end} of {source.next_position} tokens to a sequence of {len(target.hashes)}")
        if self.has_state_apart and source.state is None:
            raise InvalidParams(f"sequence {from_seq_id} has cells without their state")
        num_cells = source.num_before(end)
        target.hashes = source.hashes[:num_cells]
        target.ends = source.ends[:num_cells]
        target.cells = source.cells[:num_cells]
        for cell in target.cells:
            self._num_owners[cell] += 1

    def save(self, seq_id: int, start: int, end: int) -> FakeState:
        """Save the cells at positions [start, end) of a sequence id."""
        held = self._sequence(seq_id)
        if not 0 <= start < end <= held.next_position:
            raise InvalidParams(f"sequence {seq_id} holds {held.next_position} tokens, not {start} to {end}")
        if self.kind != "attention" and not self.has_state_apart:
            raise Unsupported(f"{self.kind} memory is saved whole, not from {start} to {end}")
        part = slice(held.num_before(start), held.num_before(end))
        return FakeState(start, tuple(held.hashes[part]), tuple(held.ends[part]))

    def cut(self, state: FakeState, start: int, end: int) -> FakeState:
        """Return positions [start, end) of saved cells; needs free cells for all of them meanwhile, as llama.cpp does."""
        if self.kind != "attention" and not self.has_state_apart:
            raise Unsupported(f"{self.kind} memory is saved whole, and cannot be cut from {start} to {end}")
        if not state.start <= start < end <= state.end:
            raise InvalidParams(f"{start} to {end} of saved tokens from {state.start} to {state.end}")
        self.needs(len(state.hashes))
        part = slice(state.num_before(start), state.num_before(end))
        return FakeState(start, state.hashes[part], state.ends[part])

    def load(self, seq_id: int, state: FakeState, start: int, end: int) -> None:
        """Append positions [start, end) of saved cells to a sequence that holds those before.

        Needs free cells for all that was saved meanwhile, as llama.cpp does.
        """
        held = self._sequence(seq_id)
        if held.next_position != start or start < state.start or end > state.end:
            raise InvalidParams(f"{start} to {end} of a state from {state.start} behind {held.next_position} tokens")
        if held.state is not None:
            raise InvalidParams(f"sequence {seq_id} has a state, to which no cells can be added")
        self._add(held, state, state.num_before(start), state.num_before(end))

    def save_state(self, seq_id: int, end: int) -> FakeState:
        """Save the state of a sequence id that goes on at `end`, or all that it holds where nothing lies apart."""
        held = self._sequence(seq_id)
        if self.kind == "attention" or end != held.next_position or end == 0:
            raise InvalidParams(f"sequence {seq_id} of {self.kind} memory holds {held.next_position} tokens, not {end}")
        if self.has_state_apart:
            if held.state is None:
                raise InvalidParams(f"sequence {seq_id} has cells without their state")
            return held.state
        size = _STATE_BYTES if self.kind == "recurrent" else None
        return FakeState(0, tuple(held.hashes), tuple(held.ends), size=size)

    def load_state(self, seq_id: int, state: FakeState, end: int) -> None:
        """Give a sequence id a saved state: behind the cells before `end`, or all of it to an empty one."""
        held = self._sequence(seq_id)
        if self.has_state_apart:
            if state.hashes or (state.start, held.next_position) != (end, end):
                raise InvalidParams(f"a state after {state.start} tokens behind {held.next_position} cells")
            held.state, held.row_start = state, None
            held.window_start = max(0, len(held.hashes) - self.window)
            return
        if held.hashes or state.end != end:
            raise InvalidParams(f"a whole state of {state.end} tokens onto {len(held.hashes)}")
        self._add(held, state, 0, len(state.hashes))

    def _add(self, held: FakeSequence, state: FakeState, first: int, end: int) -> None:
        self.needs(len(state.hashes))
        held.hashes += state.hashes[first:end]
        held.ends += state.ends[first:end]
        if self.kind != "recurrent":
            held.cells += [self._take_cell() for _ in range(end - first)]

    @property
    def max_rollback(self) -> int | None:
        """Wrong drafts that can be cut from the end of a row; None: all of them."""
        return None if self.kind in ("attention", "sliding_window") else self.rollback

    def take_back(self, seq_id: int, num_tokens: int) -> bool:
        """Cut the last of the tokens that were just appended to a sequence; return whether all of these had to go for it."""
        held = self._sequence(seq_id)
        assert held.row_start is not None  # noqa: S101 - tokens were just appended
        if self.kind == "compressed":
            raise Unsupported(f"{self.kind} memory cannot be cut")
        is_whole = self.max_rollback is not None and num_tokens > self.max_rollback
        self._cut(held, held.row_start if is_whole else len(held.hashes) - num_tokens)
        if is_whole:
            held.row_start = None
        return is_whole

    def truncate(self, seq_id: int, end: int) -> None:
        """Remove the positions of a sequence from `end` on, behind the first; of recurrent states, those appended last."""
        held = self._sequence(seq_id)
        if not 0 < end <= held.next_position:
            raise InvalidParams(f"sequence {seq_id} holds {held.next_position} tokens, not {end}")
        num_kept = held.num_before(end)
        if self.kind == "compressed" or (self.max_rollback is not None and num_kept != held.row_start):
            raise Unsupported(f"{self.kind} memory cannot be cut at {end}")
        self._cut(held, num_kept)
        held.row_start = None

    def _cut(self, held: FakeSequence, num_kept: int) -> None:
        if self.kind == "sliding_window" and max(0, num_kept - self.window) < held.window_start:
            raise Unsupported(f"the window begins at cell {held.window_start}, and does not cover {num_kept} tokens")
        self._release(held.cells[num_kept:])
        del held.hashes[num_kept:], held.ends[num_kept:], held.cells[num_kept:]
        if self.has_state_apart:
            held.state = self._state_of(held)

    def remove(self, seq_id: int) -> None:
        """Remove a sequence."""
        self._release(self._sequence(seq_id).cells)
        self._sequences[seq_id] = FakeSequence()

    def _release(self, cells: list[int]) -> None:
        for cell in cells:
            self._num_owners[cell] -= 1
            if not self._num_owners[cell]:
                self._free.append(cell)

    def _sequence(self, seq_id: int) -> FakeSequence:
        if not 0 <= seq_id < len(self._sequences):
            raise InvalidParams(f"seq_id must be 0 to {len(self._sequences) - 1}, not {seq_id}")
        return self._sequences[seq_id]

    def _take_cell(self) -> int:
        cell = self._free.pop()
        self._num_owners[cell] = 1
        return cell
