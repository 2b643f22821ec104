"""OpenAI's chats and completions, /v1/models, LoRA adapters and the cancellation of requests: their routes.

On the event loop; templates run and prompts are tokenised in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from paceline import validation
from paceline.chat import Turn, next_turn
from paceline.engine.adapters import LoraAdapter
from paceline.engine.prompts import Prompt, is_batch
from paceline.errors import AdapterError, AdapterInUse, AdapterNotFound, InvalidParams, InvalidType, PacelineError
from paceline.params import SamplingParams
from paceline.sampling_table import API_DEFAULTS
from paceline.server.api_errors import (
    LLAMA_FORM,
    OPENAI_FORM,
    ApiException,
    api_error_of,
    invalid_request,
    naming_param,
    not_supported,
)
from paceline.server.dialects.dialect import ChatGeneration, RunningChat, TextGeneration, count_chat_tokens, serve
from paceline.server.dialects.openai.openai_replies import OpenAIReply, reply_to
from paceline.server.dialects.openai.openai_requests import (
    LoadLoraBody,
    OpenAIChatBody,
    OpenAICompletionBody,
    ParsedRequest,
    UnloadLoraBody,
    chat_options_of,
    parse_chat,
    parse_completion,
)
from paceline.server.dialects.request_body import MarkedImages, segments_of, warned, without_fractions
from paceline.server.json_bodies import OPENAI_ERRORS, OPENAI_STREAMS
from paceline.server.request_context import RequestContext
from paceline.server.request_media import RequestMedia
from paceline.server.routes import EVENTS, RouteFacts, Routes
from paceline.server.running_request import RunningRequest, check_num_prompts
from paceline.server.service import Service

# An unload may wait for long, and other routes need the threads of the loop.
_THREADS = ThreadPoolExecutor(4, "paceline-lora")
_PARAMS = {"name": "lora_name", "path": "lora_path", "in_place": "load_inplace"}


_FACTS = RouteFacts(errors=OPENAI_FORM, model="required")


ROUTES = Routes(_FACTS, tags=["OpenAI"])


@ROUTES.post("/v1/completions", early=EVENTS, summary="Complete a text", responses=OPENAI_STREAMS)
async def complete(body: OpenAICompletionBody, request: Request) -> Response:
    """Complete a prompt or several, as OpenAI's endpoint; with `stream` as server-sent events."""
    naming = naming_param(OpenAICompletionBody.model_fields)
    return await serve(request, _parse_completion(request, body), naming)


@ROUTES.post("/chat/completions", early=EVENTS, summary="As /v1/chat/completions", responses=OPENAI_STREAMS)
@ROUTES.post(
    "/v1/chat/completions",
    early=EVENTS,
    summary="Generate the next message of a conversation",
    responses=OPENAI_STREAMS,
)
async def chat(body: OpenAIChatBody, request: Request) -> Response:
    """Generate the next message of a conversation, as OpenAI's endpoint; with `stream` as server-sent events."""
    return await serve(request, _parse_chat(request, body), _naming_field(body))


@ROUTES.post(
    "/chat/completions/input_tokens",
    summary="As /v1/chat/completions/input_tokens",
    is_limited=False,
    responses=OPENAI_ERRORS,
)
@ROUTES.post(
    "/v1/chat/completions/input_tokens",
    summary="Count the tokens of a conversation",
    is_limited=False,
    responses=OPENAI_ERRORS,
)
async def input_tokens(body: OpenAIChatBody, request: Request) -> dict[str, Any]:
    """Count the tokens of the prompt that the body of a chat completion becomes; nothing is generated."""
    service = Service.of(request.scope)
    base = service.sampling(API_DEFAULTS["chat"])
    with _naming_field(body):
        options = service.options(request, body.model)
        media = await service.request_media(body.messages, in_chat=True)
        make_generation = partial(_count_generation, service, body, base, options, media)
        num_tokens, warnings = await count_chat_tokens(request, make_generation, options)
    counted = {"object": "response.input_tokens", "input_tokens": num_tokens}
    return counted | warned(warnings)


