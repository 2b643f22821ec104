"""The eight requests that `paceline demo` runs where it is given no others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

Record = Mapping[str, Any]

# What the demo model was trained on begins an answer after a thought, which may be empty.
_ANSWER = "<|im_start|>assistant\n<think>\n\n</think>\n\n"

_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The name of the city"}},
            "required": ["city"],
        },
    },
}
_TOOLS = (
    "# Tools\n\nYou can call the functions below. Each line is the JSON description of one function:\n"
    f"<tools>\n{json.dumps(_WEATHER)}\n</tools>\n\n"
    "To call a function, write its name and its arguments as JSON between tags:\n"
    '<tool_call>\n{"name": "function-name", "arguments": {"argument": "value"}}\n</tool_call>'
)


def _chat(question: str, system: str = "") -> str:
    """A conversation's first turn in ChatML, as the demo model knows it."""
    before = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return f"{before}<|im_start|>user\n{question}<|im_end|>\n{_ANSWER}"


def _ask(question: str, system: str = "", **options: Any) -> Record:
    return {"prompt": _chat(question, system), "parse_special": True, "temperature": 0, **options}


FOR_DEMO_MODEL: Final[tuple[Record, ...]] = (
    {"prompt": "Once upon a time", "max_tokens": 220, "echo": True},
    _ask("Tell me a story about a fox.", temperature=0.7, max_tokens=220),
    _ask("Where does Wilma live?", max_tokens=60),
    _ask("What is the job of Gilda?", "Talk like a pirate.", max_tokens=60),
    _ask("What is the weather like in Oslo?", _TOOLS, max_tokens=80),
    {"prompt": "A little bear", "n": 2, "max_tokens": 160, "echo": True},
    _ask("Describe Tessa.", max_tokens=120),
    {"prompt": "One cold morning, an old owl", "max_tokens": 200, "echo": True},
)
"""Stories, a question about the model's small world, a system prompt, a tool call, two answers to one prompt."""

FOR_ANY_MODEL: Final[tuple[Record, ...]] = (
    {"prompt": "Once upon a time", "max_tokens": 200, "echo": True},
    {"prompt": "The three most important things about a garden are", "max_tokens": 120, "echo": True},
    {"prompt": "Question: What is the capital of France?\nAnswer:", "max_tokens": 24, "stop": ["\n"], "temperature": 0},
    {"prompt": "def fibonacci(n: int) -> int:\n", "max_tokens": 120, "temperature": 0.2, "echo": True},
    {"prompt": "Dear neighbour,\n\nI am writing to you because", "max_tokens": 160, "echo": True},
    {"prompt": "A haiku about rain:\n", "max_tokens": 60, "n": 2},
    {"prompt": "Monday, Tuesday, Wednesday,", "max_tokens": 30, "temperature": 0, "echo": True},
    {"prompt": "It was a dark and stormy night, and", "max_tokens": 200, "echo": True},
)
"""Texts to go on from, for models whose manner of conversation is not known here."""
