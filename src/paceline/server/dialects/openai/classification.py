"""POST /classify, /score and /v1/score, as vLLM has them. On the event loop; texts are tokenised in threads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from paceline.engine.arguments import embedding_options, reranking_options
from paceline.engine.results import probabilities, vectors
from paceline.errors import Unsupported
from paceline.server.api_errors import OPENAI_FORM, invalid_request, naming_param
from paceline.server.dialects.openai.openai_requests import ClassifyBody, OpenAIBody, ScoreBody, model_warning
from paceline.server.dialects.vectors import (
    MAX_TEXTS,
    can_embed,
    can_rerank,
    compute_vectors,
    tokenize_pairs,
    tokenize_texts,
    truncate_side,
    vector_options,
)
from paceline.server.json_bodies import OPENAI_ERRORS, large_json_response
from paceline.server.request_context import RequestContext
from paceline.server.routes import RouteFacts, Routes
from paceline.server.service import Service


def routes() -> Routes:
    """Return the routes."""
    router = Routes(RouteFacts(errors=OPENAI_FORM, model="required"), tags=["vLLM"], responses=OPENAI_ERRORS)

    @router.post("/classify", summary="Classify texts")
    async def classify(body: ClassifyBody, request: Request) -> Response:
        """Return the class of each text, with the probabilities of all classes. Needs a classification model."""
        service = Service.of(request.scope)
        if not can_rerank(service):
            raise Unsupported("this model was not made to classify; start the server with --reranking if it can")
        with naming_param(ClassifyBody.model_fields):
            warnings = body.field_warnings(strict=service.settings.strict_fields)
            options = embedding_options(
                {
                    **vector_options(service, request, body.model),
                    "truncate": truncate_side(body.truncate),
                    "parse_special": True,
                }
            )
            ids = await tokenize_texts(service, request, "input", body.input, options)
            rows = await compute_vectors(service, request, ids, "rank", options)
        model = service.engine().model
        found = probabilities(model, rows) if body.use_activation is not False else np.stack(rows)
        labels = model.class_labels
        data = [
            {"index": index, "label": labels[int(probs.argmax())], "probs": probs.tolist(), "num_classes": len(probs)}
            for index, probs in enumerate(found)
        ]
        return await large_json_response(_body(service, body, _id("classify", request), data, ids, warnings))

    @router.post("/score", summary="Score pairs of texts")
    @router.post("/v1/score", include_in_schema=False)
    async def score(body: ScoreBody, request: Request) -> Response:
        """Score pairs of texts: by a reranking model, or by the cosine of the texts' embeddings.

        One text of `text_1` goes with each of `text_2`; lists of the same length pair by pair.
        """
        service = Service.of(request.scope)
        with naming_param(ScoreBody.model_fields, query="text_1", documents="text_2"):
            pairs = _pairs(body)
            warnings = body.field_warnings(strict=service.settings.strict_fields)
            scored = _scored_by_pairs if can_rerank(service) else _scored_by_cosine
            values, ids = await scored(service, request, body, pairs)
        data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(values)]
        return await large_json_response(_body(service, body, _id("score", request), data, ids, warnings))

    return router


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)


def _pairs(body: ScoreBody) -> list[tuple[str, str]]:
    """Return the pairs of texts. Raises for lists that do not fit."""
    first, second = ([one] if isinstance(one, str) else one for one in (body.text_1, body.text_2))
    for name, texts in (("text_1", first), ("text_2", second)):
        if not _is_text_list(texts):
            raise invalid_request(f"{name} must be a text or a list of texts that is not empty", name)
    if len(first) not in (1, len(second)):
        message = f"text_1 must have one text, or as many as text_2 ({len(second)}), not {len(first)}"
        raise invalid_request(message, "text_1")
    if len(second) > MAX_TEXTS:
        message = f"text_2: {len(second)} texts are more than the {MAX_TEXTS} of one request; send several"
        raise invalid_request(message, "text_2")
    return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


async def _scored_by_pairs(
    service: Service, request: Request, body: ScoreBody, pairs: Sequence[tuple[str, str]]
) -> tuple[list[float], list[list[int]]]:
    engine = service.engine()
    options = reranking_options(
        {**vector_options(service, request, body.model), "truncate": truncate_side(body.truncate)}
    )
    ids = await tokenize_pairs(service, request, "text_2", pairs, options)
    rows = await compute_vectors(service, request, ids, "rank", options, field="text_2")
    found = probabilities(engine.model, rows) if body.use_activation is not False else np.stack(rows)
    return [float(row[0]) for row in found], ids


async def _scored_by_cosine(
    service: Service, request: Request, body: ScoreBody, pairs: Sequence[tuple[str, str]]
) -> tuple[list[float], list[list[int]]]:
    if not can_embed(service):
        raise Unsupported(
            "this model was made to generate, and has no scores; use a reranking or an embedding model, or start the server with "
            "--embeddings"
        )
    options = embedding_options(
        {**vector_options(service, request, body.model), "truncate": truncate_side(body.truncate)}
    )
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    ids = await tokenize_texts(service, request, "text_2", texts, options)
    pooling = None if service.settings.pooling in ("none", "rank") else service.settings.pooling
    rows = await compute_vectors(service, request, ids, pooling, options, field="text_2")
    found = dict(zip(texts, vectors(rows, "l2", 0), strict=True))
    return [float(found[first] @ found[second]) for first, second in pairs], ids


def _body(
    service: Service,
    body: OpenAIBody,
    name: str,
    data: list[dict[str, Any]],
    ids: list[list[int]],
    warnings: Sequence[str],
) -> dict[str, Any]:
    num_tokens, all_warnings = sum(map(len, ids)), [*warnings, *model_warning(body, service.known_names)]
    return {
        "id": name,
        "object": "list",
        "created": int(time.time()),
        "model": service.names[0] if body.model is None else body.model,
        "data": data,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    } | ({"warnings": all_warnings} if all_warnings else {})


def _id(kind: str, request: Request) -> str:
    return f"{kind}-{RequestContext.of(request.scope).request_id}"
