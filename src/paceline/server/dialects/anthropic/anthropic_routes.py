"""Anthropic's messages: bodies, their mapping to a chat, routes, and responses whole and as events.

Messages, tools and blocks are checked by `anthropic_messages`; its errors name the place. On the event loop; bodies are parsed
and templates run in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from pydantic import Field, SkipValidation
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from paceline import validation
from paceline.chat import ChatChunk, ChatCompletion, ChatOptions, MessageDelta, ParsedMessage, Turn, next_turn
from paceline.errors import InvalidParams, InvalidType
from paceline.params import SamplingParams
from paceline.sampling_table import API_DEFAULTS
from paceline.server.api_errors import ApiError, ApiException, ErrorForm
from paceline.server.dialects.anthropic.anthropic_messages import conversation_of, tool_choice_of, tools_of
from paceline.server.dialects.dialect import (
    ChatGeneration,
    DialectReply,
    RunningChat,
    count_chat_tokens,
    model_warning,
    serve,
)
from paceline.server.dialects.request_body import (
    FieldRules,
    RequestBody,
    Unchecked,
    cap_warnings,
    check_fields,
    checked_list,
    checked_object,
    enforceable,
    optional,
    warned,
    without_empty_texts,
    without_fractions,
)
from paceline.server.json_bodies import LLAMA_STREAMS, Responses, json_response
from paceline.server.request_media import RequestMedia, known_attachment
from paceline.server.routes import EarlyStream, RouteFacts, Routes
from paceline.server.service import Service
from paceline.server.sse import NAMED_SSE, EventWriter, Framing, named_event
from paceline.streaming import FinishReason, Usage

_WITHOUT_EFFECT = frozenset(
    {
        "container", "context_management", "diagnostics", "inference_geo", "mcp_servers", "metadata", "service_tier",
        "speed", "user_profile_id", "workspace_id",
    }
)  # fmt: skip


class TokenCountBody(RequestBody):
    """The body of /v1/messages/count_tokens."""

    rules: ClassVar[FieldRules] = FieldRules(without_effect=_WITHOUT_EFFECT)

    model: str | None = optional("Any name is taken for the one model, with a warning.", max_length=512)
    messages: Annotated[list[dict[str, Any]], SkipValidation] = Field(
        description="Each with a role (user, assistant, system) and a content: a text, or a list of blocks of the types text, "
        "image, document, thinking, tool_use and tool_result; blocks of other types become text."
    )
    system: Unchecked[str | list[dict[str, Any]]] = optional("A text, or a list of text blocks.")
    tools: Unchecked[list[dict[str, Any]]] = optional(
        "Functions that the model may call: name, description, input_schema. Tools of Anthropic's servers are left "
        "out, with a warning."
    )
    tool_choice: Unchecked[dict[str, Any]] = optional(
        '{"type": "auto" | "any" | "tool" | "none"}, with name for a tool, and disable_parallel_tool_use.'
    )
    thinking: Unchecked[dict[str, Any]] = optional(
        '{"type": "enabled" | "adaptive" | "between_tools" | "disabled"}, with budget_tokens and display.'
    )
    output_config: Unchecked[dict[str, Any]] = optional('effort, and format: {"type": "json_schema", "schema": ...}.')
    output_format: Unchecked[dict[str, Any]] = optional("The older name of output_config's format.")
    thread: Unchecked[dict[str, Any]] = optional('{"type": "create"} is accepted; conversations are not kept.')
    cache_control: Unchecked[dict[str, Any]] = optional("Accepted; prefixes are cached by themselves.")
    chat_template_kwargs: dict[str, Any] | None = optional("paceline's own: variables of the template.")


class MessageBody(TokenCountBody):
    """The body of /v1/messages."""

    max_tokens: int = Field(
        ge=-1, le=2**31 - 1, description="Most tokens of the message, thinking included; -1: until the context is full."
    )
    stop_sequences: Unchecked[list[str]] = optional("Up to 256 texts, which end the message and are not part of it.")
    stream: bool | None = optional("Stream the message as server-sent events.")
    temperature: float | None = optional("0: the most likely token. 1 by default.", ge=0)
    top_p: float | None = optional("1 by default.", ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)


_MAX_STOPS, _MAX_STOP_CHARS = 256, 4096
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_THINKING_TYPES = ("enabled", "adaptive", "between_tools", "disabled")

TemplateVariables = Callable[[Mapping[str, Any], str | None], dict[str, Any]]
"""Completes a request's variables for the template and its effort, as `Service.template_variables`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedMessages:
    """A parsed body.

    Attributes:
        conversation: The messages, as `parse_messages` takes them.
        params: The sampling parameters.
        chat: Tools and template variables.
        shows_thinking: Whether the text of thinking is returned.
        warnings: Sentences for the client.
    """

    conversation: list[dict[str, Any]]
    params: SamplingParams
    chat: ChatOptions
    shows_thinking: bool = True
    warnings: tuple[str, ...] = ()


