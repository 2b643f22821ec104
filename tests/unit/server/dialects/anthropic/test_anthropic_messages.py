"""From Anthropic's messages and tools to a conversation."""

from __future__ import annotations

import difflib
import json
import time
from typing import Any

import pytest
from tests.media_requests import DATA, request_media

from paceline.chat import Tool, parse_messages
from paceline.chat.conversation import MAX_MESSAGES
from paceline.errors import InvalidParams, RequestError
from paceline.server.api_errors import ApiException, api_error_of
from paceline.server.dialects.anthropic.anthropic_messages import (
    OfferedTools,
    ToolChange,
    _append,
    conversation_of,
    tool_choice_of,
    tools_of,
)

USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Köln"}}
CALL = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def document(**source: Any) -> dict[str, Any]:
    return {"type": "document", "source": source}


def result(**members: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", **members}


def converted(*messages: Any, system: Any = None) -> list[dict[str, Any]]:
    """Return the messages for a chat template; `parse_messages` accepts them."""
    conversation = conversation_of(list(messages), system, request_media()).messages
    parse_messages(conversation)
    return conversation


def warned(*messages: Any, system: Any = None) -> tuple[str, ...]:
    return conversation_of(list(messages), system, request_media()).warnings


def test_a_system_prompt_comes_first() -> None:
    """As a text or as blocks."""
    hello = {"role": "user", "content": "Hello"}
    assert converted(hello, system="Be kind.") == [{"role": "system", "content": "Be kind."}, hello]
    blocks = [text("Be kind.", cache_control={"type": "ephemeral"}), text("Be brief.")]
    assert converted(hello, system=blocks)[0]["content"] == [text("Be kind."), text("Be brief.")]
    assert converted(hello, {"role": "system", "content": "Now be brief."})[1]["role"] == "system"


@pytest.mark.parametrize(
    "stamp",
    [
        "x-anthropic-billing-header: cc_version=2.1.197.c40; cc_entrypoint=sdk-cli;",
        "x-anthropic-billing-header: cc_version=2.1.332.e8f; cc_entrypoint=cli; cch=a5145; cc_is_subagent=true;",
        "x-anthropic-billing-header: cc_version=2.1.332.e8f; cc_entrypoint=cli; cc_prev_msg=msg_01; cc_prev_turn_index=3;\n",
    ],
)
def test_a_stamp_in_a_system_prompt_is_dropped(stamp: str) -> None:
    """Its values differ between sessions, and would keep prefixes from being shared. All other text stays."""
    hello = {"role": "user", "content": "Hello"}
    assert converted(hello, system=[text(stamp), text("Be kind.")])[0]["content"] == [text("Be kind.")]
    assert converted(hello, system=stamp.rstrip() + "\nBe kind.")[0]["content"] == "Be kind."
    assert converted(hello, system=stamp)[0]["content"] == ""
    assert converted(hello, system=stamp.rstrip() + " and more; cch=stays;")[0]["content"] == "and more; cch=stays;"
    for other in ("Note: " + stamp, "x-anthropic-billing-header: none of the kind"):
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
    assert [message["role"] for message in conversation] == ["user", "assistant", "tool", "tool", "user"]
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
        ([{"role": "user"}], r"messages\[0\].content is missing"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be a text or a list of blocks, not int"),
        ([user("x")], r"messages\[0\].content\[0\] must be an object"),
        ([user({"text": "x"})], r"messages\[0\].content\[0\].type"),
        ([user(text("x"), {"type": "text"})], r"messages\[0\].content\[1\].text is missing"),
        ([user(text(5))], r"messages\[0\].content\[0\].text"),  # type: ignore[arg-type]
        ([assistant({**USE, "id": ""})], r"messages\[0\].content\[0\].id must not be empty"),
        ([assistant({**USE, "name": 5})], r"messages\[0\].content\[0\].name"),
        ([user(result(tool_use_id=5))], r"messages\[0\].content\[0\].tool_use_id"),
        ([user(result(content=5))], r"messages\[0\].content\[0\].content must be a text or a list"),
        ([user({"type": "document"})], r"messages\[0\].content\[0\].source must be an object"),
        ([user(document(type="text", data=5))], r"messages\[0\].content\[0\].source.data"),
        ([user(document(type="base64", media_type="text/plain", data="/w=="))], r"source.data must be a text in UTF-8"),
        ([user({"type": "novel", "text": "\ud800"})], r"messages\[0\].content\[0\].text has a lone surrogate"),
        (
            [{"role": "system", "content": [{"type": "tool_addition"}]}],
            r"messages\[0\].content\[0\].tool must be an object",
        ),
        ([assistant(USE), user(result(is_error="yes"))], r"messages\[1\].content\[0\].is_error"),
    ],
)
def test_a_malformed_message_is_refused_with_its_place(messages: Any, place: str) -> None:
    """In the terms of the body that was sent."""
    with pytest.raises(InvalidParams, match=place):
        conversation_of(messages, None, request_media())


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (
            document(type="text", media_type="text/plain", data="Foxes dig.")
            | {"title": "Foxes", "context": "A book."},
            "<document>\ntitle: Foxes\ncontext: A book.\nFoxes dig.\n</document>",
        ),
        (document(type="content", content="Foxes dig."), "<document>\nFoxes dig.\n</document>"),
        (document(type="content", content=[text("Foxes"), text("dig.")]), "<document>\nFoxes\ndig.\n</document>"),
        (document(type="base64", media_type="text/markdown", data="SMO8aG5lcg=="), "<document>\nHühner\n</document>"),
        (
            {"type": "search_result", "source": "https://a.example", "title": "Foxes", "content": [text("They dig.")]},
            "<search_result>\nsource: https://a.example\ntitle: Foxes\nThey dig.\n</search_result>",
        ),
        (
            {"type": "server_tool_use", "id": "srv1", "name": "web_search", "input": {"query": "Füchse"}},
            '<server_tool_use>\nname: web_search\ninput: {"query": "Füchse"}\n</server_tool_use>',
        ),
        (
            {
                "type": "web_search_tool_result",
                "tool_use_id": "srv1",
                "content": [
                    {"type": "web_search_result", "title": "A", "url": "https://a.example", "encrypted_content": "xyz"},
                    {"type": "web_search_result", "title": "B", "url": "https://b.example", "page_age": None},
                ],
            },
            "<web_search_tool_result>\ntitle: A\nurl: https://a.example\ntitle: B\nurl: https://b.example\n</web_search_tool_result>",
        ),
        (
            {
                "type": "bash_code_execution_tool_result",
                "tool_use_id": "srv2",
                "content": {
                    "type": "bash_code_execution_result",
                    "stdout": "4",
                    "stderr": "",
                    "return_code": 0,
                    "content": [],
                },
            },
            "<bash_code_execution_tool_result>\nstdout: 4\nreturn_code: 0\n</bash_code_execution_tool_result>",
        ),
        ({"type": "tool_reference", "tool_name": "fetch"}, "<tool_reference>\ntool_name: fetch\n</tool_reference>"),
        ({"type": "compaction", "content": "So far: foxes."}, "<compaction>\nSo far: foxes.\n</compaction>"),
        (
            {
                "type": "web_fetch_tool_result",
                "tool_use_id": "s2",
                "content": {
                    "type": "web_fetch_result",
                    "url": "https://a.example",
                    "content": document(type="text", media_type="text/plain", data="A fox ran.") | {"title": "Foxes"},
                },
            },
            "<web_fetch_tool_result>\nurl: https://a.example\nA fox ran.\ntitle: Foxes\n</web_fetch_tool_result>",
        ),
        (
            {"type": "mcp_tool_result", "tool_use_id": "m1", "content": [text("a")]},
            "<mcp_tool_result>\na\n</mcp_tool_result>",
        ),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_blocks_without_a_place_in_templates_become_text(block: dict[str, Any], expected: str) -> None:
    """In messages of every role and in results of tools, without a warning: nothing of them is missing."""
    for message in (user(block), assistant(block), {"role": "system", "content": [block]}):
        assert converted(message) == [{"role": message["role"], "content": [text(expected)]}]
        assert warned(message) == ()
    assert converted(assistant(USE), user(result(content=[block])))[1]["content"] == expected
    assert converted({"role": "user", "content": "Hi"}, system=[block])[0]["content"] == [text(expected)]


