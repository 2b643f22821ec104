"""Give each request the `Service` of the model that it names, which is loaded first. Innermost middleware, on the event loop.

A request names its model in the body, else in the query: ?model=NAME. ?autoload= decides whether this request loads the model.

The response of a stream begins while its model is loaded, with heartbeats until the model replies. An error then can no longer be
a status: it becomes the stream's error event, in the form of its route.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import CapacityError, EngineStopped, ModelChanged, ModelNotFound, ModelNotLoaded, PacelineError
from paceline.server.api_errors import (
    ApiError,
    ApiException,
    ClientDisconnected,
    ModelLoadFailed,
    api_error_of,
    invalid_request,
)
from paceline.server.flags import ModelPreset
from paceline.server.middleware.access import may_be_forged
from paceline.server.middleware.request_limits import BufferedReceive
from paceline.server.request_context import SERVICE, DisconnectWatcher, EarlyResponse, HttpMiddleware, RequestContext
from paceline.server.resumable_streams import conversation_id_of
from paceline.server.router.routed_models import RoutedModels
from paceline.server.routes import EarlyStream, RouteFacts, error_response, facts_of
from paceline.server.service import Service
from paceline.server.settings import ServerSettings
from paceline.server.sse import stream_start

_log = logging.getLogger("paceline.server")

_TRUE: Final = ("true", "1")


class NamedModel(msgspec.Struct):
    """The fields of a body that are read before its model is known; name: Ollama's older word for model."""

    model: Any = None
    name: Any = None
    stream: Any = None


class ModelDispatch(HttpMiddleware):
    """Loads the model that a request names, and gives the request its `Service`, unless the route needs none."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, models: RoutedModels) -> None:
        super().__init__(app)
        self._settings, self._models = settings, models

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        facts, query = facts_of(scope), parse_qs(scope["query_string"].decode("latin-1"))
        if facts is None or facts.model == "none" or (facts.model == "named" and "model" not in query):
            await self._app(scope, receive, send)
            return
        try:
            await self._dispatch(facts, query, scope, receive, send)
        except (PacelineError, ApiException) as error:
            await error_response(routing_error(error), scope)(scope, receive, send)

    async def _dispatch(
        self, facts: RouteFacts, query: dict[str, list[str]], scope: Scope, receive: Receive, send: Send
    ) -> None:
        body = None if scope["method"] in ("GET", "HEAD") else await _whole_body(receive)
        fields = NamedModel() if body is None else _named_model(body)
        name = fields.model or fields.name or query.get("model", [""])[0]
        if not isinstance(name, str):
            raise invalid_request("model must be a text, the name of a model; GET /models lists them", "model")
        if not name:
            message = "model name is missing from the request: give model in the body, or ?model=NAME"
            raise invalid_request(message, "model", "model_missing")
        preset = self._models.preset(name)
        if body is None and (ready := self._models.ready(preset.name)) is not None:
            scope[SERVICE] = ready
            await self._app(scope, receive, send)  # reading neither wakes a model nor keeps it loaded
            return
        if body is None and may_be_forged(scope["headers"]):
            raise ModelNotLoaded(
                f"the model {preset.name!r} is not loaded, and a GET request from a browser does not load it unless it "
                "comes from this server's own page; send the header X-Requested-With, or load the model with POST /models/load"
            )
        loads = self._settings.models_autoload and facts.loads_model
        if "autoload" in query:
            loads = query["autoload"][0].lower() in _TRUE
        early = (
            BegunStream(send, scope, facts.early, preset.name) if facts.early is not None and fields.stream else None
        )
        replay = BufferedReceive(body or b"", receive)
        del body  # the application releases it
        async with AsyncExitStack() as stack:
            try:
                enter = partial(self._enter, preset, stack, loads=loads)
                scope[SERVICE] = await self._entered(enter, preset.settings.heartbeat_s, scope, receive, early)
                await self._app(scope, replay, send if early is None else early)
            except Exception as error:
                if early is None or not early.waits:
                    raise
                if not isinstance(error, PacelineError | ApiException):
                    _log.exception("request %s: internal server error", RequestContext.of(scope).request_id)
                await early.fail(routing_error(error))

    async def _entered(
        self,
        enter: Callable[[], Coroutine[Any, Any, Service]],
        heartbeat_s: float,
        scope: Scope,
        receive: Receive,
        early: BegunStream | None,
    ) -> Service:
        """Wait for the model, with heartbeats. A disconnection ends the wait, unless the stream can be resumed."""
        conversation_id = None if early is None else conversation_id_of(HttpRequest(scope))
        watcher = DisconnectWatcher(receive if conversation_id is None else None)
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watcher.on_disconnect(gone.cancel)
        with ExitStack() as waiting:
            if conversation_id is not None:
                owner = RequestContext.of(scope).key_digest
                waiting.enter_context(self._models.streams.waiting(owner, conversation_id, gone.cancel))
            entering = asyncio.ensure_future(enter())
            try:
                while not entering.done() and not gone.done():
                    timeout = heartbeat_s if early is not None and math.isfinite(heartbeat_s) else None
                    await asyncio.wait((entering, gone), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                    if early is not None and not entering.done() and not gone.done():
                        await early.beat()
            finally:
                watcher.close()
                if not entering.done():
                    entering.cancel()
                    await asyncio.wait((entering,))
        if not entering.cancelled():
            return entering.result()
        if conversation_id is None:
            raise ClientDisconnected
        raise invalid_request("request cancelled by a stop while the model was loading", code="cancelled")

    async def _enter(self, preset: ModelPreset, stack: AsyncExitStack, *, loads: bool) -> Service:
        """Use the model, and load it if it is not loaded and may be."""
        name = preset.name
        error = self._models.status(preset).error
        if preset.settings.model_changed == "refuse" and isinstance(error, ModelChanged):
            raise ModelLoadFailed(error)  # until the operator loads the model
        try:
            llm = await stack.enter_async_context(self._models.manager.use(name, load=loads))
        except ModelNotFound as error:
            if name not in self._models.manager.names():  # it was removed while the request waited
                raise
            raise ModelLoadFailed(error) from error  # its files, as the name was found
        return await self._models.serve(preset, llm)


async def _whole_body(receive: Receive) -> bytes:
    """Return the body, which comes in one message, as `BodyReader` has read it."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnected
    return bytes(message.get("body", b""))


