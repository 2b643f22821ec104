"""The front's records for a death: the black box, the last words, the socket that never waits."""

from __future__ import annotations

import os
import socket
import threading
import tracemalloc

from paceline.engine.worker.black_box import BlackBox, LastSeen
from paceline.engine.worker.messages import Link
from paceline.engine.worker.worker_process import MAX_BYTES, LastWords
from paceline.engine.worker.worker_requests import needs_state
from paceline.params import SamplingParams


def test_a_black_box_shows_what_the_other_side_was_doing() -> None:
    """Through a mapping of its own of the same memory, as a worker has it."""
    front = BlackBox.create()
    worker = BlackBox(front.fileno())
    assert front.read() == LastSeen(None, None)
    worker.begin_pass({3, 5})
    worker.prepare(7)
    assert front.read() == LastSeen(frozenset({3, 5}), 7)
    worker.begin_pass(())
    assert front.read() == LastSeen(frozenset(), 7)
    worker.end_pass()
    worker.prepare(None)
    assert front.read() == LastSeen(None, None)
    worker.close()
    front.close()
    front.close()


def test_a_black_box_keeps_as_many_keys_as_it_has_room_for() -> None:
    """More than any pass has rows."""
    box = BlackBox.create()
    box.begin_pass(range(1, 5001))
    seen = box.read().in_pass
    assert seen is not None
    assert 1000 < len(seen) <= 5000
    box.close()


def test_a_forked_child_gives_a_black_box_back_whichever_thread_was_reading_it() -> None:
    """The lock of a thread that does not exist in the child is never released."""
    box = BlackBox.create()
    box._closing.acquire()
    box.forget()
    assert box.read_beat() is None


def test_last_words_are_the_last_lines_in_bounded_room() -> None:
    """However much was written, and broken characters among it."""
    read_end, write_end = os.pipe()
    words = LastWords(read_end)
    assert words.read()
    assert words.text == ""
    for index in range(2000):
        os.write(write_end, f"line {index} \xff\n".encode("latin-1"))
        words.read()
    assert words.text.splitlines()[-1] == "line 1999 \ufffd"
    assert len(words.text.splitlines()) == 20
    assert len(words._data) <= MAX_BYTES
    os.close(write_end)
    assert not words.read()
    assert words.fileno() == -1
    words.close()


def test_sending_never_waits_and_keeps_the_order() -> None:
    """Bytes that a full socket does not take go out when there is room; the watcher is notified."""
    ours, theirs = socket.socketpair()
    woken = threading.Event()
    link, other = Link(ours, woken.set), Link(theirs)
    sent = [bytes([index % 256]) * 50_000 for index in range(40)]
    for message in sent:
        link.send(message)
    assert woken.is_set()
    assert link.is_backed_up
    received: list[bytes] = []
    while len(received) < len(sent):
        received += other.receive() or []
        link.flush()
    assert received == sent
    assert not link.is_backed_up
    link.close()
    assert other.receive() is None
    other.send(b"no reader left")
    other.send(b"and that is no error")
    other.close()


def test_many_threads_may_send_at_once() -> None:
    """Frames are never mixed, and none is forgotten."""
    ours, theirs = socket.socketpair()
    link, other = Link(ours), Link(theirs)
    threads = [
        threading.Thread(target=lambda name=name: [link.send(b"%d %d" % (name, k)) for k in range(200)])
        for name in range(8)
    ]
    for thread in threads:
        thread.start()
    received: list[bytes] = []
    while len(received) < 1600:
        link.flush()
        received += other.receive() or []
    for thread in threads:
        thread.join()
    for name in range(8):
        assert [message for message in received if message.startswith(b"%d " % name)] == [
            b"%d %d" % (name, k) for k in range(200)
        ]
    link.close()
    other.close()


def test_receiving_a_short_message_asks_for_little_memory() -> None:
    """Room for the largest read, asked for and mostly given back with every read, would leave holes all over the heap."""
    ours, theirs = socket.socketpair()
    link, other = Link(ours), Link(theirs)
    link.send(b"short")
    tracemalloc.start()
    try:
        received = other.receive()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert received == [b"short"]
    assert peak_bytes < 100_000
    link.close()
    other.close()


def test_only_samplers_that_remember_more_than_tokens_send_their_state() -> None:
    """Mirostat and adaptive-p."""
    assert needs_state(SamplingParams(mirostat=2))
    assert needs_state(SamplingParams(samplers=("top_k", "adaptive_p"), adaptive_target=0.5))
    assert not needs_state(SamplingParams(adaptive_target=0.5))
    assert not needs_state(SamplingParams())
