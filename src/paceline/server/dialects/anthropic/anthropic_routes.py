"""POST /v1/messages and /v1/messages/count_tokens. On the event loop; templates run and messages are parsed in threads."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from paceline.chat import Turn, next_turn, prepare_chat
from paceline.params import SamplingParams
from paceline.server.api_errors import ANTHROPIC_FORM, anthropic_error_event
from paceline.server.dialects.anthropic.anthropic_requests import (
    MESSAGE_DEFAULTS,
    MessageBody,
    ParsedMessages,
    TokenCountBody,
    parse_message_request,
)
from paceline.server.dialects.anthropic.message_events import MESSAGE_FRAMING, MessageEvents, MessageReply, message_body
from paceline.server.dialects.request_body import cap_warnings
from paceline.server.dialects.running_chat import count_prompt_tokens, start_chat
from paceline.server.json_bodies import ANTHROPIC_ERRORS, ANTHROPIC_STREAMS, json_response
from paceline.server.media_input.request_media import RequestMedia, known_attachment
from paceline.server.routes import EarlyStream, RouteFacts, Routes
from paceline.server.running_request import run_in_turn
from paceline.server.service import Service
from paceline.server.sse import EventStream, named_event

_EARLY: Final = EarlyStream(framing=MESSAGE_FRAMING, error_event=lambda body: named_event(b"error", body))


def routes() -> Routes:
    """Return the routes /v1/messages and /v1/messages/count_tokens."""
    router = Routes(RouteFacts(errors=ANTHROPIC_FORM, model="required"), tags=["Anthropic"])

    @router.post(
        "/v1/messages", early=_EARLY, summary="Generate the next message of a conversation", responses=ANTHROPIC_STREAMS
    )
    async def messages(body: MessageBody, request: Request) -> Response:
        """Generate the assistant's next message, as Anthropic's endpoint; with `stream` as server-sent events."""
        service = Service.of(request.scope)
        base, streaming = service.sampling(MESSAGE_DEFAULTS), bool(body.stream)
        media = await service.request_media(body.messages, in_chat=True)
        parsed = await asyncio.to_thread(_parsed, service, body, base, media)
        running = await start_chat(
            service,
            request,
            lambda: _turn(service, parsed),
            parsed.chat,
            parsed.params,
            service.options(request, body.model),
            streaming=streaming,
        )
        reply = MessageReply(
            id=f"msg_{running.request_id}",
            model=body.model or service.names[0],
            num_prompt=len(running.prompts[0]),
            max_tokens=parsed.params.max_tokens,
            stops=parsed.stops,
            shows_thinking=parsed.shows_thinking,
            warnings=(*parsed.warnings, *running.warnings),
        )
        if streaming:
            events = MessageEvents(reply, counts_pings=not _is_claude_code(request))
            return EventStream(
                running,
                events,
                failure=anthropic_error_event,
                opening=events.opening(),
                done=b"",
                framing=MESSAGE_FRAMING,
                heartbeat=events.heartbeat,
            )
        async with running:
            completion = await running.collect()
        return Response(await asyncio.to_thread(message_body, reply, completion), media_type="application/json")

    @router.post("/v1/messages/count_tokens", summary="Count a conversation's tokens", responses=ANTHROPIC_ERRORS)
    async def count_tokens(body: TokenCountBody, request: Request) -> Response:
        """Count the tokens of a conversation's prompt, with its tools, and generate nothing."""
        service = Service.of(request.scope)
        service.check_accepting()
        chat_format, media = service.chat_format(), await service.request_media(body.messages, in_chat=True)

        def counted() -> tuple[int, tuple[str, ...]]:
            parsed = _parsed(service, body, SamplingParams(), media)
            options = service.chat_options(parsed.chat)
            chat = prepare_chat(chat_format, _turn(service, parsed), options, parsed.params)
            num_tokens = count_prompt_tokens(service.engine(), chat.prompt(chat_format.tokenizer))
            return num_tokens, (*parsed.warnings, *cap_warnings(chat.warnings))

        num_tokens, warnings = await run_in_turn(service, request, counted, service.options(request))
        return json_response({"input_tokens": num_tokens, **({"warnings": warnings} if warnings else {})})

    return router


def _is_claude_code(request: Request) -> bool:
    """Return whether a client leaves a stream that has only pings for five minutes."""
    return request.headers.get("user-agent", "").startswith("claude-cli/")


def _parsed(service: Service, body: TokenCountBody, base: SamplingParams, media: RequestMedia) -> ParsedMessages:
    settings = service.settings
    parsed = parse_message_request(
        body, base, service.template_variables, settings.reasoning_format, media, strict=settings.strict_fields
    )
    if body.model is None or body.model in service.known_names:
        return parsed
    warning = f"model: the one model here is {service.names[0]!r}; it was used"
    return replace(parsed, warnings=(*parsed.warnings, warning))


def _turn(service: Service, parsed: ParsedMessages) -> Turn:
    """Return the turn; an assistant's last message is continued, as Anthropic has it."""
    prefills = service.settings.prefill_assistant is not False
    return next_turn(parsed.conversation, prefills=prefills, read_part=known_attachment)
