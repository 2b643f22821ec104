"""Drafters: the protocols that a drafter implements, and its calls by speculation. Pure.

Speculation asks for optional methods by name: `begin_shared` (`SharingDrafter`); `begin_at(key, token_ids, seq_id)`, which stands
for `begin` in a drafter whose memory is the backend's; `lag`, `limit_catch_up` and the number `num_caught_up`, which a drafter
with a memory of its own has (`drafters.model_drafter`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from numbers import Real
from typing import Any, Protocol, TypeAlias, runtime_checkable

from paceline.errors import DrafterError, PacelineError
from paceline.kv_cache import Namespace
from paceline.sequence import Row, Sequence
from paceline.speculation.depth_chooser import Acceptance
from paceline.streaming.chunk import FinishReason


@runtime_checkable
class Drafter(Protocol):
    """Proposes the next tokens of sequences. The next pass verifies them: wrong tokens cost time and change no output.

    Sequences are known by keys. The engine's thread calls between two passes, so the time of a call delays every stream. An
    exception ends the sequence that the call was for with a `DrafterError`; it is logged if the sequence has ended.

        begin ──> propose ──> rollback, if anything was wrong ──> observe ──> propose ──> ... ──> end
    """

    def begin(self, key: int, token_ids: SequenceOf[int]) -> None:
        """Begin with a sequence that decodes: its prompt and its generated tokens. Copy the list, since it grows.

        Negative numbers stand for cells of images or sound; they are no tokens to propose. Called again under the same key after
        `end` if a sequence goes on after a while without a slot.
        """

    def propose(self, key: int, max_tokens: int) -> SequenceOf[int]:
        """Return token ids that may follow, none or at most `max_tokens`, which is at least 1."""

    def observe(self, key: int, token_ids: SequenceOf[int]) -> None:
        """Take the tokens that the sequence got since `begin` or the last `observe`: accepted drafts, then its own."""

    def rollback(self, key: int, num_tokens: int) -> None:
        """Give up the last tokens of the newest proposal, at least 1: they were wrong or not verified."""

    def end(self, key: int) -> None:
        """Forget a sequence that has ended or lost its slot; also called after a `begin` that raised. Exceptions are logged."""


@runtime_checkable
class BatchDrafter(Drafter, Protocol):
    """A drafter that proposes for all sequences of a tick at once, as a drafter with a model does: one pass for all.

    `propose_all` is called in place of `propose`, after `begin` or `observe` of each of its sequences. Its exceptions are logged
    and end no request: the sequences go on without drafts, and the drafter gets `end` for each.
    """

    def propose_all(self, wanted: SequenceOf[tuple[int, int]]) -> SequenceOf[SequenceOf[int]]:
        """Return a proposal for each key and maximum of tokens in `wanted`, in that order; a proposal may be empty.

        Speculation assumes steps: one for the first draft of all sequences, one for the second of the sequences that have one,
        ... The time of each call teaches it the cost of a step by the number of its sequences.
        """


@runtime_checkable
class SharingDrafter(Protocol):
    """A `Drafter` whose proposals for a sequence may come from other sequences.

    Proposals show in times and in usage, so a sequence may only be given tokens that others of its namespace have left: requests
    of the same tenant, cache salt and adapters, as with prefix caching.
    """

    def begin_shared(self, key: int, token_ids: SequenceOf[int], namespace: tuple[object, ...] | None) -> None:
        """Begin with a sequence, in place of `Drafter.begin`.

        namespace: hashable, equal for sequences that may learn from each other; None for a sequence that shares nothing: it may
        neither leave nor find anything. A sequence that could have had drafts gets this call after its last token if not before,
        then `observe` with its remaining tokens, so that a drafter has seen all tokens by `end`.
        """


Drafters = tuple[Drafter, ...]
"""Several drafters, asked in this order."""


class DraftingSequence:
    """The state of a sequence that may have drafts.

    namespace: of shared prefixes, None if the sequence shares none; kept here as its request may have ended. has_begun: whether
    `begin` was called, even if it failed. num_observed: tokens given to the drafter. num_proposed: tokens of the proposal that no
    pass has verified yet. is_off: whether the sequence has no drafts any more.

    For a drafter with a memory of its own: lag: tokens that it missed at num_observed; num_ahead: later tokens that it has, as it
    proposed them; num_missing: tokens that it misses now, beside those of every tick; is_late: whether it computes fewer in this
    tick; is_catching_up: whether it computes them without drafts; is_on_trial: whether it does so for a trial.
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
"""Rows that may have drafts, the state of their sequences, and their number of drafts: the maximum, or the wanted number."""


