"""Bodies of responses as chats: tools, choices, structure, parameters, warnings."""

from __future__ import annotations

from typing import Any

import pytest
from tests.media_requests import request_media
from tests.unit.server.dialects.llama_server.letters import letters

from paceline.chat import Turn
from paceline.errors import InvalidParams
from paceline.params import SamplingParams
from paceline.sampling_table import API_DEFAULTS
from paceline.server.api_errors import ApiException
from paceline.server.dialects.responses.input_items import parse_items
from paceline.server.dialects.responses.responses_request import (
    LOGPROBS,
    ResponsesBody,
    ResponsesRequest,
    parse_responses,
    truncations,
)

BASE = SamplingParams(**API_DEFAULTS["chat"])
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA}


def parsed(body: Any = None, **options: Any) -> ResponsesRequest:
    read = ResponsesBody.model_validate({"input": "Hello.", **(body or {})})
    return parse_responses(read, BASE, {}, letters(), **options)


def test_parameters_have_their_names_of_this_api() -> None:
    """Other fields are as in chat completions."""
    params = parsed({"max_output_tokens": 7, "temperature": 0.5, "top_k": 3, "stop": "x", "seed": 4}).parsed.params
    assert (params.max_tokens, params.temperature, params.top_k, params.stop, params.seed) == (7, 0.5, 3, ("x",), 4)
    assert parsed().parsed.params == BASE
    assert parsed({"max_tokens": 7}).parsed.params.max_tokens == 7
    both = parsed({"max_tokens": 7, "max_output_tokens": 8}).parsed
    assert both.params.max_tokens == 8
    assert both.warnings == ("max_tokens was ignored, since there is max_output_tokens as well",)
    assert parsed({"max_output_tokens": -1}).parsed.params.max_tokens is None


def test_log_probabilities_need_include() -> None:
    """top_logprobs alone is a warning."""
    assert parsed({"include": [LOGPROBS]}).parsed.params.logprobs == 0
    assert parsed({"include": [LOGPROBS], "top_logprobs": 5}).parsed.params.logprobs == 5
    alone = parsed({"top_logprobs": 5}).parsed
    assert alone.params.logprobs is None
    assert [warning.split()[0] for warning in alone.warnings] == ["top_logprobs"]
    assert parsed({"top_logprobs": 0}).parsed.warnings == ()


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, SamplingParams(json_schema={"type": "object"}).json_schema),
        ({"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}, SamplingParams(json_schema=SCHEMA).json_schema),
    ],
)  # fmt: skip
def test_text_format_is_a_schema(form: Any, schema: Any) -> None:
    """It stands flat here."""
    assert parsed({"text": {"format": form}}).parsed.params.json_schema == schema


@pytest.mark.parametrize(
    ("form", "place"),
    [
        ({}, "text.format.type"),
        ({"type": "xml"}, "text.format.type"),
        ({"type": "json_schema", "name": "x"}, "text.format.schema"),
        ({"type": "json_schema", "name": 5, "schema": SCHEMA}, "text.format.name"),
        ({"type": "json_schema", "strict": 5, "schema": SCHEMA}, "text.format.strict"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "text.format.schema"),
    ],
)
def test_a_malformed_text_format_is_refused_by_its_place(form: Any, place: str) -> None:
    """Members of chat completions' response_format among them."""
    with pytest.raises(InvalidParams, match=f"^{place}"):
        parsed({"text": {"format": form}})


