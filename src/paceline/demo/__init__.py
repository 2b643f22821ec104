"""The demo models of the package. MODEL_CARD.md describes the model and its draft model, vision/MODEL_CARD.md the third."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from paceline.errors import ModelLoadError


def demo_model_path() -> Path:
    """Return the path of the model that is loaded by default. Raises `ModelLoadError` if the installation lacks it."""
    return _installed("paceline-demo.gguf")


def demo_draft_model_path() -> Path:
    """Return the path of the draft model: a tenth of the demo model's size, with its vocabulary. Raises `ModelLoadError`."""
    return _installed("paceline-demo-draft.gguf")


def demo_vision_model_path() -> Path:
    """Return the path of the demo model for images. Its projector is beside it. Raises `ModelLoadError`."""
    return _installed("vision/paceline-demo-vision.gguf")


def _installed(name: str) -> Path:
    path = Path(str(resources.files(__name__) / name))
    if not path.is_file():
        raise ModelLoadError(f"the demo model {path} is missing from this installation; name a model of your own")
    return path
