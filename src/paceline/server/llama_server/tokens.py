"""POST /tokenize, /detokenize and /apply-template. On the event loop; the work is done in threads."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from paceline import validation
from paceline.chat import next_turn
from paceline.errors import Unsupported
from paceline.runtime import Tokenizer
from paceline.server.json_bodies import JsonRoute, large_json_response
from paceline.server.llama_server.bodies import DetokenizeBody, LlamaBody, TemplateBody, TokenizeBody
from paceline.server.prompt_inputs import tokenize_mixed
from paceline.server.service import Service


def routes(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["llama-server"], route_class=JsonRoute)

    @router.post("/tokenize", summary="Text to token ids")
    async def tokenize(body: TokenizeBody) -> Response:
        """Return `tokens`: ids, or objects of `id` and `piece`; a piece that is no UTF-8 is a list of bytes."""
        tokens = await asyncio.to_thread(_tokenize, service.engine().tokenizer, body)
        return await large_json_response({"tokens": tokens} | _warnings(body))

    @router.post("/detokenize", summary="Token ids to text")
    async def detokenize(body: DetokenizeBody) -> Response:
        """Return `content`: the text, control tokens included."""
        tokenizer = service.engine().tokenizer
        text = await asyncio.to_thread(_detokenize, tokenizer, body)
        return await large_json_response({"content": text} | _warnings(body))

    @router.post("/apply-template", summary="Messages to the text of a prompt")
    async def apply_template(body: TemplateBody) -> Response:
        """Return `prompt`: the text that the chat template renders."""
        if body.tools:
            raise Unsupported("tools are not supported yet; leave them out")
        rendered = await asyncio.to_thread(_render, service, body)
        return await large_json_response({"prompt": rendered} | _warnings(body))

    return router


def _render(service: Service, body: TemplateBody) -> str:
    asked = body.continue_final_message
    if isinstance(asked, str) and asked != "content":
        raise Unsupported(f'continue_final_message must be true, false or "content", not {asked!r:.80}')
    turn = next_turn(
        body.messages,
        continues=None if asked is None else bool(asked),
        generates=body.add_generation_prompt,
        prefills=service.settings.prefill_assistant is not False,
    )
    return service.rendered(turn, body.chat_template_kwargs or {}, body.reasoning_effort).text


def _tokenize(tokenizer: Tokenizer, body: TokenizeBody) -> list[Any]:
    if body.content is None:
        return []
    parse = body.parse_special is not False
    ids = tokenize_mixed(tokenizer, "content", body.content, add_special=bool(body.add_special), parse_special=parse)
    if not body.with_pieces:
        return ids
    pieces = tokenizer.pieces(special=True)
    return [{"id": token, "piece": _piece_body(pieces[token])} for token in ids]


def _detokenize(tokenizer: Tokenizer, body: DetokenizeBody) -> str:
    ids = [] if body.tokens is None else body.tokens
    return tokenizer.decode(validation.token_ids("tokens", ids, tokenizer.n_vocab), special=True)


def _piece_body(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _warnings(body: LlamaBody) -> dict[str, Any]:
    warnings = body.ignored()
    return {"warnings": warnings} if warnings else {}
