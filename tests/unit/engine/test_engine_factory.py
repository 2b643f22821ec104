"""The sizes of an engine, as far as they need no model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.engine import in_process_engine
from paceline.engine.engine_factory import uses_gpu
from paceline.runtime import Device

pytestmark = pytest.mark.native

CPU = Device("CPU", "a processor", "cpu", 1, 1)
GPU = Device("CUDA0", "a card", "gpu", 1, 1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"n_gpu_layers": -1}, True),
        ({"n_gpu_layers": 5}, True),
        ({"n_gpu_layers": None}, True),
        ({"n_gpu_layers": 0}, False),
        ({"devices": ["CPU"]}, False),
        ({"devices": ("cuda0",)}, True),
        ({"devices": ["CPU", "CUDA0"]}, True),
        ({"devices": ["CUDA0"], "n_gpu_layers": 0}, False),
        ({"devices": None}, True),
    ],
)
def test_a_gpu_that_a_model_keeps_off_does_not_count(options: dict[str, Any], expected: bool) -> None:
    """Layers and devices decide, not the machine's hardware."""
    assert uses_gpu(options, [CPU, GPU]) is expected
    assert not uses_gpu(options, [CPU])


def test_what_a_server_lends_is_no_gpu_of_this_machine() -> None:
    """It may be a CPU; a GPU beside it counts, unless the model is kept off it."""
    lent = Device("RPC0", "127.0.0.1:50052", "gpu", 1, 1)
    assert not uses_gpu({}, [CPU, lent])
    assert uses_gpu({}, [CPU, lent, GPU])
    assert not uses_gpu({"devices": ["RPC0"]}, [CPU, lent, GPU])


def test_a_projector_that_is_given_by_its_url_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a draft model; paths and switches stay as they are."""
    asked: list[str] = []

    def found(model: str, **_: object) -> SimpleNamespace:
        asked.append(model)
        return SimpleNamespace(path=Path("cache/mmproj.gguf"))

    monkeypatch.setattr(in_process_engine, "local_model", found)
    options = in_process_engine.local_options({"mmproj": "https://x.example/mmproj.gguf"}, offline=False, hf_token=None)
    assert options == {"mmproj": Path("cache/mmproj.gguf").absolute()}
    assert asked == ["https://x.example/mmproj.gguf"]
    assert in_process_engine.local_options({"mmproj": False}, offline=False, hf_token=None) == {"mmproj": False}