def _named_model(body: bytes) -> NamedModel:
    """Return the fields of a body; none if it is no object. Raises if the body is not JSON."""
    try:
        return msgspec.json.decode(body, type=NamedModel) if body.strip() else NamedModel()
    except msgspec.ValidationError:
        return NamedModel()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_request(f"the body is not JSON: {error}", code="invalid_json") from None


def routing_error(error: BaseException) -> ApiError:
    """Return the error of a request if its model was not found or not loaded."""
    if isinstance(error, ModelNotFound):
        return invalid_request(str(error), "model", "model_not_found", status=404).api_error
    if isinstance(error, PacelineError) and not isinstance(error, ModelNotLoaded | CapacityError | EngineStopped):
        return ModelLoadFailed(error).api_error
    return api_error_of(error)


class BegunStream:
    """The `send` of a request with a response that may begin before its model is loaded. model: the model's name."""

    def __init__(self, send: Send, scope: Scope, style: EarlyStream, model: str) -> None:
        self._send, self._scope, self._style, self._model = send, scope, style, model
        self._is_open = self._has_begun = False
        self._response: EarlyResponse | None = None
        self._status = 200
        self._error_body: bytearray | None = None  # of a response that is no stream

    @property
    def waits(self) -> bool:
        """Whether the response has begun, and the model's own response has not."""
        return self._is_open and not self._has_begun

    async def beat(self) -> None:
        """Begin the response if necessary, and send a heartbeat."""
        if not self._is_open:
            self._is_open = True
            await self._send(stream_start(self._style.framing))
        await self._send({"type": "http.response.body", "body": self._heartbeat(), "more_body": True})

    def _heartbeat(self) -> bytes:
        if self._style.begin is None:
            return self._style.framing.ping
        if self._response is not None:
            return self._response.heartbeat()
        self._response = RequestContext.of(self._scope).early_response = self._style.begin(self._model)
        return self._response.opening()

    async def fail(self, api_error: ApiError) -> None:
        """End the stream with an error."""
        response = error_response(api_error, self._scope)
        await self._end(response.status_code, bytes(response.body))

    async def __call__(self, message: Message) -> None:
        """Send a message of the model's own response."""
        if not self._is_open:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._has_begun = True
            self._status = message["status"]
            self._error_body = None if self._status == 200 else bytearray()
        elif self._error_body is None:
            await self._send(message)
        else:
            self._error_body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._end(self._status, bytes(self._error_body))

    async def _end(self, status: int, error_body: bytes) -> None:
        if self._response is not None:
            data = self._response.failure(_api_error(status, error_body))
        else:
            frame = self._style.framing.frame
            last = [self._style.error_event(error_body), *([self._style.done] if self._style.done else [])]
            data = b"".join(map(frame, last))
        await self._send({"type": "http.response.body", "body": data, "more_body": False})


def _api_error(status: int, error_body: bytes) -> ApiError:
    error: Mapping[str, str | None] = msgspec.json.decode(error_body)["error"]
    return ApiError(status, error["type"] or "", error["code"], error["message"] or "", param=error["param"])
