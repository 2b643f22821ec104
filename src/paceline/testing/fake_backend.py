"""A backend without a model, with its memory, clock and tokenizer: the next token is a hash of the sequence's cells.

So neither batching, nor chunking, nor sharing can change the output, unless the engine makes a mistake: a token at a wrong
position, or a wrong copy, changes everything after it. Tokens 0 to 255 are the bytes, 256 ends generation, 257 begins a text.

Memory follows the rules of each kind of llama.cpp context:

attention         cells of one pool, shared by copies; any prefix can be copied
sliding_window    the same cells, and a state: the last `window` tokens of each sequence in a second pool
hybrid            the same cells, and a state of one size
recurrent         states alone, no cells
compressed        cells that can only be copied, saved and loaded with all that belongs to them

Cells are addressed by positions, as in llama.cpp: the cells of a media item share the position at which it begins.

A state belongs to one place, the end of its sequence. It is copied with all of a sequence, or saved and loaded; cells that were
copied or loaded without it cannot be continued until it is there.

Memory can be cut within the last appended tokens, if a window still has the tokens it needs. Recurrent states are taken back
whole to the start of these tokens, unless no more than `rollback` tokens are cut at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from heapq import heappop, heappush
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from paceline import validation
from paceline.engine.adapters import name_of
from paceline.engine.backend import Lora, as_paceline_error
from paceline.errors import (
    AdapterError,
    AdapterNotFound,
    InvalidParams,
    NoKvSlot,
    NoTokenAllowed,
    PacelineError,
    StateError,
    Unsupported,
)
from paceline.kv_cache import MediaItem
from paceline.output import Vocabulary
from paceline.params import SamplingParams
from paceline.scheduling.records import EmbeddingItem
from paceline.sequence import Limits, Row, RowKind, RowOutput
from paceline.streaming.chunk import TokenLogprobs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from paceline.constraints import Constraint, ConstraintCompiler
    from paceline.runtime.tokenizer import FimTokens


_Packed = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int | None]
Kind = Literal["attention", "sliding_window", "hybrid", "recurrent", "compressed"]

_STATE_BYTES = 128  # of recurrent layers, whatever the number of tokens
_ATTENDED = 256  # cells that llama.cpp's attention reads at a time

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
    """The contents of a sequence id: its cells, a hash of its tokens up to each cell, and its state, if it has one.

    Attributes:
        ends: The position after each cell.
        row_start: The number of cells before the last appended cells, while a recurrent state can be taken back there.
        window_start: The first cell that a window has.
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
        """Return the number of cells before a position. Raises `InvalidParams` if memory cannot be cut there."""
        return _num_before(self.ends, position) if position else 0

    @property
    def last_hash(self) -> int:
        """The hash of all its tokens; a different hash if cells and state are of different tokens."""
        last = self.hashes[-1] if self.hashes else 0
        if self.state is None or self.state.window == tuple(self.hashes[-len(self.state.window) :]):
            return last
        return mix(self.state.window[-1])


@dataclass(frozen=True, slots=True)
class FakeState:
    """Saved tokens from position `start` on, eight bytes each; without tokens, the state beside the cells before `start`.

    Attributes:
        ends: The position after each token.
        window: Of a state beside cells, hashes up to each of its last tokens.
        size: In bytes, if it does not follow from the other fields.
    """

    start: int
    hashes: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    window: tuple[int, ...] = ()
    size: int | None = None

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.ends[-1] if self.ends else self.start

    def num_before(self, position: int) -> int:
        """Return the number of tokens before a position. Raises `InvalidParams` if they cannot be cut there."""
        return _num_before(self.ends, position) if position > self.start else 0

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return 8 * len(self.hashes) + 8 * len(self.window) if self.size is None else self.size

    @property
    def payload(self) -> NDArray[np.uint8]:
        """Its bytes, for a file."""
        import numpy as np

        packed = msgspec.msgpack.encode((self.hashes, self.ends, self.window, self.size))
        return np.frombuffer(packed, dtype=np.uint8)

    @staticmethod
    def of(start: int, end: int, payload: NDArray[np.uint8]) -> FakeState:
        """Return the state of these bytes. Raises `StateError`."""
        try:
            hashes, ends, window, size = msgspec.msgpack.decode(payload.tobytes(), type=_Packed)
        except msgspec.MsgspecError as error:
            raise StateError(f"no saved cells: {error}") from None
        state = FakeState(start, hashes, ends, window, size)
        if state.end != end:
            raise StateError(f"the cells end at {state.end}, not at {end}")
        return state


