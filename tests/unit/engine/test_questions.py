"""The cost of a new query to an engine: a function, and the calling code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.running_engine import LONG_S

from paceline.engine.core import Engine
from paceline.engine.questions import Resources, after_tick, beside_ticks
from paceline.errors import InvalidParams
from paceline.testing.fake_engine_client import FakeEngineClient, fake_worker_engine, make_backend  # noqa: F401 - by name


@after_tick(lambda front: {"open": front.num_open})
def num_pages(engine: Engine, page: int) -> Callable[[], dict[str, int]]:
    """Return a number that no engine knows yet, for pages of a size."""
    return lambda: {"pages": engine.scheduler.kv_cache.num_cells // page + page}


@beside_ticks(60.0, "give up")
def shout(resources: Resources, text: str) -> str:
    """Return a text in capitals, or fail."""
    assert resources.next_key() > 0
    if not text:
        raise InvalidParams("text is empty; give one")
    return text.upper()


@pytest.fixture(params=["thread", "process"])
def engine(request: pytest.FixtureRequest) -> Any:
    one = FakeEngineClient() if request.param == "thread" else fake_worker_engine(backend=f"{__name__}:make_backend")
    yield one
    one.close()


def test_a_new_question_is_asked_wherever_the_engine_runs(engine: Any) -> None:
    """Its two functions above are all that it takes; results and errors come as they are."""
    assert engine.ask(num_pages, 7).result(LONG_S) == {"pages": 7}
    assert engine.ask(shout, "ready").result(LONG_S) == "READY"
    with pytest.raises(InvalidParams, match="text is empty"):
        engine.ask(shout, "").result(LONG_S)
