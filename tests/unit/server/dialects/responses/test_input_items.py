"""Items of an input: their kinds, added members, and the messages that they make."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.media_requests import URL, request_media

from paceline.chat import parse_messages
from paceline.errors import InvalidParams, RequestError, Unsupported
from paceline.server.dialects.responses.input_items import messages_of, parse_items
from paceline.server.dialects.responses.response_tools import InputWarnings

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
    """So that a stored or listed item can be sent back."""
    others = [
        {"type": "tool_search_output", "call_id": None, "tools": []},
        {"type": "shell_call_output", "output": "x"},
    ]
    items = parse_items([USER, THINKING, SAID, CALL, OUTPUT, *others])
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
    """As items from OpenAI have it; encrypted content cannot be read."""
    summary = {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "In short."}],
        "encrypted_content": "xx",
    }
    assert messages_of(parse_items([USER, summary, SAID]), (), request_media())[1]["reasoning_content"] == "In short."
    other = {"type": "reasoning", "summary": None, "content": [{"type": "text", "text": "At length."}]}
    assert messages_of(parse_items([USER, other, SAID]), (), request_media())[1]["reasoning_content"] == "At length."
    empty = {"type": "reasoning", "summary": []}
    assert not messages_of(parse_items([USER, empty, SAID]), (), request_media())[1].get("reasoning_content")


def test_outputs_and_refusals_may_be_parts() -> None:
    """The model reads their texts."""
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
        ([{"role": "user", "content": 5}], "input[0].content"),
        ([{"role": "user", "content": [5]}], "input[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "video", "url": "x"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": "\ud800"}], "input[0].content"),
        ([USER, {**OUTPUT, "call_id": 5}], "input[1].call_id"),
        ([USER, {**CALL, "namespace": 5}], "input[1].namespace"),
        ([{"type": "custom_tool_call", "call_id": "c1", "name": "x", "input": 5}], "input[0].input"),
        ([{"type": "local_shell_call", "call_id": 5}], "input[0].call_id"),
        ([{"type": "local_shell_call_output", "call_id": [], "output": "x"}], "input[0].call_id"),
        ([{"type": "mcp_call", "id": "x", "arguments": [[[[]]] * 2], "name": "\ud800"}], "input[0].name"),
        ([USER, {**CALL, "call_id": ""}], "input[1].call_id"),
        ([USER, {**CALL, "name": None}], "input[1].name"),
        ([USER, {**CALL, "arguments": {"city": "Paris"}}], "input[1].arguments"),
        ([USER, CALL, {**OUTPUT, "output": 5}], "input[2].output"),
        ([USER, {**THINKING, "content": "Hm."}], "input[1].content"),
        ([USER, {**THINKING, "content": [{"type": "output_text"}]}], "input[1].content[0].text"),
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
        {"role": "user", "content": [{"type": "input_image", "file_id": "x"}]},
        {"role": "user", "content": [{"type": "input_file", "file_id": "x"}]},
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
    """The items of the continued response, which is enough of an input by itself, too."""
    earlier = parse_items([USER, CALL])
    assert parse_items([OUTPUT], earlier)[0]["output"] == "sunny"
    assert parse_items([], earlier) == []


def test_a_result_without_its_call_is_kept() -> None:
    """If a client cut the conversation off before it."""
    messages = messages_of(parse_items([USER, OUTPUT]), (), request_media())
    assert texts(parse_messages(messages)[1]) == ["sunny"]


def test_a_result_may_have_the_name_of_its_function_in_place_of_a_call() -> None:
    """As agents hand each other data."""
    given = {"type": "function_call_output", "name": "notes", "namespace": "guardian", "output": "x"}
    items = parse_items([USER, given, {"type": "function_call_output", "call_id": None, "output": "y"}])
    assert parse_items(items) == items
    _, named, plain = messages_of(items, (), request_media())
    assert named == {"role": "tool", "name": "guardian__notes", "content": "x"}
    assert plain == {"role": "tool", "content": "y"}
    assert len(parse_messages([named, plain])) == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "text", "id", "call_id", "output", "summary", "arguments", "name"]
            ),
            inner
            | st.sampled_from(["message", "user", "assistant", "function_call", "reasoning", "input_text", "mcp_call"]),
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_json_is_parsed_or_refused(value: Any) -> None:
    """And a chat accepts the parsed messages, unless none has a content."""
    try:
        items = parse_items(value)
    except RequestError as refused:
        message = str(refused)
    else:
        messages = messages_of(items, (), request_media())
        if any(message.get("content") or message.get("tool_calls") for message in messages):
            assert parse_messages(messages)
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
    """In messages, files and outputs of calls; their places are in the input, after earlier items."""
    items = parse_items([{"role": "user", "content": [{"type": "input_text", "text": "a"}, IMAGE, FILE]}])
    assert items[0]["content"][1] == {"type": "input_image", "image_url": URL, "detail": "auto"}
    (message,) = messages_of(items, (), request_media())
    assert [getattr(part, "name", "text") for part in message["content"]] == [
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


def warned(items: list[Any]) -> tuple[str, ...]:
    """The warnings about an input."""
    warnings = InputWarnings()
    parse_items(items, warnings=warnings)
    return warnings.sentences()


@pytest.mark.parametrize("role", ["user", "developer", "assistant"])
def test_texts_of_any_kind_are_read_in_messages_of_any_role(role: str) -> None:
    """Their type becomes that of the role."""
    kinds = ("input_text", "output_text", "text", "summary_text")
    parts = [{"type": kind, "text": kind} for kind in kinds]
    (item,) = parse_items([{"role": role, "content": [*parts, {"type": "refusal", "refusal": "No."}]}])
    wanted = "output_text" if role == "assistant" else "input_text"
    assert [part["type"] for part in item["content"]] == [*[wanted] * 4, "refusal"]
    (message,) = messages_of([item], (), request_media())
    assert texts(message) == [*kinds, "No."]


def test_null_is_an_empty_content_or_output() -> None:
    """As some clients send it back."""
    empty: list[Any] = [{"role": "user", "content": None}, {"role": "user", "content": []}, {"role": "developer"}]
    messages = messages_of(parse_items([*empty, CALL, {**OUTPUT, "output": None}]), (), request_media())
    assert [texts(message) for message in messages] == [[], [], [], [], [""]]
    assert parse_messages(messages)


def test_outputs_have_texts_of_any_kind() -> None:
    """Including the items of an assistant's messages."""
    output = {**OUTPUT, "output": [{"type": "output_text", "text": "sun"}, {"type": "text", "text": "ny"}]}
    assert texts(messages_of(parse_items([CALL, output]), (), request_media())[-1]) == ["sun", "ny"]


