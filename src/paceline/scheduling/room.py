"""How much room there is on the device: cells that are free, promised, and for how many ticks they last. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Collection

from paceline.scheduling.cells import Cells
from paceline.scheduling.limits import Limits
from paceline.scheduling.placement import Placement
from paceline.scheduling.sequence import Sequence

_FEW = 4  # cells are few where not so large a part of them is free: then it is looked how long they last


class Room:
    """Of one context. running: the sequences that have a slot, as they are at any time."""

    def __init__(self, limits: Limits, cells: Cells, running: Collection[Sequence]) -> None:
        self._limit, self._cells, self._running = limits.num_cells, cells, running

    def has(self, num_tokens: int) -> bool:
        """Whether so many cells more would fit beside what is there, and what the running ones know and generate next."""
        if self._limit is None:
            return True
        promised = sum(one.num_known - one.num_computed + 1 for one in self._running)
        return self._cells.num_used + promised + num_tokens <= self._limit

    def can_load(self, placement: Placement) -> bool:
        """Whether the parts can be loaded: for a moment all that was saved in one go needs cells, however little is wanted."""
        if self._limit is None:
            return True
        num_free = self._limit - self._cells.num_used
        for part in placement.parts:
            if part.blob.end - part.blob.start > num_free:
                return False
            num_free -= part.end - part.start
        return True

    @property
    def is_short(self) -> bool:
        """Whether so few cells are free that it has to be looked how long they last."""
        return self._limit is not None and _FEW * (self._limit - self._cells.num_used) < self._limit

    @property
    def num_ticks(self) -> float:
        """After how many ticks no cell is free; infinite, where that is far away."""
        return self._ticks(self._cells.num_used) if self.is_short else math.inf

    @property
    def num_ticks_of_running(self) -> float:
        """The same, if nobody but the running ones had any."""
        return self._ticks(self._cells.num_under(self.seq_ids)) if self.is_short else math.inf

    @property
    def seq_ids(self) -> list[int]:
        """The sequence ids of those that run."""
        return [one.seq_id for one in self._running if one.seq_id is not None]

    def _ticks(self, num_used: int) -> float:
        """Those that run compute their prompts, and then generate."""
        assert self._limit is not None  # noqa: S101 - else nothing is short
        left = sum([one.num_known - one.num_computed for one in self._running])
        return (self._limit - num_used - left) / max(1, len(self._running))
