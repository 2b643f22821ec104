"""POST /v1/embeddings, /classify and /score as vLLM has them, and /v1/score_choices.

On the event loop; texts are tokenised in threads.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from paceline.engine.arguments import embedding_options, reranking_options
from paceline.engine.results import check_prompt_name, checked_dimensions, probabilities, vectors
from paceline.engine.scoring import (
    ScoringCall,
    checked_normalization,
    encoded_choices,
    probabilities_of,
    scoring_options,
)
from paceline.errors import CapacityError, InvalidParams, Unsupported
from paceline.request import RequestOptions
from paceline.server.api_errors import OPENAI_FORM, invalid_request, naming_param
from paceline.server.dialects.dialect import model_warning
from paceline.server.dialects.openai.openai_requests import (
    EMBEDDING_OPTIONS,
    SCORING_FIELDS,
    ClassifyBody,
    OpenAIBody,
    OpenAIEmbeddingBody,
    ScoreBody,
    ScoreChoicesBody,
    given_fields,
)
from paceline.server.dialects.request_body import merge_options, warned
from paceline.server.dialects.vectors import (
    MAX_TEXTS,
    can_embed,
    can_rerank,
    embed_inputs,
    embedding_input_options,
    score_pairs,
    truncate_side,
    until_left,
    vector_options,
)
from paceline.server.in_flight import while_wanted
from paceline.server.json_bodies import OPENAI_ERRORS, encode_in_parts, large_json_response
from paceline.server.request_context import RequestContext
from paceline.server.routes import RouteFacts, Routes
from paceline.server.running_request import MAX_LOGPROBS, MAX_REPEATED_CHARS, less_waited, run_in_turn
from paceline.server.service import Service
from paceline.streaming import FinishReason, Usage
from paceline.streaming.chunk import ChoiceScore

_POOLINGS = ("mean", "cls", "last")


_FACTS = RouteFacts(errors=OPENAI_FORM, model="required")


ROUTES = Routes(_FACTS, tags=["OpenAI"])


@ROUTES.post("/v1/embeddings", summary="Turn texts and images into vectors", responses=OPENAI_ERRORS)
async def embed(body: OpenAIEmbeddingBody, request: Request) -> Response:
    """Compute embeddings, as OpenAI's endpoint. Vectors have length 1."""
    service = Service.of(request.scope)
    engine = service.engine()
    if not can_embed(service):
        raise Unsupported("this model was made to generate, and embeddings are off; start the server with --embeddings")
    with naming_param(OpenAIEmbeddingBody.model_fields):
        warnings = (*body.field_warnings(strict=service.settings.strict_fields), *model_warning(service, body.model))
        if body.encoding_format not in (None, "float", "base64"):
            raise InvalidParams(f'encoding_format must be "float" or "base64", not {body.encoding_format!r:.80}')
        checked_dimensions(body.dimensions, engine.model.n_embd_out)
        check_prompt_name(body.prompt_name)
        if body.pooling is not None and body.pooling not in _POOLINGS:
            raise InvalidParams(f"pooling must be one of {', '.join(_POOLINGS)}, not {body.pooling!r:.80}")
        defaults, given = embedding_input_options(service, request, body.model), given_fields(body)
        mine = {name: given[name] for name in EMBEDDING_OPTIONS if name in given}
        mine |= {"truncate": truncate_side(mine["truncate"])} if "truncate" in mine else {}
        RequestOptions(**mine)  # raises for wrong values
        options = embedding_options(merge_options(defaults, mine))
        pooling = service.settings.pooling if body.pooling is None else body.pooling
        if pooling in ("none", "rank"):
            raise Unsupported(
                f"the server was started with --pooling {pooling}, which makes no embedding; set pooling to mean"
            )
        rows, num_tokens = await embed_inputs(request, "input", body.input, pooling, options, with_media=True)
    name = service.names[0] if body.model is None else body.model
    members = {"model": name, **warned(warnings)}

    def encode() -> bytes:
        data = [
            {"object": "embedding", "index": index, "embedding": _base64(row) if is_base64 else row.tolist()}
            for index, row in enumerate(vectors(rows, "l2", 0, body.dimensions))
        ]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return encode_in_parts({"object": "list", "data": data, "usage": usage, **members})

    is_base64 = body.encoding_format == "base64"
    content = await asyncio.to_thread(encode)
    return Response(content, media_type="application/json")


