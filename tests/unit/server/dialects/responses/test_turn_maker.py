"""Truncation "auto": the fewest first messages are left out, and few turns are made to find them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.media_requests import request_media
from tests.unit.server.dialects.llama_server.letters import letters

from paceline.chat import ChatFormat, Turn
from paceline.params import SamplingParams
from paceline.sampling_table import API_DEFAULTS
from paceline.server.dialects.responses import responses_request
from paceline.server.dialects.responses.responses_request import ResponsesBody, parse_responses
from paceline.server.dialects.responses.responses_routes import _TurnMaker

BASE = SamplingParams(**API_DEFAULTS["chat"])


class TokenPerMessage:
    """A chat format with a token per message in its prompts."""

    tokenizer = SimpleNamespace(min_tokens=lambda text: len(text) // 2)

    def render_turn(self, turn: Turn, options: object) -> SimpleNamespace:
        return SimpleNamespace(text="x" * len(turn.messages))

    def encode(self, rendered: SimpleNamespace) -> list[int]:
        return [0] * len(rendered.text)


@pytest.mark.parametrize("num_kept", [1, 2, 700, 1999])
def test_few_turns_are_made_to_find_the_one_that_fits(monkeypatch: pytest.MonkeyPatch, num_kept: int) -> None:
    """As many as a bisection tries, and items become messages once."""
    counts = {"next_turn": 0, "messages_of": 0}

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return function(*args, **options)

        return call

    monkeypatch.setattr(responses_request, "next_turn", counted("next_turn", responses_request.next_turn))
    monkeypatch.setattr(responses_request, "messages_of", counted("messages_of", responses_request.messages_of))
    said = [{"role": "user", "content": str(number)} for number in range(2000)]
    body = ResponsesBody.model_validate({"input": said, "truncation": "auto", "max_output_tokens": 1})
    asked = parse_responses(body, BASE, {}, letters())
    engine: Any = SimpleNamespace(limits=SimpleNamespace(max_positions=num_kept + (1 if num_kept > 1 else 0)))
    turns = _TurnMaker(cast(ChatFormat, TokenPerMessage()), engine, request_media())
    turn = turns.make(asked, prefills=False)
    assert [message["content"] for message in turn.messages] == [
        [{"type": "text", "text": str(number)}] for number in range(2000 - num_kept, 2000)
    ]
    assert turns.warnings == [f"truncation: the first {2000 - num_kept} messages were left out, since they did not fit"]
    assert counts["messages_of"] == 1
    assert counts["next_turn"] <= 13
