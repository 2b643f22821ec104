"""A request and its sequences: counts, deadlines, the reason that stays."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from tests.engine_world import World

from paceline.errors import DecodeError
from paceline.scheduling.records import due_reason
from paceline.sequence import Request, Sequence
from paceline.streaming import FinishReason


def submitted(prompt: str | list[int] = "hello", **options: Any) -> tuple[World, Request]:
    world = World()
    outcome = world.submit(prompt, **options)
    world.tick()
    return world, outcome.request


def sequence_of(**options: Any) -> Sequence:
    return submitted(ignore_eos=True, **options)[1].sequences[0]


def test_work_is_what_is_known_and_not_computed() -> None:
    """After a tick one token is left: the drawn token; then it decodes."""
    sequence = sequence_of()
    assert (sequence.num_prompt_tokens, sequence.num_tokens, sequence.num_computed_tokens) == (5, 6, 5)
    assert sequence.num_uncomputed_tokens == 1
    assert sequence.is_decoding


def test_a_prompt_in_parts_does_not_decode() -> None:
    """A prompt's last chunk is no decoding, even if it is one token."""
    world = World(limits={"chunk_size": 4})
    outcome = world.submit("hello")
    world.tick()
    (sequence,) = outcome.request.sequences
    assert (sequence.num_uncomputed_tokens, sequence.is_decoding) == (1, False)


def test_the_reason_of_the_higher_rank_stays() -> None:
    """Of reasons that come together, in any order, the highest rank is latched."""
    for item, other in itertools.product(FinishReason, FinishReason):
        sequence = sequence_of()
        sequence.end(item)
        sequence.end(other)
        assert sequence.reason is min(item, other, key=lambda reason: reason.rank)


def test_the_error_belongs_to_the_reason() -> None:
    """A later ending of lower rank changes neither."""
    sequence, error = sequence_of(), DecodeError("no")
    sequence.end(FinishReason.ERROR, error)
    sequence.end(FinishReason.CANCELLED)
    assert (sequence.reason, sequence.error) == (FinishReason.ERROR, error)


def test_a_sequence_waits_since_its_request_was_accepted() -> None:
    """The waiting time starts at acceptance, not when the request was made."""
    _, request = submitted("hello", ignore_eos=True)
    request.submitted_s += 5
    assert [sequence.submitted_s for sequence in request.sequences] == [request.submitted_s]
    assert request.sequences[0].turn_key[0] == request.submitted_s


def test_the_order_of_reasons_is_the_documented_one() -> None:
    """The order is that of the class."""
    names = [reason.name for reason in sorted(FinishReason, key=lambda reason: reason.rank)]
    assert names == [
        "ERROR",
        "CANCELLED",
        "DEADLINE",
        "SHUTDOWN",
        "SLOW_READER",
        "STOP",
        "REPETITION",
        "LENGTH",
        "TOOL_CALLS",
    ]


@pytest.mark.parametrize(
    ("timeouts", "deadline"),
    [
        ({}, math.inf),
        ({"timeout_s": 9}, 9),
        ({"timeout_s": 9, "ttft_timeout_s": 4}, 4),
        ({"timeout_s": 9, "queue_timeout_s": 2, "ttft_timeout_s": 4}, 2),
    ],
)
def test_the_nearest_limit_is_the_deadline(timeouts: dict[str, float], deadline: float) -> None:
    """Of a request that waits all its limits count."""
    request = World().request("hello", **timeouts)
    assert request.deadline_s() == deadline
    assert request.has_deadline is bool(timeouts)


def test_limits_that_were_met_count_no_more() -> None:
    """With the slot the queue's limit goes, with the first token that of the first token."""
    _, request = submitted(timeout_s=9, queue_timeout_s=2, ttft_timeout_s=4, ignore_eos=True)
    assert request.deadline_s() == 9


def test_turns_follow_priority_and_arrival_and_waiting() -> None:
    """Ten seconds make up for one level; of equals the first that came."""
    world = World(limits={"num_slots": 1})
    outcomes = [world.submit("blocker", max_tokens=50)]
    world.tick()
    outcomes += [world.submit("a", priority=-1), world.submit("b")]
    world.clock.advance(10.5)
    outcomes += [world.submit("c", priority=0), world.submit("d", priority=5)]
    world.tick()
    waiting = [sequence.request.key for sequence in world.scheduler._queue]
    assert waiting == [outcomes[index].request.key for index in (4, 2, 1, 3)]


def test_of_several_reasons_to_end_a_request_the_first_in_order_is_due() -> None:
    """A cancel wins over a deadline, a deadline over a shutdown, and a slow reader comes last."""
    _, request = submitted(timeout_s=5)
    late_s = request.deadline_s()
    request.is_slow = request.cancelled = True
    assert due_reason(request, late_s, is_stopping=True) is FinishReason.CANCELLED
    request.cancelled = False
    assert due_reason(request, late_s, is_stopping=True) is FinishReason.DEADLINE
    assert due_reason(request, late_s - 0.1, is_stopping=True) is FinishReason.SHUTDOWN
    assert due_reason(request, late_s - 0.1) is FinishReason.SLOW_READER
    request.is_slow = False
    assert due_reason(request, late_s - 0.1) is None