def test_a_function_of_a_namespace_has_both_names() -> None:
    """The call of one and its result."""
    call = {**CALL, "namespace": "crm"}
    items = parse_items([call, {**OUTPUT, "namespace": "crm"}])
    assert items[0]["namespace"] == "crm"
    messages = messages_of(items, (), request_media())
    assert messages[0]["tool_calls"][0]["function"]["name"] == "crm__weather"
    assert messages[1]["tool_call_id"] == "c1"


def test_a_call_of_a_custom_tool_is_one_with_a_text() -> None:
    """As its function takes it."""
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'say "hi"\n', "status": "completed"}
    output = {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "done"}]}
    items = parse_items([call, output])
    assert [item["id"].partition("_")[0] for item in items] == ["ctc", "ctco"]
    assert parse_items(items) == items
    assistant, tool = messages_of(items, (), request_media())
    (made,) = assistant["tool_calls"]
    assert (made["id"], made["function"]["name"]) == ("c1", "patch")
    assert json.loads(made["function"]["arguments"]) == {"input": 'say "hi"\n'}
    assert texts(tool) == ["done"]


SHELL = {"type": "exec", "command": ["ls", "-l"], "env": {}}


@pytest.mark.parametrize(
    ("items", "name", "arguments", "result"),
    [
        (
            [
                {"type": "local_shell_call", "id": "lsh_1", "call_id": "c1", "action": SHELL, "status": "completed"},
                {"type": "local_shell_call_output", "id": "lsh_1", "output": "a.txt"},
            ],
            "local_shell",
            SHELL,
            "a.txt",
        ),
        (
            [
                {"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"]}, "environment": None},
                {"type": "shell_call_output", "call_id": "c1", "output": [{"stdout": "a.txt", "stderr": ""}]},
            ],
            "shell",
            {"commands": ["ls"]},
            '{"stdout": "a.txt", "stderr": ""}',
        ),
        (
            [
                {"type": "apply_patch_call", "call_id": "c1", "operation": {"type": "delete_file", "path": "a"}},
                {"type": "apply_patch_call_output", "call_id": "c1", "status": "failed", "output": None},
            ],
            "apply_patch",
            {"type": "delete_file", "path": "a"},
            "",
        ),
        (
            [
                {"type": "tool_search_call", "call_id": "c1", "execution": "client", "arguments": {"query": "mail"}},
                {"type": "tool_search_output", "call_id": "c1", "tools": [{"type": "function", "name": "send"}]},
            ],
            "tool_search",
            {"query": "mail"},
            '["send"]',
        ),
        (
            [
                {
                    "type": "mcp_call",
                    "id": "m1",
                    "server_label": "wiki",
                    "name": "ask",
                    "arguments": "{}",
                    "output": "42",
                }
            ],
            "wiki__ask",
            {},
            "42",
        ),
        (
            [
                {
                    "type": "web_search_call",
                    "id": "w1",
                    "action": {"type": "search", "query": "foxes"},
                    "status": "failed",
                }
            ],
            "web_search",
            {"type": "search", "query": "foxes"},
            "(the result is not part of this conversation)",
        ),
        (
            [{"type": "file_search_call", "id": "f1", "queries": ["a"], "results": [{"filename": "x", "score": 1}]}],
            "file_search",
            {"queries": ["a"]},
            '{"filename": "x", "score": 1}',
        ),
        (
            [
                {
                    "type": "code_interpreter_call",
                    "id": "ci",
                    "code": "1 + 1",
                    "container_id": "c",
                    "outputs": [{"type": "logs", "logs": "2"}],
                }
            ],
            "code_interpreter",
            {"code": "1 + 1"},
            '{"type": "logs", "logs": "2"}',
        ),
        (
            [{"type": "brand_new_call", "id": "b1", "wish": {"a": 1}, "depth": 2, "result": "fine"}],
            "brand_new",
            {"wish": {"a": 1}, "depth": 2},
            "fine",
        ),
        (
            [
                {"type": "program", "id": "p1", "call_id": "c1", "code": "f()", "fingerprint": "x"},
                {"type": "program_output", "id": "p2", "call_id": "c1", "result": "done", "status": "completed"},
            ],
            "program",
            {"code": "f()"},
            "done",
        ),
    ],
)
def test_calls_of_openais_tools_are_calls_of_functions(items: Any, name: str, arguments: Any, result: str) -> None:
    """With their arguments and their result, by the same id; types that nobody knows yet among them."""
    parsed = parse_items([USER, *items])
    assert [item["id"] for item in parse_items(parsed)] == [item["id"] for item in parsed]
    user, assistant, tool = messages_of(parsed, (), request_media())
    assert user["role"] == "user"
    (call,) = assistant["tool_calls"]
    assert call["function"]["name"] == name
    assert json.loads(call["function"]["arguments"]) == arguments
    assert (tool["role"], tool["tool_call_id"], "".join(texts(tool))) == ("tool", call["id"], result)
    assert parse_messages([user, assistant, tool])


