"""Tools whose schemas cannot be enforced whole, in every API that takes tools."""

from __future__ import annotations

from collections.abc import Iterator
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


@pytest.fixture(scope="module")
def world() -> Iterator[OpenAIServer]:
    with OpenAIServer() as world:
        yield world


@pytest.mark.parametrize("dialect", BODIES)
def test_a_keyword_that_no_grammar_can_have_is_relaxed_with_a_warning(world: OpenAIServer, dialect: str) -> None:
    """The request is served, and the warning names the tool and the part of its schema."""
    path, body = BODIES[dialect]
    with httpx.Client(base_url=world.url, timeout=60) as client:
        response = client.post(path, json={"model": "tale", **body})
    assert response.status_code == 200, response.text
    (warning,) = [one for one in response.json()["warnings"] if "tools[0]" in one]
    assert warning.startswith("tools[0] (run): arguments may violate #/properties/script/not: ")


def test_what_cannot_be_enforced_in_a_response_format_is_refused(world: OpenAIServer) -> None:
    """Only tools are relaxed."""
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCRIPT}}
    body = {"model": "tale", "messages": MESSAGES, "max_tokens": 4, "response_format": schema}
    with httpx.Client(base_url=world.url, timeout=60) as client:
        response = client.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")
    assert "#/properties/script/not: this keyword is not enforced" in response.json()["error"]["message"]
