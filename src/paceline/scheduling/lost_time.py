"""What it costs to compute prompts in pieces beside decoding: the throughput that the inter-token target takes. Pure arithmetic.

Rows that share a pass are cheaper than rows in passes of their own, and while prompts wait fewer sequences decode than could. A
pass that decodes meanwhile loses what its rows cost more than they would in a batch with those that wait. Kernels work on tiles
of rows, so that seven may take longer than eight: passes that only decode are tracked by their number of rows, as ratios to
what the cost model expects of them.
"""

from __future__ import annotations

import math

from paceline.scheduling.cost_model import TickCostModel

_MEMORY_S = 10.0  # of passes: what is older fades
_GAIN = 0.15  # of a new ratio
_CREDIBLE = math.log(1.5)  # largest logarithm of a ratio that is taken as it is


class LostTime:
    """Sums up the passes of about the last ten seconds."""

    def __init__(self, cost_model: TickCostModel) -> None:
        self._cost_model = cost_model
        self._ratios: dict[int, float] = {}  # logarithms, by rows that decode
        self._total_s = 0.0  # of passes
        self._lost_s = 0.0
        self._num_mixed = 0.0  # passes that decoded while prompts waited

    @property
    def share(self) -> float:
        """Of the time of all passes, from 0 to 1."""
        return min(1.0, self._lost_s / self._total_s) if self._total_s else 0.0

    @property
    def mean_s(self) -> float:
        """Seconds lost in a pass that decoded while prompts waited."""
        return self._lost_s / self._num_mixed if self._num_mixed else 0.0

    def of_pass(self, num_decode: int, num_prompts: int, num_cells: int) -> float:
        """Return the seconds that a pass loses in which so many sequences decode while so many prompts wait.

        Less than 0 where the rows are cheaper than in the larger batch.
        """
        num_rows = num_decode + num_prompts
        return self._decoding_s(num_decode, num_cells) - self._decoding_s(num_rows, num_cells) * num_decode / num_rows

    def observe(self, seconds: float, lost_s: float | None) -> None:
        """Add a pass and what it lost; None where no prompt waited, or nothing decoded."""
        fade = math.exp(-seconds / _MEMORY_S)
        self._total_s = self._total_s * fade + seconds
        self._lost_s *= fade
        self._num_mixed *= fade
        if lost_s is not None:
            self._lost_s = max(0.0, self._lost_s + lost_s)
            self._num_mixed += 1

    def observe_decoding(self, num_rows: int, num_cells: int, seconds: float) -> None:
        """Learn from a pass that only decoded: so many rows, and the cells in use."""
        ratio = math.log(max(seconds, 1e-6) / self._cost_model.mean_seconds(num_rows, num_cells, num_rows))
        ratio = min(max(ratio, -_CREDIBLE), _CREDIBLE)
        before = self._ratios.get(num_rows, 0.0)
        self._ratios[num_rows] = before + _GAIN * (ratio - before)

    def _decoding_s(self, num_rows: int, num_cells: int) -> float:
        ratio = math.exp(self._ratios.get(num_rows, 0.0))
        return self._cost_model.mean_seconds(num_rows, num_cells, num_rows) * ratio
