"""The models that come along."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import demo
from paceline.errors import ModelLoadError


def test_the_models_lie_in_the_package() -> None:
    """All are files that llama.cpp can open by their path; the vision model has a folder, with its projector."""
    folder = Path(demo.__file__).parent
    for path in (demo.demo_model_path(), demo.demo_draft_model_path()):
        assert path.parent == folder
        assert path.read_bytes()[:4] == b"GGUF"
    seeing = demo.demo_vision_model_path()
    projector = seeing.with_name(f"mmproj-{seeing.name}")
    assert seeing.parent == folder / "vision"
    assert seeing.read_bytes()[:4] == projector.read_bytes()[:4] == b"GGUF"
    assert seeing.stat().st_size + projector.stat().st_size <= 6_000_000
    assert not list(folder.glob("mmproj*")), "the other demo models would be loaded with it"


def test_an_installation_without_demo_models_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the missing file and the way out."""
    monkeypatch.setattr(demo.resources, "files", lambda _: tmp_path)
    with pytest.raises(ModelLoadError, match=r"paceline-demo\.gguf is missing .* name a model of your own"):
        demo.demo_model_path()
