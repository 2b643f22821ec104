"""The Python of the guide for OpenAI's endpoints is run, against a server of the tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.server.running import RunningServer

pytestmark = pytest.mark.native

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "openai.md"
ADDRESS = "http://127.0.0.1:8080"


def test_the_python_of_the_guide_prints_what_it_says(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    """A whole completion, a stream, a tool call and its result, with the URL of the tests' server in place of its own."""
    first, tools = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert ADDRESS in first
    names: dict[str, object] = {}
    exec(compile(first.replace(ADDRESS, server.url), str(GUIDE), "exec"), names)
    whole, _, streamed = capsys.readouterr().out.partition("\n")
    assert whole.strip()
    assert streamed.strip()
    exec(compile(tools, str(GUIDE), "exec"), names)
    names["client"].close()  # type: ignore[attr-defined]
    call, _, content = capsys.readouterr().out.partition("\n")
    assert call.startswith("weather {")
    assert "Paris" in call
    assert "12" in content
