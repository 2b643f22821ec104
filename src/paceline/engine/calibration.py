"""A few passes when an engine starts, so that its cost model does not begin with a guess."""

from __future__ import annotations

import time

from paceline.runtime import Context, StepRow
from paceline.scheduling.pace import Pace

_SIZES = (1, 1, 4, 32, 64, 128, 512)
_BUDGET_S = 0.5


def calibrate(context: Context, pace: Pace) -> None:
    """Measures passes of growing size until half a second is spent; the context is empty afterwards.

    The first pass warms up and does not count. Most that this can take is one pass beyond the budget, which is skipped
    where the last one says that it would not fit.
    """
    samples: list[tuple[int, int, float]] = []
    spent_s, last_s, last_size = 0.0, 0.0, 1
    for index, size in enumerate(min(one, context.n_batch, context.n_ctx) for one in _SIZES):
        if spent_s + last_s * size / last_size > _BUDGET_S:
            break
        start = time.perf_counter()
        context.step([StepRow(seq_id=0, position=0, token_ids=[0] * size)])
        last_s, last_size = time.perf_counter() - start, size
        spent_s += last_s
        context.remove(0)
        if index:
            samples.append((size, size, last_s))
    pace.calibrate(samples)