class DrafterCalls:
    """The calls of a drafter. Each call but `end` and `forget` raises its exceptions as `DrafterError`.

    n_vocab: of the target; tokens beyond it are no proposals. report: takes errors that concern no open request. lags: whether
    the drafter has a memory of its own, in which sequences lag behind until they are asked for; it catches up in `propose_all`, a
    part at a time, and `wanted` then also has sequences with 0 tokens, which only catch up. num_caught_up: tokens of such
    sequences that the last `propose_all` computed.
    """

    def __init__(self, drafter: Drafter, n_vocab: int, report: Callable[[PacelineError], None]) -> None:
        self._drafter, self._n_vocab, self._report = drafter, n_vocab, report
        self.num_caught_up = 0
        is_batch = isinstance(drafter, BatchDrafter)
        has_methods = is_batch and self._has("lag") and self._has("limit_catch_up")
        self.lags = has_methods and hasattr(drafter, "num_caught_up")
        self._is_placed, self._shares = is_batch and self._has("begin_at"), self._has("begin_shared")

    def _has(self, method: str) -> bool:
        return callable(getattr(self._drafter, method, None))

    def inform(self, sequence: Sequence, known: DraftingSequence) -> None:
        """Give the drafter the tokens that a sequence got since the last call."""
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
        """Return a proposal of at most `depth` tokens, for `checked`."""
        return self._call("propose", sequence.key, depth)

    def propose_all(self, asked: Candidates) -> list[Any] | None:
        """Return a proposal for each row, for `checked`; None if the drafter failed, which then goes without these sequences."""
        wanted = [(row.sequence.key, depth) for row, _, depth in asked]
        try:
            proposals = list(self._call("propose_all", wanted)) if wanted else []
            if self.lags:
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
        """Report a failure for all these sequences at once, and end them in the drafter: they go on without drafts."""
        self._report(failure)
        for row, known, _ in candidates:
            known.is_off = True
            self.end(row.sequence, known)

    def checked(self, proposed: Any, depth: int) -> list[int]:
        """Return a proposal as token ids. Raises `DrafterError` if it has other values or is too long."""
        try:
            drafts = [operator.index(token_id) for token_id in proposed]
        except TypeError:
            raise self._error(f"must propose token ids, not {proposed!r:.80}") from None
        if len(drafts) > depth:
            raise self._error(f"proposed {len(drafts)} tokens where {depth} were asked for")
        wrong = [token_id for token_id in drafts if not 0 <= token_id < self._n_vocab]
        if wrong:
            raise self._error(f"proposed token {wrong[0]}, and the vocabulary has {self._n_vocab}")
        return drafts

    def rollback(self, sequence: Sequence, num_tokens: int) -> None:
        """Take back the last tokens of the newest proposal."""
        self._call("rollback", sequence.key, num_tokens)

    def lag(self, sequence: Sequence) -> float:
        """Return the number of tokens that a drafter which lags misses of a sequence; infinite if it can never draft for it."""
        lag = self._call("lag", sequence.key)
        if not isinstance(lag, Real) or not float(lag) >= 0:
            raise self._error(f"must return a number of tokens, 0 or more, from lag, not {lag!r:.80}")
        return float(lag)

    def limit_catch_up(self, num_tokens: int) -> int:
        """Set the tokens that `propose_all` may compute of sequences that lag, at least 1; return the number it will compute."""
        return self._count("limit_catch_up", self._call("limit_catch_up", num_tokens))

    def end(self, sequence: Sequence, known: DraftingSequence) -> None:
        """Let the drafter forget a sequence. Exceptions concern no open request, and are reported."""
        if known.has_begun:
            known.has_begun = False
            self._logged(self._call, "end", sequence.key)

    def forget(self, sequence: Sequence, known: DraftingSequence) -> None:
        """End a sequence that has left its slot; a drafter that learns from it for others gets its last tokens before."""
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
