"""POST /embedding and /embeddings: texts to vectors, in llama-server's own shape. On the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.request import RequestOptions
from paceline.runtime import Tokenizer
from paceline.server.abilities import embeds, vector_options, vectors_of
from paceline.server.json_bodies import JsonRoute
from paceline.server.llama_server.bodies import EmbeddingBody
from paceline.server.llama_server.norms import normalised
from paceline.server.llama_server.prompts import all_prompts
from paceline.server.llama_server.writing import bad_request, large_json_answer, not_enabled
from paceline.server.service import Service


def routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["llama-server"], route_class=JsonRoute)

    @router.post("/embedding", summary="Turn texts into vectors, as llama-server does")
    @router.post("/embeddings", include_in_schema=False)
    async def embed(body: EmbeddingBody, request: Request) -> Response:
        """A list of `index` and `embedding`, which is a list of vectors: one of the text, or, without pooling, one a token."""
        engine = service.engine()
        if not embeds(service):
            raise not_enabled("This server does not support embeddings. Start it with `--embeddings`")
        ids = await asyncio.to_thread(_all_ids, engine.tokenizer, body)
        options = RequestOptions(**vector_options(service, request))
        rows = await vectors_of(service, request, ids, service.settings.pooling, options, field=_field(body))
        return await large_json_answer(await asyncio.to_thread(_shaped, rows, body, service.settings.embd_normalize))

    return router


def _all_ids(tokenizer: Tokenizer, body: EmbeddingBody) -> list[list[int]]:
    name = _field(body)
    value = body.content if body.input is None else body.input
    if body.encoding_format not in (None, "float", "base64"):
        raise bad_request("encoding_format must be float or base64", "encoding_format")
    if value is None:
        raise bad_request('"input" or "content" must be provided', "content")
    many = [_plain(one) for one in value] if isinstance(value, list) else _plain(value)
    return all_prompts(tokenizer, name, many)


def _field(body: EmbeddingBody) -> str:
    return "content" if body.input is None else "input"


def _plain(value: Any) -> Any:
    """An object of OpenAI's content parts as the text that they are."""
    if not isinstance(value, dict) or "content" not in value:
        return value
    parts = value["content"]
    if not isinstance(parts, list) or not all(isinstance(one, dict) and one.get("type") == "text" for one in parts):
        raise bad_request("content must be a list of parts of the type text: this model reads nothing else", "content")
    return "".join(str(one.get("text", "")) for one in parts)


def _shaped(rows: Sequence[Any], body: EmbeddingBody, embd_normalize: int) -> list[dict[str, Any]]:
    kind = embd_normalize if body.embd_normalize is None else body.embd_normalize
    shaped: list[dict[str, Any]] = [
        {"index": index, "embedding": _vectors(np.asarray(row), kind)} for index, row in enumerate(rows)
    ]
    if warnings := body.ignored():
        shaped[0]["warnings"] = warnings  # a list has no other place for it
    return shaped


def _vectors(row: Any, kind: int) -> list[list[float]]:
    """Vectors of tokens stay as they are; only a whole text's is normalised."""
    return row.tolist() if row.ndim == 2 else [normalised(row, kind).tolist()]
