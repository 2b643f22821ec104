"""llama-server's routes except /health and /metrics: tokens, templates, adapters, properties, vectors, streams to read again.

On the event loop; texts are tokenised and large bodies encoded in threads. Each API key sees its own streams only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from fastapi import Query
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__, validation
from paceline.chat import ChatOptions, Turn, next_turn, prepare_chat
from paceline.demo import demo_model_path
from paceline.errors import InvalidParams, PacelineError, Unsupported
from paceline.request import RequestOptions
from paceline.sampling_table import API_DEFAULTS
from paceline.server.api_errors import (
    DEFAULT_RETRY_S,
    OPENAI_FORM,
    ApiError,
    ApiException,
    invalid_request,
    not_supported,
)
from paceline.server.dialects.llama_server.completion_request import brief_settings, parse_lora_scales
from paceline.server.dialects.llama_server.llama_bodies import (
    DetokenizeBody,
    EmbeddingBody,
    LlamaBody,
    LoraScale,
    RerankBody,
    TemplateBody,
    TokenizeBody,
)
from paceline.server.dialects.llama_server.slots import LlamaServerState
from paceline.server.dialects.request_body import cap_warnings, tokenize_mixed, warned, without_fractions
from paceline.server.dialects.vectors import (
    can_embed,
    can_rerank,
    embed_inputs,
    embedding_input_options,
    score_pairs,
    truncate_side,
    vector_options,
)
from paceline.server.flags.setters import spec_type_names
from paceline.server.json_bodies import OPENAI_ERRORS, Responses, encode_in_parts, json_response, large_json_response
from paceline.server.request_context import RequestContext
from paceline.server.request_media import RequestMedia
from paceline.server.resumable_streams import MAX_ID_BYTES, ResumableStream, ResumableStreams
from paceline.server.routes import RouteFacts, Routes
from paceline.server.running_request import run_in_turn
from paceline.server.service import KeptForClients, Server, Service
from paceline.server.sse import LOST, LiveEvents

if TYPE_CHECKING:
    from paceline.engine import EngineClient


MAX_TOKENS = 1 << 20
"""Tokens that a response of POST /tokenize may have: as many as a request may have."""
_MAX_ADAPTER_ENTRIES = 1000  # that one request may set


ROUTES = Routes(RouteFacts(model="required"), tags=["llama-server"])


@ROUTES.get("/lora-adapters", summary="The adapters and their scales")
async def adapters(request: Request) -> list[dict[str, Any]]:
    """List the adapters by id. `path` is the file's name alone."""
    state = Service.of(request.scope).part(LlamaServerState)
    return [
        {"id": index, "path": file, "scale": state.scales.get(name, 0.0), "task_name": "", "prompt_prefix": ""}
        for index, (name, file) in enumerate(state.adapters.items())
    ]


@ROUTES.post("/lora-adapters", summary="Set the adapters' scales", is_limited=False, operator=True)
async def set_adapters(
    body: Annotated[list[LoraScale], Field(max_length=_MAX_ADAPTER_ENTRIES)], request: Request
) -> dict[str, Any]:
    """Set the scales of all later requests without a `lora` of their own; adapters that are not listed are off.

    Needs an operator's key if there are several tenants: the scales are those of all tenants.
    """
    state = Service.of(request.scope).part(LlamaServerState)
    warnings: list[str] = []
    state.service.set_lora_scales(parse_lora_scales(body, tuple(state.adapters), warnings))
    return {"success": True} | warned(warnings)


@ROUTES.get("/props", summary="Properties of the server and its model")
async def props(request: Request) -> Response:
    """Return the properties. `model_path` is the file's name alone."""
    service = Service.of(request.scope)
    engine = service.engine()
    return json_response(_props(service, engine) | _chat_facts(service))


@ROUTES.post("/props", summary="Change properties", operator=True, model="none")
async def set_props(request: Request) -> dict[str, Any]:
    """Change nothing: there is no property to change, as in llama-server."""
    server: Server = request.app.state.service
    if not server.settings.props:
        raise not_supported("This server does not support changing global properties. Start it with `--props`")
    return {"success": True}


