"""Requests whose response can be resumed, known by their conversation before there is a response."""

from __future__ import annotations

from contextlib import ExitStack

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.server.api_errors import ApiException
from paceline.server.request_context import RequestContext
from paceline.server.resumable_streams import ResumableStreams, conversation_id_of


class AwaitedStreams:
    """Register requests with X-Conversation-Id from their headers on: a client that ends such a stream ends the request.

    However long its body, its images or its prompt take until the stream is there.
    """

    def __init__(self, app: ASGIApp, streams: ResumableStreams) -> None:
        self._app, self._streams = app, streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        with ExitStack() as waiting:
            if scope["type"] == "http" and scope["method"] == "POST":
                self._begin(scope, waiting)
            await self._app(scope, receive, send)

    def _begin(self, scope: Scope, waiting: ExitStack) -> None:
        try:
            conversation_id = conversation_id_of(Request(scope))
        except ApiException:
            return  # its route says what is wrong
        if conversation_id is not None:
            context = RequestContext.of(scope)
            waiting.enter_context(self._streams.waiting(context.key_digest, conversation_id, context.discard))
            context.stop_waiting = waiting.close
