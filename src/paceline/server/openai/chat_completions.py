"""POST /v1/chat/completions, for text. On the event loop; templates run and prompts are tokenised in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from paceline.chat import next_turn
from paceline.completion import Choice, Completion
from paceline.params import SamplingParams
from paceline.server.api_errors import naming_param, openai_error_event
from paceline.server.json_bodies import OPENAI_STREAMS, JsonRoute
from paceline.server.logprobs import ChatLogprob, chat_logprobs
from paceline.server.openai.openai_bodies import OpenAIChatBody
from paceline.server.openai.parsing import CHAT_DEFAULTS, parse_chat
from paceline.server.openai.responses import (
    FINISH_REASONS,
    ChoiceBase,
    ChoiceStream,
    ResponseOptions,
    prompt_extras,
    response_options_of,
    wants_prompt_logprobs,
    whole_response,
)
from paceline.server.running_request import start_request
from paceline.server.service import Service
from paceline.server.sse import EventStream
from paceline.streaming import StreamChunk, TokenLogprobs


def routes(service: Service) -> APIRouter:
    """Return the route."""
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

    @router.post("/chat/completions", summary="As /v1/chat/completions", responses=OPENAI_STREAMS)
    @router.post(
        "/v1/chat/completions", summary="Generate the next message of a conversation", responses=OPENAI_STREAMS
    )
    async def chat(body: OpenAIChatBody, request: Request) -> Response:
        """Generate the next message of a conversation, as OpenAI's endpoint; with `stream` as server-sent events."""
        base = service.sampling(CHAT_DEFAULTS)
        with naming_param(OpenAIChatBody.model_fields, kwargs="chat_template_kwargs"):
            parsed = await asyncio.to_thread(parse_chat, body, base, service.options(request))
            ids, stops = await asyncio.to_thread(_prompt, service, body)
            params = add_stops(parsed.params, stops)
            streaming = bool(body.stream)
            running_request = await start_request(service, request, [ids], params, parsed.options, streaming=streaming)
        options = response_options_of(
            service,
            body,
            parsed,
            running_request,
            id=f"chatcmpl-{running_request.request_id}",
            object="chat.completion.chunk" if streaming else "chat.completion",
            wants_prompt_logprobs=wants_prompt_logprobs(body, params),
        )
        if streaming:
            return EventStream(running_request, ChatStream(options), failure=openai_error_event)
        return await whole_response(running_request, options, chat_body)

    return router


def _prompt(service: Service, body: OpenAIChatBody) -> tuple[list[int], tuple[str, ...]]:
    """Return the prompt's token ids and the stop texts of the chat format."""
    turn = next_turn(
        body.messages,
        continues=body.continue_final_message,
        generates=body.add_generation_prompt,
        prefills=service.settings.prefill_assistant is True,
    )
    rendered = service.rendered(turn, body.chat_template_kwargs or {}, body.reasoning_effort)
    return service.chat_format().encode(rendered), rendered.stops


def add_stops(params: SamplingParams, stops: tuple[str, ...]) -> SamplingParams:
    """Return the params with these stops beside the request's own."""
    more = tuple(stop for stop in stops if stop not in params.stop)
    return params.replace(stop=(*params.stop, *more)) if more else params


class ChatMessage(msgspec.Struct):
    """The assistant's message."""

    content: str
    role: str = "assistant"
    refusal: None = None


class ChatDelta(msgspec.Struct):
    """A part of the assistant's message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of the tokens of a message or a part of it."""

    content: list[ChatLogprob]
    refusal: None = None


class ChatChoice(ChoiceBase, kw_only=True):
    """One choice of a response."""

    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatChunkChoice(ChoiceBase, kw_only=True):
    """One choice of an event."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


def chat_body(options: ResponseOptions, completions: Sequence[Completion]) -> bytes:
    """Encode a response that is not streamed, with the completion of the only prompt."""
    (completion,) = completions
    return options.whole(
        [_chat_choice(options, completion, choice) for choice in completion.choices], [completion.usage]
    )


def _chat_choice(options: ResponseOptions, completion: Completion, choice: Choice) -> ChatChoice:
    return ChatChoice(
        index=choice.index,
        message=ChatMessage(choice.text),
        logprobs=_chat_logprobs(options, choice.token_ids, choice.logprobs or ()),
        finish_reason=FINISH_REASONS[choice.finish_reason],
        stop_reason=UNSET if choice.stop is None else choice.stop,
        token_ids=choice.token_ids if options.token_ids else UNSET,
        **prompt_extras(options, 0, completion.prompt_logprobs or ()),
    )


def _chat_logprobs(
    options: ResponseOptions, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> ChatLogprobs | None:
    if options.num_top is None:
        return None
    return ChatLogprobs(chat_logprobs(options.token_pieces, ids, logprobs, options.num_top))


class ChatStream(ChoiceStream):
    """The events of a chat completion, which has one prompt, number 0.

    The first event of a choice has the role, the last one the finish reason; both have no text.
    """

    def __init__(self, options: ResponseOptions) -> None:
        super().__init__(options)
        self._begun: set[int] = set()

    def _choices(self, prompt: int, chunk: StreamChunk) -> list[ChatChunkChoice]:
        options, choices = self._options, []
        if chunk.choice not in self._begun:
            self._begun.add(chunk.choice)
            extras: dict[str, Any] = prompt_extras(options, prompt, self._scores[prompt].values)
            choices.append(ChatChunkChoice(index=chunk.choice, delta=ChatDelta(role="assistant", content=""), **extras))
        if chunk.text or self._reports_tokens(chunk):
            choices.append(
                ChatChunkChoice(
                    index=chunk.choice,
                    delta=ChatDelta(content=chunk.text),
                    logprobs=_chat_logprobs(options, chunk.token_ids, chunk.logprobs) if chunk.token_ids else None,
                    token_ids=chunk.token_ids if options.token_ids else UNSET,
                )
            )
        if chunk.finish_reason is not None and chunk.finish_reason in FINISH_REASONS:
            choices.append(
                ChatChunkChoice(
                    index=chunk.choice,
                    delta=ChatDelta(),
                    finish_reason=FINISH_REASONS[chunk.finish_reason],
                    stop_reason=UNSET if chunk.stop is None else chunk.stop,
                )
            )
        return choices
