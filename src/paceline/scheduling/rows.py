"""From a strategy's shares to the rows of a tick: checked, cut at what each sequence may do now."""

from __future__ import annotations

from collections.abc import Sequence as Many

from paceline.errors import StrategyError
from paceline.scheduling.limits import Limits
from paceline.scheduling.plan import Row
from paceline.scheduling.sequence import Sequence
from paceline.scheduling.sharing import must_stop_before_last
from paceline.scheduling.view import Share


def set_limits(sequences: list[Sequence], limits: Limits) -> list[Sequence]:
    """Notes down how many tokens each may have in this tick, and answers those that may have any.

    Rows of logits for prompt tokens are scarce: they go to the sequence that comes first.
    """
    num_scored = limits.max_scored
    for sequence in sequences:
        limit = min(sequence.num_left, limits.chunk_size)
        if sequence.num_computed < sequence.num_prompt - 1:
            limit, num_scored = _within_prompt(sequence, limits, limit, num_scored)
        sequence.limit = limit
    return [sequence for sequence in sequences if sequence.limit > 0]


def _within_prompt(sequence: Sequence, limits: Limits, limit: int, num_scored: int) -> tuple[int, int]:
    """The limit of a sequence that has not reached its prompt's last token, and what it leaves of the scored rows."""
    up_to_last = sequence.num_prompt - 1 - sequence.num_computed
    if sequence.is_scoring:
        if sequence.num_computed < sequence.num_scored:  # computed again: these scores are known
            return min(limit, sequence.num_scored - sequence.num_computed), num_scored
        limit = min(limit, up_to_last, num_scored)
        return limit, num_scored - limit
    if not limits.can_share_part and must_stop_before_last(sequence):
        return min(limit, up_to_last), num_scored
    return limit, num_scored


def rows_of(shares: object, sequences: Many[Sequence], budget: int) -> list[Row]:
    """The rows for a strategy's answer. Raises `StrategyError` where it breaks the contract of `BatchStrategy`."""
    if not isinstance(shares, (list, tuple)):
        raise StrategyError(f"it must answer a list of Shares, not {shares!r:.80}")
    left = {sequence.key: sequence for sequence in sequences}
    rows, total = [], 0
    for share in shares:
        if not isinstance(share, Share):
            raise StrategyError(f"it must answer Shares, not {share!r:.80}")
        sequence = left.pop(share.key, None)
        if sequence is None:
            raise StrategyError(f"sequence {share.key} is not in the view, or came twice")
        if isinstance(share.num_tokens, bool) or not isinstance(share.num_tokens, int):
            raise StrategyError(f"num_tokens of sequence {share.key} must be an int, not {share.num_tokens!r:.80}")
        if not 1 <= share.num_tokens <= sequence.limit:
            raise StrategyError(
                f"sequence {share.key} may have 1 to {sequence.limit} tokens, and was given {share.num_tokens}"
            )
        total += share.num_tokens
        rows.append(_row(sequence, share.num_tokens))
    if total > budget:
        raise StrategyError(f"it planned {total} tokens, and the budget is {budget}")
    if not rows:
        raise StrategyError(f"it planned nothing, and {len(sequences)} sequences have work")
    return rows


def _row(sequence: Sequence, num_tokens: int) -> Row:
    params, start = sequence.request.params, sequence.num_computed
    end = start + num_tokens
    scores = sequence.is_scoring and start == sequence.num_scored
    return Row(
        sequence=sequence,
        position=start,
        token_ids=sequence.known[start:end],
        draws=sequence.drawing and end == sequence.num_known,
        targets=sequence.known[start + 1 : end + 1] if scores else [],
        num_logprobs=params.prompt_logprobs if scores else params.logprobs,
    )
