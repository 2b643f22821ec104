"""Costs of passes, learned from the ticks: of any pass (`TickCostModel`), and of passes that only decode (`DecodeCost`).

A pass runs in ubatches of at most `n_ubatch` tokens. A ubatch of n tokens takes

    base + a slope for each range of n + per_cell * n * cells in use

and a time for each output, a token with computed logits; this may be a third of its cost in a small model with a large
vocabulary. All coefficients but that differ from 64 tokens on, as other kernels compute then: llama.cpp's attention on a CPU
works on tiles of 64 tokens at half the price of single tokens, so 64 can take less than 63. The ranges end at 4 and 8 tokens
below 64, and at 256 above, so that a pass may be cheap until the arithmetic fills the machine, or dear from the start, on a
CPU or a GPU. No coefficient is negative: apart from the step at 64, more tokens, cells or outputs never take less. They
follow the ticks:

1. All of them are scaled by the machine's speed: the median of the last three ratios of measured to expected time. A machine that
   becomes slower is followed at once for every size, and a single outlier is ignored.
2. Least squares of the relative error, old ticks forgotten, by coordinate descent from the previous estimate. Inertia holds a
   coefficient that recent ticks say little about.
3. A quantile of the remaining ratio is tracked and multiplied in: `seconds` returns a high quantile, not the mean.

Knows neither clocks nor sequences; used on the engine's thread.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

from paceline import validation

TILE_TOKENS = 64  # from here on other kernels compute

BLOCK_TOKENS = 4  # multiplied at once: 61 tokens take as long as 64 on the processors that were measured

# A slow CPU; the first tick scales all of it. Below a tile: base, tokens up to 4, up to 8, above, tokens times cells; from
# a tile on: base, tokens up to 256, tokens above, tokens times cells. Last: outputs.
_PRIOR = (0.05, 0.015, 0.015, 0.015, 2e-6, 0.05, 0.015, 0.015, 2e-6, 0.005)
_NUM_BELOW = 5  # of them
_FORGET = 0.97  # weight of the past: about 33 ticks
_GAIN = 0.3  # part of a change in speed that one tick makes
_CREDIBLE = 4.0  # largest logarithm of a change in speed that counts in full
_SWEEPS = 3  # of coordinate descent in a tick
_SETTLING = 32  # ticks' worth of sweeps at the end of a calibration
_INERTIA = 0.1  # weight in ticks that holds each coefficient at its first share
_MOST = 2**31 - 1  # tokens, cells
_LEAST_S = 1e-6  # no pass is shorter; a clock may say 0
_QUANTILE_STEP = 0.03
_FIRST_MARGIN = math.log(1.15)
_LAST_MARGIN = math.log(1.6)
_ROUNDS = 8  # of a calibration's samples
_NUM_SETTLED = 7  # passes after which a time is well known
_DECODE_GAIN = 1 / _NUM_SETTLED  # weight of a new time from then on
_CREDIBLE_DECODE = math.log(1.5)  # largest logarithm of a ratio that counts in full
_SPEED_GAIN = 0.3  # part of a change in the machine's speed that one pass makes
_REST_GAIN = 1 / 16  # weight of a new rest in the mean of rests


class MeasuredPass(NamedTuple):
    """A pass: its tokens, cells in use at its end, seconds, and number of tokens with computed logits."""

    num_tokens: int
    num_cells: int
    seconds: float
    num_outputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UbatchCost:
    """Seconds of a ubatch: its base, each token by range of sizes, each token and cell in use."""

    base_s: float
    per_token_s: tuple[float, ...]
    per_cell_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TickCostState:
    """The estimate of a `TickCostModel`, for ubatches of less than 64 tokens and for larger ubatches.

    per_output_s: seconds of computing a token's logits. margin: factor between the mean and the high quantile. num_observed:
    ticks seen, with those of a calibration.
    """

    below_tile: UbatchCost
    from_tile: UbatchCost
    per_output_s: float
    margin: float
    num_observed: int


class TickCostModel:
    """A `TickCost` that learns. Before the first tick it expects a slow machine: 80 ms for a token, 1.2 s for 64.

    n_ubatch: tokens of a ubatch. quantile: share of the ticks that should take no longer than expected; a higher share is more
    careful with the time between two tokens, a lower one computes prompts sooner.

    Attributes:
        idle_cell_s: Seconds that a cell of no sequence of the pass adds to each row, as measured by a calibration; else 0.
    """

    def __init__(self, *, n_ubatch: int = 512, quantile: float = 0.9) -> None:
        self._quantile = validation.number("quantile", quantile, above=0, below=1)
        self._n_ubatch = validation.integer("n_ubatch", n_ubatch, 1, _MOST)
        self._coefficients = list(_PRIOR)
        self._gram = [[0.0] * len(_PRIOR) for _ in _PRIOR]
        self._moments = [0.0] * len(_PRIOR)
        self._margin = _FIRST_MARGIN
        self._recent: list[float] = []  # logarithms of the last ratios
        self._speed = 1.0  # of the machine: expected seconds as a multiple of the first expectation
        self._num_observed = 0
        self.idle_cell_s = 0.0
        for num_tokens, num_outputs in ((1, 1), (8, 8), (8, 0), (64, 1), (512, 1)):
            features = self._features(num_tokens, 1000, num_outputs)
            mean = self._mean(features)
            self._remember([feature / mean for feature in features], 0.1)

    def seconds(self, num_tokens: int, num_cells: int, num_outputs: int = 1) -> float:
        """Return the seconds of a pass at the quantile.

        num_cells: in use at its end. num_outputs: tokens with computed logits.
        """
        return self._mean(self._features(num_tokens, num_cells, num_outputs)) * math.exp(self._margin)

    def mean_seconds(self, num_tokens: int, num_cells: int, num_outputs: int = 1) -> float:
        """Return the mean seconds of a pass; parameters as in `seconds`."""
        return self._mean(self._features(num_tokens, num_cells, num_outputs))

    def observe(self, num_tokens: int, num_cells: int, seconds: float, num_outputs: int = 1) -> None:
        """Learn from a pass over generating sequences; num_cells: in use at its end.

        Raises `InvalidParams` for less than a token, negative cells or outputs, and for seconds that are negative or not finite.
        """
        features = self._features(
            validation.integer("num_tokens", num_tokens, 1, _MOST),
            validation.integer("num_cells", num_cells, 0, _MOST),
            validation.integer("num_outputs", num_outputs, 0, _MOST),
        )
        mean = self._mean(features)
        ratio = math.log(max(validation.number("seconds", seconds, 0), _LEAST_S) / mean)
        self._track_quantile(ratio)
        step = self._follow_speed(ratio)
        credible = max(0.3, _CREDIBLE / (self._num_observed + 1))  # a larger ratio says that it is odd, not how odd
        rest = min(max(ratio - step, -credible), credible)
        self._remember([feature / (mean * math.exp(step + rest)) for feature in features], 1.0)
        self._fit()
        self._num_observed += 1

    def calibrate(self, passes: Iterable[MeasuredPass]) -> None:
        """Learn from measured passes, which count as much as eight ticks each; later ticks correct them."""
        kept = list(passes)
        for _ in range(_ROUNDS if len(kept) > 2 else 1):  # the first passes may be slow, beside the rest of the start
            for measured in kept:
                self.observe(*measured)
        for _ in range(_SETTLING):
            self._fit()
        self._margin = _FIRST_MARGIN  # repeated passes say nothing about the spread of passes

    def state(self) -> TickCostState:
        """Return the current estimate, for reports."""
        return TickCostState(
            below_tile=_cost(*self._coefficients[:_NUM_BELOW]),
            from_tile=_cost(*self._coefficients[_NUM_BELOW:-1]),
            per_output_s=self._coefficients[-1],
            margin=math.exp(self._margin),
            num_observed=self._num_observed,
        )

    def _features(self, num_tokens: int, num_cells: int, num_outputs: int) -> tuple[float, ...]:
        """Return the factors of the coefficients: sums over the ubatches of a pass, and its outputs."""
        num_whole, rest = divmod(num_tokens, self._n_ubatch)
        features = _ubatch(rest, num_cells)
        if num_whole:
            whole = _ubatch(self._n_ubatch, num_cells)
            features = tuple([feature * num_whole + part for feature, part in zip(whole, features, strict=True)])
        return (*features, num_outputs)

    def _mean(self, features: tuple[float, ...]) -> float:
        mean: float = sum(map(mul, self._coefficients, features))
        return max(_LEAST_S, mean)

    def _track_quantile(self, ratio: float) -> None:
        above = ratio > self._margin
        if above and len(self._recent) == 3 and min(self._recent[1:]) > self._margin:
            return  # three in a row: the machine is slower, and the spread is the same
        up = self._quantile if above else self._quantile - 1
        self._margin = min(max(self._margin + _QUANTILE_STEP * up, 0.0), _LAST_MARGIN)

    def _follow_speed(self, ratio: float) -> float:
        """Scale coefficients and history to the machine's speed; return the logarithm of the scale."""
        self._recent = [*self._recent[-2:], ratio]
        median = sorted(self._recent)[1] if len(self._recent) == 3 else ratio
        gain = max(_GAIN, 1 / (self._num_observed + 1))
        step = gain * min(max(median, -_CREDIBLE), _CREDIBLE)
        scale = math.exp(step)
        self._speed *= scale
        self._recent = [ratio - step for ratio in self._recent]
        self._coefficients = [coefficient * scale for coefficient in self._coefficients]
        self._moments = [moment * _FORGET / scale for moment in self._moments]
        fade = _FORGET / scale**2
        self._gram = [[product * fade for product in row] for row in self._gram]
        return step

    def _remember(self, relative: Iterable[float], weight: float) -> None:
        """Add a pass to the least squares; relative: its features over its seconds, so that the target is 1."""
        values = [value * weight for value in relative]
        self._moments = [moment + weight * value for moment, value in zip(self._moments, values, strict=True)]
        self._gram = [
            [product + value * other for product, other in zip(row, values, strict=True)]
            for row, value in zip(self._gram, values, strict=True)
        ]

    def _fit(self) -> None:
        """Set each coefficient to its best value given the others (coordinate descent); inertia holds uncertain coefficients."""
        coefficients, before = self._coefficients, self._coefficients.copy()
        inertias = [_INERTIA / (prior * self._speed) ** 2 for prior in _PRIOR]
        for _ in range(_SWEEPS):
            for index, (row, inertia) in enumerate(zip(self._gram, inertias, strict=True)):
                now = coefficients[index]
                rest = self._moments[index] - sum(map(mul, row, coefficients)) + inertia * (before[index] - now)
                coefficients[index] = max(0.0, now + rest / (row[index] + inertia))


