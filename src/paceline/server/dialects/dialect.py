"""One generation over HTTP in any dialect: parsed, started, streamed or returned whole, cancelled when its client disconnects.

A dialect is a folder with bodies, routes and replies. A route that generates gives its parser to `serve`:

    body  ─ parser ─>  Generation  ─ start ─>  running request  ─ DialectReply ─>  events of a stream, or one body

On the event loop; templates run, prompts are tokenised, messages are parsed and whole bodies are encoded in threads.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from paceline.chat import ChatChunk, ChatCompletion, ChatOptions, ChatReader, Turn, chat_completion_of, prepare_chat
from paceline.chat.chat_request import ChatRequest
from paceline.engine import EngineClient
from paceline.engine.prompts import Prompt, chat_too_long, has_media
from paceline.errors import PromptTooLong
from paceline.params import SamplingParams
from paceline.request import RequestOptions, cache_scope
from paceline.sequence import Request
from paceline.server.dialects.request_body import cap_warnings
from paceline.server.request_context import RequestContext
from paceline.server.running_request import (
    ChunkBatch,
    ChunkSource,
    ChunkSourceWrapper,
    ProgressChunk,
    ProgressSource,
    RunningRequest,
    check_num_prompts,
    run_in_turn,
    start_prepared,
    start_request,
    streamed_or_whole,
    with_logprobs_limit,
)
from paceline.server.service import Service
from paceline.server.sse import EventStream, EventWriter
from paceline.streaming import StreamChunk


class DialectReply(ABC):
    """The response to one generation in the shape of a dialect."""

    __slots__ = ()

    @property
    def media_type(self) -> str:
        """The type of a response that is not streamed."""
        return "application/json"

    @abstractmethod
    def events(self) -> EventWriter:
        """Return the encoder of a stream's events."""

    @abstractmethod
    def whole(self, completion: Any) -> bytes:
        """Encode a response that is not streamed.

        Args:
            completion: The `ChatCompletion` of a chat; the completions of all prompts of a text.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation(ABC):
    """One generation that a body asks for.

    Attributes:
        params: The sampling parameters.
        options: Keywords of `RequestOptions`.
        streaming: Whether the response is a stream.
        reply: Returns the reply of the running request.
    """

    params: SamplingParams
    options: Mapping[str, Any]
    streaming: bool
    reply: Callable[[Any], DialectReply]

    @abstractmethod
    async def start(self, service: Service, request: HttpRequest) -> RunningChat | RunningRequest:
        """Submit the generation; nothing runs after an error. The request's body must have been read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextGeneration(Generation):
    """A completion of prompts."""

    prompts: Sequence[Prompt]

    async def start(self, service: Service, request: HttpRequest) -> RunningRequest:
        """Submit the prompts. Raises as `start_request`."""
        return await start_request(service, request, self.prompts, self.params, self.options, streaming=self.streaming)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatGeneration(Generation):
    """A chat.

    Attributes:
        make_turn: Parses the messages; called in a thread.
        chat: Tools and template variables; `Service.chat_options` completes them.
        reports_progress: Whether `ChatProgress` comes before the first token.
        num_bytes: Bytes of the conversation; None: the bytes of the request's body.
        keeps_stream: Whether all streamed output is kept for the end of the response.
    """

    make_turn: Callable[[], Turn]
    chat: ChatOptions
    reports_progress: bool = False
    num_bytes: int | None = None
    keeps_stream: bool = False

    async def start(self, service: Service, request: HttpRequest) -> RunningChat:
        """Render, tokenise and check the conversation in one turn of a thread, and submit it.

        Raises as `prepare_chat`, `run_in_turn` and `start_prepared`.
        """
        chat_format, context, options = service.chat_format(), RequestContext.of(request.scope), self.options
        context.operation = "chat"
        chats: list[ChatRequest] = []  # has the chat after `prepare`

        def prepare(engine: EngineClient) -> list[Request]:
            check_num_prompts(engine, options.get("tenant", ""), 1, self.params.n)
            turn, chosen = self.make_turn(), service.chat_options(self.chat)
            is_sent = self.streaming and not self.keeps_stream
            params = self.params if is_sent else with_logprobs_limit(self.params, engine)
            most = engine.limits.max_positions if options.get("truncate") is None else 0
            try:
                with cache_scope(options.get("tenant", ""), options.get("cache_salt", "")):
                    chat = prepare_chat(chat_format, turn, chosen, params, max_positions=most)
            except PromptTooLong as error:
                raise chat_too_long(error, engine.limits) from None
            chats.append(chat)
            wanted = streamed_or_whole(
                {**options, "preserved_tokens": chat.preserved_tokens, "add_special": False},
                self.params,
                streaming=self.streaming,
                waited_s=context.waited_s,
                priority=context.fixed_priority,
            )
            prompt = chat.prompt(chat_format.tokenizer)
            try:
                return [engine.prepare(prompt, chat.params, wanted)]
            except PromptTooLong as error:
                if has_media(prompt):  # this error never advises truncate
                    raise
                raise chat_too_long(error, engine.limits) from None

        running = await start_prepared(
            service,
            request,
            prepare,
            options,
            streaming=self.streaming,
            num_bytes=self.num_bytes,
            keeps_stream=self.keeps_stream,
        )
        source: ChunkSource[StreamChunk] = running
        if self.reports_progress:
            source = ProgressSource(running, service.read_slots, running.tenant, running.request_id, time.monotonic)
        return RunningChat(running, chats[0], source, context)