def parse_message_request(
    body: TokenCountBody,
    base: SamplingParams,
    complete_variables: TemplateVariables,
    reasoning_format: str,
    media: RequestMedia,
    *,
    strict: bool = False,
) -> ParsedMessages:
    """Parse a body. base: defaults; reasoning_format: the server's; media: reads its images; strict: refuse unknown fields.

    Raises `InvalidParams`, `InvalidType`, `Unsupported` and `ApiException`, which name the field.
    """
    warnings = [*body.field_warnings(strict=strict), *_thread_warnings(body.thread)]
    conversation = conversation_of(body.messages, body.system, media)
    offered = tools_of(body.tools, conversation.tool_changes, strict=strict)
    tool_choice, parallel, about_choice = tool_choice_of(body.tool_choice, offered, strict=strict)
    warnings += [*conversation.warnings, *offered.warnings, *about_choice]
    effort, schema, place = _parse_output(body.output_config, body.output_format, warnings, strict=strict)
    about_thinking: list[str] = []
    variables, budget, shows_thinking = _parse_thinking(body.thinking, about_thinking, strict=strict)
    changes: dict[str, Any] = {} if schema is None else {"json_schema": schema}
    if isinstance(body, MessageBody):
        changes["max_tokens"] = None if body.max_tokens == -1 else body.max_tokens
        changes["stop"] = _stops(body.stop_sequences)
        given = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k")}
        changes |= {name: value for name, value in given.items() if value is not None}
    params, relaxed = enforceable(place, base.replace(**changes))
    return ParsedMessages(
        conversation=conversation.messages,
        params=params,
        chat=ChatOptions(
            tools=offered.tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel,
            reasoning_format=reasoning_format,
            kwargs=complete_variables({**(body.chat_template_kwargs or {}), **variables}, effort),
            thinking_budget=budget,
        ),
        shows_thinking=shows_thinking,
        warnings=cap_warnings([*warnings, *relaxed, *about_thinking]),
    )


def _stops(stops: object) -> tuple[str, ...]:
    if stops is None:
        return ()
    stops = checked_list("stop_sequences", stops, "a list of texts")
    if len(stops) > _MAX_STOPS:
        raise InvalidParams(f"stop_sequences must have at most {_MAX_STOPS} texts, not {len(stops)}")
    for index, stop in enumerate(stops):
        size = len(validation.text(f"stop_sequences[{index}]", stop))
        if size > _MAX_STOP_CHARS:
            raise InvalidParams(f"stop_sequences[{index}] must have at most {_MAX_STOP_CHARS} characters, not {size}")
    return tuple(without_empty_texts(stops) or ())


def _thread_warnings(thread: object) -> list[str]:
    """Return the warning about a conversation that Anthropic's servers would keep.

    Raises `ApiException` for its continuation: because of the code in the details, Anthropic's packages then send the whole
    conversation again.
    """
    if thread is None:
        return []
    thread = checked_object("thread", thread, "an object with a type")
    kind = validation.choice("thread.type", thread.get("type"), ("create", "continue"))
    if kind == "create":
        return ["thread: this server keeps no conversations; send the whole conversation with the next message"]
    message = "thread.previous_message_id: this server keeps no conversations; send all messages, without thread"
    details = {"details": {"error_code": "thread_not_found"}}
    raise ApiException(ApiError(404, "not_found_error", "thread_not_found", message, param="thread", extra=details))


def _parse_thinking(thinking: object, warnings: list[str], *, strict: bool) -> tuple[dict[str, Any], int | None, bool]:
    """Return variables of the template, the most tokens of thinking, and whether its text is returned."""
    if thinking is None:
        return {}, None, True
    thinking = checked_object("thinking", thinking, "an object with a type")
    kind = validation.choice("thinking.type", thinking.get("type"), _THINKING_TYPES)
    warnings += check_fields(thinking, ("type", "budget_tokens", "display"), strict=strict, place="thinking.")
    if kind == "disabled":
        return {"enable_thinking": False}, None, True
    budget, display = thinking.get("budget_tokens"), thinking.get("display")
    if budget is not None:
        budget = validation.integer("thinking.budget_tokens", without_fractions(budget), 0, 2**31 - 1)
    if display is not None:
        display = validation.choice("thinking.display", display, ("summarized", "omitted", "updates"))
    return {"enable_thinking": True}, budget, display != "omitted"


