"""GET and DELETE /v1/stream, POST /v1/streams/lookup: streams of requests with an X-Conversation-Id, read again or ended.

Each API key sees its own streams only. On the event loop.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from paceline.server.api_errors import DEFAULT_RETRY_S, OPENAI_FORM, ApiError, ApiException, invalid_request
from paceline.server.json_bodies import OPENAI_ERRORS, Responses
from paceline.server.request_context import RequestContext
from paceline.server.resumable_streams import MAX_ID_BYTES, ResumableStream, ResumableStreams
from paceline.server.routes import RouteFacts, Routes
from paceline.server.sse import LOST, StreamReplay

_MAX_IDS = 10_000  # of one lookup
_EVENTS: Responses = {200: {"description": "The stream's bytes", "content": {"text/event-stream": {}}}, **OPENAI_ERRORS}

ConversationId = Annotated[str, Query(max_length=MAX_ID_BYTES, description="The request's X-Conversation-Id")]
Offset = Annotated[str, Query(alias="from", max_length=20, description="The number of bytes that are known already")]


_LOADING = ApiError(
    503, "unavailable_error", "loading", "Stream owner model is loading, retry later", retry_after_s=DEFAULT_RETRY_S
)


class LookupBody(BaseModel):
    """Conversations to look up."""

    conversation_ids: list[str] = Field(default=[], max_length=_MAX_IDS)


def routes(streams: ResumableStreams) -> Routes:
    """Return the routes, which do not wake a sleeping engine."""
    router = Routes(RouteFacts(errors=OPENAI_FORM), tags=["llama-server"], responses=OPENAI_ERRORS)

    @router.get("/v1/stream", summary="Read a stream again, and on", responses=_EVENTS)
    async def read(request: Request, conv_id: ConversationId = "", offset: Offset = "") -> Response:
        """Send a conversation's stream from a byte on, and what is still to come of it."""
        owner = RequestContext.of(request.scope).key_digest
        stream = streams.find(owner, _required(conv_id))
        if streams.is_awaited(owner, conv_id):
            raise ApiException(_LOADING)
        if stream is None:
            raise invalid_request("Stream not found or expired", "conv_id", "stream_not_found", status=404)
        start = _parse_offset(offset)
        if start < stream.dropped_bytes:
            raise ApiException(LOST)
        return StreamReplay(stream, start)

    @router.delete("/v1/stream", summary="End a stream", status_code=204)
    async def end(request: Request, conv_id: ConversationId = "") -> Response:
        """Cancel a conversation's request if it runs, and forget its stream. 204 also where there is none."""
        streams.discard(RequestContext.of(request.scope).key_digest, _required(conv_id))
        return Response(status_code=204)

    @router.post("/v1/streams/lookup", summary="Which conversations have a stream")
    async def lookup(body: LookupBody, request: Request) -> list[dict[str, Any]]:
        """List the streams of these conversations, and of those whose id is one of these, `::` and more."""
        found = streams.lookup(RequestContext.of(request.scope).key_digest, body.conversation_ids)
        return [_described(stream) for stream in found]

    return router


def _required(conversation_id: str) -> str:
    if not conversation_id:
        raise invalid_request("Missing conversation id: conv_id must be given in the query", "conv_id")
    return conversation_id


def _parse_offset(text: str) -> int:
    if text and not (text.isascii() and text.isdigit()):
        raise invalid_request(f"Invalid 'from' offset: {text!r}", "from")
    return int(text or "0")


def _described(stream: ResumableStream) -> dict[str, Any]:
    return {
        "conversation_id": stream.conversation_id,
        "is_done": stream.is_done,
        "total_bytes": stream.total_bytes,
        "started_at": stream.started_at,
        "completed_at": stream.completed_at,
    }