async def _parse_completion(request: Request, body: OpenAICompletionBody) -> TextGeneration:
    service = Service.of(request.scope)
    base, engine = service.sampling(API_DEFAULTS["completion"]), service.engine()
    options, strict = service.options(request, body.model), service.settings.strict_fields
    parsed = await asyncio.to_thread(parse_completion, body, base, options, engine.tokenizer, strict=strict)
    images = MarkedImages(service.media_marker, await service.request_media())
    prompts = await asyncio.to_thread(list_prompts, body, engine.tokenizer, images)
    check_num_prompts(engine, options["tenant"], len(prompts), parsed.params.n)

    def reply(running: RunningRequest) -> OpenAIReply:
        name = f"cmpl-{running.request_id}"
        return reply_to(service, body, parsed, running.prompts, id=name, object="text_completion")

    return TextGeneration(
        params=parsed.params, options=parsed.options, streaming=bool(body.stream), reply=reply, prompts=prompts
    )


async def _parse_chat(request: Request, body: OpenAIChatBody) -> ChatGeneration:
    service = Service.of(request.scope)
    base, options = service.sampling(API_DEFAULTS["chat"]), service.options(request, body.model)
    engine, strict = service.engine(), service.settings.strict_fields
    parsed = await asyncio.to_thread(parse_chat, body, base, options, engine.tokenizer, strict=strict)
    return _chat_generation(service, body, parsed, await service.request_media(body.messages, in_chat=True))


def _count_generation(
    service: Service, body: OpenAIChatBody, base: SamplingParams, options: Mapping[str, Any], media: RequestMedia
) -> tuple[ChatGeneration, tuple[str, ...]]:
    parsed = parse_chat(body, base, options, service.engine().tokenizer, strict=service.settings.strict_fields)
    return _chat_generation(service, body, parsed, media), parsed.warnings


def _chat_generation(
    service: Service, body: OpenAIChatBody, parsed: ParsedRequest, media: RequestMedia
) -> ChatGeneration:
    streaming = bool(body.stream)
    kwargs = service.template_variables(body.chat_template_kwargs or {}, body.reasoning_effort)

    def reply(running: RunningChat) -> OpenAIReply:
        return reply_to(
            service,
            body,
            replace(parsed, warnings=(*parsed.warnings, *running.warnings)),
            running.prompts,
            id=f"chatcmpl-{running.request_id}",
            object="chat.completion.chunk" if streaming else "chat.completion",
            is_chat=True,
            shows_thinking=body.include_reasoning is not False,
            thinking_pieces=service.engine().tokenizer.pieces(True) if running.supports_thinking else (),
        )

    def make_turn() -> Turn:
        return next_turn(
            body.messages,
            continues=body.continue_final_message,
            generates=body.add_generation_prompt,
            prefills=service.settings.prefill_assistant is True,
            read_part=media.read_part,
        )

    return ChatGeneration(
        params=parsed.params,
        options=parsed.options,
        streaming=streaming,
        reply=reply,
        make_turn=make_turn,
        chat=chat_options_of(body, body.tools, body.tool_choice, kwargs, service.settings.reasoning_format),
        reports_progress=streaming and body.return_progress is True,
    )


def _naming_field(body: OpenAIChatBody) -> AbstractContextManager[None]:
    schema = "json_schema" if body.response_format is None else "response_format"
    return naming_param(OpenAIChatBody.model_fields, kwargs="chat_template_kwargs", json_schema=schema)


def list_prompts(body: OpenAICompletionBody, tokenizer: Any, images: MarkedImages) -> list[Prompt]:
    """Return the prompts of a body; without one, the token that begins a text. Raises as `segments_of`, and `InvalidParams`."""
    prompt = without_fractions(body.prompt)
    if prompt is None:
        if tokenizer.bos is None:
            raise InvalidParams("prompt must be given: this model has no token for the beginning of a text")
        prompt = [tokenizer.bos]
    if not isinstance(prompt, (str, list, dict)):
        raise InvalidType(f"prompt must be a text, token ids or a list of these, not {prompt!r:.80}")
    if prompt == []:
        raise InvalidParams("prompt must not be an empty list")
    named: list[tuple[str, Any]] = [("prompt", prompt)]
    if isinstance(prompt, list) and is_batch(prompt):
        named = [(f"prompt[{index}]", part) for index, part in enumerate(prompt)]
    return [_prompt_of(name, without_fractions(value), images, has_suffix=bool(body.suffix)) for name, value in named]


