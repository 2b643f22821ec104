"""The routes of /v1/responses. On the event loop; templates run and items are read in threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from paceline.chat import ChatFormat, Turn
from paceline.engine.prompts import Prompt
from paceline.sampling_table import API_DEFAULTS
from paceline.server.api_errors import OPENAI_FORM, ApiError, ApiException, invalid_request, naming_param
from paceline.server.dialects.dialect import (
    ChatGeneration,
    RunningChat,
    count_chat_tokens,
    count_prompt_tokens,
    model_warning,
    serve,
)
from paceline.server.dialects.request_body import warned
from paceline.server.dialects.responses.input_items import Item
from paceline.server.dialects.responses.response_output import (
    ResponseEvents,
    ResponseHead,
    early_events,
    echo_of,
    new_response_id,
)
from paceline.server.dialects.responses.responses_request import (
    RENAMED,
    ResponsesBody,
    ResponsesRequest,
    parse_responses,
    truncations,
)
from paceline.server.in_flight import ByteReservation
from paceline.server.json_bodies import OPENAI_ERRORS, OPENAI_STREAMS, large_json_response
from paceline.server.request_context import RequestContext
from paceline.server.request_media import RequestMedia
from paceline.server.response_store import EncodedItems, ResponseStore, StoredResponse
from paceline.server.routes import EarlyStream, RouteFacts, Routes
from paceline.server.service import KeptForClients, Service
from paceline.server.sse import NAMED_SSE

if TYPE_CHECKING:
    from paceline.engine import EngineClient

_NO_STORE = "this server keeps no responses: start it with --responses-store N, or send all items of the conversation"
_NOT_STORED = "store: this server keeps no responses; --responses-store N switches it on"


EVENTS_OF_RESPONSE: Final = EarlyStream(framing=NAMED_SSE, begin=early_events)


ROUTES = Routes(RouteFacts(errors=OPENAI_FORM, model="required"), tags=["OpenAI"])


@ROUTES.post("/responses", early=EVENTS_OF_RESPONSE, summary="As /v1/responses", responses=OPENAI_STREAMS)
@ROUTES.post("/v1/responses", early=EVENTS_OF_RESPONSE, summary="Generate a response", responses=OPENAI_STREAMS)
async def create(body: ResponsesBody, request: Request) -> Response:
    """Generate a response, as OpenAI's endpoint; with `stream` as server-sent events with names."""
    return await serve(request, _generation_of(body, request), _naming_fields(body))


async def _generation_of(body: ResponsesBody, request: Request) -> ChatGeneration:
    generation, _, _ = await _generation(body, request)
    return generation


@ROUTES.post(
    "/responses/input_tokens", summary="As /v1/responses/input_tokens", is_limited=False, responses=OPENAI_ERRORS
)
@ROUTES.post(
    "/v1/responses/input_tokens", summary="Count the tokens of an input", is_limited=False, responses=OPENAI_ERRORS
)
async def count(body: ResponsesBody, request: Request) -> dict[str, Any]:
    """Count the tokens of the prompt that a request for a response makes, and generate nothing."""
    with _naming_fields(body):
        generation, asked, turns = await _generation(body, request)
        num_tokens, about_chat = await count_chat_tokens(
            request, lambda: (generation, ()), generation.options, generation.num_bytes
        )
    warnings = [*asked.parsed.warnings, *turns.warnings, *about_chat]
    counted = {"object": "response.input_tokens", "input_tokens": num_tokens}
    return counted | warned(warnings)


