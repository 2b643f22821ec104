"""From a conversation to a prompt, and back to a message: for the library and the server alike.

conversation: what it may consist of (`parse_messages`), and whether the prompt continues its last message (`next_turn`).
tools: functions that the model may call (`parse_tools`). chat_format: the model's chat template, with what it says about
thinking and tool calls (`ChatFormat`); message_fitter: conversations rendered by it without losing a text. message_parser:
generated text, read apart into content, thinking and calls (`MessageParser`); message_stream: the same while it comes
(`MessageStream`). chat_request: what an engine generates for a turn (`prepare_chat`); chat_media: the images of its messages
(`ChatMedia`); chat_completion: what comes of it (`ChatCompletion`, `ChatReader`).

Rendering and parsing take time: keep them off the engine's thread and off an event loop.
"""

from paceline.chat.chat_completion import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatReader,
    ToolResult,
    chat_completion_of,
    new_call_id,
)
from paceline.chat.chat_format import ChatFormat, ChatOptions, GrammarTrigger, RenderedPrompt, template_kwargs
from paceline.chat.chat_request import ChatRequest, is_thinking_open, prepare_chat
from paceline.chat.conversation import Turn, next_turn, parse_messages
from paceline.chat.message_parser import MessageParser, ParsedMessage, ToolCall
from paceline.chat.message_stream import MessageDelta, MessageStream, ToolCallDelta
from paceline.chat.tools import Tool, parse_tool_choice, parse_tools

__all__ = [
    "ChatChoice",
    "ChatChunk",
    "ChatCompletion",
    "ChatFormat",
    "ChatOptions",
    "ChatReader",
    "ChatRequest",
    "GrammarTrigger",
    "MessageDelta",
    "MessageParser",
    "MessageStream",
    "ParsedMessage",
    "RenderedPrompt",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolResult",
    "Turn",
    "chat_completion_of",
    "is_thinking_open",
    "new_call_id",
    "next_turn",
    "parse_messages",
    "parse_tool_choice",
    "parse_tools",
    "prepare_chat",
    "template_kwargs",
]
