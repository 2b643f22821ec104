"""A model's chat template: a conversation becomes the text of a prompt, and that the ids of its tokens.

Templates are Jinja, run by llama.cpp. Text only: tools, reasoning and the parsing of answers are not here. Knows nothing of
requests or of HTTP. A format is constant once made; any thread may use it but the engine's and an event loop's, because a
template can take a while.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.runtime.model import Model


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """What a template made of a conversation.

    text: the prompt. stops: texts that end an answer in this format, beside the end-of-generation tokens of the vocabulary.
    add_special, parse_special: how the text has to be encoded (`Tokenizer.encode`): the template's own bos and eos are not in
    the text where the vocabulary adds them. inputs: the parts of the text that came from the messages, as pairs of positions
    (start, end) in characters, ascending; in these `ChatFormat.encode` takes nothing for a control token.
    """

    text: str
    stops: tuple[str, ...] = ()
    add_special: bool = True
    parse_special: bool = True
    inputs: tuple[tuple[int, int], ...] = ()


class ChatFormat:
    """How one model is talked to: its chat template, or one that is handed in."""

    def __init__(self, model: Model, template: str | None = None) -> None:
        """The format of a model, which may be one of `vocab_only`.

        template: Jinja source in place of the model's own. Raises `Unsupported` where there is neither, `TemplateError`
        where it does not parse.
        """
        raise NotImplementedError

    @property
    def source(self) -> str:
        """The text of the template."""
        raise NotImplementedError

    @property
    def bos(self) -> str:
        """The text of the token at the beginning, which templates know as `bos_token`; empty where there is none."""
        raise NotImplementedError

    @property
    def eos(self) -> str:
        """The text of the token at the end, which templates know as `eos_token`; empty where there is none."""
        raise NotImplementedError

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """The prompt of a conversation.

        messages: each has a `role` and a `content`, a text or a list of {"type": "text", "text": ...}; what
        `paceline.chat.messages.checked_messages` answers. add_generation_prompt: whether the prompt ends where the
        assistant's answer begins. kwargs: further variables for the template, as JSON knows them.

        Raises `InvalidParams` for messages of another shape, `TemplateError` where the template refuses the conversation,
        fails, or takes more steps, time or memory than it may. The GIL is released meanwhile.
        """
        raise NotImplementedError

    def encode(self, prompt: RenderedPrompt) -> list[int]:
        """The token ids of a prompt. Text of the messages stays text, also where it spells a control token."""
        raise NotImplementedError