async def _generation(body: ResponsesBody, request: Request) -> tuple[ChatGeneration, ResponsesRequest, _TurnMaker]:
    service = Service.of(request.scope)
    store = service.response_store
    asked, items, media, num_bytes = await _parse(service, store, body, request)
    turns, params = _TurnMaker(service.chat_format(), service.engine(), media), asked.parsed.params
    is_stored = store.is_on and body.store is not False

    def reply(running: RunningChat) -> ResponseHead:
        def keep(response: Item, output: Sequence[Item]) -> str | None:
            return store.put(running.tenant, response, before=items, output=output) if is_stored else None

        warnings = [*asked.parsed.warnings, *model_warning(service, body.model)]
        warnings += [_NOT_STORED] if body.store and not store.is_on else []
        early = RequestContext.of(request.scope).early_response
        begun = early if isinstance(early, ResponseEvents) else None
        return ResponseHead(
            id=new_response_id() if begun is None else begun.head.id,
            created_at=int(time.time()) if begun is None else begun.head.created_at,
            echo=echo_of(body, params, service.names[0] if body.model is None else body.model, stored=is_stored),
            pieces=service.engine().tokenizer.pieces(True),
            num_prompt=len(running.prompts[0]),
            num_top=params.logprobs,
            names=asked.tools.names,
            warnings=(*warnings, *turns.warnings, *running.warnings),
            clock=time.monotonic if body.timings_per_token else None,
            keep=keep,
            begun=begun,
        )

    generation = ChatGeneration(
        params=params,
        options=asked.parsed.options,
        streaming=bool(body.stream),
        reply=reply,
        make_turn=lambda: turns.make(asked, prefills=service.settings.prefill_assistant is True),
        chat=asked.chat_options,
        num_bytes=num_bytes,
        keeps_stream=True,
    )
    return generation, asked, turns


def _naming_fields(body: ResponsesBody) -> Any:
    others = {**RENAMED, **({"json_schema": "json_schema"} if body.text is None else {})}
    return naming_param(ResponsesBody.model_fields, **others)


async def _parse(
    service: Service, store: ResponseStore, body: ResponsesBody, request: Request
) -> tuple[ResponsesRequest, EncodedItems, RequestMedia, int]:
    """Parse a body in a thread, with the conversation before it; encode both there if they are to be stored.

    The last member is the number of bytes of both.
    """
    tenant = RequestContext.of(request.scope).tenant
    base, options = service.sampling(API_DEFAULTS["chat"]), service.options(request, body.model)
    before = _previous(store, tenant, body.previous_response_id)

    reservation = ByteReservation.current.get()
    num_bytes = 0 if reservation is None else reservation.num_bytes
    if before is not None:
        num_bytes += before.conversation.num_bytes

    def parse() -> tuple[ResponsesRequest, EncodedItems, int]:
        named = _references(body.input)
        asked = parse_responses(
            body,
            base,
            options,
            service.engine().tokenizer,
            strict=service.settings.strict_fields,
            reasoning_format=service.settings.reasoning_format,
            template_variables=service.template_variables,
            earlier=[] if before is None else before.conversation.decode(),
            find=store.find_items(tenant, named).get if named else lambda _: None,
        )
        is_stored = store.is_on and body.store is not False
        items = EncodedItems.of(asked.items) if is_stored or named else EncodedItems()
        size = num_bytes + (items.num_bytes if named else 0)  # what a name stands for is not in the body
        if not is_stored:
            return asked, EncodedItems(), size
        return asked, items if before is None else before.conversation + items, size

    asked, items, size = await asyncio.to_thread(parse)
    media = await service.request_media(asked.earlier, asked.items, in_chat=True)
    return replace(asked, chat_options=service.chat_options(asked.chat_options)), items, media, size


def _previous(store: ResponseStore, tenant: str, response_id: str | None) -> StoredResponse | None:
    if response_id is None:
        return None
    if not store.is_on:
        raise invalid_request(f"previous_response_id: {_NO_STORE}", "previous_response_id", "unsupported")
    found = store.get(tenant, response_id)
    if found is None:
        message = (
            f"previous_response_id: there is no response {response_id[:80]!r} here (any more); send its items instead"
        )
        raise invalid_request(message, "previous_response_id", "previous_response_not_found")
    return found


def _references(value: object) -> list[str]:
    items = value if isinstance(value, list) else []
    named = [
        item.get("id") for item in items if isinstance(item, dict) and item.get("type") in (None, "item_reference")
    ]
    return [item_id for item_id in named if isinstance(item_id, str)]


