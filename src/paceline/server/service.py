"""The state that all routes share: settings, engine, requests in flight. On the event loop.

The model is loaded in the background, so that the port is open meanwhile.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from paceline.chat import ChatFormat, ChatOptions, template_kwargs
from paceline.engine.arguments import model_sampling_params
from paceline.errors import CapacityError, EngineStopped, ModelChanged, PacelineError, QueueFull, Unsupported
from paceline.hub.file_choice import nearest_names
from paceline.params import SamplingParams
from paceline.scheduling.records import SlotsSnapshot
from paceline.server.api_errors import (
    DEFAULT_RETRY_S,
    ApiError,
    ApiException,
    ModelLoadFailed,
    ModelLoading,
    ServerDraining,
    WorkerCrashLoop,
    WorkerHung,
    api_error_of,
    invalid_request,
)
from paceline.server.engine_watch import EndReason, EngineWatch
from paceline.server.exposition import HttpMetrics, LlamaMetrics
from paceline.server.in_flight import (
    ByteBudget,
    ByteReservation,
    CompletionRate,
    InFlight,
    RequestRegistry,
    estimate_remaining_s,
)
from paceline.server.key_accounts import KeyAccounts
from paceline.server.model_front import ModelFront
from paceline.server.request_context import SERVICE, RequestContext
from paceline.server.request_media import MediaFetcher, RequestMedia, remote_urls
from paceline.server.response_store import ResponseStore
from paceline.server.resumable_streams import ResumableStreams
from paceline.server.settings import ServerSettings, has_tenants
from paceline.server.web_page import WebPage

if TYPE_CHECKING:
    from paceline.async_llm import AsyncLLM
    from paceline.engine import EngineClient
    from paceline.engine.adapters import LoraAdapter
    from paceline.runtime import Model

_log = logging.getLogger("paceline.server")
_NO_TEMPLATE = "the model has no chat template; give one, or send a prompt instead of messages"
_LONGEST_WAIT_S = 10.0  # between attempts to load a model whose file was replaced
_DEFAULT_BODIES = 4  # bodies of the largest size that fit at once


P = TypeVar("P")


class KeptForClients:
    """State that the models of a server share: streams to resume, stored responses, tenants and accounts of API keys."""

    def __init__(self, settings: ServerSettings) -> None:
        self.tenants = frozenset(key.tenant for key in settings.api_keys)
        self.key_accounts = KeyAccounts(settings)
        self.resumable_streams = ResumableStreams()
        self.response_store = ResponseStore(
            settings.responses_store, settings.responses_store_bytes, settings.responses_store_total_bytes
        )

    @staticmethod
    def of(scope: MutableMapping[str, Any]) -> KeptForClients:
        """Return the state of the server that a request came to."""
        kept: KeptForClients = scope["app"].state.service.kept
        return kept


class Server(ABC):
    """The state of a server for its middleware and its process: `Service` has one model, `RouterService` several.

    Attributes:
        settings: The settings.
        names: The names of the model, its id first; empty for several models.
        created: The start of the server, in Unix seconds.
        kept: State for clients that come back.
        in_flight: The HTTP requests in progress.
        http_metrics: Counters of HTTP requests.
        llama_metrics: Computes llama-server's metrics.
        body_budget: The bytes of the bodies of all requests in flight, which tenants share if there are several.
        page: The web page.
        is_draining: Whether the server accepts no new requests.
        loaded: Set when the server is ready, or has failed.
        is_loaded: Whether requests can run.
        failure: The reason why the server cannot serve; None if it can.
    """

    def __init__(self, settings: ServerSettings, names: tuple[str, ...], kept: KeptForClients | None = None) -> None:
        self.settings, self.names, self.created = settings, names, int(time.time())
        self.kept = KeptForClients(settings) if kept is None else kept
        self.in_flight, self.http_metrics, self.llama_metrics = InFlight(), HttpMetrics(), LlamaMetrics()
        if settings.metrics_per_key:
            self.http_metrics.more_samples = self.kept.key_accounts.samples
        total = settings.max_total_body_bytes
        max_bytes = _DEFAULT_BODIES * settings.max_body_bytes if total is None else total
        self.body_budget = ByteBudget(max_bytes, is_shared=has_tenants(settings.api_keys))
        self.page = WebPage.of(settings)
        self.is_draining = self.is_loaded = False
        self.loaded = asyncio.Event()
        self.failure: BaseException | None = None

    def apply(self, settings: ServerSettings) -> None:
        """Take over settings that may change while the server runs. New requests get the new keys, tenants and defaults."""
        self.settings = settings
        self.kept.tenants = frozenset(key.tenant for key in settings.api_keys)
        self.kept.key_accounts.apply(settings.api_keys)
        self.body_budget.is_shared = has_tenants(settings.api_keys)

    @abstractmethod
    def ready_line(self, seconds: float) -> str:
        """Return the line to print when the server is ready. seconds: the time from its start."""

    @property
    def is_alive(self) -> bool:
        """Whether the server needs no restart: models that are loaded have engines that run or are replaced."""
        return True

    @abstractmethod
    async def start(self) -> None:
        """Begin to load models."""

    @abstractmethod
    async def ended(self) -> BaseException | None:
        """Wait for the server's end; return the reason if it gave up by itself."""

    @abstractmethod
    def drain(self) -> None:
        """Reject new requests from now on, and end streams that have no end."""

    @abstractmethod
    async def aclose(self) -> None:
        """End running requests, and free their resources."""

    def retry_after_s(self) -> int:
        """Estimate the seconds until the requests that wait now have started."""
        return DEFAULT_RETRY_S

    @abstractmethod
    def api_error_of(self, error: BaseException) -> ApiError:
        """Return an error of a route as `ApiError`."""


