"""POST /v1/chat/completions, for text. On the event loop; templates run and prompts are tokenised in threads."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.chat.messages import checked_messages
from paceline.chat.turns import next_turn
from paceline.params import SamplingParams
from paceline.server.generating import Generation, begin
from paceline.server.json_bodies import JsonRoute
from paceline.server.openai.answers import Telling
from paceline.server.openai.body_fields import OpenAIChatBody
from paceline.server.openai.chat_answer import ChatStream, chat_body
from paceline.server.openai.completions import failure_event
from paceline.server.openai.documents import STREAMS
from paceline.server.openai.reading import CHAT_DEFAULTS, read_chat
from paceline.server.openai.refusing import naming_the_field
from paceline.server.openai.telling import scores_prompt, telling_of
from paceline.server.service import Service
from paceline.server.sse import event_stream


def routes(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

    @router.post("/chat/completions", summary="As /v1/chat/completions", responses=STREAMS)
    @router.post("/v1/chat/completions", summary="Answer a conversation", responses=STREAMS)
    async def chat(body: OpenAIChatBody, request: Request) -> Response:
        """As OpenAI's endpoint of this name, for text; with `stream` as server-sent events."""
        base = service.sampling(CHAT_DEFAULTS)
        with naming_the_field(OpenAIChatBody.model_fields, kwargs="chat_template_kwargs"):
            asked = await asyncio.to_thread(read_chat, body, base, service.options(request))
            ids, stops = await asyncio.to_thread(_prompt, service, body)
            params = with_stops(asked.params, stops)
            streaming = bool(body.stream)
            generation = await begin(service, request, [ids], params, asked.options, streaming=streaming)
        telling = telling_of(
            service,
            body,
            asked,
            generation,
            id=f"chatcmpl-{generation.request_id}",
            object="chat.completion.chunk" if streaming else "chat.completion",
            scores_prompt=scores_prompt(body, params),
        )
        if streaming:
            return event_stream(generation, ChatStream(telling), failure=failure_event)
        return await _whole(generation, telling)

    return router


async def _whole(generation: Generation, telling: Telling) -> Response:
    async with generation:
        (completion,) = await generation.collected()
    content = (
        chat_body(telling, completion) if not telling.spelt else await asyncio.to_thread(chat_body, telling, completion)
    )
    return Response(content, media_type="application/json")


def _prompt(service: Service, body: OpenAIChatBody) -> tuple[list[int], tuple[str, ...]]:
    """The prompt's ids, and the texts that end an answer in its format."""
    turn = next_turn(
        checked_messages(body.messages),
        continues=body.continue_final_message,
        generates=body.add_generation_prompt,
        prefills=service.settings.prefill_assistant is True,
    )
    rendered = service.rendered(turn, body.chat_template_kwargs or {})
    return service.chat_format().encode(rendered), rendered.stops


def with_stops(params: SamplingParams, stops: tuple[str, ...]) -> SamplingParams:
    """The params with these stops beside the request's own."""
    more = tuple(stop for stop in stops if stop not in params.stop)
    return params.replace(stop=(*params.stop, *more)) if more else params
