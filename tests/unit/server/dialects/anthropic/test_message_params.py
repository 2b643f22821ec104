"""From the bodies of Anthropic's requests to the parts of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import ValidationError
from tests.media_requests import request_media

from paceline.chat import template_kwargs
from paceline.errors import InvalidParams
from paceline.params import SamplingParams
from paceline.sampling_table import API_DEFAULTS
from paceline.server.api_errors import ApiException
from paceline.server.dialects.anthropic.anthropic_routes import (
    MessageBody,
    ParsedMessages,
    TokenCountBody,
    error_body,
    parse_message_request,
)

MESSAGES = [{"role": "user", "content": "Hello"}]


def variables(given: Mapping[str, Any], effort: str | None) -> dict[str, Any]:
    return template_kwargs({"style": "server's", **given}, effort)


def parsed(*, strict: bool = False, **body: Any) -> ParsedMessages:
    read = MessageBody.model_validate({"messages": MESSAGES, "max_tokens": 9, **body})
    base = SamplingParams(**API_DEFAULTS["chat"])
    return parse_message_request(read, base, variables, "auto", request_media(), strict=strict)


def test_a_small_body_has_anthropics_defaults() -> None:
    """Temperature 1, and nothing else; max_tokens is the request's."""
    found = parsed()
    params = found.params
    assert (params.max_tokens, params.temperature, params.top_p, params.stop) == (9, 1, 1, ())
    assert (found.warnings, found.shows_thinking, found.chat.kwargs) == ((), True, {"style": "server's"})


def test_sampling_is_the_requests() -> None:
    """Under Anthropic's names."""
    params = parsed(temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["a", "b"]).params
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (0.5, 0.9, 7, ("a", "b"))


def test_max_tokens_is_needed_but_for_counting() -> None:
    """As Anthropic has it."""
    with pytest.raises(ValidationError, match="max_tokens"):
        MessageBody.model_validate({"messages": MESSAGES})
    counted = TokenCountBody.model_validate({"messages": MESSAGES, "system": "x"})
    assert len(parse_message_request(counted, SamplingParams(), variables, "auto", request_media()).conversation) == 2


@pytest.mark.parametrize(
    ("thinking", "expected", "is_shown"),
    [
        ({"type": "enabled", "budget_tokens": 2000}, True, True),
        ({"type": "adaptive", "display": "omitted"}, True, False),
        ({"type": "enabled", "budget_tokens": 5, "display": "summarized"}, True, True),
        ({"type": "between_tools", "display": "updates"}, True, True),
        ({"type": "disabled"}, False, True),
    ],
)
def test_thinking_is_a_variable_of_the_template(thinking: Any, expected: bool, is_shown: bool) -> None:
    """It wins over the request's own variables; without it the template decides."""
    found = parsed(thinking=thinking, chat_template_kwargs={"enable_thinking": not expected, "style": "mine"})
    assert found.chat.kwargs == {"style": "mine", "enable_thinking": expected}
    assert found.shows_thinking is is_shown


def test_a_budget_limits_thinking() -> None:
    """If there is one."""
    assert parsed(thinking={"type": "enabled", "budget_tokens": 7}).chat.thinking_budget == 7
    assert parsed(thinking={"type": "adaptive"}).chat.thinking_budget is None
    assert parsed().chat.thinking_budget is None


def test_output_config_has_effort_and_schema() -> None:
    """The effort reaches the template, the schema constrains the content."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    found = parsed(output_config={"effort": "high", "format": {"type": "json_schema", "schema": schema}})
    assert found.chat.kwargs is not None
    assert found.chat.kwargs["reasoning_effort"] == "high"
    assert found.params.json_schema is not None


def test_the_older_output_format_is_the_format_of_output_config() -> None:
    """The newer one wins."""
    older, newer = ({"type": "json_schema", "schema": {"type": kind}} for kind in ("integer", "boolean"))
    assert parsed(output_format=older).params.json_schema == '{"type": "integer"}'
    assert parsed(output_format=older, output_config={"format": newer}).params.json_schema == '{"type": "boolean"}'


def test_a_keyword_that_is_left_out_is_named_by_the_field_that_has_it() -> None:
    """Also if the other field is set."""
    schema = {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}}
    for body, place in (
        ({"output_format": schema, "output_config": {"effort": "low"}}, "output_format: "),
        ({"output_config": {"format": schema}}, "output_config.format: "),
    ):
        (warning,) = parsed(**body).warnings
        assert warning.startswith(place)


@pytest.mark.parametrize(
    "body",
    [
        {"thinking": {"type": "enabled", "block_binding": {}}},
        {"output_config": {"task_budget": {"type": "tokens", "total": 5}}},
        {"output_config": {"format": {"type": "json_schema", "schema": {}, "name": "x"}}},
        {"tool_choice": {"type": "auto", "order": "first"}},
        {"tools": [{"name": "x", "input_schema": {}, "version": 2}]},
    ],
    ids=lambda body: next(iter(body)),
)
def test_unknown_members_of_options_are_named_in_a_warning(body: dict[str, Any]) -> None:
    """And change nothing."""
    (warning,) = parsed(**body).warnings
    assert warning.startswith(next(iter(body)))
    assert "ignored" in warning


def test_the_start_of_a_kept_conversation_is_served() -> None:
    """With a warning, since nothing is kept."""
    (warning,) = parsed(thread={"type": "create"}).warnings
    assert warning.startswith("thread: this server keeps no conversations")
    assert parsed(thread=None).warnings == ()


def test_the_continuation_of_a_kept_conversation_is_refused_so_that_all_of_it_is_sent() -> None:
    """With the code that has Anthropic's packages send it."""
    with pytest.raises(ApiException) as refusal:
        parsed(thread={"type": "continue", "previous_message_id": "msg_1"})
    error = refusal.value.api_error
    body = error_body(error)["error"]
    assert (error.status, body["type"], body["details"]) == (404, "not_found_error", {"error_code": "thread_not_found"})


