"""The guides' Python is run: block after block of a page, in one namespace, on the demo model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[2] / "docs" / "guide"
PAGES = ("isolation.md", "memory.md", "streaming.md", "strategies.md")
AGAINST_A_SERVER = {"openai.md"}  # tests/server/test_openai_guide.py

pytestmark = pytest.mark.native


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_guide_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What a guide shows is what works."""
    blocks = re.findall(r"```python\n(.*?)```", (GUIDES / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names: dict[str, object] = {"__name__": "guide"}
    exec("import paceline", names)
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    for value in names.values():
        close = getattr(value, "close", None)
        if type(value).__name__ == "LLM" and close is not None:
            close()
    capsys.readouterr()


def test_every_guide_is_run() -> None:
    """A new page with Python in it has to be named here."""
    with_python = {page.name for page in GUIDES.glob("*.md") if "```python" in page.read_text(encoding="utf-8")}
    assert with_python == {*PAGES, *AGAINST_A_SERVER}
