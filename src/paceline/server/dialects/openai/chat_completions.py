"""POST /v1/chat/completions. On the event loop; templates run, prompts are tokenised and messages parsed in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from paceline.chat import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatOptions,
    MessageDelta,
    ParsedMessage,
    ToolCallDelta,
    Turn,
    next_turn,
    prepare_chat,
)
from paceline.params import SamplingParams
from paceline.server.api_errors import COMPLETE_FINISH_REASONS, OPENAI_FORM, naming_param, openai_error_event
from paceline.server.dialects.openai.openai_replies import (
    ChoiceBase,
    ChoiceStream,
    ResponseOptions,
    prompt_extras,
    response_options_of,
    wants_prompt_logprobs,
)
from paceline.server.dialects.openai.openai_requests import CHAT_DEFAULTS, OpenAIChatBody, ParsedRequest, parse_chat
from paceline.server.dialects.request_body import cap_warnings
from paceline.server.dialects.running_chat import ChatProgress, count_prompt_tokens, start_chat
from paceline.server.dialects.token_reports import ChatLogprob, TokenAligner, chat_logprobs
from paceline.server.json_bodies import OPENAI_ERRORS, OPENAI_STREAMS
from paceline.server.media_input.request_media import RequestMedia
from paceline.server.routes import EVENTS, RouteFacts, Routes
from paceline.server.running_request import run_in_turn
from paceline.server.service import Service
from paceline.server.sse import EventStream
from paceline.streaming import TokenLogprobs

_MAX_UNREAD_BYTES = 2**16  # of tokens that no text of a message has been found for


def routes() -> Routes:
    """Return the route."""
    router = Routes(RouteFacts(errors=OPENAI_FORM, model="required"), tags=["OpenAI"])

    @router.post("/chat/completions", early=EVENTS, summary="As /v1/chat/completions", responses=OPENAI_STREAMS)
    @router.post(
        "/v1/chat/completions",
        early=EVENTS,
        summary="Generate the next message of a conversation",
        responses=OPENAI_STREAMS,
    )
    async def chat(body: OpenAIChatBody, request: Request) -> Response:
        """Generate the next message of a conversation, as OpenAI's endpoint; with `stream` as server-sent events."""
        service = Service.of(request.scope)
        base = service.sampling(CHAT_DEFAULTS)
        streaming = bool(body.stream)
        with _naming_field(body):
            parsed = await asyncio.to_thread(_parse, service, body, base, service.options(request, body.model))
            media = await service.request_media(body.messages, in_chat=True)
            running = await start_chat(
                service,
                request,
                lambda: _turn(service, body, media),
                chat_options(service, body),
                parsed.params,
                parsed.options,
                streaming=streaming,
                reports_progress=streaming and body.return_progress is True,
            )
        options = response_options_of(
            service,
            body,
            replace(parsed, warnings=(*parsed.warnings, *running.warnings)),
            running.prompts,
            id=f"chatcmpl-{running.request_id}",
            object="chat.completion.chunk" if streaming else "chat.completion",
            wants_prompt_logprobs=wants_prompt_logprobs(body, parsed.params),
            shows_thinking=body.include_reasoning is not False,
            thinking_pieces=service.engine().tokenizer.pieces(True) if running.supports_thinking else (),
        )
        if streaming:
            return EventStream(running, ChatCompletionStream(options), failure=openai_error_event)
        async with running:
            completion = await running.collect()
        content = await asyncio.to_thread(chat_body, options, completion)
        return Response(content, media_type="application/json")

    @router.post(
        "/chat/completions/input_tokens", summary="As /v1/chat/completions/input_tokens", responses=OPENAI_ERRORS
    )
    @router.post(
        "/v1/chat/completions/input_tokens", summary="Count the tokens of a conversation", responses=OPENAI_ERRORS
    )
    async def input_tokens(body: OpenAIChatBody, request: Request) -> dict[str, Any]:
        """Count the tokens of the prompt that the body of a chat completion becomes; nothing is generated."""
        service = Service.of(request.scope)
        base = service.sampling(CHAT_DEFAULTS)
        with _naming_field(body):
            options = service.options(request, body.model)
            media = await service.request_media(body.messages, in_chat=True)
            count = partial(_count, service, body, base, options, media)
            num_tokens, warnings = await run_in_turn(service, request, count, options)
        counted = {"object": "response.input_tokens", "input_tokens": num_tokens}
        return counted | ({"warnings": warnings} if warnings else {})

    return router


