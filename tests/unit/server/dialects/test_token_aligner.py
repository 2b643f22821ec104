"""Tokens of a text, found by their bytes."""

from __future__ import annotations

from paceline.output import Vocabulary
from paceline.server.dialects.token_reports import TokenAligner
from paceline.streaming import TokenLogprobs

PIECES = (b"<think>", b"Hm", b".", b"</think>", b"\n", b"Yes", b", ", "é".encode()[:1], "é".encode()[1:], b"Hm. ")
VOCABULARY = Vocabulary(PIECES, PIECES, frozenset())


def logprob(token: int) -> TokenLogprobs:
    return VOCABULARY.with_texts(token, TokenLogprobs(own=-token, token_ids=(token,), values=(-token,)))


def aligner(*ids: int, num_top: int | None = 0) -> TokenAligner:
    made = TokenAligner(PIECES, num_top)
    made.add(ids, [logprob(token) for token in ids])
    return made


def values(found: object) -> list[float]:
    return [-item.logprob for item in found]  # type: ignore[attr-defined]


def test_marks_between_texts_belong_to_none() -> None:
    """Neither before nor between."""
    tokens = aligner(0, 1, 2, 3, 4, 5, 2)
    count, logprobs = tokens.take("Hm.")
    assert (count, values(logprobs)) == (2, [1, 2])
    count, logprobs = tokens.take("Yes.")
    assert (count, values(logprobs)) == (2, [5, 2])


def test_a_text_in_pieces_has_each_token_once() -> None:
    """Also if a piece ends within a token, which counts for the first."""
    tokens = aligner(5, 6, 5)
    assert [values(tokens.take(text)[1]) for text in ("Y", "es,", " Y", "es")] == [[5], [6], [5], []]


def test_a_character_of_several_tokens_has_them_all() -> None:
    """Its bytes are theirs."""
    tokens = aligner(5, 7, 8, 2)
    assert tokens.take("Yesé.")[0] == 4


def test_tokens_may_come_while_texts_are_taken() -> None:
    """As in a stream, which may hold text back."""
    tokens = aligner(1)
    tokens.add([2, 5], [])
    assert tokens.take("Hm")[0] == 1
    assert tokens.take(".Yes") == (2, [])


def test_what_is_not_to_be_found_has_no_tokens() -> None:
    """And takes none away."""
    tokens = aligner(1, 2)
    assert tokens.take("Ha") == (0, [])
    assert tokens.take("") == (0, [])
    assert tokens.take("Hm.")[0] == 2
    tokens.add([5], [logprob(5)])
    tokens.clear()
    tokens.add([1], [logprob(1)])
    assert values(tokens.take("Hm")[1]) == [1]


def test_what_is_long_and_not_to_be_found_is_dropped() -> None:
    """If there is a limit, so that looking stays fast."""
    for max_bytes, count in ((None, 1), (8, 1), (2, 0)):
        tokens = TokenAligner(PIECES, None, max_bytes)
        tokens.add([5, 2], [])
        assert tokens.take("Ha") == (0, [])
        assert tokens.take("Yes") == (count, [])


def test_without_log_probabilities_tokens_are_counted() -> None:
    """None are reported."""
    assert aligner(1, 2, num_top=None).take("Hm.") == (2, [])
