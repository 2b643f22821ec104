"""GET and POST /props: what this server is. On the event loop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.responses import Response

from paceline import __version__
from paceline.demo import demo_model_path
from paceline.errors import PacelineError
from paceline.server.llama_server.asking import API_DEFAULTS
from paceline.server.llama_server.settings_shown import brief_settings
from paceline.server.llama_server.writing import json_answer, not_enabled
from paceline.server.service import Service

if TYPE_CHECKING:
    from paceline.engine.any_engine import AnyEngine


def routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["llama-server"])

    @router.get("/props", summary="Properties of the server and its model")
    async def props() -> Response:
        """`model_path` is the file's name alone."""
        engine = service.engine()
        return json_answer(_props(service, engine) | {"chat_template": _chat_template(service)})

    @router.post("/props", summary="Change properties")
    async def set_props() -> dict[str, Any]:
        """There is none to change yet, as in llama-server."""
        if not service.settings.props:
            raise not_enabled("This server does not support changing global properties. Start it with `--props`")
        return {"success": True}

    return router


def _props(service: Service, engine: AnyEngine) -> dict[str, Any]:
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
        "bos_token": _spelt(engine, tokenizer.bos),
        "eos_token": _spelt(engine, tokenizer.eos),
        "build_info": f"paceline-{__version__}",
        "is_sleeping": False,
        "cors_proxy_enabled": False,
    }


def _spelt(engine: AnyEngine, token: int | None) -> str:
    return "" if token is None else engine.tokenizer.token_bytes(token).decode("utf-8", "replace")


def _chat_template(service: Service) -> str:
    try:
        return service.chat_format().source
    except PacelineError:  # there is none, or it does not parse
        return ""
