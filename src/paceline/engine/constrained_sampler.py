"""A sampler of the native core with what its choice has to follow: a constraint, a GBNF grammar of its own, or both."""

from __future__ import annotations

import threading
from typing import Self

import numpy as np

from paceline.constraints import Constraint, ThinkingConstraint
from paceline.constraints.constraint import TokenWords
from paceline.engine.executor import as_paceline_error
from paceline.errors import NoTokenAllowed, SamplingError
from paceline.runtime import Sampler
from paceline.scheduling.plan import RowOutput


class ConstrainedSampler:
    """Draws of one choice, and the constraint that they advance.

    `fill_mask` runs on a thread of its own while the pass runs; the rest on the engine's thread.
    """

    __slots__ = ("_filling", "constraint", "sampler")

    def __init__(self, sampler: Sampler, constraint: Constraint | None) -> None:
        self.sampler, self.constraint = sampler, constraint
        self._filling = threading.Lock()
        self._note_thinking()

    def copy(self, choice: int) -> Self:
        """Return the same for another choice."""
        return type(self)(
            self.sampler.clone(choice=choice), None if self.constraint is None else self.constraint.copy()
        )

    def fill_mask(self, words: TokenWords) -> bool:
        """See `Constraint`. A forced token that the sampler itself would not draw is given up.

        Raises:
            SamplingError: An earlier call still runs, whose pass failed meanwhile.
        """
        if not self._filling.acquire(blocking=False):
            raise SamplingError("the constraint still fills the mask of a pass that failed")
        try:
            return self._fill_mask(words)
        finally:
            self._filling.release()

    def _fill_mask(self, words: TokenWords) -> bool:
        constraint = self.constraint
        assert constraint is not None  # noqa: S101 - else there is no mask to fill
        while isinstance(constraint, ThinkingConstraint) and (forced := constraint.forced_token) is not None:
            if _has(self.sampler.allowed_mask(), forced):
                break
            constraint.refuse_forced()
        return constraint.fill_mask(words)

    def accept(self, token_id: int) -> None:
        """Advance by a token of a choice that began elsewhere."""
        self.sampler.accept(token_id)
        self.follow(token_id)

    def follow(self, token_id: int) -> None:
        """Advance the constraint alone, by a token that the sampler has drawn."""
        if self.constraint is not None and not self.sampler.is_eog(token_id):
            self.constraint.accept(token_id)
            self._note_thinking()

    def _note_thinking(self) -> None:
        """Let a lazy grammar sleep while the model thinks."""
        if isinstance(self.constraint, ThinkingConstraint) and self.sampler.params.grammar_lazy:
            self.sampler.set_grammar_asleep(self.constraint.is_thinking)

    def settle(self, output: RowOutput) -> RowOutput:
        """Return the outcome of a draw, with whether the text is complete. Never raises."""
        try:
            if isinstance(output.error, NoTokenAllowed) and self._may_end():
                return RowOutput(scored=output.scored, is_complete=True)
            if output.error is None and output.token_ids:
                for token_id in output.token_ids:
                    self.follow(token_id)
                output.is_complete = self._is_complete()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's own constraint may raise anything
            return RowOutput(scored=output.scored, error=as_paceline_error(error))
        return output

    def _may_end(self) -> bool:
        """Return whether the text is valid as it is: by the constraint, the grammar, or both."""
        by_constraint = None if self.constraint is None else self.constraint.may_end
        by_grammar = self.sampler.may_end if self.sampler.params.grammar is not None else None
        return {by_constraint, by_grammar} in ({True}, {True, None})

    def _is_complete(self) -> bool:
        if self.constraint is not None and self.constraint.is_complete:
            return True
        return self.sampler.params.grammar is not None and self.sampler.is_complete


def _has(words: TokenWords, token_id: int) -> bool:
    return bool(words[token_id >> 5] >> np.uint32(token_id & 31) & np.uint32(1))
