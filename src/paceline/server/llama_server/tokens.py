"""POST /tokenize, /detokenize and /apply-template. On the event loop; the work is done in threads."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from paceline.runtime import Tokenizer
from paceline.server.llama_server.bodies import Body, DetokenizeBody, TokenizeBody
from paceline.server.llama_server.prompts import mixed_ids
from paceline.server.llama_server.writing import large_json_answer
from paceline.server.service import Service


def routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["llama-server"])

    @router.post("/tokenize", summary="Text to token ids")
    async def tokenize(body: TokenizeBody) -> Response:
        """`tokens`: ids, or objects of `id` and `piece` with `with_pieces`; a piece that is no text is a list of bytes."""
        tokens = await asyncio.to_thread(_tokens, service.engine().tokenizer, body)
        return await large_json_answer({"tokens": tokens} | _warnings(body))

    @router.post("/detokenize", summary="Token ids to text")
    async def detokenize(body: DetokenizeBody) -> Response:
        """`content`: the text, control tokens included."""
        tokenizer = service.engine().tokenizer
        text = await asyncio.to_thread(tokenizer.decode, body.tokens or [], special=True)
        return await large_json_answer({"content": text} | _warnings(body))

    return router


def _tokens(tokenizer: Tokenizer, body: TokenizeBody) -> list[Any]:
    if body.content is None:
        return []
    parse = body.parse_special is not False
    ids = mixed_ids(tokenizer, "content", body.content, add_special=bool(body.add_special), parse_special=parse)
    if not body.with_pieces:
        return ids
    pieces = tokenizer.pieces(special=True)
    return [{"id": token, "piece": _piece(pieces[token])} for token in ids]


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _warnings(body: Body) -> dict[str, Any]:
    named = [f"{name!r:.80} is no field that is known here and was ignored" for name in body.unknown()]
    return {"warnings": named} if named else {}
