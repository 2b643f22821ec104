"""The memory of a llama.cpp context without a model: cells by sequence id, with the rules of three kinds.

attention         cells of one pool, shared by copies; any prefix can be copied
sliding_window    a second pool holds the last `window` tokens of each sequence; only whole sequences can be copied
recurrent         one state a sequence, no cells; only whole sequences can be copied
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paceline.errors import InvalidParams, NoKvSlot, Unsupported

Kind = Literal["attention", "sliding_window", "recurrent"]

_MASK = 2**64 - 1


def mix(value: int) -> int:
    """Hash a number to 64 bits that depend on every bit of it (the finaliser of SplitMix64)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


@dataclass(slots=True)
class FakeSequence:
    """What a sequence id holds: its cells, and a hash of its tokens up to each of them."""

    cells: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)

    @property
    def last_hash(self) -> int:
        """The hash of all its tokens."""
        return self.hashes[-1] if self.hashes else 0


@dataclass(frozen=True, slots=True)
class FakeState:
    """Saved tokens, from `start` on: eight bytes each."""

    start: int
    hashes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return 8 * len(self.hashes)


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
        last = held.last_hash
        for token_id in token_ids:
            last = mix(last * 0x9E3779B97F4A7C15 + token_id + 1 + adapters & _MASK)
            held.hashes.append(last)
        if self.kind != "recurrent":
            held.cells += [self._take_cell() for _ in token_ids]
        return last

    def copy(self, from_seq_id: int, to_seq_id: int, num_tokens: int) -> None:
        """Share the first tokens of one sequence id with another."""
        source, target = self._sequence(from_seq_id), self._sequence(to_seq_id)
        if target.hashes or not 0 < num_tokens <= len(source.hashes):
            raise InvalidParams(f"{num_tokens} of {len(source.hashes)} tokens to a sequence of {len(target.hashes)}")
        if num_tokens < len(source.hashes) and self.kind != "attention":
            raise Unsupported(
                f"{self.kind} memory can only be copied whole, not {num_tokens} of {len(source.hashes)} tokens"
            )
        target.hashes = source.hashes[:num_tokens]
        target.cells = source.cells[:num_tokens]
        for cell in target.cells:
            self._num_owners[cell] += 1

    def save(self, seq_id: int, start: int, end: int) -> FakeState:
        """Save tokens [start, end) of a sequence id; all of them, where memory can only be saved whole."""
        held = self._sequence(seq_id)
        if not 0 <= start < end <= len(held.hashes):
            raise InvalidParams(f"sequence {seq_id} holds {len(held.hashes)} tokens, not {start} to {end}")
        if self.kind != "attention" and (start, end) != (0, len(held.hashes)):
            raise Unsupported(f"{self.kind} memory is saved whole, not from {start} to {end}")
        return FakeState(start, tuple(held.hashes[start:end]))

    def load(self, seq_id: int, state: FakeState, start: int, end: int) -> None:
        """Append tokens [start, end) of a saved state to a sequence that holds those before.

        Needs free cells for the whole state meanwhile, as llama.cpp does.
        """
        held = self._sequence(seq_id)
        if len(held.hashes) != start or start < state.start or end > state.start + len(state.hashes):
            raise InvalidParams(f"{start} to {end} of a state from {state.start} behind {len(held.hashes)} tokens")
        self.needs(len(state.hashes))
        held.hashes += state.hashes[start - state.start : end - state.start]
        if self.kind != "recurrent":
            held.cells += [self._take_cell() for _ in range(end - start)]

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
