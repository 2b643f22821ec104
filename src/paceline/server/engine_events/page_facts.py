"""What the web page asks for when it starts: GET /v1/engine/page of the server, GET /v1/engine/model of a loaded model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.errors import PacelineError
from paceline.server.api_errors import OPENAI_FORM
from paceline.server.dialects.openai.openai_requests import CHAT_DEFAULTS
from paceline.server.engine_events.chat_parameters import chat_parameters
from paceline.server.json_bodies import json_response
from paceline.server.request_context import RequestContext
from paceline.server.routes import RouteFacts, Routes
from paceline.server.service import Service
from paceline.server.settings import ServerSettings

_MODALITIES: Final = ("text", "image", "audio")
_IMAGE_TYPES: Final = ("image/png", "image/jpeg", "image/gif", "image/bmp")
_AUDIO_TYPES: Final = ("audio/wav", "audio/flac", "audio/mpeg")
_LISTENED_TO: Final = "loaded"


def page_routes(
    settings: ServerSettings, models: Callable[[], Sequence[Mapping[str, Any]]], *, is_router: bool
) -> Routes:
    """Return the route of the server. models: as the page lists them, at the moment."""
    router = Routes(RouteFacts(errors=OPENAI_FORM), tags=["engine"])

    @router.get("/v1/engine/page", summary="What the web page needs to know of the server")
    async def page(request: Request) -> Response:
        """Return version, models and what is switched on; also while a model loads."""
        listed = list(models())
        names = [one["id"] for one in listed]
        loaded = [one["id"] for one in listed if one["state"] == _LISTENED_TO]
        body = {
            "version": __version__,
            "tenant": RequestContext.of(request.scope).tenant,
            "is_router": is_router,
            "default_model": next(iter([*loaded, *names]), None),
            "models": listed,
            "features": {
                "docs": settings.docs,
                "metrics": settings.metrics,
                "slots": settings.slots,
                "props": settings.props,
                "responses_store": settings.responses_store > 0,
            },
            "links": _links(settings),
        }
        return json_response(body)

    return router


def _links(settings: ServerSettings) -> dict[str, str]:
    wanted = {"docs": settings.docs, "metrics": settings.metrics}
    links = {name: name for name, is_on in wanted.items() if is_on}
    return {**links, "models": "v1/models", "health": "health"}


def model_entry(service: Service) -> dict[str, Any]:
    """Return how the page lists the one model of a server."""
    state, error = "loading", None
    modalities: Sequence[str] = ()
    if service.failure is not None:
        state, error = "failed", service.api_error_of(service.failure).message
    elif service.is_loaded:
        engine = service.engine()
        state = "sleeping" if engine.heartbeat().state == "sleeping" else "loaded"
        modalities = known_modalities(engine.model)
    return {
        "id": service.names[0],
        "aliases": list(service.names[1:]),
        "state": state,
        "progress": round(service.progress, 4),
        "modalities": modalities,
        "adapters": [one.name for one in service.adapters()],
        "error": error,
    }


def known_modalities(model: object) -> list[str]:
    """Return what a loaded model takes, text first."""
    found = getattr(model, "modalities", ())  # a fake engine's model has none
    return [name for name in _MODALITIES if name == "text" or name in found]


def model_routes() -> Routes:
    """Return the route of one model."""
    router = Routes(RouteFacts(errors=OPENAI_FORM, model="required", loads_model=False), tags=["engine"])

    @router.get("/v1/engine/model", summary="What may be set in a request to the model")
    async def model(request: Request) -> Response:
        """Return the model's modalities and limits, and the fields of a chat completion with the server's defaults."""
        service = Service.of(request.scope)
        return json_response(await asyncio.to_thread(_model_body, service))

    return router


def _model_body(service: Service) -> dict[str, Any]:
    engine, settings = service.engine(), service.settings
    modalities = known_modalities(engine.model)
    chat = _chat_facts(service)
    return {
        "id": service.names[0],
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
        "parameters": chat_parameters(service.sampling(CHAT_DEFAULTS), thinks=chat is not None and chat["thinking"]),
    }


def _chat_facts(service: Service) -> dict[str, bool] | None:
    """Return what the chat template can show; None where there is none that can be used."""
    with suppress(PacelineError):
        chat_format = service.chat_format()
        known = chat_format.capabilities
        return {
            "thinking": chat_format.render([{"role": "user", "content": "?"}]).supports_thinking,
            "tools": known["supports_tools"] or known["supports_tool_calls"],
            "system": known["supports_system_role"],
        }
    return None
