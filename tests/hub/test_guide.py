"""The guide to models by name, run against a hub of our own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.hub.stand_in_hub import StandInHub

import paceline

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "models_by_name.md"

pytestmark = pytest.mark.native


def test_every_block_of_the_guide_runs(hub: StandInHub) -> None:
    """The page's snippets work, with the demo model in place of the named model."""
    hub.add("ggml-org/gemma-3-1b-it-GGUF").files["gemma-3-1b-it-Q4_K_M.gguf"] = paceline.demo_model_path().read_bytes()
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "models_by_name", "exec", dont_inherit=True), names)
    names["llm"].close()
    assert len(hub.requests("cdn")) == 1
