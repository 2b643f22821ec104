"""Parts that the tests of the command line share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.e2e.commands import Terminal

from paceline.testing.models import CHAT_TEMPLATE, KINDS, LlamaSpec, write_model


@pytest.fixture(autouse=True)
def _no_terminal_is_left() -> Iterator[None]:
    """A command on a terminal ends with its test, also with one that fails."""
    yield
    for terminal in tuple(Terminal.running):
        terminal.kill()


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that may go on for 131,072 tokens (the demo model: 1,024)."""
    spec = KINDS["llama"]
    assert isinstance(spec, LlamaSpec)
    path = tmp_path_factory.mktemp("models") / "long.gguf"
    metadata = {"tokenizer.chat_template": CHAT_TEMPLATE}
    return write_model(path, replace(spec, n_ctx_train=2**17), metadata=metadata)
