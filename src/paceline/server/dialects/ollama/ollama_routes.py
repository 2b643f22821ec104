"""Ollama's API: its models, chats, completions and embeddings. On the event loop; templates run in threads.

Requests that would create, copy, delete or upload models are refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.chat import ChatChunk, ChatCompletion, ChatFormat, ToolCall, Turn, next_turn
from paceline.engine.arguments import embedding_options
from paceline.engine.results import checked_dimensions, vectors
from paceline.errors import PacelineError, Unsupported
from paceline.sampling_table import API_DEFAULTS
from paceline.server.api_errors import ApiError, ErrorForm, invalid_request
from paceline.server.dialects.dialect import (
    ChatGeneration,
    DialectReply,
    Generation,
    TextGeneration,
    model_warning,
    serve,
)
from paceline.server.dialects.ollama.ollama_requests import (
    OllamaBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaModelBody,
    images_of,
    is_unload,
    ollama_conversation,
    option_warnings,
    parse_ollama,
    with_images,
)
from paceline.server.dialects.request_body import cap_warnings, warned
from paceline.server.dialects.token_reports import ChatLogprob, chat_logprobs
from paceline.server.dialects.vectors import can_embed, embed_inputs, vector_options
from paceline.server.json_bodies import Responses, encode_in_parts, json_response
from paceline.server.request_media import known_attachment
from paceline.server.routes import RouteFacts, Routes
from paceline.server.service import Service
from paceline.server.sse import JSON_LINES, EventWriter
from paceline.streaming import FinishReason, StreamChunk, TokenLogprobs, Usage
from paceline.streaming.chunk import CUT_REASONS, Completion


def error_body(api_error: ApiError) -> dict[str, Any]:
    """Return Ollama's error object."""
    return {"error": api_error.message}


def error_status(api_error: ApiError) -> int:
    """Return the status in Ollama's API: a full queue is a server that is not available."""
    return {429: 503, 501: 400}.get(api_error.status, api_error.status)


OLLAMA_FORM: Final = ErrorForm(error_body, error_status, ("/api",))


def ollama_error_response(api_error: ApiError) -> Response:
    """Return an error of Ollama's API with the status that it has."""
    content = msgspec.json.encode(error_body(api_error))
    return Response(content, api_error.status, media_type="application/json")


_OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
OLLAMA_ERRORS: Final[Responses] = {
    "default": {"description": "An error in Ollama's shape", "content": {"application/json": {"schema": _OLLAMA_ERROR}}}
}
"""Of Ollama's routes."""

OLLAMA_STREAMS: Final[Responses] = {
    200: {
        "description": "The lines of the response; with `stream` false one object",
        "content": {"application/json": {}, "application/x-ndjson": {}},
    },
    **OLLAMA_ERRORS,
}
"""Of Ollama's routes that can stream."""

FOLLOWED_VERSION = "0.14.0"
"""The version of Ollama that this API follows. Clients compare it with the version they need: Codex with 0.13.4."""

NAME_MISSING = ApiError(400, "invalid_request_error", None, "model is required")
"""The error of a request about a model that names none."""

_LATEST = ":latest"
_FOREVER = "9999-12-31T23:59:59Z"
_LONG = 1000  # characters of a value of the metadata that only a verbose description has
_ADMINISTRATION = (
    ("POST", "/api/push"),
    ("POST", "/api/create"),
    ("POST", "/api/copy"),
    ("DELETE", "/api/delete"),
    ("GET", "/api/blobs/{digest}"),  # clients send HEAD
    ("POST", "/api/blobs/{digest}"),
)


def timestamp(seconds: float | None = None) -> str:
    """Return a time as Ollama writes it; by default now."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def is_model_name(service: Service, name: str) -> bool:
    """Return whether a name, with or without Ollama's default tag, is a name of the model or of an adapter."""
    names = service.known_names
    return name in names or name.removesuffix(_LATEST) in names


_FACTS = RouteFacts(errors=OLLAMA_FORM, model="required")
MODEL_ROUTES = Routes(_FACTS, tags=["Ollama"], responses=OLLAMA_ERRORS)