def test_text_after_a_search_is_a_message_of_its_own() -> None:
    """So that it stands behind the search, as it was written."""
    search = {"type": "web_search_call", "id": "w1", "action": {"type": "search", "query": "foxes"}}
    messages = messages_of(parse_items([USER, search, SAID]), (), request_media())
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]


def test_images_in_results_of_openais_tools_are_images() -> None:
    """Screenshots and generated images."""
    screenshot = {"type": "computer_screenshot", "image_url": URL}
    items = [
        {"type": "computer_call", "id": "x", "call_id": "c1", "action": {"type": "screenshot"}},
        {"type": "computer_call_output", "call_id": "c1", "output": screenshot},
        {"type": "image_generation_call", "id": "i1", "result": URL.partition("base64,")[2], "status": "completed"},
    ]
    messages = messages_of(parse_items(items), (), request_media())
    found = [
        getattr(part, "name", "") for message in messages if message["role"] == "tool" for part in message["content"]
    ]
    assert found == ["input[1].output.image_url", "input[2].result"]


@pytest.mark.parametrize(
    "item",
    [
        {"type": "compaction", "encrypted_content": "xx"},
        {"type": "mcp_list_tools", "id": "x", "server_label": "wiki", "tools": []},
        {"type": "mcp_approval_response", "approval_request_id": "x", "approve": True},
        {"type": "configuration_update", "reasoning": {"effort": "low"}},
        {"type": "brand_new"},
    ],
)
def test_items_with_nothing_to_read_are_left_out_with_a_warning(item: Any) -> None:
    """The conversation goes on without them; they stay in the list of its items."""
    parsed = parse_items([USER, item])
    assert [parse_item["type"] for parse_item in parsed] == ["message", item["type"]]
    assert len(messages_of(parsed, (), request_media())) == 1
    (warning,) = warned([USER, item])
    assert warning.startswith("input[1]: the item")