def test_warnings_of_all_parts_of_a_body_are_collected() -> None:
    """Each begins with its place."""
    content = [{"type": "container_upload", "file_id": "f"}, {"type": "text", "text": "Hi"}]
    tools = [{"type": "bash_20250124", "name": "bash"}]
    found = parsed(metadata={"user_id": "u"}, messages=[{"role": "user", "content": content}], tools=tools)
    assert [warning.split()[0].rstrip(":") for warning in found.warnings] == [
        "metadata",
        "messages[0].content[0]",
        "tools[0]",
    ]
    assert found.chat.tools == ()


def test_fields_that_are_ignored_have_a_warning() -> None:
    """Known fields without effect and unknown fields, members of objects included."""
    found = parsed(
        metadata={"user_id": "u"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        mcp_servers=[],
        container="c",
        thred={"id": 1},
        max_token=5,
        other=None,
        thinking={"type": "adaptive", "depth": 1},
        output_config={"effort": "high", "colour": "red"},
    )
    assert [warning.split()[0] for warning in found.warnings] == [
        "metadata", "service_tier", "container", "thred", "max_token", "output_config.colour", "thinking.depth",
    ]  # fmt: skip
    assert found.warnings[4].endswith("did you mean max_tokens?")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"max_token": 5}, "max_token is not a field of this endpoint; did you mean max_tokens?"),
        ({"x" * 500: 5}, "is not a field of this endpoint; /docs lists the fields"),
        ({"thinking": {"type": "adaptive", "budget": 1}}, "thinking.budget is not a field"),
        (
            {"output_config": {"efort": "high"}},
            "output_config.efort is not a field of this endpoint; did you mean effort?",
        ),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}, "x": 1}}}, "output_config.format.x is not"),
    ],
)
def test_unknown_fields_are_refused_where_the_server_is_strict(body: dict[str, Any], said: str) -> None:
    """With the nearest name. Known fields without effect are taken."""
    assert len(parsed(strict=True, metadata={"user_id": "u"}, container="c").warnings) == 2
    with pytest.raises(ApiException) as refusal:
        parsed(strict=True, **body)
    assert said in refusal.value.api_error.message
    assert (refusal.value.api_error.status, refusal.value.api_error.code) == (400, "unknown_parameter")


def test_values_that_local_clients_send_are_taken() -> None:
    """-1 is no limit, an empty stop sequence ends nothing, and whole floats are integers."""
    found = parsed(max_tokens=-1, stop_sequences=["", "x"], temperature=2.5, top_k=40.0)
    assert (found.params.max_tokens, found.params.stop) == (None, ("x",))
    assert (found.params.temperature, found.params.top_k) == (2.5, 40)


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"stop_sequences": "x"}, "stop_sequences must be a list"),
        ({"stop_sequences": [5]}, r"stop_sequences\[0\]"),
        ({"stop_sequences": ["x"] * 300}, "stop_sequences must have at most 256"),
        ({"thinking": True}, "thinking must be an object"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "display": "loud"}}, "thinking.display"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100.5}}, "thinking.budget_tokens"),
        ({"output_config": []}, "output_config must be an object"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_format": {"type": "xml"}}, "output_format.type"),
        ({"thread": {"type": "fork"}}, "thread.type"),
        ({"system": 5}, "system must be a text or a list of blocks"),
        ({"system": [{"type": "text", "text": 5}]}, r"system\[0\].text"),
    ],
)
def test_malformed_options_are_refused_with_their_field(body: dict[str, Any], place: str) -> None:
    """In Anthropic's terms."""
    with pytest.raises(InvalidParams, match=place):
        parsed(**body)