def _base64(vector: npt.NDArray[np.float32]) -> str:
    """Encode a vector as base64 of little-endian float32."""
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()


SCORE_ROUTES = Routes(_FACTS, tags=["vLLM"], responses=OPENAI_ERRORS)


@SCORE_ROUTES.post("/classify", summary="Classify texts")
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
        rows, num_tokens = await embed_inputs(request, "input", body.input, "rank", options)
    model = service.engine().model
    found = probabilities(model, rows) if body.use_activation is not False else np.stack(rows)
    labels = model.class_labels
    data = [
        {"index": index, "label": labels[int(probs.argmax())], "probs": probs.tolist(), "num_classes": len(probs)}
        for index, probs in enumerate(found)
    ]
    return await large_json_response(_scores_body(service, body, _id("classify", request), data, num_tokens, warnings))


@SCORE_ROUTES.post("/score", summary="Score pairs of texts")
@SCORE_ROUTES.post("/v1/score", include_in_schema=False)
async def score(body: ScoreBody, request: Request) -> Response:
    """Score pairs of texts: by a reranking model, or by the cosine of the texts' embeddings.

    One text of `text_1` goes with each of `text_2`; lists of the same length pair by pair.
    """
    service = Service.of(request.scope)
    with naming_param(ScoreBody.model_fields, query="text_1", documents="text_2"):
        pairs = _pairs(body)
        warnings = body.field_warnings(strict=service.settings.strict_fields)
        scored = _scored_by_pairs if can_rerank(service) else _scored_by_cosine
        values, num_tokens = await scored(service, request, body, pairs)
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(values)]
    return await large_json_response(_scores_body(service, body, _id("score", request), data, num_tokens, warnings))


def _pairs(body: ScoreBody) -> list[tuple[str, str]]:
    first: Any
    second: Any
    first, second = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
    for name, texts in (("text_1", first), ("text_2", second)):
        if not (isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts)):
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
) -> tuple[list[float], int]:
    engine = service.engine()
    options = reranking_options(
        {**vector_options(service, request, body.model), "truncate": truncate_side(body.truncate)}
    )
    rows, num_tokens = await score_pairs(request, "text_2", pairs, options)
    found = probabilities(engine.model, rows) if body.use_activation is not False else np.stack(rows)
    return [float(row[0]) for row in found], num_tokens


async def _scored_by_cosine(
    service: Service, request: Request, body: ScoreBody, pairs: Sequence[tuple[str, str]]
) -> tuple[list[float], int]:
    if not can_embed(service):
        raise Unsupported(
            "this model was made to generate, and has no scores; use a reranking or an embedding model, or start the server with "
            "--embeddings"
        )
    options = embedding_options(
        {**vector_options(service, request, body.model), "truncate": truncate_side(body.truncate)}
    )
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    pooling = None if service.settings.pooling in ("none", "rank") else service.settings.pooling
    rows, num_tokens = await embed_inputs(request, "text_2", texts, pooling, options)
    found = dict(zip(texts, vectors(rows, "l2", 0), strict=True))
    return [float(found[first] @ found[second]) for first, second in pairs], num_tokens


def _scores_body(
    service: Service, body: OpenAIBody, name: str, data: list[dict[str, Any]], num_tokens: int, warnings: Sequence[str]
) -> dict[str, Any]:
    return {
        "id": name,
        "object": "list",
        "created": int(time.time()),
        "model": service.names[0] if body.model is None else body.model,
        "data": data,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    } | warned([*warnings, *model_warning(service, body.model)])


def _id(kind: str, request: Request) -> str:
    return f"{kind}-{RequestContext.of(request.scope).request_id}"


