"""Generated text in the formats of known models, read apart into content, thinking and tool calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.native.chat_templates import CHATML, demo
from tests.native.test_chat_formats import ASKED, SCHEMA, TOOLS

from paceline.chat import ChatFormat, ChatOptions, MessageParser, ParsedMessage, ToolCall
from paceline.errors import ChatParseError

Reader = Callable[..., MessageParser]


@pytest.fixture
def reader(llama_cpp_source: Path) -> Reader:
    """Return a function from a template's name to the parser of a prompt in it."""

    def make(name: str, **options: object) -> MessageParser:
        source = (llama_cpp_source / "models" / "templates" / f"{name}.jinja").read_text()
        chosen = ChatOptions(**{"tools": TOOLS, **options})  # type: ignore[arg-type]
        return MessageParser(ChatFormat(demo(), source).render(ASKED, options=chosen))

    return make


def without_space(message: ParsedMessage) -> ParsedMessage:
    """Return the message with arguments in one spelling: some parsers give them as the model wrote them."""
    calls = tuple(ToolCall(call.name, call.arguments.replace('": "', '":"')) for call in message.tool_calls)
    return ParsedMessage(message.content.strip(), message.reasoning_content.strip(), calls)


JSON_CALL = '{"name": "weather", "arguments": {"city": "Köln"}'
TEXTS = {
    "Qwen-Qwen3-0.6B": f"<think>\nHm.\n</think>\n\nWait.\n<tool_call>\n{JSON_CALL}}}\n</tool_call>",
    "Qwen3-Coder": (
        "Wait.\n<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call>"
    ),
    "openai-gpt-oss-120b": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Köln"}'
    ),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": f"<tool_call>\n{JSON_CALL}}}\n</tool_call>",
    "mistralai-Mistral-Nemo-Instruct-2407": f'[TOOL_CALLS][{JSON_CALL}, "id": "123456789"}}]',
}


@pytest.mark.parametrize("name", TEXTS)
def test_tool_calls_of_known_formats_are_read(reader: Reader, name: str) -> None:
    """Tags, tagged arguments, channels, lists: the model's text becomes one record."""
    text = TEXTS[name]
    parsed = without_space(reader(name).parse(text))
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("weather", '{"city":"Köln"}')]
    assert parsed.reasoning_content == ("Hm." if "Hm." in text else "")
    assert parsed.content == ("Wait." if "Wait." in text else "")


def test_thinking_is_split_from_content_or_left_in_it(reader: Reader) -> None:
    """As `reasoning_format` says."""
    text = "<think>\nHm.\n</think>\n\nIt rains."
    apart = reader("Qwen-Qwen3-0.6B", tools=None).parse(text)
    assert (apart.reasoning_content.strip(), apart.content.strip()) == ("Hm.", "It rains.")
    inside = reader("Qwen-Qwen3-0.6B", tools=None, reasoning_format="none").parse(text)
    assert (inside.reasoning_content, inside.content) == ("", text)


def test_what_grows_is_read_from_any_beginning(reader: Reader) -> None:
    """Contents and arguments only grow, and the whole equals parsing at once."""
    parser = reader("Qwen-Qwen3-0.6B")
    text = (
        '<think>\nHm.\n</think>\n\nWait.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    )
    before = ParsedMessage()
    for end in range(len(text) + 1):
        now = parser.parse(text[:end], is_partial=True)
        assert now.reasoning_content.startswith(before.reasoning_content), text[:end]
        assert now.content.startswith(before.content), text[:end]
        assert len(now.tool_calls) >= len(before.tool_calls)
        for old, new in zip(before.tool_calls, now.tool_calls, strict=False):
            assert new.name.startswith(old.name) and new.arguments.startswith(old.arguments)
        before = now
    assert without_space(before) == without_space(parser.parse(text))


def test_text_that_is_not_of_the_format_is_an_error(reader: Reader) -> None:
    """A call of a tool that was not offered, no JSON for a schema; the parser reads the next text."""
    parser = reader("Qwen-Qwen3-0.6B")
    with pytest.raises(ChatParseError, match="does not match the expected peg-native format"):
        parser.parse('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>')
    assert parser.parse('<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>').tool_calls[0].name == "clock"
    with pytest.raises(ChatParseError):
        reader("Qwen-Qwen3-0.6B", tools=None, json_schema=SCHEMA).parse("no JSON")


def test_a_format_without_thinking_and_tools_is_content() -> None:
    """Every character of it, from the first one."""
    parser = MessageParser(ChatFormat(demo(), CHATML).render(ASKED))
    for text in ("", " Grüße \n", "<think>x</think>", '{"name": "f"}', "<tool_call>"):
        assert parser.parse(text) == ParsedMessage(text)


def test_arguments_that_nest_deeply_exhaust_no_stack(reader: Reader) -> None:
    """A model that writes nothing but brackets ends no process."""
    parser = reader("Qwen-Qwen3-0.6B")
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": '
    (call,) = parser.parse(text + "[" * 4_900, is_partial=True).tool_calls
    assert call.arguments.endswith("[" * 4_900)
    with pytest.raises(ChatParseError, match="nests brackets more than 5000 deep"):
        parser.parse(text + "[" * 1_000_000)
