"""Requests that real clients sent, replayed against a model of text alone.

PACELINE_RECORDED_REQUESTS names a folder of them: JSON files with method, path, headers and body.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.running import RunningServer

from paceline.server.settings import ServerSettings
from paceline.testing.models import LlamaSpec, copied, write_model

FOLDER = os.environ.get("PACELINE_RECORDED_REQUESTS")
FILES = sorted(Path(FOLDER).glob("*.json")) if FOLDER else []
TEMPLATES = (
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen3-Coder",
    "Qwen3.5-4B",
    "mistralai-Ministral-3-14B-Reasoning-2512",
    "openai-gpt-oss-120b",
    "unsloth-mistral-Devstral-Small-2507",
)
CLIENTS = ("aider", "claude-code", "codex", "litellm", "opencode", "qwen-code")
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MAX_TOKENS = 24

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not FILES, reason="PACELINE_RECORDED_REQUESTS names no folder with recorded requests"),
]


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, llama_cpp_source: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """Serve a tiny model with the vocabulary of Qwen 2 and the context that an agent needs."""
    models = llama_cpp_source / "models"
    spec = LlamaSpec(vocabulary=copied(models / "ggml-vocab-qwen2.gguf"), n_ctx_train=65536, n_layer=1)
    path = write_model(tmp_path_factory.mktemp("models") / "local.gguf", spec)
    template = (models / "templates" / f"{request.param}.jinja").read_text()
    engine = {"isolation": "thread", "n_ctx": 65536, "num_slots": 1}
    settings = ServerSettings(model=path, aliases=("local",), engine_options=engine, chat_template=template)
    with RunningServer(settings) as server:
        yield server


def _pairs() -> list[Any]:
    """Return each template with each file; a plain run has each template once, each time with another client."""
    clients = [min(file.stem for file in FILES if file.stem.startswith(name)) for name in CLIENTS] if FILES else []
    return [
        pytest.param(
            template,
            file,
            id=f"{template}-{file.stem}",
            marks=[] if clients[index] == file.stem else [pytest.mark.full],
        )
        for index, template in enumerate(TEMPLATES)
        for file in FILES
    ]


@pytest.mark.parametrize(("served", "file"), _pairs(), indirect=["served"])
def test_a_recorded_request_is_served(served: RunningServer, file: Path) -> None:
    """The response ends in order; only its length is bounded here."""
    recorded = json.loads(file.read_text())
    body = recorded["body"]
    name = next((name for name in LENGTHS if name in body), None)
    default = "max_output_tokens" if recorded["path"].startswith("/v1/responses") else "max_tokens"
    body[name or default] = min(MAX_TOKENS, body.get(name or default, MAX_TOKENS))
    with served.client() as client:
        response = client.request(recorded["method"], recorded["path"], headers=recorded["headers"], json=body)
    assert response.status_code == 200, response.text[:2000]
    if body.get("stream"):
        _check_events(response, recorded["path"])
    else:
        assert {"choices", "content", "output"} & response.json().keys()


def _check_events(response: httpx.Response, path: str) -> None:
    events = [event for event in response.text.split("\n\n") if event and not event.startswith(":")]
    data: list[Any] = [
        line.removeprefix("data: ") for event in events for line in event.split("\n") if line.startswith("data: ")
    ]
    if path.startswith("/v1/chat/completions"):
        assert data.pop() == "[DONE]"
    found = [json.loads(entry) for entry in data]
    assert not any("error" in loads and loads["error"] for loads in found), found[-1]
    if path.startswith("/v1/messages"):
        assert (found[0]["type"], found[-1]["type"]) == ("message_start", "message_stop")
    elif path.startswith("/v1/responses"):
        assert found[0]["type"] == "response.created"
        assert found[-1]["type"] in ("response.completed", "response.incomplete")
    else:
        assert any(choice["finish_reason"] for loads in found for choice in loads["choices"])
