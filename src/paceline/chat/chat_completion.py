"""The result of a chat: messages with content, thinking and tool calls apart; whole, and while they are generated.

Libraries and servers build their answers from these records. Parsing takes time: not on an event loop.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from paceline.chat.chat_format import RenderedPrompt
from paceline.chat.message_parser import MessageDelta, MessageStream, ParsedMessage, ToolCall
from paceline.errors import ChatParseError, PacelineError
from paceline.streaming import FinishReason, StreamChunk, TokenLogprobs, Usage
from paceline.streaming.chunk import Choice, Completion, CompletionOf, fields_of, record_repr

_SHORT_CHARS = 1024  # that are parsed faster than a thread is found for it


def new_call_id() -> str:
    """Return an id for a tool call in a format without ids."""
    return f"call_{secrets.token_hex(12)}"


_NAMES_ELSEWHERE = {  # attributes of replies in other packages
    "outputs": "content, or choices if n > 1",
    "prompt": "prompt_token_ids",
    "response": "content",
    "stop_reason": "choices[0].stop",
    "text": "content",
}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ChatChoice(Choice):
    """One choice of a chat completion; its `text` is the generated text as it was, with the marks of the chat format.

    Attributes:
        message: The generated message: content, thinking, tool calls. Every call has an id.
        warning: Why the text could not be read as a message of the chat format; the content is then the raw text, after the
            content that had been streamed before. Also that a reply after results of tools is empty. Not raised: no generated
            text is lost.
    """

    message: ParsedMessage
    warning: ChatParseError | None = None

    def __repr__(self) -> str:
        return record_repr(
            self, **_message_facts(self), tokens=len(self.token_ids), finish_reason=str(self.finish_reason), stop=self.stop,
            error=self.error, warning=self.warning,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ChatCompletion(CompletionOf[ChatChoice]):
    """The choices of a chat; the parts of the first one are properties of their own.

    Attributes:
        choices: All choices, by index.
        prompt_token_ids: The prompt as it was computed.
        usage: Token counts and times.
        prompt_logprobs: One for each prompt token from `prompt_logprobs_start` on, and none for the first token; None if they
            were not requested.
        index: The request's place in a list of conversations.
    """

    _names_elsewhere = _NAMES_ELSEWHERE

    @property
    def message(self) -> ParsedMessage:
        """Message of the first choice."""
        return self.choices[0].message

    @property
    def content(self) -> str:
        """Content of the first choice."""
        return self.choices[0].message.content

    @property
    def reasoning_content(self) -> str:
        """Thinking of the first choice."""
        return self.choices[0].message.reasoning_content

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Tool calls of the first choice."""
        return self.choices[0].message.tool_calls

    def __repr__(self) -> str:
        first = self.choices[0]
        return record_repr(
            self,
            **_message_facts(first),
            tokens=self.usage.completion_tokens,
            finish_reason=str(first.finish_reason),
            error=first.error,
            warning=first.warning,
            choices=self._num_choices,
        )


