"""From a conversation to a prompt: messages, turns and the model's chat template, for the library and the server alike.

conversation: what it may consist of (`parse_messages`), and whether the prompt continues its last message (`next_turn`).
template: the model's chat template (`ChatTemplate`). Parsers of tool calls and reasoning in generated text belong here as
well. Rendering takes time: keep it off the engine's thread and off an event loop.
"""

from paceline.chat.conversation import Turn, next_turn, parse_messages
from paceline.chat.template import ChatTemplate, RenderedPrompt, template_kwargs

__all__ = ["ChatTemplate", "RenderedPrompt", "Turn", "next_turn", "parse_messages", "template_kwargs"]
