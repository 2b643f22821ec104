"""A hub and an empty home for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.hub.stand_in_hub import StandInHub

VARIABLES = (
    "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE",
    "MODEL_ENDPOINT", "LLAMA_CACHE", "OLLAMA_MODELS", "XDG_CACHE_HOME", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY",
    "http_proxy", "https_proxy", "all_proxy",
)  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """A hub that this process and its child processes use, with caches in the test's folder."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with StandInHub() as running:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        # huggingface_hub has read its variables when it was imported
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
        yield running
