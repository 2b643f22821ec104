"""From a conversation to a prompt, and from generated text to a message: for the library and the server alike.

conversation: the messages that a request may have (`parse_messages`), their images and audio (`ChatMedia`), and the end of the
prompt (`next_turn`); message_parts: parts of contents, and checks of JSON values. tools: functions that the model may call
(`parse_tools`); call_grammar: how a chat format spells their calls. chat_format: the model's chat template, with its thinking
and tool calls (`ChatFormat`); message_fitter: renders conversations so that no text is lost, by the rewrites of
message_rewrites. chat_request: the tokens and constraints of a turn (`prepare_chat`). message_parser: reads content, thinking
and calls in generated text, whole or while it comes (`MessageStream`). chat_completion: the result of a chat (`ChatCompletion`,
`ChatReader`).

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
from paceline.chat.message_parser import (
    MessageDelta,
    MessageParser,
    MessageStream,
    ParsedMessage,
    ToolCall,
    ToolCallDelta,
)
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