def test_an_unknown_item_with_a_content_is_a_message() -> None:
    """Of its role, or the user's."""
    items = [
        {"type": "note", "content": "One."},
        {"type": "note", "role": "developer", "content": [{"type": "x", "text": "Two."}]},
    ]
    messages = messages_of(parse_items(items), (), request_media())
    assert [(message["role"], texts(message)) for message in messages] == [("user", ["One."]), ("developer", ["Two."])]
    assert warned(items) == ("input[0] and 1 more: the type 'note' is not known, and is read as a message",)


@pytest.mark.parametrize("result", [5, {"url": URL}, ["x"]])
def test_a_generated_image_is_a_text(result: object) -> None:
    """Also for a model that cannot see, which leaves images out."""
    with pytest.raises(InvalidParams, match=r"input\[0\]\.result must be"):
        parse_items([{"type": "image_generation_call", "id": "i1", "result": result}])


def test_unknown_members_are_taken_with_one_warning_each() -> None:
    """Of items and of parts; members that are null or about OpenAI's service say nothing."""
    part = {"type": "input_text", "text": "x", "weight": 1, "annotations": []}
    items = [{"role": "user", "content": [part, part], "name": "me"}] * 2
    assert warned(items) == (
        "input[0] and 1 more: the member 'name' of an item of the type message has no effect here and was ignored",
        "input[0].content[0] and 3 more: the member 'weight' of a part has no effect here and was ignored",
    )
    silent = {**CALL, "caller": {"type": "direct"}, "created_by": "x", "seed": None}
    assert warned([silent, {**OUTPUT, "status": "completed"}]) == ()


def test_images_of_the_assistant_are_a_text() -> None:
    """Templates have no place for them."""
    said = {
        "role": "assistant",
        "content": [{"type": "output_text", "text": "See:"}, {"type": "input_image", "image_url": URL}],
    }
    messages = messages_of(parse_items([USER, said]), (), request_media())
    assert texts(messages[1]) == ["See:", "[image omitted]"]
    assert len(warned([USER, said])) == 1


@pytest.mark.parametrize("status", ["searching", "generating", "interpreting", "calling", "failed"])
def test_items_have_the_statuses_of_openai(status: str) -> None:
    """Including the schemas of its own tools."""
    assert parse_items([{"type": "web_search_call", "id": "w", "action": {}, "status": status}])[0]["status"] == status
