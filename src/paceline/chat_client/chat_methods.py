"""Chats of `LLM` and `AsyncLLM`: blocking methods for any thread, and awaitable ones that render and parse in threads."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, Unpack, overload

from paceline.chat import ToolCall
from paceline.chat.chat_request import TokenHistory
from paceline.chat_client.chat_arguments import (
    ChatArguments,
    ChatFormats,
    ChatKeywords,
    PlainChatKeywords,
    StreamChatKeywords,
    chat_arguments,
    with_chat_keywords,
)
from paceline.chat_client.chat_call import ChatAssembly, ChatCall, ChatReply
from paceline.chat_client.chat_streams import AsyncChatStream, ChatStream
from paceline.chat_client.request_batch import BatchCall
from paceline.engine.arguments import batch_arguments, checked_index, given_options
from paceline.engine.client import EngineClient
from paceline.engine.results import AsyncBatch, Batch, Outcome, batch_outcome, checked_progress, progress_bar, waits
from paceline.errors import InvalidParams, InvalidType, PacelineError
from paceline.params import SamplingParams
from paceline.runtime import Model
from paceline.streaming import AsyncStream, Stream, StreamChannel
from paceline.streaming.chunk import Completion

if TYPE_CHECKING:
    from typing_extensions import TypeForm  # known to type checkers without the package

T = TypeVar("T")

Messages = Sequence[Mapping[str, Any]]
ChatOutcome = ChatReply[Any] | PacelineError
_ONE = "stream_chat takes one conversation; make a stream for each of several"


def is_batch_of_chats(messages: object) -> bool:
    """Return whether this is a list of conversations, and not one."""

    def is_list(value: object) -> TypeGuard[Sequence[object]]:
        return isinstance(value, Sequence) and not isinstance(value, (str, bytes))

    return is_list(messages) and len(messages) > 0 and is_list(messages[0])


class ChatMethods:
    """The methods of `LLM` for chats."""

    _engine: EngineClient
    _formats: ChatFormats

    @overload
    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        response_model: None = None,
        **options: Unpack[PlainChatKeywords],
    ) -> ChatReply[None]: ...
    @overload
    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        response_model: TypeForm[T],
        **options: Unpack[PlainChatKeywords],
    ) -> ChatReply[T]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        response_model: None = None,
        progress: bool | Callable[[int, int], object] | None = False,
        **options: Unpack[PlainChatKeywords],
    ) -> list[ChatReply[None]]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        response_model: TypeForm[T],
        progress: bool | Callable[[int, int], object] | None = False,
        **options: Unpack[PlainChatKeywords],
    ) -> list[ChatReply[T]]: ...

    @with_chat_keywords
    def chat(
        self,
        messages: Any,
        params: Any = None,
        *,
        progress: bool | Callable[[int, int], object] | None = False,
        **options: Unpack[ChatKeywords],
    ) -> ChatReply[Any] | list[ChatReply[Any]]:
        """Generate the next message of a conversation, or of each of a list of conversations, all in one batch.

        Args:
            messages: A list of messages as OpenAI's API has them: {"role": "user", "content": "Hello!"}. Or a list of these
                lists, which may be longer than the queue.
            params: The sampling parameters; for a list of conversations also a list with one for each; None: the defaults,
                without a limit on the message's length.
            progress: True shows a progress bar on a terminal or in a notebook while a list runs. A function
                `progress(done, total)` is called in this thread after each conversation; an exception of it ends the call.
            **options: Fields of `SamplingParams`, which override `params`, of `RequestOptions` except those that concern
                streams, and:
                tools: Functions that the model may call: Python functions, `FunctionTool`s, or objects as OpenAI's API has.
                tool_choice: "auto", "none", "required", or a tool, by its name or as OpenAI's API spells it.
                parallel_tool_calls: Whether a message may have several calls; None: if the template can.
                run_tools: Whether to run the calls of Python functions and go on with their results until there is a reply.
                max_tool_rounds: How often (8); after that the calls themselves are the reply.
                context_overflow: "error" raises `PromptTooLong` if the context cannot hold the conversation; "drop_oldest"
                    leaves the oldest messages out of the prompt.
                response_model: A pydantic model, dataclass or TypedDict; the reply has an instance of it, `parsed`.
                schema_in_prompt: Whether the prompt shows the schema to the model, with its descriptions; None: if it is that
                    of response_model.
                max_retries: How often the model is asked again, with the errors, for a reply that is no instance of
                    response_model or was cut off (1).
                response_format: As OpenAI's API has it: json_object, or json_schema with a schema.
                reasoning_format: "auto" parses thinking apart from the content, "none" leaves it there.
                reasoning_effort: For templates that know one; "none" is enable_thinking=False.
                chat_template: A template's name, or its Jinja source; None: the one of `LLM`.
                chat_template_kwargs: Variables for the template, such as enable_thinking.
                continue_final_message: Whether to continue the last message, which is the assistant's.
                add_generation_prompt: False for a prompt without the beginning of the assistant's message.

        Returns:
            The reply; for a list one for each conversation, in order.

        Raises:
            RequestError: A message, tool or option is invalid, or the template refuses the conversation.
            ResponseModelError: The reply is no instance of response_model; the error has its text.
            QueueFull: The queue is full, and `when_full` is "refuse". For a list, only if none of its conversations is running.
            EngineError: The engine has stopped, or the request failed in all its choices.
            BatchError: Some conversations of a list failed; `outcomes` has the reply or the error of each.
        """
        wanted = checked_progress(progress)
        if not is_batch_of_chats(messages):
            return self._run(self._begin(messages, params, options))
        arguments = batch_arguments(params, len(messages), lambda given: self._arguments(given, options))
        calls = [self._call(*pair) for pair in zip(messages, arguments, strict=True)]
        with progress_bar(len(calls), wanted) as advance:
            return batch_outcome(run_calls(self._engine, calls, advance), "conversations")

    @with_chat_keywords
    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        request_index: int | None = 0,
        **options: Unpack[StreamChatKeywords],
    ) -> ChatStream:
        """Stream the next message of a conversation as it is generated. Leaving the stream cancels the request.

        Args:
            messages: The conversation.
            params: The sampling parameters; None: the defaults, without a limit on the message's length.
            request_index: A number of the caller's for this request, at least 0; the engine does not use it.
            **options: As for `chat`, and all of `RequestOptions`. With run_tools the stream goes on over the calls and their
                results to the reply; see `ChatStream`.

        Returns:
            The stream, with the request already queued.

        Raises:
            RequestError: A message, tool or option is invalid, or the template refuses the conversation.
            QueueFull: The queue is full, and `when_full` is "refuse".
            EngineStopped: The engine accepts no requests any more.
        """
        return self._stream(self._begin(messages, params, options, is_streamed=True), checked_index(request_index))

    def _begin(
        self,
        messages: object,
        params: SamplingParams | None,
        options: Mapping[str, Any],
        history: TokenHistory | None = None,
        *,
        is_streamed: bool = False,
    ) -> ChatCall:
        if is_streamed and is_batch_of_chats(messages):
            raise InvalidType(_ONE)
        return self._call(messages, self._arguments(params, options, is_streamed=is_streamed), history)

    def _arguments(
        self, params: SamplingParams | None, options: Mapping[str, Any], *, is_streamed: bool = False
    ) -> ChatArguments:
        arguments = chat_arguments(self._engine.sampling_defaults, params, options, is_streamed=is_streamed)
        if arguments.max_tool_rounds and arguments.toolbox.has_async_functions:
            raise InvalidParams("run_tools: async functions need an event loop; use AsyncLLM, or plain functions")
        return arguments

    def _call(self, messages: object, arguments: ChatArguments, history: TokenHistory | None = None) -> ChatCall:
        return ChatCall(messages, arguments, self._formats.get(arguments.template), history)

    def _run(self, call: ChatCall) -> ChatReply[Any]:
        (outcome,) = run_calls(self._engine, [call], lambda: None)
        if isinstance(outcome, PacelineError):
            raise outcome
        return outcome

    def _open_chat(self, messages: object, params: SamplingParams | None, options: Mapping[str, Any]) -> BatchCall:
        """Return a chat of a batch. Raises as `chat`."""
        if is_batch_of_chats(messages):
            raise InvalidType("messages: a request of a batch has one conversation; make a request of each of several")
        call = self._begin(messages, params, options)

        def read(completion: Completion) -> ChatReply[Any] | None:
            found = _read(call, completion, 0)
            if isinstance(found, tuple):
                call.add_results([(tool_call, call.toolbox.run(tool_call)) for tool_call in found])
                return None
            if isinstance(found, PacelineError):
                raise found
            return found

        return BatchCall(call.prepare, read)

    def _stream(
        self, call: ChatCall, index: int = 0, on_end: Callable[[ChatCall], object] = lambda _: None
    ) -> ChatStream:
        def open_round() -> tuple[Stream, ChatAssembly]:
            request = call.prepare(self._engine)
            stream = Stream(self._engine.accept(request, index, waits=waits(self._engine)), keep_alive=self)
            return stream, ChatAssembly(call, request.prompt, on_end)

        return ChatStream(open_round)


def run_calls(engine: EngineClient, calls: Sequence[ChatCall], advance: Callable[[], object]) -> list[ChatOutcome]:
    """Run conversations, round after round all that are open together; return the outcome of each."""
    outcomes: dict[int, ChatOutcome] = {}
    open_calls = list(enumerate(calls))

    def take(open_call: tuple[int, ChatCall], outcome: Outcome) -> None:
        index, call = open_call
        found = _read(call, outcome, index)
        if isinstance(found, tuple):
            call.add_results([(tool_call, call.toolbox.run(tool_call)) for tool_call in found])
        if isinstance(found, (ChatReply, PacelineError)):
            outcomes[index] = found
            advance()
        else:
            open_calls.append(open_call)

    while open_calls:
        running = list(open_calls)
        open_calls.clear()
        Batch[tuple[int, ChatCall]](engine, lambda open_call: open_call[1].prepare(engine), take).run(running)
    return [outcomes[index] for index in range(len(calls))]


def _read(call: ChatCall, outcome: Outcome, index: int) -> ChatOutcome | tuple[ToolCall, ...] | None:
    """Read the outcome of a round; return the outcome of the call, or the tool calls to run. None: the model is asked again."""
    if isinstance(outcome, PacelineError):
        return call.error_of_round(outcome)
    if pending := call.take(outcome, index):
        return pending
    if call.asks_again():
        return None
    try:
        return call.reply()
    except PacelineError as error:
        return error


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
            return await self._run(await self._begin(messages, params, options))
        engine = await self._engine()
        sort = partial(chat_arguments, engine.sampling_defaults, options=options, is_streamed=False)
        arguments = await asyncio.to_thread(batch_arguments, params, len(messages), sort)
        calls = [await self._call(*pair) for pair in zip(messages, arguments, strict=True)]
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

    def _stream(
        self,
        messages: Messages,
        params: SamplingParams | None,
        options: Mapping[str, Any],
        index: int = 0,
        make_history: Callable[[Model], TokenHistory] = lambda _: TokenHistory(),
        on_end: Callable[[ChatCall, Model], object] = lambda _, __: None,
    ) -> AsyncChatStream:
        """Stream a chat. on_end: called with the chat, in a thread, when its terminal chunk is read."""
        made: list[ChatCall] = []  # by the first round

        def open_round() -> tuple[AsyncStream, Callable[[], ChatAssembly]]:
            opened: list[ChatAssembly] = []

            async def submit() -> StreamChannel:
                engine = await self._engine()
                if not made:
                    history = make_history(engine.model)
                    made.append(await self._begin(messages, params, options, history, is_streamed=True))
                request = await asyncio.to_thread(made[0].prepare, engine)
                opened.append(ChatAssembly(made[0], request.prompt, lambda ended: on_end(ended, engine.model)))
                return engine.accept(request, index, waits=waits(engine))

            interval = given_options(options).get("interval", 1)
            stream = AsyncStream(submit, interval=interval, request_index=index, keep_alive=self)
            return stream, lambda: opened[0]

        return AsyncChatStream(open_round)

    async def _begin(
        self,
        messages: object,
        params: SamplingParams | None,
        options: Mapping[str, Any],
        history: TokenHistory | None = None,
        *,
        is_streamed: bool = False,
    ) -> ChatCall:
        if is_streamed and is_batch_of_chats(messages):
            raise InvalidType(_ONE)
        defaults = (await self._engine()).sampling_defaults
        arguments = await asyncio.to_thread(chat_arguments, defaults, params, options, is_streamed=is_streamed)
        return await self._call(messages, arguments, history)

    async def _call(self, messages: object, arguments: ChatArguments, history: TokenHistory | None = None) -> ChatCall:
        if self._formats is None:
            self._formats = ChatFormats((await self._engine()).model, self._chat_template)
        return ChatCall(messages, arguments, await asyncio.to_thread(self._formats.get, arguments.template), history)

    async def _run(self, call: ChatCall) -> ChatReply[Any]:
        (outcome,) = await _run_calls(await self._engine(), [call])
        if isinstance(outcome, PacelineError):
            raise outcome
        return outcome


async def _run_calls(engine: EngineClient, calls: Sequence[ChatCall]) -> list[ChatOutcome]:
    """Run conversations as `run_calls` does, with the calls of each message at the same time."""
    outcomes: dict[int, ChatOutcome] = {}
    open_calls = list(enumerate(calls))
    while open_calls:
        running, open_calls = open_calls, []
        batch = AsyncBatch[tuple[int, ChatCall]](engine, lambda open_call: open_call[1].prepare(engine))
        for (index, call), outcome in zip(running, await batch.run(running), strict=True):
            found = await asyncio.to_thread(_read, call, outcome, index)
            if isinstance(found, tuple):
                results = (call.toolbox.run_async(tool_call, asyncio.to_thread) for tool_call in found)
                call.add_results(zip(found, await asyncio.gather(*results), strict=True))
            if isinstance(found, (ChatReply, PacelineError)):
                outcomes[index] = found
            else:
                open_calls.append((index, call))
    return [outcomes[index] for index in range(len(calls))]
