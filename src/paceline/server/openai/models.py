"""GET /v1/models, /v1/models/{id} and /models: the one model, by each of its names. On the event loop."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from paceline.server.openai.documents import ERRORS
from paceline.server.openai.refusing import refused
from paceline.server.service import Service


def routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["OpenAI"], responses=ERRORS)

    async def models() -> dict[str, Any]:
        """Every name of the model, with what its file says."""
        data = [model_body(service, name) for name in service.names]
        return {"models": [_listed(name) for name in service.names], "object": "list", "data": data}

    router.add_api_route("/v1/models", models, methods=["GET"], summary="The models")
    router.add_api_route("/models", models, methods=["GET"], summary="As /v1/models")

    @router.get("/v1/models/{model_id:path}", summary="One model")
    async def model(model_id: str) -> dict[str, Any]:
        """404 where there is none of this name."""
        if model_id not in service.names:
            message = f"there is no model {model_id[:200]!r} here; GET /v1/models lists those that there are"
            raise refused(message, "model", "model_not_found", status=404)
        return model_body(service, model_id)

    return router


def model_body(service: Service, name: str) -> dict[str, Any]:
    """A model as OpenAI tells it, and its facts as llama-server does; no facts before it is loaded."""
    body: dict[str, Any] = {"id": name, "object": "model", "created": service.created, "owned_by": "paceline"}
    others = [other for other in service.names if other != name]
    return {**body, "aliases": others, "tags": [], "meta": _meta(service) if service.is_loaded else None}


def _listed(name: str) -> dict[str, Any]:
    """A model as llama-server lists it a second time, for clients that know such lists from elsewhere; it says no more there."""
    nothing = dict.fromkeys(("modified_at", "size", "digest", "description", "parameters"), "")
    details = {"parent_model": "", "format": "gguf", "family": "", "families": [""]}
    return {
        "name": name,
        "model": name,
        **nothing,
        "type": "model",
        "tags": [""],
        "capabilities": ["completion"],
        "details": {**details, "parameter_size": "", "quantization_level": ""},
    }


def _meta(service: Service) -> dict[str, Any]:
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
