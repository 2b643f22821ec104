"""The record of a dead worker: each thread's request in a place of its own."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.engine.worker import black_box
from paceline.engine.worker.black_box import BlackBox, LastSeen
from paceline.observability.heartbeat import Sign


def test_a_request_that_is_encoded_is_seen_beside_the_others() -> None:
    """And no longer when its images are encoded."""
    box = BlackBox.create()
    try:
        assert box.read() == LastSeen()
        box.encode(7)
        box.prepare(5)
        box.begin_pass(range(1, 2000))
        box.listen(3.0)
        seen = box.read()
        assert (seen.encoding, seen.preparing) == (7, 5)
        assert seen.in_pass is not None
        assert {1, 2, 400} <= seen.in_pass
        box.encode(None)
        assert box.read().encoding is None
        assert box.read().preparing == 5
    finally:
        box.close()


def test_questions_are_seen_as_long_as_one_is_open() -> None:
    """Several threads may be at one each; keys of a large pass leave their place alone."""
    box = BlackBox.create()
    try:
        with box.asked():
            with box.asked():
                assert box.read().is_asked
            box.begin_pass(range(1, 5001))
            seen = box.read()
            assert seen.is_asked and seen.encoding is None and seen.in_pass is not None
        assert not box.read().is_asked
        with pytest.raises(ValueError, match="x"), box.asked():
            raise ValueError("x")
        assert not box.read().is_asked
    finally:
        box.close()


def test_the_end_of_a_long_pass_never_looks_like_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front may read between any two stores: it never sees the old heartbeat with the next tick's allowance."""
    box = BlackBox.create()
    try:
        box.listen(1.0)
        box.beat(1.0, Sign("ticking", 1.0))
        box.allow(300.0)
        seen: list[tuple[float, float]] = []

        def store(*arguments: Any) -> None:
            struct.pack_into(*arguments)
            beat = box.read_beat()
            assert beat is not None
            seen.append((beat.beaten_s, beat.allowed_s))

        stand_in = SimpleNamespace(pack_into=store, unpack_from=struct.unpack_from)
        monkeypatch.setattr(black_box, "struct", stand_in)
        box.beat(200.0, Sign("ticking", 200.0))
        assert (1.0, 0.0) not in seen
        assert seen[-1] == (200.0, 0.0)
    finally:
        box.close()
