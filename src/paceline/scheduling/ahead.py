"""The path of whoever would give way next, saved before it has to: while there is time, and in parts. Pure."""

from __future__ import annotations

from paceline.scheduling.device import Device
from paceline.scheduling.leaving import ranges_without_blob
from paceline.scheduling.placement import LEAST_HOST_TOKENS
from paceline.scheduling.prefix_tree import Node
from paceline.scheduling.saving import Saving
from paceline.scheduling.sequence import Sequence


class Ahead:
    """One running sequence's path at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._sequence: Sequence | None = None
        self._num_tried = 0

    def save(self, sequence: Sequence, end: Node, most: int, num_ticks: float) -> None:
        """Saves a part of at most so many tokens, where less than that would not be done in so many ticks.

        end: where the path of the sequence ends in the tree.
        """
        missing = ranges_without_blob(end, sequence.num_computed)
        num_missing = sum(stop - start for start, stop in missing)
        if num_missing < LEAST_HOST_TOKENS or num_missing <= most * (num_ticks - 1):
            return
        if self._sequence is not sequence:
            self._sequence, self._num_tried = sequence, 0
        assert sequence.seq_id is not None  # noqa: S101 - it runs
        saving = Saving(
            seq_id=sequence.seq_id,
            namespace=sequence.namespace,
            tokens=sequence.token_bytes(sequence.num_computed),
            num_tried=self._num_tried,
        )
        self._device.operations += saving.saves(missing, most)
        self._num_tried = saving.num_tried

    def forget(self, sequence: Sequence) -> None:
        """It runs no longer."""
        if self._sequence is sequence:
            self._sequence = None
