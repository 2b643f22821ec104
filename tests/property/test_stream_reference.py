"""Streams against a plain function of the drawn tokens: ends, stops, intervals, and a reader that reads at any time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_world import Outcome, World
from tests.stream_reference import Expected, expected_output

from paceline.output import Vocabulary
from paceline.streaming import END, FinishReason, StreamChannel, StreamChunk

# Tokens with a part of a character, several, or none; two ends of generation, of which only one has a text.
PIECES = (
    b"a",
    b"b",
    b"ab",
    b"ba",
    b" ",
    b"\xc3",
    b"\xa9",
    b"\xf0\x9f",
    b"\x99\x82",
    b"\xc3\xa9a",
    b"",
    b"\xff",
    b"",
    b"<end>",
)
ENDS = frozenset({12, 13})
VOCABULARY = Vocabulary(PIECES, PIECES, ENDS)
PLAIN = [token for token in range(len(PIECES)) if token not in ENDS]
STOPS = st.lists(st.text("ab é🙂", min_size=1, max_size=4), max_size=3)


@st.composite
def scripts(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    """The drawn tokens, and the request's conditions for its end."""
    body = draw(st.lists(st.sampled_from(PLAIN), max_size=14))
    tokens = [*body, *draw(st.sampled_from([[12], [13], [12, 0]]))]
    max_tokens = draw(st.none() | st.integers(1, 16))
    options = {
        "max_tokens": max_tokens,
        "min_tokens": draw(st.just(0) | st.integers(0, min(len(body), max_tokens or len(body)))),
        "stop": draw(STOPS),
        "stop_token_ids": draw(st.just([]) | st.lists(st.sampled_from(PLAIN), max_size=2)),
    }
    # As every sampler does: no end of generation and no stop id before min_tokens.
    options["stop_token_ids"] = [
        stop_token_id
        for stop_token_id in options["stop_token_ids"]
        if stop_token_id not in body[: options["min_tokens"]]
    ]
    return tokens, options


def reference(tokens: list[int], options: dict[str, Any], cut_off: FinishReason | None = None) -> Expected:
    return expected_output(
        tokens,
        pieces=PIECES,
        ends=ENDS,
        stops=options["stop"],
        stop_ids=options["stop_token_ids"],
        min_tokens=options["min_tokens"],
        max_tokens=options["max_tokens"],
        cut_off=cut_off,
    )


def joined(chunks: list[StreamChunk]) -> Expected:
    """Return a reader's final text, with each chunk checked by itself."""
    last = chunks[-1]
    assert last.finish_reason is not None
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    index = 0
    for chunk in chunks:
        chunk.text.encode()
        assert chunk.index == index
        index += len(chunk.token_ids)
    return Expected(
        [token for chunk in chunks for token in chunk.token_ids],
        "".join(chunk.text for chunk in chunks),
        last.finish_reason,
        last.stop,
        list(last.stop_token_ids),
    )


def started(tokens: list[int], options: dict[str, Any], **more: Any) -> tuple[World, Outcome]:
    world = World(vocabulary=VOCABULARY)
    return world, world.submit([0, 1], script=tokens, **options, **more)


@settings(max_examples=300, deadline=None)
@given(scripts())
def test_chunks_joined_are_what_the_drawn_tokens_make(script: tuple[list[int], dict[str, Any]]) -> None:
    """Ids, text, reason and stop equal those of a plain function."""
    tokens, options = script
    world, outcome = started(tokens, options)
    world.run()
    world.check_done()
    assert joined(outcome.chunks) == reference(tokens, options)


@settings(max_examples=200, deadline=None)
@given(scripts(), st.integers(0, 14), st.sampled_from(["cancel", "deadline", "slow", "stop", "error", "draw"]))
def test_what_is_cut_off_keeps_held_back_text(
    script: tuple[list[int], dict[str, Any]], after: int, accident: str
) -> None:
    """Cancel, deadline, slow reader, shutdown and errors deliver everything that was generated."""
    tokens, options = script
    world, outcome = started(tokens, options, timeout_s=100)
    world.tick(after)
    if accident == "cancel":
        world.cancel(outcome)
    elif accident == "deadline":
        world.clock.advance(100)
    elif accident == "slow":
        world.end_slow(outcome)
    elif accident == "stop":
        world.stop()
    elif accident == "error":
        world.faults.poisonous.add(outcome.request.key)
    else:
        world.faults.undrawable.add(outcome.request.key)
    world.run()
    world.check_done()
    whole = reference(tokens, options)
    reason = {
        "cancel": FinishReason.CANCELLED,
        "deadline": FinishReason.DEADLINE,
        "slow": FinishReason.SLOW_READER,
        "stop": FinishReason.SHUTDOWN,
    }.get(accident, FinishReason.ERROR)
    if len(whole.token_ids) + len(whole.stop_token_ids) <= after:
        assert joined(outcome.chunks) == whole
    else:
        assert outcome.reason() is reason
        assert joined(outcome.chunks) == reference(tokens[:after], options, reason)


@settings(max_examples=200, deadline=None)
@given(scripts(), st.sampled_from([1, 2, 5]), st.lists(st.booleans(), min_size=20, max_size=20))
def test_a_channel_gives_the_same_whatever_its_interval_and_reader(
    script: tuple[list[int], dict[str, Any]], interval: int, reads: list[bool]
) -> None:
    """Through a channel, read at any moments, nothing is lost or doubled; only the last chunk is short."""
    tokens, options = script
    world = World(vocabulary=VOCABULARY)
    outcome = world.submit([0, 1], script=tokens, **options)
    channel = StreamChannel.create()
    sender = channel.attach(interval=interval)
    seen: list[StreamChunk] = []
    num_pushed = 0
    for is_reading in reads:
        world.tick()
        for chunk in outcome.chunks[num_pushed:]:
            sender.finish(chunk) if chunk is outcome.terminal else sender.push(chunk)
        num_pushed = len(outcome.chunks)
        while is_reading and isinstance(taken := channel.get(0), StreamChunk):
            seen.append(taken)
    seen += list(channel)
    assert channel.get(0) is END
    assert joined(seen) == reference(tokens, options)
    assert all(len(chunk.token_ids) >= interval for chunk in seen[:-1])


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "chunks"),
    [
        (["a", "bc", "de###", "x"], ["###"], "abcde", ["a", "bc", "de"]),
        (["ab", "é", "é!"], ["éé"], "ab", ["ab"]),
        (["one", "two", "three"], ["two", "onet"], "", [""]),
        (["ab", "ab", "c"], ["abd"], "ababc", ["ab", "abc"]),
    ],
)
def test_known_cases_of_stops(pieces: list[str], stops: list[str], text: str, chunks: list[str]) -> None:
    """Across chunks and bytes, the earliest of several, held back no more than needed."""
    data = (*(piece.encode() for piece in pieces), b"")
    world = World(vocabulary=Vocabulary(data, data, frozenset({len(pieces)})))
    outcome = world.submit([0], script=range(len(pieces) + 1), stop=stops)
    world.run()
    assert outcome.text() == text
    assert "".join(chunks) == text
    shown = [chunk.text for chunk in outcome.chunks if chunk.text] or [""]
    assert shown == chunks
