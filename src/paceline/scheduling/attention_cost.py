"""What attention adds to a decode pass for each cell that a token attends to. Pure arithmetic.

It is learnt from how passes with as many rows differ: medians of blocks of them are compared, by least squares of the
differences, old ones forgotten. Differences, as the machine's speed changes little from one block to the next, while the cells
do, where requests end and others begin. What is used is the lower end of what the differences allow: beside passes of a large
model attention is less than the changes of the machine, and looks like nothing.
"""

from __future__ import annotations

import math
from statistics import median

_DRAFT_SHARE = 0.5  # of what a token's attention takes, for a draft behind it: keys and values are read once for both
_BLOCK = 16  # passes
_FORGET = 0.9  # weight of the past, at each difference
_INERTIA = 64.0**2  # squared cells: smaller differences say little
_LEAST_WEIGHT = 3  # of differences, old ones counted for less
_ERRORS = 2.0  # standard errors, by which less is used than was found
_MOST_PASSES_AGO = 512  # of the block that another is compared with
_CREDIBLE = 2.0  # times the shorter time, by which two may differ


def attended_cells(context: float, num_rows: int, num_drafts: int) -> float:
    """Return the cells that decoding rows attend to in all, as attention counts them.

    context: cells that a row attends to on average. A draft counts as half a row, since it shares the cells of its sequence.
    """
    return context * (num_rows + _DRAFT_SHARE * num_drafts)


class AttentionCost:
    """Learns seconds for a cell that a token attends to."""

    def __init__(self) -> None:
        self.per_cell_s = 0.0
        # By rows: the passes since the last block; that block's cells and seconds, and the number of the pass that ended it.
        self._blocks: dict[int, list[tuple[float, float]]] = {}
        self._last: dict[int, tuple[float, float, int]] = {}
        self._num_passes = 0
        self._cells2 = self._products = self._seconds2 = self._weight = 0.0

    def observe(self, num_rows: int, num_attended: float, seconds: float) -> None:
        """Learn from a pass that only decoded, without drafts: so many rows, and the cells that they attended to, added up."""
        self._num_passes += 1
        block = self._blocks.setdefault(num_rows, [])
        block.append((num_attended, seconds))
        if len(block) < _BLOCK:
            return
        cells, taken_s = median([one for one, _ in block]), median([one for _, one in block])
        block.clear()
        before = self._last.get(num_rows)
        self._last[num_rows] = cells, taken_s, self._num_passes
        if before is not None and self._num_passes - before[2] <= _MOST_PASSES_AGO:
            self._compare(cells - before[0], taken_s - before[1], _CREDIBLE * min(taken_s, before[1]))

    def _compare(self, more_cells: float, longer_s: float, credible_s: float) -> None:
        credible = min(max(longer_s, -credible_s), credible_s)
        self._cells2 = _FORGET * self._cells2 + more_cells**2
        self._products = _FORGET * self._products + more_cells * credible
        self._seconds2 = _FORGET * self._seconds2 + credible**2
        self._weight = _FORGET * self._weight + 1
        found_s, squares = 0.0, self._cells2 + _INERTIA
        if self._weight >= _LEAST_WEIGHT:
            found_s = self._products / squares
            rest = max(0.0, self._seconds2 - found_s * self._products) / (self._weight - 1)
            found_s -= _ERRORS * math.sqrt(rest / squares)
        self.per_cell_s = max(0.0, found_s)
