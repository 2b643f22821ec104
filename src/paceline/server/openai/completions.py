"""POST /v1/completions. On the event loop; prompts are tokenised in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.engine.prompts import Prompt, is_batch
from paceline.errors import InvalidParams, InvalidType, Unsupported
from paceline.server.generating import Generation, begin, check_number
from paceline.server.json_bodies import JsonRoute
from paceline.server.openai.answers import Telling
from paceline.server.openai.body_fields import OpenAICompletionBody
from paceline.server.openai.completion_answer import CompletionStream, completion_body
from paceline.server.openai.documents import STREAMS
from paceline.server.openai.reading import COMPLETION_DEFAULTS, read_completion
from paceline.server.openai.refusing import naming_the_field
from paceline.server.openai.telling import scores_prompt, telling_of
from paceline.server.problems import Problem, openai_body
from paceline.server.service import Service
from paceline.server.sse import event_stream


def routes(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

    @router.post("/v1/completions", summary="Complete a text", responses=STREAMS)
    async def complete(body: OpenAICompletionBody, request: Request) -> Response:
        """As OpenAI's endpoint of this name; with `stream` as server-sent events."""
        base, engine = service.sampling(COMPLETION_DEFAULTS), service.engine()
        with naming_the_field(OpenAICompletionBody.model_fields):
            asked = await asyncio.to_thread(read_completion, body, base, service.options(request))
            prompts = listed_prompts(body, engine.tokenizer)
            check_number(engine, len(prompts), asked.params.n)
            if body.suffix:
                prompts = await asyncio.to_thread(with_suffix, prompts, body.suffix, engine.tokenizer)
            streaming = bool(body.stream)
            generation = await begin(service, request, prompts, asked.params, asked.options, streaming=streaming)
        telling = telling_of(
            service,
            body,
            asked,
            generation,
            id=f"cmpl-{generation.request_id}",
            object="text_completion",
            scores_prompt=scores_prompt(body, asked.params),
        )
        if streaming:
            return event_stream(generation, CompletionStream(telling), failure=failure_event)
        return await _whole(generation, telling)

    return router


async def _whole(generation: Generation, telling: Telling) -> Response:
    async with generation:
        completions = await generation.collected()
    if telling.spelt:  # then there is much to tell
        content = await asyncio.to_thread(completion_body, telling, completions)
    else:
        content = completion_body(telling, completions)
    return Response(content, media_type="application/json")


def failure_event(problem: Problem) -> bytes:
    """The event that tells what went wrong after the answer had begun."""
    return msgspec.json.encode(openai_body(problem))


def listed_prompts(body: OpenAICompletionBody, tokenizer: Any) -> list[Prompt]:
    """The prompts that a body has; none is as if a document began. Raises `InvalidParams`."""
    prompt: Any = body.prompt
    if prompt is None:
        if tokenizer.bos is None:
            raise InvalidParams("prompt must be given: this model has no token for the beginning of a text")
        prompt = [tokenizer.bos]
    if not isinstance(prompt, (str, list)):
        raise InvalidType(f"prompt must be a text, token ids or a list of these, not {prompt!r:.80}")
    if prompt == []:
        raise InvalidParams("prompt must not be an empty list")
    prompts: list[Any] = prompt if isinstance(prompt, list) and is_batch(prompt) else [prompt]
    for index, one in enumerate(prompts):
        if not isinstance(one, (str, list)):
            raise InvalidType(f"prompt[{index}] must be a text or token ids, not {one!r:.80}")
    return list(prompts)


def with_suffix(prompts: Sequence[Prompt], suffix: str, tokenizer: Any) -> list[Prompt]:
    """Prompts after which the model writes what stands between them and the suffix. Raises `Unsupported`. Takes time."""
    fim = tokenizer.fim
    if not fim.can_fill:
        raise Unsupported("suffix needs a model with tokens for filling in the middle, and this one has none")
    bos = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    after = [fim.suffix, *tokenizer.encode(suffix, add_special=False), fim.middle]
    return [
        [*bos, fim.prefix, *(tokenizer.encode(one, add_special=False) if isinstance(one, str) else one), *after]
        for one in prompts
    ]
