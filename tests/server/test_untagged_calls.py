"""Tool calls without tags over every API: whole and streamed, with the flag on and off, and near calls with a warning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.native.test_untagged_calls import BARE, Written
from tests.server.openai_world import OpenAIServer

pytestmark = pytest.mark.native

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "parameters": CITY}
ASKED = [{"role": "user", "content": "How is the weather?"}]
NEAR = BARE.replace("city", "town")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASKED, "tools": [{"type": "function", "function": FUNCTION}]},
    "/v1/responses": {"input": ASKED, "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {"messages": ASKED, "max_tokens": 200, "tools": [{"name": "weather", "input_schema": CITY}]},
    "/api/chat": {"messages": ASKED, "tools": [{"type": "function", "function": FUNCTION}]},
}
NO_CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"tool_choice": "none"},
    "/v1/responses": {"tool_choice": "none"},
    "/v1/messages": {"tool_choice": {"type": "none"}},
    "/api/chat": {"tools": []},
}
EACH = pytest.mark.parametrize("path", BODIES)
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


class Script:
    """The texts that the server's model writes, one for each request."""

    def __init__(self) -> None:
        self.text, self.tokenizer = "", None
        self._written: Any = None

    def __call__(self, token_ids: list[int], logits: Any) -> Any:
        if not token_ids:
            self._written = Written(self.tokenizer, self.text)  # type: ignore[arg-type]
        return self._written(token_ids, logits)


@pytest.fixture(scope="module", params=[True, False], ids=["flag on", "flag off"])
def world(request: pytest.FixtureRequest) -> Iterator[tuple[OpenAIServer, Script, bool]]:
    script = Script()
    settings: dict[str, Any] = {"sampling": {"logits_processors": [script]}, "untagged_calls": request.param}
    with OpenAIServer(**settings) as server:
        script.tokenizer = server.engine.tokenizer
        yield server, script, request.param


def ask(server: OpenAIServer, path: str, *, stream: bool, **more: Any) -> dict[str, Any]:
    """Return content, calls, the reason of the end and warnings of a response, whatever the API."""
    body = {"model": "tale", **BODIES[path], "stream": stream, **more}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    lines = response.text.splitlines() if stream else []
    if path == "/api/chat":
        events = [json.loads(line) for line in lines] or [response.json()]
        assert [event["done"] for event in events] == [False] * (len(events) - 1) + [True]
        calls = [call["function"] for event in events for call in event["message"].get("tool_calls", ())]
        return {
            "content": "".join(event["message"]["content"] for event in events),
            "calls": [(call["name"], call["arguments"]) for call in calls],
            "reason": events[-1]["done_reason"],
            "warnings": events[-1].get("warnings", []),
        }
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ") and line != "data: [DONE]"]
    events = [json.loads(entry) for entry in data]
    return READERS[path](events) if stream else WHOLE[path](response.json())


def whole_chat(body: dict[str, Any]) -> dict[str, Any]:
    (choice,) = body["choices"]
    calls = [call["function"] for call in choice["message"].get("tool_calls", ())]
    return {
        "content": choice["message"]["content"] or "",
        "calls": [(call["name"], json.loads(call["arguments"])) for call in calls],
        "reason": choice["finish_reason"],
        "warnings": body.get("warnings", []),
    }


def streamed_chat(events: list[dict[str, Any]]) -> dict[str, Any]:
    choices = [choice for event in events for choice in event["choices"]]
    deltas = [choice["delta"] for choice in choices]
    calls: list[list[str]] = []
    for call in [call for delta in deltas for call in delta.get("tool_calls", ())]:
        if "name" in call["function"]:
            assert call["id"] and call["index"] == len(calls)
            calls.append([call["function"]["name"], ""])
        calls[call["index"]][1] += call["function"]["arguments"]
    return {
        "content": "".join(delta.get("content") or "" for delta in deltas),
        "calls": [(name, json.loads(arguments)) for name, arguments in calls],
        "reason": next(choice["finish_reason"] for choice in choices if choice["finish_reason"]),
        "warnings": [warning for event in events for warning in event.get("warnings", [])],
    }


