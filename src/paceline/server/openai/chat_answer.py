"""Answers of /v1/chat/completions, whole and in events. Pure; any thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from paceline.completion import Choice, Completion
from paceline.server.openai.answers import FINISH, AnyChoice, Events, PromptScores, Telling, prompt_extras
from paceline.server.openai.logprobs import ChatLogprob, chat_logprobs
from paceline.streaming import StreamChunk, TokenLogprobs


class Message(msgspec.Struct):
    """What the assistant said."""

    content: str
    role: str = "assistant"
    refusal: None = None


class Delta(msgspec.Struct):
    """What came of it."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatLogprobs(msgspec.Struct):
    """Of the tokens of a message, or of a part of it."""

    content: list[ChatLogprob]
    refusal: None = None


class ChatChoice(AnyChoice, kw_only=True):
    """One answer."""

    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatChunkChoice(AnyChoice, kw_only=True):
    """Part of one answer."""

    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


def chat_body(telling: Telling, completion: Completion) -> bytes:
    """The whole answer."""
    return telling.whole([_whole(telling, completion, choice) for choice in completion.choices], [completion.usage])


def _whole(telling: Telling, completion: Completion, choice: Choice) -> ChatChoice:
    return ChatChoice(
        index=choice.index,
        message=Message(choice.text),
        logprobs=_logprobs(telling, choice.token_ids, choice.logprobs or ()),
        finish_reason=FINISH[choice.finish_reason],
        stop_reason=UNSET if choice.stop is None else choice.stop,
        token_ids=choice.token_ids if telling.token_ids else UNSET,
        **prompt_extras(telling, 0, completion.prompt_logprobs or ()),
    )


def _logprobs(telling: Telling, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
    if telling.num_top is None:
        return None
    return ChatLogprobs(chat_logprobs(telling.spelt, ids, logprobs, telling.num_top))


class ChatStream:
    """Events of a streamed answer: called with each chunk as it comes, answers the JSON of events.

    The first event of a choice has the role, the last one the finish reason, and neither has text.
    """

    def __init__(self, telling: Telling) -> None:
        self._telling = telling
        self._events = Events(telling)
        self._scores = PromptScores(telling.num_scored(0))
        self._begun: set[int] = set()

    def __call__(self, prompt: int, chunk: StreamChunk) -> list[bytes]:
        """The events of a chunk; there is one prompt, number 0."""
        self._events.note(chunk)
        choices = [choice for one in self._scores.pass_on(chunk) for choice in self._choices(prompt, one)]
        events = [self._events.of(choice) for choice in choices]
        if chunk.finish_reason in FINISH and self._events.is_over:
            events[-1:] = self._events.ending(events[-1])
        return events

    def _choices(self, prompt: int, chunk: StreamChunk) -> list[ChatChunkChoice]:
        telling, choices = self._telling, []
        if chunk.choice not in self._begun:
            self._begun.add(chunk.choice)
            extras: dict[str, Any] = prompt_extras(telling, prompt, self._scores.values)
            choices.append(ChatChunkChoice(index=chunk.choice, delta=Delta(role="assistant", content=""), **extras))
        if chunk.text or (chunk.token_ids and (telling.token_ids or telling.num_top is not None)):
            choices.append(
                ChatChunkChoice(
                    index=chunk.choice,
                    delta=Delta(content=chunk.text),
                    logprobs=_logprobs(telling, chunk.token_ids, chunk.logprobs) if chunk.token_ids else None,
                    token_ids=chunk.token_ids if telling.token_ids else UNSET,
                )
            )
        if chunk.finish_reason is not None and chunk.finish_reason in FINISH:
            choices.append(
                ChatChunkChoice(
                    index=chunk.choice,
                    delta=Delta(),
                    finish_reason=FINISH[chunk.finish_reason],
                    stop_reason=UNSET if chunk.stop is None else chunk.stop,
                )
            )
        return choices
