"""The mean of ratios that were measured in pairs, with its standard error."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MeanRatio:
    """A geometric mean and its standard error; nan if only one group was measured."""

    mean: float
    error: float

    @classmethod
    def of(cls, ratios: Sequence[float], num_together: int = 1) -> MeanRatio:
        """Return the mean of ratios. num_together: how many neighbouring ratios vary together, from one launch of servers."""
        logs = [math.log(ratio) for ratio in ratios]
        groups = [statistics.fmean(logs[first : first + num_together]) for first in range(0, len(logs), num_together)]
        error = statistics.stdev(groups) / math.sqrt(len(groups)) if len(groups) > 1 else math.nan
        return cls(math.exp(statistics.fmean(logs)), error)