@MODEL_ROUTES.get("/api/tags", summary="The models")
async def tags(request: Request) -> Response:
    """List the model under its first name, and its LoRA adapters."""
    service = Service.of(request.scope)
    return json_response({"models": _all_listed(service)})


@MODEL_ROUTES.get("/api/ps", summary="The models that are loaded")
async def running(request: Request) -> Response:
    """List the model if it is loaded; it stays so."""
    service = Service.of(request.scope)
    if not service.is_loaded:
        return json_response({"models": []})
    return json_response({"models": loaded_models(service)})


@MODEL_ROUTES.get("/api/version", summary="The version of Ollama's API")
async def version() -> Response:
    """Return the version of Ollama that this API follows, and paceline's own."""
    return json_response({"version": FOLLOWED_VERSION, "paceline": __version__})


@MODEL_ROUTES.post("/api/show", summary="Describe the model", is_limited=False)
async def show(body: OllamaModelBody, request: Request) -> Response:
    """Describe the model under one of its names; 404 for any other."""
    service = Service.of(request.scope)
    name = body.model or body.name
    if not name:
        return ollama_error_response(NAME_MISSING)
    if not is_model_name(service, name):
        return ollama_error_response(_not_found(service, name))
    shown = await asyncio.to_thread(shown_model, service, verbose=bool(body.verbose))
    if service.adapter_named(name) is not None:
        shown["details"] |= {"parent_model": service.names[0]}
    warnings = body.field_warnings(strict=service.settings.strict_fields)
    return json_response(shown | warned(warnings))


@MODEL_ROUTES.post("/api/pull", summary="Check that the model is here", is_limited=False, responses=OLLAMA_STREAMS)
async def pull(body: OllamaModelBody, request: Request) -> Response:
    """Report success for the model that is here, and 404 for any other: nothing is downloaded."""
    service = Service.of(request.scope)
    name = body.model or body.name
    if not name:
        return ollama_error_response(NAME_MISSING)
    if not is_model_name(service, name):
        error = _not_found(service, name)
        return ollama_error_response(replace(error, message=f"{error.message}, and nothing is downloaded"))
    return pull_response(body)


def pull_response(body: OllamaModelBody) -> Response:
    """Return the response to /api/pull of a model that is here: lines that end with success, or one object."""
    if body.stream is False:
        return json_response({"status": "success"})
    steps = ({"status": "pulling manifest"}, {"status": "success"})
    lines = b"".join(JSON_LINES.frame(msgspec.json.encode(step)) for step in steps)
    return Response(lines, media_type=JSON_LINES.media_type.decode())


ADMINISTRATION_ROUTES = Routes(RouteFacts(errors=OLLAMA_FORM), tags=["Ollama"], responses=OLLAMA_ERRORS)


async def refuse() -> Response:
    """Refuse what would change models."""
    message = "models are not created, copied, deleted or uploaded over this API; GET /api/tags lists the models"
    return ollama_error_response(ApiError(501, "not_supported_error", "unsupported", message))


for method, path in _ADMINISTRATION:
    ADMINISTRATION_ROUTES.add(method, path, refuse, include_in_schema=False)


def _not_found(service: Service, name: str) -> ApiError:
    message = f"model {name[:200]!r} not found; the one model here is {service.names[0]!r}"
    return ApiError(404, "not_found_error", "model_not_found", message)


def _all_listed(service: Service) -> list[dict[str, Any]]:
    """Return the model, and its LoRA adapters, which have the model as their parent."""
    model = listed_model(service)
    details = model["details"] | {"parent_model": model["name"]}
    adapters = [{"name": adapter.name, "model": adapter.name, "details": details} for adapter in service.adapters()]
    return [model, *(model | adapter for adapter in adapters)]


def listed_model(service: Service) -> dict[str, Any]:
    """Return an entry of a list of models. Before it is loaded there are no facts."""
    name = service.names[0]
    size, digest = 0, ""
    if service.is_loaded:
        model = service.engine().model
        size, digest = model.size_bytes, hashlib.sha256(model.fingerprint).hexdigest()
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp(service.created),
        "size": size,
        "digest": digest,
        "details": _details(service),
    }


