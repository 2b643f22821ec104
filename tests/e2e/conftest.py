"""What the tests of the command line share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.testing.models import CHAT_TEMPLATE, KINDS, LlamaSpec, write_model


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that may go on for 131,072 tokens, where the demo model has 1,024."""
    spec = KINDS["llama"]
    assert isinstance(spec, LlamaSpec)
    path = tmp_path_factory.mktemp("models") / "long.gguf"
    metadata = {"tokenizer.chat_template": CHAT_TEMPLATE}
    return write_model(path, replace(spec, n_ctx_train=2**17), metadata=metadata)
