"""The routes under /v1/engine of one model: what its engine does, and what may be set in a request to it."""

from __future__ import annotations

import asyncio
import math
from typing import Annotated

import msgspec
from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.scheduling.records import MAX_NODES
from paceline.scheduling.telemetry import MOST_TICKS
from paceline.server.api_errors import OPENAI_FORM
from paceline.server.engine_events.event_reader import EngineEvent, EventReader, engine_facts
from paceline.server.request_context import DisconnectWatcher, RequestContext
from paceline.server.routes import RouteFacts, Routes
from paceline.server.service import Service
from paceline.server.sse import NAMED_SSE, named_event, stream_start


def routes() -> Routes:
    """Return the routes."""
    router = Routes(RouteFacts(errors=OPENAI_FORM, model="required", loads_model=False), tags=["engine"])

    @router.get(
        "/v1/engine/events",
        summary="What the engine does, as server-sent events",
        response_class=Response,
        responses={200: {"description": "Events until the client leaves", "content": {"text/event-stream": {}}}},
    )
    async def events(
        request: Request,
        interval_ms: Annotated[
            int, Query(ge=100, le=60_000, description="Least time between two events, to 10 ms.")
        ] = 250,
        max_nodes: Annotated[int, Query(ge=0, le=MAX_NODES, description="Of the radix tree; 0: no tree.")] = 256,
        history: Annotated[int, Query(ge=0, le=MOST_TICKS, description="Past ticks in the first event.")] = 256,
    ) -> Response:
        """Stream a snapshot, then what changes, until the client leaves: slots, ticks, radix tree, queue, memory, latencies.

        The tenant of the key sees its own requests, and sums of the rest. Nothing is recorded while no client reads.
        """
        service = Service.of(request.scope)
        engine, tenant = service.engine(), RequestContext.of(request.scope).tenant
        reader = EventReader(
            service.engine_watch,
            engine_facts(engine, service.names[0], tenant),
            tenant=tenant,
            interval_s=interval_ms / 1000,
            max_nodes=max_nodes,
            num_past=history,
        )
        return EngineEvents(reader, service.settings.heartbeat_s)

    return router


class EngineEvents(Response):
    """A reader's events, until the client disconnects or the engine ends; comments while there are none."""

    media_type = "text/event-stream"

    def __init__(self, reader: EventReader, heartbeat_s: float) -> None:
        super().__init__()
        self._reader, self._heartbeat_s = reader, heartbeat_s if math.isfinite(heartbeat_s) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        del scope
        watcher = DisconnectWatcher(receive)
        sending = asyncio.create_task(self._send(send))
        watcher.on_disconnect(sending.cancel)
        try:
            await asyncio.wait((sending,))
        finally:
            watcher.close()
            sending.cancel()
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        with self._reader:
            await send(stream_start(NAMED_SSE))
            while True:
                event = await self._next()
                is_last = event is not None and event.name == "end"
                data = NAMED_SSE.ping if event is None else encode_event(event)
                await send({"type": "http.response.body", "body": data, "more_body": not is_last})
                if is_last:
                    return

    async def _next(self) -> EngineEvent | None:
        """Return the next event; None where it is time for a comment."""
        try:
            async with asyncio.timeout(self._heartbeat_s):
                return await self._reader.next()
        except TimeoutError:
            return None


def encode_event(event: EngineEvent) -> bytes:
    """Return an event as it is sent."""
    return named_event(event.name.encode(), msgspec.json.encode(event.members))
