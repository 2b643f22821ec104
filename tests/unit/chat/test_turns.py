"""Whether a prompt continues the last message of a conversation or begins a new one."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.chat import Turn, next_turn
from paceline.errors import InvalidParams

USER = {"role": "user", "content": "Hi"}
BEGUN = {"role": "assistant", "content": "Hello"}


@pytest.mark.parametrize(
    ("last", "asked", "generates", "continues"),
    [
        (USER, {}, True, False),
        (USER, {"prefills": True}, True, False),
        (USER, {"generates": False}, False, False),
        (BEGUN, {}, True, False),
        (BEGUN, {"continues": False, "prefills": True}, True, False),
        (BEGUN, {"continues": True}, False, True),
        (BEGUN, {"prefills": True}, False, True),
        (BEGUN, {"prefills": True, "generates": True}, False, True),
        (USER, {"continues": True}, False, True),
    ],
)
def test_a_last_message_is_continued_where_that_is_asked_for(
    last: Any, asked: Any, generates: bool, continues: bool
) -> None:
    """The request decides, or for an assistant's message `prefills`; otherwise a new message begins."""
    messages = [USER, last]
    assert next_turn(messages, **asked) == Turn(messages, generates, continues)


def test_a_prefix_is_continued() -> None:
    """An assistant's last message with `prefix` is, whatever the server's default; the request may say otherwise."""
    prefix = {**BEGUN, "prefix": True}
    assert next_turn([USER, prefix]) == Turn([USER, BEGUN], False, True)
    assert next_turn([USER, prefix], continues=False) == Turn([USER, BEGUN])
    assert next_turn([USER, {**BEGUN, "prefix": False}]) == Turn([USER, BEGUN])
    assert next_turn([USER, prefix, USER]) == Turn([USER, BEGUN, USER])
    assert next_turn([USER, {**BEGUN, "content": "", "prefix": True}]) == Turn([USER])
    thought = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert next_turn([USER, {**thought, "prefix": True}]) == Turn([USER, thought], False, True)
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert next_turn([USER, {**called, "prefix": True}]).messages == [USER, called]  # which no chat format continues
    with pytest.raises(InvalidParams, match=r"messages\[1\]\.prefix must be True or False, not 1"):
        next_turn([USER, {**BEGUN, "prefix": 1}])


def test_ignored_members_are_warnings_of_the_turn() -> None:
    """With and without attachments in the conversation."""
    wanted = ("messages[0].colour has no effect here and was ignored",)
    assert next_turn([{**USER, "colour": 1}]).warnings == wanted
    assert next_turn([{**USER, "colour": 1}], read_part=lambda _place, _part: None).warnings == wanted


def test_an_empty_beginning_is_none() -> None:
    """A new message begins after the last message."""
    for nothing in ("", [{"type": "text", "text": ""}]):
        assert next_turn([USER, {**BEGUN, "content": nothing}], prefills=True) == Turn([USER])


@pytest.mark.parametrize("content", ["", "Hello"])
def test_a_message_with_calls_is_not_continued(content: str) -> None:
    """A new message begins after it, and the calls stay."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = {**BEGUN, "content": content, "tool_calls": [call]}
    assert next_turn([USER, called], prefills=True) == Turn([USER, called])


def test_what_excludes_each_other_is_refused() -> None:
    """Both ways to end a prompt exclude each other, and only one message can be continued."""
    with pytest.raises(InvalidParams, match="exclude each other"):
        next_turn([BEGUN], continues=True, generates=True)
    with pytest.raises(InvalidParams, match="two of the assistant's"):
        next_turn([USER, BEGUN, BEGUN], prefills=True)
    assert next_turn([USER, BEGUN, BEGUN], continues=True).continue_final_message


def test_a_malformed_conversation_is_refused_and_a_good_one_is_parsed() -> None:
    """A turn has plain messages: the result of `parse_messages`."""
    with pytest.raises(InvalidParams, match=r"messages\[0\]\.role is missing"):
        next_turn([{"content": "x"}])
    assert next_turn([{**USER, "tool_calls": []}]) == Turn([USER])
