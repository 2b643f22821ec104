"""A request's `reasoning_effort`, seen by a template that shows its variables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.server.conftest import DEMO_ENGINE
from tests.server.running import RunningServer
from tests.unit.server.flags.world import resolved

from paceline.server.settings import ServerSettings

pytestmark = pytest.mark.native

TEMPLATE = "effort={{ reasoning_effort }} thinking={{ enable_thinking }} {{ messages[0].content }}"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server that was started with --reasoning-effort low."""
    variables = resolved("--reasoning-effort", "low").settings.chat_template_kwargs
    with RunningServer(
        ServerSettings(engine_options=DEMO_ENGINE, chat_template=TEMPLATE, chat_template_kwargs=variables)
    ) as running:
        yield running


def prompts(client: httpx.Client, server: RunningServer, **body: Any) -> list[str]:
    """The prompt of a conversation, as /apply-template shows it and as a chat computes it."""
    shown = client.post("/apply-template", json={"messages": MESSAGES, **body}).json()["prompt"]
    asked = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True, **body}
    response = client.post("/v1/chat/completions", json=asked).json()
    assert "warnings" not in response
    return [shown, server.engine.tokenizer.decode(response["choices"][0]["prompt_token_ids"])]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, "effort=low thinking=True Hi"),
        ({"reasoning_effort": None}, "effort=low thinking=True Hi"),
        ({"reasoning_effort": "high"}, "effort=high thinking=True Hi"),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "max"}},
            "effort=high thinking=True Hi",
        ),
        ({"reasoning_effort": "default"}, "effort= thinking=True Hi"),
        ({"reasoning_effort": "none"}, "effort= thinking=False Hi"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "effort= thinking=False Hi"),
        ({"chat_template_kwargs": {"reasoning_effort": "max"}}, "effort=max thinking=True Hi"),
    ],
)
def test_the_effort_of_a_request_reaches_the_template(
    server: RunningServer, body: dict[str, Any], expected: str
) -> None:
    """Like the flag's, which holds for requests without a budget; "none" turns thinking off."""
    with server.client() as client:
        assert prompts(client, server, **body) == [expected] * 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/apply-template"])
@pytest.mark.parametrize("effort", [1, True, ["low"], "x" * 65])
def test_an_effort_that_is_no_word_is_refused_by_name(server: RunningServer, path: str, effort: Any) -> None:
    """The server goes on after the refusal."""
    with server.client() as client:
        response = client.post(path, json={"messages": MESSAGES, "reasoning_effort": effort})
        assert (response.status_code, "reasoning_effort" in response.json()["error"]["message"]) == (400, True)
        assert prompts(client, server) == ["effort=low thinking=True Hi"] * 2
