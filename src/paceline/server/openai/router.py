"""All of OpenAI's routes. On the event loop."""

from __future__ import annotations

from fastapi import APIRouter

from paceline.server.openai import chat, completions, embeddings, models
from paceline.server.service import Service


def routes(service: Service) -> APIRouter:
    """/v1/models, /v1/completions, /v1/chat/completions, /v1/embeddings."""
    router = APIRouter()
    for module in (models, completions, chat, embeddings):
        router.include_router(module.routes(service))
    return router
