"""Items of an input: what they may be, what is added to them, and which messages they make."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.media_requests import URL, request_media

from paceline.chat import parse_messages
from paceline.errors import InvalidParams, RequestError, Unsupported
from paceline.server.responses_api.input_items import messages_of, parse_items

USER = {"role": "user", "content": "Hello."}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
THINKING = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}


def texts(message: dict[str, Any]) -> list[str]:
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def test_a_text_is_a_message_of_the_users() -> None:
    """With an id, a status and parts, as a list of items has them."""
    (item,) = parse_items("Hello.")
    assert item["id"].startswith("msg_")
    assert {key: value for key, value in item.items() if key != "id"} == {
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "Hello."}],
    }
    assert messages_of([item], (), request_media()) == [
        {"role": "user", "content": [{"type": "text", "text": "Hello."}]}
    ]


def test_ids_and_statuses_of_a_client_are_kept() -> None:
    """Others are made, each another one."""
    mine = {**SAID, "id": "msg_mine", "status": "incomplete"}
    first, second, third = parse_items([mine, USER, USER])
    assert (first["id"], first["status"]) == ("msg_mine", "incomplete")
    assert second["id"] != third["id"]


def test_parsed_items_parse_to_themselves() -> None:
    """So that what is stored or listed can be sent back."""
    items = parse_items([USER, THINKING, SAID, CALL, OUTPUT])
    assert parse_items(items) == items


def test_one_turn_of_the_assistants_is_one_message() -> None:
    """Thinking, text and calls; results are messages of their own."""
    second = {**CALL, "call_id": "c2"}
    messages = messages_of(
        parse_items([USER, THINKING, SAID, CALL, second, OUTPUT, {**OUTPUT, "call_id": "c2"}]), (), request_media()
    )
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    turn = messages[1]
    assert (turn["reasoning_content"], texts(turn)) == ("Hm.", ["Yes."])
    assert [call["id"] for call in turn["tool_calls"]] == ["c1", "c2"]
    assert [(message["tool_call_id"], texts(message)) for message in messages[2:]] == [
        ("c1", ["sunny"]),
        ("c2", ["sunny"]),
    ]


@pytest.mark.parametrize(
    ("items", "roles"),
    [
        ([USER, SAID, SAID], ["user", "assistant", "assistant"]),
        ([USER, THINKING, SAID, THINKING, SAID], ["user", "assistant", "assistant"]),
        ([USER, CALL, SAID], ["user", "assistant"]),
        ([USER, CALL, THINKING, SAID], ["user", "assistant", "assistant"]),
        ([USER, CALL, OUTPUT, SAID], ["user", "assistant", "tool", "assistant"]),
        ([USER, THINKING, THINKING, SAID], ["user", "assistant"]),
        ([USER, SAID, CALL], ["user", "assistant"]),
        ([{**USER, "role": "developer"}, USER], ["developer", "user"]),
    ],
)
def test_a_new_turn_begins_with_thinking_or_with_text_after_text(items: Any, roles: list[str]) -> None:
    """Text behind a call belongs to the message of the call."""
    messages = messages_of(parse_items(items), (), request_media())
    assert [message["role"] for message in messages] == roles
    assert parse_messages(messages)


def test_thinking_without_content_is_that_of_its_summary() -> None:
    """As items from OpenAI have it; what is encrypted cannot be read."""
    summary = {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "In short."}],
        "encrypted_content": "xx",
    }
    assert messages_of(parse_items([USER, summary, SAID]), (), request_media())[1]["reasoning_content"] == "In short."
    empty = {"type": "reasoning", "summary": []}
    assert not messages_of(parse_items([USER, empty, SAID]), (), request_media())[1].get("reasoning_content")


def test_outputs_and_refusals_may_be_parts() -> None:
    """Their texts are what the model reads."""
    output = {**OUTPUT, "output": [{"type": "input_text", "text": "sun"}, {"type": "input_text", "text": "ny"}]}
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    messages = messages_of(parse_items([USER, CALL, output, refusal]), (), request_media())
    assert [texts(message) for message in messages[2:]] == [["sun", "ny"], ["No."]]


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (None, "input must"),
        ({}, "input must"),
        ([], "input must"),
        ([5], "input[0] must"),
        ([{}], "input[0] must"),
        ([{"type": 5}], "input[0].type"),
        ([{"role": "tool", "content": "x"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": []}], "input[0].content"),
        ([{"role": "user", "content": [5]}], "input[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "output_text", "text": "x"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text", "text": "x", "y": 1}]}], "input[0].content[0].y"),
        ([{"role": "user", "content": "\ud800"}], "input[0].content"),
        ([{**USER, "tool_calls": []}], "input[0].tool_calls"),
        ([USER, OUTPUT], "input[1].call_id"),
        ([USER, OUTPUT, CALL], "input[1].call_id"),
        ([USER, CALL, {**OUTPUT, "call_id": "c3"}], "input[2].call_id"),
        ([USER, {**CALL, "call_id": ""}], "input[1].call_id"),
        ([USER, {**CALL, "name": None}], "input[1].name"),
        ([USER, {**CALL, "arguments": {"city": "Paris"}}], "input[1].arguments"),
        ([USER, CALL, {**OUTPUT, "output": 5}], "input[2].output"),
        ([USER, {**THINKING, "content": "Hm."}], "input[1].content"),
        ([USER, {**THINKING, "content": [{"type": "output_text", "text": "x"}]}], "input[1].content[0].type"),
        ([{**USER, "status": "done"}], "input[0].status"),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0].id"),
        ([USER] * 16385, "input must"),
    ],
)
def test_malformed_items_are_refused_by_their_place(value: Any, place: str) -> None:
    """The message begins with it."""
    with pytest.raises(InvalidParams) as caught:
        parse_items(value)
    assert str(caught.value).startswith(place)


@pytest.mark.parametrize(
    "item",
    [
        {"type": "computer_call_output", "call_id": "x"},
        {"type": "mcp_call", "id": "x"},
        {"role": "user", "content": [{"type": "input_image", "file_id": "x"}]},
        {"role": "user", "content": [{"type": "input_file", "file_id": "x"}]},
        {**CALL, "namespace": "crm"},
    ],
)
def test_what_is_known_and_not_supported_is_called_so(item: Any) -> None:
    """Not malformed."""
    with pytest.raises(Unsupported, match=r"^input\[0\]"):
        parse_items([item])


def test_empty_members_of_openais_services_are_no_matter() -> None:
    """As its package sends items back."""
    (item,) = parse_items([{**CALL, "caller": {"type": "direct"}, "namespace": None, "async": False}])
    assert "caller" not in item


def test_a_reference_stands_for_the_item_that_is_found() -> None:
    """With or without its type."""
    stored = parse_items([SAID])[0]
    named = [{"type": "item_reference", "id": stored["id"]}, {"id": stored["id"]}]
    found = parse_items([USER, *named], (), {stored["id"]: stored}.get)
    assert found[1] == stored
    assert {**found[2], "id": stored["id"]} == stored


def test_outputs_may_be_of_calls_before_the_input() -> None:
    """Those of the response that goes on, which is enough of an input by itself, too."""
    earlier = parse_items([USER, CALL])
    assert parse_items([OUTPUT], earlier)[0]["output"] == "sunny"
    assert parse_items([], earlier) == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "text", "id", "call_id", "output", "summary", "arguments", "name"]
            ),
            inner | st.sampled_from(["message", "user", "assistant", "function_call", "reasoning", "input_text"]),
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_json_is_parsed_or_refused(value: Any) -> None:
    """And what is parsed makes messages that a chat takes."""
    try:
        items = parse_items(value)
    except RequestError as refused:
        message = str(refused)
    else:
        assert parse_messages(messages_of(items, (), request_media()))
        return
    assert message.startswith("input")


def test_an_id_that_comes_again_is_replaced() -> None:
    """In the input, by a reference, and of an item before."""
    message = {"role": "user", "content": "x", "id": "mine"}
    earlier = parse_items([message])
    assert [item["id"] for item in earlier] == ["mine"]
    reference = {"type": "item_reference", "id": "stored"}
    stored = {**earlier[0], "id": "stored"}
    items = parse_items([message, message, reference, reference, {**message, "id": "other"}], earlier, lambda _: stored)
    ids = [item["id"] for item in items]
    assert len({"mine", *ids}) == 6
    assert (ids[2], ids[4], stored["id"]) == ("stored", "other", "stored")
    assert all(item["content"] == earlier[0]["content"] for item in items)


IMAGE = {"type": "input_image", "image_url": URL, "detail": "auto", "file_id": None}
FILE = {"type": "input_file", "file_data": URL, "filename": "cat.png"}


def test_images_are_kept_as_they_came_and_read_for_messages() -> None:
    """In messages, files and outputs of calls; their places are in the input, behind what came earlier."""
    items = parse_items([{"role": "user", "content": [{"type": "input_text", "text": "a"}, IMAGE, FILE]}])
    assert items[0]["content"][1] == {"type": "input_image", "image_url": URL, "detail": "auto"}
    (message,) = messages_of(items, (), request_media())
    assert [getattr(one, "name", "text") for one in message["content"]] == [
        "text",
        "input[0].content[1].image_url",
        "input[0].content[2].file_data",
    ]
    output = {"type": "function_call_output", "call_id": "c1", "output": [IMAGE]}
    answered = parse_items([CALL, {**output, "call_id": CALL["call_id"]}], items)
    messages = messages_of(answered, items, request_media())
    assert messages[0]["content"][1].name == "the earlier item 0.content[1].image_url"
    assert (messages[-1]["role"], messages[-1]["content"][0].name) == ("tool", "input[1].output[0].image_url")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "input_image"}, "must have image_url"),
        ({"type": "input_image", "image_url": 5}, "image_url must be"),
        ({"type": "input_image", "image_url": URL, "detail": "x"}, "detail must be"),
        ({"type": "input_image", "image_url": URL, "size": 1}, "size is not known"),
        ({"type": "input_file", "filename": "x"}, "must have file_data or file_url"),
        ({"type": "input_file", "file_data": URL, "file_url": URL}, "and one of them"),
    ],
)
def test_malformed_images_are_refused(part: Any, words: str) -> None:
    """By their place in the input."""
    with pytest.raises(InvalidParams, match=r"^input\[0\].content\[0\].*" + words):
        parse_items([{"role": "user", "content": [part]}])


def test_files_that_are_no_images_are_refused_by_name() -> None:
    """When the messages are made."""
    pdf = {"type": "input_file", "file_data": "data:application/pdf;base64,JVBERi0xLjQ=", "filename": "a.pdf"}
    items = parse_items([{"role": "user", "content": [pdf]}])
    with pytest.raises(InvalidParams, match=r"input\[0\].content\[0\].file_data: an image must be .*, not PDF"):
        messages_of(items, (), request_media())
