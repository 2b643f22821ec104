"""Token ids of a conversation: kept if the next prompt begins with their text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.chat import ChatChoice, ChatRequest, ParsedMessage, RenderedPrompt
from paceline.chat.chat_request import TokenHistory
from paceline.params import SamplingParams
from paceline.streaming import FinishReason

TURN = 300


class MarkedTokenizer:
    """A byte a token, a control token for "|", and one token for "ab", which `encode_prompt` never uses."""

    def __init__(self, *, add_bos: bool = False) -> None:
        self.add_bos, self.bos = add_bos, 301
        self.inputs: list[Sequence[tuple[int, int]]] = []

    def encode_prompt(self, text: str, inputs: Sequence[tuple[int, int]]) -> list[int]:
        self.inputs.append(inputs)
        return [self.bos] * self.add_bos + [TURN if letter == "|" else ord(letter) for letter in text]

    def decode(self, ids: Sequence[int], *, special: bool) -> str:
        assert special
        return "".join({TURN: "|", 299: "ab"}.get(token_id) or chr(token_id) for token_id in ids)

    def is_control(self, token: int) -> bool:
        return token >= TURN


def request(text: str, ids: list[int], *inputs: tuple[int, int]) -> ChatRequest:
    return ChatRequest(RenderedPrompt(text, inputs=inputs), ids, SamplingParams())


def choice(ids: tuple[int, ...], text: str) -> ChatChoice:
    return ChatChoice(index=0, message=ParsedMessage(text), finish_reason=FinishReason.STOP, text=text, token_ids=ids)


def after_a_turn(tokenizer: Any) -> TokenHistory:
    history = TokenHistory()
    history.record(request("|q|", [TURN, 113, TURN]), [TURN, 113, TURN], choice((299,), "ab"), tokenizer)
    return history


@pytest.mark.parametrize("add_bos", [False, True])
def test_the_next_prompt_begins_with_the_tokens_that_were_computed(add_bos: bool) -> None:
    """Even if encoding would give others; a bos token before the rest is left out; inputs move along."""
    tokenizer: Any = MarkedTokenizer(add_bos=add_bos)
    history = after_a_turn(tokenizer)
    wanted = history.continued(request("|q|ab|next|", [1, 2, 3], (1, 2), (6, 10)), tokenizer)
    assert wanted.token_ids == [TURN, 113, TURN, 299, TURN, *b"next", TURN]
    assert tokenizer.inputs == [[(1, 5)]]


@pytest.mark.parametrize("text", ["|q|aB|next|", "|q|abc|next|", "|q|ab", "other"])
def test_another_beginning_is_encoded_anew(text: str) -> None:
    """If the template changed earlier turns, the text goes on without a control token, or nothing is new."""
    tokenizer: Any = MarkedTokenizer()
    wanted = after_a_turn(tokenizer).continued(request(text, [1, 2, 3]), tokenizer)
    assert wanted.token_ids == [1, 2, 3]


def test_text_that_is_not_of_its_tokens_is_forgotten() -> None:
    """A stop text cut it, or the prompt was truncated: the next turn begins anew."""
    tokenizer: Any = MarkedTokenizer()
    history = after_a_turn(tokenizer)
    history.record(request("|q|", [TURN, 113, TURN]), [TURN, 113, TURN], choice((299,), "a"), tokenizer)
    assert (history.token_ids, history.text) == ((), "")
    history.record(request("|q|", [TURN, 113, TURN]), [TURN], choice((299,), "ab"), tokenizer)
    assert (history.token_ids, history.text) == ((), "")