def _naming_field(body: OpenAIChatBody) -> AbstractContextManager[None]:
    schema = "json_schema" if body.response_format is None else "response_format"
    return naming_param(OpenAIChatBody.model_fields, kwargs="chat_template_kwargs", json_schema=schema)


def _parse(service: Service, body: OpenAIChatBody, base: SamplingParams, options: Mapping[str, Any]) -> ParsedRequest:
    return parse_chat(body, base, options, service.engine().tokenizer, strict=service.settings.strict_fields)


def _count(
    service: Service, body: OpenAIChatBody, base: SamplingParams, others: Mapping[str, Any], media: RequestMedia
) -> tuple[int, tuple[str, ...]]:
    parsed = _parse(service, body, base, others)
    options = service.chat_options(chat_options(service, body))
    chat_format = service.chat_format()
    prepared = prepare_chat(chat_format, _turn(service, body, media), options, parsed.params)
    num_tokens = count_prompt_tokens(service.engine(), prepared.prompt(chat_format.tokenizer))
    return num_tokens, (*parsed.warnings, *cap_warnings(prepared.warnings))


def _turn(service: Service, body: OpenAIChatBody, media: RequestMedia) -> Turn:
    return next_turn(
        body.messages,
        continues=body.continue_final_message,
        generates=body.add_generation_prompt,
        prefills=service.settings.prefill_assistant is True,
        read_part=media.read_part,
    )


def chat_options(service: Service, body: OpenAIChatBody) -> ChatOptions:
    """Return the tools of a body and how its message is thought and rendered."""
    return ChatOptions(
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_format=body.reasoning_format or service.settings.reasoning_format,
        kwargs=service.template_variables(body.chat_template_kwargs or {}, body.reasoning_effort),
        thinking_budget=_budget(body),
        thinking_message=body.reasoning_budget_message or "",
    )


def _budget(body: OpenAIChatBody) -> int | None:
    """Return the most tokens of thinking that a body asks for; None where it leaves that to the server."""
    given = body.reasoning_budget_tokens
    wanted = body.thinking_budget_tokens if given is None else given
    return None if wanted == -1 else wanted


class FunctionCall(msgspec.Struct):
    """The function that a tool call names, or a part of it."""

    arguments: str
    name: str | UnsetType = UNSET


class MessageToolCall(msgspec.Struct):
    """A tool call of a message."""

    id: str
    function: FunctionCall
    type: str = "function"


class DeltaToolCall(msgspec.Struct):
    """A part of a tool call; id, type and name are in its first one."""

    index: int
    function: FunctionCall
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(msgspec.Struct):
    """The assistant's message. content: null beside tool calls where there is none."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MessageToolCall] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    """A part of the assistant's message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[DeltaToolCall] | UnsetType = UNSET


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of the tokens of a message or a part of it."""

    content: list[ChatLogprob]
    refusal: None = None


class ChatBodyChoice(ChoiceBase, kw_only=True):
    """One choice of a response."""

    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatChunkChoice(ChoiceBase, kw_only=True):
    """One choice of an event."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


def chat_body(options: ResponseOptions, completion: ChatCompletion) -> bytes:
    """Encode a response that is not streamed."""
    warnings = [str(choice.warning) for choice in completion.choices if choice.warning is not None]
    choices = (_chat_choice(options, completion, choice) for choice in completion.choices)
    return options.whole(
        choices, [completion.usage], warnings, sum(_num_reasoning(options, one) for one in completion.choices)
    )


def _num_reasoning(options: ResponseOptions, choice: ChatChoice) -> int:
    """Return the number of tokens that the text of a message's thinking has."""
    if not (options.thinking_pieces and choice.message.reasoning_content):
        return 0
    aligner = TokenAligner(options.thinking_pieces)
    aligner.add(choice.token_ids, ())
    return aligner.take(choice.message.reasoning_content)[0]


def _chat_choice(options: ResponseOptions, completion: ChatCompletion, choice: ChatChoice) -> ChatBodyChoice:
    return ChatBodyChoice(
        index=choice.index,
        message=_message(choice.message, shows_thinking=options.shows_thinking),
        logprobs=_chat_logprobs(options, choice.logprobs or ()),
        finish_reason=choice.finish_reason,
        stop_reason=UNSET if choice.stop is None else choice.stop,
        token_ids=choice.token_ids if options.token_ids else UNSET,
        **prompt_extras(options, 0, completion.prompt_logprobs or ()),
    )