def _prompt_of(name: str, prompt: Any, images: MarkedImages, *, has_suffix: bool) -> Prompt:
    """Return a prompt. A prompt in llama-server's shape becomes its text, or the segments with its images."""
    if not isinstance(prompt, dict):
        if not isinstance(prompt, (str, list)):
            raise InvalidType(f"{name} must be a text or token ids, not {prompt!r:.80}")
        return prompt
    if "prompt_string" not in prompt:
        raise InvalidParams(f"{name}.prompt_string is missing; multimodal_data may stand beside it")
    if not prompt.get("multimodal_data"):
        return validation.text(f"{name}.prompt_string", prompt["prompt_string"])
    if has_suffix:
        raise InvalidParams(f"{name}: suffix and multimodal_data exclude each other: what is filled in is text alone")
    return segments_of(name, prompt, images)


CANCEL: Final = """Cancel by the X-Request-Id of a response, within the tenant of the API key.

`cancelled` is whether there was such a request; its stream ends with the code "cancelled"."""


def cancel_routes(cancel_all: Callable[[str, str], bool], description: str) -> Routes:
    """Return the route /v1/requests/{id}/cancel, which does not wake a sleeping engine.

    Args:
        cancel_all: Cancels all requests of an id and a tenant, and returns whether there was any.
        description: For the API's document.
    """
    router = Routes(RouteFacts(errors=OPENAI_FORM, while_draining=True), tags=["requests"], responses=OPENAI_ERRORS)

    @router.post("/v1/requests/{request_id:path}/cancel", summary="Cancel a running request", description=description)
    async def cancel(request_id: str, request: Request) -> dict[str, Any]:
        tenant = RequestContext.of(request.scope).tenant
        return {"id": request_id, "cancelled": cancel_all(request_id, tenant)}

    return router


MODEL_ROUTES = Routes(_FACTS, tags=["OpenAI"], responses=OPENAI_ERRORS)


async def models(request: Request) -> dict[str, Any]:
    """List the model under its first name, with facts of its file, and its LoRA adapters."""
    service = Service.of(request.scope)
    name = service.names[0]
    adapters = service.adapters()
    is_multimodal = service.is_loaded and bool(set(service.engine().model.modalities) - {"text"})
    listed = [
        ollama_listing(name, is_multimodal=is_multimodal),
        *(ollama_listing(adapter.name, parent=name, is_multimodal=is_multimodal) for adapter in adapters),
    ]
    data = [model_body(service, name), *(_adapter_body(service, adapter) for adapter in adapters)]
    # Anthropic's, as type, display_name and created_at
    page = {"has_more": False, "first_id": name, "last_id": data[-1]["id"]}
    return {"models": listed, "object": "list", "data": data, **page}


MODEL_ROUTES.add("GET", "/v1/models", models, summary="The models")
MODEL_ROUTES.add("GET", "/models", models, errors=LLAMA_FORM, summary="As /v1/models")


@MODEL_ROUTES.get("/v1/models/{model_id:path}", summary="One model")
async def model(model_id: str, request: Request) -> dict[str, Any]:
    """Describe the model under one of its names, or an adapter; 404 for any other."""
    service = Service.of(request.scope)
    adapter = next((listed for listed in service.adapters() if listed.name == model_id), None)
    if adapter is not None:
        return _adapter_body(service, adapter)
    if model_id not in service.names:
        message = f"there is no model {model_id[:200]!r} here; GET /v1/models lists those that there are"
        raise invalid_request(message, "model", "model_not_found", status=404)
    return model_body(service, model_id)


