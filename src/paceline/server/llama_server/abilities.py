"""Whether this server embeds and reranks: where it was started for it, or its model is made for nothing else."""

from __future__ import annotations

from paceline.server.llama_server.writing import not_enabled
from paceline.server.service import Service

_RANK = "4"  # llama.cpp's number of the pooling


def check_embedding(service: Service) -> None:
    """Raises a refusal (501) where it does not embed."""
    if not (service.settings.embeddings or _pooling(service)):
        raise not_enabled("This server does not support embeddings. Start it with `--embeddings`")


def check_reranking(service: Service) -> None:
    """Raises a refusal (501) where it does not rerank."""
    if not (service.settings.reranking or _pooling(service) == _RANK):
        raise not_enabled("This server does not support reranking. Start it with `--reranking`")


def _pooling(service: Service) -> str:
    """llama.cpp's number of the pooling that the model's file names; empty where it names none."""
    metadata = service.engine().model.metadata
    return metadata.get(f"{metadata.get('general.architecture', '')}.pooling_type", "")
