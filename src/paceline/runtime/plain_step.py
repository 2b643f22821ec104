"""A step whose rows want no more than their next token, as nearly all do: lists in and out, neither arrays nor records.

After a pass the caches are cold, and every object that a row needs costs microseconds.
"""

from __future__ import annotations

from paceline import _native
from paceline.errors import PacelineError
from paceline.runtime.context import Context
from paceline.runtime.sampler import Sampler
from paceline.runtime.step import native_error


def plain_step(
    context: Context,
    seq_ids: list[int],
    positions: list[int],
    token_ids: list[list[int]],
    samplers: list[Sampler | None],
) -> list[int | PacelineError | None]:
    """As `Context.step`, with one entry a row in each list. position: of the row's first token.

    Answers what each row's sampler drew, or why it could not; None for a row that has none. Raises as `Context.step`.
    """
    natives = [None if sampler is None else sampler.native for sampler in samplers]
    drawn: list[int | PacelineError | None]
    drawn, failed = _native.plain_step(context.native, seq_ids, positions, token_ids, natives)
    for sampler, kind, message in failed:
        drawn[sampler] = native_error(kind, message)
    if len(drawn) == len(samplers):
        return drawn
    results = iter(drawn)
    return [None if sampler is None else next(results) for sampler in samplers]