def model_body(service: Service, name: str) -> dict[str, Any]:
    """Return OpenAI's description of a model, with llama-server's members: aliases, tags, facts of its file.

    There are no facts before it is loaded. type, display_name and created_at are Anthropic's.
    """
    settings = service.settings
    body: dict[str, Any] = {"id": name, "object": "model", "created": service.created, "owned_by": "paceline"}
    created_at = datetime.fromtimestamp(service.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    body |= {"type": "model", "display_name": name, "created_at": created_at}
    body |= {"aliases": list(dict.fromkeys(settings.aliases)), "tags": list(dict.fromkeys(settings.tags))}
    return body | {"meta": model_facts(service) if service.is_loaded else None}


def _adapter_body(service: Service, adapter: LoraAdapter) -> dict[str, Any]:
    """Return the description of a LoRA adapter, with vLLM's members: its file's name as root, the model as parent."""
    body = model_body(service, adapter.name) | {"aliases": [], "tags": [], "meta": None}
    return body | {"root": Path(adapter.path).name, "parent": service.names[0]}


def ollama_listing(name: str, parent: str = "", *, is_multimodal: bool = False) -> dict[str, Any]:
    """Return the model in Ollama's form of a list, as llama-server does; the members have no values there."""
    nothing = dict.fromkeys(("modified_at", "size", "digest", "description", "parameters"), "")
    details = {"parent_model": parent, "format": "gguf", "family": "", "families": [""]}
    return {
        "name": name,
        "model": name,
        **nothing,
        "type": "model",
        "tags": [""],
        "capabilities": ["completion", "multimodal"] if is_multimodal else ["completion"],
        "details": {**details, "parameter_size": "", "quantization_level": ""},
    }


def model_facts(service: Service) -> dict[str, Any]:
    """Return llama-server's description of a loaded model."""
    engine = service.engine()
    model = engine.model
    return {
        "vocab_type": model.tokenizer.vocab_type,
        "n_vocab": model.n_vocab,
        "n_ctx": engine.limits.max_positions,
        "n_ctx_train": model.n_ctx_train,
        "n_embd": model.n_embd,
        "n_params": model.n_params,
        "size": model.size_bytes,
        "ftype": model.ftype,
    }


LORA_ROUTES = Routes(_FACTS, tags=["LoRA"], responses=OPENAI_ERRORS)


@LORA_ROUTES.post(
    "/v1/load_lora_adapter",
    summary="Load a LoRA adapter",
    response_class=PlainTextResponse,
    operator=True,
    is_limited=False,
)
async def load(body: LoadLoraBody, request: Request) -> Response:
    """Load a LoRA adapter, which requests may name as their `model` from then on. Needs --enable-lora-loading."""
    service = Service.of(request.scope)
    _check_allowed(service)
    warnings = body.field_warnings(strict=service.settings.strict_fields)
    engine, name = service.engine(), body.lora_name
    if name in service.names or name.removesuffix(":latest") in service.names:
        raise invalid_request(f"lora_name: {name!r:.200} is the model's own name; take another one", "lora_name")
    try:
        await _call(lambda: engine.load_lora(name, body.lora_path, in_place=bool(body.load_inplace)))
    except AdapterError as error:
        is_there = await asyncio.to_thread(_is_file, body.lora_path)
        raise _with_status(error, 400 if is_there else 404, "lora_path") from error
    return _done(f"Success: the LoRA adapter {name!r} is loaded", warnings)


@LORA_ROUTES.post(
    "/v1/unload_lora_adapter",
    summary="Unload a LoRA adapter",
    response_class=PlainTextResponse,
    operator=True,
    is_limited=False,
)
async def unload(body: UnloadLoraBody, request: Request) -> Response:
    """Refuse new requests with a LoRA adapter, wait until the open ones have ended, and free it.

    409 if they do not end within `timeout_s`; then the adapter stays. Needs --enable-lora-loading.
    """
    service = Service.of(request.scope)
    _check_allowed(service)
    warnings = body.field_warnings(strict=service.settings.strict_fields)
    engine, name, scales = service.engine(), body.lora_name, dict(service.settings.lora_scales)
    if name in scales:  # else requests that name no adapter would be refused, too
        service.set_lora_scales({other: scale for other, scale in scales.items() if other != name})
    try:
        await _call(lambda: engine.unload_lora(name, timeout_s=body.timeout_s))
    except Exception:
        if name in scales and any(adapter.name == name for adapter in engine.loras()):
            service.set_lora_scales({name: scales[name], **service.settings.lora_scales})
        raise
    return _done(f"Success: the LoRA adapter {name!r} is unloaded", warnings)


def _done(message: str, warnings: list[str]) -> Response:
    return PlainTextResponse("\n".join([message, *(f"Warning: {warning}" for warning in warnings)]))


async def _call(function: Callable[[], None]) -> None:
    """Call the engine in a thread. Errors name the field at fault; adapters that are missing or in use have their own status."""
    try:
        with naming_param(LoadLoraBody.model_fields, **_PARAMS):
            await asyncio.get_running_loop().run_in_executor(_THREADS, function)
    except AdapterNotFound as error:
        raise _with_status(error, 404, "lora_name") from error
    except AdapterInUse as error:
        raise _with_status(error, 409, "lora_name") from error


def _is_file(path: str) -> bool:
    with suppress(OSError):
        return Path(path).is_file()
    return False


def _with_status(error: PacelineError, status: int, param: str) -> ApiException:
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    return ApiException(replace(api_error_of(error), status=status, type=kind, param=param, retry_after_s=None))


def _check_allowed(service: Service) -> None:
    if not service.settings.lora_loading:
        raise not_supported(
            "This server does not load adapters while it runs. Start it with `--enable-lora-loading`, for clients that may "
            "have it read any file"
        )
