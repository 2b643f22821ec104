"""What all routes share: the settings, the engine once it is loaded, and the requests that are open. On the event loop.

Loading happens in the background, so that the port can be open meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request

from paceline.async_llm import AsyncLLM
from paceline.chat.turns import Turn
from paceline.engine.sampling_defaults import told_by_model
from paceline.errors import CapacityError, EngineStopped, PacelineError, QueueFull, Unsupported
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.runtime.chat_format import ChatFormat, RenderedPrompt
from paceline.server.budget import Budget
from paceline.server.exchange import Exchange
from paceline.server.http_metrics import HttpMetrics
from paceline.server.open_requests import OpenRequests
from paceline.server.problems import RETRY_S, Draining, LoadFailed, Loading, Problem, Refused, problem_of
from paceline.server.settings import ServerSettings
from paceline.server.traffic import Traffic
from paceline.server.turnover import Turnover, rest_s

if TYPE_CHECKING:
    from paceline.engine.any_engine import AnyEngine
    from paceline.runtime import Model

_log = logging.getLogger("paceline.server")
_BODIES = 4  # of the largest size find room at once, where the settings do not say


class Front(Protocol):
    """What a service needs of an `AsyncLLM`; tests may stand something else in."""

    @property
    def engine(self) -> AnyEngine:
        """The engine, once started."""

    async def start(self) -> Any:
        """Loads it. Raises what loading raises."""

    async def aclose(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Ends it."""


