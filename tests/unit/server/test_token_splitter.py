"""Chunks of several tokens as chunks of one, over tokens that are single bytes."""

from __future__ import annotations

import codecs

from hypothesis import given
from hypothesis import strategies as st

from paceline.server.dialects.token_reports import TokenSplitter
from paceline.streaming import StreamChunk, TokenLogprobs

BYTES = [bytes([value]) for value in range(256)]


def texts(data: bytes, *, splitter: TokenSplitter | None = None, text: str | None = None) -> list[str]:
    """The text of each part of a chunk that has a token for each byte."""
    chunk = StreamChunk(index=0, token_ids=tuple(data), text=data.decode() if text is None else text)
    return [part.text for part in (splitter or TokenSplitter(BYTES)).split(chunk)]


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    """The tokens before have no text."""
    assert texts("aä€b".encode()) == ["a", "", "ä", "", "", "€", "b"]


def test_each_part_has_its_own_index_and_probability() -> None:
    """The token's; the choice is the chunk's."""
    chunk = StreamChunk(
        index=5, choice=2, token_ids=(97, 98), text="ab", logprobs=(TokenLogprobs(-1.0), TokenLogprobs(-2.0))
    )
    parts = TokenSplitter(BYTES).split(chunk)
    assert [(part.index, part.choice, part.token_ids, part.logprobs[0].own) for part in parts] == [
        (5, 2, (97,), -1.0),
        (6, 2, (98,), -2.0),
    ]


def test_a_chunk_without_tokens_stays_as_it_is() -> None:
    """Its text was held back, and its tokens were sent already."""
    splitter = TokenSplitter(BYTES)
    assert texts(b"ab", splitter=splitter, text="") == ["", ""]
    chunk = StreamChunk(index=2, text="ab")
    assert splitter.split(chunk) == [chunk]
    assert texts(b"cd", splitter=splitter) == ["c", "d"]


def test_text_that_was_held_back_comes_with_the_first_token_that_brings_it() -> None:
    """As much as is due; the rest stays with its own tokens."""
    splitter = TokenSplitter(BYTES)
    assert texts(b"ab", splitter=splitter, text="a") == ["a", ""]
    assert texts(b"cd", splitter=splitter, text="bcd") == ["bc", "d"]


@given(st.lists(st.binary(max_size=9), max_size=9))
def test_the_parts_joined_are_the_chunks_joined(pieces: list[bytes]) -> None:
    """Whatever the bytes are, and wherever they are split."""
    splitter, decoder = TokenSplitter(BYTES), codecs.getincrementaldecoder("utf-8")("replace")
    for data in pieces:
        text = decoder.decode(data)
        found = texts(data, splitter=splitter, text=text)
        assert "".join(found) == text
        assert len(found) == max(1, len(data))
