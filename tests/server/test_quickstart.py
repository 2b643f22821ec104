"""The curl commands of the quickstart and of the README succeed against a running server."""

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

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs" / "quickstart.md", ROOT / "README.md")
ADDRESS = "http://127.0.0.1:8080"


def test_every_curl_of_the_quickstart_and_the_readme_succeeds() -> None:
    """With status 200, by the demo model and with embeddings, as the quickstart starts the server."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert "paceline serve --embeddings" in text
    blocks = [shlex.split(block) for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if "curl" in block]
    words = [word for block in blocks for word in block]
    urls = [word for word in words if word.startswith(ADDRESS)]
    bodies = iter([words[index + 1] for index, word in enumerate(words) if word == "-d"])
    assert [url.removeprefix(ADDRESS) for url in urls] == [
        "/health",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/chat/completions",
    ]
    with (
        RunningServer(ServerSettings(engine_options=DEMO_ENGINE, embeddings=True)) as server,
        server.client() as client,
    ):
        assert client.get("/health").status_code == 200
        for url in urls[1:]:
            response = client.post(url.removeprefix(ADDRESS), json=json.loads(next(bodies)))
            assert response.status_code == 200, (url, response.text)
