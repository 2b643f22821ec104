"""From Anthropic's messages and tools to a conversation."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.media_requests import DATA, request_media

from paceline.chat import Tool, parse_messages
from paceline.chat.conversation import MAX_MESSAGES
from paceline.errors import InvalidParams, RequestError, Unsupported
from paceline.server.anthropic.anthropic_messages import _append, conversation_of, tool_choice_of, tools_of
from paceline.server.api_errors import ApiException, api_error_of

USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Köln"}}
CALL = {
    "id": "t1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Köln"}'},
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def result(**members: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", **members}


def converted(*messages: Any, system: Any = None) -> list[dict[str, Any]]:
    """What a chat template gets to see; `parse_messages` takes it."""
    conversation = conversation_of(list(messages), system, request_media())
    parse_messages(conversation)
    return conversation


def test_a_system_prompt_comes_first() -> None:
    """As a text or as blocks."""
    hello = {"role": "user", "content": "Hello"}
    assert converted(hello, system="Be kind.") == [{"role": "system", "content": "Be kind."}, hello]
    blocks = [text("Be kind.", cache_control={"type": "ephemeral"}), text("Be brief.")]
    assert converted(hello, system=blocks)[0]["content"] == [text("Be kind."), text("Be brief.")]
    assert converted(hello, {"role": "system", "content": "Now be brief."})[1]["role"] == "system"


def test_a_stamp_in_a_system_prompt_is_dropped() -> None:
    """It differs in every request, and would keep prefixes from being shared. All other text stays."""
    stamp = "x-anthropic-billing-header: cc_version=2.1; cch={}; and more; cch=stays;"
    hello = {"role": "user", "content": "Hello"}
    prompts = [converted(hello, system=stamp.format(value)) for value in ("a5145", "00ff1")]
    assert prompts[0] == prompts[1]
    assert prompts[0][0]["content"] == stamp.format("")
    other = "Note: " + stamp.format("a5145")
    assert converted(hello, system=other)[0]["content"] == other


def test_consecutive_messages_of_one_role_are_one() -> None:
    """As Anthropic has it; templates want turns."""
    conversation = converted(
        {"role": "user", "content": "a"},
        user(text("b")),
        assistant({"type": "thinking", "thinking": "Hm. ", "signature": ""}),
        assistant({"type": "thinking", "thinking": "So.", "signature": ""}, text("c")),
        assistant(USE),
        user(result()),
    )
    assert conversation[:2] == [
        user(text("a"), text("b")),
        {**assistant(text("c")), "reasoning_content": "Hm. So.", "tool_calls": [CALL]},
    ]


def test_results_follow_their_calls() -> None:
    """Before the text of the same message, wherever it stands."""
    conversation = converted(
        {"role": "user", "content": "Hi"},
        assistant(text("Let me see."), USE, {**USE, "id": "t2"}),
        user(text("Here:"), result(content="rain"), result(tool_use_id="t2", content=[text("sun"), text("wind")])),
    )
    assert [one["role"] for one in conversation] == ["user", "assistant", "tool", "tool", "user"]
    assert conversation[2:4] == [
        {"role": "tool", "tool_call_id": "t1", "content": "rain"},
        {"role": "tool", "tool_call_id": "t2", "content": "sun\nwind"},
    ]


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({}, ""),
        ({"content": None, "is_error": None}, ""),
        ({"content": "no city", "is_error": True}, "Error: no city"),
        ({"is_error": True}, "Error"),
        ({"content": "fine", "is_error": False}, "fine"),
    ],
)
def test_a_result_says_whether_it_is_an_error(members: dict[str, Any], expected: str) -> None:
    """In its text, since templates have no other place."""
    assert converted(assistant(USE), user(result(**members)))[1]["content"] == expected


def test_thinking_is_read_and_redacted_thinking_is_not() -> None:
    """A message may consist of it."""
    redacted = {"type": "redacted_thinking", "data": "xyz"}
    (message,) = converted(assistant(redacted, text("Yes.", citations=None)))
    assert message == assistant(text("Yes."))
    assert converted(assistant(redacted)) == [{"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ("hello", "messages must be a list"),
        ([], "messages must have at least one message"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"role": "robot", "content": "x"}], r"messages\[0\].role"),
        ([{"content": "x"}], r"messages\[0\].role"),
        ([{"role": "user"}], r"messages\[0\].content must be a text or a list of blocks, not null"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content"),
        ([{"role": "user", "content": "x", "name": "y"}], r"messages\[0\].name is not known"),
        ([user()], r"messages\[0\].content must have at least one block"),
        ([user("x")], r"messages\[0\].content\[0\] must be an object"),
        ([user({"text": "x"})], r"messages\[0\].content\[0\].type"),
        ([user(text("x"), {"type": "text"})], r"messages\[0\].content\[1\].text is missing"),
        ([user(text(5))], r"messages\[0\].content\[0\].text"),  # type: ignore[arg-type]
        ([user(text("x", size=3))], r"messages\[0\].content\[0\].size is not known"),
        (
            [user(USE)],
            r"messages\[0\].content\[0\].type must be text or image or tool_result in a message of the role 'user'",
        ),
        ([assistant(result())], r"messages\[0\].content\[0\].type must be text or thinking"),
        ([assistant({**USE, "input": "x"})], r"messages\[0\].content\[0\].input must be an object"),
        ([assistant({**USE, "id": ""})], r"messages\[0\].content\[0\].id must not be empty"),
        ([user(text("x")), assistant(USE)], r"messages\[1\] has a tool_use block, and no message with its tool_result"),
        ([user(result())], r"messages\[0\].content\[0\].tool_use_id is 't1', and no earlier message"),
        ([assistant(USE), user(result(content=[USE]))], r"messages\[1\].content\[0\].content\[0\].type must be text"),
        ([assistant(USE), user(result(is_error="yes"))], r"messages\[1\].content\[0\].is_error"),
    ],
)
def test_a_malformed_message_is_refused_with_its_place(messages: Any, place: str) -> None:
    """In the terms of the body that was sent."""
    with pytest.raises(InvalidParams, match=place):
        conversation_of(messages, None, request_media())


@pytest.mark.parametrize("kind", ["document", "search_result", "server_tool_use", "\ud83d\ude00" * 900])
def test_blocks_that_no_model_here_reads_are_refused(kind: str) -> None:
    """Also within the result of a tool."""
    kind = kind.encode("utf-16", "surrogatepass").decode("utf-16")
    block = {"type": kind, "source": {}}
    for messages in ([user(block)], [assistant(USE), user(result(content=[block]))]):
        with pytest.raises(Unsupported, match="not supported") as refusal:
            conversation_of(messages, None, request_media())
        assert len(str(refusal.value)) < 400


def test_deep_inputs_are_refused() -> None:
    """With the place, and without recursion to its end."""
    deep: Any = {}
    for _ in range(500):
        deep = {"a": deep}
    with pytest.raises(InvalidParams, match=r"messages\[0\].content\[0\].input is nested"):
        conversation_of([assistant({**USE, "input": deep})], None, request_media())


def test_tools_are_functions_with_their_schemas() -> None:
    """Fields of Anthropic's servers are named in a warning."""
    more = {**TOOL, "name": "b", "type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}}
    tools, warnings = tools_of([TOOL, {**more, "input_examples": [{}], "allowed_callers": ["direct"]}])
    assert tools == (Tool("weather", "The weather.", SCHEMA), Tool("b", "The weather.", SCHEMA))
    assert warnings == ["tools[1].input_examples: accepted, and without a meaning here"]
    assert tools_of(None) == ((), [])


@pytest.mark.parametrize(
    ("tools", "place"),
    [
        ({}, "tools must be a list"),
        ([5], r"tools\[0\] must be an object"),
        ([{"input_schema": SCHEMA}], r"tools\[0\].name is missing"),
        ([{"name": "", "input_schema": SCHEMA}], r"tools\[0\].name must not be empty"),
        ([{"name": "a"}], r"tools\[0\].input_schema is missing"),
        ([TOOL, {"name": "a", "input_schema": []}], r"tools\[1\].input_schema"),
        ([{**TOOL, "parameters": {}}], r"tools\[0\].parameters is not known"),
    ],
)
def test_a_malformed_tool_is_refused_with_its_place(tools: Any, place: str) -> None:
    """In Anthropic's terms."""
    with pytest.raises(InvalidParams, match=place):
        tools_of(tools)


@pytest.mark.parametrize("kind", ["web_search_20250305", "bash_20250124", "mcp_toolset", 5])
def test_tools_of_anthropics_servers_are_refused(kind: Any) -> None:
    """By their type."""
    with pytest.raises(Unsupported, match=r"tools\[0\].type: tools of the type"):
        tools_of([{"type": kind, "name": "x"}])


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, (None, None)),
        ({"type": "auto"}, ("auto", None)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", False)),
        ({"type": "any", "disable_parallel_tool_use": False}, ("required", None)),
        ({"type": "none"}, ("none", None)),
        ({"type": "tool", "name": "weather"}, ({"type": "function", "function": {"name": "weather"}}, None)),
    ],
)
def test_a_tool_choice_is_mapped(choice: Any, expected: Any) -> None:
    """With parallel calls, unless they are disabled."""
    assert tool_choice_of(choice, [Tool("weather")]) == expected


