"""All of Ollama's routes; here: chats, completions and embeddings. On the event loop; templates run in threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from paceline.chat import Turn, next_turn
from paceline.engine.arguments import embedding_options
from paceline.engine.results import checked_dimensions, vectors
from paceline.errors import Unsupported
from paceline.server.api_errors import OLLAMA_FORM, invalid_request, ollama_error_event
from paceline.server.dialects.ollama import ollama_models
from paceline.server.dialects.ollama.ollama_events import (
    ChatLines,
    CompletionLines,
    OllamaReply,
    chat_body,
    completion_body,
    loaded_body,
)
from paceline.server.dialects.ollama.ollama_models import is_model_name
from paceline.server.dialects.ollama.ollama_requests import (
    OLLAMA_DEFAULTS,
    OllamaBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaGenerationBody,
    ParsedOllama,
    images_of,
    is_unload,
    ollama_conversation,
    option_warnings,
    parse_ollama,
    with_images,
)
from paceline.server.dialects.request_body import cap_warnings
from paceline.server.dialects.running_chat import start_chat
from paceline.server.dialects.vectors import can_embed, compute_vectors, tokenize_texts, vector_options
from paceline.server.json_bodies import OLLAMA_ERRORS, OLLAMA_STREAMS, encode_in_parts
from paceline.server.media_input.request_media import known_attachment
from paceline.server.routes import RouteFacts, Routes
from paceline.server.running_request import start_request
from paceline.server.service import Service
from paceline.server.sse import JSON_LINES, EventStream, Render


def routes() -> Routes:
    """Return the routes under /api."""
    router = Routes(RouteFacts(errors=OLLAMA_FORM, model="required"))
    router.extend(_generation_routes())
    router.extend(_embedding_routes())
    router.extend(ollama_models.routes())
    return router


def _generation_routes() -> Routes:
    router = Routes(RouteFacts(errors=OLLAMA_FORM, model="required"), tags=["Ollama"])

    @router.post("/api/chat", summary="Generate the next message of a conversation", responses=OLLAMA_STREAMS)
    async def chat(body: OllamaChatBody, request: Request) -> Response:
        """Generate the assistant's next message, as Ollama's endpoint: lines of JSON, or with `stream` false one object."""
        service = Service.of(request.scope)
        parsed = await _parsed(service, body)
        reply = _reply(service, body, parsed, is_chat=True)
        if not body.messages and isinstance(body.messages, list | None):
            return _json(loaded_body(reply, unloads=is_unload(body)))
        media = await service.request_media(in_chat=True)
        return await _chat(
            service, request, body, parsed, reply, lambda: _turn(service, ollama_conversation(body.messages, media))
        )

    @router.post("/api/generate", summary="Complete a prompt", responses=OLLAMA_STREAMS)
    async def generate(body: OllamaGenerateBody, request: Request) -> Response:
        """Complete a prompt by the model's chat template, or with `raw` or `suffix` as it is."""
        service = Service.of(request.scope)
        parsed = await _parsed(service, body)
        reply = _reply(service, body, parsed, is_chat=False)
        if not body.prompt and not body.suffix and not body.images:
            return _json(loaded_body(reply, unloads=is_unload(body)))
        media = await service.request_media()
        images = await asyncio.to_thread(images_of, "images", body.images, media)
        if body.raw or body.suffix:
            return await _complete(service, request, body, images, parsed, reply)
        system = [{"role": "system", "content": body.system}] if body.system else []
        talk = [*system, {"role": "user", "content": with_images(body.prompt or "", images)}]
        return await _chat(service, request, body, parsed, reply, lambda: next_turn(talk, read_part=known_attachment))

    return router


async def _parsed(service: Service, body: OllamaGenerationBody) -> ParsedOllama:
    base, reasoning_format = service.sampling(OLLAMA_DEFAULTS), service.settings.reasoning_format
    strict = service.settings.strict_fields
    return await asyncio.to_thread(
        parse_ollama, body, base, service.template_variables, reasoning_format, strict=strict
    )


def _reply(service: Service, body: OllamaGenerationBody, parsed: ParsedOllama, *, is_chat: bool) -> OllamaReply:
    return OllamaReply(
        model=body.model or service.names[0],
        is_chat=is_chat,
        num_top=parsed.num_top,
        warnings=(*parsed.warnings, *_model_warning(service, body)),
    )


def _model_warning(service: Service, body: OllamaBody) -> tuple[str, ...]:
    if body.model is None or is_model_name(service, body.model):
        return ()
    return (f"model: the one model here is {service.names[0]!r}; it was used",)


