"""The memory of a llama.cpp context without a model: cells by sequence id, with the rules of each kind.

attention         cells of one pool, shared by copies; any prefix can be copied
sliding_window    the same cells, and a state: the last `window` tokens of each sequence in a second pool
hybrid            the same cells, and a state of one size
recurrent         states alone, no cells
compressed        cells that can only be copied, saved and loaded with all that belongs to them

A state belongs to one place, the end of its sequence. It is copied with all of a sequence, or saved and loaded; cells that were
copied or loaded without it cannot be continued until it is there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paceline.errors import InvalidParams, NoKvSlot, Unsupported

Kind = Literal["attention", "sliding_window", "hybrid", "recurrent", "compressed"]

_STATE_BYTES = 128  # of recurrent layers, whatever the number of tokens

_MASK = 2**64 - 1


def mix(value: int) -> int:
    """Hash a number to 64 bits that depend on every bit of it (the finaliser of SplitMix64)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


@dataclass(slots=True)
class FakeSequence:
    """What a sequence id holds: its cells, a hash of its tokens up to each of them, and its state, if it has one."""

    cells: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    state: FakeState | None = None

    @property
    def last_hash(self) -> int:
        """The hash of all its tokens; another one where cells and state are not of the same tokens."""
        last = self.hashes[-1] if self.hashes else 0
        if self.state is None or self.state.window == tuple(self.hashes[-len(self.state.window) :]):
            return last
        return mix(self.state.window[-1])


@dataclass(frozen=True, slots=True)
class FakeState:
    """Saved tokens, from `start` on, eight bytes each; without tokens the state beside as many cells as `start`.

    window: of such a state, hashes up to each of its last tokens. size: in bytes, where it does not follow from these.
    """

    start: int
    hashes: tuple[int, ...] = ()
    window: tuple[int, ...] = ()
    size: int | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return 8 * len(self.hashes) + 8 * len(self.window) if self.size is None else self.size


