"""What it costs to compute prompts in pieces beside decoding: the throughput that the inter-token target takes. Pure arithmetic.

Rows that share a pass are cheaper than rows in passes of their own, and while prompts wait fewer sequences decode than could. A
pass that decodes meanwhile loses what its rows cost more than they would in a batch with those that wait.
"""

from __future__ import annotations

import math

from paceline.scheduling.decode_cost import DecodeCost

_MEMORY_S = 10.0  # of passes: what is older fades


class LostTime:
    """Sums up the passes of about the last ten seconds."""

    def __init__(self, decode_cost: DecodeCost) -> None:
        self._decode_cost = decode_cost
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

    def of_pass(self, num_decode: int, num_prompts: int) -> float:
        """Return the seconds that a pass loses in which so many sequences decode while so many prompts wait.

        Less than 0 where the rows are cheaper than in the larger batch.
        """
        num_rows = num_decode + num_prompts
        return self._decode_cost.seconds(num_decode) - self._decode_cost.seconds(num_rows) * num_decode / num_rows

    def observe(self, seconds: float, lost_s: float | None) -> None:
        """Add a pass and what it lost; None where no prompt waited, or nothing decoded."""
        fade = math.exp(-seconds / _MEMORY_S)
        self._total_s = self._total_s * fade + seconds
        self._lost_s *= fade
        self._num_mixed *= fade
        if lost_s is not None:
            self._lost_s = max(0.0, self._lost_s + lost_s)
            self._num_mixed += 1
