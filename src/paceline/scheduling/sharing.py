"""Choices of one request share their prompt where memory is only copied whole: at the prompt's last token but one.

Where any part can be shared the prefix tree does it, for choices as for requests.
"""

from __future__ import annotations

from paceline.scheduling.placement import LEAST_HOST_TOKENS, WAIT, Wait
from paceline.scheduling.sequence import Sequence


def sibling_source(sequence: Sequence) -> Sequence | Wait | None:
    """Who has just computed the prompt of a sequence that is about to start, but for its last token; `WAIT`: is about to."""
    wanted = sequence.num_prompt - 1
    if wanted == 0 or sequence.request.params.n == 1:
        return None
    siblings = [one for one in sequence.request.sequences if one is not sequence and one.slot is not None]
    for sibling in siblings:
        if sibling.num_computed == wanted:
            return sibling
    return WAIT if any(sibling.num_computed < wanted for sibling in siblings) else None


def must_stop_before_last(sequence: Sequence) -> bool:
    """Whether the prompt's last token has to wait for a tick of its own: the state before it is for others, or for later."""
    if sequence.num_computed >= sequence.num_prompt - 1:
        return False
    is_kept = sequence.writes_cache and sequence.num_prompt > LEAST_HOST_TOKENS
    return is_kept or any(
        one.slot is None and one.reason is None and one.num_known == one.num_prompt
        for one in sequence.request.sequences
    )
