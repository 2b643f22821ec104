"""What an engine is sized to, as far as it takes no model."""

from __future__ import annotations

from typing import Any

import pytest

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
    """Layers and devices decide, not what the machine has."""
    assert uses_gpu(options, [CPU, GPU]) is expected
    assert not uses_gpu(options, [CPU])
