"""The Python of the guide for Anthropic's endpoints is run, against a server of the tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.server.running import RunningServer

pytestmark = pytest.mark.native

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "anthropic.md"
ADDRESS = "http://127.0.0.1:8080"


def test_the_python_of_the_guide_prints_a_message_and_a_tool_call(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole and as a stream, with the URL of the tests' server in place of the guide's."""
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert ADDRESS in block
    names: dict[str, object] = {}
    exec(compile(block.replace(ADDRESS, server.url), str(GUIDE), "exec"), names)
    names["client"].close()  # type: ignore[attr-defined]
    whole, _, streamed = capsys.readouterr().out.rpartition("\n")
    assert whole.strip()
    assert "city" in streamed
