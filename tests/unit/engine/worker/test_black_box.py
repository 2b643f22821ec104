"""What a dead worker leaves: each thread's request in a place of its own."""

from __future__ import annotations

from paceline.engine.worker.black_box import BlackBox, LastSeen


def test_a_request_that_is_encoded_is_seen_beside_the_others() -> None:
    """And no longer when its images are encoded."""
    box = BlackBox.create()
    try:
        assert box.read() == LastSeen()
        box.encode(7)
        box.prepare(5)
        box.begin_pass(range(1, 2000))
        box.beat(3.0, None)
        seen = box.read()
        assert (seen.encoding, seen.preparing) == (7, 5)
        assert seen.in_pass is not None
        assert {1, 2, 400} <= seen.in_pass
        box.encode(None)
        assert box.read().encoding is None
        assert box.read().preparing == 5
    finally:
        box.close()