def _props(service: Service, engine: EngineClient) -> dict[str, Any]:
    settings, tokenizer = service.settings, engine.tokenizer
    return {
        "default_generation_settings": {
            "params": brief_settings(
                service.sampling(API_DEFAULTS["llama_server"]),
                others={"speculative.types": spec_type_names(engine.config.speculation)},
            ),
            "n_ctx": engine.limits.max_positions,
        },
        "total_slots": engine.limits.num_slots,
        "model_alias": service.names[0],
        "model_ftype": engine.model.ftype,
        "model_path": Path(settings.model or demo_model_path()).name,
        "modalities": {
            "vision": "image" in engine.model.modalities,
            "video": False,
            "audio": "audio" in engine.model.modalities,
        },
        "media_marker": service.media_marker,
        "endpoint_slots": settings.slots,
        "endpoint_props": settings.props,
        "endpoint_metrics": settings.metrics,
        "ui": service.page.files is not None,
        "ui_settings": {},
        "bos_token": _token_text(engine, tokenizer.bos),
        "eos_token": _token_text(engine, tokenizer.eos),
        "build_info": f"paceline-{__version__}",
        "is_sleeping": engine.heartbeat().state == "sleeping",
        "cors_proxy_enabled": False,
    }


def _token_text(engine: EngineClient, token: int | None) -> str:
    return "" if token is None else engine.tokenizer.token_bytes(token).decode("utf-8", "replace")


def _chat_facts(service: Service) -> dict[str, Any]:
    try:
        chat_format = service.chat_format()
    except PacelineError:  # there is none, or it does not parse
        return {"chat_template": "", "chat_template_caps": {}}
    return {"chat_template": chat_format.source, "chat_template_caps": dict(chat_format.capabilities)}


@ROUTES.post("/tokenize", summary="Text to token ids", is_limited=False)
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Return `tokens`: ids, or objects of `id` and `piece`; a piece that is no UTF-8 is a list of bytes.

    With `prompt` or `messages` in place of `content` return `count`, `max_model_len`, `tokens` and `token_strs`, as vLLM
    does.
    """
    service = Service.of(request.scope)
    given = [name for name in ("content", "prompt", "messages") if getattr(body, name) is not None]
    if len(given) > 1:
        raise invalid_request(f"{' and '.join(given)} exclude each other: set one of them", given[1])
    if body.messages is not None:
        media = await service.request_media(body.messages, in_chat=True)
        reply = partial(_chat_tokens, service, body, media)
    else:
        reply = partial(_text_tokens, service, body)
    content = await run_in_turn(service, request, reply, service.options(request))
    return Response(content, media_type="application/json")


@ROUTES.post("/detokenize", summary="Token ids to text", is_limited=False)
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """Return `content`: the text, control tokens included; and the same as `prompt`, the name that vLLM has for it."""
    service = Service.of(request.scope)
    tokenizer = service.engine().tokenizer

    def decode() -> str:
        ids = [] if body.tokens is None else without_fractions(body.tokens)
        return tokenizer.decode(validation.token_ids("tokens", ids, tokenizer.n_vocab), special=True)

    text = await asyncio.to_thread(decode)
    return await large_json_response({"content": text, "prompt": text} | _warnings(service, body))


@ROUTES.get("/tokenizer_info", summary="The tokenizer, as vLLM describes it")
async def tokenizer_info(request: Request) -> Response:
    """Return the special tokens and the chat template, which programs need that have no tokenizer of their own."""
    service = Service.of(request.scope)
    return json_response(await asyncio.to_thread(_tokenizer_info, service))


@ROUTES.post("/apply-template", summary="Messages to the text of a prompt", is_limited=False)
async def apply_template(body: TemplateBody, request: Request) -> Response:
    """Return `prompt`: the text that the chat template renders, with the media marker for each image."""
    service = Service.of(request.scope)
    media = await service.request_media(body.messages, in_chat=True)
    render = partial(_render, service, body, media)
    rendered, warnings = await run_in_turn(service, request, render, service.options(request))
    return await large_json_response({"prompt": rendered} | _warnings(service, body, warnings))


def _render(service: Service, body: TemplateBody, media: RequestMedia) -> tuple[str, tuple[str, ...]]:
    turn, options = _read_chat(service, body, media)
    text = service.chat_format().render_turn(turn, options).text
    shown = text if turn.media is None else turn.media.with_marker(text, service.media_marker)
    return shown, turn.warnings


def _chat_tokens(service: Service, body: TokenizeBody, media: RequestMedia) -> bytes:
    turn, options = _read_chat(service, body, media)
    if turn.media is not None:
        raise Unsupported("messages: images and audio have no token ids; POST /v1/messages/count_tokens counts them")
    chat_format = service.chat_format()
    chat = prepare_chat(chat_format, turn, options)
    ids: Any = chat.prompt(chat_format.tokenizer)
    return encode_in_parts(_vllm_tokens(service, body, ids) | _warnings(service, body, chat.warnings))


def _read_chat(service: Service, body: TemplateBody, media: RequestMedia) -> tuple[Turn, ChatOptions]:
    asked = body.continue_final_message
    if isinstance(asked, str) and asked != "content":
        raise Unsupported(f'continue_final_message must be true, false or "content", not {asked!r:.80}')
    turn = next_turn(
        body.messages,
        continues=None if asked is None else bool(asked),
        generates=body.add_generation_prompt,
        prefills=service.settings.prefill_assistant is not False,
        read_part=media.read_part,
    )
    options = ChatOptions(
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        json_schema=body.json_schema,
        kwargs=service.template_variables(body.chat_template_kwargs or {}, body.reasoning_effort),
    )
    return turn, options


def _check_num_tokens(field: str, ids: Sequence[int]) -> None:
    """Raise `InvalidParams` for more tokens than a response may have. field: the field with their text."""
    if len(ids) > MAX_TOKENS:
        raise InvalidParams(
            f"{field}: {len(ids)} tokens are more than the {MAX_TOKENS} that a response may have; send the text in parts"
        )


def _vllm_tokens(service: Service, body: TokenizeBody, ids: list[int]) -> dict[str, Any]:
    engine = service.engine()
    _check_num_tokens("prompt" if body.messages is None else "messages", ids)
    texts: list[str] | None = None
    if body.return_token_strs:
        known = {token: engine.tokenizer.token_text(token) for token in set(ids)}
        texts = [known[token] for token in ids]
    return {"count": len(ids), "max_model_len": engine.limits.max_positions, "tokens": ids, "token_strs": texts}


def _tokenizer_info(service: Service) -> dict[str, Any]:
    """Return the members of Hugging Face's tokenizer configurations that a GGUF file has."""
    engine = service.engine()
    tokenizer = engine.tokenizer
    special = {role: tokenizer.special_tokens.get(role) for role in ("bos", "eos", "pad", "sep", "mask")}
    added = tokenizer.encode("a")
    return {
        "tokenizer_class": "GGUFTokenizer",
        "vocab_type": tokenizer.vocab_type,
        "vocab_size": tokenizer.n_vocab,
        "model_max_length": engine.limits.max_positions,
        "add_bos_token": added[:1] == [tokenizer.bos],
        "add_eos_token": added[-1:] == [tokenizer.eos],
        **{f"{role}_token": None if token is None else _token_text(engine, token) for role, token in special.items()},
        "chat_template": _chat_facts(service)["chat_template"] or None,
    }