def test_tools_of_the_body_and_of_its_items_are_offered() -> None:
    """With warnings about omitted tools, and functions for tools of namespaces."""
    added = {
        "type": "additional_tools",
        "role": "developer",
        "tools": [{"type": "namespace", "name": "crm", "tools": [TOOL]}],
    }
    said = {"role": "user", "content": "Hello."}
    asked = parsed({"input": [said, added], "tools": [TOOL, {"type": "web_search"}]})
    assert [tool.name for tool in asked.tools.functions] == ["weather", "crm__weather"]
    assert asked.chat_options.tools == asked.tools.functions
    assert [warning.partition(":")[0] for warning in asked.parsed.warnings] == ["tools[1]"]
    assert [message["role"] for message in asked.messages(request_media())] == ["user"]
    found = {"type": "tool_search_output", "call_id": "c1", "tools": [{**TOOL, "name": "mail"}]}
    later = parsed(earlier=[*asked.items, *parse_items([found])])
    assert [tool.name for tool in later.tools.functions] == ["crm__weather", "mail"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": [{"role": "user", "content": "x", "tag": 1}]}, "input[0].tag"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "tag": 1}]}]},
            "input[0].content[0].tag",
        ),
        ({"tools": [{**TOOL, "tag": 1}]}, "tools[0].tag"),
    ],
)
def test_unknown_members_are_refused_on_request(body: dict[str, Any], field: str) -> None:
    """By --strict-fields; members that are known and have no effect are not."""
    assert len(parsed(body).parsed.warnings) == 1
    with pytest.raises(ApiException) as caught:
        parsed(body, strict=True)
    error = caught.value.api_error
    assert (error.code, error.param) == ("unknown_parameter", next(iter(body)))
    assert error.message.startswith(f"{field} is not a field")
    known = {"input": [{"role": "user", "content": "x", "id": "msg_1"}], "tools": [{**TOOL, "output_schema": {}}]}
    assert len(parsed(known, strict=True).parsed.warnings) == 1


def test_warnings_about_an_input_are_limited() -> None:
    """However many members its items have that are not known."""
    many = {"role": "user", "content": "x", **{f"m{number}": 1 for number in range(500)}}
    warnings = parsed({"input": [many]}).parsed.warnings
    assert len(warnings) == 33
    assert warnings[-1] == "and 468 more warnings"


def test_the_number_of_further_warnings_counts_fields_and_items() -> None:
    """Unknown samplers, unknown members of items, and a tool that is left out are counted together."""
    items = [{"role": "user", "content": "x", f"member{index}": 1} for index in range(50)]
    body = {"input": items, "samplers": [f"s{index}" for index in range(100)], "tools": [{"type": "web_search"}]}
    warnings = parsed(body).parsed.warnings
    assert (len(warnings), warnings[-1]) == (33, f"and {50 + 100 + 1 - 32} more warnings")


def test_reasoning_is_a_variable_of_the_template() -> None:
    """Its effort; a summary is a warning, since none is made."""
    asked = parsed({"reasoning": {"effort": "high"}, "chat_template_kwargs": {"x": 1}})
    assert asked.chat_options.kwargs == {"x": 1, "reasoning_effort": "high"}
    assert parsed({"reasoning": {"effort": "none"}}).chat_options.kwargs == {"enable_thinking": False}
    assert parsed({"reasoning": {}}).parsed.warnings == ()
    (warning,) = parsed({"reasoning": {"summary": "auto"}}).parsed.warnings
    assert warning.startswith("reasoning.summary")


def test_a_budget_of_thinking_has_llama_servers_names() -> None:
    """-1 leaves it to the server."""
    for name in ("reasoning_budget_tokens", "thinking_budget_tokens"):
        assert [parsed({name: value}).chat_options.thinking_budget for value in (0, 7, -1)] == [0, 7, None]
    assert parsed({"reasoning_budget_message": "Enough."}).chat_options.thinking_message == "Enough."


def test_a_format_and_another_constraint_exclude_each_other() -> None:
    """Each alone is fine."""
    form = {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}
    for other in ({"regex": "a"}, {"response_format": {"type": "json_object"}}, {"guided_choice": ["a", "b"]}):
        assert parsed(other).parsed.params != BASE
        with pytest.raises(InvalidParams, match=r"^text\.format"):
            parsed({**form, **other})
    assert parsed({**form, "response_format": {"type": "text"}}).parsed.params.json_schema is not None


def turn_of(asked: ResponsesRequest) -> Turn:
    return asked.turn(asked.messages(request_media()))


