"""What speculation knows of a sequence that may have drafts."""

from __future__ import annotations

import operator
from collections.abc import Callable
from numbers import Real
from typing import Any, TypeAlias

from paceline.errors import DrafterError, PacelineError
from paceline.kv_cache import Namespace
from paceline.sequence import Row, Sequence
from paceline.speculation.acceptance import Acceptance
from paceline.speculation.drafter import Drafter, LaggingDrafter, PlacedDrafter
from paceline.streaming.chunk import FinishReason


class DraftingSequence:
    """The state of a sequence that may have drafts.

    namespace: with which the sequence shares prefixes; None if it shares none. Kept here for after its request's end.
    has_begun: whether `begin` was called for it, though that may have failed. num_observed: tokens that the drafter was given.
    num_proposed: of the proposal that no pass has verified yet. is_off: whether it goes without drafts from now on.
    Of a lagging drafter: lag: tokens that it missed when it had those; num_ahead: of those behind them it has these already, as
    it proposed them; num_missing: tokens that it misses now beside those that every tick brings; is_late: whether these are more
    than it computes in this tick; is_catching_up: whether it is to compute them without drafts; is_on_trial: whether that is for
    a trial.
    """

    __slots__ = (
        "acceptance", "has_begun", "is_catching_up", "is_late", "is_off", "is_on_trial", "lag", "namespace",
        "num_ahead", "num_missing", "num_observed", "num_proposed",
    )  # fmt: skip

    def __init__(self, acceptance: Acceptance, namespace: Namespace | None = None) -> None:
        self.acceptance, self.namespace = acceptance, namespace
        self.has_begun = self.is_off = self.is_late = self.is_catching_up = self.is_on_trial = False
        self.lag = self.num_missing = 0.0
        self.num_observed = self.num_proposed = self.num_ahead = 0


Candidates: TypeAlias = list[tuple[Row, DraftingSequence, int]]
"""Rows that may have drafts, what is known of them, and how many they may have, or are to."""


class DrafterCalls:
    """A drafter as speculation calls it; each call but `end` and `forget` raises `DrafterError` for whatever it raises.

    n_vocab: of the target; tokens that it does not have are no proposals. report: takes errors that concern no open request.
    num_caught_up: tokens that the last `propose_all` of a lagging drafter computed of sequences that lagged behind.
    """

    def __init__(self, drafter: Drafter, n_vocab: int, report: Callable[[PacelineError], None]) -> None:
        self._drafter, self._n_vocab, self._report = drafter, n_vocab, report
        self.num_caught_up = 0
        self._lags = isinstance(drafter, LaggingDrafter)
        self._is_placed = isinstance(drafter, PlacedDrafter)
        self._shares = callable(getattr(drafter, "begin_shared", None))  # see SharingDrafter

    def inform(self, sequence: Sequence, known: DraftingSequence) -> None:
        """Give the drafter what a sequence has got since the last call."""
        if not known.has_begun:
            known.has_begun = True
            if self._shares:
                self._call("begin_shared", sequence.key, sequence.token_ids, known.namespace)
            elif self._is_placed:
                self._call("begin_at", sequence.key, sequence.token_ids, sequence.seq_id)
            else:
                self._call("begin", sequence.key, sequence.token_ids)
        elif known.num_observed < sequence.num_tokens:
            self._call("observe", sequence.key, sequence.token_ids[known.num_observed :])
        known.num_observed = sequence.num_tokens

    def propose(self, sequence: Sequence, depth: int) -> Any:
        """Return a proposal of at most so many tokens, for `checked`."""
        return self._call("propose", sequence.key, depth)

    def propose_all(self, asked: Candidates) -> list[Any] | None:
        """Return a proposal for each, for `checked`; None where the drafter failed, which is not called for them any more."""
        wanted = [(row.sequence.key, depth) for row, _, depth in asked]
        try:
            proposals = list(self._call("propose_all", wanted)) if wanted else []
            if self._lags:
                self.num_caught_up = self._count("num_caught_up", self._read("num_caught_up"))
            if len(proposals) == len(asked):
                return proposals
            failure = self._error(f"returned {len(proposals)} proposals for {len(asked)} sequences")
        except DrafterError as error:
            failure = error
        except TypeError:
            failure = self._error("must return a list of proposals from propose_all")
        self.abandon(asked, failure)
        return None

    def abandon(self, candidates: Candidates, failure: DrafterError) -> None:
        """Log what failed for all of these sequences at once, and end them: they go on without drafts."""
        self._report(failure)
        for row, known, _ in candidates:
            known.is_off = True
            self.end(row.sequence, known)

    def checked(self, proposed: Any, depth: int) -> list[int]:
        """Return a proposal as token ids. Raises `DrafterError` where it is none, or too long."""
        try:
            drafts = [operator.index(token_id) for token_id in proposed]
        except TypeError:
            raise self._error(f"must propose token ids, not {proposed!r:.80}") from None
        if len(drafts) > depth:
            raise self._error(f"proposed {len(drafts)} tokens where {depth} were asked for")
        wrong = [one for one in drafts if not 0 <= one < self._n_vocab]
        if wrong:
            raise self._error(f"proposed token {wrong[0]}, and the vocabulary has {self._n_vocab}")
        return drafts

    def rollback(self, sequence: Sequence, num_tokens: int) -> None:
        """Take back the last tokens of the newest proposal."""
        self._call("rollback", sequence.key, num_tokens)

    def lag(self, sequence: Sequence) -> float:
        """Return how many tokens a lagging drafter misses of a sequence."""
        lag = self._call("lag", sequence.key)
        if not isinstance(lag, Real) or not float(lag) >= 0:
            raise self._error(f"must return a number of tokens, 0 or more, from lag, not {lag!r:.80}")
        return float(lag)

    def limit_catch_up(self, num_tokens: int) -> int:
        """Set how much a lagging drafter may catch up with in `propose_all`; return how much it will."""
        return self._count("limit_catch_up", self._call("limit_catch_up", num_tokens))

    def end(self, sequence: Sequence, known: DraftingSequence) -> None:
        """Let the drafter forget a sequence. What is raised concerns no open request, and is reported."""
        if known.has_begun:
            known.has_begun = False
            self._logged(self._call, "end", sequence.key)

    def forget(self, sequence: Sequence, known: DraftingSequence) -> None:
        """End a sequence that has left its slot; one that learns from it for others gets its last tokens before."""
        if self._shares and not known.is_off and sequence.reason is not FinishReason.ERROR:
            self._logged(self.inform, sequence, known)
        self.end(sequence, known)

    def _logged(self, call: Callable[..., Any], *arguments: Any) -> None:
        try:
            call(*arguments)
        except DrafterError as error:
            self._report(error)

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._drafter, name)(*arguments)
        except Exception as error:
            raise self._error(f"failed to {name}: {error!r:.500}") from error

    def _read(self, name: str) -> Any:
        try:
            return getattr(self._drafter, name)
        except Exception as error:
            raise self._error(f"failed at {name}: {error!r:.500}") from error

    def _count(self, name: str, value: Any) -> int:
        try:
            count = operator.index(value)
        except TypeError:
            count = -1
        if count < 0:
            raise self._error(f"must have a number of tokens, 0 or more, as {name}, not {value!r:.80}")
        return count

    def _error(self, message: str) -> DrafterError:
        return DrafterError(f"drafter {type(self._drafter).__name__} {message}")
