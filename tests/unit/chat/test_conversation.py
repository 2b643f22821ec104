"""Which messages a chat may have, and the errors for others."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.chat.conversation import ROLES, parse_messages
from paceline.chat.message_parts import IgnoredMembers
from paceline.errors import InvalidParams, InvalidType, Unsupported


def call_of(name: object, arguments: object = "{}", call_id: object = "c1", kind: str = "function") -> dict[str, Any]:
    """Return an assistant's message that calls a tool."""
    call = {"id": call_id, "type": kind, "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def test_texts_and_text_parts_become_plain_mappings() -> None:
    """A conversation comes out with nothing but role, content and name."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [], "refusal": None, "annotations": []},
    ]
    assert parse_messages(messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}], "name": "Ann"},
        {"role": "assistant", "content": ""},
    ]


def test_a_refusal_counts_as_assistant_content() -> None:
    """A refusal is the content of its message, as a field and as a part."""
    part = {"type": "refusal", "refusal": "No."}
    parsed = parse_messages(
        [{"role": "assistant", "refusal": "No."}, {"role": "assistant", "content": [part], "refusal": "x"}]
    )
    assert parsed[0]["content"] == "No."
    assert parsed[1]["content"] == [{"type": "text", "text": "No."}]


def test_the_callers_objects_are_left_alone() -> None:
    """The result shares nothing with the input."""
    part = {"type": "text", "text": "a"}
    message = {"role": "user", "content": [part]}
    (parsed,) = parse_messages([message])
    parsed["content"][0]["text"] = "b"
    assert message == {"role": "user", "content": [{"type": "text", "text": "a"}]}


@pytest.mark.parametrize("role", [role for role in ROLES if role not in ("tool", "function")] + ["ipython", "critic_2"])
def test_roles_are_plain_words(role: str) -> None:
    """Models may know more roles than OpenAI does."""
    assert parse_messages([{"role": role, "content": "x"}])[0]["role"] == role


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hello", "messages must be a list of messages, such as .*, not str"),
        (None, "messages must be a list of messages, such as .*, not NoneType"),
        ({"role": "user"}, "messages must be a list of messages, such as .*, not dict"),
        ([], "messages must have at least one"),
        (["hello"], r"messages\[0\] must be an object with role and content, not str"),
        ([{"content": "x"}], r"messages\[0\]\.role is missing"),
        ([{"role": 5, "content": "x"}], r"messages\[0\]\.role must be a str, not 5"),
        ([{"role": "", "content": "x"}], r"messages\[0\]\.role must be one of 'system'.*, not ''"),
        ([{"role": "a|>b", "content": "x"}], r"messages\[0\]\.role must be one of .*, or a plain word, not 'a\|>b'"),
        ([{"role": "user\n", "content": "x"}], r"messages\[0\]\.role must be"),
        ([{"role": "user"}], r"messages\[0\]\.content is missing"),
        ([{"role": "assistant"}], r"messages\[0\]\.content is missing"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content is missing"),
        ([{"role": "user", "content": None}, {"role": "assistant"}], r"messages\[0\]\.content is missing"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content must be a text or .*, not int"),
        ([{"role": "user", "content": {"text": "x"}}], r"messages\[0\]\.content must be .*, not dict"),
        ([{"role": "user", "content": []}], r"messages\[0\]\.content is missing or empty, as in every message; give a text "),
        ([{"role": "user", "content": "\ud800"}], r"messages\[0\]\.content has a lone surrogate \(U\+D800\)"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content\[0\] must be an object with type and text, not str"),
        ([{"role": "user", "content": [{"text": "x"}]}], r"messages\[0\]\.content\[0\]\.type must be one of 'text', "),
        ([{"role": "user", "content": [{"type": "txt"}]}], r"content\[0\]\.type must be .*; did you mean 'text'\?"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\]\.text is missing"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], r"content\[0\]\.text must be a str, not None"),
        ([{"role": "assistant", "content": [{"type": "thinking"}]}], r"content\[0\]\.thinking is missing"),
        ([{"role": "assistant", "content": [{"type": "thinking", "thinking": [{"type": "thinking", "thinking": []}]}]}],
         r"content\[0\]\.thinking\[0\]\.type must be 'text', not 'thinking'"),
        ([{"role": "user", "content": "x", "name": 5}], r"messages\[0\]\.name must be a str"),
        ([{"role": "user", "content": "x"}, 5], r"messages\[1\] must be an object"),
    ],
)  # fmt: skip
def test_a_wrong_message_is_refused_and_its_place_named(messages: object, words: str) -> None:
    """Every error names its place in the messages."""
    with pytest.raises(InvalidParams, match=words):
        parse_messages(messages)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (call_of("f", kind="mcp"), r"messages\[0\]\.tool_calls\[0\]\.type: calls of the type 'mcp'"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, r"content\[0\]\.type: parts"),
    ],
)  # fmt: skip
def test_what_is_known_but_not_supported_is_refused(message: object, words: str) -> None:
    """Nothing of a message is dropped in silence."""
    with pytest.raises(Unsupported, match=words):
        parse_messages([message])


def test_tool_calls_and_their_results_become_plain_mappings() -> None:
    """Arguments are text, whether they came as text or as an object; reasoning has one name; function is tool."""
    result = {"role": "tool", "tool_call_id": "c1", "content": "21"}
    messages = [
        {"role": "user", "content": "x"},
        {**call_of("f", {"city": "Köln"}), "reasoning": "hm"},
        result,
        call_of("g", '{"a": 1}', call_id=None),
        {"role": "function", "name": "g", "content": "22"},
    ]
    parsed = parse_messages(messages)
    assert parsed[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Köln"}'}}],
    }
    assert parsed[2] == result
    assert parsed[3]["tool_calls"] == [{"type": "function", "function": {"name": "g", "arguments": '{"a": 1}'}}]
    assert parsed[4] == {"role": "tool", "name": "g", "content": "22"}


@pytest.mark.parametrize("arguments", ["", " ", None, "{}", {}])
def test_calls_without_arguments_have_an_empty_object(arguments: object) -> None:
    """However a client spells them; a type of null is that of a function, and a content without parts is empty."""
    message = call_of("f", arguments)
    message["tool_calls"][0]["type"] = None
    parsed = parse_messages([{**message, "content": []}])
    assert parsed[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert parsed[0]["content"] == ""


def test_a_result_may_name_a_call_that_came_without_an_id() -> None:
    """Some models give calls no ids, and clients make up their own."""
    result = {"role": "tool", "tool_call_id": "made-up", "content": "5"}
    assert parse_messages([call_of("f", call_id=None), result])[1] == result


HELPER = {
    "content": None,
    "refusal": None,
    "role": "assistant",
    "annotations": [],
    "audio": None,
    "function_call": None,
    "tool_calls": [
        {
            "id": "c1",
            "index": 0,
            "type": "function",
            "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}},
        }
    ],
    "parsed": None,
    "reasoning": None,
    "reasoning_details": [{"type": "reasoning.text", "text": "hm"}],
    "provider_specific_fields": {"a": 1},
    "name": None,
}


def test_messages_of_sdks_and_providers_are_taken_without_a_word() -> None:
    """They have members without meaning for a model; the message is the same without them."""
    ignored = IgnoredMembers()
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}, "annotations": []}
    messages = [{"role": "user", "content": [part], "cache_control": {"type": "ephemeral"}, "id": "m1"}, HELPER]
    assert parse_messages(messages, ignored=ignored) == [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
    ]
    assert ignored.warnings() == []


def test_unknown_members_are_reported_once_for_each_kind() -> None:
    """The first place of each is named; null counts as absent, and there are 17 sentences at most."""
    ignored = IgnoredMembers()
    part = {"type": "text", "text": "x", "a": 1}
    message = {"role": "user", "content": [part], "a": 2, "b": None}
    assert parse_messages([message, message], ignored=ignored)[0] == {
        "role": "user",
        "content": [{"type": "text", "text": "x"}],
    }
    assert ignored.warnings() == [
        "messages[0].a has no effect here and was ignored",
        "messages[0].content[0].a has no effect here and was ignored",
    ]
    parse_messages([{"role": "user", "content": "x", **{f"m{i}": 1 for i in range(50)}}], ignored=ignored)
    assert len(ignored.warnings()) == 17
    assert ignored.warnings()[-1] == "36 more members have no effect here and were ignored"


def test_the_older_form_of_a_call_is_a_call() -> None:
    """Also a custom call, with text as its input."""
    older = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    custom = {"id": "c1", "type": "custom", "custom": {"name": "g", "input": "x"}}
    parsed = parse_messages([older, {"role": "assistant", "tool_calls": [custom]}])
    assert parsed[0]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert parsed[1]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "g", "arguments": '{"input": "x"}'}}
    ]


def test_parts_of_other_apis_are_texts() -> None:
    """Thinking among an assistant's parts is its thinking, unless the message says it elsewhere."""
    texts = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b", "logprobs": []}]
    thinking = [
        {"type": "thinking", "thinking": "c", "signature": "s"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "d"}, {"type": "text", "text": "e"}]},
        {"type": "reasoning", "text": "f"},
    ]
    known = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    parsed = parse_messages(
        [
            {"role": "user", "content": texts},
            {"role": "assistant", "content": [*thinking, *texts]},
            {"role": "assistant", "content": thinking[:1]},
            {"role": "assistant", "content": thinking, "thinking": "x"},
        ]
    )
    assert parsed == [
        {"role": "user", "content": known},
        {"role": "assistant", "content": known, "reasoning_content": "c\n\nde\n\nf"},
        {"role": "assistant", "content": "", "reasoning_content": "c"},
        {"role": "assistant", "content": "", "reasoning_content": "x"},
    ]


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}, {"content": ""}])
def test_contents_that_are_missing_or_null_are_empty(role: str, content: dict[str, Any]) -> None:
    """In every role, beside a message that says something."""
    parsed = parse_messages([{"role": role, **content}, {"role": "user", "content": "x"}])
    assert parsed == [{"role": role, "content": ""}, {"role": "user", "content": "x"}]


