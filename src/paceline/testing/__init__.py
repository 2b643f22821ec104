"""Test doubles and helpers, shipped so that users can test their own code with them.

`FakeEngine` runs requests tick by tick without a model, `FakeEngineClient` stands in for an engine that other code holds,
`FakeBackend` computes without a model, `ManualClock` advances only when `advance` is called, `check_strategy` checks a batch
strategy. `paceline.testing.models` writes tiny random models of many architectures (it needs the optional package `gguf`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.testing.fake_backend import FakeBackend, FakeCost, ManualClock
from paceline.testing.fake_engine import FakeEngine
from paceline.testing.strategy_check import check_strategy

if TYPE_CHECKING:
    from paceline.testing.fake_engine_client import FakeEngineClient

__all__ = ["FakeBackend", "FakeCost", "FakeEngine", "FakeEngineClient", "ManualClock", "check_strategy"]


def __getattr__(name: str) -> Any:
    if name == "FakeEngineClient":  # it needs the compiled core, which checks of strategies do not
        from paceline.testing.fake_engine_client import FakeEngineClient

        return FakeEngineClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
