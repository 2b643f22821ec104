"""Memory as llama.cpp's contexts keep it, without a model: cells under sequence ids, with the manners of three kinds.

attention         cells of one pool, shared by copies; any prefix can be copied
sliding_window    a second pool holds the last `window` tokens of each sequence; only wholes can be copied
recurrent         one state a sequence, no cells; only wholes can be copied
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paceline.errors import InvalidParams, NoKvSlot, Unsupported

Kind = Literal["attention", "sliding_window", "recurrent"]

_MASK = 2**64 - 1


def mix(value: int) -> int:
    """A number of 64 bits that depends on every bit of another (the finaliser of SplitMix64)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


@dataclass(slots=True)
class Held:
    """What lies under a sequence id: its cells, and a hash of its tokens up to each of them."""

    cells: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)

    @property
    def last_hash(self) -> int:
        """Of all its tokens."""
        return self.hashes[-1] if self.hashes else 0


@dataclass(frozen=True, slots=True)
class FakeState:
    """Saved tokens, from `start` on: eight bytes each."""

    start: int
    hashes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """How large it is."""
        return 8 * len(self.hashes)


class FakeMemory:
    """The cells of one context. What a sequence reads from it is a hash of the tokens that really are there."""

    def __init__(self, num_cells: int, num_seq_ids: int, kind: Kind, window: int) -> None:
        self.num_cells, self.kind, self.window = num_cells, kind, window
        self._sequences = [Held() for _ in range(num_seq_ids)]
        self._free = list(range(num_cells - 1, -1, -1))
        self._holders = [0] * num_cells

    @property
    def num_used(self) -> int:
        """Cells that hold a token."""
        return self.num_cells - len(self._free)

    @property
    def num_seq_ids(self) -> int:
        """How many sequence ids there are."""
        return len(self._sequences)

    def length(self, seq_id: int) -> int:
        """Tokens that a sequence id holds."""
        return len(self._held(seq_id).hashes)

    def hashes(self, seq_id: int) -> list[int]:
        """Of the tokens up to each that a sequence id holds."""
        return self._held(seq_id).hashes

    def needs(self, num_tokens: int) -> None:
        """Raises `NoKvSlot` where so many more tokens do not fit."""
        if self.kind != "recurrent" and num_tokens > len(self._free):
            raise NoKvSlot(f"{num_tokens} cells are wanted and {len(self._free)} are free")

    def append(self, seq_id: int, position: int, token_ids: list[int], adapters: int = 0) -> int:
        """Adds tokens where a sequence goes on, and answers the hash of all that it holds then.

        adapters: a number for those that are in use, which change what a token leaves in memory.
        """
        held = self._held(seq_id)
        if position != len(held.hashes):
            raise InvalidParams(f"sequence {seq_id} goes on at {len(held.hashes)}, not at {position}")
        last = held.last_hash
        for token_id in token_ids:
            last = mix(last * 0x9E3779B97F4A7C15 + token_id + 1 + adapters & _MASK)
            held.hashes.append(last)
        if self.kind != "recurrent":
            held.cells += [self._take_cell() for _ in token_ids]
        return last

    def hash_at(self, seq_id: int, position: int) -> int:
        """Of the tokens that a sequence id holds up to this one."""
        return self._held(seq_id).hashes[position]

    def copy(self, from_seq_id: int, to_seq_id: int, num_tokens: int) -> None:
        """Shares the first tokens of one sequence id with another."""
        source, target = self._held(from_seq_id), self._held(to_seq_id)
        if target.hashes or not 0 < num_tokens <= len(source.hashes):
            raise InvalidParams(f"{num_tokens} of {len(source.hashes)} tokens to a sequence of {len(target.hashes)}")
        if num_tokens < len(source.hashes) and self.kind != "attention":
            raise Unsupported(f"{self.kind} memory copies wholes, not {num_tokens} of {len(source.hashes)} tokens")
        target.hashes = source.hashes[:num_tokens]
        target.cells = source.cells[:num_tokens]
        for cell in target.cells:
            self._holders[cell] += 1

    def save(self, seq_id: int, start: int, end: int) -> FakeState:
        """Tokens [start, end) of a sequence id; all that it has, where memory is only saved whole."""
        held = self._held(seq_id)
        if not 0 <= start < end <= len(held.hashes):
            raise InvalidParams(f"sequence {seq_id} holds {len(held.hashes)} tokens, not {start} to {end}")
        if self.kind != "attention" and (start, end) != (0, len(held.hashes)):
            raise Unsupported(f"{self.kind} memory is saved whole, not from {start} to {end}")
        return FakeState(start, tuple(held.hashes[start:end]))

    def load(self, seq_id: int, state: FakeState, start: int, end: int) -> None:
        """Adds tokens [start, end) of a saved state to a sequence that holds those before.

        For a moment the whole state needs room, as it does in llama.cpp.
        """
        held = self._held(seq_id)
        if len(held.hashes) != start or start < state.start or end > state.start + len(state.hashes):
            raise InvalidParams(f"{start} to {end} of a state from {state.start} behind {len(held.hashes)} tokens")
        self.needs(len(state.hashes))
        held.hashes += state.hashes[start - state.start : end - state.start]
        if self.kind != "recurrent":
            held.cells += [self._take_cell() for _ in range(end - start)]

    def remove(self, seq_id: int) -> None:
        """Empties a sequence id."""
        held = self._held(seq_id)
        for cell in held.cells:
            self._holders[cell] -= 1
            if not self._holders[cell]:
                self._free.append(cell)
        self._sequences[seq_id] = Held()

    def _held(self, seq_id: int) -> Held:
        if not 0 <= seq_id < len(self._sequences):
            raise InvalidParams(f"seq_id must be 0 to {len(self._sequences) - 1}, not {seq_id}")
        return self._sequences[seq_id]

    def _take_cell(self) -> int:
        cell = self._free.pop()
        self._holders[cell] = 1
        return cell
