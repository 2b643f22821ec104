"""All of llama-server's routes but /health and /metrics; /props and /lora-adapters are here. On the event loop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from paceline import __version__
from paceline.demo import demo_model_path
from paceline.errors import PacelineError
from paceline.server.api_errors import not_supported
from paceline.server.json_bodies import JsonRoute, json_response
from paceline.server.llama_server import completion_routes, slots, tokens, vector_routes
from paceline.server.llama_server.bodies import LoraScale
from paceline.server.llama_server.generation_settings import brief_settings
from paceline.server.llama_server.sampling_fields import API_DEFAULTS, parse_lora_scales
from paceline.server.llama_server.state import LlamaServerState
from paceline.server.service import Service

if TYPE_CHECKING:
    from paceline.engine import EngineClient

_MAX_ADAPTER_ENTRIES = 1000  # that one request may set


def routes(service: Service) -> APIRouter:
    """Return the routes of completions, tokens, embeddings, reranking, slots, adapters and properties."""
    state = LlamaServerState.of(service)
    router = APIRouter()
    router.include_router(completion_routes.routes(service, state))
    router.include_router(slots.routes(service, state))
    router.include_router(_adapter_routes(state))
    router.include_router(tokens.routes(service))
    router.include_router(vector_routes.routes(service))
    router.include_router(_props_routes(service))
    return router


def _adapter_routes(state: LlamaServerState) -> APIRouter:
    router = APIRouter(tags=["llama-server"], route_class=JsonRoute)

    @router.get("/lora-adapters", summary="The adapters and their scales")
    async def adapters() -> list[dict[str, Any]]:
        """List the adapters by id. `path` is the file's name alone."""
        return [
            {"id": index, "path": file, "scale": state.scales.get(name, 0.0), "task_name": "", "prompt_prefix": ""}
            for index, (name, file) in enumerate(zip(state.adapters.names, state.adapters.files, strict=True))
        ]

    @router.post("/lora-adapters", summary="Set the adapters' scales")
    async def set_adapters(body: Annotated[list[LoraScale], Field(max_length=_MAX_ADAPTER_ENTRIES)]) -> dict[str, Any]:
        """Set the scales of all later requests without a `lora` of their own; adapters that are not listed are off."""
        warnings: list[str] = []
        state.set_scales(parse_lora_scales(body, state.adapters.names, warnings))
        return {"success": True} | ({"warnings": warnings} if warnings else {})

    return router


def _props_routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["llama-server"])

    @router.get("/props", summary="Properties of the server and its model")
    async def props() -> Response:
        """Return the properties. `model_path` is the file's name alone."""
        engine = service.engine()
        return json_response(_props(service, engine) | {"chat_template": _chat_template(service)})

    @router.post("/props", summary="Change properties")
    async def set_props() -> dict[str, Any]:
        """Change nothing: there is no property to change, as in llama-server."""
        if not service.settings.props:
            raise not_supported("This server does not support changing global properties. Start it with `--props`")
        return {"success": True}

    return router


def _props(service: Service, engine: EngineClient) -> dict[str, Any]:
    settings, tokenizer = service.settings, engine.tokenizer
    return {
        "default_generation_settings": {
            "params": brief_settings(service.sampling(API_DEFAULTS)),
            "n_ctx": engine.limits.max_positions,
        },
        "total_slots": engine.limits.num_slots,
        "model_alias": service.names[0],
        "model_ftype": engine.model.ftype,
        "model_path": Path(settings.model or demo_model_path()).name,
        "modalities": {"vision": False, "video": False, "audio": False},
        "media_marker": "<__media__>",
        "endpoint_slots": settings.slots,
        "endpoint_props": settings.props,
        "endpoint_metrics": settings.metrics,
        "ui": False,
        "ui_settings": {},
        "chat_template_caps": {},
        "bos_token": _token_text(engine, tokenizer.bos),
        "eos_token": _token_text(engine, tokenizer.eos),
        "build_info": f"paceline-{__version__}",
        "is_sleeping": engine.heartbeat().state == "sleeping",
        "cors_proxy_enabled": False,
    }


def _token_text(engine: EngineClient, token: int | None) -> str:
    return "" if token is None else engine.tokenizer.token_bytes(token).decode("utf-8", "replace")


def _chat_template(service: Service) -> str:
    try:
        return service.chat_template().source
    except PacelineError:  # there is none, or it does not parse
        return ""
