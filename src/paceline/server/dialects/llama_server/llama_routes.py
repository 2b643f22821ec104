"""All of llama-server's routes but /health and /metrics; here: tokens, templates, adapters, properties. On the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__, validation
from paceline.chat import ChatOptions, Turn, next_turn, prepare_chat
from paceline.demo import demo_model_path
from paceline.errors import InvalidParams, PacelineError, Unsupported
from paceline.runtime import Tokenizer
from paceline.server.api_errors import invalid_request, not_supported
from paceline.server.dialects.llama_server import completion_routes, slots, vector_routes
from paceline.server.dialects.llama_server.completion_request import API_DEFAULTS, brief_settings, parse_lora_scales
from paceline.server.dialects.llama_server.llama_bodies import (
    DetokenizeBody,
    LlamaBody,
    LoraScale,
    TemplateBody,
    TokenizeBody,
)
from paceline.server.dialects.llama_server.slots import LlamaServerState
from paceline.server.dialects.request_body import cap_warnings, without_fractions
from paceline.server.dialects.request_fields import tokenize_mixed
from paceline.server.flags.setters import spec_type_names
from paceline.server.json_bodies import encode_in_parts, json_response, large_json_response
from paceline.server.media_input.request_media import RequestMedia
from paceline.server.routes import RouteFacts, Routes
from paceline.server.running_request import run_in_turn
from paceline.server.service import Service

if TYPE_CHECKING:
    from paceline.engine import EngineClient

MAX_TOKENS = 1 << 20
"""Tokens that a response of POST /tokenize may have: as many as a request may have."""
_MAX_ADAPTER_ENTRIES = 1000  # that one request may set


def routes() -> Routes:
    """Return the routes of completions, tokens, embeddings, reranking, slots, adapters and properties."""
    router = Routes(RouteFacts(model="required"))
    router.extend(completion_routes.routes())
    router.extend(slots.routes())
    router.extend(_adapter_routes())
    router.extend(_token_routes())
    router.extend(vector_routes.routes())
    router.extend(_props_routes())
    return router


def _adapter_routes() -> Routes:
    router = Routes(RouteFacts(model="required"), tags=["llama-server"])

    @router.get("/lora-adapters", summary="The adapters and their scales")
    async def adapters(request: Request) -> list[dict[str, Any]]:
        """List the adapters by id. `path` is the file's name alone."""
        state = Service.of(request.scope).part(LlamaServerState)
        known = state.adapters
        return [
            {"id": index, "path": file, "scale": state.scales.get(name, 0.0), "task_name": "", "prompt_prefix": ""}
            for index, (name, file) in enumerate(zip(known.names, known.files, strict=True))
        ]

    @router.post("/lora-adapters", summary="Set the adapters' scales", operator=True)
    async def set_adapters(
        body: Annotated[list[LoraScale], Field(max_length=_MAX_ADAPTER_ENTRIES)], request: Request
    ) -> dict[str, Any]:
        """Set the scales of all later requests without a `lora` of their own; adapters that are not listed are off.

        Needs an operator's key if there are several tenants: the scales are those of all tenants.
        """
        state = Service.of(request.scope).part(LlamaServerState)
        warnings: list[str] = []
        state.service.set_lora_scales(parse_lora_scales(body, state.adapters.names, warnings))
        return {"success": True} | ({"warnings": warnings} if warnings else {})

    return router


def _props_routes() -> Routes:
    router = Routes(RouteFacts(model="required"), tags=["llama-server"])

    @router.get("/props", summary="Properties of the server and its model")
    async def props(request: Request) -> Response:
        """Return the properties. `model_path` is the file's name alone."""
        service = Service.of(request.scope)
        engine = service.engine()
        return json_response(_props(service, engine) | _chat_facts(service))

    @router.post("/props", summary="Change properties", operator=True)
    async def set_props(request: Request) -> dict[str, Any]:
        """Change nothing: there is no property to change, as in llama-server."""
        service = Service.of(request.scope)
        if not service.settings.props:
            raise not_supported("This server does not support changing global properties. Start it with `--props`")
        return {"success": True}

    return router


def _props(service: Service, engine: EngineClient) -> dict[str, Any]:
    settings, tokenizer = service.settings, engine.tokenizer
    return {
        "default_generation_settings": {
            "params": brief_settings(
                service.sampling(API_DEFAULTS), others={"speculative.types": spec_type_names(engine.config.speculation)}
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


def _token_routes() -> Routes:
    router = Routes(RouteFacts(model="required"), tags=["llama-server"])

    @router.post("/tokenize", summary="Text to token ids")
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

    @router.post("/detokenize", summary="Token ids to text")
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:
        """Return `content`: the text, control tokens included; and the same as `prompt`, the name that vLLM has for it."""
        service = Service.of(request.scope)
        tokenizer = service.engine().tokenizer
        text = await asyncio.to_thread(_detokenize, tokenizer, body)
        return await large_json_response({"content": text, "prompt": text} | _warnings(service, body))

    @router.get("/tokenizer_info", summary="The tokenizer, as vLLM describes it")
    async def tokenizer_info(request: Request) -> Response:
        """Return the special tokens and the chat template, which programs need that have no tokenizer of their own."""
        service = Service.of(request.scope)
        return json_response(await asyncio.to_thread(_tokenizer_info, service))

    @router.post("/apply-template", summary="Messages to the text of a prompt")
    async def apply_template(body: TemplateBody, request: Request) -> Response:
        """Return `prompt`: the text that the chat template renders, with the media marker for each image."""
        service = Service.of(request.scope)
        media = await service.request_media(body.messages, in_chat=True)
        render = partial(_render, service, body, media)
        rendered, warnings = await run_in_turn(service, request, render, service.options(request))
        return await large_json_response({"prompt": rendered} | _warnings(service, body, warnings))

    return router


def _render(service: Service, body: TemplateBody, media: RequestMedia) -> tuple[str, tuple[str, ...]]:
    """Return the prompt of a conversation, and warnings about the conversation."""
    turn, options = _read_chat(service, body, media)
    text = service.chat_format().render_turn(turn, options).text
    shown = text if turn.media is None else turn.media.with_marker(text, service.media_marker)
    return shown, turn.warnings


def _chat_tokens(service: Service, body: TokenizeBody, media: RequestMedia) -> bytes:
    """Return the body of a response with the token ids of a conversation's prompt."""
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
    """Raise `InvalidParams` for more tokens than a response may have. field: which has their text."""
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
    return {
        "count": len(ids),
        "max_model_len": engine.limits.max_positions,
        "tokens": ids,
        "token_strs": texts,
    }


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
    """Return the body of a response with the token ids of a text."""
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


def _detokenize(tokenizer: Tokenizer, body: DetokenizeBody) -> str:
    ids = [] if body.tokens is None else without_fractions(body.tokens)
    return tokenizer.decode(validation.token_ids("tokens", ids, tokenizer.n_vocab), special=True)


def _piece_body(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _warnings(service: Service, body: LlamaBody, more: Sequence[str] = ()) -> dict[str, Any]:
    warnings = cap_warnings([*body.field_warnings(strict=service.settings.strict_fields), *more])
    return {"warnings": warnings} if warnings else {}
