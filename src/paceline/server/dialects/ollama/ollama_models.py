"""The model as Ollama's API describes it, and what Ollama does with models and this server does not. On the event loop."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.chat import ChatFormat, Turn
from paceline.errors import PacelineError
from paceline.server.api_errors import OLLAMA_FORM, ApiError, ollama_error_response
from paceline.server.dialects.ollama.ollama_requests import OllamaModelBody
from paceline.server.dialects.vectors import can_embed
from paceline.server.json_bodies import OLLAMA_ERRORS, OLLAMA_STREAMS, json_response
from paceline.server.routes import RouteFacts, Routes
from paceline.server.service import Service
from paceline.server.sse import JSON_LINES

FOLLOWED_VERSION = "0.14.0"
"""The version of Ollama that this API follows. Clients compare it with the version they need: Codex with 0.13.4."""

NAME_MISSING = ApiError(400, "invalid_request_error", None, "model is required")
"""The error of a request about a model that names none."""

_LATEST = ":latest"
_FOREVER = "9999-12-31T23:59:59Z"
_LONG = 1000  # characters of a value of the metadata that only a verbose description has
_ADMINISTRATION = (
    ("POST", "/api/push"),
    ("POST", "/api/create"),
    ("POST", "/api/copy"),
    ("DELETE", "/api/delete"),
    ("GET", "/api/blobs/{digest}"),  # clients send HEAD
    ("POST", "/api/blobs/{digest}"),
)


def timestamp(seconds: float | None = None) -> str:
    """Return a time as Ollama writes it; by default now."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def is_model_name(service: Service, name: str) -> bool:
    """Return whether a name, with or without Ollama's default tag, is one of the model's or of its adapters'."""
    names = service.known_names
    return name in names or name.removesuffix(_LATEST) in names


def routes() -> Routes:
    """Return /api/tags, /api/ps, /api/show, /api/version, /api/pull, and the refusals of `administration_routes`."""
    router = Routes(RouteFacts(errors=OLLAMA_FORM, model="required"), tags=["Ollama"], responses=OLLAMA_ERRORS)
    _add_lists(router)
    _add_named(router)
    router.extend(administration_routes())
    return router


def _add_lists(router: Routes) -> None:

    @router.get("/api/tags", summary="The models")
    async def tags(request: Request) -> Response:
        """List the model under its first name, and its LoRA adapters."""
        service = Service.of(request.scope)
        return json_response({"models": _all_listed(service)})

    @router.get("/api/ps", summary="The models that are loaded")
    async def running(request: Request) -> Response:
        """List the model if it is loaded; it stays so."""
        service = Service.of(request.scope)
        if not service.is_loaded:
            return json_response({"models": []})
        return json_response({"models": loaded_models(service)})

    @router.get("/api/version", summary="The version of Ollama's API")
    async def version() -> Response:
        """Return the version of Ollama that this API follows, and paceline's own."""
        return json_response({"version": FOLLOWED_VERSION, "paceline": __version__})


def _add_named(router: Routes) -> None:

    @router.post("/api/show", summary="Describe the model")
    async def show(body: OllamaModelBody, request: Request) -> Response:
        """Describe the model under one of its names; 404 for any other."""
        service = Service.of(request.scope)
        name = body.model or body.name
        if not name:
            return ollama_error_response(NAME_MISSING)
        if not is_model_name(service, name):
            return ollama_error_response(_not_found(service, name))
        shown = await asyncio.to_thread(shown_model, service, verbose=bool(body.verbose))
        if service.adapter_named(name) is not None:
            shown["details"] |= {"parent_model": service.names[0]}
        warnings = body.field_warnings(strict=service.settings.strict_fields)
        return json_response(shown | ({"warnings": warnings} if warnings else {}))

    @router.post("/api/pull", summary="Check that the model is here", responses=OLLAMA_STREAMS)
    async def pull(body: OllamaModelBody, request: Request) -> Response:
        """Report success for the model that is here, and 404 for any other: nothing is downloaded."""
        service = Service.of(request.scope)
        name = body.model or body.name
        if not name:
            return ollama_error_response(NAME_MISSING)
        if not is_model_name(service, name):
            error = _not_found(service, name)
            return ollama_error_response(replace(error, message=f"{error.message}, and nothing is downloaded"))
        return pull_response(body)


def pull_response(body: OllamaModelBody) -> Response:
    """Return the response to /api/pull of a model that is here: lines that end with success, or one object."""
    if body.stream is False:
        return json_response({"status": "success"})
    steps = ({"status": "pulling manifest"}, {"status": "success"})
    lines = b"".join(JSON_LINES.frame(msgspec.json.encode(step)) for step in steps)
    return Response(lines, media_type=JSON_LINES.media_type.decode())


