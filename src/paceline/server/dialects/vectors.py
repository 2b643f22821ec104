"""Embeddings and rerank scores: whether this server computes them, and the call to the engine. On the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import Request

from paceline.engine.prompts import EmbeddingPrompt
from paceline.engine.results import submit_async
from paceline.errors import Cancelled, InvalidParams, Unsupported
from paceline.request import RequestOptions
from paceline.server.dialects.request_body import MarkedImages, is_prompt_list, read_inputs, tokenize_inputs
from paceline.server.in_flight import PendingCall, while_wanted
from paceline.server.request_context import DisconnectWatcher, RequestContext
from paceline.server.running_request import less_waited, run_in_turn, timeouts_of
from paceline.server.service import Service
from paceline.streaming import FinishReason, Usage

T = TypeVar("T")

MAX_TEXTS = 8192
"""Texts of one request; more of them would delay other requests while they are parsed and encoded."""

MAX_NUMBERS = 16 << 20
"""Numbers in the response to one request with pooling "none", which has a vector per token: about 350 MB of JSON."""

_POOLINGS = {"1": "mean", "2": "cls", "3": "last", "4": "rank"}  # by llama.cpp's numbers


def can_embed(service: Service) -> bool:
    """Return whether embeddings are enabled or the model is an embedding model. Raises if it is not loaded."""
    is_made_for_it = not service.engine().model.has_decoder or _model_pooling(service) in ("mean", "cls", "last")
    return service.settings.embeddings or is_made_for_it


def can_rerank(service: Service) -> bool:
    """Return whether reranking is enabled or the model is a reranker. Raises if it is not loaded."""
    return service.settings.reranking or "rank" in (service.settings.pooling, _model_pooling(service))


def _check_num_texts(field: str, texts: Sequence[object]) -> None:
    if len(texts) > MAX_TEXTS:
        raise InvalidParams(f"{field}: {len(texts)} texts are more than the {MAX_TEXTS} of one request; send several")


async def embed_inputs(
    request: Request, field: str, value: Any, pooling: str | None, options: RequestOptions, *, with_media: bool = False
) -> tuple[list[Any], int]:
    """Return a vector, not normalised, for each input in a body's field, and the number of tokens.

    With pooling "none" there is a row per token. Inputs that are too long are truncated or refused.

    Args:
        request: The HTTP request.
        field: The field of the body.
        value: Its value.
        pooling: The pooling; None: the model's.
        options: The options of the request.
        with_media: Whether inputs may have images and audio.

    Raises:
        InvalidParams: There are more than `MAX_TEXTS` texts or `MAX_NUMBERS` numbers.
        PacelineError: As `run_in_turn`, `tokenize_inputs`, `read_inputs` and `call_engine`.
    """
    service = Service.of(request.scope)
    engine = service.engine()
    if is_prompt_list(value):
        _check_num_texts(field, value)
    images = MarkedImages(service.media_marker, await service.request_media(value)) if with_media else None

    def read() -> list[EmbeddingPrompt]:
        longest = engine.limits.max_embedding_tokens
        if images is None:
            return engine.embeddable(tokenize_inputs(engine.tokenizer, field, value, options, longest), options)
        return engine.embeddable(read_inputs(engine.tokenizer, field, value, options, longest, images), options)

    ids = await run_in_turn(service, request, read, timeouts_of(options))
    return await _compute(request, field, ids, pooling, options)


async def score_pairs(
    request: Request, field: str, pairs: Sequence[tuple[str, str]], options: RequestOptions
) -> tuple[list[Any], int]:
    """Return the scores of each query with its document, and the number of tokens. field: the documents' field.

    Raises as `EngineClient.pairs` and `embed_inputs`.
    """
    service = Service.of(request.scope)
    engine = service.engine()
    _check_num_texts(field, pairs)

    def tokenize() -> list[list[int]]:
        if len({query for query, _ in pairs}) == 1:
            return engine.pairs(pairs[0][0], while_wanted([document for _, document in pairs]), options)
        return [engine.pairs(query, [document], options)[0] for query, document in while_wanted(pairs)]

    ids = await run_in_turn(service, request, tokenize, timeouts_of(options))
    return await _compute(request, field, ids, "rank", options)


async def _compute(
    request: Request, field: str, ids: Sequence[EmbeddingPrompt], pooling: str | None, options: RequestOptions
) -> tuple[list[Any], int]:
    """Return a vector, not normalised, for each prompt, and the number of tokens. With pooling "none" a row per token.

    The usage is recorded for the access log. Raises `InvalidParams` for more than `MAX_TEXTS` or `MAX_NUMBERS`, and as
    `call_engine`.
    """
    service = Service.of(request.scope)
    _check_num_texts(field, ids)
    num_tokens = sum(map(len, ids))
    most = MAX_NUMBERS // service.engine().model.n_embd_out
    if pooling == "none" and num_tokens > most:
        raise InvalidParams(
            f"{field}: {num_tokens} tokens are more than the {most} of one request without pooling; send several"
        )
    context = RequestContext.of(request.scope)
    context.operation = "embeddings"
    options = replace(options, **less_waited(timeouts_of(options), context.waited_s))
    context.reserve(num_tokens)

    def submit() -> Future[list[Any]]:
        future = service.engine().embed(ids, pooling, options)
        context.num_parts += 1  # not if it was refused, which costs nothing
        return future

    rows = await call_engine(service, request, submit)
    context.finished.append((FinishReason.STOP, Usage(prompt_tokens=num_tokens)))
    return rows, num_tokens


_TRUNCATIONS = {"true": "right", "false": None, "START": "left", "END": "right", "NONE": None}


def truncate_side(value: Any) -> Any:
    """Return a body's `truncate` as `RequestOptions` takes it.

    Clients of TEI send a bool, clients of NVIDIA's API START, END or NONE. Other values are returned for the options to check.
    """
    name = str(value).lower() if isinstance(value, bool) else value
    return _TRUNCATIONS.get(name, value) if isinstance(name, str) else value


def vector_options(service: Service, request: Request, model: str | None) -> dict[str, Any]:
    """Return the keywords of `RequestOptions` that apply to vectors, from the HTTP request and the settings.

    Raises `Unsupported` if `model` names a LoRA adapter, and as `Service.adapter_named`.
    """
    if service.adapter_named(model) is not None:
        raise Unsupported(f"model: LoRA adapters do not apply to vectors and scores; take {service.names[0]!r}")
    given = service.options(request)
    return {name: given[name] for name in ("request_id", "timeout_s") if name in given}


def embedding_input_options(service: Service, request: Request, model: str | None) -> dict[str, Any]:
    """Return `vector_options` with the tenant, so that encoded images and audio are not shared with other tenants."""
    return {**vector_options(service, request, model), "tenant": RequestContext.of(request.scope).tenant}


def _model_pooling(service: Service) -> str:
    metadata = service.engine().model.metadata
    return _POOLINGS.get(metadata.get(f"{metadata.get('general.architecture', '')}.pooling_type", ""), "")


async def call_engine(service: Service, request: Request, submit: Callable[[], Future[list[Any]]]) -> list[Any]:
    """Call `submit` in a thread and wait for its Future, as `until_left` does."""
    service.check_accepting()
    return await until_left(service, request, submit_async(submit))


async def until_left(service: Service, request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await the work of a request, whose body must have been read; its client's disconnection cancels the work.

    Raises the errors of the work, `ClientDisconnected` after a disconnection, `Cancelled` after a cancellation by id.
    """
    context = RequestContext.of(request.scope)
    call = PendingCall(context.request_id, context.tenant, asyncio.ensure_future(work))
    watcher = DisconnectWatcher(request.receive)
    watcher.on_disconnect(call.future.cancel)
    service.request_registry.add(call)
    try:
        found: T = await call.future
    except asyncio.CancelledError:
        watcher.raise_if_disconnected()
        if call.is_cancelled:
            raise Cancelled("the request was cancelled") from None
        raise
    finally:
        watcher.close()
        service.request_registry.remove(call)
    return found
