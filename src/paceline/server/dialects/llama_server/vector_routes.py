"""POST /embedding and /rerank with their aliases: vectors of texts, and how well documents fit a query.

On the event loop; texts are tokenised and bodies encoded in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from paceline.request import RequestOptions
from paceline.server.api_errors import OPENAI_FORM, invalid_request, not_supported
from paceline.server.dialects.llama_server.llama_bodies import EmbeddingBody, RerankBody
from paceline.server.dialects.vectors import (
    can_embed,
    can_rerank,
    compute_vectors,
    embedding_input_options,
    read_embedding_inputs,
    tokenize_pairs,
    truncate_side,
    vector_options,
)
from paceline.server.json_bodies import large_json_response
from paceline.server.request_context import RequestContext
from paceline.server.routes import RouteFacts, Routes
from paceline.server.service import Service


def routes() -> Routes:
    """Return the routes."""
    router = Routes(RouteFacts(model="required"), tags=["llama-server"])

    @router.post("/embedding", summary="Turn texts and images into vectors, as llama-server does")
    @router.post("/embeddings", include_in_schema=False)
    async def embed(body: EmbeddingBody, request: Request) -> Response:
        """Compute embeddings: a list of `index` and `embedding`.

        `embedding` is a list of one vector or, without pooling, of one per token.
        """
        service = Service.of(request.scope)
        if not can_embed(service):
            raise not_supported("This server does not support embeddings. Start it with `--embeddings`")
        warnings = body.field_warnings(strict=service.settings.strict_fields)
        options = RequestOptions(
            **embedding_input_options(service, request, body.model),
            truncate=truncate_side(body.truncate),
            parse_special=True,
        )
        field, value = _input(body)
        ids = await read_embedding_inputs(service, request, field, value, options)
        rows = await compute_vectors(service, request, ids, service.settings.pooling, options, field=field)
        return await large_json_response(
            await asyncio.to_thread(_embedding_body, rows, body, service.settings.embd_normalize, warnings)
        )

    @router.post("/rerank", summary="Rank documents by how well they fit a query")
    @router.post("/reranking", include_in_schema=False)
    @router.post("/v1/rerank", errors=OPENAI_FORM, include_in_schema=False)
    @router.post("/v1/reranking", errors=OPENAI_FORM, include_in_schema=False)
    @router.post("/v2/rerank", include_in_schema=False)
    async def rerank(body: RerankBody, request: Request) -> Response:
        """Rank documents, best first, `top_n` of them. With `texts` in place of `documents` a plain list as in TEI.

        The response has the members of Jina's API, and the `id` of Cohere's.
        """
        service = Service.of(request.scope)
        if not can_rerank(service):
            raise not_supported("This server does not support reranking. Start it with `--reranking`")
        warnings = body.field_warnings(strict=service.settings.strict_fields)
        documents = body.documents or body.texts
        if not isinstance(documents, list) or not documents:
            raise invalid_request('"documents" must be a non-empty string array', "documents")
        options = RequestOptions(**vector_options(service, request, body.model), truncate=truncate_side(body.truncate))
        field = "documents" if body.documents else "texts"
        pairs = [(body.query, text) for text in _document_texts(field, documents)]
        ids = await tokenize_pairs(service, request, field, pairs, options)
        rows = await compute_vectors(service, request, ids, "rank", options, field=field)
        found = _rank([float(row[0]) for row in rows], len(documents) if body.top_n is None else body.top_n)
        if field == "texts":
            return await large_json_response(_tei_body(found, documents, warnings, with_text=bool(body.return_text)))
        reply = _jina_body(found, body, service.names[0], sum(map(len, ids)), warnings)
        return await large_json_response({"id": f"rerank-{RequestContext.of(request.scope).request_id}"} | reply)

    return router


def _input(body: EmbeddingBody) -> tuple[str, Any]:
    """Return the field with the texts and its value."""
    field, value = ("content", body.content) if body.input is None else ("input", body.input)
    if body.encoding_format not in (None, "float", "base64"):
        raise invalid_request("encoding_format must be float or base64", "encoding_format")
    if value is None:
        raise invalid_request('"input" or "content" must be provided', "content")
    return field, value


def _embedding_body(
    rows: Sequence[Any], body: EmbeddingBody, embd_normalize: int, warnings: list[str]
) -> list[dict[str, Any]]:
    kind = embd_normalize if body.embd_normalize is None else body.embd_normalize
    shaped: list[dict[str, Any]] = [
        {"index": index, "embedding": _vectors(np.asarray(row), kind)} for index, row in enumerate(rows)
    ]
    if warnings:
        shaped[0]["warnings"] = warnings  # a list has no other place for it
    return shaped


def _vectors(row: Any, kind: int) -> list[list[float]]:
    """Return a text's vector, normalised, or the vectors of its tokens, which stay as they are."""
    return row.tolist() if row.ndim == 2 else [normalize_as(row, kind).tolist()]


def _document_texts(field: str, documents: list[Any]) -> list[str]:
    """Return the text of each document. Raises `ApiException` for an object without one; other types are checked later."""
    for index, document in enumerate(documents):
        if isinstance(document, dict) and not isinstance(document.get("text"), str):
            message = f'{field}[{index}] must be a text or an object with a text, such as {{"text": "a fox"}}'
            raise invalid_request(message, field)
    return [document["text"] if isinstance(document, dict) else document for document in documents]


def _rank(scores: list[float], top_n: int) -> list[tuple[int, float]]:
    best = sorted(enumerate(scores), key=lambda one: -one[1])
    return best[: max(0, top_n)]


def _tei_body(
    found: list[tuple[int, float]], texts: list[Any], warnings: list[str], *, with_text: bool
) -> list[dict[str, Any]]:
    shown = _document_texts("texts", texts) if with_text else []
    ranks: list[dict[str, Any]] = [
        {"index": index, "score": score} | ({"text": shown[index]} if with_text else {}) for index, score in found
    ]
    if warnings and ranks:
        ranks[0]["warnings"] = warnings  # a list has no other place for it
    return ranks


def _jina_body(
    found: list[tuple[int, float]], body: RerankBody, model: str, num_tokens: int, warnings: list[str]
) -> dict[str, Any]:
    def document(index: int) -> dict[str, Any]:
        if not body.return_documents or body.documents is None:
            return {}
        given = body.documents[index]
        return {"document": given if isinstance(given, dict) else {"text": given}}

    return {
        "model": body.model or model,
        "object": "list",
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        "results": [{"index": index, **document(index), "relevance_score": score} for index, score in found],
    } | ({"warnings": warnings} if warnings else {})


_NONE, _MAX_ABS, _EUCLIDEAN = -1, 0, 2
_INT16 = 32760.0  # the largest component that `_MAX_ABS` gives


def normalize_as(vector: npt.NDArray[np.float32], kind: int) -> npt.NDArray[np.float32]:
    """Normalise as --embd-normalize: -1 none, 0 largest component 32760, 1 taxicab, 2 euclidean, p above: p-norm."""
    if kind == _NONE:
        return vector
    values = np.abs(vector.astype(np.float64))
    if kind == _MAX_ABS:
        size = values.max(initial=0.0) / _INT16
    elif kind == _EUCLIDEAN:
        size = float(np.sqrt(np.square(values).sum()))
    else:
        largest = values.max(initial=0.0)  # taken out, so that a high power neither ends at 0 nor at infinity
        size = largest * float(np.power(np.power(values / (largest or 1.0), kind).sum(), 1.0 / kind))
    return (vector / size if size > 0 else np.zeros_like(vector)).astype(np.float32)
