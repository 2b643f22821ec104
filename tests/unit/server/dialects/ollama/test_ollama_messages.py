"""From Ollama's messages to a conversation."""

from __future__ import annotations

from typing import Any

import pytest
from tests.media_requests import DATA, request_media

from paceline.chat import next_turn, parse_messages
from paceline.chat.conversation import MAX_MESSAGES, MAX_TOOL_CALLS
from paceline.errors import InvalidParams
from paceline.server.dialects.ollama.ollama_requests import ollama_conversation

USER = {"role": "user", "content": "Hi"}


def call(name: str, call_id: str | None = None, **arguments: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}} | ({"id": call_id} if call_id else {})


def called(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls), **more}


def result(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **more}


def converted(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    conversation = ollama_conversation(list(messages), request_media())
    parse_messages(conversation)
    return conversation


def test_plain_messages_stay() -> None:
    """With their thinking; null is nothing."""
    system = {"role": "system", "content": "Be kind."}
    thought = {"role": "assistant", "content": "Yes.", "thinking": "Hm.", "images": None, "tool_calls": []}
    assert converted(system, USER, thought) == [
        system,
        USER,
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."},
    ]


def test_results_belong_to_calls_by_id_by_name_or_in_order() -> None:
    """Ollama's calls may have no ids; templates need them."""
    conversation = converted(
        USER,
        called(call("a", x=1), call("b"), call("b", "mine"), call("a")),
        result("1", tool_name="b"),
        result("2"),
        result("3", tool_call_id="mine"),
        result("4", tool_name="a"),
    )
    ids = [made["id"] for made in conversation[1]["tool_calls"]]
    assert len(set(ids)) == 4
    assert ids[2] == "mine"
    assert [item["tool_call_id"] for item in conversation[2:]] == [ids[1], ids[0], ids[2], ids[3]]
    assert conversation[1]["tool_calls"][0]["function"] == {"name": "a", "arguments": {"x": 1}}
    assert conversation[2]["name"] == "b"


def test_histories_are_taken_as_clients_cut_them() -> None:
    """Results without calls, calls without results, arguments that are text, null and missing contents."""
    talk = [
        {"role": "user"},
        {**USER, "content": None},
        result("1"),
        result("2", tool_call_id="gone", tool_name="b"),
        called({"function": {"name": "a", "arguments": '{"x'}}),
        result("3", tool_name="b"),
        result("4"),
        called(call("c")),
    ]
    found = parse_messages(ollama_conversation(talk, request_media()))
    assert [message["content"] for message in found[:2]] == ["", ""]
    results = [message.get("tool_call_id") for message in found if message["role"] == "tool"]
    assert results == [None, "gone", None, found[4]["tool_calls"][0]["id"]]
    assert found[4]["tool_calls"][0]["function"] == {"name": "a", "arguments": '{"x'}
    assert found[7]["tool_calls"][0]["function"] == {"name": "c", "arguments": "{}"}


def test_unknown_members_are_reported() -> None:
    """Of messages and calls, by their places in the body; `prefix` has its usual meaning."""
    talk = [{**USER, "size": 3}, called({**call("a"), "colour": 1}), {**USER, "size": 4, "cache_control": {}}]
    assert next_turn(ollama_conversation(talk, request_media())).warnings == (
        "messages[0].size has no effect here and was ignored",
        "messages[1].tool_calls[0].colour has no effect here and was ignored",
    )
    begun = {"role": "assistant", "content": "x", "prefix": True}
    assert next_turn(ollama_conversation([USER, begun], request_media())).continue_final_message


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ({}, "messages must be a list"),
        (["x"], r"messages\[0\] must be an object"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content"),
        ([{**USER, "tool_calls": [call("a")]}], r"messages\[0\].tool_calls is for messages of the role assistant"),
        ([called({"name": "a"})], r"messages\[0\].tool_calls\[0\] must be an object with function"),
        ([called({"function": {"arguments": {}}})], r"messages\[0\].tool_calls\[0\].function.name"),
        ([called({"function": {"name": "a", "arguments": [1]}})], r"\[0\].function.arguments must be an object"),
    ],
)
def test_a_malformed_message_is_refused_with_its_place(messages: Any, place: str) -> None:
    """In the terms of the body that was sent."""
    with pytest.raises(InvalidParams, match=place):
        ollama_conversation(messages, request_media())


def test_images_stand_before_the_text() -> None:
    """In order; errors are of their places."""
    (message,) = ollama_conversation([{**USER, "images": [DATA, DATA]}], request_media())
    assert [getattr(part, "name", part) for part in message["content"]] == [
        "messages[0].images[0]",
        "messages[0].images[1]",
        {"type": "text", "text": USER["content"]},
    ]
    (alone,) = ollama_conversation([{**USER, "content": "", "images": [DATA]}], request_media())
    assert len(alone["content"]) == 1
    with pytest.raises(InvalidParams, match=r"messages\[0\].images\[0\]: an image must be a PNG"):
        ollama_conversation([{**USER, "images": ["aGk="]}], request_media())
    with pytest.raises(InvalidParams, match=r"messages\[0\].images must be a list"):
        ollama_conversation([{**USER, "images": DATA}], request_media())


def test_results_are_matched_to_many_calls_without_comparing_each() -> None:
    """Work grows with the number of calls, not with its square."""
    comparisons = 0

    class Name(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            nonlocal comparisons
            comparisons += 1
            return str(self) == other

        __hash__ = str.__hash__

    number = 100
    calls = [call(Name(f"tool {index}")) for index in range(number)]
    results = [result("x", tool_name=Name(f"tool {index}")) for index in reversed(range(number))]
    conversation = ollama_conversation([USER, called(*calls), *results], request_media())
    ids = [call["id"] for call in conversation[1]["tool_calls"]]
    assert [message["tool_call_id"] for message in conversation[2:]] == ids[::-1]
    assert comparisons <= 10 * number


def test_too_many_messages_or_calls_are_refused_before_any_is_read() -> None:
    """With the limits of every chat."""
    with pytest.raises(InvalidParams, match="messages must have at most"):
        ollama_conversation([None] * (MAX_MESSAGES + 1), request_media())
    with pytest.raises(InvalidParams, match=r"messages\[0\].tool_calls must be at most"):
        ollama_conversation([called(*[None] * (MAX_TOOL_CALLS + 1))], request_media())  # type: ignore[list-item]
