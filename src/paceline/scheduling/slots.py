"""The sequences that run: each has a slot and a sequence id, and the cells that its computed tokens fill.

slots     0 .. num_slots - 1      places of running sequences
seq ids   0 .. num_slots - 1      under which llama.cpp keeps their KV
cells     num_cells               of which a prompt's are shared by all choices that took them over
"""

from __future__ import annotations

from paceline.scheduling.limits import Limits
from paceline.scheduling.plan import Copy, Operation, Remove
from paceline.scheduling.seq_ids import SeqIds
from paceline.scheduling.sequence import Sequence


class Slots:
    """Hands out slots, sequence ids and cells; notes down what the memory has to do for it, in order."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._slots = SeqIds(limits.num_slots)
        self._seq_ids = SeqIds(limits.num_slots)
        self._operations: list[Operation] = []
        self.running: list[Sequence] = []

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return self._slots.num_free

    def place(self, sequence: Sequence, tick: int) -> None:
        """Gives a sequence a slot and a sequence id."""
        sequence.slot, sequence.seq_id = self._slots.take(), self._seq_ids.take()
        sequence.last_tick = tick
        self.running.append(sequence)

    def share(self, sequence: Sequence, source: Sequence, num_tokens: int) -> None:
        """Lets a sequence that was just placed have the first tokens of another."""
        assert sequence.seq_id is not None  # noqa: S101 - placed
        assert source.seq_id is not None  # noqa: S101 - running
        self._operations.append(Copy(source.seq_id, sequence.seq_id, num_tokens, sequence))
        sequence.num_computed = num_tokens
        sequence.request.shared_prefix = num_tokens
        source.shares_prefix = sequence.shares_prefix = source.shares_prefix or object()

    def free(self, sequence: Sequence) -> int:
        """Takes everything back, and answers the slot; its computed tokens are gone."""
        slot, seq_id = sequence.slot, sequence.seq_id
        assert slot is not None  # noqa: S101 - it runs
        assert seq_id is not None  # noqa: S101
        self.running.remove(sequence)
        self._slots.give_back(slot)
        self._seq_ids.give_back(seq_id)
        self._operations.append(Remove(seq_id))
        sequence.slot = sequence.seq_id = None
        sequence.num_computed = 0
        sequence.shares_prefix = None
        return slot

    @property
    def is_freeing(self) -> bool:
        """Whether the memory has something to do: after a pass, to remove what ended in it."""
        return bool(self._operations)

    def take_operations(self) -> list[Operation]:
        """What the memory has to do before the next pass."""
        operations, self._operations = self._operations, []
        return operations

    @property
    def num_cells(self) -> int:
        """Cells that hold computed tokens."""
        return self._cells([one.num_computed for one in self.running])

    def has_room(self, num_tokens: int) -> bool:
        """Whether so many tokens more would fit beside what the running ones know and will generate next."""
        if self._limits.num_cells is None:
            return True
        committed = self._cells([one.num_known for one in self.running]) + len(self.running)
        return committed + num_tokens <= self._limits.num_cells

    def _cells(self, lengths: list[int]) -> int:
        """A shared prefix counts once; of one request several may have been computed."""
        total = sum(lengths)
        shared: dict[object, list[int]] = {}
        for sequence in self.running:
            if sequence.shares_prefix is not None:
                shared.setdefault(sequence.shares_prefix, []).append(sequence.request.shared_prefix)
        return total - sum(sum(group[1:]) for group in shared.values())

    def check(self) -> None:
        """Asserts that every slot and id is in one place."""
        self._slots.check([one.slot for one in self.running if one.slot is not None])
        self._seq_ids.check([one.seq_id for one in self.running if one.seq_id is not None])
        if self._limits.num_cells is not None:
            assert self.num_cells <= self._limits.num_cells, self.num_cells  # noqa: S101 - our own invariant