def _ubatch(num_tokens: int, num_cells: int) -> tuple[int, ...]:
    """Return the features of a ubatch: 1 if not empty, tokens by range, tokens times cells; below a tile, then from it on."""
    if num_tokens < TILE_TOKENS:
        few, some = min(num_tokens, 4), min(num_tokens, 8)
        return (min(num_tokens, 1), few, some - few, num_tokens - some, num_tokens * num_cells, 0, 0, 0, 0)
    return (0, 0, 0, 0, 0, 1, min(num_tokens, 256), max(0, num_tokens - 256), num_tokens * num_cells)


def _cost(base_s: float, *rest_s: float) -> UbatchCost:
    *per_token_s, per_cell_s = rest_s
    return UbatchCost(base_s=base_s, per_token_s=tuple(per_token_s), per_cell_s=per_cell_s)


class DecodeCost:
    """Seconds of passes that only decode, by their number of rows, without the time of attention over cells in use.

    The tick cost model is smooth. Kernels are not: they compute tiles of rows, so seven rows may take longer than eight. Here
    each number of rows has its own measured time. Between measured numbers the time is interpolated. Above them each row is
    expected to cost no more than a prompt token, the least possible: too low an expectation makes larger batches worth
    trying, and the first of them shows its time; too high an expectation would never be put to the test.
    """

    def __init__(self, cost_model: TickCostModel) -> None:
        self._cost_model = cost_model
        self._seconds: dict[int, float] = {}
        self._num_seen: dict[int, int] = {}
        self._sizes: list[int] = []  # keys, ascending
        self._usual_rest = 0.0  # mean step of measured times beside the steps of the machine's speed
        self._recent: list[float] = []  # logarithms of the last ratios of measured to expected time

    def seconds(self, num_rows: int) -> float:
        """Return the seconds of a pass in which num_rows rows decode, with an empty cache."""
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

    def observe(self, num_rows: int, num_cells: int, seconds: float) -> None:
        """Learn from a pass that only decoded; num_cells: in use at its end."""
        model = self._cost_model
        without_cells = model.mean_seconds(num_rows, 0, num_rows) / model.mean_seconds(num_rows, num_cells, num_rows)
        found_s = max(seconds, _LEAST_S) * without_cells
        if not self._sizes:
            self._note(num_rows, found_s)
            return
        expected_s, num_seen = self.seconds(num_rows), self._num_seen.get(num_rows, 0)
        ratio = min(max(math.log(found_s / expected_s), -_CREDIBLE_DECODE), _CREDIBLE_DECODE)
        if num_seen < _NUM_SETTLED:  # it says more about the number of rows than about the machine
            self._note(num_rows, expected_s * math.exp(ratio / (num_seen + 1)))
            return
        speed = self._speed_step(ratio)
        self._follow(num_rows, speed, _DECODE_GAIN * (ratio - speed))

    def _note(self, num_rows: int, seconds: float) -> None:
        if num_rows not in self._seconds:
            insort(self._sizes, num_rows)
        self._seconds[num_rows] = seconds
        self._num_seen[num_rows] = self._num_seen.get(num_rows, 0) + 1

    def _speed_step(self, ratio: float) -> float:
        """Return the logarithm of the machine's change in speed, by the median of three ratios."""
        self._recent = [*self._recent[-2:], ratio]
        return _SPEED_GAIN * sorted(self._recent)[1] if len(self._recent) == 3 else 0.0

    def _follow(self, num_rows: int, speed: float, rest: float) -> None:
        """Scale all times to the machine's speed, and the time of num_rows by the rest of its step.

        Medians are usually below the mean time of passes, and the rest makes up for it. So other sizes get the mean rest too:
        else sizes that are not seen for long would become ever cheaper.
        """
        self._recent = [ratio - speed for ratio in self._recent]
        self._usual_rest += _REST_GAIN * (rest - self._usual_rest)
        scale, own_s = math.exp(speed + self._usual_rest), self._seconds[num_rows] * math.exp(speed + rest)
        self._seconds = {size: seconds * scale for size, seconds in self._seconds.items()}
        self._note(num_rows, own_s)

    def _prompt_token_s(self) -> float:
        model = self._cost_model
        return max(0.0, model.mean_seconds(4 * TILE_TOKENS, 0) - model.mean_seconds(TILE_TOKENS, 0)) / (3 * TILE_TOKENS)
