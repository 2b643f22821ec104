"""The places of running sequences."""

from __future__ import annotations

from paceline.scheduling.seq_ids import SeqIds
from paceline.scheduling.sequence import Sequence


class Slots:
    """Slots 0 to num - 1, and who has them."""

    def __init__(self, num: int) -> None:
        self._slots = SeqIds(num)
        self.running: list[Sequence] = []

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return self._slots.num_free

    def take(self, sequence: Sequence, tick: int) -> int:
        """Gives a sequence a slot."""
        slot = sequence.slot = self._slots.take()
        sequence.last_tick = tick
        self.running.append(sequence)
        return slot

    def free(self, sequence: Sequence) -> int:
        """Takes it back, and answers which it was."""
        slot = sequence.slot
        assert slot is not None  # noqa: S101 - it runs
        self.running.remove(sequence)
        self._slots.give_back(slot)
        sequence.slot = None
        return slot

    def next_to_give_way(self) -> Sequence:
        """Who gives way under pressure: of those that run the paused, least important and youngest."""
        return max(self.running, key=lambda one: (one.request.is_paused, -one.priority, one.order))

    def check(self) -> None:
        """Asserts that every slot is in one place."""
        self._slots.check([one.slot for one in self.running if one.slot is not None])