@pytest.mark.parametrize(
    ("block", "expected", "warning"),
    [
        (
            document(type="base64", media_type="application/pdf", data="JVBERi0=") | {"title": "Foxes"},
            "<document>\ntitle: Foxes\n[document omitted]\n</document>",
            "source: this server reads no PDFs",
        ),
        (
            document(type="url", url="https://a.example/x.pdf"),
            "<document>\nurl: https://a.example/x.pdf\n[document omitted]\n</document>",
            "source: this server reads no PDFs and no files by URL or id; send the text",
        ),
        ({"type": "container_upload", "file_id": "f1"}, "[container upload omitted]", "keeps no files"),
        (
            {
                "type": "novel",
                "text": "Hello",
                "rating": 5,
                "data": "AAAA",
                "source": {"type": "base64", "data": "AAAA"},
            },
            "<novel>\nHello\nrating: 5\n</novel>",
            "blocks of the type 'novel' are not known",
        ),
        ({"type": "\U0001f600" * 900}, None, "are not known"),
    ],
)
def test_blocks_that_no_model_here_reads_are_named_in_a_warning(
    block: dict[str, Any], expected: str | None, warning: str
) -> None:
    """With their place, also within the result of a tool."""
    for place, messages in (
        ("messages[0].content[0]", [user(block)]),
        ("messages[1].content[0].content[0]", [assistant(USE), user(result(content=[block]))]),
    ):
        conversation = conversation_of(messages, None, request_media())
        (said,) = conversation.warnings
        assert said.startswith(place)
        assert warning in said
        assert len(said) < 400
        content = conversation.messages[-1]["content"]
        shown = content if isinstance(content, str) else content[0]["text"]
        assert expected is None or shown == expected


