"""Calls that score choices, on a fake engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.engine.scoring import scoring_call
from paceline.errors import BatchError, DeadlineExceeded
from paceline.streaming.chunk import Completion
from paceline.testing import FakeEngineClient


def test_the_timeout_is_that_of_the_whole_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each choice gets the rest of the time; a choice without any is not begun."""
    engine = FakeEngineClient()
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("paceline.engine.scoring.time", SimpleNamespace(monotonic=lambda: next(clock)))
    prepare, timeouts = engine.prepare, list[float | None]()

    def noted(prompt: Any, params: Any, options: Any) -> Any:
        timeouts.append(options.timeout_s)
        return prepare(prompt, params, options)

    monkeypatch.setattr(engine, "prepare", noted)
    try:
        call = scoring_call(engine, "one", [" a", " b", " c", " d"], {"timeout_s": 25})
        timeouts.clear()
        with pytest.raises(BatchError, match="2 of 4 choices failed") as caught:
            call.result()
    finally:
        engine.close()
    assert timeouts == [15, 5]
    assert [type(outcome) for outcome in caught.value.outcomes] == [Completion] * 2 + [DeadlineExceeded] * 2
