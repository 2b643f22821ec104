"""Chat documents as text segments, in exactly the form that chat_template.jinja renders."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

TOOLS_BEFORE = (
    "# Tools\n\nYou can call the functions below. Each line is the JSON description of one function:\n<tools>\n"
)
TOOLS_AFTER = (
    "\n</tools>\n\nTo call a function, write its name and its arguments as JSON between tags:\n"
    '<tool_call>\n{"name": "function-name", "arguments": {"argument": "value"}}\n</tool_call>'
)


@dataclass(frozen=True)
class Segment:
    """A piece of text; `learn` says whether its tokens count in the loss."""

    text: str
    learn: bool


@dataclass(frozen=True)
class Call:
    """One tool call of the assistant."""

    name: str
    arguments: Json

    def text(self) -> str:
        """Return the call as the model writes it."""
        body = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"


@dataclass(frozen=True)
class Message:
    """One turn; `think` is None outside the thinking mode."""

    role: str
    content: str = ""
    think: str | None = None
    calls: tuple[Call, ...] = ()

    def body(self) -> str:
        """Return the assistant's text after its thoughts."""
        calls = "\n".join(c.text() for c in self.calls)
        return "\n".join(part for part in (self.content, calls) if part)


@dataclass
class Chat:
    """A conversation with its tools."""

    messages: list[Message]
    tools: list[Json] = field(default_factory=list)


def _system(chat: Chat) -> str:
    first = chat.messages[0]
    parts = [first.content] if first.role == "system" and first.content else []
    if chat.tools:
        lines = "\n".join(json.dumps(t, ensure_ascii=False) for t in chat.tools)
        parts.append(TOOLS_BEFORE + lines + TOOLS_AFTER)
    text = "\n\n".join(parts)
    return f"<|im_start|>system\n{text}<|im_end|>\n" if parts else ""


def _assistant(message: Message) -> list[Segment]:
    head = "<|im_start|>assistant\n"
    if message.think is None:
        opening = [Segment(head + "<think>\n\n</think>\n\n", False)]
    else:
        opening = [Segment(head, False), Segment(f"<think>\n{message.think}\n</think>\n\n", True)]
    return [*opening, Segment(message.body() + "<|im_end|>", True), Segment("\n", False)]


def segments(chat: Chat) -> list[Segment]:
    """Return the whole conversation; only the assistant's text is learned."""
    out = [Segment(_system(chat), False)]
    previous = ""
    for message in chat.messages:
        if message.role == "assistant":
            out += _assistant(message)
        elif message.role == "tool":
            start = "" if previous == "tool" else "<|im_start|>user"
            out[-1] = out[-1] if start else Segment(out[-1].text.removesuffix("<|im_end|>\n"), False)
            body = f"{start}\n<tool_response>\n{message.content}\n</tool_response><|im_end|>\n"
            out.append(Segment(body, False))
        elif message.role == "user":
            out.append(Segment(f"<|im_start|>user\n{message.content}<|im_end|>\n", False))
        previous = message.role
    return [s for s in out if s.text]


def generation_prompt(thinking: bool) -> str:
    """Return the generation prompt of the template."""
    return "<|im_start|>assistant\n" + ("" if thinking else "<think>\n\n</think>\n\n")


def prompt(chat: Chat, thinking: bool = False) -> str:
    """Return the conversation so far plus the opening of the answer."""
    return "".join(s.text for s in segments(chat)) + generation_prompt(thinking)