class _TurnMaker:
    """Makes the turn of a request, in a thread. warnings: about messages that were left out or changed."""

    def __init__(self, chat_format: ChatFormat, engine: EngineClient, media: RequestMedia) -> None:
        self.chat_format, self._engine, self._media = chat_format, engine, media
        self.warnings: list[str] = []

    def make(self, asked: ResponsesRequest, *, prefills: bool) -> Turn:
        """Return the turn. If truncation is "auto", the first messages that do not fit are left out."""
        messages = asked.messages(self._media)
        turn = asked.turn(messages, prefills=prefills)
        if asked.body.truncation != "auto" or self._fits(asked, turn):
            return turn
        numbers = truncations(messages)
        if not numbers:
            return turn
        low, high = 0, len(numbers) - 1  # the last one is tried in any case
        while low < high:  # turns are made one at a time: all of them would take quadratic memory
            middle = (low + high) // 2
            tried = asked.turn(messages, prefills=prefills, num_left_out=numbers[middle])
            low, high = (low, middle) if self._fits(asked, tried) else (middle + 1, high)
        number = numbers[low]
        self.warnings.append(f"truncation: the first {number} messages were left out, since they did not fit")
        return asked.turn(messages, prefills=prefills, num_left_out=number)

    def _fits(self, asked: ResponsesRequest, turn: Turn) -> bool:
        """Return whether a turn leaves room for the output, as truncated prompts do."""
        max_positions = self._engine.limits.max_positions
        half, most = max_positions // 2, asked.parsed.params.max_tokens
        reserved = half if most is None else min(most, half)
        rendered = self.chat_format.render_turn(turn, asked.chat_options)
        if turn.media is None:
            if self.chat_format.tokenizer.min_tokens(rendered.text) > max_positions - reserved:
                return False
            prompt: Prompt = self.chat_format.encode(rendered)
        else:
            prompt = turn.media.segments(rendered.text, rendered.inputs, self.chat_format.tokenizer)
        return count_prompt_tokens(self._engine, prompt) <= max_positions - reserved


STORED_ROUTES = Routes(RouteFacts(errors=OPENAI_FORM), tags=["OpenAI"], responses=OPENAI_ERRORS)


def _stored(request: Request, response_id: str) -> StoredResponse:
    store = KeptForClients.of(request.scope).response_store
    found = store.get(RequestContext.of(request.scope).tenant, response_id)
    if found is None:
        raise _not_found(store, response_id)
    return found


@STORED_ROUTES.get("/v1/responses/{response_id}", summary="A stored response")
async def retrieve(response_id: str, request: Request, *, stream: bool = False) -> Response:
    """Return a stored response; 404 if the API key's tenant has no such response."""
    found = _stored(request, response_id)
    if stream:
        raise invalid_request("stream: stored responses are whole, and not streamed again", "stream", "unsupported")
    return Response(found.body, media_type="application/json")


@STORED_ROUTES.delete("/v1/responses/{response_id}", summary="Delete a stored response")
async def delete(response_id: str, request: Request) -> dict[str, Any]:
    """Delete a stored response. Responses that continue it keep its items."""
    store = KeptForClients.of(request.scope).response_store
    if not store.delete(RequestContext.of(request.scope).tenant, response_id):
        raise _not_found(store, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@STORED_ROUTES.get("/v1/responses/{response_id}/input_items", summary="What a stored response was made from")
async def input_items(
    response_id: str,
    request: Request,
    *,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """List the items of the conversation up to the input of a stored response, the latest first by default."""
    found = _stored(request, response_id)
    items = await asyncio.to_thread(found.input_items)
    return await large_json_response(_page(items if order == "asc" else items[::-1], after, limit))


def _page(items: list[Item], after: str | None, limit: int) -> dict[str, Any]:
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise invalid_request(f"after: the response has no input item {after[:80]!r}", "after")
    start = 0 if after is None else ids.index(after) + 1
    data = items[start : start + limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + limit < len(items),
    }


def _not_found(store: ResponseStore, response_id: str) -> ApiException:
    reason = "" if store.is_on else f": {_NO_STORE}"
    message = f"there is no response {response_id[:80]!r} here{reason}"
    return ApiException(ApiError(404, "not_found_error", "response_not_found", message, param="response_id"))
