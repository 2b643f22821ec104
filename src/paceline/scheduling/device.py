"""What lies under sequence ids on the device, and the operations that will make it so before the next pass."""

from __future__ import annotations

from paceline.scheduling.cells import Cells
from paceline.scheduling.plan import Operation, Remove, Save
from paceline.scheduling.seq_ids import SeqIds


class Device:
    """Whatever is noted down here counts as done at once."""

    def __init__(self, num_seq_ids: int) -> None:
        self.seq_ids = SeqIds(num_seq_ids)
        self.cells = Cells()
        self.operations: list[Operation] = []

    def free(self, seq_id: int) -> None:
        """Nobody has a sequence id any more."""
        self.operations.append(Remove(seq_id))
        self.cells.free(seq_id)
        self.seq_ids.give_back(seq_id)

    @property
    def is_moving(self) -> bool:
        """Whether something is about to be saved."""
        return any(isinstance(operation, Save) for operation in self.operations)

    @property
    def is_freeing(self) -> bool:
        """Whether something is about to be removed."""
        return any(isinstance(operation, Remove) for operation in self.operations)

    def take_operations(self) -> list[Operation]:
        """What has to be done before the next pass."""
        operations = list(self.operations)
        self.operations.clear()
        return operations
