"""The result of a chat of the library: a `ChatCompletion` with the conversation that it belongs to, and what was parsed of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar, cast

from paceline.chat import ChatCompletion, ParsedMessage, ToolCall
from paceline.errors import ResponseModelError
from paceline.streaming import FinishReason, Usage

T = TypeVar("T")

Message = dict[str, Any]
_SYSTEM = ("system", "developer")
_WHOLE = (FinishReason.STOP, FinishReason.TOOL_CALLS)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ChatReply(ChatCompletion, Generic[T]):
    """What `LLM.chat` returns: the completion, the conversation up to it, and its content as an instance of response_model.

    Attributes:
        messages: The whole conversation: the messages that were passed, calls of tools and their results, the reply of the
            first choice. A list for the next call.
        rounds: The completions before this one: their calls were run by run_tools, or their content was no instance of
            response_model. Their usage is not in `usage`, but in `total_usage`.
        attempts: How many completions were parsed as response_model: 1 more than max_retries at most.
    """

    messages: list[Message]
    rounds: tuple[ChatCompletion, ...] = ()
    attempts: int = 1
    _parsed: T | None = None
    _is_parsed: bool = False

    @property
    def parsed(self) -> T:
        """Instance of response_model; without one None.

        Raises:
            ResponseModelError: The reply is calls of tools, and so there is no content to parse.
        """
        if not self._is_parsed and self.tool_calls:
            raise ResponseModelError(
                "the reply calls tools, so there is nothing to parse; add their results to its messages and go on",
                self.content,
                self,
            )
        return cast("T", self._parsed)  # which is None without a response_model

    @property
    def total_usage(self) -> Usage:
        """Token counts and times of this completion and its rounds together; the first round's `ttft_s`."""
        usages = [completion.usage for completion in (*self.rounds, self)]
        numbers = (field.name for field in fields(Usage) if isinstance(getattr(self.usage, field.name), (int, float)))
        sums: dict[str, Any] = {
            name: sum(getattr(usage, name) for usage in usages) for name in numbers if name != "ttft_s"
        }
        return replace(usages[0], cached_from=self.usage.cached_from, **sums)


def reply_of(
    completion: ChatCompletion,
    messages: Sequence[Message],
    rounds: Sequence[ChatCompletion],
    *,
    attempts: int = 1,
    parsed: object = None,
    is_parsed: bool = False,
) -> ChatReply[Any]:
    """Return a completion with its conversation. messages: up to and with it."""
    known = {field.name: getattr(completion, field.name) for field in fields(ChatCompletion)}
    return ChatReply(
        **known, messages=list(messages), rounds=tuple(rounds), attempts=attempts, _parsed=parsed, _is_parsed=is_parsed
    )


def is_whole(completion: ChatCompletion) -> bool:
    """Return whether the first choice has come to its own end."""
    return completion.finish_reason in _WHOLE


def reply_message(message: ParsedMessage) -> Message:
    """Return a generated message as one of a conversation.

    Line breaks around the thinking are left out: the template has its own.
    """
    made: Message = {"role": "assistant", "content": message.content}
    reasoning = message.reasoning_content.strip("\n")
    if reasoning:
        made["reasoning_content"] = reasoning
    if message.tool_calls:
        made["tool_calls"] = [_call_message(call) for call in message.tool_calls]
    return made


def plain_messages(messages: object) -> object:
    """Return a conversation with mappings in place of generated messages and of SDKs' objects (pydantic models)."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        return messages  # refused when it is parsed
    return [_plain_message(message) for message in messages]


def num_leading(messages: Sequence[Any]) -> int:
    """Return the number of system and developer messages at the beginning of a conversation."""
    return next((i for i, one in enumerate(messages) if _role_of(one) not in _SYSTEM), len(messages))


def exchange_starts(messages: Sequence[Any]) -> list[int]:
    """Return the indices at which exchanges begin: after the system messages, and at each user message after another role."""
    first = num_leading(messages)
    roles = [_role_of(message) for message in messages]
    return [i for i in range(first, len(roles)) if i == first or (roles[i] == "user" and roles[i - 1] != "user")]


def _role_of(message: Any) -> object:
    return (
        message.get("role") if isinstance(message, Mapping) else None
    )  # what is malformed is refused when it is parsed


def _plain_message(message: Any) -> Any:
    if isinstance(message, ParsedMessage):
        return reply_message(message)
    is_model = not isinstance(message, (Mapping, type)) and callable(getattr(message, "model_dump", None))
    return message.model_dump() if is_model else message


def _call_message(call: ToolCall) -> Mapping[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def result_message(call: ToolCall, result: str) -> Message:
    """Return the result of a call as a message."""
    return {"role": "tool", "tool_call_id": call.id, "content": result}
