"""A model's chat template: a conversation becomes the text of a prompt, and that the ids of its tokens.

Templates are Jinja, run by llama.cpp within limits of ours (steps, text put together, depth, seconds of CPU), so that no
conversation and no template hangs or ends the process. Text only: tools, reasoning and the parsing of answers are not here.
Knows nothing of requests or of HTTP.

A format is constant once made. Any thread may use it, and several at once: each rendering has variables and a stack of its
own. Keep it off the engine's thread and off an event loop, because a template can take a while.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline import _native, validation
from paceline.errors import InvalidParams, InvalidType, TemplateError, TextTooLong, Unsupported
from paceline.runtime.model import Model

MAX_MESSAGES = 16_384
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

        template: Jinja source in place of the model's own, or "chatml". Raises `Unsupported` where there is neither,
        `TemplateError` where it does not parse.
        """
        self._tokenizer = model.tokenizer
        self._template = _native.ChatTemplate(model.native, _source(model, template))
        source = self._template.source
        self._stops = tuple(end for marks, end in _SPELT_ENDS.items() if all(mark in source for mark in marks))

    @property
    def source(self) -> str:
        """The text of the template."""
        return self._template.source

    @property
    def bos(self) -> str:
        """The text of the token at the beginning, which templates know as `bos_token`; empty where there is none."""
        return self._template.bos

    @property
    def eos(self) -> str:
        """The text of the token at the end, which templates know as `eos_token`; empty where there is none."""
        return self._template.eos

    @property
    def knows_system(self) -> bool:
        """Whether the template has a place for a system message; where not, it goes in front of the next message's text."""
        return self._template.knows_system

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """The prompt of a conversation.

        messages: each has a `role` and a `content`, a text or a list of {"type": "text", "text": ...}, and may have a
        `name`; what `paceline.chat.messages.checked_messages` answers. add_generation_prompt: whether the prompt ends where
        the assistant's answer begins. continue_final_message: the last message is the beginning of an answer, and the
        prompt ends where its text does; add_generation_prompt does not matter then. kwargs: further variables for the
        template, as JSON knows them.

        Raises `InvalidParams` for messages of another shape, `TextTooLong` for more than 32 MiB of them, `TemplateError`
        where the template refuses the conversation, fails, or takes more steps, time or memory than it may. The GIL is
        released meanwhile.
        """
        plain = _plain_messages(messages)
        variables = _encoded_kwargs(kwargs)
        generate = validation.boolean("add_generation_prompt", add_generation_prompt)
        if validation.boolean("continue_final_message", continue_final_message):
            beginning = plain[-1]["content"] = _beginning(plain[-1])
            return _cut_behind(self._rendered(plain, variables, False), beginning)
        return self._rendered(plain, variables, generate)

    def encode(self, prompt: RenderedPrompt) -> list[int]:
        """The token ids of a prompt. Text of the messages stays text, also where it spells a control token.

        Raises as `Tokenizer.encode`.
        """
        return self._tokenizer.encode_prompt(prompt.text, prompt.inputs)

    def _rendered(self, messages: list[dict[str, Any]], variables: bytes, generate: bool) -> RenderedPrompt:
        return _joined(self._template.render(_encoded_messages(messages), variables, generate), self._stops)

    def __repr__(self) -> str:
        return f"<ChatFormat, {len(self.source)} characters>"


def _source(model: Model, template: str | None) -> str:
    if template is None:
        own = model.native.chat_template(None) or model.native.chat_template("tool_use")
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


def _plain_messages(messages: object) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InvalidType(f"messages must be a list of mappings, not {type(messages).__name__}")
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidParams(f"messages must have 1 to {MAX_MESSAGES} messages, not {len(messages)}")
    return [_plain_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _encoded_messages(messages: list[dict[str, Any]]) -> bytes:
    encoded = json.dumps(messages, ensure_ascii=False).encode()
    if len(encoded) > MAX_BYTES:
        raise TextTooLong(f"messages have {len(encoded)} bytes, and may have {MAX_BYTES}; leave some of it out")
    return encoded


def _plain_message(place: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidType(f"{place} must be a mapping, not {type(message).__name__}")
    unknown = set(message) - {"role", "content", "name"}
    if unknown:
        raise InvalidParams(f"{place} has {min(map(repr, unknown))}; a message has role, content and name")
    role = validation.text(f"{place}.role", message.get("role"))
    if not role:
        raise InvalidParams(f"{place}.role must not be empty")
    plain = {"role": role, "content": _plain_content(f"{place}.content", message.get("content"))}
    if message.get("name") is not None:
        plain["name"] = validation.text(f"{place}.name", message["name"])
    return plain


def _plain_content(place: str, content: object) -> str | list[dict[str, str]]:
    if content is None:
        return ""
    if not isinstance(content, list):
        return validation.text(place, content)
    return [_plain_part(f"{place}[{index}]", part) for index, part in enumerate(content)]


def _plain_part(place: str, part: object) -> dict[str, str]:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        raise InvalidParams(f'{place} must be a part like {{"type": "text", "text": "..."}}')
    return {"type": "text", "text": validation.text(f"{place}.text", part.get("text"))}


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
    """What a template may be told: what JSON knows, numbers of 64 bits, and no more than `depth` levels of it."""
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
    """The text of the last message, which a prompt shall end with."""
    content = message["content"]
    text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    if message["role"] != "assistant" or not text.strip():
        raise InvalidParams(
            "continue_final_message wants the last message to be an assistant's, with some text as its content"
        )
    return text


def _cut_behind(whole: RenderedPrompt, beginning: str) -> RenderedPrompt:
    """The prompt up to the end of its last input, which must be this text; templates may have stripped it."""
    start, end = whole.inputs[-1] if whole.inputs else (0, 0)
    if whole.text[start:end].strip() != beginning.strip():
        raise TemplateError(
            "the chat template does not end with the text of the last message, so it cannot be continued"
        )
    return replace(whole, text=whole.text[:end])
