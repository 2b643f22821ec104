"""Reads what a model generated after a rendered prompt: content, thinking and tool calls apart."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache

from paceline import validation
from paceline.chat.chat_format import RenderedPrompt
from paceline.runtime.chat_layer import ChatParser

MAX_KEPT_CHARS = 65536
"""Characters of the largest parser that is kept: those of chats with a dozen tools, which are the same at every turn."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model makes.

    Attributes:
        name: The function's name.
        arguments: JSON of the arguments; while text is still to come, the beginning of it.
        id: As the model wrote it; empty in formats without.
    """

    name: str
    arguments: str
    id: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are JSON, and not the beginning of it."""
        try:
            json.loads(self.arguments)
        except (ValueError, RecursionError):
            return False
        return True


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """A generated message.

    Attributes:
        content: The text for the user.
        reasoning_content: The thinking before it.
        tool_calls: In the order in which the model made them.
    """

    content: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def has_whole_calls(self) -> bool:
        """Whether there are tool calls, and each has all of its arguments, so that it can be carried out."""
        return bool(self.tool_calls) and all(call.is_whole for call in self.tool_calls)


@lru_cache(maxsize=32)
def _kept_parser(parser: str, name: str, generation_prompt: str) -> ChatParser:
    return ChatParser(parser, name, generation_prompt)


class MessageParser:
    """The parser of the format that a prompt was rendered in. Constant once made; any thread."""

    def __init__(self, prompt: RenderedPrompt) -> None:
        """Prepare the parser of one prompt; another prompt, with other tools, has another parser."""
        size = len(prompt.parser) + len(prompt.generation_prompt)
        make = _kept_parser if size <= MAX_KEPT_CHARS and not prompt.is_continued else ChatParser
        self._native = make(prompt.parser, prompt.format, prompt.generation_prompt)

    def parse(self, text: str, *, is_partial: bool = False) -> ParsedMessage:
        """Parse the whole text that was generated so far. Takes time in proportion to it; the GIL is released meanwhile.

        Args:
            text: With the control tokens among `RenderedPrompt.preserved_tokens`, and without the end of the turn.
            is_partial: Whether more is to come. What the end of the text leaves open is then left out or cut.

        Raises:
            ChatParseError: The text is not of the format.
        """
        content, reasoning, calls = self._native.parse(validation.text("text", text).encode(), is_partial)
        return ParsedMessage(
            content, reasoning, tuple(ToolCall(name, arguments, id_) for id_, name, arguments in calls)
        )
