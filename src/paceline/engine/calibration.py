"""Passes that are timed for the cost model before the first request. Made with the engine, then used on its thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from paceline.cost_model import MeasuredPass
from paceline.errors import Aborted
from paceline.params import SamplingParams
from paceline.runtime import Context, Model, Sampler
from paceline.runtime.step import StepRow

_log = logging.getLogger("paceline.engine")

_ROWS: Final = (1, 8)  # of passes that decode
_SIZES: Final = (8, 32, 64, 128, 512)  # of pieces of a prompt, behind them
_START_S: Final = 0.1  # of passes before the engine is ready
_WHOLE_S: Final = 0.5


class Calibration:
    """Passes of growing size on an empty context: first tokens of several sequences with their logits, then pieces of a prompt.

    The first one warms up and does not count. `begin` makes those that take no time worth mentioning, `step` one after the other
    while the engine is idle, and `end` hands over what was measured, before anything else uses the context.
    """

    def __init__(
        self, context: Context, model: Model, num_slots: int, learn: Callable[[Sequence[MeasuredPass]], None]
    ) -> None:
        """num_slots: most sequences of a pass. learn: called once with what was measured."""
        self._context, self._learn = context, learn
        self._passes = _passes(context, model, num_slots)
        self._measured: list[MeasuredPass] = []
        self._spent_s, self._last_s, self._last_size = 0.0, 0.0, 1

    def begin(self) -> None:
        """Warm up, which reads the weights, and time what is over at once. Raises what a pass raises."""
        self._time()
        while self._fits(_START_S):
            self._measure()

    def step(self) -> bool:
        """Time a pass; return False where none is left, or the next one would take too long."""
        if self._measured and not self._fits(_WHOLE_S):  # what a pass takes on a cold machine says nothing
            return False
        try:
            self._measure()
        except Aborted:  # the engine is being closed
            return False
        except Exception as error:  # noqa: BLE001 - without it the cost model learns from ticks
            _log.warning("the passes of a calibration cannot be computed: %r", error)
            return False
        return True

    def end(self) -> None:
        """Hand over what was measured; no pass is made any more. A failure is logged, as it is none of the engine's."""
        self._passes.clear()
        if not self._measured:
            return
        try:
            self._learn(self._measured)
        except Exception:  # noqa: BLE001 - the cost model learns from ticks
            _log.warning("what the passes of a calibration took cannot be learned", exc_info=True)

    def _fits(self, budget_s: float) -> bool:
        """Return whether the next pass ends within a budget, by the time of the one before."""
        if not self._passes:
            return False
        return self._spent_s + self._last_s * _num_tokens(self._passes[0]) / self._last_size <= budget_s

    def _measure(self) -> None:
        num_outputs = sum(len(row.samplers) for row in self._passes[0])
        self._time()
        self._spent_s += self._last_s
        self._measured.append(MeasuredPass(self._last_size, self._last_size, self._last_s, num_outputs))

    def _time(self) -> None:
        """Compute the next pass, and empty the context again."""
        rows = self._passes.pop(0)
        start = time.perf_counter()
        self._context.step(rows)
        self._last_s, self._last_size = time.perf_counter() - start, _num_tokens(rows)
        for row in rows:
            self._context.remove(row.seq_id)


def _num_tokens(rows: list[StepRow]) -> int:
    return sum(len(row.token_ids) for row in rows)


def _passes(context: Context, model: Model, num_slots: int) -> list[list[StepRow]]:
    greedy = Sampler(SamplingParams(temperature=0), model)
    most_rows = min(num_slots, context.n_batch, context.n_outputs_max)
    decoding = [
        [StepRow(seq_id=one, position=0, token_ids=[0], samplers=(greedy.clone(),)) for one in range(num_rows)]
        for num_rows in sorted({min(number, most_rows) for number in _ROWS})
    ]
    sizes = [min(size, context.n_batch, context.max_positions) for size in _SIZES]
    prompts = [[StepRow(seq_id=0, position=0, token_ids=[0] * size)] for size in sizes]
    return [decoding[0], *decoding, *prompts]