class FakeMemory:
    """The cells of one context. A sequence reads from it a hash of the tokens that its cells really hold."""

    def __init__(self, num_cells: int, num_seq_ids: int, kind: Kind, window: int) -> None:
        self.num_cells, self.kind, self.window = num_cells, kind, window
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

    def append(self, seq_id: int, position: int, token_ids: list[int], adapters: int = 0) -> int:
        """Append tokens to a sequence, and return the hash of all that it holds then.

        adapters: a hash of the adapters in use, which change what a token leaves in memory.
        """
        held = self._sequence(seq_id)
        if position != len(held.hashes):
            raise InvalidParams(f"sequence {seq_id} continues at {len(held.hashes)}, not at {position}")
        if self.has_state_apart and held.hashes and held.state is None:
            raise InvalidParams(f"sequence {seq_id} has {len(held.hashes)} cells without their state")
        last = held.last_hash
        for token_id in token_ids:
            last = mix(last * 0x9E3779B97F4A7C15 + token_id + 1 + adapters & _MASK)
            held.hashes.append(last)
        if self.kind != "recurrent":
            held.cells += [self._take_cell() for _ in token_ids]
        if self.has_state_apart:
            held.state = self._state_of(held.hashes)
        return last

    @property
    def has_state_apart(self) -> bool:
        """Whether cells can be shared in any part, and a state lies beside them."""
        return self.kind in ("sliding_window", "hybrid")

    def _state_of(self, hashes: list[int]) -> FakeState:
        if self.kind == "hybrid":
            return FakeState(len(hashes), window=tuple(hashes[-1:]), size=_STATE_BYTES)
        return FakeState(len(hashes), window=tuple(hashes[-self.window :]))

    def copy(self, from_seq_id: int, to_seq_id: int, num_tokens: int) -> None:
        """Share the first tokens of one sequence id with another."""
        source = self._sequence(from_seq_id)
        if num_tokens < len(source.hashes) and self.kind != "attention":
            raise Unsupported(
                f"{self.kind} memory can only be copied whole, not {num_tokens} of {len(source.hashes)} tokens"
            )
        self._share(from_seq_id, to_seq_id, num_tokens)
        self._sequence(to_seq_id).state = source.state

    def copy_cells(self, from_seq_id: int, to_seq_id: int, num_tokens: int) -> None:
        """Share the cells of the first tokens, without the state beside them."""
        if not self.has_state_apart:
            raise Unsupported(f"{self.kind} memory has no cells apart from a state")
        self._share(from_seq_id, to_seq_id, num_tokens)

    def _share(self, from_seq_id: int, to_seq_id: int, num_tokens: int) -> None:
        source, target = self._sequence(from_seq_id), self._sequence(to_seq_id)
        if target.hashes or not 0 < num_tokens <= len(source.hashes):
            raise InvalidParams(f"{num_tokens} of {len(source.hashes)} tokens to a sequence of {len(target.hashes)}")
        if self.has_state_apart and source.state is None:
            raise InvalidParams(f"sequence {from_seq_id} has cells without their state")
        target.hashes = source.hashes[:num_tokens]
        target.cells = source.cells[:num_tokens]
        for cell in target.cells:
            self._num_owners[cell] += 1

    def save(self, seq_id: int, start: int, end: int) -> FakeState:
        """Save the cells of tokens [start, end) of a sequence id."""
        held = self._sequence(seq_id)
        if not 0 <= start < end <= len(held.hashes):
            raise InvalidParams(f"sequence {seq_id} holds {len(held.hashes)} tokens, not {start} to {end}")
        if self.kind != "attention" and not self.has_state_apart:
            raise Unsupported(f"{self.kind} memory is saved whole, not from {start} to {end}")
        return FakeState(start, tuple(held.hashes[start:end]))

    def cut(self, state: FakeState, start: int, end: int) -> FakeState:
        """Return tokens [start, end) of saved cells; needs free cells for all of them meanwhile, as llama.cpp does."""
        if self.kind != "attention" and not self.has_state_apart:
            raise Unsupported(f"{self.kind} memory is saved whole, and cannot be cut from {start} to {end}")
        if not state.start <= start < end <= state.start + len(state.hashes):
            raise InvalidParams(
                f"{start} to {end} of saved tokens from {state.start} to {state.start + len(state.hashes)}"
            )
        self.needs(len(state.hashes))
        return FakeState(start, state.hashes[start - state.start : end - state.start])

    def load(self, seq_id: int, state: FakeState, start: int, end: int) -> None:
        """Append tokens [start, end) of saved cells to a sequence that holds those before.

        Needs free cells for all that was saved meanwhile, as llama.cpp does.
        """
        held = self._sequence(seq_id)
        if len(held.hashes) != start or start < state.start or end > state.start + len(state.hashes):
            raise InvalidParams(f"{start} to {end} of a state from {state.start} behind {len(held.hashes)} tokens")
        if held.state is not None:
            raise InvalidParams(f"sequence {seq_id} has a state, to which no cells can be added")
        self._add(held, state.hashes, start - state.start, end - state.start)

    def save_state(self, seq_id: int, num_tokens: int) -> FakeState:
        """Save the state of a sequence id that holds as many tokens, or all that it holds where nothing lies apart."""
        held = self._sequence(seq_id)
        if self.kind == "attention" or num_tokens != len(held.hashes) or num_tokens == 0:
            raise InvalidParams(
                f"sequence {seq_id} of {self.kind} memory holds {len(held.hashes)} tokens, not {num_tokens}"
            )
        if self.has_state_apart:
            if held.state is None:
                raise InvalidParams(f"sequence {seq_id} has cells without their state")
            return held.state
        return FakeState(0, tuple(held.hashes), size=_STATE_BYTES if self.kind == "recurrent" else None)

    def load_state(self, seq_id: int, state: FakeState, num_tokens: int) -> None:
        """Give a sequence id a saved state: behind the cells of as many tokens, or all of it to an empty one."""
        held = self._sequence(seq_id)
        if self.has_state_apart:
            if state.hashes or (state.start, len(held.hashes)) != (num_tokens, num_tokens):
                raise InvalidParams(f"a state after {state.start} tokens behind {len(held.hashes)} cells")
            held.state = state
            return
        if held.hashes or len(state.hashes) != num_tokens:
            raise InvalidParams(f"a whole state of {len(state.hashes)} tokens onto {len(held.hashes)}")
        self._add(held, state.hashes, 0, num_tokens)

    def _add(self, held: FakeSequence, hashes: tuple[int, ...], first: int, end: int) -> None:
        self.needs(len(hashes))
        held.hashes += hashes[first:end]
        if self.kind != "recurrent":
            held.cells += [self._take_cell() for _ in range(end - first)]

    def remove(self, seq_id: int) -> None:
        """Remove a sequence."""
        held = self._sequence(seq_id)
        for cell in held.cells:
            self._num_owners[cell] -= 1
            if not self._num_owners[cell]:
                self._free.append(cell)
        self._sequences[seq_id] = FakeSequence()

    def _sequence(self, seq_id: int) -> FakeSequence:
        if not 0 <= seq_id < len(self._sequences):
            raise InvalidParams(f"seq_id must be 0 to {len(self._sequences) - 1}, not {seq_id}")
        return self._sequences[seq_id]

    def _take_cell(self) -> int:
        cell = self._free.pop()
        self._num_owners[cell] = 1
        return cell