def _parse_output(
    config: object, older_format: object, warnings: list[str], *, strict: bool
) -> tuple[str | None, Mapping[str, Any] | None, str]:
    """Return the effort of output_config, and the JSON schema of its format or of output_format, with the schema's place."""
    if config is not None and not isinstance(config, Mapping):
        raise InvalidType(f"output_config must be an object, not {type(config).__name__}")
    config = config or {}
    warnings += check_fields(config, ("effort", "format"), strict=strict, place="output_config.")
    effort = config.get("effort")
    if effort is not None:
        effort = validation.choice("output_config.effort", effort, _EFFORTS)
    place, wanted = "output_config.format", config.get("format")
    if wanted is None:
        place, wanted = "output_format", older_format
    if wanted is None:
        return effort, None, "output_config.format"
    wanted = checked_object(place, wanted, "an object with type and schema")
    warnings += check_fields(wanted, ("type", "schema"), strict=strict, place=f"{place}.")
    validation.choice(f"{place}.type", wanted.get("type"), ("json_schema",))
    return effort, checked_object(f"{place}.schema", wanted.get("schema"), "a JSON schema, an object"), place


def error_body(api_error: ApiError) -> dict[str, Any]:
    """Return Anthropic's error object, with the `details` by which its packages tell errors of one type apart."""
    status = error_status(api_error)
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error = {"type": kind, "message": _error_message(api_error)}
    details = api_error.extra.get("details")
    return {"type": "error", "error": error if details is None else {**error, "details": details}}


def _error_message(api_error: ApiError) -> str:
    """Return the message. For a prompt that is too long it begins as programs expect it, which then shorten their prompt."""
    count, most = api_error.extra.get("n_prompt_tokens"), api_error.extra.get("n_ctx")
    if api_error.type != "exceed_context_size_error" or count is None or most is None:
        return api_error.message
    more = "; the prompt has at least so many" if "n_prompt_tokens_counted" in api_error.extra else ""
    return f"prompt is too long: {count} tokens > {most} maximum{more}"


def error_status(api_error: ApiError) -> int:
    """Return the status in Anthropic's API, in which 429 is a caller's own limit and 529 a server without room."""
    return {429: 529, 501: 400}.get(api_error.status, api_error.status)


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


ANTHROPIC_FORM: Final = ErrorForm(error_body, error_status, ("/v1/messages",), b"request-id")

_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
ANTHROPIC_ERRORS: Final[Responses] = {
    "default": {
        "description": "An error in Anthropic's shape",
        "content": {"application/json": {"schema": _ANTHROPIC_ERROR}},
    }
}
"""Of Anthropic's routes."""

ANTHROPIC_STREAMS: Final[Responses] = {**LLAMA_STREAMS, **ANTHROPIC_ERRORS}
"""Of Anthropic's routes that can stream."""

MESSAGE_FRAMING = Framing(NAMED_SSE.media_type, NAMED_SSE.frame, named_event(b"ping", b'{"type":"ping"}'))
"""Named events, and an event as the ping."""

_PINGS_PER_DELTA = 4

