"""The state of one HTTP request for middleware and routes: its context and its disconnection. On the event loop."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.server.api_errors import (
    FAILED_FINISH_REASONS,
    ApiError,
    ApiException,
    ClientDisconnected,
    api_error_of_finish,
)
from paceline.streaming import FinishReason, Usage

if TYPE_CHECKING:
    from paceline.params import SamplingParams
    from paceline.server.key_accounts import KeyAccount
    from paceline.server.resumable_streams import ResumableStream

_KEY = "paceline.request_context"
SERVICE: Final = "paceline.service"
"""The member of a request's scope that is the `Service` of its model."""


class EarlyResponse(Protocol):
    """The first events of a response during the load of its model."""

    def opening(self) -> bytes:
        """Return the events that begin the stream, framed."""

    def heartbeat(self) -> bytes:
        """Return the event that is sent while there is nothing else to send, framed."""

    def failure(self, api_error: ApiError) -> bytes:
        """Return the last events of a response that failed, framed."""


@dataclass(slots=True)
class RequestContext:
    """State of one HTTP request.

    Attributes:
        request_id: The value of X-Request-Id.
        tenant: The owner of its API key.
        is_operator: Whether it may change the server for all tenants.
        key_digest: The digest of its API key; empty if there are no keys.
        account: The account of its API key; None if there are no keys.
        traceparent: The W3C trace context for requests that follow from this one; None: there is no trace.
        operation: The GenAI operation: "chat", "text_completion" or "embeddings"; empty: none of these.
        params: Of its generations.
        submitted_ns: When its prompts were submitted, in Unix nanoseconds.
        parsed_ns: When the parsing of tool calls began and ended, in Unix nanoseconds.
        num_charged: Tokens that its account was charged so far.
        num_parts: Requests of the engine that it submitted.
        status: Of the response.
        finished: Finish reason and usage of each generation.
        resumable_stream: Keeps the bytes of its response; None: they are not kept.
        early_response: The events of a response that began before its model was loaded.
        is_discarded: Whether the client ended its stream before there was a stream.
        stop_waiting: Called when there is a stream, or will be none.
        waited_s: The time that it has waited for its turn.
        is_internal: Whether the server makes it for a batch, with the tenant and the account of the batch.
        fixed_priority: The priority of its generations, whatever its body has; None: the body's.
    """

    request_id: str
    tenant: str = ""
    is_operator: bool = False
    key_digest: bytes = b""
    account: KeyAccount | None = None
    traceparent: str | None = None
    operation: str = ""
    params: SamplingParams | None = None
    submitted_ns: int = 0
    parsed_ns: tuple[int, int] | None = None
    num_charged: int = 0
    num_parts: int = 0
    status: int = 0
    finished: list[tuple[FinishReason, Usage]] = field(default_factory=list)
    resumable_stream: ResumableStream | None = None
    early_response: EarlyResponse | None = None
    is_discarded: bool = False
    stop_waiting: Callable[[], object] = lambda: None
    waited_s: float = 0.0
    is_internal: bool = False
    fixed_priority: int | None = None

    @classmethod
    def of(cls, scope: Scope | MutableMapping[str, Any]) -> RequestContext:
        """Return the context of a scope; create it if no middleware has."""
        context = scope.get(_KEY)
        if not isinstance(context, RequestContext):
            context = scope[_KEY] = RequestContext(request_id="")
        return context

    def note_parsing(self, start_ns: int) -> None:
        """Note that tool calls were parsed from then until now."""
        self.parsed_ns = (start_ns if self.parsed_ns is None else self.parsed_ns[0], time.time_ns())

    def reserve(self, num_tokens: int) -> None:
        """Charge the account of the API key for prompt tokens that are to be computed. Raises `ApiException` (429)."""
        if self.account is not None:
            self.account.reserve(num_tokens)
            self.num_charged += num_tokens

    def charge(self, num_tokens: int) -> None:
        """Charge the account of the API key for computed tokens, if there is one."""
        if self.account is not None:
            self.account.charge(num_tokens)
            self.num_charged += num_tokens

    def settle(self) -> None:
        """Charge the account for the tokens that the request has computed in the end, and count its usage.

        Of a request that was not read to its end the charged tokens stay. A request that submitted nothing is not counted.
        """
        if self.account is not None:
            usages = [usage for reason, usage in self.finished if not _was_never_begun(reason, usage)]
            if len(self.finished) >= self.num_parts:
                computed = [usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens for usage in usages]
                self.charge(sum(computed) - self.num_charged)
            if self.finished or self.num_parts:
                self.account.count(usages)

    def discard(self) -> None:
        """Note that the request's stream is not wanted any more."""
        self.is_discarded = True

    def raise_if_discarded(self) -> None:
        """Raise `ApiException` if the request's stream is not wanted any more."""
        if self.is_discarded:
            raise ApiException(api_error_of_finish(FinishReason.CANCELLED))


def _was_never_begun(reason: FinishReason, usage: Usage) -> bool:
    """Return whether a generation failed in the queue."""
    return reason in FAILED_FINISH_REASONS and usage.ttft_s is None and usage.prefill_s == 0


class HttpMiddleware(ABC):
    """Base of middleware for HTTP requests. Other connections, as that of the lifespan, go to the application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve a connection."""
        serve = self._serve if scope["type"] == "http" else self._app
        return serve(scope, receive, send)

    @abstractmethod
    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class SpelledHeader(bytes):
    """A header name that is sent as spelled. HTTP ignores its case; uvicorn sends all others in lower case."""

    __slots__ = ()

    def lower(self) -> SpelledHeader:
        """Return itself: uvicorn calls this before it writes a name."""
        return self


class DisconnectWatcher:
    """Watches one request for the disconnection of its client. The rest of its body is lost."""

    def __init__(self, receive: Receive | None) -> None:
        """receive: the request's; None for a request that goes on without its client."""
        self.is_disconnected = False
        self._listeners: list[Callable[[], object]] = []
        self._task = None if receive is None else asyncio.create_task(self._watch(receive))

    def raise_if_disconnected(self) -> None:
        """Raise `ClientDisconnected` if the client has disconnected."""
        if self.is_disconnected:
            raise ClientDisconnected

    def on_disconnect(self, listener: Callable[[], object]) -> None:
        """Call `listener` when the client disconnects, at once if it already has."""
        if self.is_disconnected:
            listener()
        else:
            self._listeners.append(listener)

    def close(self) -> None:
        """Stop watching."""
        self._listeners.clear()
        if self._task is not None:
            self._task.cancel()

    async def _watch(self, receive: Receive) -> None:  # not the request, which would keep its body meanwhile
        with suppress(asyncio.CancelledError):
            while (await receive())["type"] != "http.disconnect":
                pass
            self.is_disconnected = True
            for listener in self._listeners:
                listener()


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, or until the client disconnects. Raises the errors of the coroutine."""
    watcher = DisconnectWatcher(receive)
    task = asyncio.create_task(work)
    watcher.on_disconnect(task.cancel)
    try:
        await asyncio.wait((task,))
    finally:
        watcher.close()
        task.cancel()
    if not task.cancelled():
        task.result()
