"""Log-probabilities in both shapes."""

from __future__ import annotations

import math

import msgspec

from paceline.output import Vocabulary
from paceline.server.dialects.token_reports import LogprobColumnsBuilder, chat_logprobs, prompt_logprobs, spelling
from paceline.streaming import TokenLogprobs

SPELT = (b"a", b"bc", b"\xe2\x82", b"\xac", b"<s>", b"a")
SHOWN = (b"a", b"bc", b"\xe2\x82", b"\xac", b"", b"a")
ONE = TokenLogprobs(-1.0, (1, 0), (-0.5, -1.0))
named = Vocabulary(SHOWN, SPELT, frozenset()).with_texts


def test_the_offset_is_where_a_token_begins_in_the_text() -> None:
    """A character of several tokens counts once it is whole, a control token that is not shown not at all."""
    columns = LogprobColumnsBuilder(SHOWN, SPELT, 0).write([4, 1, 2, 3, 0], [ONE] * 5)
    assert columns.text_offset == [0, 0, 2, 2, 3]
    assert columns.tokens == ["<s>", "bc", "bytes:\\xe2\\x82", "bytes:\\xac", "a"]


def test_the_offset_goes_on_from_one_chunk_to_the_next() -> None:
    """It is right across an unfinished character, too."""
    writer = LogprobColumnsBuilder(SHOWN, SPELT, 0)
    assert writer.write([1, 2], [ONE, ONE]).text_offset == [0, 2]
    assert writer.write([3, 0], [ONE, ONE]).text_offset == [2, 3]


def test_a_prompt_that_ends_within_a_character_is_a_text_by_itself() -> None:
    """Later text begins after the replacement character."""
    writer = LogprobColumnsBuilder(SHOWN, SPELT, 0)
    writer.write([1, 2], [None, ONE])
    writer.end_prompt()
    assert writer.write([0], [ONE]).text_offset == [len(b"bc\xe2\x82".decode("utf-8", "replace"))]


def test_the_most_likely_tokens_come_with_the_one_that_was_drawn() -> None:
    """Which may be one more than was asked for; of two that read the same the likelier counts."""
    columns = LogprobColumnsBuilder(SHOWN, SPELT, 2).write([3, 5], [ONE, TokenLogprobs(-3.0, (0, 5), (-0.1, -3.0))])
    assert columns.top_logprobs == [{"bc": -0.5, "a": -1.0, "bytes:\\xac": -1.0}, {"a": -0.1}]
    assert columns.token_logprobs == [-1.0, -3.0]
    assert LogprobColumnsBuilder(SHOWN, SPELT, 1).write([1], [ONE]).top_logprobs == [{"bc": -0.5}]


def test_a_prompts_first_token_has_no_probability() -> None:
    """Null in both columns."""
    columns = LogprobColumnsBuilder(SHOWN, SPELT, 1).write([0, 1], [None, ONE])
    assert columns.token_logprobs[0] is columns.top_logprobs[0] is None


def test_a_probability_of_zero_can_be_written_as_json() -> None:
    """It is -9999, since JSON has no infinity."""
    none = TokenLogprobs(-math.inf, (0,), (-math.inf,))
    assert LogprobColumnsBuilder(SHOWN, SPELT, 1).write([0], [none]).token_logprobs == [-9999.0]
    assert chat_logprobs([named(0, none)], 1)[0].top_logprobs[0].logprob == -9999.0


def test_chat_logprobs_have_the_bytes_of_every_token() -> None:
    """Characters of several tokens can be joined from them."""
    (entry,) = chat_logprobs([named(2, ONE)], 1)
    assert msgspec.json.decode(msgspec.json.encode(entry)) == {
        "token": "�",
        "logprob": -1.0,
        "bytes": [0xE2, 0x82],
        "top_logprobs": [{"token": "bc", "logprob": -0.5, "bytes": [98, 99]}],
    }


def test_prompt_logprobs_are_by_token_id() -> None:
    """Null for its first token; each has its own and the most likely tokens."""
    entry = prompt_logprobs([named(3, ONE)])
    assert entry[0] is None
    assert entry[1] == {
        "3": {"logprob": -1.0, "decoded_token": "�"},
        "1": {"logprob": -0.5, "decoded_token": "bc"},
        "0": {"logprob": -1.0, "decoded_token": "a"},
    }


def test_text_is_spelt_as_text() -> None:
    """Whatever its script."""
    assert spelling("né".encode()) == "né"