BlockType = Literal["text", "thinking", "tool_use"]

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReply(DialectReply):
    """The response to one request.

    Attributes:
        id: The id of the message.
        model: The name that it reports.
        num_prompt: Tokens of the prompt.
        max_tokens: The request's limit.
        stops: The request's stop sequences.
        shows_thinking: Whether blocks of thinking have its text.
        counts_pings: Whether the client takes a ping for a sign of life.
        warnings: Sentences for the client.
    """

    id: str
    model: str
    num_prompt: int
    max_tokens: int | None
    stops: tuple[str, ...] = ()
    shows_thinking: bool = True
    counts_pings: bool = True
    warnings: tuple[str, ...] = ()

    def events(self) -> MessageEvents:
        """Return the encoder of the stream's events."""
        return MessageEvents(self)

    def whole(self, completion: ChatCompletion) -> bytes:
        """Encode a response that is not streamed."""
        (choice,) = completion.choices
        warnings = [*self.warnings, *([] if choice.warning is None else [str(choice.warning)])]
        body = {
            **self.head(_blocks(self, choice.message)),
            **self.ending(choice.finish_reason, choice.stop, completion.usage),
            "usage": usage_of(completion.usage),
        }
        return _encode(body | warned(warnings))

    def head(self, content: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """Return the members that a message begins with."""
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}

    def ending(self, reason: FinishReason, stop: str | int | None, usage: Usage) -> dict[str, Any]:
        """Return stop_reason and stop_sequence."""
        sequence = stop if isinstance(stop, str) and stop in self.stops else None
        return {"stop_reason": self._stop_reason(reason, sequence, usage), "stop_sequence": sequence}

    def _stop_reason(self, reason: FinishReason, sequence: str | None, usage: Usage) -> str:
        if reason is FinishReason.LENGTH:
            is_full = self.max_tokens is None or usage.completion_tokens < self.max_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens"
        if reason is FinishReason.REPETITION:
            return "max_tokens"
        if sequence is not None:
            return "stop_sequence"
        return "tool_use" if reason is FinishReason.TOOL_CALLS else "end_turn"


def usage_of(usage: Usage) -> dict[str, int]:
    """Return Anthropic's usage: tokens from the cache are not among the input tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _blocks(reply: MessageReply, message: ParsedMessage) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning_content:
        thinking = message.reasoning_content if reply.shows_thinking else ""
        blocks.append({"type": "thinking", "thinking": thinking, "signature": ""})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    return blocks + [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _input_of(call.arguments)}
        for call in message.tool_calls
    ]


def _input_of(arguments: str) -> dict[str, Any]:
    """Return arguments as an object; of arguments that were cut off, the complete members."""
    try:
        found = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class MessageEvents(EventWriter):
    """The events of one message. Blocks follow each other, each begun and ended."""

    errors, framing, done = ANTHROPIC_FORM, MESSAGE_FRAMING, b""

    def __init__(self, reply: MessageReply) -> None:
        self._reply = reply
        self._num_pings = 0
        self._index = -1
        self._open: tuple[BlockType, int] | None = None  # with the number of the call
        self._usage = Usage(prompt_tokens=reply.num_prompt)

    def failure(self, api_error: ApiError) -> bytes:
        """Return the event that reports an error."""
        return named_event(b"error", super().failure(api_error))

    def opening(self) -> bytes:
        """Return the message's start. The end corrects its counts: the number of cached tokens is not known yet."""
        reply = self._reply
        message = {**reply.head(), "stop_reason": None, "stop_sequence": None, "usage": usage_of(self._usage)}
        if reply.warnings:
            message["warnings"] = reply.warnings
        return _event("message_start", message=message)

    def heartbeat(self) -> bytes:
        """Return the ping, during the prefill with an event that changes nothing for clients that count no pings."""
        self._num_pings += 1
        if self._reply.counts_pings or self._index >= 0 or self._num_pings % _PINGS_PER_DELTA:
            return MESSAGE_FRAMING.ping
        delta = {"stop_reason": None, "stop_sequence": None}
        return MESSAGE_FRAMING.ping + _event("message_delta", delta=delta, usage=usage_of(self._usage))

    def __call__(self, prompt: int, chunk: ChatChunk) -> list[bytes]:  # noqa: ARG002 - there is one prompt
        """Return the events of a chunk."""
        events = [event for delta in chunk.deltas for event in self._delta(delta)]
        if chunk.finish_reason is not None:
            events += self._end(chunk, chunk.finish_reason)
        return events

    def _delta(self, delta: MessageDelta) -> list[bytes]:
        call = delta.tool_call
        if call is not None:
            piece = {"type": "input_json_delta", "partial_json": call.arguments}
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            return [*self._turn_to("tool_use", call.index, block), *self._pieces(piece, call.arguments)]
        if delta.reasoning_content:
            begun = self._turn_to("thinking", 0, {"type": "thinking", "thinking": "", "signature": ""})
            piece = {"type": "thinking_delta", "thinking": delta.reasoning_content}
            return [*begun, *self._pieces(piece, delta.reasoning_content if self._reply.shows_thinking else "")]
        begun = self._turn_to("text", 0, {"type": "text", "text": ""})
        return [*begun, *self._pieces({"type": "text_delta", "text": delta.content}, delta.content)]

    def _pieces(self, piece: dict[str, Any], text: str) -> list[bytes]:
        return [_event("content_block_delta", index=self._index, delta=piece)] if text else []

    def _turn_to(self, kind: BlockType, number: int, block: dict[str, Any]) -> list[bytes]:
        """Return the events that end the open block and begin a block of this kind; none if it is open."""
        if self._open == (kind, number):
            return []
        closed = self._close()
        self._open, self._index = (kind, number), self._index + 1
        return [*closed, _event("content_block_start", index=self._index, content_block=block)]

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        kind, _ = self._open
        self._open = None
        # Clients expect a signature; there is nothing here that could verify one.
        signature = {"type": "signature_delta", "signature": ""}
        signed = [_event("content_block_delta", index=self._index, delta=signature)] if kind == "thinking" else []
        return [*signed, _event("content_block_stop", index=self._index)]

    def _end(self, chunk: ChatChunk, reason: FinishReason) -> list[bytes]:
        usage = chunk.usage or self._usage
        more = {} if chunk.warning is None else {"warnings": [*self._reply.warnings, str(chunk.warning)]}
        ending = self._reply.ending(reason, chunk.stop, usage)
        delta = _event("message_delta", delta=ending, usage=usage_of(usage), **more)
        return [*self._close(), delta, _event("message_stop")]


