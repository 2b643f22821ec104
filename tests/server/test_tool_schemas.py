"""Tools with schemas that cannot be enforced whole, in every API that takes tools."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.server.openai_world import OpenAIServer

pytestmark = pytest.mark.native

SCRIPT = {
    "type": "object",
    "properties": {"script": {"type": "string", "maxLength": 524_288, "not": {"const": "x"}}},
    "required": ["script"],
}
MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]
FUNCTION = {"name": "run", "description": "Runs it.", "parameters": SCRIPT}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "openai-chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 4, "tools": [{"type": "function", "function": FUNCTION}]},
    ),
    "responses": (
        "/v1/responses",
        {"input": MESSAGES, "max_output_tokens": 4, "tools": [{"type": "function", **FUNCTION}]},
    ),
    "anthropic": (
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": 4, "tools": [{"name": "run", "input_schema": SCRIPT}]},
    ),
    "ollama": (
        "/api/chat",
        {
            "messages": MESSAGES,
            "stream": False,
            "options": {"num_predict": 4},
            "tools": [{"type": "function", "function": FUNCTION}],
        },
    ),
}


@pytest.mark.parametrize("dialect", BODIES)
def test_a_keyword_that_no_grammar_can_have_is_relaxed_with_a_warning(world: OpenAIServer, dialect: str) -> None:
    """The request is served, and the warning names the tool and the part of its schema."""
    path, body = BODIES[dialect]
    with httpx.Client(base_url=world.url, timeout=60) as client:
        response = client.post(path, json={"model": "tale", **body})
    assert response.status_code == 200, response.text
    (warning,) = [warning for warning in response.json()["warnings"] if "tools[0]" in warning]
    assert warning.startswith("tools[0] (run): arguments may violate #/properties/script/not: ")


@pytest.mark.parametrize("dialect", ["openai-chat", "responses", "anthropic"])
def test_counts_of_tokens_have_the_warnings_of_the_request(world: OpenAIServer, dialect: str) -> None:
    """About the tools and about the conversation."""
    path, body = BODIES[dialect]
    field, limits = ("input" if dialect == "responses" else "messages"), ("max_tokens", "max_output_tokens")
    asked = {name: value for name, value in body.items() if name not in limits}
    asked[field] = [{**MESSAGES[0], "moood": "sad"}]
    count = {"openai-chat": "/input_tokens", "responses": "/input_tokens", "anthropic": "/count_tokens"}[dialect]
    with httpx.Client(base_url=world.url, timeout=60) as client:
        counted = client.post(path + count, json={"model": "tale", **asked}).json()
        generated = client.post(path, json={"model": "tale", **body, field: asked[field]}).json()
    assert counted["warnings"] == generated["warnings"]
    assert counted["input_tokens"] > 0
    for words in ("moood", "tools[0] (run): arguments may violate #/properties/script/not: "):
        assert sum(words in warning for warning in counted["warnings"]) == 1


@pytest.mark.parametrize("dialect", ["openai-chat", "ollama"])
def test_unknown_members_of_tools_have_a_warning(world: OpenAIServer, dialect: str) -> None:
    """One for each kind; members that clients send, and null, have none."""
    path, body = BODIES[dialect]
    function = {"name": "run", "input_schema": {}, "strict": True, "examples": None}
    tools = [
        {"type": "function", "function": function, "cache_control": {"type": "ephemeral"}, "x": 1},
        {"type": "function", "function": {**function, "name": "other"}},
    ]
    with httpx.Client(base_url=world.url, timeout=60) as client:
        response = client.post(path, json={"model": "tale", **body, "tools": tools})
    assert response.status_code == 200, response.text
    assert [warning for warning in response.json()["warnings"] if "tools" in warning] == [
        "tools[0].x has no effect here and was ignored",
        "tools[0].function.input_schema has no effect here and was ignored",
    ]


def test_what_cannot_be_enforced_in_a_response_format_is_refused(world: OpenAIServer) -> None:
    """Only tools are relaxed."""
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCRIPT}}
    body = {"model": "tale", "messages": MESSAGES, "max_tokens": 4, "response_format": schema}
    with httpx.Client(base_url=world.url, timeout=60) as client:
        response = client.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")
    assert "#/properties/script/not: this keyword is not enforced" in response.json()["error"]["message"]


ANSWER = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
FORCED: dict[str, tuple[str, dict[str, Any]]] = {
    "openai-chat": (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 200,
            "tools": [{"type": "function", "function": {"name": "run"}}],
            "tool_choice": "any",
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}},
        },
    ),
    "responses": (
        "/v1/responses",
        {
            "input": MESSAGES,
            "max_output_tokens": 200,
            "tools": [{"type": "function", "name": "run", "parameters": None}],
            "tool_choice": {"type": "function", "name": "run"},
            "text": {"format": {"type": "json_schema", "name": "a", "schema": ANSWER}},
        },
    ),
}


@pytest.mark.parametrize("dialect", FORCED)
def test_a_call_that_is_forced_wins_over_a_schema_of_the_content(world: OpenAIServer, dialect: str) -> None:
    """With a warning; instructor sends both."""
    path, body = FORCED[dialect]
    with httpx.Client(base_url=world.url, timeout=60) as client:
        found = client.post(path, json={"model": "tale", "temperature": 0, **body}).json()
    assert any("the schema was left out, since tool_choice demands a call" in warning for warning in found["warnings"])
    if dialect == "responses":
        assert [item["name"] for item in found["output"] if item["type"] == "function_call"] == ["run"]
    else:
        assert [call["function"]["name"] for call in found["choices"][0]["message"]["tool_calls"]] == ["run"]


@pytest.mark.parametrize(
    "empty",
    [
        {"grammar": ""},
        {"regex": ""},
        {"lark": ""},
        {"guided_grammar": ""},
        {"guided_json": ""},
        {"guided_choice": []},
        {"structured_outputs": {"grammar": ""}},
        {"grammar": "", "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}},
    ],
    ids=str,
)
def test_an_empty_constraint_is_none(world: OpenAIServer, empty: dict[str, Any]) -> None:
    """Clients send fields that their users left blank."""
    body = {"model": "tale", "messages": MESSAGES, "max_tokens": 40, "temperature": 0, **empty}
    with httpx.Client(base_url=world.url, timeout=60) as client:
        response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    content = response.json()["choices"][0]["message"]["content"]
    assert content.lstrip().startswith("{") == ("response_format" in empty)
