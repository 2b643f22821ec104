"""GET and POST /lora-adapters: the scales that apply to requests which do not say. On the event loop."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from paceline.server.json_bodies import JsonRoute
from paceline.server.llama_server.asking import lora_scales
from paceline.server.llama_server.bodies import LoraScale
from paceline.server.llama_server.state import LlamaState

_MOST = 1000  # entries that are read


def routes(state: LlamaState) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["llama-server"], route_class=JsonRoute)

    @router.get("/lora-adapters", summary="The adapters and their scales")
    async def adapters() -> list[dict[str, Any]]:
        """By id. `path` is the file's name alone."""
        return [
            {"id": index, "path": file, "scale": state.scales.get(name, 0.0), "task_name": "", "prompt_prefix": ""}
            for index, (name, file) in enumerate(zip(state.adapters.names, state.adapters.files, strict=True))
        ]

    @router.post("/lora-adapters", summary="Set the adapters' scales")
    async def set_adapters(body: Annotated[list[LoraScale], Field(max_length=_MOST)]) -> dict[str, Any]:
        """For all requests from now on that have no `lora` of their own; adapters that are not in the list do not apply."""
        warnings: list[str] = []
        state.set_scales(lora_scales(body, state.adapters.names, warnings))
        return {"success": True} | ({"warnings": warnings} if warnings else {})

    return router
