"""The routes under /v1/engine, for the web page: events of the engine, and facts of the server and of a model.

The page lets people set the sampling parameters of `sampling_table` that have a label, and a few other fields of a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any, Final

import msgspec
from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.errors import PacelineError
from paceline.params import SamplingParams, help_of
from paceline.sampling_table import API_DEFAULTS, PARAMETERS
from paceline.scheduling.records import MAX_NODES
from paceline.scheduling.telemetry import MOST_TICKS
from paceline.server.api_errors import OPENAI_FORM, ApiException
from paceline.server.engine_watch import EventReader, engine_facts
from paceline.server.exposition import METRICS_OFF, engine_metrics
from paceline.server.json_bodies import PLAIN_TEXT, json_response
from paceline.server.request_context import RequestContext
from paceline.server.resumable_streams import NextBytes
from paceline.server.routes import RouteFacts, Routes
from paceline.server.service import KeptForClients, Server, Service
from paceline.server.sse import NAMED_SSE, LiveEvents, named_event

METRICS_ROUTES = Routes(RouteFacts(model="required", loads_model=False), tags=["observability"])
USAGE_ROUTES = Routes(RouteFacts(errors=OPENAI_FORM), tags=["observability"])
ROUTES = Routes(RouteFacts(errors=OPENAI_FORM, model="required", loads_model=False), tags=["engine"])


@ROUTES.get(
    "/v1/engine/events",
    summary="What the engine does, as server-sent events",
    response_class=Response,
    responses={200: {"description": "Events until the client leaves", "content": {"text/event-stream": {}}}},
)
async def events(
    request: Request,
    interval_ms: Annotated[int, Query(ge=100, le=60_000, description="Least time between two events, to 10 ms.")] = 250,
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
    heartbeat_s = service.settings.heartbeat_s
    return LiveEvents(_framed_events(reader), ping=NAMED_SSE.ping, heartbeat_s=heartbeat_s)


@METRICS_ROUTES.get(
    "/metrics", summary="Counters and histograms for Prometheus", responses=PLAIN_TEXT, response_class=Response
)
async def metrics(request: Request) -> Response:
    """Return metrics in Prometheus's text format, or in OpenMetrics if Accept asks for it; docs/prometheus.md lists the names.

    While the model loads there are the metrics of HTTP and of the process.
    """
    service = Service.of(request.scope)
    if not service.settings.metrics:
        raise ApiException(METRICS_OFF)
    engine = service.engine() if service.is_loaded else None
    http, llama, accept = service.http_metrics, service.llama_metrics, request.headers.get("accept", "")
    return await asyncio.to_thread(engine_metrics, engine, http, llama, accept, service.created)


@USAGE_ROUTES.get("/v1/usage", summary="Tokens and limits of API keys")
async def usage(request: Request) -> Response:
    """Return usage since the server's start, and limits: of the request's API key, or of all keys if that has no tenant."""
    context = RequestContext.of(request.scope)
    accounts = KeptForClients.of(request.scope).key_accounts
    found = (context.account,) if context.account is not None and context.tenant else tuple(accounts)
    return json_response({"object": "list", "data": [account.members() for account in found]})


@contextmanager
def _framed_events(reader: EventReader) -> Iterator[NextBytes]:
    async def next_event() -> tuple[bytes, bool]:
        event = await reader.next()
        return named_event(event.name.encode(), msgspec.json.encode(event.members)), event.name == "end"

    with reader:
        yield next_event


_MODALITIES: Final = ("text", "image", "audio")
_IMAGE_TYPES: Final = ("image/png", "image/jpeg", "image/gif", "image/bmp")
_AUDIO_TYPES: Final = ("audio/wav", "audio/flac", "audio/mpeg")


def page_routes(server: Server, models: Callable[[], Sequence[Mapping[str, Any]]], *, is_router: bool) -> Routes:
    """Return the route of the server. models: returns the entries of the models on the page."""
    router = Routes(RouteFacts(errors=OPENAI_FORM), tags=["engine"])

    @router.get("/v1/engine/page", summary="What the web page needs to know of the server")
    async def page(request: Request) -> Response:
        """Return version, models and what is switched on; also while a model loads."""
        settings, listed = server.settings, list(models())
        names = [model["id"] for model in listed]
        loaded = [model["id"] for model in listed if model["state"] == "loaded"]
        body = {
            "version": __version__,
            "tenant": RequestContext.of(request.scope).tenant,
            "is_router": is_router,
            "default_model": next(iter([*loaded, *names]), None),
            "models": listed,
            "features": {
                **{name: getattr(settings, name) for name in ("docs", "metrics", "slots", "props")},
                "responses_store": settings.responses_store > 0,
            },
            "links": {name: name for name in ("docs", "metrics") if getattr(settings, name)}
            | {"models": "v1/models", "health": "health"},
        }
        return json_response(body)

    return router


def model_entry(service: Service) -> dict[str, Any]:
    """Return the entry of the only model of a server on the page."""
    state, error = "loading", None
    modalities: Sequence[str] = ()
    if service.failure is not None:
        state, error = "failed", service.api_error_of(service.failure).message
    elif service.is_loaded:
        engine = service.engine()
        state = "sleeping" if engine.heartbeat().state == "sleeping" else "loaded"
        modalities = _known_modalities(engine.model)
    return {
        "id": service.names[0],
        "aliases": list(service.names[1:]),
        "state": state,
        "progress": round(service.progress, 4),
        "modalities": modalities,
        "adapters": [adapter.name for adapter in service.adapters()],
        "error": error,
    }


def input_modalities(names: Collection[str]) -> list[str]:
    """Return the modalities of a model's input in order, text first."""
    return [name for name in _MODALITIES if name == "text" or name in names]


