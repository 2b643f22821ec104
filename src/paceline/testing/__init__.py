"""Things for tests, shipped so that users can test their own code with them too.

`FakeBackend` computes without a model, `ManualClock` goes when it is told, `check_strategy` tries a batch strategy out.
`paceline.testing.models` writes tiny random models of many architectures (it
needs the optional package `gguf`).
"""

from paceline.testing.fake_backend import FakeBackend, FakeCost
from paceline.testing.manual_clock import ManualClock
from paceline.testing.strategy_check import check_strategy

__all__ = ["FakeBackend", "FakeCost", "ManualClock", "check_strategy"]