def whole_response(body: dict[str, Any]) -> dict[str, Any]:
    parts = [part for item in body["output"] if item["type"] == "message" for part in item["content"]]
    calls = [item for item in body["output"] if item["type"] == "function_call"]
    return {
        "content": "".join(part["text"] for part in parts),
        "calls": [(call["name"], json.loads(call["arguments"])) for call in calls],
        "reason": body["status"],
        "warnings": body.get("warnings") or [],
    }


def streamed_response(events: list[dict[str, Any]]) -> dict[str, Any]:
    texts = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    arguments = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    found = whole_response(events[-1]["response"])
    assert "".join(texts) == found["content"]
    assert json.loads("".join(arguments) or "[]") == (found["calls"][0][1] if found["calls"] else [])
    return found


def whole_message(body: dict[str, Any]) -> dict[str, Any]:
    return {
        "content": "".join(block["text"] for block in body["content"] if block["type"] == "text"),
        "calls": [(block["name"], block["input"]) for block in body["content"] if block["type"] == "tool_use"],
        "reason": body["stop_reason"],
        "warnings": body.get("warnings") or [],
    }


def streamed_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    blocks: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = {**event["content_block"], "json": ""}
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            else:
                block["json"] += delta.get("partial_json", "")
    (ending,) = [event for event in events if event["type"] == "message_delta"]
    content = [{**block, "input": json.loads(block["json"])} if block["json"] else block for block in blocks.values()]
    warnings = ending.get("warnings") or []
    return whole_message({"content": content, "stop_reason": ending["delta"]["stop_reason"], "warnings": warnings})


WHOLE = {"/v1/chat/completions": whole_chat, "/v1/responses": whole_response, "/v1/messages": whole_message}
READERS = {"/v1/chat/completions": streamed_chat, "/v1/responses": streamed_response, "/v1/messages": streamed_message}
ENDS = {  # of a message with calls, and of one without
    "/v1/chat/completions": ("tool_calls", "stop"),
    "/v1/responses": ("completed", "completed"),
    "/v1/messages": ("tool_use", "end_turn"),
    "/api/chat": ("stop", "stop"),
}


@EACH
@STREAMED
def test_untagged_calls_are_calls_unless_the_flag_is_off(
    world: tuple[OpenAIServer, Script, bool], path: str, stream: bool
) -> None:
    """With the API's own reason of the end, and no content beside the call."""
    server, script, is_on = world
    script.text = f"```json\n{BARE}\n```"
    found = ask(server, path, stream=stream)
    called, ended = ENDS[path]
    expected: dict[str, Any] = {"content": script.text, "calls": [], "reason": ended, "warnings": []}
    if is_on:
        expected = {"content": "", "calls": [("weather", {"city": "Bonn"})], "reason": called, "warnings": []}
    assert found == expected


@EACH
@STREAMED
def test_a_content_that_is_almost_a_call_has_a_warning(
    world: tuple[OpenAIServer, Script, bool], path: str, stream: bool
) -> None:
    """It stays content."""
    server, script, is_on = world
    script.text = NEAR
    found = ask(server, path, stream=stream)
    warnings = found.pop("warnings")
    assert found == {"content": NEAR, "calls": [], "reason": ENDS[path][1]}
    assert [("'weather'" in warning, "no 'city'" in warning) for warning in warnings] == (
        [(True, True)] if is_on else []
    )


@EACH
@STREAMED
def test_json_is_the_answer_if_no_tool_may_be_called(
    world: tuple[OpenAIServer, Script, bool], path: str, stream: bool
) -> None:
    """Without a warning."""
    server, script, _ = world
    script.text = BARE
    found = ask(server, path, stream=stream, **NO_CALLS[path])
    assert found == {"content": BARE, "calls": [], "reason": ENDS[path][1], "warnings": []}
