"""What `AsyncLLM` has of chats: awaitable methods. Rendering and parsing run in threads of the loop's executor."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from paceline.chat_client.chat_arguments import (
    ChatArguments,
    ChatFormats,
    ChatKeywords,
    PlainChatKeywords,
    StreamChatKeywords,
    chat_arguments,
    with_chat_keywords,
)
from paceline.chat_client.chat_assembly import ChatAssembly
from paceline.chat_client.chat_call import ChatCall
from paceline.chat_client.chat_methods import (
    ChatOutcome,
    Messages,
    is_batch_of_chats,
    outcome_of,
    streamed_chat_arguments,
)
from paceline.chat_client.chat_reply import ChatReply
from paceline.chat_client.chat_streams import AsyncChatStream
from paceline.chat_client.token_history import TokenHistory
from paceline.engine.arguments import batch_arguments, checked_index, given_options
from paceline.engine.client import EngineClient
from paceline.engine.results import AsyncBatch, batch_outcome, waits
from paceline.errors import PacelineError
from paceline.params import SamplingParams
from paceline.runtime import Model
from paceline.scheduling.sequence import Request
from paceline.streaming import AsyncStream, StreamChannel

if TYPE_CHECKING:
    from typing_extensions import TypeForm  # known to type checkers without the package

T = TypeVar("T")


class AsyncChatMethods(ABC):
    """The methods of `AsyncLLM` for chats."""

    _chat_template: str | None
    _formats: ChatFormats | None = None

    @abstractmethod
    async def _engine(self) -> EngineClient:
        """Return the engine, started if need be."""

    @overload
    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        response_model: None = None,
        **options: Unpack[PlainChatKeywords],
    ) -> ChatReply[None]: ...
    @overload
    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        response_model: TypeForm[T],
        **options: Unpack[PlainChatKeywords],
    ) -> ChatReply[T]: ...
    @overload
    async def chat(
        self,
        messages: Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        response_model: None = None,
        **options: Unpack[PlainChatKeywords],
    ) -> list[ChatReply[None]]: ...
    @overload
    async def chat(
        self,
        messages: Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        response_model: TypeForm[T],
        **options: Unpack[PlainChatKeywords],
    ) -> list[ChatReply[T]]: ...

    @with_chat_keywords
    async def chat(
        self, messages: Any, params: Any = None, **options: Unpack[ChatKeywords]
    ) -> ChatReply[Any] | list[ChatReply[Any]]:
        """Chat as `LLM.chat` does, without a progress bar.

        With run_tools, functions may be async, and the calls of one message run concurrently: async functions on the loop,
        plain ones in threads.
        """
        if not is_batch_of_chats(messages):
            return await self._run(await self._call(messages, await self._arguments(params, options)))
        engine = await self._engine()
        sort = partial(chat_arguments, engine.sampling_defaults, options=options, is_streamed=False)
        arguments = await asyncio.to_thread(batch_arguments, params, len(messages), sort)
        calls = [await self._call(*one) for one in zip(messages, arguments, strict=True)]
        return batch_outcome(await _run_calls(engine, calls), "conversations")

    @with_chat_keywords
    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        request_index: int | None = 0,
        **options: Unpack[StreamChatKeywords],
    ) -> AsyncChatStream:
        """Stream a chat as `LLM.stream_chat` does. The request is submitted when the stream is entered or first read.

        Returns:
            An async context manager and iterator. Entering it raises as `LLM.stream_chat` does.

        Raises:
            InvalidParams: `request_index` is invalid.
        """
        index = checked_index(request_index)
        return self._stream(messages, params, options, index)

    async def _chat_model(self) -> Model:
        """Return the model whose token ids a conversation has."""
        return (await self._engine()).model

    async def _chat_turn(
        self, messages: Messages, history: TokenHistory, params: SamplingParams | None, options: Mapping[str, Any]
    ) -> tuple[ChatReply[Any], TokenHistory]:
        """Run a turn of an `AsyncConversation` and return the reply, and what is known of its tokens then."""
        arguments = await self._arguments(params, options)
        call = await self._call(messages, arguments, history)
        return await self._run(call), call.history

    def _stream_turn(
        self,
        messages: Messages,
        make_history: Callable[[Model], TokenHistory],
        params: SamplingParams | None,
        options: Mapping[str, Any],
        on_end: Callable[[ChatCall, Model], object],
    ) -> AsyncChatStream:
        """Stream a turn of an `AsyncConversation`.

        make_history: returns what is known of its tokens. on_end: called with the turn, in a thread, when its terminal chunk is
        read.
        """
        return self._stream(messages, params, options, 0, make_history, on_end)

    def _stream(
        self,
        messages: Messages,
        params: SamplingParams | None,
        options: Mapping[str, Any],
        index: int,
        make_history: Callable[[Model], TokenHistory] = lambda _: TokenHistory(),
        on_end: Callable[[ChatCall, Model], object] = lambda _, __: None,
    ) -> AsyncChatStream:
        made: list[ChatCall] = []  # by the first round

        async def make_call(engine: EngineClient) -> ChatCall:
            arguments = await asyncio.to_thread(
                streamed_chat_arguments, engine.sampling_defaults, messages, params, options
            )
            return await self._call(messages, arguments, make_history(engine.model))

        def open_round() -> tuple[AsyncStream, Callable[[], ChatAssembly]]:
            opened: list[ChatAssembly] = []

            async def submit() -> StreamChannel:
                engine = await self._engine()
                if not made:
                    made.append(await make_call(engine))
                request = await asyncio.to_thread(made[0].prepare, engine)
                opened.append(ChatAssembly(made[0], request.prompt, lambda ended: on_end(ended, engine.model)))
                return engine.accept(request, index, waits=waits(engine))

            interval = given_options(options).get("interval", 1)
            stream = AsyncStream(submit, interval=interval, request_index=index, keep_alive=self)
            return stream, lambda: opened[0]

        return AsyncChatStream(open_round)

    async def _arguments(self, params: SamplingParams | None, options: Mapping[str, Any]) -> ChatArguments:
        defaults = (await self._engine()).sampling_defaults
        return await asyncio.to_thread(chat_arguments, defaults, params, options, is_streamed=False)

    async def _run(self, call: ChatCall) -> ChatReply[Any]:
        (outcome,) = await _run_calls(await self._engine(), [call])
        if isinstance(outcome, PacelineError):
            raise outcome
        return outcome

    async def _call(self, messages: object, arguments: ChatArguments, history: TokenHistory | None = None) -> ChatCall:
        if self._formats is None:
            self._formats = ChatFormats((await self._engine()).model, self._chat_template)
        return ChatCall(messages, arguments, await asyncio.to_thread(self._formats.get, arguments.template), history)


async def _run_calls(engine: EngineClient, calls: Sequence[ChatCall]) -> list[ChatOutcome]:
    """Run conversations, round after round all those that are open together; return what became of each."""
    outcomes: dict[int, ChatOutcome] = {}
    open_calls = list(enumerate(calls))

    def prepare(one: tuple[int, ChatCall]) -> Request:
        return one[1].prepare(engine)

    while open_calls:
        next_calls = []
        found = await AsyncBatch(engine, prepare).run(open_calls)
        for (index, call), outcome in zip(open_calls, found, strict=True):
            if isinstance(outcome, PacelineError):
                outcomes[index] = call.error_of_round(outcome)
                continue
            pending = await asyncio.to_thread(call.take, outcome, index)
            if pending:
                running = (call.toolbox.run_async(one, asyncio.to_thread) for one in pending)
                call.add_results(zip(pending, await asyncio.gather(*running), strict=True))
                next_calls.append((index, call))
            elif await asyncio.to_thread(call.asks_again):
                next_calls.append((index, call))
            else:
                outcomes[index] = await asyncio.to_thread(outcome_of, call)
        open_calls = next_calls
    return [outcomes[index] for index in range(len(calls))]