def test_blocks_of_one_kind_have_one_warning() -> None:
    """With the number of the others."""
    redacted = {"type": "redacted_thinking", "data": "xyz"}
    assert warned(assistant(redacted, redacted, text("Yes.")), user(text("So?")), assistant(redacted)) == (
        "messages[0].content[0]: blocks of the type redacted_thinking are left out, which no model here can read (and 2 more)",
    )


def test_a_document_keeps_its_images() -> None:
    """Between its texts."""
    block = document(type="content", content=[text("a"), IMAGE, text("b")]) | {"title": "T"}
    (message,) = seen(user(block))
    texts = [part["text"] if isinstance(part, dict) else part.name for part in message["content"]]
    place = "messages[0].content[0].source.content[1].source.data"
    assert texts == ["<document>\ntitle: T", "a", place, "b", "</document>"]


def test_a_document_within_a_document_becomes_text() -> None:
    """It is nested up to a limit, so that no body exhausts the stack."""
    block = document(type="text", media_type="text/plain", data="a")
    two = document(type="content", content=[block])
    assert converted(user(two))[0]["content"] == [text("<document>\n<document>\na\n</document>\n</document>")]
    for _ in range(400):
        block = document(type="content", content=[block])
    with pytest.raises(
        InvalidParams, match=r"messages\[0\].content\[0\].source.content\[0\].source is nested more than 32"
    ):
        converted(user(block))


def test_members_that_clients_add_change_nothing() -> None:
    """In messages and in blocks."""
    plain = [user(text("a")), assistant(text("b"), USE), user(result(content=[text("c")]))]
    added: list[Any] = [
        {**message, "id": "m1", "content": [{**block, "parsed": {"x": 1}} for block in message["content"]]}
        for message in plain
    ]
    assert converted(*added) == converted(*plain)
    assert warned(*added) == ()


def test_unknown_members_of_messages_have_a_warning() -> None:
    """One for each name; a member that is null, or that a response has, has none."""
    silent = {"id": "m1", "usage": {"input_tokens": 1}, "stop_reason": "end_turn", "colour": None}
    messages = [{**user(text("a")), "weight": 1}, {**assistant(text("b")), **silent}, {**user(text("c")), "weight": 2}]
    assert warned(*messages) == (
        "messages[0]: the member 'weight' of a message has no effect here and was ignored (and 1 more)",
    )


def test_members_of_system_messages_that_mean_something_are_named() -> None:
    """They have no effect here."""
    message = {
        "role": "system",
        "content": "Be brief.",
        "clear_at": "next_user_message",
        "output_config": {"effort": "low"},
    }
    assert converted(message) == [{"role": "system", "content": "Be brief."}]
    assert warned(message) == tuple(
        f"messages[0]: the member {name!r} of a message has no effect here and was ignored"
        for name in ("clear_at", "output_config")
    )
    assert warned({**message, "clear_at": "never", "output_config": {}}) == ()


