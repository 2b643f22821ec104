"""Counts of values by size: `Tally` is being filled, `Histogram` is what it held at one moment.

No locks: whoever fills a tally sees to it that one thread at a time does.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

from paceline import validation


@dataclass(frozen=True, slots=True)
class Histogram:
    """Values by size. counts[i]: how many were <= bounds[i] and more than the bound before; the last: more than all bounds.

    bounds ascend; sum, smallest and largest are of the values themselves, in their unit (both 0 while there are none).
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float
    smallest: float
    largest: float

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Their mean; None while there are none."""
        return self.sum / self.count if self.count else None

    def quantile(self, q: float) -> float | None:
        """The value below which a share `q` of them lies; None while there are none.

        Straight between the bounds of the bucket it falls into, so it is no more exact than the bucket is narrow. Raises
        `InvalidParams` where q is not in [0, 1].
        """
        q = validation.number("q", q, 0, 1)
        if not self.count:
            return None
        sums = list(accumulate(self.counts))
        wanted = q * self.count
        index = next(index for index, sum_ in enumerate(sums) if self.counts[index] and sum_ >= wanted)
        low = self.bounds[index - 1] if index and self.bounds[index - 1] > self.smallest else self.smallest
        high = self.bounds[index] if index < len(self.bounds) and self.bounds[index] < self.largest else self.largest
        below = sums[index] - self.counts[index]
        return min(high, low + (high - low) * max(0.0, wanted - below) / self.counts[index])


class Tally:
    """A histogram that is being filled; takes the same room however many values it has seen."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._smallest = float("inf")
        self._largest = float("-inf")

    def observe(self, value: float, times: int = 1) -> None:
        """Adds a value, `times` over."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times
        self._smallest = min(self._smallest, value)
        self._largest = max(self._largest, value)

    def histogram(self) -> Histogram:
        """What it holds now."""
        counts = tuple(self._counts)
        smallest, largest = (self._smallest, self._largest) if any(counts) else (0.0, 0.0)
        return Histogram(self._bounds, counts, self._sum, smallest, largest)