def _message(message: ParsedMessage, *, shows_thinking: bool) -> ChatMessage:
    calls = [
        MessageToolCall(id=call.id, function=FunctionCall(call.arguments, call.name)) for call in message.tool_calls
    ]
    return ChatMessage(
        content=message.content if message.content or not calls else None,
        reasoning_content=(message.reasoning_content if shows_thinking else "") or UNSET,
        tool_calls=calls or UNSET,
    )


def _chat_logprobs(options: ResponseOptions, logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
    return None if options.num_top is None else ChatLogprobs(chat_logprobs(logprobs, options.num_top))


class ChatCompletionStream(ChoiceStream[ChatChunk]):
    """The events of a chat completion, which has one prompt, number 0.

    The first event of a choice has the role, the last one the finish reason; both have no text.
    """

    def __init__(self, options: ResponseOptions) -> None:
        super().__init__(options)
        self._begun: set[int] = set()
        pieces = options.thinking_pieces
        self._aligners = [TokenAligner(pieces, max_bytes=_MAX_UNREAD_BYTES) for _ in range(options.n)] if pieces else []
        self._events.num_reasoning = 0

    def __call__(self, prompt: int, chunk: ChatChunk) -> list[bytes]:
        """Return the JSON of the events of a chunk; for progress one without text, as llama-server sends it."""
        if not isinstance(chunk, ChatProgress):
            return super().__call__(prompt, chunk)
        begun = ChatChunkChoice(index=0, delta=ChatDelta(role="assistant", content=None))
        return [self._events.during_prefill(begun, chunk.prefill)]

    def _choices(self, prompt: int, chunk: ChatChunk) -> list[ChatChunkChoice]:
        options, choices = self._options, []
        if self._aligners:
            self._count_thinking(chunk)
        if chunk.choice not in self._begun:
            self._begun.add(chunk.choice)
            extras: dict[str, Any] = prompt_extras(options, prompt, self._scores[prompt].values)
            choices.append(
                ChatChunkChoice(index=chunk.choice, delta=ChatDelta(role="assistant", content=None), **extras)
            )
        shown = (one for one in chunk.deltas if options.shows_thinking or not one.reasoning_content)
        deltas = [_delta(one) for one in shown]
        if not deltas and self._reports_tokens(chunk):
            deltas = [ChatDelta(content="")]
        choices += [ChatChunkChoice(index=chunk.choice, delta=one) for one in deltas]
        if deltas and chunk.token_ids:  # with the first part that they brought
            first = choices[-len(deltas)]
            first.logprobs = _chat_logprobs(options, chunk.logprobs)
            first.token_ids = chunk.token_ids if options.token_ids else UNSET
        if chunk.finish_reason in COMPLETE_FINISH_REASONS:
            if chunk.warning is not None:
                self._events.warn(str(chunk.warning))
            choices.append(
                ChatChunkChoice(
                    index=chunk.choice,
                    delta=ChatDelta(),
                    finish_reason=chunk.finish_reason,
                    stop_reason=UNSET if chunk.stop is None else chunk.stop,
                )
            )
        return choices

    def _count_thinking(self, chunk: ChatChunk) -> None:
        aligner = self._aligners[chunk.choice]
        aligner.add(chunk.token_ids, ())
        for delta in chunk.deltas:
            if delta.tool_call is not None:
                aligner.clear()
                continue
            num_tokens, _ = aligner.take(delta.reasoning_content or delta.content)
            if delta.reasoning_content:
                self._events.num_reasoning = (self._events.num_reasoning or 0) + num_tokens


def _delta(delta: MessageDelta) -> ChatDelta:
    if delta.tool_call is not None:
        return ChatDelta(tool_calls=[_call_delta(delta.tool_call)])
    if delta.reasoning_content:
        return ChatDelta(reasoning_content=delta.reasoning_content)
    return ChatDelta(content=delta.content)


def _call_delta(call: ToolCallDelta) -> DeltaToolCall:
    if not call.name:
        return DeltaToolCall(call.index, FunctionCall(call.arguments))
    return DeltaToolCall(call.index, FunctionCall(call.arguments, call.name), call.id, "function")