@pytest.mark.parametrize(
    ("choice", "tools", "place"),
    [
        ("auto", [Tool("a")], "tool_choice must be an object"),
        ({"type": "required"}, [Tool("a")], "tool_choice.type"),
        ({}, [Tool("a")], "tool_choice.type"),
        ({"type": "any"}, [], "tool_choice.type 'any' needs tools"),
        ({"type": "tool"}, [Tool("a")], "tool_choice.name is missing"),
        ({"type": "tool", "name": "b"}, [Tool("a")], "tool_choice.name is 'b', and tools has 'a'"),
        ({"type": "auto", "disable_parallel_tool_use": 1}, [], "tool_choice.disable_parallel_tool_use"),
        ({"type": "auto", "parallel": True}, [], "tool_choice.parallel is not known"),
    ],
)
def test_a_malformed_tool_choice_is_refused(choice: Any, tools: Any, place: str) -> None:
    """With its field."""
    with pytest.raises(InvalidParams, match=place):
        tool_choice_of(choice, tools)


def test_arguments_of_a_call_are_json_of_its_input() -> None:
    """Whatever it has."""
    given = {"a": [1, 2.5, None, True, {"b": 'x"\n'}], "ü": {}}
    message, _ = converted(assistant({**USE, "input": given}), user(result()))
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == given


