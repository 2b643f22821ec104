"""The chat of one HTTP request, whatever API it came by: started, read as messages, cancelled when the client disconnects.

On the event loop; templates run, prompts are tokenised and messages are parsed in threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from starlette.requests import Request as HttpRequest

from paceline.chat import ChatChunk, ChatCompletion, ChatOptions, ChatReader, Turn, chat_completion_of, prepare_chat
from paceline.chat.chat_request import ChatRequest
from paceline.engine.media_prompt import has_media
from paceline.engine.prompts import Prompt, chat_too_long
from paceline.errors import PromptTooLong
from paceline.params import SamplingParams
from paceline.request import RequestOptions, cache_scope
from paceline.sequence import Request
from paceline.server.dialects.request_body import cap_warnings
from paceline.server.prefill_progress import ProgressChunk, ProgressSource
from paceline.server.request_context import RequestContext
from paceline.server.running_request import (
    ChunkSource,
    RunningRequest,
    check_num_prompts,
    start_prepared,
    streamed_or_whole,
    with_logprobs_limit,
)
from paceline.server.service import Service
from paceline.streaming import StreamChunk

if TYPE_CHECKING:
    from paceline.engine import EngineClient

ChatBatch = list[tuple[int, ChatChunk]]
"""Chunks that were available at one time, each with the index of its prompt, which is 0."""


async def start_chat(  # noqa: PLR0913 - what a chat is made of
    service: Service,
    request: HttpRequest,
    make_turn: Callable[[], Turn],
    chat_options: ChatOptions,
    params: SamplingParams,
    options: Mapping[str, Any],
    *,
    streaming: bool,
    reports_progress: bool = False,
    num_bytes: int | None = None,
    keeps_stream: bool = False,
) -> RunningChat:
    """Render, tokenise and check a conversation in one turn of a thread, and submit it.

    make_turn: parses the messages; called in the thread. chat_options: its kwargs are completed by
    `Service.template_variables`. reports_progress: whether `ChatProgress` comes before the first token. options: keywords of
    `RequestOptions`. num_bytes: bytes of the conversation; None: those of the request's body. keeps_stream: as
    `start_prepared` has it.

    The request's body must have been read. Use the `RunningChat` as a context manager. Raises what `prepare_chat`,
    `run_in_turn` and `start_request` raise; then nothing runs.
    """
    chat_format, context = service.chat_format(), RequestContext.of(request.scope)
    chats: list[ChatRequest] = []  # the one, once it is prepared

    def prepare(engine: EngineClient) -> list[Request]:
        check_num_prompts(engine, options.get("tenant", ""), 1, params.n)
        turn, chosen = make_turn(), service.chat_options(chat_options)
        asked = params if streaming and not keeps_stream else with_logprobs_limit(params, engine)
        most = engine.limits.max_positions if options.get("truncate") is None else 0
        try:
            with cache_scope(options.get("tenant", ""), options.get("cache_salt", "")):
                chat = prepare_chat(chat_format, turn, chosen, asked, max_positions=most)
        except PromptTooLong as error:
            raise chat_too_long(error, engine.limits) from None
        chats.append(chat)
        wanted = streamed_or_whole(
            {**options, "preserved_tokens": chat.preserved_tokens, "add_special": False},
            params,
            streaming=streaming,
            waited_s=context.waited_s,
        )
        prompt = chat.prompt(chat_format.tokenizer)
        try:
            return [engine.prepare(prompt, chat.params, wanted)]
        except PromptTooLong as error:
            if has_media(prompt):  # this error never advises truncate
                raise
            raise chat_too_long(error, engine.limits) from None

    running = await start_prepared(
        service, request, prepare, options, streaming=streaming, num_bytes=num_bytes, keeps_stream=keeps_stream
    )
    source = (
        ProgressSource(running, service.read_slots, running.tenant, running.request_id, time.monotonic)
        if reports_progress
        else None
    )
    return RunningChat(running, chats[0], source)


def count_prompt_tokens(engine: EngineClient, prompt: Prompt) -> int:
    """Return the number of tokens of a chat's prompt, with those that its images become. In a thread.

    Raises what `EngineClient.prepare` raises, but for a prompt that is too long.
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


class RunningChat:
    """What runs for one chat. request: as it was prepared. source: the running request with what is added to its chunks."""

    def __init__(
        self, running: RunningRequest, request: ChatRequest, source: ChunkSource[StreamChunk] | None = None
    ) -> None:
        self.request = request
        self._source: ChunkSource[StreamChunk] = source or running
        self.request_id, self.tenant = running.request_id, running.tenant
        self._running = running

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of the only prompt."""
        return self._running.prompts

    @property
    def supports_thinking(self) -> bool:
        """Whether the format has a place for thinking."""
        return self.request.rendered.supports_thinking

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences for the client about parts of the conversation or its tools that were left out or altered."""
        return cap_warnings(self.request.warnings)

    @property
    def heartbeat_s(self) -> float:
        """Seconds between comments on an idle stream."""
        return self._running.heartbeat_s

    @property
    def is_disconnected(self) -> bool:
        """True after the client disconnected."""
        return self._running.is_disconnected

    async def batches(self) -> AsyncIterator[ChatBatch]:
        """Yield all chunks that are available, whenever there are any, up to the terminal one."""
        # Takes time where there are tools; the prompt is computed meanwhile.
        reader = await asyncio.to_thread(ChatReader, self.request.rendered, self.request.params.n)
        async for batch in self._source.batches():
            read: list[ChatChunk] = [
                ChatProgress(choice=0, prefill=chunk) for _, chunk in batch if isinstance(chunk, ProgressChunk)
            ]
            chunks = [chunk for _, chunk in batch if not isinstance(chunk, ProgressChunk)]
            for num_read, chunk in enumerate(chunks):
                if reader.needs_parser(chunk):  # which depends on the chunks before it
                    read += await asyncio.to_thread(_read_all, reader, chunks[num_read:])
                    break
                read += reader.read(chunk)
            yield [(0, one) for one in read]

    async def collect(self) -> ChatCompletion:
        """Wait for the whole. Raises the error of one that failed, `ClientDisconnected` after a disconnection."""
        (completion,) = await self._running.collect()
        return await asyncio.to_thread(chat_completion_of, completion, self.request.rendered)

    def cancel(self) -> None:
        """Cancel what is unfinished."""
        self._running.cancel()

    async def __aenter__(self) -> Self:
        await self._running.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._running.__aexit__(*error)


def _read_all(reader: ChatReader, chunks: list[StreamChunk]) -> list[ChatChunk]:
    return [one for chunk in chunks for one in reader.read(chunk)]