def _text_tokens(service: Service, body: TokenizeBody) -> bytes:
    tokenizer = service.engine().tokenizer
    if body.prompt is not None:
        add = body.add_special_tokens is not False
        ids = tokenize_mixed(tokenizer, "prompt", body.prompt, add_special=add, parse_special=True)
        return encode_in_parts(_vllm_tokens(service, body, ids) | _warnings(service, body))
    tokens: list[Any] = []
    if body.content is not None:
        add, parse = bool(body.add_special), body.parse_special is not False
        tokens = tokenize_mixed(tokenizer, "content", body.content, add_special=add, parse_special=parse)
    _check_num_tokens("content", tokens)
    if body.with_pieces:
        pieces = tokenizer.pieces(special=True)
        known = {token: {"id": token, "piece": _piece_body(pieces[token])} for token in set(tokens)}
        tokens = [known[token] for token in tokens]
    return encode_in_parts({"tokens": tokens} | _warnings(service, body))


def _piece_body(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _warnings(service: Service, body: LlamaBody, more: Sequence[str] = ()) -> dict[str, Any]:
    warnings = cap_warnings([*body.field_warnings(strict=service.settings.strict_fields), *more])
    return warned(warnings)


@ROUTES.post("/embedding", summary="Turn texts and images into vectors, as llama-server does")
@ROUTES.post("/embeddings", include_in_schema=False)
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
    field, value = ("content", body.content) if body.input is None else ("input", body.input)
    if body.encoding_format not in (None, "float", "base64"):
        raise invalid_request("encoding_format must be float or base64", "encoding_format")
    if value is None:
        raise invalid_request('"input" or "content" must be provided', "content")
    rows, _ = await embed_inputs(request, field, value, service.settings.pooling, options, with_media=True)
    kind = service.settings.embd_normalize if body.embd_normalize is None else body.embd_normalize

    def shaped() -> list[dict[str, Any]]:
        arrays = enumerate(map(np.asarray, rows))  # of two dimensions: the vectors of tokens, which are not normalised
        lists = ((at, row.tolist() if row.ndim == 2 else [normalize_as(row, kind).tolist()]) for at, row in arrays)
        return [{"index": at, "embedding": vectors} for at, vectors in lists]

    vectors = await asyncio.to_thread(shaped)
    if warnings:
        vectors[0]["warnings"] = warnings  # a list has no other place for it
    return await large_json_response(vectors)


@ROUTES.post("/rerank", summary="Rank documents by how well they fit a query")
@ROUTES.post("/reranking", include_in_schema=False)
@ROUTES.post("/v1/rerank", errors=OPENAI_FORM, include_in_schema=False)
@ROUTES.post("/v1/reranking", errors=OPENAI_FORM, include_in_schema=False)
@ROUTES.post("/v2/rerank", include_in_schema=False)
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
    rows, num_tokens = await score_pairs(request, field, pairs, options)
    best = sorted(((index, float(row[0])) for index, row in enumerate(rows)), key=lambda ranked: -ranked[1])
    found = best if body.top_n is None else best[: max(0, body.top_n)]
    if field == "texts":
        return await large_json_response(_tei_body(found, documents, warnings, with_text=bool(body.return_text)))
    reply = _jina_body(found, body, service.names[0], num_tokens, warnings)
    return await large_json_response({"id": f"rerank-{RequestContext.of(request.scope).request_id}"} | reply)


def _document_texts(field: str, documents: list[Any]) -> list[str]:
    """Return the text of each document. Raises `ApiException` for an object without a text; other types are checked later."""
    for index, document in enumerate(documents):
        if isinstance(document, dict) and not isinstance(document.get("text"), str):
            message = f'{field}[{index}] must be a text or an object with a text, such as {{"text": "a fox"}}'
            raise invalid_request(message, field)
    return [document["text"] if isinstance(document, dict) else document for document in documents]


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
    } | warned(warnings)


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


