"""A context of a draft model on llama.cpp, as `ModelDrafter` uses it. Engine's thread."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.params import SamplingParams
from paceline.runtime import Context, Model, Sampler
from paceline.runtime.step import StepRow
from paceline.speculation.drafters.model_drafter import DraftRow, DraftToken


class LlamaDraftBackend:
    """Draws the likeliest tokens. wants_probabilities: whether those of the tokens are computed, over the whole vocabulary."""

    def __init__(self, model: Model, context: Context, *, wants_probabilities: bool) -> None:
        self._context, self._wants_probabilities = context, wants_probabilities
        self._greedy = Sampler(SamplingParams(temperature=0), model)
        self._samplers: list[Sampler] = []  # one a row of a pass

    def copy(self, from_seq_id: int, to_seq_id: int, end: int) -> None:
        """See `DraftBackend`."""
        self._context.copy(from_seq_id, to_seq_id, 0, end)

    def truncate(self, seq_id: int, end: int) -> None:
        """See `DraftBackend`."""
        self._context.remove(seq_id, end)

    def remove(self, seq_id: int) -> None:
        """See `DraftBackend`."""
        self._context.remove(seq_id)

    def step(self, rows: Sequence[DraftRow]) -> list[DraftToken | None]:
        """See `DraftBackend`. Raises as `Context.step`, and what kept a row from drawing."""
        while len(self._samplers) < len(rows):
            self._samplers.append(self._greedy.clone())
        if self._wants_probabilities:
            return self._with_probabilities(rows)
        drawn = self._context.plain_step(
            [row.seq_id for row in rows],
            [row.position for row in rows],
            [row.token_ids for row in rows],
            [one if row.draws else None for row, one in zip(rows, self._samplers, strict=False)],
        )
        return [None if one is None else DraftToken(_token(one), 1.0) for one in drawn]

    def _with_probabilities(self, rows: Sequence[DraftRow]) -> list[DraftToken | None]:
        found = self._context.step(
            [
                StepRow(
                    seq_id=row.seq_id,
                    position=row.position,
                    token_ids=row.token_ids,
                    samplers=(sampler,) if row.draws else (),
                    num_logprobs=0,
                )
                for row, sampler in zip(rows, self._samplers, strict=False)
            ]
        )
        tokens: list[DraftToken | None] = []
        for result in found.rows:
            if not result.draws:
                tokens.append(None)
                continue
            (draws,) = result.draws
            assert draws.logprobs is not None or draws.error is not None  # noqa: S101 - they were asked for
            token_id = _token(draws.error or draws.token_ids[0])
            tokens.append(DraftToken(token_id, math.exp(float(draws.logprobs.own[0])) if draws.logprobs else 0.0))
        return tokens


def _token(drawn: int | Exception) -> int:
    if isinstance(drawn, Exception):
        raise drawn
    return drawn