def loaded_models(service: Service) -> list[dict[str, Any]]:
    """Return the entries of a list of loaded models: the model, and its LoRA adapters."""
    engine = service.engine()
    more = {"expires_at": _FOREVER, "size_vram": engine.model.size_bytes, "context_length": engine.limits.max_positions}
    return [listed | more for listed in _all_listed(service)]


def _details(service: Service) -> dict[str, Any]:
    details = {"parent_model": "", "format": "gguf", "family": "", "families": [], "parameter_size": ""}
    if not service.is_loaded:
        return {**details, "quantization_level": ""}
    model = service.engine().model
    family = model.metadata.get("general.architecture", "")
    facts = {"family": family, "families": [family], "parameter_size": _parameter_size(model.n_params)}
    return {**details, **facts, "quantization_level": model.ftype}


def _parameter_size(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def shown_model(service: Service, *, verbose: bool) -> dict[str, Any]:
    """Return the description of the model. Takes time: not on the event loop."""
    engine = service.engine()
    try:
        chat_format: ChatFormat | None = service.chat_format()
    except PacelineError:
        chat_format = None
    return {
        "license": engine.model.metadata.get("general.license", ""),
        "modelfile": "",
        "parameters": "",
        "template": "" if chat_format is None else chat_format.source,
        "details": _details(service),
        "model_info": {
            **model_info(engine.model.metadata, verbose=verbose),
            "general.parameter_count": engine.model.n_params,
        },
        "capabilities": _capabilities(service, chat_format),
        "modified_at": timestamp(service.created),
    }


def model_info(metadata: Mapping[str, str], *, verbose: bool) -> dict[str, Any]:
    """Return the metadata with numbers as numbers. Long values, and the tokenizer's, only if it is verbose."""
    return {
        name: _value(text)
        for name, text in metadata.items()
        if verbose or not (name.startswith("tokenizer.") or len(text) > _LONG)
    }


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text) if len(text) < 40 and text.isascii() and text.lower() not in ("nan", "inf") else text
        except ValueError:
            continue
    return text


def _capabilities(service: Service, chat_format: ChatFormat | None) -> list[str]:
    engine = service.engine()
    has = {
        "completion": engine.model.has_decoder,
        "vision": "image" in engine.model.modalities,
        "tools": chat_format is not None and bool(chat_format.capabilities["supports_tools"]),
        "thinking": chat_format is not None and _thinks(chat_format),
        "insert": engine.tokenizer.fim.can_fill,
        "embedding": can_embed(service),
    }
    return [name for name, is_so in has.items() if is_so]


def _thinks(chat_format: ChatFormat) -> bool:
    try:
        return chat_format.render_turn(Turn([{"role": "user", "content": "Hi"}])).supports_thinking
    except PacelineError:  # a template that needs other messages
        return False