def _event(kind: str, **members: Any) -> bytes:
    return named_event(kind.encode(), _encode({"type": kind, **members}))


_EARLY = EarlyStream(framing=MESSAGE_FRAMING, error_event=lambda body: named_event(b"error", body))


ROUTES = Routes(RouteFacts(errors=ANTHROPIC_FORM, model="required"), tags=["Anthropic"])


@ROUTES.post(
    "/v1/messages", early=_EARLY, summary="Generate the next message of a conversation", responses=ANTHROPIC_STREAMS
)
async def messages(body: MessageBody, request: Request) -> Response:
    """Generate the assistant's next message, as Anthropic's endpoint; with `stream` as server-sent events."""
    return await serve(request, _parse(body, request))


async def _parse(body: MessageBody, request: Request) -> ChatGeneration:
    service = Service.of(request.scope)
    base, media = service.sampling(API_DEFAULTS["chat"]), await service.request_media(body.messages, in_chat=True)
    generation, _ = await asyncio.to_thread(_generation, service, request, body, base, media)
    return generation


@ROUTES.post(
    "/v1/messages/count_tokens", summary="Count a conversation's tokens", is_limited=False, responses=ANTHROPIC_ERRORS
)
async def count_tokens(body: TokenCountBody, request: Request) -> Response:
    """Count the tokens of a conversation's prompt, with its tools, and generate nothing."""
    service = Service.of(request.scope)
    service.check_accepting()
    service.chat_format()
    media = await service.request_media(body.messages, in_chat=True)
    make_generation = partial(_generation, service, request, body, SamplingParams(), media)
    num_tokens, warnings = await count_chat_tokens(request, make_generation, service.options(request))
    return json_response({"input_tokens": num_tokens, **warned(warnings)})


def _generation(
    service: Service, request: Request, body: TokenCountBody, base: SamplingParams, media: RequestMedia
) -> tuple[ChatGeneration, tuple[str, ...]]:
    """Return the generation that a body asks for, and the warnings about the body. In a thread."""
    settings, model = service.settings, body.model
    parsed = parse_message_request(
        body, base, service.template_variables, settings.reasoning_format, media, strict=settings.strict_fields
    )
    warnings = (*parsed.warnings, *model_warning(service, model))

    def make_turn() -> Turn:  # an assistant's last message is continued, as in Anthropic's API
        prefills = settings.prefill_assistant is not False
        return next_turn(parsed.conversation, prefills=prefills, read_part=known_attachment)

    def reply(running: RunningChat) -> MessageReply:
        return MessageReply(
            id=f"msg_{running.request_id}",
            model=model or service.names[0],
            num_prompt=len(running.prompts[0]),
            max_tokens=parsed.params.max_tokens,
            stops=tuple(parsed.params.stop),
            shows_thinking=parsed.shows_thinking,
            # Claude Code leaves a stream that has only pings for five minutes.
            counts_pings=not request.headers.get("user-agent", "").startswith("claude-cli/"),
            warnings=(*warnings, *running.warnings),
        )

    generation = ChatGeneration(
        params=parsed.params,
        options=service.options(request, model if isinstance(body, MessageBody) else None),
        streaming=isinstance(body, MessageBody) and bool(body.stream),
        reply=reply,
        make_turn=make_turn,
        chat=parsed.chat,
    )
    return generation, warnings