def _known_modalities(model: object) -> list[str]:
    return input_modalities(getattr(model, "modalities", ()))  # a fake engine's model has none


@ROUTES.get("/v1/engine/model", summary="What may be set in a request to the model")
async def model(request: Request) -> Response:
    """Return the model's modalities and limits, and the fields of a chat completion with the server's defaults."""
    service = Service.of(request.scope)
    return json_response(await asyncio.to_thread(_model_body, service))


def _model_body(service: Service) -> dict[str, Any]:
    engine, settings = service.engine(), service.settings
    modalities = _known_modalities(engine.model)
    chat = _chat_facts(service)
    return {
        "id": service.names[0],
        "name": getattr(engine.model, "metadata", {}).get("general.name", ""),
        "modalities": modalities,
        "n_ctx": engine.limits.max_positions,
        "num_slots": engine.limits.num_slots,
        "itl_target_ms": round(1000 * engine.limits.itl_target_s, 3),
        "has_chat_template": chat is not None,
        "chat": {"thinking": False, "tools": False, "system": False} if chat is None else chat,
        "media": {
            "max_images": settings.max_images,
            "image_types": list(_IMAGE_TYPES) if "image" in modalities else [],
            "audio_types": list(_AUDIO_TYPES) if "audio" in modalities else [],
        },
        "parameters": chat_parameters(
            service.sampling(API_DEFAULTS["chat"]), thinks=chat is not None and chat["thinking"]
        ),
    }


def _chat_facts(service: Service) -> dict[str, bool] | None:
    """Return the abilities of the chat template; None if there is no usable template."""
    with suppress(PacelineError):
        chat_format = service.chat_format()
        known = chat_format.capabilities
        return {
            "thinking": chat_format.render([{"role": "user", "content": "?"}]).supports_thinking,
            "tools": known["supports_tools"] or known["supports_tool_calls"],
            "system": known["supports_system_role"],
        }
    return None


def _field(  # noqa: PLR0913, PLR0917 - the members of the page's JSON
    name: str,
    label: str,
    group: str | None,
    kind: str,
    about: str,
    minimum: float | None = None,
    maximum: float | None = None,
    step: float | None = None,
    choices: tuple[int, ...] | None = None,
    default: object = None,
) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "group": group,
        "type": kind,
        "default": default,
        "minimum": minimum,
        "maximum": maximum,
        "step": step,
        "choices": None if choices is None else list(choices),
        "help": about,
    }


_TEXTS: Final = {  # in place of the sentences of `SamplingParams`
    "max_tokens": "Most tokens of a reply, thinking included; without a value as many as the context holds.",
    "stop": "A stop text: generation ends before it.",
    "seed": "The same seed gives the same draws; without a value they differ each time.",
}
_SAMPLING: Final = [row for row in PARAMETERS if row.label]
_THINKING: Final = "reasoning_budget_tokens"
# fmt: off
_FIELDS: Final = [
    *(
        _field(row.name, row.label, row.group, row.kind, _TEXTS.get(row.name) or help_of(row.name),
               *(row.slider or (row.low, row.high)), row.step, row.choices)
        for row in _SAMPLING
    ),
    _field("priority", "Priority", "Advanced", "integer",
           "Higher runs first; ten seconds of waiting make up for one level.", -1_000_000, 1_000_000, 1, default=0),
    _field("speculation", "Speculation", "Advanced", "boolean",
           "Whether tokens may be proposed ahead of decoding. The output is the same.", default=True),
    _field("cache_prompt", "Cache the prompt", "Advanced", "boolean",
           "Whether cached prefixes may be used, and this prompt be cached.", default=True),
    _field("timeout_s", "Time limit", "Advanced", "number",
           "Seconds until the reply ends, finished or not.", 1, 86_400, 1),
]
_FIELDS.insert(1, _field(_THINKING, "Max thinking tokens", "Length", "integer",
                         "Most tokens of thinking; 0: none; -1: as the server has it.", -1, 2**31 - 1, 1, default=-1))
# fmt: on


def chat_parameters(sampling: SamplingParams, *, thinks: bool) -> list[dict[str, Any]]:
    """Return the fields in the order to show them. sampling: the defaults; thinks: whether the model may think."""
    defaults = {row.name: getattr(sampling, row.name) for row in _SAMPLING}
    defaults = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
    fields = [field for field in _FIELDS if thinks or field["name"] != _THINKING]
    return [{**field, "default": defaults.get(field["name"], field["default"])} for field in fields]
