"""The Python of the guide for Ollama's endpoints is run, against a server of the tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.server.running import RunningServer

pytestmark = pytest.mark.native

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "ollama.md"
ADDRESS = "http://127.0.0.1:8080"


def test_the_python_of_the_guide_prints_a_chat_and_a_completion(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole and as a stream, with the URL of the tests' server in place of the guide's."""
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert ADDRESS in block
    names: dict[str, object] = {}
    exec(compile(block.replace(ADDRESS, server.url), str(GUIDE), "exec"), names)
    names["client"].close()  # type: ignore[attr-defined]
    assert len(capsys.readouterr().out.strip()) > 20
