"""What passes take in which sequences only decode, by their number. Pure arithmetic.

The tick cost model is smooth. Kernels are not: they compute tiles of rows, so that seven rows may take longer than eight. Here
each number of rows has its own time, as it was seen. Between numbers that were seen it is interpolated. Above them each row is
taken to cost no more than a prompt token, the least that it can: too low an expectation makes larger batches worth trying, and
the first of them that only decodes shows what they take; too high a one would never be put to the test.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

from paceline.scheduling.cost_model import BLOCK_TOKENS, TILE_TOKENS, TickCostModel

_NUM_SETTLED = 7  # passes after which a time is known well
_GAIN = 1 / _NUM_SETTLED  # of a new time from then on
_CREDIBLE = math.log(1.5)  # largest logarithm of a ratio that is taken as it is
_SPEED_GAIN = 0.3  # part of a change in the machine's speed that is believed in one pass
_REST_GAIN = 1 / 16  # of a new rest in the mean of them
_LEAST_S = 1e-6


class DecodeCost:
    """Seconds of a pass by its decoding rows, without what attention adds for cells in use."""

    def __init__(self, cost_model: TickCostModel) -> None:
        self._cost_model = cost_model
        self._seconds: dict[int, float] = {}
        self._num_seen: dict[int, int] = {}
        self._sizes: list[int] = []  # keys, ascending
        self._usual_rest = 0.0  # of the steps of times that are seen, beside those of the machine's speed
        self._recent: list[float] = []  # logarithms of the last ratios of what was to what was expected

    def seconds(self, num_rows: int) -> float:
        """Return what a pass takes in which so many rows decode, with an empty cache."""
        if (known := self._seconds.get(num_rows)) is not None:
            return known
        if not self._sizes:
            return self._cost_model.mean_seconds(num_rows, 0, num_rows)
        index = bisect_left(self._sizes, num_rows)
        if not index:
            above = self._sizes[0]
            ratio = self._seconds[above] / self._cost_model.mean_seconds(above, 0, above)
            return ratio * self._cost_model.mean_seconds(num_rows, 0, num_rows)
        below = self._sizes[index - 1]
        if index == len(self._sizes):
            return self._seconds[below] + (num_rows - below) * self._prompt_token_s()
        return self._between(below, self._sizes[index], num_rows)

    def _between(self, below: int, above: int, num_rows: int) -> float:
        share = (num_rows - below) / (above - below)
        return self._seconds[below] * (1 - share) + self._seconds[above] * share

    def seen_seconds(self, num_rows: int) -> float | None:
        """Return what such a pass took where one was seen."""
        return self._seconds.get(num_rows)

    def least_seconds(self, num_rows: int) -> float | None:
        """Return what such a pass took where one was seen, else what it takes at least; None beyond what was seen.

        Whole blocks of rows are the cheapest, so between passes of these it is hardly less than between their times.
        """
        if (known := self._seconds.get(num_rows)) is not None:
            return known
        whole = [size for size in self._sizes if size == 1 or size % BLOCK_TOKENS == 0]
        index = bisect_left(whole, num_rows)
        if index in (0, len(whole)):
            return None
        return self._between(whole[index - 1], whole[index], num_rows)

    def knows(self, num_rows: int) -> bool:
        """Return whether it is known what such a pass takes at least."""
        return self.least_seconds(num_rows) is not None

    def observe(self, num_rows: int, num_cells: int, seconds: float) -> None:
        """Learn from a pass that only decoded: so many rows, and the cells in use at its end."""
        model = self._cost_model
        without_cells = model.mean_seconds(num_rows, 0, num_rows) / model.mean_seconds(num_rows, num_cells, num_rows)
        found_s = max(seconds, _LEAST_S) * without_cells
        if not self._sizes:
            self._note(num_rows, found_s)
            return
        expected_s, num_seen = self.seconds(num_rows), self._num_seen.get(num_rows, 0)
        ratio = min(max(math.log(found_s / expected_s), -_CREDIBLE), _CREDIBLE)
        if num_seen < _NUM_SETTLED:  # it says more about the number of rows than about the machine
            self._note(num_rows, expected_s * math.exp(ratio / (num_seen + 1)))
            return
        speed = self._speed_step(ratio)
        self._follow(num_rows, speed, _GAIN * (ratio - speed))

    def _note(self, num_rows: int, seconds: float) -> None:
        if num_rows not in self._seconds:
            insort(self._sizes, num_rows)
        self._seconds[num_rows] = seconds
        self._num_seen[num_rows] = self._num_seen.get(num_rows, 0) + 1

    def _speed_step(self, ratio: float) -> float:
        """Return the logarithm of the machine's change of speed, by the median of three ratios."""
        self._recent = [*self._recent[-2:], ratio]
        return _SPEED_GAIN * sorted(self._recent)[1] if len(self._recent) == 3 else 0.0

    def _follow(self, num_rows: int, speed: float, rest: float) -> None:
        """Scale all times to the machine's speed, and this one by the rest of its step.

        Medians are usually below what passes take on average, which the rest makes up for. So others get its mean, too: else
        sizes that are not seen for long would become ever cheaper.
        """
        self._recent = [one - speed for one in self._recent]
        self._usual_rest += _REST_GAIN * (rest - self._usual_rest)
        scale, own_s = math.exp(speed + self._usual_rest), self._seconds[num_rows] * math.exp(speed + rest)
        self._seconds = {size: one * scale for size, one in self._seconds.items()}
        self._note(num_rows, own_s)

    def _prompt_token_s(self) -> float:
        model = self._cost_model
        return max(0.0, model.mean_seconds(4 * TILE_TOKENS, 0) - model.mean_seconds(TILE_TOKENS, 0)) / (3 * TILE_TOKENS)
