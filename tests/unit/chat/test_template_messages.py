"""Messages in the form that a chat template can read."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.chat import message_rewrites
from paceline.errors import InvalidParams, TemplateError

PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def fitted(messages: list[dict[str, Any]], source: str = "", **capabilities: bool) -> list[dict[str, Any]]:
    """Return messages for a template that takes texts and system messages, unless stated otherwise."""
    known = {
        "supports_string_content": True,
        "supports_typed_content": False,
        "supports_system_role": True,
        "supports_object_arguments": False,
    }
    found = message_rewrites.for_template(messages, known | capabilities, source)
    return message_rewrites.with_fitted_contents(found, known | capabilities)


@pytest.mark.parametrize(
    ("text", "typed", "of_text", "of_parts"),
    [
        (True, False, "x", "a\nb"),
        (False, False, "x", "a\nb"),
        (True, True, "x", PARTS),
        (False, True, [{"type": "text", "text": "x"}], PARTS),
    ],
)
def test_contents_are_what_the_template_takes(text: bool, typed: bool, of_text: object, of_parts: object) -> None:
    """Texts, parts, or both as they came."""
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": PARTS}]
    found = fitted(messages, supports_string_content=text, supports_typed_content=typed)
    assert [message["content"] for message in found] == [of_text, of_parts]


def test_arguments_are_objects_where_the_template_wants_them() -> None:
    """They come as text; a text that is no object becomes the only member of an object, and too deep texts are refused."""
    message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert fitted([message])[0]["tool_calls"] == [CALL]
    found = fitted([message], supports_object_arguments=True)
    assert found[0]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    broken = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}
    assert fitted([broken])[0]["tool_calls"][0]["function"]["arguments"] == "{x"
    for text, wrapped in {
        "{x": "{x",
        "NaN": "NaN",
        '{"a": ' * 100 + "1": '{"a": ' * 100 + "1",
        "5": 5,
        "[1]": [1],
        '"x"': "x",
    }.items():
        broken["tool_calls"][0]["function"]["arguments"] = text  # type: ignore[index]
        found = fitted([broken], supports_object_arguments=True)
        assert found[0]["tool_calls"][0]["function"]["arguments"] == {"arguments": wrapped}
    for arguments in ('{"a": 1e999}', '{"a": "\\ud800"}', '{"a":' + "[" * 100_000, "[" * 70 + "]" * 70):
        wrong = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
        }
        with pytest.raises(InvalidParams, match=r"messages\[0\]\.tool_calls\[0\]\.function\.arguments"):
            fitted([wrong], supports_object_arguments=True)
    assert message["tool_calls"] == [CALL]


def test_system_texts_in_front_are_one() -> None:
    """System and developer messages are joined, each with its parts; later messages keep their places, as texts."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": PARTS},
        {"role": "developer", "content": "c"},
        {"role": "user", "content": "u"},
        {"role": "developer", "content": PARTS},
    ]
    wanted = [("system", "a\nb\n\nc"), ("user", "u"), ("system", "a\nb")]
    for typed in (False, True):
        found = fitted(messages, supports_typed_content=typed)
        assert [(message["role"], message["content"]) for message in found] == wanted
    found = fitted(messages, supports_string_content=False, supports_typed_content=True)
    assert found[0]["content"] == [{"type": "text", "text": "a\nb\n\nc"}]
    assert fitted(messages, "<|channel|>")[2]["role"] == "developer"


def test_one_family_gets_contents_without_white_space_around_them() -> None:
    """Others get them as they are."""
    mark = "You have access to the following functions in JSONSchema format"
    messages = [{"role": "assistant", "content": " a ", "reasoning_content": "\nb\n"}]
    assert fitted(messages) == messages
    assert fitted(messages, mark) == [{"role": "assistant", "content": "a", "reasoning_content": "b"}]


def test_a_system_message_goes_into_the_next_one() -> None:
    """If the template has no place for it."""
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert fitted(messages, supports_system_role=False) == [{"role": "user", "content": "s\nu"}]
    assert fitted(messages) == messages
    with pytest.raises(TemplateError, match="no other message"):
        fitted(messages[:1], supports_system_role=False)