class Service:
    """One for an app. settings: as resolved. created: unix seconds. names: of the model, the first is the one that is told."""

    def __init__(self, settings: ServerSettings, llm: Front | None = None) -> None:
        """llm: what answers; None: an `AsyncLLM` by the settings. Raises what is wrong with the engine's options."""
        self.settings = settings
        self.created = int(time.time())
        self.names = _names(settings)
        self._turnover = Turnover()
        self.open_requests, self.traffic = OpenRequests(self._turnover), Traffic()
        self.http_metrics = HttpMetrics()
        self.body_budget = Budget(_most_body_bytes(settings))
        self.progress = 0.0
        self.is_draining = False
        self.loaded = asyncio.Event()
        self._stop_loading = threading.Event()
        self._front: Front = self._front_by_settings() if llm is None else llm
        self._loading: asyncio.Task[None] | None = None
        self._is_loaded = False
        self._loading_since_s = time.monotonic()
        self._failure: BaseException | None = None
        self._model_sampling: dict[str, Any] = {}
        self._chat: ChatFormat | None = None
        self._why_no_chat = "the model has no chat template; give one, or send a prompt instead of messages"

    # ---- life

    def start_loading(self) -> None:
        """Begins to load, once, in the background; `loaded` is set at the end, whatever it is."""
        if self._loading is None:
            self._loading_since_s = time.monotonic()
            self._loading = asyncio.create_task(self._load())

    async def _load(self) -> None:
        try:
            await self._front.start()
            await asyncio.to_thread(self._look_at_model, self._front.engine.model)
            await asyncio.to_thread(_prepare_once, self._front.engine)
            self.progress, self._is_loaded = 1.0, True
        except Exception as error:  # noqa: BLE001 - whatever it is, routes and the process's end tell it
            self._failure = error
            if not self.is_draining:
                _log.error("the model could not be loaded: %s", error)
        finally:
            self.loaded.set()

    def _look_at_model(self, model: Model) -> None:
        """What requests need of it, made once. In a thread. Raises what is wrong with a chat template of the settings."""
        self._model_sampling = told_by_model(model.metadata)
        given = self.settings.chat_template
        if given is None and not model.chat_templates:
            return
        try:
            self._chat = ChatFormat(model, given)
        except PacelineError as error:  # a template of the model's own is missed only by those who want to chat
            if given is not None:
                raise
            self._why_no_chat = f"the model's chat template cannot be used: {error}"

    def drain(self) -> None:
        """From now on nothing new is taken."""
        self.is_draining = True

    async def aclose(self) -> None:
        """Ends the engine; what still runs ends with SHUTDOWN."""
        self.drain()
        self._stop_loading.set()
        await self._front.aclose()
        if self._loading is not None:
            await self._loading

    @property
    def failure(self) -> BaseException | None:
        """Why loading failed, if it did."""
        return self._failure

    @property
    def is_loaded(self) -> bool:
        """Whether the engine is there."""
        return self._is_loaded

    # ---- for routes

    def engine(self) -> AnyEngine:
        """The engine. Raises `Loading` (503) before it is there, `LoadFailed` after a failure."""
        if self._is_loaded:
            return self._front.engine
        if self._failure is not None:
            raise LoadFailed(self._failure)
        raise Loading(self.progress, rest_s(self.progress, time.monotonic() - self._loading_since_s))

    def check_accepting(self) -> None:
        """Raises `Draining` (503) where the server is about to end."""
        if self.is_draining:
            raise Draining

    def check_ready(self) -> None:
        """Raises a refusal (503) where a request would be refused now, whatever it is."""
        self.check_accepting()
        engine = self.engine()
        if engine.is_closed:
            raise Refused(problem_of(EngineStopped("the engine was shut down and takes no requests")))
        config = engine.config
        if engine.num_open >= config.num_slots + config.max_queue:
            raise Refused(replace(problem_of(QueueFull("as many requests are open as may be")), status=503))

    def retry_after_s(self) -> int:
        """When one that finds no room had better come again, in seconds: when what waits now will have begun."""
        if not self._is_loaded:
            return RETRY_S
        engine = self._front.engine
        return self._turnover.wait_s(max(1, engine.num_open - engine.config.num_slots))

    def problem_of(self, error: BaseException) -> Problem:
        """What is told of an error, and where there was no room, when to come again."""
        problem = problem_of(error)
        is_full = isinstance(error, CapacityError) and problem.retry_after_s is not None
        return replace(problem, retry_after_s=self.retry_after_s()) if is_full else problem

    def sampling(self, api: Mapping[str, Any]) -> SamplingParams:
        """The defaults of a request: the API's, over them the model's own, over them the operator's."""
        self.engine()
        return SamplingParams(**{**api, **self._model_sampling, **self.settings.sampling})

    def options(self, request: Request) -> dict[str, Any]:
        """Keywords of `RequestOptions` that follow from the HTTP request and the settings."""
        exchange = Exchange.of(request.scope)
        return {
            "request_id": exchange.request_id or None,
            "tenant": exchange.tenant,
            "lora": dict(self.settings.lora_scales),
            "timeout_s": self.settings.timeout_s,
        }

    def chat_format(self) -> ChatFormat:
        """The chat template: that of the settings, else the model's. Raises `Unsupported` where there is none of use."""
        self.engine()
        if self._chat is None:
            raise Unsupported(self._why_no_chat)
        return self._chat

    def rendered(self, turn: Turn, variables: Mapping[str, Any]) -> RenderedPrompt:
        """The prompt of a conversation. variables: of the request, for the template. Takes time: not on the event loop."""
        return self.chat_format().render(
            turn.messages,
            add_generation_prompt=turn.add_generation_prompt,
            continue_final_message=turn.continue_final_message,
            kwargs={**self.settings.chat_template_kwargs, **variables},
        )

    def _front_by_settings(self) -> AsyncLLM:
        told = {"isolation": "process", "progress": self._tell_progress, "cancel": self._stop_loading}
        return AsyncLLM(self.settings.model, **{**told, **self.settings.engine_options})

    def _tell_progress(self, share: float) -> None:
        """Called on the thread that loads."""
        self.progress = share


def _prepare_once(engine: AnyEngine) -> None:
    """Has the engine make what it makes of every token for its first request, which would hold up whoever is there by then."""
    with suppress(Unsupported):  # a model that only embeds
        engine.prepare([0], SamplingParams(), RequestOptions())


def _names(settings: ServerSettings) -> tuple[str, ...]:
    if settings.aliases:
        return settings.aliases
    return ("paceline-demo",) if settings.model is None else (settings.model.name,)


def _most_body_bytes(settings: ServerSettings) -> int:
    total = settings.max_total_body_bytes
    return _BODIES * settings.max_body_bytes if total is None else total