class Service(Server):
    """One model and its state.

    Attributes:
        closing_error: The reason why its engine is being closed while the server goes on; reported by streams that this ends.
        media_marker: The text that stands for an image in prompts of llama-server's API.
        media_fetcher: None if nothing is fetched.
    """

    def __init__(
        self,
        settings: ServerSettings,
        llm: ModelFront | AsyncLLM | None = None,
        *,
        kept: KeptForClients | None = None,
        is_managed: bool = False,
    ) -> None:
        """Check the options. Raises `InvalidParams`.

        llm: None for a `ModelFront` of the settings. kept: None for its own. is_managed: whether `llm` is loaded already.
        """
        names = settings.aliases or (("paceline-demo",) if settings.model is None else (settings.model.name,))
        super().__init__(settings, names, kept)
        self._completion_rate = CompletionRate()
        self.request_registry = RequestRegistry(self._completion_rate)
        self.resumable_streams, self.response_store = self.kept.resumable_streams, self.kept.response_store
        self.closing_error: PacelineError | None = None
        self.engine_watch = EngineWatch(self.engine, self._why_ended)
        self.media_marker = settings.media_marker or f"<__media_{secrets.token_hex(16)}__>"
        domains = settings.media_domains
        self.media_fetcher = MediaFetcher(domains, max_total_bytes=settings.max_body_bytes) if domains else None
        self._front = ModelFront(settings) if llm is None else llm
        self._is_managed = is_managed
        self._loading: asyncio.Task[None] | None = None
        self._following: asyncio.Task[EngineStopped | None] | None = None
        self._lost_adapters: set[str] = set()  # adapters that do not fit the model's new version
        self._loading_since_s = time.monotonic()
        self._model_sampling: dict[str, Any] = {}
        self._chat: ChatFormat | None = None
        self._why_no_chat = _NO_TEMPLATE
        self._parts: dict[object, Any] = {}

    @staticmethod
    def of(scope: MutableMapping[str, Any]) -> Service:
        """Return the service of a request's model."""
        service: Service = scope[SERVICE]
        return service

    def part(self, make: Callable[[Service], P]) -> P:
        """Return the object that `make` makes of this service, once: state of the routes of an API."""
        part: P = self._parts[make] if make in self._parts else self._parts.setdefault(make, make(self))
        return part

    # ---- life

    async def start(self) -> None:
        """Begin to load the model in the background. Idempotent. `loaded` is set at the end, also after a failure."""
        if self._loading is None:
            self._loading_since_s = time.monotonic()
            self._loading = asyncio.create_task(self._load())

    async def _load(self) -> None:
        try:
            await self._start(self._front)
            self.is_loaded = True
            self.expect_tenants()
            if isinstance(self._front, ModelFront):
                self._following = asyncio.create_task(self._follow_engine(self._front))
        except Exception as error:  # noqa: BLE001 - reported by routes and the exit code
            self.failure = error
            if not self.is_draining:
                _log.error("the model could not be loaded: %s", error)
        finally:
            self.loaded.set()

    async def _start(self, front: ModelFront | AsyncLLM) -> None:
        if not self._is_managed:
            await front.start()
        await asyncio.to_thread(self._read_model, front.engine.model)

    def _read_model(self, model: Model) -> None:
        """Read sampling defaults and the chat template of the model. In a thread. Raises if the settings' template is invalid."""
        self._model_sampling, self._chat, self._why_no_chat = model_sampling_params(model.metadata), None, _NO_TEMPLATE
        given = self.settings.chat_template
        if given is None and not model.chat_templates:
            return
        try:
            self._chat = ChatFormat(model, given)
        except PacelineError as error:  # without the model's own template only chat fails
            if given is not None:
                raise
            self._why_no_chat = f"the model's chat template cannot be used: {error}"

    async def _follow_engine(self, front: ModelFront) -> EngineStopped | None:
        """Wait for the engine's end, and load the model again if its file was replaced. Return the reason of another end."""
        while True:
            reason = await asyncio.wrap_future(front.engine.ended)
            if not isinstance(reason, ModelChanged) or self.is_draining:
                return reason
            self.is_loaded = False
            self.engine_watch.end("unloaded")
            if self.settings.model_changed == "refuse":
                self.failure = reason
                _log.error("requests are refused from now on: %s", reason)
                await asyncio.Event().wait()
            front = await self._reload(front)

    async def _reload(self, old: ModelFront) -> ModelFront:
        """Load the model again until this succeeds: its file may be incomplete."""
        adapters, num_frozen = old.engine.loras(), gc.get_freeze_count()
        await old.aclose()
        gc.unfreeze()  # so that cycles with the old engine are freed
        _log.warning("the model is loaded again, since a file of it was replaced")
        wait_s = 1.0
        while True:
            self._loading_since_s = time.monotonic()
            self._front = front = ModelFront(self.settings)
            try:
                await self._start(front)
                await asyncio.to_thread(self._load_adapters, front, adapters)
                break
            except Exception as error:  # noqa: BLE001 - reported by routes until the model is loaded
                self.failure = error
                _log.error("the model could not be loaded again, next attempt in %.0f s: %s", wait_s, error)
            await front.aclose()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        self.failure, self.is_loaded = None, True
        self.expect_tenants()
        self.engine_watch = EngineWatch(self.engine, self._why_ended)
        if num_frozen:
            gc.collect()
            gc.freeze()
        return front

    def _load_adapters(self, front: ModelFront, adapters: Sequence[LoraAdapter]) -> None:
        """Load the adapters that clients had loaded. Requests for an adapter that does not fit any more get a 404."""
        known = {adapter.name for adapter in front.engine.loras()}
        for adapter in adapters:
            if adapter.name in known:
                continue
            try:
                front.engine.load_lora(adapter.name, adapter.path)
            except PacelineError as error:
                self._lost_adapters.add(adapter.name)
                _log.error("the adapter %r could not be loaded again: %s", adapter.name, error)

    def drain(self) -> None:
        """Reject new requests from now on, cancel requests of resumable streams without a reader, end streams of events."""
        self.is_draining = True
        self.engine_watch.end("shutdown")
        self.resumable_streams.cancel_unread()

    async def aclose(self) -> None:
        """Close the engine; running requests end with SHUTDOWN."""
        self.drain()
        if self._following is not None and not self.is_loaded:
            self._following.cancel()
            await asyncio.wait((self._following,))
        await self._front.aclose()
        if self._loading is not None:
            await self._loading

    def unload(self, error: PacelineError) -> None:
        """Note that the engine is being closed while the server goes on. error: as `closing_error`."""
        self.closing_error = error
        self.engine_watch.end("unloaded")

    def _why_ended(self) -> EndReason:
        return "shutdown" if self.is_draining else "unloaded" if self.closing_error is not None else "failed"

    @property
    def progress(self) -> float:
        """The share of the model that is loaded, 0 to 1."""
        return 1.0 if self.is_loaded else getattr(self._front, "progress", 0.0)

    def ready_line(self, seconds: float) -> str:
        """Return the line to print when the model is loaded, after `seconds`."""
        return f"{self.names[0]} is ready after {seconds:.1f} s ({self.engine().config.num_slots} slots)"

    async def ended(self) -> BaseException | None:
        """Wait for the engine's end; return the reason if it gave up by itself. Reloads of the model are no end."""
        if self._following is not None:
            return await asyncio.shield(self._following)
        return await asyncio.wrap_future(self.engine().ended)

    def apply(self, settings: ServerSettings) -> None:
        """Take over settings, as in `Server`, and the tenants of the engine."""
        super().apply(settings)
        self.expect_tenants()

    def expect_tenants(self) -> None:
        """Set the tenants of the engine, if it is loaded."""
        if self.is_loaded:
            self._front.engine.expect_tenants(self.kept.tenants)

    # ---- for routes

    def engine(self) -> EngineClient:
        """Return the engine. Raises `ModelLoading` (503) before it is loaded, `ModelLoadFailed` after a failure."""
        if self.is_loaded:
            return self._front.engine
        if self.failure is not None:
            raise ModelLoadFailed(self.failure)
        raise ModelLoading(self.progress, estimate_remaining_s(self.progress, time.monotonic() - self._loading_since_s))

    @property
    def is_alive(self) -> bool:
        """Whether the model still loads, or its engine is alive."""
        return not self.is_loaded or self._front.engine.heartbeat().is_alive

    def wake(self) -> None:
        """Start a sleeping engine's process again, without waiting for it."""
        if self.is_loaded:
            self._front.engine.wake()

    def set_lora_scales(self, scales: Mapping[str, float]) -> None:
        """Set the scales of adapters for requests without `lora`, in all APIs."""
        self.settings = replace(self.settings, lora_scales=dict(scales))

    def check_accepting(self) -> None:
        """Raise `ServerDraining` (503) if the server is shutting down."""
        if self.is_draining:
            raise ServerDraining

    def check_ready(self) -> None:
        """Raise `ApiException` (503) if any request would be rejected now."""
        self.check_accepting()
        engine = self.engine()
        if engine.is_closed:
            raise ApiException(api_error_of(EngineStopped("the engine was shut down and takes no requests")))
        self.check_worker()
        try:
            self._check_room()
        except QueueFull as error:
            raise ApiException(replace(api_error_of(error), status=503)) from None

    def _check_room(self) -> None:
        engine = self.engine()
        if engine.num_open >= engine.config.num_slots + engine.config.max_queue:
            raise QueueFull("as many requests are open as may be; try again later")

    def check_worker(self) -> None:
        """Raise `WorkerCrashLoop` or `WorkerHung` (503) while no worker can serve; requests are still accepted, and wait."""
        heartbeat = self.engine().heartbeat()
        if heartbeat.state == "crash_loop":
            raise WorkerCrashLoop(heartbeat.num_crashes, heartbeat.restart_in_s)
        if heartbeat.state == "hung" or not heartbeat.is_alive:
            raise WorkerHung

    def retry_after_s(self) -> int:
        """Estimate the seconds until the requests that wait now have started."""
        if not self.is_loaded:
            return DEFAULT_RETRY_S
        engine = self._front.engine
        return self._completion_rate.estimate_wait_s(max(1, engine.num_open - engine.config.num_slots))

    def api_error_of(self, error: BaseException) -> ApiError:
        """Return an error as `ApiError`, with Retry-After if capacity was short."""
        api_error = api_error_of(error)
        is_full = isinstance(error, CapacityError) and api_error.retry_after_s is not None
        return replace(api_error, retry_after_s=self.retry_after_s()) if is_full else api_error

    def sampling(self, api: Mapping[str, Any]) -> SamplingParams:
        """Return a request's defaults: the API's, overridden by the model's, overridden by the operator's."""
        self.engine()
        return SamplingParams(**{**api, **self._model_sampling, **self.settings.sampling})

    def adapters(self) -> tuple[LoraAdapter, ...]:
        """Return the LoRA adapters that a request may name in place of the model; none before the model is loaded."""
        loras = self._front.engine.loras() if self.is_loaded else ()
        return tuple(adapter for adapter in loras if adapter.name not in self.names)

    @property
    def known_names(self) -> tuple[str, ...]:
        """The names that a request's `model` may have: the model's and those of its adapters."""
        return (*self.names, *(adapter.name for adapter in self.adapters()))

    def adapter_named(self, model: str | None) -> str | None:
        """Return the adapter that a request's `model` names, with or without Ollama's default tag; None: the model.

        Unknown names mean the only model, as many programs send a fixed name. Raises `ApiException` (404) for the name of an
        adapter that was unloaded.
        """
        if model is None:
            return None
        spellings = (model, model.removesuffix(":latest"))
        if not self.is_loaded or not {*spellings}.isdisjoint(self.names):
            return None
        names = {adapter.name for adapter in self.adapters()}
        adapter = next((name for name in spellings if name in names), None)
        was_unloaded = self._front.engine.was_lora_unloaded
        if adapter is None and any(was_unloaded(name) or name in self._lost_adapters for name in spellings):
            nearest = nearest_names(spellings[1], (*self.names, *names))
            message = f"model: {model[:200]!r} is not here any more, the LoRA adapter was unloaded; {nearest}"
            raise invalid_request(message, "model", "model_not_found", status=404)
        return adapter

    def options(self, request: Request, model: str | None = None) -> dict[str, Any]:
        """Return keywords of `RequestOptions` by the HTTP request, its `model` and the settings. Raises as `adapter_named`."""
        context, adapter = RequestContext.of(request.scope), self.adapter_named(model)
        return {
            "request_id": context.request_id or None,
            "tenant": context.tenant,
            **({} if context.traceparent is None else {"traceparent": context.traceparent}),
            **({} if context.account is None else {"tenant_weight": context.account.key.weight}),
            "lora": dict(self.settings.lora_scales) if adapter is None else {adapter: 1.0},
            "timeout_s": self.settings.timeout_s,
            "special": self.settings.special,
        }

    async def request_media(self, *values: object, in_chat: bool = False) -> RequestMedia:
        """Return the reader of a request's images. Images at URLs are fetched, if this is allowed.

        values: the parts of the request's body that may have images. in_chat: as in `RequestMedia`. Raises as `engine`;
        `ServerDraining` and `QueueFull` before images are fetched for a request that would be rejected.
        """
        engine, fetcher, most = self.engine(), self.media_fetcher, self.settings.max_images
        if fetcher is None:
            return RequestMedia(lambda: engine.model.modalities, max_images=most, in_chat=in_chat)
        urls = await asyncio.to_thread(remote_urls, values, most) if "image" in engine.model.modalities else ()
        if urls:
            self.check_accepting()
            self._check_room()
        fetched = await fetcher.fetch_all(urls, ByteReservation.current.get())
        return RequestMedia(lambda: engine.model.modalities, max_images=most, fetched=fetched, in_chat=in_chat)

    async def read_slots(self) -> SlotsSnapshot:
        """Return the state of the engine's slots. Raises as `engine`."""
        return await asyncio.wrap_future(self.engine().ask_slots())

    def chat_format(self) -> ChatFormat:
        """Return the chat template of the settings, else the model's. Raises `Unsupported` if there is none."""
        self.engine()
        if self._chat is None:
            raise Unsupported(self._why_no_chat)
        return self._chat

    def chat_options(self, options: ChatOptions) -> ChatOptions:
        """Return a request's options, with the server's for thinking and parsing unless the request sets them."""
        settings = self.settings
        budget = None if settings.reasoning_budget == -1 else settings.reasoning_budget
        return replace(
            options,
            thinking_budget=budget if options.thinking_budget is None else options.thinking_budget,
            thinking_message=options.thinking_message or settings.reasoning_budget_message,
            skip_parsing=options.skip_parsing or settings.skip_chat_parsing,
            untagged_calls=options.untagged_calls and settings.untagged_calls,
        )

    def template_variables(self, variables: Mapping[str, Any], effort: str | None = None) -> dict[str, Any]:
        """Return the variables for the template: the server's, overridden by the request's and its reasoning effort."""
        return template_kwargs({**self.settings.chat_template_kwargs, **variables}, effort)