def administration_routes() -> Routes:
    """Return the routes that would change models. They respond with 501."""
    router = Routes(RouteFacts(errors=OLLAMA_FORM), tags=["Ollama"], responses=OLLAMA_ERRORS)

    async def refuse() -> Response:
        """Refuse what would change models."""
        message = "models are not created, copied, deleted or uploaded over this API; GET /api/tags lists the models"
        return ollama_error_response(ApiError(501, "not_supported_error", "unsupported", message))

    for method, path in _ADMINISTRATION:
        router.add(method, path, refuse, include_in_schema=False)
    return router


def _not_found(service: Service, name: str) -> ApiError:
    message = f"model {name[:200]!r} not found; the one model here is {service.names[0]!r}"
    return ApiError(404, "not_found_error", "model_not_found", message)


def _all_listed(service: Service) -> list[dict[str, Any]]:
    """Return the model, and its LoRA adapters with it as their parent."""
    model = listed_model(service)
    details = model["details"] | {"parent_model": model["name"]}
    adapters = [{"name": one.name, "model": one.name, "details": details} for one in service.adapters()]
    return [model, *(model | adapter for adapter in adapters)]


def listed_model(service: Service) -> dict[str, Any]:
    """Return an entry of a list of models. Before it is loaded there are no facts."""
    name = service.names[0]
    size, digest = 0, ""
    if service.is_loaded:
        model = service.engine().model
        size, digest = model.size_bytes, hashlib.sha256(model.fingerprint).hexdigest()
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp(service.created),
        "size": size,
        "digest": digest,
        "details": _details(service),
    }


def loaded_models(service: Service) -> list[dict[str, Any]]:
    """Return the entries of a list of loaded models: the model, and its LoRA adapters."""
    engine = service.engine()
    more = {"expires_at": _FOREVER, "size_vram": engine.model.size_bytes, "context_length": engine.limits.max_positions}
    return [one | more for one in _all_listed(service)]


def _details(service: Service) -> dict[str, Any]:
    details = {"parent_model": "", "format": "gguf", "family": "", "families": [], "parameter_size": ""}
    if not service.is_loaded:
        return {**details, "quantization_level": ""}
    model = service.engine().model
    family = model.metadata.get("general.architecture", "")
    facts = {"family": family, "families": [family], "parameter_size": _parameter_size(model.n_params)}
    return {**details, **facts, "quantization_level": model.ftype}


def _parameter_size(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def shown_model(service: Service, *, verbose: bool) -> dict[str, Any]:
    """Return the description of the model. Takes time: not on the event loop."""
    engine = service.engine()
    try:
        chat_format: ChatFormat | None = service.chat_format()
    except PacelineError:
        chat_format = None
    return {
        "license": engine.model.metadata.get("general.license", ""),
        "modelfile": "",
        "parameters": "",
        "template": "" if chat_format is None else chat_format.source,
        "details": _details(service),
        "model_info": {
            **model_info(engine.model.metadata, verbose=verbose),
            "general.parameter_count": engine.model.n_params,
        },
        "capabilities": _capabilities(service, chat_format),
        "modified_at": timestamp(service.created),
    }


def model_info(metadata: Mapping[str, str], *, verbose: bool) -> dict[str, Any]:
    """Return the metadata with numbers as numbers. Long values, and the tokenizer's, only if it is verbose."""
    return {
        name: _value(text)
        for name, text in metadata.items()
        if verbose or not (name.startswith("tokenizer.") or len(text) > _LONG)
    }


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text) if len(text) < 40 and text.isascii() and text.lower() not in ("nan", "inf") else text
        except ValueError:
            continue
    return text


def _capabilities(service: Service, chat_format: ChatFormat | None) -> list[str]:
    engine = service.engine()
    has = {
        "completion": engine.model.has_decoder,
        "vision": "image" in engine.model.modalities,
        "tools": chat_format is not None and bool(chat_format.capabilities["supports_tools"]),
        "thinking": chat_format is not None and _thinks(chat_format),
        "insert": engine.tokenizer.fim.can_fill,
        "embedding": can_embed(service),
    }
    return [name for name, is_so in has.items() if is_so]


def _thinks(chat_format: ChatFormat) -> bool:
    try:
        return chat_format.render_turn(Turn([{"role": "user", "content": "Hi"}])).supports_thinking
    except PacelineError:  # a template that needs other messages
        return False
