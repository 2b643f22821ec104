"""The models that come along."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import demo
from paceline.errors import ModelLoadError


def test_the_models_lie_in_the_package() -> None:
    """Both are files that llama.cpp can open by their path."""
    for path in (demo.demo_model_path(), demo.demo_draft_model_path()):
        assert path.parent == Path(demo.__file__).parent
        assert path.read_bytes()[:4] == b"GGUF"


def test_an_installation_without_demo_models_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the missing file and the way out."""
    monkeypatch.setattr(demo.resources, "files", lambda _: tmp_path)
    with pytest.raises(ModelLoadError, match=r"paceline-demo\.gguf is missing .* name a model of your own"):
        demo.demo_model_path()
