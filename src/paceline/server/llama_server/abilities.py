"""Whether this server embeds and reranks: where it was started for it, or its model is made for nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.request import RequestOptions
from paceline.server.llama_server.writing import not_enabled
from paceline.server.service import Service

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


def plain_options(options: Mapping[str, Any]) -> RequestOptions:
    """Of the options that follow from an HTTP request those that an embedding knows."""
    return RequestOptions(**{name: options[name] for name in ("request_id", "timeout_s") if name in options})


def _pooling(service: Service) -> str:
    """The pooling that the model's file names; empty where it names none."""
    metadata = service.engine().model.metadata
    return _POOLINGS.get(metadata.get(f"{metadata.get('general.architecture', '')}.pooling_type", ""), "")