class FakeMemory:
    """The cells of one context. A sequence reads from it a hash of the tokens that its cells really hold.

    rollback: tokens that can be cut from a recurrent state at once.
    """

    def __init__(self, num_cells: int, num_seq_ids: int, kind: Kind, window: int, rollback: int = 0) -> None:
        self.num_cells, self.kind, self.window, self.rollback = num_cells, kind, window, rollback
        self._sequences = [FakeSequence() for _ in range(num_seq_ids)]
        self._free = list(range(num_cells))  # a heap
        self._num_owners = [0] * num_cells

    @property
    def num_used(self) -> int:
        """Cells that hold a token."""
        return self.num_cells - len(self._free)

    @property
    def num_attended(self) -> int:
        """Cells that attention reads: whole blocks of 256, up to the highest cell in use."""
        highest = next((cell for cell in range(self.num_cells - 1, -1, -1) if self._num_owners[cell]), -1)
        return min(self.num_cells, (highest // _ATTENDED + 1) * _ATTENDED)

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
        """Raise `NoKvSlot` if this many more tokens do not fit."""
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
        """Append tokens to a sequence, and return the hash of all its tokens.

        adapters: a hash of the adapters in use, which change the contents of cells. part: the media item that begins at
        `position`, and the number of its first appended cell.
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
        """Append positions [start, end) of saved cells to a sequence that holds the earlier positions.

        Meanwhile needs free cells for the whole saved range, as llama.cpp does.
        """
        held = self._sequence(seq_id)
        if held.next_position != start or start < state.start or end > state.end:
            raise InvalidParams(f"{start} to {end} of a state from {state.start} behind {held.next_position} tokens")
        if held.state is not None:
            raise InvalidParams(f"sequence {seq_id} has a state, to which no cells can be added")
        self._add(held, state, state.num_before(start), state.num_before(end))

    def save_state(self, seq_id: int, end: int) -> FakeState:
        """Save the state of a sequence id that continues at `end`, or all its memory if no state lies apart."""
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
        """Give a sequence id a saved state: after the cells before `end`, or the whole memory to an empty id."""
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
        """Remove the positions of a sequence from `end` on, after the first; of recurrent states, the last appended positions."""
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
                heappush(self._free, cell)

    def _sequence(self, seq_id: int) -> FakeSequence:
        if not 0 <= seq_id < len(self._sequences):
            raise InvalidParams(f"seq_id must be 0 to {len(self._sequences) - 1}, not {seq_id}")
        return self._sequences[seq_id]

    def _take_cell(self) -> int:
        cell = heappop(self._free)  # the lowest, as llama.cpp does
        self._num_owners[cell] = 1
        return cell


EOS, BOS = 256, 257

_LETTERS = b" etaoinshrdlu,.\n"
Failure = Callable[[int, Sequence[Row]], Exception | None]


class ManualClock:
    """A `Clock` for tests without sleeps."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Return the current time in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Advance the time."""
        self._now_s += validation.number("seconds", seconds, 0)


@dataclass(frozen=True, slots=True)
class FakeCost:
    """The time of a pass on the manual clock: base_s + token_s for each of its tokens.

    Attributes:
        cell_s: For each row of a pass and each cell up to the highest cell in use, as attention on a GPU reads them.
        saved_token_s: For each token whose cells are saved; loaded_token_s: for each that is loaded.
        saved_state_s: For each saved state.
    """

    base_s: float = 0.01
    token_s: float = 0.001
    saved_token_s: float = 0.0
    saved_state_s: float = 0.0
    cell_s: float = 0.0
    loaded_token_s: float = 0.0


class FakeSampler:
    """Draws from a hash. Honours seed, temperature 0, ignore_eos, min_tokens, stop_token_ids and allowed_token_ids.

    With mirostat a draw depends on all draws before, as in the real sampler. Follows constraints, but for GBNF grammars.
    """

    _constraint: Constraint | None = None

    def __init__(
        self, params: SamplingParams, choice: int, eos_every: int, constraint: Constraint | None = None
    ) -> None:
        self._params, self._eos_every = params, eos_every
        self._constraint = constraint
        self._key = 0 if params.temperature == 0 else mix((params.seed or 0) * 1000 + choice + 1)
        self.num_generated = 0
        self.mood = 0

    def draw(self, history: int) -> int:
        """Return the next token after tokens of this hash."""
        value = mix(history ^ self._key ^ self.mood)
        if self._params.mirostat:
            self.mood = mix(self.mood + value)
        banned = self._banned()
        while (token := self._token(value)) in banned:
            value = mix(value + 1)
        self.num_generated += 1
        return token

    def draw_constrained(self, history: int) -> tuple[int | None, bool]:
        """Return the next token that the constraint allows, and whether nothing may follow it.

        None if bans leave no token, and the text may end. Raises `NoTokenAllowed` if it may not.
        """
        constraint = self._constraint
        found = None if constraint is None else _allowed(constraint)
        if constraint is None or found is None:
            token = self.draw(history)
            self.follow(token)
            return token, constraint is not None and token != EOS and constraint.is_complete
        listed = self._params.allowed_token_ids
        found -= self._banned()
        allowed = sorted(found if listed is None else found & set(listed))
        if not allowed:
            if constraint.may_end:
                return None, True
            raise NoTokenAllowed("no token is allowed here: masks and bans together leave none")
        value = mix(history ^ self._key ^ self.mood)
        likely = [token for token in allowed if token in set(_LETTERS)] or allowed
        token = self._token(value) if self._token(value) in allowed else likely[value % len(likely)]
        self.num_generated += 1
        self.follow(token)
        return token, token != EOS and constraint.is_complete

    def follow(self, token_id: int) -> None:
        """Advance the constraint by a token that was drawn."""
        if self._constraint is not None and token_id != EOS:
            self._constraint.accept(token_id)

    def num_to_try(self, drafts: Sequence[int]) -> int:
        """Return the number of drafts in a pass: it ends before the first draft that is forbidden or completes the text."""
        if self._constraint is None or not drafts:
            return len(drafts)
        num_tried = 0
        with suppress(Exception):  # a user's own constraint may raise anything: it does again without the drafts
            ahead = self._constraint.copy()
            for draft in drafts:
                allowed = _allowed(ahead)
                if draft == EOS or (allowed is not None and draft not in allowed):
                    break
                ahead.accept(draft)
                if ahead.is_complete:
                    break
                num_tried += 1
        return num_tried

    def _banned(self) -> set[int]:
        params = self._params
        banned = {EOS} if params.ignore_eos else set()
        return banned | {EOS, *params.stop_token_ids} if self.num_generated < params.min_tokens else banned

    def _token(self, value: int) -> int:
        allowed = self._params.allowed_token_ids
        if allowed is not None:
            return allowed[value % len(allowed)]
        if value % self._eos_every == 0:
            return EOS
        value //= self._eos_every
        if value % 8 == 0:
            return value // 8 % 256  # any byte, so that characters are split and invalid
        return _LETTERS[value // 8 % len(_LETTERS)]


class FakeTokenizer:
    """The fake backend's tokenizer: a token for each byte, and two control tokens."""

    n_vocab = BOS + 1
    bos = BOS
    add_bos = False
    eog_ids = frozenset({EOS})
    special_tokens: Mapping[str, int] = MappingProxyType({"bos": BOS})

    @property
    def fim(self) -> FimTokens:
        """No tokens for filling in the middle."""
        from paceline.runtime.tokenizer import FimTokens

        return FimTokens()

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:  # noqa: ARG002
        return list(validation.text("prompt", text).encode())

    def min_tokens(self, text: str) -> int:
        """Return a lower bound of a text's tokens, as if the longest token had eight bytes."""
        return len(text.encode()) // 8

    def decode_bytes(self, token_ids: Sequence[int], *, special: bool = False) -> bytes:  # noqa: ARG002
        return bytes(token for token in token_ids if token < 256)

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        return self.decode_bytes(token_ids, special=special).decode("utf-8", "replace")


class FakeBackend:
    """A backend that computes on hashes; see the module.

    num_cells, num_seq_ids: the size of its memory; kind, window and rollback: its rules. eos_every: one in this
    many tokens ends generation. cost and clock: the time that passes take. fail: called with the number of the pass and its rows;
    an exception that it returns is raised, and nothing is stored. fail_row: the same for one row's draw. adapters: names
    that `lora` may use; they change the contents of cells, and so the drawn tokens.
    """

    def __init__(  # noqa: PLR0913 - one option for each behaviour
        self,
        *,
        num_cells: int = 4096,
        num_seq_ids: int = 8,
        kind: Kind = "attention",
        window: int = 16,
        rollback: int = 0,
        eos_every: int = 40,
        clock: ManualClock | None = None,
        cost: FakeCost = FakeCost(),
        fail: Failure | None = None,
        fail_row: Callable[[Row], PacelineError | None] | None = None,
        adapters: Sequence[str] = (),
    ) -> None:
        self.memory = FakeMemory(num_cells, num_seq_ids, kind, window, rollback)
        self.vocabulary = Vocabulary(
            pieces=(*(bytes([byte]) for byte in range(256)), b"", b""),
            pieces_special=(*(bytes([byte]) for byte in range(256)), b"<eos>", b"<bos>"),
            eog_ids=frozenset({EOS}),
        )
        self.num_passes = 0
        self.is_closed = False
        self._eos_every, self._clock, self._cost = eos_every, clock, cost
        self._fail, self._fail_row = fail, fail_row
        self._adapters = {name: name.encode() for name in adapters}  # with what it is that they change

    @cached_property
    def _compiler(self) -> ConstraintCompiler:
        from paceline.constraints import ConstraintCompiler, TokenTable

        return ConstraintCompiler(
            TokenTable(
                pieces=self.vocabulary.pieces_special,
                control_ids=frozenset({EOS, BOS}),
                eog_ids=self.vocabulary.eog_ids,
                encode=self.encode,
            )
        )

    @property
    def adapters(self) -> frozenset[str]:
        """The names that `lora` may use."""
        return frozenset(self._adapters)

    def encode(self, text: str) -> list[int]:
        """Encode a text to its bytes."""
        return list(text.encode())

    def make_samplers(self, params: SamplingParams, _prompt: list[int]) -> tuple[FakeSampler, ...]:
        """Make a sampler for each choice. Raises `Unsupported` for GBNF grammars and logits processors."""
        if params.grammar:
            raise Unsupported("the fake backend supports no GBNF grammars")
        if params.logits_processors:
            raise Unsupported("the fake backend has no logits for logits_processors")
        constraint = self._compiler.compile(params)
        return tuple(
            FakeSampler(params, choice, self._eos_every, None if constraint is None else constraint.copy())
            for choice in range(params.n)
        )

    def resume_sampler(self, sampler: object, token_ids: Sequence[int], state: bytes | None) -> None:
        """Advance a sampler: its draws depend on their number, with mirostat on its state as well."""
        assert isinstance(sampler, FakeSampler)  # noqa: S101 - made above
        sampler.num_generated = len(token_ids)
        for token_id in token_ids:
            sampler.follow(token_id)
        if state is not None:
            sampler.num_generated, sampler.mood = map(int, state.split(b" "))

    def sampler_state(self, sampler: object) -> bytes:
        """Return the number of its draws and the state of mirostat."""
        assert isinstance(sampler, FakeSampler)  # noqa: S101 - made above
        return b"%d %d" % (sampler.num_generated, sampler.mood)

    def prepare_embedding(self, pooling: str | None, num_tokens: int) -> str:  # noqa: ARG002 - it has room for any
        """Return the pooling, which makes no difference to the cost."""
        return pooling or "mean"

    def prepare_media_embedding(self, pooling: str | None, num_tokens: int, num_at_once: int) -> str:  # noqa: ARG002 - as above
        """Return the pooling, which is that of the last token. Raises `Unsupported` for another."""
        if pooling not in (None, "last"):
            raise Unsupported(
                f'pooling: a prompt with images or audio is embedded with pooling "last", not "{pooling}"'
            )
        return "last"

    def copy(self, from_seq_id: int, to_seq_id: int, end: int) -> None:
        """Copy as the kind of memory allows."""
        self.memory.copy(from_seq_id, to_seq_id, end)

    def copy_cells(self, from_seq_id: int, to_seq_id: int, end: int) -> None:
        """Copy cells without the state beside them."""
        self.memory.copy_cells(from_seq_id, to_seq_id, end)

    def save(self, seq_id: int, start: int, end: int) -> FakeState:
        """Save cells as the kind of memory allows."""
        if self._clock is not None:
            self._clock.advance(self._cost.saved_token_s * (end - start))
        return self.memory.save(seq_id, start, end)

    def load(self, seq_id: int, data: FakeState, start: int, end: int) -> None:
        """Append saved tokens."""
        if self._clock is not None:
            self._clock.advance(self._cost.loaded_token_s * (end - start))
        self.memory.load(seq_id, data, start, end)

    def cut(self, data: FakeState, start: int, end: int) -> FakeState:
        """Save a part of saved cells."""
        return self.memory.cut(data, start, end)

    def save_state(self, seq_id: int, end: int) -> FakeState:
        """Save the state beside cells, or the whole memory of a sequence id."""
        if self._clock is not None:
            self._clock.advance(self._cost.saved_state_s)
        return self.memory.save_state(seq_id, end)

    def load_state(self, seq_id: int, data: FakeState, end: int) -> None:
        """Load a saved state."""
        self.memory.load_state(seq_id, data, end)

    def saved_cells(self, start: int, end: int, payload: NDArray[np.uint8]) -> FakeState:
        """Return saved cells or a saved state of its bytes."""
        return FakeState.of(start, end, payload)

    def truncate(self, seq_id: int, end: int) -> None:
        """Remove the last positions of a sequence."""
        self.memory.truncate(seq_id, end)

    def remove(self, seq_id: int) -> None:
        """Remove a sequence."""
        self.memory.remove(seq_id)

    def step(self, rows: Sequence[Row], lora: Lora) -> list[RowOutput]:
        """Compute all rows, or none of them. Raises `InvalidParams` for unknown adapters and rows that cannot share a pass."""
        for name, _ in lora:
            if name not in self._adapters:
                raise InvalidParams(f"lora: there is no adapter {name!r}")
        rows = [_without_forbidden(row) for row in rows]
        self._begin(rows, sum(len(row.token_ids) for row in rows))
        for row in rows:
            assert row.sequence.seq_id is not None  # noqa: S101 - rows are running sequences'
            if row.position != self.memory.next_position(row.sequence.seq_id):
                raise InvalidParams(f"sequence {row.sequence.seq_id} does not continue at {row.position}")
            if row.kind is not rows[0].kind:
                raise InvalidParams(f"a pass over rows of {rows[0].kind.name} and {row.kind.name}")
            if row.kind is RowKind.WHOLE_EMBEDDINGS and len(row.token_ids) != row.item.num_cells:  # type: ignore[union-attr]
                raise InvalidParams(f"{len(row.token_ids)} of {row.item.num_cells} cells")  # type: ignore[union-attr]
        self.memory.needs(sum(len(row.token_ids) for row in rows))
        outputs = [self._compute(row, lora) for row in rows]
        if self._clock is not None and self._cost.cell_s:
            self._clock.advance(self._cost.cell_s * len(rows) * self.memory.num_attended)
        return outputs

    def embed(self, texts: list[list[int]], pooling: str | None) -> list[Any]:
        """Return three numbers for each text, or with "none" for each token; they depend on tokens and pooling."""
        self._begin((), sum(map(len, texts)))
        return [_numbers(text, pooling) for text in texts]

    def embed_media(self, item: EmbeddingItem) -> list[Any]:
        """Return three numbers that depend on tokens and on the images. Raises the error of encoding them."""
        self._begin((), len(item.token_ids))
        if isinstance(item.request.embeddings, PacelineError):
            raise item.request.embeddings
        parts = (segment if isinstance(segment, list) else segment.key_tokens() for segment in item.segments())
        return _numbers([token for part in parts for token in part], "last")

    def load_adapter(self, adapter: str, path: str) -> None:
        """Load a file of any content, which decides the effect of the adapter. Raises `AdapterError` if it is empty."""
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise AdapterError(f"there is no adapter file {path}: {error.strerror or error}") from None
        if not data:
            raise AdapterError(f"{path} is no LoRA adapter")
        self._adapters[adapter] = blake2b(data, digest_size=16).digest()

    def adapter_fingerprint(self, adapter: str) -> bytes:
        """Return a hash of the adapter's effect. Raises `AdapterNotFound`."""
        found = self._adapters.get(adapter)
        if found is None:
            raise AdapterNotFound(f"the adapter {name_of(adapter)!r} is not loaded")
        return blake2b(found, digest_size=16).digest()

    def detach_adapter(self, adapter: str) -> None:
        """Do nothing: adapters are applied anew by each pass."""

    def free_adapter(self, adapter: str) -> None:
        """Forget an adapter."""
        self._adapters.pop(adapter, None)

    def positions(self, seq_id: int) -> int:
        """Return the position at which a sequence id goes on."""
        return self.memory.next_position(seq_id)

    def abort(self) -> None:
        """Do nothing: passes take no time."""

    def abort_embedding(self) -> None:
        """Do nothing: passes take no time."""

    def close(self) -> None:
        """Set `is_closed`."""
        self.is_closed = True

    def _begin(self, rows: Sequence[Row], num_tokens: int) -> None:
        self.num_passes += 1
        if self._clock is not None:
            self._clock.advance(self._cost.base_s + self._cost.token_s * num_tokens)
        error = self._fail(self.num_passes, rows) if self._fail is not None else None
        if error is not None:
            raise error

    def _compute(self, row: Row, lora: Lora) -> RowOutput:
        sequence = row.sequence
        assert sequence.seq_id is not None  # noqa: S101
        adapters = 0
        for name, scale in lora:
            adapters = mix(adapters + int.from_bytes(self._adapters[name]) + round(scale * 1000))
        num_before = self.memory.length(sequence.seq_id)
        part = None if row.item is None else (row.item, row.offset)
        self.memory.append(sequence.seq_id, row.position, row.token_ids, adapters, part)
        output = RowOutput()
        error = self._fail_row(row) if self._fail_row is not None and row.draws else None
        if row.targets:
            before = self.memory.hashes(sequence.seq_id)[num_before:]  # up to the token before each target
            output.scored = [
                self._logprobs(logits, token, row) for logits, token in zip(before, row.targets, strict=True)
            ]
        if error is not None:
            output = RowOutput(error=error)
        elif row.draws:
            self._draw(row, output)
        output.num_verified, output.num_accepted = row.num_drafts, row.num_right(output.token_ids)
        num_wrong = row.num_drafts - output.num_accepted
        if num_wrong:
            output.is_taken_back = self.memory.take_back(sequence.seq_id, num_wrong)
        return output

    def _draw(self, row: Row, output: RowOutput) -> None:
        """Draw after the last known token, and after each draft while drafts are right."""
        sampler, seq_id = row.sequence.sampler, row.sequence.seq_id
        assert isinstance(sampler, FakeSampler)  # noqa: S101 - made above
        assert seq_id is not None  # noqa: S101 - it runs
        drawn: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for history, draft in zip(self.memory.hashes(seq_id)[-1 - row.num_drafts :], [*row.drafts, None], strict=True):
            try:
                token, output.is_complete = sampler.draw_constrained(history)
            except Exception as raised:  # noqa: BLE001 - the row fails, and no other
                output.error = as_paceline_error(raised)
                break
            if token is None:
                break
            drawn.append(token)
            if row.num_logprobs is not None:
                logprobs.append(self._logprobs(history, token, row))
            if token != draft or token == EOS or output.is_complete:
                break
        output.token_ids, output.logprobs = drawn, logprobs

    def _logprobs(self, history: int, token_id: int, row: Row) -> TokenLogprobs:
        k = row.num_logprobs or 0
        own = -(mix(history + token_id) % 1000) / 100
        return TokenLogprobs(own, tuple(range(k)), tuple(-float(rank) for rank in range(k)))


def _allowed(constraint: Constraint) -> set[int] | None:
    """Return the tokens that may come next; None: every one."""
    import numpy as np

    words = np.zeros((BOS + 32) // 32, dtype=np.uint32)
    if not constraint.fill_mask(words):
        return None
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: BOS + 1]).tolist())


def _without_forbidden(row: Row) -> Row:
    sampler = row.sequence.sampler
    num_drafts = (
        sampler.num_to_try(row.drafts) if row.num_drafts and isinstance(sampler, FakeSampler) else row.num_drafts
    )
    if num_drafts == row.num_drafts:
        return row
    end = len(row.token_ids) - row.num_drafts + num_drafts
    return msgspec.structs.replace(row, token_ids=row.token_ids[:end], num_drafts=num_drafts)


def _numbers(text: list[int], pooling: str | None) -> list[Any]:
    if pooling == "none":
        return [_numbers([token_id], "last") for token_id in text]
    value = mix(len(pooling or ""))
    for token_id in text:
        value = mix(value + token_id + 1)
    return [(value >> shift & 0xFFFF) / 65536 for shift in (0, 16, 32)]


def limits_of(backend: FakeBackend, num_seq_ids: int) -> Limits:
    """Return the limits of a fake backend; if prefixes can be cached, half of the sequence ids are for them."""
    memory = backend.memory
    num_slots = num_seq_ids // 2 if memory.kind == "attention" else num_seq_ids
    return Limits(
        num_slots=num_slots,
        n_batch=256,
        n_ubatch=256,
        chunk_size=64,
        max_positions=memory.num_cells,
        num_seq_ids=num_seq_ids,
        host_bytes=2**20,
        num_cells=None if memory.kind == "recurrent" else memory.num_cells,
        max_scored=8,
        can_share_part=memory.kind == "attention",
        has_state_apart=memory.has_state_apart,
        boundary_ids=frozenset() if memory.kind == "attention" else frozenset({EOS, BOS}),
        itl_target_s=0.05,
        max_tick_s=0.2,
        embed_tokens=256,
        embed_texts=8,
        max_drafted=0 if memory.kind == "compressed" else 16,
        max_rollback=memory.max_rollback,
        n_vocab=BOS + 1,
    )
