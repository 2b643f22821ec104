"""From a conversation to a prompt: messages, turns and the model's chat template, for the library and the server alike.

messages: what a conversation may consist of (`parse_messages`). turns: whether the prompt continues the last message
(`next_turn`). template: the model's chat template (`ChatTemplate`). What reads tool calls and reasoning out of generated
text belongs here as well. Rendering takes time: keep it off the engine's thread and off an event loop.
"""

from paceline.chat.messages import parse_messages
from paceline.chat.template import ChatTemplate, RenderedPrompt, template_kwargs
from paceline.chat.turns import Turn, next_turn

__all__ = ["ChatTemplate", "RenderedPrompt", "Turn", "next_turn", "parse_messages", "template_kwargs"]
