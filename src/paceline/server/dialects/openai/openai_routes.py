"""All of OpenAI's routes; /v1/models and the cancellation of requests are here. On the event loop."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request

from paceline.server.api_errors import LLAMA_FORM, OPENAI_FORM, invalid_request
from paceline.server.dialects.openai import (
    chat_completions,
    classification,
    completions,
    embeddings,
    lora_routes,
    transcriptions,
)
from paceline.server.json_bodies import OPENAI_ERRORS
from paceline.server.request_context import RequestContext
from paceline.server.routes import RouteFacts, Routes
from paceline.server.service import Service

if TYPE_CHECKING:
    from paceline.engine.adapters import LoraAdapter


def routes() -> Routes:
    """Return the routes of models, LoRA adapters, completions, chat completions, embeddings and classification."""
    router = Routes(RouteFacts(errors=OPENAI_FORM, model="required"))
    router.extend(_model_routes())
    for module in (completions, chat_completions, embeddings, classification, lora_routes, transcriptions):
        router.extend(module.routes())
    return router


CANCEL: Final = """Cancel by the X-Request-Id of a response, within the tenant of the API key.

`cancelled` is whether there was such a request; its stream ends with the code "cancelled"."""


def cancel_routes(cancel_all: Callable[[str, str], bool], description: str) -> Routes:
    """Return the route /v1/requests/{id}/cancel, which does not wake a sleeping engine.

    Args:
        cancel_all: Cancels all requests of an id and a tenant, and returns whether there was any.
        description: For the API's document.
    """
    router = Routes(RouteFacts(errors=OPENAI_FORM, while_draining=True), tags=["requests"], responses=OPENAI_ERRORS)

    @router.post("/v1/requests/{request_id:path}/cancel", summary="Cancel a running request", description=description)
    async def cancel(request_id: str, request: Request) -> dict[str, Any]:
        tenant = RequestContext.of(request.scope).tenant
        return {"id": request_id, "cancelled": cancel_all(request_id, tenant)}

    return router


def _model_routes() -> Routes:
    router = Routes(RouteFacts(errors=OPENAI_FORM, model="required"), tags=["OpenAI"], responses=OPENAI_ERRORS)

    async def models(request: Request) -> dict[str, Any]:
        """List the model under its first name, with facts of its file, and its LoRA adapters."""
        service = Service.of(request.scope)
        name = service.names[0]
        adapters = service.adapters()
        is_multimodal = service.is_loaded and bool(set(service.engine().model.modalities) - {"text"})
        listed = [
            ollama_listing(name, is_multimodal=is_multimodal),
            *(ollama_listing(one.name, parent=name, is_multimodal=is_multimodal) for one in adapters),
        ]
        data = [model_body(service, name), *(_adapter_body(service, one) for one in adapters)]
        # Anthropic's, as type, display_name and created_at
        page = {"has_more": False, "first_id": name, "last_id": data[-1]["id"]}
        return {"models": listed, "object": "list", "data": data, **page}

    router.add("GET", "/v1/models", models, summary="The models")
    router.add("GET", "/models", models, errors=LLAMA_FORM, summary="As /v1/models")

    @router.get("/v1/models/{model_id:path}", summary="One model")
    async def model(model_id: str, request: Request) -> dict[str, Any]:
        """Describe the model under one of its names, or an adapter; 404 for any other."""
        service = Service.of(request.scope)
        adapter = next((one for one in service.adapters() if one.name == model_id), None)
        if adapter is not None:
            return _adapter_body(service, adapter)
        if model_id not in service.names:
            message = f"there is no model {model_id[:200]!r} here; GET /v1/models lists those that there are"
            raise invalid_request(message, "model", "model_not_found", status=404)
        return model_body(service, model_id)

    return router


def model_body(service: Service, name: str) -> dict[str, Any]:
    """Return OpenAI's description of a model, with llama-server's members: aliases, tags, facts of its file.

    There are no facts before it is loaded. type, display_name and created_at are Anthropic's.
    """
    settings = service.settings
    body: dict[str, Any] = {"id": name, "object": "model", "created": service.created, "owned_by": "paceline"}
    created_at = datetime.fromtimestamp(service.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    body |= {"type": "model", "display_name": name, "created_at": created_at}
    body |= {"aliases": list(dict.fromkeys(settings.aliases)), "tags": list(dict.fromkeys(settings.tags))}
    return body | {"meta": model_facts(service) if service.is_loaded else None}


def _adapter_body(service: Service, adapter: LoraAdapter) -> dict[str, Any]:
    """Return the description of a LoRA adapter, with vLLM's members: its file's name as root, and the model as parent."""
    body = model_body(service, adapter.name) | {"aliases": [], "tags": [], "meta": None}
    return body | {"root": Path(adapter.path).name, "parent": service.names[0]}


def ollama_listing(name: str, parent: str = "", *, is_multimodal: bool = False) -> dict[str, Any]:
    """Return the model in Ollama's form of a list, as llama-server does; the members have no values there."""
    nothing = dict.fromkeys(("modified_at", "size", "digest", "description", "parameters"), "")
    details = {"parent_model": parent, "format": "gguf", "family": "", "families": [""]}
    return {
        "name": name,
        "model": name,
        **nothing,
        "type": "model",
        "tags": [""],
        "capabilities": ["completion", "multimodal"] if is_multimodal else ["completion"],
        "details": {**details, "parameter_size": "", "quantization_level": ""},
    }


def model_facts(service: Service) -> dict[str, Any]:
    """Return what llama-server lists of a loaded model."""
    engine = service.engine()
    model = engine.model
    return {
        "vocab_type": model.tokenizer.vocab_type,
        "n_vocab": model.n_vocab,
        "n_ctx": engine.limits.max_positions,
        "n_ctx_train": model.n_ctx_train,
        "n_embd": model.n_embd,
        "n_params": model.n_params,
        "size": model.size_bytes,
        "ftype": model.ftype,
    }
