"""The commands of the guide for llama-server's endpoints succeed."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from tests.server.conftest import DEMO_ENGINE
from tests.server.running import RunningServer

from paceline.server.settings import ServerSettings

pytestmark = pytest.mark.native

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "llama_server.md"
ADDRESS = "http://127.0.0.1:8080"


def test_every_command_of_the_guide_succeeds(tmp_path: Path) -> None:
    """In their order, as some build on others."""
    text = GUIDE.read_text(encoding="utf-8")
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
