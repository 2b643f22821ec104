"""Reads the stream of one request of a chat, and puts the chat together at its end. One thread at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from paceline.chat import ChatChoice, ChatChunk, ChatCompletion, ChatReader, ToolCall
from paceline.chat_client.chat_call import ChatCall
from paceline.chat_client.chat_reply import ChatReply
from paceline.completion import Completion, completion_of
from paceline.errors import PacelineError
from paceline.streaming import FinishReason, StreamChunk


class ChatAssembly:
    """Reads the chunks of one request as chunks of a chat, and puts them together at the end. One thread at a time.

    completion: the whole, once it is; pending: its calls, if they are run before another request.
    """

    def __init__(
        self, call: ChatCall, prompt: Sequence[int], on_end: Callable[[ChatCall], object] | None = None
    ) -> None:
        """Begin to read.

        Args:
            call: The chat, prepared.
            prompt: Its prompt as it is computed.
            on_end: Called with the chat on the thread that reads the terminal chunk.
        """
        self._call, self._prompt = call, prompt
        self._reader = ChatReader(call.rendered, call.request.params.n)
        self._received: list[StreamChunk] = []
        self._last_chunks: dict[int, ChatChunk] = {}
        self._on_end = on_end
        self.completion: ChatCompletion | None = None
        self.pending: tuple[ToolCall, ...] = ()

    def needs_parser(self, chunk: StreamChunk) -> bool:
        """Return whether reading this chunk takes time."""
        return self._reader.needs_parser(chunk)

    def read(self, chunk: StreamChunk) -> list[ChatChunk]:
        """Return what a chunk brings."""
        self._received.append(chunk)
        chunks = self._reader.read(chunk)
        self._last_chunks |= {one.choice: one for one in chunks if one.finish_reason is not None}
        if chunk.usage is not None:
            self.pending = self._call.take_read(self._assembled())
            self.completion = completion = self._call.completion
            assert completion is not None  # noqa: S101 - it was taken
            if self.pending:  # then this is not the stream's end
                chunks[-1] = msgspec.structs.replace(chunks[-1], finish_reason=None, usage=None)
            else:
                last = chunks[-1]
                warnings = {choice.index: choice.warning for choice in completion.choices}
                chunks[-1] = msgspec.structs.replace(last, warning=warnings[last.choice])
                self._has_ended()
        return chunks

    @property
    def may_go_on(self) -> bool:
        """Whether calls are run before another request, as far as it is known."""
        return self._call.may_run_tools if self.completion is None else bool(self.pending)

    @property
    def call(self) -> ChatCall:
        """The chat."""
        return self._call

    def cut_off(self, reason: FinishReason, error: PacelineError | None = None) -> ChatChunk:
        """End the chat in front of another request; return its terminal chunk."""
        self.pending = ()
        self.completion = completion = self._call.cut_off(reason, error)
        self._has_ended()
        return ChatChunk(
            choice=0, finish_reason=reason, usage=completion.usage, error=error, message=completion.message
        )

    def _has_ended(self) -> None:
        if self._on_end is not None:
            self._on_end(self._call)

    def reply(self) -> ChatReply[Any]:
        """Return the reply of a chat that has ended. Raises `ResponseModelError`."""
        return self._call.reply()

    def _assembled(self) -> ChatCompletion:
        params = self._call.request.params
        whole = completion_of(
            self._received,
            prompt=self._prompt,
            wants_logprobs=params.logprobs is not None,
            wants_prompt_logprobs=params.prompt_logprobs is not None,
            index=0,
        )
        self._received.clear()
        return ChatCompletion(
            choices=tuple(self._choices(whole)),
            prompt_token_ids=whole.prompt_token_ids,
            usage=whole.usage,
            prompt_logprobs=whole.prompt_logprobs,
        )

    def _choices(self, whole: Completion) -> Iterable[ChatChoice]:
        """Yield the choices with the messages that were streamed, whose calls have their ids."""
        texts = {choice.index: choice for choice in whole.choices}
        for index, last in sorted(self._last_chunks.items()):
            generated = texts.get(index)
            assert last.message is not None  # noqa: S101 - a choice's last chunk has its message
            assert last.finish_reason is not None  # noqa: S101 - and its reason
            yield ChatChoice(
                index=index,
                message=last.message,
                finish_reason=last.finish_reason,
                text="" if generated is None else generated.text,
                token_ids=() if generated is None else generated.token_ids,
                stop=last.stop,
                logprobs=None if generated is None else generated.logprobs,
                error=last.error,
                warning=last.warning,
            )