CHOICE_ROUTES = Routes(_FACTS, tags=["engine"], responses=OPENAI_ERRORS)


@CHOICE_ROUTES.post("/v1/score_choices", summary="Score choices after a prompt")
async def score_choices(body: ScoreChoicesBody, request: Request) -> Response:
    """Return the log-likelihood of each choice after the prompt, and their distribution.

    The shared prefix is computed once, unless `cache_prompt` is false.
    """
    service = Service.of(request.scope)
    with naming_param(ScoreChoicesBody.model_fields):
        warnings = body.field_warnings(strict=service.settings.strict_fields)
        by = checked_normalization("none" if body.length_normalization is None else body.length_normalization)
        given = given_fields(body)
        server = {name: value for name, value in service.options(request, body.model).items() if name != "special"}
        mine = {name: given[name] for name in SCORING_FIELDS if given.get(name) is not None}
        RequestOptions(**mine)  # raises for wrong values
        options = merge_options({"parse_special": True, **server}, mine)
        scores, num_shared = await _choice_scores(service, request, body, options)
    probs = probabilities_of(scores, by)
    data = [
        {
            "index": score.index,
            "object": "choice_score",
            "logprob": score.logprob,
            "prob": probs[score.index],
            "is_greedy": score.is_greedy,
            "num_bytes": score.num_bytes,
            "token_ids": score.token_ids,
            "logprobs": score.logprobs,
        }
        for score in scores
    ]
    num_tokens = num_shared + sum(len(score.token_ids) for score in scores)
    return await large_json_response(_scores_body(service, body, _id("choices", request), data, num_tokens, warnings))


async def _choice_scores(
    service: Service, request: Request, body: ScoreChoicesBody, options: Mapping[str, Any]
) -> tuple[list[ChoiceScore], int]:
    """Return the scores, and the number of tokens before the scored ones."""
    engine, context = service.engine(), RequestContext.of(request.scope)
    choices: Any = body.choices
    texts: list[Any] = choices if isinstance(choices, list) else []  # other types are refused below
    num_choices = len(texts)
    if num_choices > MAX_TEXTS:
        raise InvalidParams(
            f"choices: {num_choices} choices are more than the {MAX_TEXTS} of one request; send several"
        )
    if isinstance(body.prompt, (str, list)) and len(body.prompt) * num_choices > MAX_REPEATED_CHARS:
        raise InvalidParams(
            f"choices: the prompt is encoded with each of the {num_choices} choices, and all of them may have "
            f"{MAX_REPEATED_CHARS} characters together; send several requests"
        )

    def encode() -> ScoringCall:
        since = time.monotonic()
        encoded = encoded_choices(engine.tokenizer, body.prompt, choices, scoring_options(options), while_wanted)
        num_scored = sum(map(len, encoded.prompts)) - encoded.num_shared * len(encoded.prompts)
        if num_scored > MAX_LOGPROBS:
            raise InvalidParams(
                f"choices: {num_scored} tokens are more than the {MAX_LOGPROBS} of a response; send several requests"
            )
        return ScoringCall(
            engine, encoded, scoring_options(less_waited(options, context.waited_s + time.monotonic() - since))
        )

    service.check_accepting()
    num_bytes = 0
    if isinstance(body.prompt, str):  # encoded with each choice
        num_bytes = len(body.prompt) * num_choices + sum(len(choice) for choice in texts if isinstance(choice, str))
    call = await run_in_turn(service, request, encode, options, num_bytes=num_bytes)
    service.check_accepting()
    max_open = min(
        engine.config.num_slots, engine.most_requests(options.get("tenant", ""))
    )  # other requests find room in the queue
    context.reserve(call.num_tokens)
    context.num_parts += 1
    try:
        scores = await until_left(service, request, call.result_of_all(max_open))
    except CapacityError:  # a refused request costs nothing
        context.num_parts -= 1
        raise
    num_cached = max(0, call.num_tokens - call.num_computed)
    context.finished.append((FinishReason.STOP, Usage(prompt_tokens=call.num_tokens, cached_tokens=num_cached)))
    return scores, call.num_shared