def _turn(service: Service, conversation: list[dict[str, Any]]) -> Turn:
    """Return the turn; an assistant's last message is continued, as in Ollama."""
    prefills = service.settings.prefill_assistant is not False
    return next_turn(conversation, prefills=prefills, read_part=known_attachment)


async def _chat(
    service: Service,
    request: Request,
    body: OllamaGenerationBody,
    parsed: ParsedOllama,
    reply: OllamaReply,
    make_turn: Callable[[], Turn],
) -> Response:
    streaming = body.stream is not False
    options = service.options(request, body.model)
    running = await start_chat(service, request, make_turn, parsed.chat, parsed.params, options, streaming=streaming)
    reply = replace(reply, warnings=(*reply.warnings, *running.warnings))
    if streaming:
        return _lines(running, ChatLines(reply))
    async with running:
        completion = await running.collect()
    return _json(await asyncio.to_thread(chat_body, reply, completion))


async def _complete(
    service: Service,
    request: Request,
    body: OllamaGenerateBody,
    images: Sequence[object],
    parsed: ParsedOllama,
    reply: OllamaReply,
) -> Response:
    streaming = body.stream is not False
    prompts: list[Any] = [[*images, body.prompt or ""] if images else body.prompt or ""]
    options = {**service.options(request, body.model), "parse_special": True, "suffix": body.suffix or None}
    running = await start_request(service, request, prompts, parsed.params, options, streaming=streaming)
    if streaming:
        return _lines(running, CompletionLines(reply))
    async with running:
        (completion,) = await running.collect()
    return _json(await asyncio.to_thread(completion_body, reply, completion))


def _lines(running: Any, render: Render) -> Response:
    return EventStream(running, render, failure=ollama_error_event, done=b"", framing=JSON_LINES)


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def _embedding_routes() -> Routes:
    router = Routes(RouteFacts(errors=OLLAMA_FORM, model="required"), tags=["Ollama"], responses=OLLAMA_ERRORS)

    @router.post("/api/embed", summary="Turn texts into vectors")
    async def embed(body: OllamaEmbedBody, request: Request) -> Response:
        """Compute embeddings of length 1, as Ollama's endpoint."""
        service = Service.of(request.scope)
        began = time.monotonic()
        n_embd = service.engine().model.n_embd_out
        checked_dimensions(body.dimensions, n_embd)
        texts: Any = body.input
        if isinstance(texts, list) and any(not isinstance(one, str) for one in texts):
            raise invalid_request("input must be a text or a list of texts", "input")
        rows, num_tokens = await _vectors(
            service, request, body.model, "input", texts, truncates=body.truncate is not False
        )
        found = vectors(rows, "l2", n_embd, body.dimensions)
        warnings = _embedding_warnings(service, body)
        members = {
            "model": body.model or service.names[0],
            "embeddings": [row.tolist() for row in found],
            "total_duration": max(1, round((time.monotonic() - began) * 1e9)),
            "load_duration": 0,
            "prompt_eval_count": num_tokens,
            **({"warnings": warnings} if warnings else {}),
        }
        return _json(await asyncio.to_thread(encode_in_parts, members))

    @router.post("/api/embeddings", summary="Turn a text into a vector: the older form")
    async def embeddings(body: OllamaEmbeddingsBody, request: Request) -> Response:
        """Compute the embedding of one text, not normalised; long texts are cut."""
        service = Service.of(request.scope)
        rows, _ = await _vectors(service, request, body.model, "prompt", body.prompt or [], truncates=True)
        warnings = _embedding_warnings(service, body)
        vector = vectors(rows, "none", 0)[0].tolist() if rows else []
        return _json(encode_in_parts({"embedding": vector, **({"warnings": warnings} if warnings else {})}))

    return router


def _embedding_warnings(service: Service, body: OllamaBody) -> tuple[str, ...]:
    own = option_warnings(body, strict=service.settings.strict_fields)
    return cap_warnings((*own, *_model_warning(service, body)))


async def _vectors(
    service: Service, request: Request, model: str | None, field: str, texts: Any, *, truncates: bool
) -> tuple[list[Any], int]:
    """Return a vector for each text, and the number of tokens."""
    if not can_embed(service):
        raise Unsupported("this model was made to generate, and embeddings are off; start the server with --embeddings")
    if service.settings.pooling in ("none", "rank"):
        raise Unsupported(f"the server was started with --pooling {service.settings.pooling}, which makes no embedding")
    if texts == []:
        return [], 0
    options = embedding_options({**vector_options(service, request, model), "truncate": "right" if truncates else None})
    ids = await tokenize_texts(service, request, field, texts, options)
    rows = await compute_vectors(service, request, ids, service.settings.pooling, options, field=field)
    return rows, sum(map(len, ids))
