"""Real GGUF models, in the folder that PACELINE_REAL_MODELS names.

    PACELINE_REAL_MODELS=FOLDER pytest -n 0 -v -s tests/real_models

Each test names the file it needs and is skipped if the folder does not have it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = os.environ.get("PACELINE_REAL_MODELS")

RealModel = Callable[[str], Path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the folder's tests without models."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.native)
            item.add_marker(pytest.mark.timeout(1800))
            if not FOLDER:
                item.add_marker(pytest.mark.skip(reason="PACELINE_REAL_MODELS names no folder with real GGUF models"))


@pytest.fixture(scope="session")
def real_model() -> RealModel:
    """Return a function that returns the path of a file in the folder, and skips the test if it is missing."""

    def path_of(name: str) -> Path:
        path = Path(str(FOLDER)) / name
        if not path.exists():
            pytest.skip(f"the folder of PACELINE_REAL_MODELS has no {name}")
        return path

    return path_of
