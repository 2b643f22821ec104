"""A model's chat template: renders a conversation as the text of a prompt, and encodes that as token ids.

Templates are Jinja, run by llama.cpp within limits (steps, text put together, depth, seconds of CPU), so that no
conversation and no template hangs or ends the process. Text only: no tools, no reasoning, no parsing of what was generated.

A template is constant once made. Any thread may use it, and several at once: each rendering has variables and a stack of
its own. Keep it off the engine's thread and off an event loop, because rendering can take seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline import validation
from paceline.chat.conversation import Turn, parse_messages
from paceline.errors import InvalidParams, InvalidType, TemplateError, TextTooLong, Unsupported
from paceline.runtime import Model

MAX_BYTES = 32 << 20  # of a conversation, as JSON
MAX_KWARGS_BYTES = 1 << 20
MAX_KWARGS_DEPTH = 64
RESERVED = frozenset(("messages", "tools", "bos_token", "eos_token", "add_generation_prompt"))

_CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
NAMED = {"chatml": _CHATML}

# Ends of turns that models of two families also spell out as plain text, by what their templates have in common.
_SPELT_ENDS = {
    ("<role>ASSISTANT</role>", "<arg_key>"): "<|role_end|>",
    ("laguna_glm_thinking",): "</assistant>",
}


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A conversation as the text of a prompt.

    Attributes:
        text: The prompt. The template's own bos and eos are left out where the vocabulary adds them.
        stops: Texts that end a turn in this format, beside the end-of-generation tokens of the vocabulary.
        inputs: Ranges (start, end) of `text` in characters that came from the messages, ascending. In these
            `ChatTemplate.encode` recognises no control token.
    """

    text: str
    stops: tuple[str, ...] = ()
    inputs: tuple[tuple[int, int], ...] = ()