def test_instructions_come_before_everything_and_truncation_behind_the_systems() -> None:
    """The omitted part begins with the user's first message."""
    said = [{"role": "system", "content": "S"}, *({"role": "user", "content": text} for text in "abc")]
    asked = parsed({"input": said, "instructions": "I", "truncation": "auto"})
    messages = asked.messages(request_media())
    assert [message["role"] for message in turn_of(asked).messages] == ["system", "system", "user", "user", "user"]
    assert turn_of(asked).messages[0]["content"] == "I"
    assert asked.body.truncation == "auto"
    assert truncations(messages) == [1, 2]
    left = asked.turn(messages, num_left_out=2).messages
    assert [message["role"] for message in left] == ["system", "system", "user"]
    assert left[-1]["content"] == [{"type": "text", "text": "c"}]


def test_the_conversation_before_comes_first() -> None:
    """And is input enough."""
    earlier = parse_items("Before.")
    assert len(turn_of(parsed(earlier=earlier)).messages) == 2
    body = ResponsesBody.model_validate({"previous_response_id": "x"})
    assert len(turn_of(parse_responses(body, BASE, {}, letters(), earlier=earlier)).messages) == 1
    with pytest.raises(InvalidParams, match="^input must be given"):
        parse_responses(body, BASE, {}, letters())


@pytest.mark.parametrize("body", [{"conversation": {"id": "x"}}, {"prompt": {"id": "x"}}])
def test_fields_that_would_change_the_output_are_refused_by_name(body: dict[str, Any]) -> None:
    """Without them the response would be to another conversation."""
    with pytest.raises(ApiException) as caught:
        parsed(body)
    assert (caught.value.api_error.param, caught.value.api_error.code) == (next(iter(body)), "unsupported")


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"background": True}, "background"),
        ({"background_options": {"x": 1}}, "background_options"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"client_notes": {"x": 1}}, "client_notes"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"shape": "round"}}, "text.shape"),
        ({"reasoning": {"depth": 5}}, "reasoning.depth"),
        ({"text": {"format": {"type": "text", "colour": "red"}}}, "text.format.colour"),
        ({"stream": True, "stream_options": {"events": 1}}, "stream_options.events"),
    ],
)
def test_fields_that_are_ignored_have_a_warning(body: dict[str, Any], name: str) -> None:
    """Unknown fields, members of objects included, and known fields without effect."""
    asked = parsed(body).parsed
    assert asked.params == BASE
    (warning,) = asked.warnings
    assert warning.split()[0] == name


@pytest.mark.parametrize(
    "body", [{"client_notes": {}}, {"text": {"shape": 1}}, {"text": {"format": {"type": "text", "colour": 1}}}]
)
def test_unknown_fields_are_refused_where_the_server_is_strict(body: dict[str, Any]) -> None:
    """By their path."""
    with pytest.raises(ApiException, match="is not a field") as caught:
        parsed(body, strict=True)
    assert caught.value.api_error.code == "unknown_parameter"


def test_fields_that_ask_for_nothing_are_no_matter() -> None:
    """Null, and the defaults."""
    names = (
        "background",
        "conversation",
        "prompt",
        "metadata",
        "tools",
        "text",
        "reasoning",
        "include",
        "truncation",
        "user",
    )
    empty: dict[str, Any] = dict.fromkeys(names)
    assert parsed(empty).parsed.warnings == ()
    defaults = {"background": False, "service_tier": "auto", "truncation": "disabled", "store": False, "tools": []}
    assert parsed(defaults).parsed.warnings == ()


@pytest.mark.parametrize(
    "metadata", [{str(number): "x" for number in range(17)}, {"x" * 65: "x"}, {"x": "y" * 513}, {"x": 1}]
)
def test_metadata_has_bounds(metadata: Any) -> None:
    """OpenAI's."""
    with pytest.raises(InvalidParams, match="^metadata"):
        parsed({"metadata": metadata})
    assert parsed({"metadata": {"x" * 64: "y" * 512}}).parsed.warnings == ()