def test_messages_are_joined_in_place() -> None:
    """Without a copy of what was joined before, which would take quadratic time."""
    joined: list[dict[str, Any]] = []
    _append(joined, {"role": "assistant", "content": [], "tool_calls": [], "reasoning_content": []})
    lists = [joined[0][name] for name in ("content", "tool_calls", "reasoning_content")]
    for number in range(3):
        more = {"content": f"{number}", "tool_calls": [number], "reasoning_content": ["Hm."]}
        _append(joined, {"role": "assistant", **more})
    assert [id(joined[0][name]) for name in ("content", "tool_calls", "reasoning_content")] == list(map(id, lists))
    assert list(map(len, lists)) == [3, 3, 3]


def test_too_many_messages_are_refused_before_any_is_read() -> None:
    """Also where consecutive ones would become one."""
    with pytest.raises(InvalidParams, match="messages must have at most"):
        conversation_of([None] * (MAX_MESSAGES + 1), None, request_media())
    most = conversation_of([{"role": "user", "content": "x"}] * MAX_MESSAGES, None, request_media())
    assert [len(message["content"]) for message in most] == [MAX_MESSAGES]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}


def seen(*messages: Any) -> list[dict[str, Any]]:
    """The conversation with its images."""
    return conversation_of(list(messages), None, request_media())


def test_images_stand_in_order_with_texts() -> None:
    """Also in the results of tools, which come first."""
    (asked,) = seen(user({"type": "text", "text": "a"}, IMAGE, {"type": "text", "text": "b"}))
    assert [getattr(one, "name", "text") for one in asked["content"]] == [
        "text",
        "messages[0].content[1].source.data",
        "text",
    ]
    shown = result(content=[{"type": "text", "text": "c"}, IMAGE], is_error=True)
    _, answered, more = seen(assistant(USE), user(IMAGE, shown))
    assert answered["role"] == "tool"
    assert [getattr(one, "name", one) for one in answered["content"]] == [
        {"type": "text", "text": "Error:"},
        {"type": "text", "text": "c"},
        "messages[1].content[1].content[1].source.data",
    ]
    assert [one.name for one in more["content"]] == ["messages[1].content[0].source.data"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "source must be an object"),
        ({}, "source.type must be"),
        ({"type": "file", "file_id": "x"}, "keeps no files"),
        ({"type": "base64", "data": DATA}, "source.media_type is missing"),
        ({"type": "base64", "media_type": "image/jpeg", "data": DATA}, "source.data: the data are a PNG"),
        ({"type": "base64", "media_type": "image/png"}, "source.data must be"),
        ({"type": "base64", "media_type": "image/png", "data": DATA, "url": "x"}, "source.url is not known"),
        ({"type": "url", "url": "https://a.example/x.png"}, "source.url: this server fetches no images"),
    ],
)
def test_malformed_images_are_refused(source: Any, words: str) -> None:
    """By their place."""
    with pytest.raises((RequestError, ApiException)) as raised:
        seen(user({"type": "image", "source": source}))
    message = api_error_of(raised.value).message
    assert message.startswith("messages[0].content[0].source")
    assert words in message


def test_images_are_the_users_and_the_tools() -> None:
    """Models write none."""
    with pytest.raises(InvalidParams, match="must be text or thinking"):
        seen(assistant(IMAGE))