def test_results_whose_calls_are_gone_are_kept() -> None:
    """Clients cut histories anywhere; the template decides how they are shown."""
    results = [{"role": "tool", "tool_call_id": "c2", "content": "5"}, {"role": "tool", "content": "6"}]
    assert parse_messages([*results, call_of("f"), *results])[0:2] == results


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{**call_of("f"), "role": "user", "content": "x"}], r"messages\[0\]\.tool_calls is for messages of the role assistant"),
        ([{**call_of("f"), "tool_calls": {"a": 1}}], r"messages\[0\]\.tool_calls must be a list of tool calls, not dict"),
        ([{**call_of("f"), "tool_calls": ["f"]}], r"messages\[0\]\.tool_calls\[0\] must be an object with id, type and function"),
        ([{"role": "user", "content": "x", "function_call": {"name": "f"}}], r"messages\[0\]\.function_call is for messages of"),
        ([{"role": "assistant", "function_call": "f"}], r"messages\[0\]\.function_call must be an object with name"),
        ([call_of(5)], r"messages\[0\]\.tool_calls\[0\]\.function\.name must be a str"),
        ([call_of("f", 5)], r"messages\[0\]\.tool_calls\[0\]\.function\.arguments must be a str"),
        ([call_of("f", {"a": float("inf")})], r"function\.arguments\.a must be "),
    ],
)  # fmt: skip
def test_a_wrong_tool_call_is_refused_and_its_place_named(messages: object, words: str) -> None:
    """Every error names its place in the messages."""
    with pytest.raises(InvalidParams, match=words):
        parse_messages(messages)


def test_the_error_names_the_field_it_was_asked_for() -> None:
    """A route may call its field otherwise."""
    with pytest.raises(InvalidType, match=r"prompt\[0\] must be an object"):
        parse_messages([5], "prompt")
