"""The backlog: joining waiting chunks at a bounded price, ripeness, and falling behind."""

from __future__ import annotations

import pytest
from tests.unit.streaming.pieces import delta, ending

from paceline.streaming import FinishReason, StreamChunk
from paceline.streaming.sender import Backlog, Pieces, whole


def held(pieces: Pieces) -> int:
    return len(pieces._chunks)


def test_an_unread_backlog_keeps_few_objects() -> None:
    """Of 10,000 chunks fewer than 200 are kept, at every moment, and joined they are all of them."""
    pieces = Pieces(delta(0, 0), delta(1, 1))
    most = 0
    for index in range(2, 10_000):
        pieces.add(delta(index, index))
        most = max(most, held(pieces))
    assert most < 200
    assert pieces.num_tokens == 10_000
    assert pieces.joined() == delta(0, *range(10_000))


def test_joining_touches_each_token_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 chunks are joined with fewer than three copies a token, not with one for each that follows."""
    copied = 0
    join = StreamChunk.joined_all

    def count(chunks: list[StreamChunk]) -> StreamChunk:
        nonlocal copied
        copied += sum(len(chunk.token_ids) for chunk in chunks)
        return join(chunks)

    monkeypatch.setattr(StreamChunk, "joined_all", staticmethod(count))
    backlog = Backlog()
    for index in range(10_000):
        backlog.add(delta(index, index))
    assert whole(backlog.take()).token_ids == tuple(range(10_000))
    assert copied < 3 * 10_000


def test_a_chunk_that_was_waited_for_is_handed_on_as_it_is() -> None:
    """Nothing is copied if the reader keeps up."""
    backlog = Backlog()
    chunk = delta(0, 1)
    backlog.add(chunk)
    assert whole(backlog.take()) is chunk


def test_a_choice_is_ripe_with_the_interval_or_with_its_ending() -> None:
    """Until then there is nothing to take, then all that it has."""
    backlog = Backlog(interval=3)
    backlog.add(delta(0, 1))
    backlog.add(delta(1, 2))
    assert not backlog.ripe
    backlog.add(delta(0, 7, choice=4))
    backlog.add(ending(1, FinishReason.STOP, choice=4))
    assert list(backlog.ripe) == [4]
    backlog.add(delta(2, 3, 4))
    assert list(backlog.ripe) == [4, 0]
    assert (backlog.num_tokens, backlog.num_ripe) == (5, 5)
    assert whole(backlog.take()).token_ids == (7,)
    assert whole(backlog.take()).token_ids == (1, 2, 3, 4)
    assert (backlog.num_tokens, backlog.num_ripe) == (0, 0)


def test_text_without_a_token_waits_for_the_next_one() -> None:
    """A delta without tokens is no chunk by itself; it goes out with later tokens."""
    backlog = Backlog()
    backlog.add(StreamChunk(index=0, text="x"))
    assert not backlog.ripe
    backlog.add(delta(0, 1))
    assert whole(backlog.take()).text == "xb"


def test_a_reader_falls_behind_above_the_limit_and_is_back_at_half() -> None:
    """`add` returns when it begins; between half and the limit nothing changes."""
    backlog = Backlog(limit=4)
    assert not backlog.add(delta(0, 1, 2, 3, 4, choice=0))
    assert not backlog.is_behind
    assert backlog.add(delta(0, 5, 6, choice=1))
    assert backlog.is_behind
    assert not backlog.add(delta(0, 7, choice=2))
    assert whole(backlog.take()).choice == 0
    assert (backlog.num_ripe, backlog.is_behind) == (3, True)
    assert whole(backlog.take()).choice == 1
    assert (backlog.num_ripe, backlog.is_behind) == (1, False)
    assert backlog.num_times_behind == 1
    assert backlog.add(delta(1, 1, 2, 3, 4, choice=2))
    assert backlog.num_times_behind == 2


def test_tokens_that_cannot_be_taken_yet_put_no_reader_behind() -> None:
    """With an interval beyond the limit a request would otherwise wait for a reader who waits for it."""
    backlog = Backlog(interval=10, limit=2)
    for index in range(9):
        assert not backlog.add(delta(index, index))
    assert not backlog.is_behind
    assert backlog.add(delta(9, 9))
    assert whole(backlog.take()).token_ids == tuple(range(10))
    assert not backlog.is_behind


def test_without_a_limit_no_reader_is_behind() -> None:
    """The limit is off by default."""
    backlog = Backlog()
    for index in range(1000):
        assert not backlog.add(delta(index, index))
    assert not backlog.is_behind


def test_closing_makes_everything_ripe_and_gives_the_last_chunk_its_choices_rest() -> None:
    """Held-back text of other choices comes before; the last choice's comes with it, once."""
    backlog = Backlog(interval=5)
    backlog.add(delta(0, 1, choice=0))
    backlog.add(delta(0, 2, choice=1))
    backlog.add(delta(1, 3, choice=0))
    last = backlog.close(ending(2, FinishReason.ERROR, 4, choice=0))
    assert (last.index, last.token_ids, last.finish_reason) == (0, (1, 3, 4), FinishReason.ERROR)
    assert whole(backlog.take()).token_ids == (2,)
    assert not backlog.ripe
    assert (backlog.num_tokens, backlog.num_ripe) == (0, 0)


def test_closing_leaves_a_ripe_choices_chunk_before_the_last() -> None:
    """A delta that could have been taken is not withheld for the ending."""
    backlog = Backlog()
    backlog.add(delta(0, 1))
    assert backlog.close(ending(1, FinishReason.STOP, 2)).token_ids == (2,)
    assert whole(backlog.take()).token_ids == (1,)
