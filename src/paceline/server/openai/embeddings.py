"""POST /v1/embeddings. On the event loop; texts are tokenised and answers are written in threads."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.engine.prompts import Prompt, embedding_ids, is_batch
from paceline.engine.results import embedding_options, vectors
from paceline.errors import InvalidParams, InvalidType, Unsupported
from paceline.request import RequestOptions
from paceline.runtime.embedder import normalized
from paceline.server.abilities import embeds, vector_options, vectors_of
from paceline.server.json_bodies import JsonRoute
from paceline.server.large_json import encoded_in_parts
from paceline.server.openai.body_fields import EMBEDDING_OPTIONS, OpenAIEmbeddingBody
from paceline.server.openai.documents import ERRORS
from paceline.server.openai.other_fields import judge
from paceline.server.openai.reading import given_fields, model_warning
from paceline.server.openai.refusing import naming_the_field
from paceline.server.options import merged
from paceline.server.service import Service

Vectors = npt.NDArray[np.float32]

_POOLINGS = ("mean", "cls", "last")


def routes(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

    @router.post("/v1/embeddings", summary="Turn texts into vectors", responses=ERRORS)
    async def embed(body: OpenAIEmbeddingBody, request: Request) -> Response:
        """As OpenAI's endpoint of this name. Vectors have length 1."""
        engine = service.engine()
        if not embeds(service):
            raise Unsupported(
                "this model was made to generate, and embeddings are off; start the server with --embeddings"
            )
        with naming_the_field(OpenAIEmbeddingBody.model_fields):
            warnings = (*judge(body.model_extra or {}, OpenAIEmbeddingBody), *model_warning(body, service.names))
            check_body(body, engine.model.n_embd_out)
            options = read_options(body, vector_options(service, request))
            ids = await asyncio.to_thread(input_ids, body.input, engine.tokenizer, options)
            rows = await vectors_of(service, request, ids, _pooling(body, service), options)
        name = service.names[0] if body.model is None else body.model
        told = {"model": name, **({"warnings": warnings} if warnings else {})}
        content = await asyncio.to_thread(embedding_body, rows, body, sum(map(len, ids)), told)
        return Response(content, media_type="application/json")

    return router


def _pooling(body: OpenAIEmbeddingBody, service: Service) -> str | None:
    """The request's, else the server's. Raises `Unsupported` where that makes no one vector of a text."""
    pooling = service.settings.pooling if body.pooling is None else body.pooling
    if pooling in ("none", "rank"):
        raise Unsupported(
            f"the server was started with --pooling {pooling}, which makes no embedding; set pooling to mean"
        )
    return pooling


def check_body(body: OpenAIEmbeddingBody, n_embd: int) -> None:
    """Raises for values that cannot be."""
    if body.encoding_format not in (None, "float", "base64"):
        raise InvalidParams(f'encoding_format must be "float" or "base64", not {body.encoding_format!r:.80}')
    if body.dimensions is not None and body.dimensions > n_embd:
        raise InvalidParams(
            f"dimensions must be at most {n_embd}, which this model's vectors have, not {body.dimensions}"
        )
    if body.pooling is not None and body.pooling not in _POOLINGS:
        raise InvalidParams(f"pooling must be one of {', '.join(_POOLINGS)}, not {body.pooling!r:.80}")


def read_options(body: OpenAIEmbeddingBody, options: Mapping[str, Any]) -> RequestOptions:
    """What of the server's and the body's options an embedding knows."""
    given = given_fields(body)
    mine = {name: given[name] for name in EMBEDDING_OPTIONS if name in given}
    RequestOptions(**mine)  # says what is wrong with them
    return embedding_options(merged(options, mine))


def input_ids(given: Any, tokenizer: Any, options: RequestOptions) -> list[list[int]]:
    """The token ids of every text of an input. Raises what is wrong with them."""
    if not isinstance(given, (str, list)):
        raise InvalidType(f"input must be a text, token ids or a list of these, not {given!r:.80}")
    if given == []:
        raise InvalidParams("input must not be an empty list")
    if not is_batch(given):
        return [embedding_ids("input", given, tokenizer, options)]
    return [embedding_ids(f"input[{index}]", _text(index, one), tokenizer, options) for index, one in enumerate(given)]


def _text(index: int, one: Any) -> Prompt:
    if not isinstance(one, (str, list)):
        raise InvalidType(f"input[{index}] must be a text or token ids, not {one!r:.80}")
    return one


def embedding_body(rows: list[Any], body: OpenAIEmbeddingBody, num_tokens: int, told: Mapping[str, Any]) -> bytes:
    """The answer. told: its members that do not follow from the vectors."""
    found = shortened(vectors(rows, "l2", 0), body.dimensions)
    is_base64 = body.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": index, "embedding": as_base64(row) if is_base64 else row.tolist()}
        for index, row in enumerate(found)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return encoded_in_parts({"object": "list", "data": data, "usage": usage, **told})


def shortened(found: Vectors, dimensions: int | None) -> Vectors:
    """The first so many numbers of each vector, which has length 1 again."""
    return found if dimensions is None else normalized(np.ascontiguousarray(found[:, :dimensions]), "l2")


def as_base64(vector: Vectors) -> str:
    """The numbers as little-endian float32."""
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()
