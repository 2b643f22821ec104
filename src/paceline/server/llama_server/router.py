"""All of llama-server's routes but /health and /metrics. On the event loop."""

from __future__ import annotations

from fastapi import APIRouter

from paceline.server.llama_server import adapters, completion, embedding, props, rerank, slots, tokens
from paceline.server.llama_server.state import LlamaState
from paceline.server.service import Service


def routes(service: Service) -> APIRouter:
    """/completion, /infill, /tokenize, /detokenize, /embedding, /rerank, /props, /slots, /lora-adapters and their aliases."""
    state = LlamaState.of(service)
    router = APIRouter()
    router.include_router(completion.routes(service, state))
    router.include_router(slots.routes(service, state))
    router.include_router(adapters.routes(state))
    for module in (tokens, embedding, rerank, props):
        router.include_router(module.routes(service))
    return router