_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaReply(DialectReply):
    """The response to one request.

    Attributes:
        model: The name that it reports.
        is_chat: Whether it has a message; otherwise it has a response.
        num_top: Most likely tokens reported with each token; None: no log-probabilities.
        warnings: Sentences for the client.
    """

    model: str
    is_chat: bool
    num_top: int | None = None
    warnings: tuple[str, ...] = ()

    def events(self) -> OllamaLines:
        """Return the encoder of the stream's lines."""
        return OllamaLines(self)

    def whole(self, completion: ChatCompletion | Sequence[Completion]) -> bytes:
        """Encode a chat, or the only completion of a prompt that is completed without the template."""
        if isinstance(completion, ChatCompletion):
            (choice,) = completion.choices
            message, scores = choice.message, self.scores(choice.logprobs or ())
            said = self.said(message.content, message.reasoning_content, message.tool_calls)
            return self.line({**said, **scores, **self.ending(choice.finish_reason, completion.usage, choice.warning)})
        (text,) = completion
        (plain,) = text.choices
        scores, said = self.scores(plain.logprobs or ()), self.said(plain.text)
        return self.line({**said, **scores, **self.ending(plain.finish_reason, text.usage)})

    def loaded(self, *, unloads: bool) -> bytes:
        """Encode the response to a request without a prompt, which only loads the model."""
        return self.line({**self.said(), "done": True, "done_reason": "unload" if unloads else "load"})

    def line(self, members: Mapping[str, Any]) -> bytes:
        """Encode one line of a stream, or a whole response. members: beside model and time."""
        encode = _encode if self.num_top is None else encode_in_parts
        return encode({"model": self.model, "created_at": timestamp(), **members})

    def said(self, content: str = "", thinking: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
        """Return the generated text and calls in the shape of the endpoint."""
        if not self.is_chat:
            return {"response": content, **({"thinking": thinking} if thinking else {})}
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        bodies = [_call_body(index, call) for index, call in enumerate(calls)]
        if bodies := [body for body in bodies if body is not None]:
            message["tool_calls"] = bodies
        return {"message": message}

    def scores(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, list[ChatLogprob]]:
        """Return the log-probabilities of tokens, if there are any and they were requested."""
        return {"logprobs": chat_logprobs(logprobs, self.num_top)} if logprobs and self.num_top is not None else {}

    def ending(self, reason: FinishReason, usage: Usage, warning: object = None) -> dict[str, Any]:
        """Return the members of the last line. Durations are nanoseconds."""
        warnings = [*self.warnings, *([] if warning is None else [str(warning)])]
        return {
            "done": True,
            "done_reason": reason.value if reason in CUT_REASONS else "stop",
            "total_duration": _nanoseconds(usage.queue_s + usage.prefill_s + usage.decode_s),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(usage.prefill_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(usage.decode_s),
            **warned(warnings),
        }


def _nanoseconds(seconds: float) -> int:
    """Return nanoseconds, at least 1: clients divide by them."""
    return max(1, round(seconds * 1e9))


def _call_body(index: int, call: ToolCall) -> dict[str, Any] | None:
    """Return a call; None for a call that was cut off: no program should run with its arguments."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        return None
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}


class OllamaLines(EventWriter):
    """The lines of a stream. Tool calls come whole, in the line before the last."""

    errors, framing, done = OLLAMA_FORM, JSON_LINES, b""

    def __init__(self, reply: OllamaReply) -> None:
        self._reply = reply

    def __call__(self, prompt: int, chunk: ChatChunk | StreamChunk) -> list[bytes]:  # noqa: ARG002 - there is one prompt
        """Return the lines of a chunk."""
        reply, scores = self._reply, self._reply.scores(chunk.logprobs)
        if isinstance(chunk, StreamChunk):
            parts = [reply.said(chunk.text)] if chunk.text or scores else []
        else:
            texts = [delta for delta in chunk.deltas if delta.tool_call is None]
            parts = [reply.said(delta.content, delta.reasoning_content) for delta in texts]
            parts = parts or ([reply.said()] if scores else [])
        lines = [reply.line({**part, **(scores if at == 0 else {}), "done": False}) for at, part in enumerate(parts)]
        if chunk.finish_reason is None:
            return lines
        warning = None
        if isinstance(chunk, ChatChunk):
            called, warning = reply.said(calls=() if chunk.message is None else chunk.message.tool_calls), chunk.warning
            if "tool_calls" in called.get("message", {}):
                lines.append(reply.line({**called, "done": False}))
        ending = reply.ending(chunk.finish_reason, chunk.usage or Usage(), warning)
        return [*lines, reply.line({**reply.said(), **ending})]


ROUTES = Routes(_FACTS, tags=["Ollama"])


@ROUTES.post("/api/chat", summary="Generate the next message of a conversation", responses=OLLAMA_STREAMS)
async def chat(body: OllamaChatBody, request: Request) -> Response:
    """Generate the assistant's next message, as Ollama's endpoint: lines of JSON, or with `stream` false one object."""
    return await serve(request, _parse(request, body))


@ROUTES.post("/api/generate", summary="Complete a prompt", responses=OLLAMA_STREAMS)
async def generate(body: OllamaGenerateBody, request: Request) -> Response:
    """Complete a prompt by the model's chat template, or with `raw` or `suffix` as it is."""
    return await serve(request, _parse(request, body))


async def _parse(request: Request, body: OllamaChatBody | OllamaGenerateBody) -> Generation | Response:
    """Return the generation that a body asks for. A body without a prompt only loads the model."""
    service = Service.of(request.scope)
    base, settings = service.sampling(API_DEFAULTS["ollama"]), service.settings
    parsed = await asyncio.to_thread(
        parse_ollama, body, base, service.template_variables, settings.reasoning_format, strict=settings.strict_fields
    )
    is_chat = isinstance(body, OllamaChatBody)
    warnings = (*parsed.warnings, *_model_warning(service, body))
    reply = OllamaReply(
        model=body.model or service.names[0], is_chat=is_chat, num_top=parsed.num_top, warnings=warnings
    )
    if isinstance(body, OllamaChatBody):
        is_load = not body.messages and isinstance(body.messages, list | None)
    else:
        is_load = not body.prompt and not body.suffix and not body.images
    if is_load:
        return _json(reply.loaded(unloads=is_unload(body)))
    media = await service.request_media(in_chat=is_chat)
    images: list[Any] = []
    if isinstance(body, OllamaGenerateBody):
        images = await asyncio.to_thread(images_of, "images", body.images, media)
    options, streaming = service.options(request, body.model), body.stream is not False
    if isinstance(body, OllamaGenerateBody) and (body.raw or body.suffix):
        return TextGeneration(
            params=parsed.params,
            options={**options, "parse_special": True, "suffix": body.suffix or None},
            streaming=streaming,
            reply=lambda _: reply,
            prompts=[[*images, body.prompt or ""] if images else body.prompt or ""],
        )

    def make_turn() -> Turn:
        if isinstance(body, OllamaChatBody):  # an assistant's last message is continued, as in Ollama
            conversation, prefills = ollama_conversation(body.messages, media), settings.prefill_assistant is not False
            return next_turn(conversation, prefills=prefills, read_part=known_attachment)
        system = [{"role": "system", "content": body.system}] if body.system else []
        talk = [*system, {"role": "user", "content": with_images(body.prompt or "", images)}]
        return next_turn(talk, read_part=known_attachment)

    return ChatGeneration(
        params=parsed.params,
        options=options,
        streaming=streaming,
        reply=lambda running: replace(reply, warnings=(*warnings, *running.warnings)),
        make_turn=make_turn,
        chat=parsed.chat,
    )


def _model_warning(service: Service, body: OllamaBody) -> tuple[str, ...]:
    return () if body.model is not None and is_model_name(service, body.model) else model_warning(service, body.model)


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


@MODEL_ROUTES.post("/api/embed", summary="Turn texts into vectors")
async def embed(body: OllamaEmbedBody, request: Request) -> Response:
    """Compute embeddings of length 1, as Ollama's endpoint."""
    service = Service.of(request.scope)
    began = time.monotonic()
    n_embd = service.engine().model.n_embd_out
    checked_dimensions(body.dimensions, n_embd)
    texts: Any = body.input
    if isinstance(texts, list) and any(not isinstance(text, str) for text in texts):
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
        **warned(warnings),
    }
    return _json(await asyncio.to_thread(encode_in_parts, members))


@MODEL_ROUTES.post("/api/embeddings", summary="Turn a text into a vector: the older form")
async def embeddings(body: OllamaEmbeddingsBody, request: Request) -> Response:
    """Compute the embedding of one text, not normalised; long texts are cut."""
    service = Service.of(request.scope)
    rows, _ = await _vectors(service, request, body.model, "prompt", body.prompt or [], truncates=True)
    warnings = _embedding_warnings(service, body)
    vector = vectors(rows, "none", 0)[0].tolist() if rows else []
    return _json(encode_in_parts({"embedding": vector, **warned(warnings)}))


def _embedding_warnings(service: Service, body: OllamaBody) -> tuple[str, ...]:
    own = option_warnings(body, strict=service.settings.strict_fields)
    return cap_warnings((*own, *_model_warning(service, body)))


async def _vectors(
    service: Service, request: Request, model: str | None, field: str, texts: Any, *, truncates: bool
) -> tuple[list[Any], int]:
    if not can_embed(service):
        raise Unsupported("this model was made to generate, and embeddings are off; start the server with --embeddings")
    if service.settings.pooling in ("none", "rank"):
        raise Unsupported(f"the server was started with --pooling {service.settings.pooling}, which makes no embedding")
    if texts == []:
        return [], 0
    options = embedding_options({**vector_options(service, request, model), "truncate": "right" if truncates else None})
    return await embed_inputs(request, field, texts, service.settings.pooling, options)
