"""The Python and the commands of the guides for the servers' APIs are run, against a server of the tests."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.conftest import DEMO_ENGINE
from tests.server.running import RunningServer

from paceline.server.settings import ServerSettings

pytestmark = pytest.mark.native

GUIDES = Path(__file__).parents[2] / "docs" / "guide"
ADDRESS = "http://127.0.0.1:8080"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose defaults are greedy: the guides set no temperature, and one sampled tool call in a hundred never ends."""
    folder = tmp_path_factory.mktemp("batches")
    settings = ServerSettings(engine_options=DEMO_ENGINE, sampling={"temperature": 0.0}, batch_folder=folder)
    with RunningServer(settings) as running:
        yield running


def printed(guide: str, server: RunningServer, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the output of each block of Python, with the URL of the tests' server in place of the guide's."""
    blocks = re.findall(r"```python\n(.*?)```", (GUIDES / guide).read_text(encoding="utf-8"), re.DOTALL)
    assert ADDRESS in blocks[0]
    names: dict[str, object] = {}
    texts = []
    for block in blocks:
        exec(compile(block.replace(ADDRESS, server.url), guide, "exec"), names)
        texts.append(capsys.readouterr().out)
    names["client"].close()  # type: ignore[attr-defined]
    return texts


def test_the_guide_for_anthropic_prints_a_message_and_a_tool_call(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole and as a stream."""
    (text,) = printed("anthropic.md", server, capsys)
    whole, _, streamed = text.rpartition("\n")
    assert whole.strip()
    assert "city" in streamed


def test_the_guide_for_ollama_prints_a_chat_and_a_completion(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole and as a stream."""
    (text,) = printed("ollama.md", server, capsys)
    assert len(text.strip()) > 20


def test_the_guide_for_openai_prints_completions_and_a_tool_call(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """A whole completion, a stream, a tool call and its result."""
    first, tools, results = printed("openai.md", server, capsys)
    assert len([json.loads(line)["response"]["body"]["choices"] for line in results.splitlines() if line]) == 3
    whole, _, streamed = first.partition("\n")
    assert whole.strip()
    assert streamed.strip()
    call, _, content = tools.partition("\n")
    assert call.startswith("weather {")
    assert "Paris" in call
    assert "12" in content


def test_every_command_of_the_guide_for_llama_server_succeeds(tmp_path: Path) -> None:
    """In their order, as some build on others."""
    text = (GUIDES / "llama_server.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    assert len(lines) > 5
    settings = ServerSettings(engine_options={**DEMO_ENGINE, "state_folder": tmp_path})
    with RunningServer(settings) as server, server.client() as client:
        for line in lines:
            words = shlex.split(line)
            (url,) = [word for word in words if word.startswith(ADDRESS)]
            values = {word: words[words.index(word) + 1] for word in ("-d", "-H") if word in words}
            headers = dict([values["-H"].split(": ")]) if "-H" in values else {}
            body = json.loads(values["-d"]) if "-d" in values else None
            path = url.removeprefix(ADDRESS)
            response = client.request("GET" if body is None else "POST", path, json=body, headers=headers)
            assert response.status_code == 200, (line, response.text)