_MAX_IDS = 10_000  # of one lookup
_EVENTS: Responses = {200: {"description": "The stream's bytes", "content": {"text/event-stream": {}}}, **OPENAI_ERRORS}

ConversationId = Annotated[str, Query(max_length=MAX_ID_BYTES, description="The request's X-Conversation-Id")]
Offset = Annotated[str, Query(alias="from", max_length=20, description="The number of bytes that are known already")]


_LOADING = ApiError(
    503, "unavailable_error", "loading", "Stream owner model is loading, retry later", retry_after_s=DEFAULT_RETRY_S
)


class LookupBody(BaseModel):
    """Conversations to look up."""

    conversation_ids: list[str] = Field(default=[], max_length=_MAX_IDS)


STREAM_ROUTES = Routes(RouteFacts(errors=OPENAI_FORM), tags=["llama-server"], responses=OPENAI_ERRORS)


@STREAM_ROUTES.get("/v1/stream", summary="Read a stream again, and on", responses=_EVENTS)
async def read(request: Request, conv_id: ConversationId = "", offset: Offset = "") -> Response:
    """Send a conversation's stream from a byte on, and what is still to come of it."""
    owner, streams = _streams(request)
    stream = streams.find(owner, _required(conv_id))
    if streams.is_awaited(owner, conv_id):
        raise ApiException(_LOADING)
    if stream is None:
        raise invalid_request("Stream not found or expired", "conv_id", "stream_not_found", status=404)
    if offset and not (offset.isascii() and offset.isdigit()):
        raise invalid_request(f"Invalid 'from' offset: {offset!r}", "from")
    start = int(offset or "0")
    if start < stream.dropped_bytes:
        raise ApiException(LOST)
    return LiveEvents(stream.reading(start), stream.media_type)


@STREAM_ROUTES.delete("/v1/stream", summary="End a stream", status_code=204)
async def end(request: Request, conv_id: ConversationId = "") -> Response:
    """Cancel a conversation's request if it runs, and forget its stream. 204 also where there is none."""
    owner, streams = _streams(request)
    streams.discard(owner, _required(conv_id))
    return Response(status_code=204)


@STREAM_ROUTES.post("/v1/streams/lookup", summary="Which conversations have a stream")
async def lookup(body: LookupBody, request: Request) -> list[dict[str, Any]]:
    """List the streams of these conversations, and of those whose id is one of these, `::` and more."""
    owner, streams = _streams(request)
    return [_described(stream) for stream in streams.lookup(owner, body.conversation_ids)]


def _streams(request: Request) -> tuple[bytes, ResumableStreams]:
    """Return the digest of the request's API key, and the streams of all keys."""
    return RequestContext.of(request.scope).key_digest, KeptForClients.of(request.scope).resumable_streams


def _required(conversation_id: str) -> str:
    if not conversation_id:
        raise invalid_request("Missing conversation id: conv_id must be given in the query", "conv_id")
    return conversation_id


def _described(stream: ResumableStream) -> dict[str, Any]:
    return {
        "conversation_id": stream.conversation_id,
        "is_done": stream.is_done,
        "total_bytes": stream.total_bytes,
        "started_at": stream.started_at,
        "completed_at": stream.completed_at,
    }
