"""POST /v1/embeddings. On the event loop; texts are tokenised and responses encoded in threads."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from paceline.engine.arguments import embedding_options
from paceline.engine.results import check_prompt_name, checked_dimensions, vectors
from paceline.errors import InvalidParams, Unsupported
from paceline.request import RequestOptions
from paceline.server.api_errors import OPENAI_FORM, naming_param
from paceline.server.dialects.openai.openai_requests import (
    EMBEDDING_OPTIONS,
    OpenAIEmbeddingBody,
    given_fields,
    model_warning,
)
from paceline.server.dialects.request_fields import merge_options
from paceline.server.dialects.vectors import (
    can_embed,
    compute_vectors,
    embedding_input_options,
    read_embedding_inputs,
    truncate_side,
)
from paceline.server.json_bodies import OPENAI_ERRORS, encode_in_parts
from paceline.server.routes import RouteFacts, Routes
from paceline.server.service import Service

Vectors = npt.NDArray[np.float32]

_POOLINGS = ("mean", "cls", "last")


def routes() -> Routes:
    """Return the route."""
    router = Routes(RouteFacts(errors=OPENAI_FORM, model="required"), tags=["OpenAI"])

    @router.post("/v1/embeddings", summary="Turn texts and images into vectors", responses=OPENAI_ERRORS)
    async def embed(body: OpenAIEmbeddingBody, request: Request) -> Response:
        """Compute embeddings, as OpenAI's endpoint. Vectors have length 1."""
        service = Service.of(request.scope)
        engine = service.engine()
        if not can_embed(service):
            raise Unsupported(
                "this model was made to generate, and embeddings are off; start the server with --embeddings"
            )
        with naming_param(OpenAIEmbeddingBody.model_fields):
            warnings = (
                *body.field_warnings(strict=service.settings.strict_fields),
                *model_warning(body, service.known_names),
            )
            check_embedding_body(body, engine.model.n_embd_out)
            options = parse_embedding_options(body, embedding_input_options(service, request, body.model))
            ids = await read_embedding_inputs(service, request, "input", body.input, options)
            rows = await compute_vectors(service, request, ids, _pooling(body, service), options)
        name = service.names[0] if body.model is None else body.model
        members = {"model": name, **({"warnings": warnings} if warnings else {})}
        content = await asyncio.to_thread(embedding_body, rows, body, sum(map(len, ids)), members)
        return Response(content, media_type="application/json")

    return router


def _pooling(body: OpenAIEmbeddingBody, service: Service) -> str | None:
    """Return the request's pooling, else the server's. Raises `Unsupported` if that yields no single vector."""
    pooling = service.settings.pooling if body.pooling is None else body.pooling
    if pooling in ("none", "rank"):
        raise Unsupported(
            f"the server was started with --pooling {pooling}, which makes no embedding; set pooling to mean"
        )
    return pooling


def check_embedding_body(body: OpenAIEmbeddingBody, n_embd: int) -> None:
    """Raise `InvalidParams` for an unknown encoding or pooling, or too many dimensions."""
    if body.encoding_format not in (None, "float", "base64"):
        raise InvalidParams(f'encoding_format must be "float" or "base64", not {body.encoding_format!r:.80}')
    checked_dimensions(body.dimensions, n_embd)
    check_prompt_name(body.prompt_name)
    if body.pooling is not None and body.pooling not in _POOLINGS:
        raise InvalidParams(f"pooling must be one of {', '.join(_POOLINGS)}, not {body.pooling!r:.80}")


def parse_embedding_options(body: OpenAIEmbeddingBody, options: Mapping[str, Any]) -> RequestOptions:
    """Return the options of server and body that apply to embeddings."""
    given = given_fields(body)
    mine = {name: given[name] for name in EMBEDDING_OPTIONS if name in given}
    mine |= {"truncate": truncate_side(mine["truncate"])} if "truncate" in mine else {}
    RequestOptions(**mine)  # raises for wrong values
    return embedding_options(merge_options(options, mine))


def embedding_body(rows: list[Any], body: OpenAIEmbeddingBody, num_tokens: int, members: Mapping[str, Any]) -> bytes:
    """Encode the response. members: those that do not follow from the vectors."""
    found = vectors(rows, "l2", 0, body.dimensions)
    is_base64 = body.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": index, "embedding": to_base64(row) if is_base64 else row.tolist()}
        for index, row in enumerate(found)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return encode_in_parts({"object": "list", "data": data, "usage": usage, **members})


def to_base64(vector: Vectors) -> str:
    """Encode a vector as base64 of little-endian float32."""
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()
