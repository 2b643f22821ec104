"""`EngineClient`: what callers may use of an engine, the same for both."""

from __future__ import annotations

import pytest

from paceline.engine import EngineClient
from paceline.engine.base_engine import BaseEngine
from paceline.engine.in_process_engine import InProcessEngine
from paceline.engine.worker.worker_engine import WorkerEngine

SET_BY_ENGINES = {"config", "limits", "model", "sampling_defaults", "tokenizer"}


def members() -> set[str]:
    return {name for name in vars(EngineClient) if not name.startswith("__") and not name.startswith("_abc")}


def test_the_protocol_has_no_private_members() -> None:
    """A caller of an engine needs nothing that begins with an underscore."""
    assert not {name for name in members() if name.startswith("_") and name != "_is_protocol"}
    assert {"prepare", "accept", "embed", "rerank", "stats", "ask_slots", "heartbeat", "close"} <= members()


@pytest.mark.parametrize("engine", [InProcessEngine, WorkerEngine])
def test_both_engines_implement_the_protocol(engine: type[BaseEngine]) -> None:
    """Each member of the protocol is a method or property of both engines, or one of the facts that they set."""
    wanted = {name for name in members() if not name.startswith("_")}
    assert {name for name in wanted if not hasattr(engine, name)} == SET_BY_ENGINES
    assert set(BaseEngine.__annotations__) >= SET_BY_ENGINES