class ChatTemplate:
    """The chat template of one model: its own, or one that replaces it."""

    def __init__(self, model: Model, template: str | None = None) -> None:
        """Compile the template.

        Args:
            model: The model; one loaded with `vocab_only` will do.
            template: Jinja source in place of the model's own, or "chatml".

        Raises:
            Unsupported: The model has no template and none was given.
            TemplateError: The source does not parse, or has no Jinja in it.
        """
        self._tokenizer = model.tokenizer
        self._compiled = model.compile_chat_template(_source(model, template))
        source = self._compiled.source
        self._stops = tuple(end for marks, end in _SPELT_ENDS.items() if all(mark in source for mark in marks))

    @property
    def source(self) -> str:
        """The template's Jinja source."""
        return self._compiled.source

    @property
    def bos(self) -> str:
        """The text of the beginning-of-text token (`bos_token` in templates); empty if there is none."""
        return self._compiled.bos

    @property
    def eos(self) -> str:
        """The text of the end-of-text token (`eos_token` in templates); empty if there is none."""
        return self._compiled.eos

    @property
    def supports_system(self) -> bool:
        """Whether the template renders system messages; if not, their text is put before the next message's."""
        return self._compiled.supports_system

    def render(
        self,
        messages: object,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """Render a conversation as a prompt. The GIL is released meanwhile.

        Args:
            messages: The conversation, as `parse_messages` takes it.
            add_generation_prompt: Whether the prompt ends where the assistant's next message begins.
            continue_final_message: Whether the prompt ends within the last message, which the model continues;
                add_generation_prompt is ignored then.
            kwargs: More variables for the template, of the types that JSON has.

        Raises:
            InvalidParams: A message or a variable is malformed; the message names the place.
            Unsupported: A message has tools, reasoning, images or audio.
            TextTooLong: The conversation has more than 32 MiB.
            TemplateError: The template refuses the conversation, fails, or exceeds its limits of steps, time or memory.
        """
        generate = validation.boolean("add_generation_prompt", add_generation_prompt)
        continues = validation.boolean("continue_final_message", continue_final_message)
        return self.render_turn(Turn(parse_messages(messages), generate, continues), kwargs)

    def render_turn(self, turn: Turn, kwargs: Mapping[str, Any] | None = None) -> RenderedPrompt:
        """Render a turn that `next_turn` returned; otherwise as `render`."""
        messages, variables = list(turn.messages), _encoded_kwargs(kwargs)
        if not turn.continue_final_message:
            return self._rendered(messages, variables, turn.add_generation_prompt)
        beginning = _beginning(messages[-1])
        messages[-1] = {**messages[-1], "content": beginning}
        return _cut_behind(self._rendered(messages, variables, False), beginning)

    def encode(self, prompt: RenderedPrompt) -> list[int]:
        """Encode a prompt as token ids.

        Text of the messages stays text, also where it spells a control token.

        Raises:
            TextTooLong: The prompt is longer than the tokenizer can take in one piece.
        """
        return self._tokenizer.encode_prompt(prompt.text, prompt.inputs)

    def _rendered(self, messages: list[dict[str, Any]], variables: bytes, generate: bool) -> RenderedPrompt:
        return _joined(self._compiled.render(_encoded_messages(messages), variables, generate), self._stops)

    def __repr__(self) -> str:
        return f"<ChatTemplate, {len(self.source)} characters>"


def template_kwargs(variables: Mapping[str, Any], reasoning_effort: str | None) -> dict[str, Any]:
    """Add a request's `reasoning_effort` to the variables of a template, as llama-server does.

    "none" sets `enable_thinking` to False; "default" drops the effort from the variables, so that the template decides;
    any other text is passed on. None and "" change nothing.
    """
    if not reasoning_effort:
        return dict(variables)
    others = {name: value for name, value in variables.items() if name != "reasoning_effort"}
    if reasoning_effort == "none":
        return others | {"enable_thinking": False}
    return others if reasoning_effort == "default" else others | {"reasoning_effort": reasoning_effort}


def _source(model: Model, template: str | None) -> str:
    if template is None:
        own = model.chat_template() or model.chat_template("tool_use")
        if not own:
            raise Unsupported(
                'this model has no chat template; give one as chat_template= (Jinja source, or "chatml" if it was trained so)'
            )
        return own
    source = NAMED.get(validation.text("template", template), template)
    if "{{" not in source and "{%" not in source:
        names = ", ".join(map(repr, NAMED))
        raise TemplateError(f"template has no Jinja in it: {source[:80]!r}; give the source of a template, or {names}")
    return source


def _encoded_messages(messages: list[dict[str, Any]]) -> bytes:
    encoded = json.dumps(messages, ensure_ascii=False).encode()
    if len(encoded) > MAX_BYTES:
        raise TextTooLong(f"messages have {len(encoded)} bytes, and may have {MAX_BYTES}; leave some of it out")
    return encoded


def _encoded_kwargs(kwargs: object) -> bytes:
    if kwargs is None:
        return b"{}"
    if not isinstance(kwargs, Mapping):
        raise InvalidType(f"kwargs must be a mapping, not {type(kwargs).__name__}")
    taken = RESERVED.intersection(kwargs)
    if taken:
        raise InvalidParams(f"kwargs cannot set {min(taken)!r}, which the conversation itself decides")
    _check_json("kwargs", kwargs, MAX_KWARGS_DEPTH)
    encoded = json.dumps(kwargs, ensure_ascii=False).encode()
    if len(encoded) > MAX_KWARGS_BYTES:
        raise InvalidParams(f"kwargs has {len(encoded)} bytes as JSON, and may have {MAX_KWARGS_BYTES}")
    return encoded


def _check_json(place: str, value: object, depth: int) -> None:
    """Raise `InvalidParams` unless a variable is JSON, its integers have 64 bits, and it nests at most `depth` levels."""
    if depth == 0:
        raise InvalidParams(f"kwargs is nested more than {MAX_KWARGS_DEPTH} deep")
    if isinstance(value, Mapping):
        for key, content in value.items():
            _check_json(f"{place}.{validation.text(f'a name in {place}', key)[:80]}", content, depth - 1)
    elif isinstance(value, (list, tuple)):
        for index, content in enumerate(value):
            _check_json(f"{place}[{index}]", content, depth - 1)
    elif isinstance(value, str):
        validation.text(place, value)
    elif isinstance(value, int) and not isinstance(value, bool):
        validation.integer(place, value, -(2**63), 2**63 - 1)
    elif value is not None and not isinstance(value, bool):
        validation.number(place, value)


def _joined(parts: Sequence[tuple[str, bool]], stops: tuple[str, ...]) -> RenderedPrompt:
    inputs: list[tuple[int, int]] = []
    start = 0
    for text, is_input in parts:
        if is_input and text:
            inputs.append((start, start + len(text)))
        start += len(text)
    return RenderedPrompt("".join(text for text, _ in parts), stops, inputs=tuple(inputs))


def _beginning(message: dict[str, Any]) -> str:
    """Return the text of the last message, with which the prompt has to end."""
    content = message["content"]
    text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    if message["role"] != "assistant" or not text.strip():
        raise InvalidParams("continue_final_message needs a last message of the role assistant that has some text")
    return text


def _cut_behind(whole: RenderedPrompt, beginning: str) -> RenderedPrompt:
    """Cut the prompt at the end of its last input, which must be `beginning`; templates may have stripped it."""
    start, end = whole.inputs[-1] if whole.inputs else (0, 0)
    if whole.text[start:end].strip() != beginning.strip():
        raise TemplateError(
            "the chat template does not end with the text of the last message, so it cannot be continued"
        )
    return replace(whole, text=whole.text[:end])