def test_empty_contents_are_taken() -> None:
    """A message without content is an empty one; of a system message there is nothing left."""
    hello = {"role": "user", "content": "Hi"}
    assert converted(hello, {"role": "assistant", "content": None}, {"role": "user", "content": None}, assistant()) == [
        hello,
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": ""},
    ]
    assert converted(user()) == [{"role": "user", "content": ""}]
    assert converted(user({"type": "text", "text": None}), {"role": "system", "content": []}) == [user(text(""))]


@pytest.mark.parametrize(
    ("given", "arguments"),
    [(None, "{}"), ("", ""), ('{"city": "Kö', '{"city": "Kö'), ([1], "[1]"), (5, "5"), ({"a": None}, '{"a": null}')],
)
def test_an_input_that_is_no_object_is_kept_as_text(given: Any, arguments: str) -> None:
    """As a client keeps a model's text."""
    (message,) = converted(assistant({**USE, "input": given}))
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_results_and_calls_in_other_roles_are_kept() -> None:
    """A result in the assistant's message follows it; a call in the user's is text."""
    assert converted(assistant(USE, result(content="rain"), text("Rain.")))[1:] == [
        {"role": "tool", "tool_call_id": "t1", "content": "rain"}
    ]
    (message,) = converted(user(USE))
    assert message == user(text('<tool_use>\nname: weather\ninput: {"city": "Köln"}\n</tool_use>'))


def test_calls_and_results_without_each_other_are_taken() -> None:
    """As clients cut them from long conversations."""
    assert seen(user(result(content="rain"), text("So?"))) == [
        {"role": "tool", "tool_call_id": "t1", "content": "rain"},
        user(text("So?")),
    ]
    assert seen(user(result(tool_use_id="", content="rain"))) == [{"role": "tool", "content": "rain"}]
    assert seen(user(text("So?")), assistant(USE))[1]["tool_calls"] == [CALL]


def test_deep_inputs_and_blocks_are_refused() -> None:
    """With the place, and without recursion to its end."""
    deep: Any = {}
    for _ in range(500):
        deep = {"a": deep}
    with pytest.raises(InvalidParams, match=r"messages\[0\].content\[0\].a.*nested more than 32 deep"):
        conversation_of([user({"type": "novel", **deep})], None, request_media())
    with pytest.raises(InvalidParams, match=r"messages\[0\].content\[0\].input is nested"):
        conversation_of([assistant({**USE, "input": deep})], None, request_media())


def test_tools_are_functions_with_their_schemas() -> None:
    """Members that have no effect here are named in a warning."""
    more = {**TOOL, "name": "b", "type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}}
    offered = tools_of([TOOL, {**more, "input_examples": [{}], "allowed_callers": ["direct"], "version": 3}])
    assert offered.tools == (Tool("weather", "The weather.", SCHEMA), Tool("b", "The weather.", SCHEMA))
    assert offered.warnings == (
        "tools[1].version is not a field of this endpoint and was ignored",
        "tools[1].input_examples has no effect here and was ignored",
    )
    assert tools_of(None) == OfferedTools()


def test_unknown_members_of_tools_are_refused_by_a_strict_server() -> None:
    """With their place."""
    with pytest.raises(ApiException) as refusal:
        tools_of([{**TOOL, "version": 3}], strict=True)
    assert refusal.value.api_error.message.startswith("tools[0].version is not a field of this endpoint")


def test_deferred_tools_come_last() -> None:
    """So that tools that a client loads on the way leave the head of the prompt as it is."""
    first = tools_of([{**TOOL, "name": "a"}, {**TOOL, "name": "z"}])
    second = tools_of([{**TOOL, "name": "a"}, {**TOOL, "name": "m", "defer_loading": True}, {**TOOL, "name": "z"}])
    assert [tool.name for tool in second.tools] == ["a", "z", "m"]
    assert second.tools[:2] == first.tools
    assert second.warnings == ("tools[1].defer_loading: the tool is offered from the start, after the others",)
    with pytest.raises(InvalidParams, match=r"tools\[0\].defer_loading must be True or False"):
        tools_of([{**TOOL, "defer_loading": "yes"}])


def test_tools_change_within_a_conversation() -> None:
    """By blocks that add a definition, and that take a tool away or put it back."""

    def changed(*blocks: dict[str, Any]) -> tuple[ToolChange, ...]:
        messages = [user(text("Hi")), {"role": "system", "content": list(blocks)}]
        conversation = conversation_of(messages, None, request_media())
        assert conversation.messages == [user(text("Hi"))]
        return conversation.tool_changes

    reference = {"type": "tool_reference", "name": "weather"}
    added = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {**TOOL, "name": "new"}}}
    again = {
        "type": "tool_addition",
        "tool": {"type": "tool_definition", "definition": {**TOOL, "description": "Other."}},
    }
    removed, restored = {"type": "tool_removal", "tool": reference}, {"type": "tool_addition", "tool": reference}
    assert [tool.name for tool in tools_of([TOOL], changed(added)).tools] == ["weather", "new"]
    assert tools_of([TOOL], changed(removed)).tools == ()
    assert tools_of([TOOL], changed(removed, restored)) == tools_of([TOOL])
    assert [tool.description for tool in tools_of([TOOL], changed(again)).tools] == ["Other."]
    assert tools_of([TOOL], changed(again, removed)).tools == ()
    assert [tool.name for tool in tools_of([TOOL, {**TOOL, "name": "b"}], changed(again)).tools] == ["b", "weather"]
    broken = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {"name": "x"}}}
    with pytest.raises(InvalidParams, match=r"messages\[1\].content\[0\].tool.definition.input_schema is missing"):
        tools_of([TOOL], changed(broken))
    server = {"type": "tool_addition", "tool": {"type": "mcp_toolset_reference", "server_name": "s"}}
    assert changed(server) == ()
    assert "MCP servers are left out" in warned(user(text("Hi")), {"role": "system", "content": [server]})[0]


