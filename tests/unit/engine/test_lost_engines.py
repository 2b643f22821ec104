"""The end of engines without any reference."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tests.running_engine import LONG_S

from paceline.engine import EngineClient
from paceline.testing import FakeEngineClient
from paceline.testing.fake_engine_client import fake_worker_engine

ENGINES: tuple[Callable[[], Any], ...] = (FakeEngineClient, fake_worker_engine)


def note_end(engine: EngineClient, told: list[bool], _: object) -> None:
    told.append(engine.is_closed)


@pytest.mark.parametrize("make", ENGINES)
def test_a_closed_engine_is_freed_whatever_waits_for_its_end(make: Callable[[], Any]) -> None:
    """A callback may refer to the engine: a server that loads and unloads models keeps none of them."""
    engine = make()
    told: list[bool] = []
    engine.ended.add_done_callback(partial(note_end, engine, told))
    engine.close()
    assert told == [True]
    lost = weakref.ref(engine)
    del engine
    gc.collect()
    assert lost() is None


@pytest.mark.parametrize("make", ENGINES)
def test_an_engine_that_nobody_holds_ends(make: Callable[[], Any]) -> None:
    """Its thread does not outlive it."""
    engine = make()
    ended = engine.ended
    del engine
    gc.collect()
    assert ended.result(LONG_S) is None
