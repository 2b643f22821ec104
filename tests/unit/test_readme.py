"""The README's Python samples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.native
def test_the_samples_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    """A sample may use names of an earlier sample; the first one writes a story."""
    names: dict[str, object] = {}
    assert len(BLOCKS) == 2
    for block in BLOCKS:
        exec(compile(block, str(README), "exec"), names)
    assert len(capsys.readouterr().out) > 50