@pytest.mark.parametrize(
    ("tools", "place"),
    [
        ({}, "tools must be a list"),
        ([5], r"tools\[0\] must be an object"),
        ([{"input_schema": SCHEMA}], r"tools\[0\].name is missing"),
        ([{"name": "", "input_schema": SCHEMA}], r"tools\[0\].name must not be empty"),
        ([{"name": "a"}], r"tools\[0\].input_schema is missing"),
        ([TOOL, {"name": "a", "input_schema": []}], r"tools\[1\].input_schema"),
        ([{**TOOL, "type": 5}], r"tools\[0\].type"),
    ],
)
def test_a_malformed_tool_is_refused_with_its_place(tools: Any, place: str) -> None:
    """In Anthropic's terms."""
    with pytest.raises(InvalidParams, match=place):
        tools_of(tools)


@pytest.mark.parametrize(
    "kind",
    [
        "web_search_20250305", "web_fetch_20250910", "code_execution_20250825", "computer_20250124", "bash_20250124",
        "text_editor_20250728", "memory_20250818", "tool_search_tool_regex_20251119",
    ],
)  # fmt: skip
def test_tools_of_anthropics_servers_are_left_out(kind: str) -> None:
    """With a warning; a choice that demands one is refused."""
    offered = tools_of([{"type": kind, "name": "x", "max_uses": 3}, TOOL])
    assert [tool.name for tool in offered.tools] == ["weather"]
    (warning,) = offered.warnings
    assert warning.startswith("tools[0]: ")
    assert kind in warning
    assert tool_choice_of({"type": "any"}, offered) == ("required", None, [])
    with pytest.raises(RequestError, match=f"tool_choice.name is 'x', a tool of the type '{kind}'"):
        tool_choice_of({"type": "tool", "name": "x"}, offered)
    alone = tools_of([{"type": kind, "name": "x"}])
    assert alone.tools == ()
    assert tool_choice_of({"type": "auto"}, alone) == ("auto", None, [])
    with pytest.raises(InvalidParams, match="needs tools, and all of tools were left out"):
        tool_choice_of({"type": "any"}, alone)


