"""Vectors of texts, and whether this server makes them: where it was started for it, or its model is made for it.

On the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from paceline.request import RequestOptions
from paceline.server.exchange import Exchange
from paceline.server.llama_server.writing import not_enabled
from paceline.server.openai.asking import ask
from paceline.server.service import Service
from paceline.streaming import FinishReason, Usage

_POOLINGS = {"1": "mean", "2": "cls", "3": "last", "4": "rank"}  # by llama.cpp's numbers


def check_embedding(service: Service) -> None:
    """Raises a refusal (501) where it does not embed."""
    is_made_for_it = not service.engine().model.has_decoder or _pooling(service) in ("mean", "cls", "last")
    if not (service.settings.embeddings or is_made_for_it):
        raise not_enabled("This server does not support embeddings. Start it with `--embeddings`")


def check_reranking(service: Service) -> None:
    """Raises a refusal (501) where it does not rerank."""
    if not (service.settings.reranking or "rank" in (service.settings.pooling, _pooling(service))):
        raise not_enabled("This server does not support reranking. Start it with `--reranking`")


async def vectors_of(
    service: Service, request: Request, ids: Sequence[Sequence[int]], pooling: str | None
) -> list[Any]:
    """A vector for each text of these tokens, not normalised; it is written into the log. Raises as `ask`."""
    engine = service.engine()
    given = service.options(request)
    options = RequestOptions(**{name: given[name] for name in ("request_id", "timeout_s") if name in given})
    rows = await ask(service, request, lambda: engine.embed(ids, pooling, options))
    num_tokens = sum(map(len, ids))
    Exchange.of(request.scope).endings.append((FinishReason.END, Usage(prompt_tokens=num_tokens)))
    return rows


def _pooling(service: Service) -> str:
    """The pooling that the model's file names; empty where it names none."""
    metadata = service.engine().model.metadata
    return _POOLINGS.get(metadata.get(f"{metadata.get('general.architecture', '')}.pooling_type", ""), "")