def _message_facts(choice: ChatChoice) -> dict[str, object]:
    message = choice.message
    calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return {
        "content": message.content,
        "reasoning_content": message.reasoning_content or None,
        "tool_calls": ", ".join(calls) or None,
    }


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call that was run for the model.

    Attributes:
        call: The call.
        content: The text for the model; "Error: " and the reason if the call failed.
    """

    call: ToolCall
    content: str


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Part of one choice of a chat that is being generated.

    Attributes:
        choice: The choice that it belongs to.
        deltas: The new parts of its message, in order. May be empty: the meaning of a token can depend on later tokens.
        token_ids: The generated tokens.
        logprobs: One per token of token_ids, if requested.
        prompt_logprobs: One per prompt token from `prompt_logprobs_start` on, never of the first, if requested; in choice 0.
        finish_reason: Why the choice ended; on its last chunk.
        stop: The stop string, or the id of the stop token or end-of-generation token, that ended it.
        usage: Token counts and times; on the terminal chunk, the last of the stream.
        error: Why the choice failed, with the reason ERROR.
        message: The whole message; on the choice's last chunk. With run_tools also on the last chunk of a message with calls that
            are run, which has no finish_reason.
        warning: As in `ChatChoice`; beside message.
        tool_result: With run_tools: the result of a call of the message before; nothing else is in its chunk.
    """

    choice: int
    deltas: tuple[MessageDelta, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    usage: Usage | None = None
    error: PacelineError | None = None
    message: ParsedMessage | None = None
    warning: ChatParseError | None = None
    tool_result: ToolResult | None = None

    @property
    def content(self) -> str:
        """The new text of the message, without thinking and tool calls; "" if there is none."""
        return "".join([delta.content for delta in self.deltas])

    @property
    def has_output(self) -> bool:
        """Whether it has tokens or a part of the message."""
        return bool(self.deltas or self.token_ids)


class ChatReader:
    """Reads the stream of one request as chunks of a chat. One thread at a time."""

    def __init__(
        self, rendered: RenderedPrompt, num_choices: int = 1, make_call_id: Callable[[], str] = new_call_id
    ) -> None:
        """Begin to read.

        Args:
            rendered: The prompt.
            num_choices: How many messages are generated after it.
            make_call_id: Makes ids of tool calls in formats without.
        """
        self._rendered = rendered
        self._messages = [MessageStream(rendered, make_call_id=make_call_id) for _ in range(num_choices)]

    def needs_parser(self, chunk: StreamChunk) -> bool:
        """Return whether reading this chunk takes time, because the parser is called on more than a short text."""
        stream = self._messages[chunk.choice]
        if chunk.finish_reason is not None and stream.is_holding_content:
            return True
        if chunk.usage is None and len(stream.text) + len(chunk.text) <= _SHORT_CHARS:
            return False
        return chunk.finish_reason is not None or stream.needs_parser(chunk.text)

    def read(self, chunk: StreamChunk) -> list[ChatChunk]:
        """Return the chunks of the chat that a chunk brings; if it ends several choices, a chunk for each, its own last."""
        ended = []
        for index, other in enumerate(self._messages) if chunk.usage is not None else ():
            if index != chunk.choice and not other.has_ended:
                deltas, whole = other.finish(is_cut=_is_cut(chunk.finish_reason, None, self._rendered))
                end = ChatChunk(
                    choice=index,
                    deltas=tuple(deltas),
                    finish_reason=chunk.finish_reason,
                    error=chunk.error,
                    message=whole,
                    warning=other.warning,
                )
                ended.append(end)
        message = self._messages[chunk.choice]
        deltas = [] if message.has_ended else message.feed(chunk.text)
        parsed, reason = None, chunk.finish_reason
        if reason is not None and not message.has_ended:
            more, parsed = message.finish(is_cut=_is_cut(reason, chunk.stop, self._rendered))
            deltas += more
            reason = _chat_reason(reason, parsed)
        return [
            *ended,
            ChatChunk(
                choice=chunk.choice,
                deltas=tuple(deltas),
                token_ids=chunk.token_ids,
                logprobs=chunk.logprobs,
                prompt_logprobs=chunk.prompt_logprobs,
                finish_reason=reason,
                stop=chunk.stop,
                usage=chunk.usage,
                error=chunk.error,
                message=parsed,
                warning=message.warning,
            ),
        ]


def chat_completion_of(
    completion: Completion, rendered: RenderedPrompt, make_call_id: Callable[[], str] = new_call_id
) -> ChatCompletion:
    """Read a completion of a chat's prompt as a chat completion.

    Args:
        completion: The completion.
        rendered: The prompt.
        make_call_id: Makes ids of tool calls in formats without.
    """
    choices = []
    for choice in completion.choices:
        stream = MessageStream(rendered, is_whole=True, make_call_id=make_call_id)
        stream.feed(choice.text)
        _, message = stream.finish(is_cut=_is_cut(choice.finish_reason, choice.stop, rendered))
        facts = fields_of(choice) | {"finish_reason": _chat_reason(choice.finish_reason, message)}
        choices.append(ChatChoice(**facts, message=message, warning=stream.warning))
    return ChatCompletion(**fields_of(completion) | {"choices": tuple(choices)})


def _is_cut(reason: FinishReason | None, stop: str | int | None, rendered: RenderedPrompt) -> bool:
    """Return whether a message did not come to its own end. The caller's stops cut it off, the stops of the format end it."""
    if reason is not FinishReason.STOP:
        return True
    return stop not in (None, *rendered.stops, *rendered.stop_token_ids) and stop not in rendered.eog_ids


def _chat_reason(reason: FinishReason, message: ParsedMessage) -> FinishReason:
    """Return TOOL_CALLS for STOP if the message has whole tool calls, else the reason itself."""
    return FinishReason.TOOL_CALLS if reason is FinishReason.STOP and message.has_whole_calls else reason