def test_unknown_members_of_many_tools_are_compared_with_known_names_for_the_first_tools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each comparison takes a while, and responses show 32 warnings."""
    num_compared = 0

    def counted(*args: Any, **options: Any) -> list[str]:
        nonlocal num_compared
        num_compared += 1
        return get_close_matches(*args, **options)

    get_close_matches = difflib.get_close_matches
    monkeypatch.setattr(difflib, "get_close_matches", counted)
    offered = tools_of([{**TOOL, "name": f"t{index}", "colour": 1} for index in range(1000)])
    assert num_compared == 64
    assert len(offered.tools) == len(offered.warnings) == 1000
    assert offered.warnings[63].startswith("tools[63].colour is not a field")
    assert offered.warnings[64] == "tools[64]: unknown members were ignored"


def test_a_toolset_without_a_name_is_left_out() -> None:
    """Like names of MCP servers."""
    assert tools_of([{"type": "mcp_toolset", "mcp_server_name": "s"}]).left_out == {"mcp_toolset": "mcp_toolset"}


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
    assert tool_choice_of(choice, OfferedTools((Tool("weather"),))) == (*expected, [])


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
    ],
)
def test_a_malformed_tool_choice_is_refused(choice: Any, tools: Any, place: str) -> None:
    """With its field."""
    with pytest.raises(InvalidParams, match=place):
        tool_choice_of(choice, OfferedTools(tuple(tools)))


def test_an_unknown_member_of_a_tool_choice_is_named() -> None:
    """And ignored."""
    choice, parallel, (warning,) = tool_choice_of({"type": "auto", "parallel": True, "name": None}, OfferedTools())
    assert (choice, parallel) == ("auto", None)
    assert warning.startswith("tool_choice.parallel is not a field")


def test_arguments_of_a_call_are_json_of_its_input() -> None:
    """Whatever it has."""
    given = {"a": [1, 2.5, None, True, {"b": 'x"\n'}], "ü": {}}
    message, _ = converted(assistant({**USE, "input": given}), user(result()))
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == given


def test_messages_are_joined_in_place() -> None:
    """Without a copy of the joined text so far, which would take quadratic time."""
    joined: list[dict[str, Any]] = []
    _append(joined, {"role": "assistant", "content": [], "tool_calls": [], "reasoning_content": []})
    lists = [joined[0][name] for name in ("content", "tool_calls", "reasoning_content")]
    for number in range(3):
        more = {"content": f"{number}", "tool_calls": [number], "reasoning_content": ["Hm."]}
        _append(joined, {"role": "assistant", **more})
    assert [id(joined[0][name]) for name in ("content", "tool_calls", "reasoning_content")] == list(map(id, lists))
    assert list(map(len, lists)) == [3, 3, 3]


def test_too_many_messages_are_refused_before_any_is_read() -> None:
    """Also if consecutive texts would be joined."""
    with pytest.raises(InvalidParams, match="messages must have at most"):
        conversation_of([None] * (MAX_MESSAGES + 1), None, request_media())
    most = conversation_of([{"role": "user", "content": "x"}] * MAX_MESSAGES, None, request_media())
    assert [len(message["content"]) for message in most.messages] == [MAX_MESSAGES]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}


def seen(*messages: Any) -> list[dict[str, Any]]:
    """The conversation with its images."""
    return conversation_of(list(messages), None, request_media()).messages


def test_images_stand_in_order_with_texts() -> None:
    """Also in the results of tools, which come first."""
    (asked,) = seen(user({"type": "text", "text": "a"}, IMAGE, {"type": "text", "text": "b"}))
    assert [getattr(part, "name", "text") for part in asked["content"]] == [
        "text",
        "messages[0].content[1].source.data",
        "text",
    ]
    shown = result(content=[{"type": "text", "text": "c"}, IMAGE], is_error=True)
    _, answered, more = seen(assistant(USE), user(IMAGE, shown))
    assert answered["role"] == "tool"
    assert [getattr(part, "name", part) for part in answered["content"]] == [
        {"type": "text", "text": "Error:"},
        {"type": "text", "text": "c"},
        "messages[1].content[1].content[1].source.data",
    ]
    assert [part.name for part in more["content"]] == ["messages[1].content[0].source.data"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "source must be an object"),
        ({}, "source.type must be"),
        ({"type": "file", "file_id": "x"}, "keeps no files"),
        ({"type": "base64", "data": DATA}, "source.media_type is missing"),
        ({"type": "base64", "media_type": "image/jpeg", "data": DATA}, "source.data: the data are a PNG"),
        ({"type": "base64", "media_type": "image/png"}, "source.data must be"),
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


def test_images_of_the_assistant_are_not_shown() -> None:
    """Models write none, and templates have no place for them."""
    assert converted(assistant(IMAGE, text("A fox."))) == [assistant(text("[image omitted]"), text("A fox."))]
    assert warned(assistant(IMAGE))[0].startswith("messages[0].content[0]: images in messages of the assistant")


def test_many_changes_of_tools_take_linear_time() -> None:
    """A body has room for hundreds of thousands."""
    changes = [ToolChange("x", f"tool{number}", {**TOOL, "name": f"tool{number}"}, False) for number in range(20_000)]
    began = time.perf_counter()
    assert len(tools_of([TOOL], [*changes, *changes]).tools) == 20_001
    assert time.perf_counter() - began < 10
