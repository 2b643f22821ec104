"""POST /rerank and its aliases: how well documents fit a query. On the event loop; texts are tokenised in threads."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.engine.pairs import all_pairs
from paceline.request import RequestOptions
from paceline.server.abilities import reranks, vector_options, vectors_of
from paceline.server.json_bodies import JsonRoute
from paceline.server.llama_server.bodies import RerankBody
from paceline.server.llama_server.writing import bad_request, large_json_answer, not_enabled
from paceline.server.service import Service


def routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["llama-server"], route_class=JsonRoute)

    @router.post("/rerank", summary="Rank documents by how well they fit a query")
    @router.post("/reranking", include_in_schema=False)
    @router.post("/v1/rerank", include_in_schema=False)
    @router.post("/v1/reranking", include_in_schema=False)
    async def rerank(body: RerankBody, request: Request) -> Response:
        """Best first, `top_n` of them. With `texts` in place of `documents` a plain list, as TEI answers."""
        engine = service.engine()
        if not reranks(service):
            raise not_enabled("This server does not support reranking. Start it with `--reranking`")
        documents = body.documents or body.texts
        if not isinstance(documents, list) or not documents:
            raise bad_request('"documents" must be a non-empty string array', "documents")
        ids = await asyncio.to_thread(all_pairs, engine.model, body.query, documents)
        options = RequestOptions(**vector_options(service, request))
        field = "texts" if body.documents is None else "documents"
        rows = await vectors_of(service, request, ids, "rank", options, field=field)
        found = _ranked([float(row[0]) for row in rows], len(documents) if body.top_n is None else body.top_n)
        if body.texts is not None:
            return await large_json_answer(_as_tei(found, documents, with_text=bool(body.return_text)))
        return await large_json_answer(_as_jina(found, body, service.names[0], sum(map(len, ids))))

    return router


def _ranked(scores: list[float], top_n: int) -> list[tuple[int, float]]:
    best = sorted(enumerate(scores), key=lambda one: -one[1])
    return best[: max(0, top_n)]


def _as_tei(found: list[tuple[int, float]], texts: list[str], *, with_text: bool) -> list[dict[str, Any]]:
    return [{"index": index, "score": score} | ({"text": texts[index]} if with_text else {}) for index, score in found]


def _as_jina(found: list[tuple[int, float]], body: RerankBody, model: str, num_tokens: int) -> dict[str, Any]:
    warnings = body.ignored()
    return {
        "model": body.model or model,
        "object": "list",
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        "results": [{"index": index, "relevance_score": score} for index, score in found],
    } | ({"warnings": warnings} if warnings else {})
