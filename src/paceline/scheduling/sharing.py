"""Choices of one request share their prompt: one computes it, the others take it over but for its last token."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from paceline.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Source:
    """A running sequence whose first num_tokens can be taken over."""

    sequence: Sequence
    num_tokens: int


class NoSource(Enum):
    """What else can be said of a prefix."""

    WAIT = "somebody is computing it"
    COMPUTE = "nobody has it"


WAIT: Final = NoSource.WAIT
COMPUTE: Final = NoSource.COMPUTE


def prompt_source(sequence: Sequence, *, can_share_part: bool) -> Source | NoSource:
    """Where a sequence that is about to start gets its prompt from."""
    wanted = sequence.num_prompt - 1
    if wanted == 0 or sequence.request.params.n == 1:
        return COMPUTE
    siblings = [one for one in sequence.request.sequences if one is not sequence and one.slot is not None]
    for sibling in siblings:
        if sibling.num_computed == wanted or (can_share_part and sibling.num_computed > wanted):
            return Source(sibling, wanted)
    return WAIT if any(sibling.num_computed < wanted for sibling in siblings) else COMPUTE


def must_stop_before_last(sequence: Sequence) -> bool:
    """Whether the prompt's last token has to wait for a tick: others will want all before it, and only as a whole."""
    return sequence.num_computed < sequence.num_prompt - 1 and any(
        one.slot is None and one.reason is None and one.num_known == one.num_prompt
        for one in sequence.request.sequences
    )
