"""Requests of an iterable, however many: `LLM.batch` and `AsyncLLM.batch`. As many are open as keep the slots busy.

On the caller's thread or event loop, which also reads the iterable. Leaving the loop cancels the requests that are open.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from paceline.chat_client.chat_call import ChatReply
from paceline.engine.client import EngineClient
from paceline.engine.prompts import Prompt
from paceline.engine.results import waits
from paceline.errors import EngineStopped, InvalidParams, InvalidType, PacelineError
from paceline.sequence import Request
from paceline.streaming import StreamChannel, StreamChunk
from paceline.streaming.channel import wait_any
from paceline.streaming.chunk import Completion
from paceline.streaming.sender import Nothing

_OPEN_PER_SLOT: Final = 4  # prompts that wait are tokenised already, and grouped by their prefixes

BatchRequest: TypeAlias = Prompt | Mapping[str, Any]
"""A prompt; or a mapping with `prompt` or `messages`, perhaps a `custom_id`, and keywords of `generate` or `chat`."""

BatchReply: TypeAlias = Completion | ChatReply[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """The result of one request of `LLM.batch`.

    Attributes:
        index: The place of the request, from 0.
        custom_id: The `custom_id` of the request; None if it has none.
        reply: The `Completion` of a prompt or the `ChatReply` of messages; None if the request failed.
        error: The reason of a failure; None if there is a reply.
    """

    index: int
    custom_id: str | None
    reply: BatchReply | None = None
    error: PacelineError | None = None

    def unless_failed(self) -> BatchReply:
        """Return the reply.

        Returns:
            The reply of a request that succeeded.

        Raises:
            PacelineError: The request failed.
        """
        if self.error is not None:
            raise self.error
        assert self.reply is not None  # noqa: S101 - the record has one of the two
        return self.reply


@dataclass(frozen=True, slots=True)
class GivenRequest:
    """A request. subject: a prompt, or the messages of a chat. options: keywords of `generate` or `chat`."""

    subject: Any
    options: dict[str, Any]
    is_chat: bool


@dataclass(frozen=True, slots=True)
class BatchCall:
    """A request that takes one round or several.

    Attributes:
        prepare: Prepares the next round.
        read: Reads a round; returns the reply, or None if another round follows. Raises the error of the request.
    """

    prepare: Callable[[EngineClient], Request]
    read: Callable[[Completion], BatchReply | None]


def split_request(request: BatchRequest) -> GivenRequest:
    """Return a request with its parts apart. Raises `InvalidParams` and `InvalidType`."""
    if not isinstance(request, Mapping):
        return GivenRequest(request, {}, is_chat=False)
    names: Iterable[object] = request
    if wrong := [name for name in names if not isinstance(name, str) or name == "self"]:
        raise InvalidType(f"the keys of a request are names of options, not {wrong[0]!r:.80}")
    options = dict(request)
    custom_id = options.pop("custom_id", None)
    if custom_id is not None and not isinstance(custom_id, str):
        raise InvalidType(f"custom_id must be a text, not {custom_id!r:.80}")
    if ("prompt" in options) == ("messages" in options):
        raise InvalidParams("a request has either prompt or messages, beside its custom_id and its options")
    is_chat = "messages" in options
    return GivenRequest(options.pop("messages" if is_chat else "prompt"), options, is_chat)


def _custom_id(request: BatchRequest) -> str | None:
    custom_id = request.get("custom_id") if isinstance(request, Mapping) else None
    return custom_id if isinstance(custom_id, str) else None


def _most_open(engine: EngineClient) -> int:
    config = engine.config
    return min(_OPEN_PER_SLOT * config.num_slots, config.num_slots + config.max_queue)


def run_requests(
    engine: EngineClient, requests: Iterable[BatchRequest], begin: Callable[[GivenRequest], BatchCall]
) -> Iterator[BatchResult]:
    """Run requests, and yield each result when it is there. Raises `EngineStopped`, and errors of the iterable.

    begin: Makes the call of a request; raises its errors.
    """
    waiting, most = enumerate(_checked(requests)), _most_open(engine)
    running: dict[StreamChannel, tuple[int, str | None, BatchCall, list[StreamChunk]]] = {}

    def start(index: int, custom_id: str | None, call: BatchCall) -> None:
        channel = engine.accept(call.prepare(engine), index, waits=bool(running) or waits(engine))
        running[channel] = index, custom_id, call, []

    def result_of(channel: StreamChannel) -> BatchResult | None:
        """Return the result of a request whose round has ended; None if another round began."""
        index, custom_id, call, chunks = running.pop(channel)
        try:
            channel.wait_released()  # the terminal chunk comes a moment before the engine has a place again
            reply = call.read(channel.completion_of(chunks).unless_failed())
            if reply is None:
                start(index, custom_id, call)
                return None
        except EngineStopped:
            raise
        except PacelineError as error:
            return BatchResult(index=index, custom_id=custom_id, error=error)
        return BatchResult(index=index, custom_id=custom_id, reply=reply)

    try:
        is_empty = False
        while True:
            while not is_empty and len(running) < most:
                found = next(waiting, None)
                if found is None:
                    is_empty = True
                    break
                index, request = found
                custom_id = _custom_id(request)
                try:
                    start(index, custom_id, begin(split_request(request)))
                except EngineStopped:
                    raise
                except PacelineError as error:
                    yield BatchResult(index=index, custom_id=custom_id, error=error)
            if not running:
                return
            wait_any(list(running), None)
            for channel in list(running):
                while isinstance(taken := channel.get(0), StreamChunk):
                    running[channel][3].append(taken)
                if taken is Nothing.END and (result := result_of(channel)) is not None:
                    yield result
    finally:
        for channel in running:
            channel.cancel()


async def run_requests_async(
    engine: EngineClient,
    requests: Iterable[BatchRequest] | AsyncIterable[BatchRequest],
    reply_to: Callable[[GivenRequest], Awaitable[BatchReply]],
) -> AsyncGenerator[BatchResult, None]:
    """Run requests as `run_requests` does, on an event loop. reply_to: Runs a request; raises its errors."""

    async def run(index: int, request: BatchRequest) -> BatchResult:
        custom_id = _custom_id(request)
        try:
            return BatchResult(index=index, custom_id=custom_id, reply=await reply_to(split_request(request)))
        except EngineStopped:
            raise
        except PacelineError as error:
            return BatchResult(index=index, custom_id=custom_id, error=error)

    waiting, most = _each(requests), _most_open(engine)
    running: set[asyncio.Task[BatchResult]] = set()
    reading: asyncio.Task[tuple[BatchRequest, ...]] | None = None  # ends while requests run
    index, is_empty = 0, False
    try:
        while True:
            if reading is None and not is_empty and len(running) < most:
                reading = asyncio.create_task(_next(waiting))
            awaited: set[asyncio.Task[Any]] = {*running} if reading is None else {*running, reading}
            if not awaited:
                return
            ended, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if reading is not None and reading.done():
                found = reading.result()
                reading, is_empty = None, not found
                for request in found:
                    running.add(asyncio.create_task(run(index, request)))
                    index += 1
            for task in ended & running:
                running.remove(task)
                yield task.result()
    finally:
        for task in {*running} if reading is None else {*running, reading}:
            task.cancel()


async def _next(requests: AsyncIterator[BatchRequest]) -> tuple[BatchRequest, ...]:
    """Return the next request, or nothing at the end: a request may be None, which is an error of its own."""
    try:
        return (await anext(requests),)
    except StopAsyncIteration:
        return ()


def _checked(requests: Iterable[BatchRequest]) -> Iterable[BatchRequest]:
    if isinstance(requests, (str, Mapping)):
        raise InvalidType("requests must be an iterable of requests, such as a list; a single request goes into a list")
    return requests


async def _each(requests: Iterable[BatchRequest] | AsyncIterable[BatchRequest]) -> AsyncIterator[BatchRequest]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
        return
    for request in _checked(requests):
        yield request