async def serve(
    request: HttpRequest, parsing: Awaitable[Generation | Response], naming: AbstractContextManager[None] | None = None
) -> Response:
    """Return the response to a request that generates.

    Args:
        request: The HTTP request.
        parsing: Parses the body; a `Response` in place of a generation ends the request.
        naming: Names the field at fault in the errors of parsing and starting.
    """
    with naming or nullcontext():
        generation = await parsing
        if isinstance(generation, Response):
            return generation
        running = await generation.start(Service.of(request.scope), request)
    try:
        reply = generation.reply(running)
        if generation.streaming:
            return EventStream(running, reply.events())
    except BaseException:
        async with running:  # nothing else closes it
            raise
    async with running:
        completion = await running.collect()
    return Response(await asyncio.to_thread(reply.whole, completion), media_type=reply.media_type)


def model_warning(service: Service, model: str | None) -> tuple[str, ...]:
    """Return a warning if a body names a model other than the loaded model."""
    if model is None or model in service.known_names:
        return ()
    return (f"model: the one model here is {service.names[0]!r}; it was used",)


async def count_chat_tokens(
    request: HttpRequest,
    make_generation: Callable[[], tuple[ChatGeneration, Sequence[str]]],
    options: Mapping[str, Any],
    num_bytes: int | None = None,
) -> tuple[int, list[str]]:
    """Return the number of tokens of a chat's prompt, and warnings about its body and its conversation.

    Args:
        request: The HTTP request.
        make_generation: Parses the body in a thread; returns the generation and the warnings about the body.
        options: Keywords of `RequestOptions`; their timeouts count from now.
        num_bytes: As in `run_in_turn`.
    """
    service = Service.of(request.scope)

    def count() -> tuple[int, list[str]]:
        generation, warnings = make_generation()
        chat_format = service.chat_format()
        turn = generation.make_turn()
        chat = prepare_chat(chat_format, turn, service.chat_options(generation.chat), generation.params)
        num_tokens = count_prompt_tokens(service.engine(), chat.prompt(chat_format.tokenizer))
        return num_tokens, [*warnings, *cap_warnings(chat.warnings)]

    return await run_in_turn(service, request, count, options, num_bytes=num_bytes)


def count_prompt_tokens(engine: EngineClient, prompt: Prompt) -> int:
    """Return the number of tokens of a chat's prompt, including the tokens of its images. In a thread.

    Raises the errors of `EngineClient.prepare`, except the error of a prompt that is too long.
    """
    if not has_media(prompt):
        return len(prompt)
    try:
        return len(engine.prepare(prompt, SamplingParams(), RequestOptions(add_special=False)).prompt)
    except PromptTooLong as error:
        if error.num_tokens is None:
            raise
        return error.num_tokens


class ChatProgress(ChatChunk, frozen=True, kw_only=True):
    """Prefill progress, before the first token."""

    prefill: ProgressChunk


class RunningChat(ChunkSourceWrapper):
    """A chat that runs.

    Attributes:
        request: The prepared chat.
    """

    def __init__(
        self,
        running: RunningRequest,
        request: ChatRequest,
        source: ChunkSource[StreamChunk] | None = None,
        context: RequestContext | None = None,
    ) -> None:
        """Take over a running request. source: the running request with added chunks; None: without. context: gets times."""
        super().__init__(source or running)
        self.request, self._running, self._context = request, running, context
        self.request_id, self.tenant = running.request_id, running.tenant

    @property
    def supports_thinking(self) -> bool:
        """Whether the format has a place for thinking."""
        return self.request.rendered.supports_thinking

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences for the client about parts of the conversation or its tools that were left out or altered."""
        return cap_warnings(self.request.warnings)

    async def batches(self) -> AsyncIterator[list[tuple[int, ChatChunk]]]:
        """Yield all chunks that are available, whenever there are any, up to the terminal chunk. The prompt is number 0."""
        # Takes time if there are tools; the prompt is computed meanwhile.
        reader = await asyncio.to_thread(ChatReader, self.request.rendered, self.request.params.n)
        async for batch in self._source.batches():
            read: list[ChatChunk] = []
            for num_read, (_, chunk) in enumerate(batch):
                if isinstance(chunk, ProgressChunk):  # before all others
                    read.append(ChatProgress(choice=0, prefill=chunk))
                elif reader.needs_parser(chunk):  # which depends on the chunks before it
                    start_ns = time.time_ns()
                    read += await asyncio.to_thread(_read_all, reader, batch[num_read:])
                    self._note_parsing(start_ns)
                    break
                else:
                    read += reader.read(chunk)
            yield [(0, chunk) for chunk in read]

    async def collect(self) -> ChatCompletion:
        """Wait for the whole chat. Raises the error of a failed chat, `ClientDisconnected` after a disconnection."""
        (completion,) = await self._running.collect()
        start_ns = time.time_ns()
        chat = await asyncio.to_thread(chat_completion_of, completion, self.request.rendered)
        self._note_parsing(start_ns)
        return chat

    def _note_parsing(self, start_ns: int) -> None:
        if self._context is not None:
            self._context.note_parsing(start_ns)


def _read_all(reader: ChatReader, batch: ChunkBatch) -> list[ChatChunk]:
    return [read for _, chunk in batch for read in reader.read(chunk)]
