"""`EngineClient`: the functions of an engine for callers, the same for both engines."""

from __future__ import annotations

import pytest

from paceline.engine import EngineClient
from paceline.engine.in_process_engine import InProcessEngine
from paceline.engine.worker.worker_engine import WorkerEngine


@pytest.mark.parametrize("engine", [InProcessEngine, WorkerEngine])
def test_both_engines_are_clients_and_leave_nothing_open(engine: type[EngineClient]) -> None:
    """Each engine defines the methods that a client leaves to it, and has the facts that callers read."""
    assert issubclass(engine, EngineClient)
    assert not engine.__abstractmethods__
    assert {"config", "limits", "model", "sampling_defaults", "tokenizer"} <= set(EngineClient.__annotations__)
