"""Vectors of texts: whether this server makes them, and how it asks for them. On the event loop.

It does where it was started for it, or its model is made for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from paceline.errors import InvalidParams
from paceline.request import RequestOptions
from paceline.server.exchange import Exchange
from paceline.server.questions import ask
from paceline.server.service import Service
from paceline.streaming import FinishReason, Usage

MAX_TEXTS = 8192
"""Texts of one request; more of them would hold up everybody else's while they are read and answered."""

_POOLINGS = {"1": "mean", "2": "cls", "3": "last", "4": "rank"}  # by llama.cpp's numbers


def embeds(service: Service) -> bool:
    """Whether it makes embeddings. Raises where the model is not loaded."""
    is_made_for_it = not service.engine().model.has_decoder or _pooling(service) in ("mean", "cls", "last")
    return service.settings.embeddings or is_made_for_it


def reranks(service: Service) -> bool:
    """Whether it scores documents. Raises where the model is not loaded."""
    return service.settings.reranking or "rank" in (service.settings.pooling, _pooling(service))


async def vectors_of(
    service: Service,
    request: Request,
    ids: Sequence[Sequence[int]],
    pooling: str | None,
    options: RequestOptions,
    *,
    field: str = "input",
) -> list[Any]:
    """A vector for each text of these tokens, not normalised; it is written into the log.

    field: what the body calls the texts. Raises `InvalidParams` for more than `MAX_TEXTS`, and as `ask`.
    """
    if len(ids) > MAX_TEXTS:
        raise InvalidParams(f"{field}: {len(ids)} texts are more than the {MAX_TEXTS} of one request; send several")
    rows = await ask(service, request, lambda: service.engine().embed(ids, pooling, options))
    num_tokens = sum(map(len, ids))
    Exchange.of(request.scope).endings.append((FinishReason.END, Usage(prompt_tokens=num_tokens)))
    return rows


def vector_options(service: Service, request: Request) -> dict[str, Any]:
    """Keywords of `RequestOptions` that mean something for a vector and follow from the HTTP request and the settings."""
    given = service.options(request)
    return {name: given[name] for name in ("request_id", "timeout_s") if name in given}


def _pooling(service: Service) -> str:
    """The pooling that the model's file names; empty where it names none."""
    metadata = service.engine().model.metadata
    return _POOLINGS.get(metadata.get(f"{metadata.get('general.architecture', '')}.pooling_type", ""), "")
