"""The queue of the encoder: order, cancels and deadlines of waiting and running encodings, closing."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from paceline.clock import MonotonicClock
from paceline.engine.media_encoder import EncodingQueue

CLOCK = MonotonicClock()


class Encoder:
    """Encodes a job until it may go on, is given up or aborted; notes the outcome."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.aborted: list[int] = []
        self.may_go = threading.Event()
        self.nice: int | None = None
        self.queue: EncodingQueue[str] = EncodingQueue(
            encode=self.encode,
            give_up=lambda job: self.note(f"gave up {job}"),
            abort=self.abort,
            clock=CLOCK,
            max_held_bytes=10,
        )

    def encode(self, job: str, is_given_up: Callable[[], bool]) -> None:
        if sys.platform == "linux":
            self.nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        with self.changed:
            self.begun.append(job)
            self.changed.notify_all()
        while not self.may_go.wait(0.002) and not is_given_up():
            pass
        self.note(f"dropped {job}" if is_given_up() else f"encoded {job}")

    def abort(self, key: int) -> None:
        self.aborted.append(key)

    def note(self, words: str) -> None:
        with self.changed:
            self.ended.append(words)
            self.changed.notify_all()

    def wait_for(self, test: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(test, 20), (self.begun, self.ended)


@pytest.fixture
def encoder() -> Iterator[Encoder]:
    found = Encoder()
    yield found
    found.may_go.set()
    found.queue.close()


def test_requests_are_encoded_in_order(encoder: Encoder) -> None:
    """One at a time, with less priority than other threads."""
    for key, job in enumerate("abc"):
        encoder.queue.put(key, job, math.inf, key)
    encoder.wait_for(lambda: encoder.begun == ["a"])
    assert encoder.ended == []
    encoder.may_go.set()
    encoder.wait_for(lambda: len(encoder.ended) == 3)
    assert encoder.ended == ["encoded a", "encoded b", "encoded c"]
    if sys.platform == "linux":
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert encoder.nice is not None and encoder.nice > min(own, 18)  # 19 is the least priority


def test_a_cancel_ends_what_waits_at_once_and_running_encodings_early(encoder: Encoder) -> None:
    """Others stay; a key that is not there is no error."""
    for key, job in enumerate("abc"):
        encoder.queue.put(key, job, math.inf, key)
    encoder.wait_for(lambda: encoder.begun == ["a"])
    encoder.queue.release(77)
    encoder.queue.release(1)
    encoder.wait_for(lambda: encoder.ended == ["gave up b"])
    encoder.queue.release(0)
    encoder.wait_for(lambda: encoder.begun == ["a", "c"])
    assert (encoder.ended, encoder.aborted) == (["gave up b", "dropped a"], [0])
    encoder.queue.release(0)
    encoder.may_go.set()
    encoder.wait_for(lambda: encoder.ended[2:] == ["encoded c"])
    assert encoder.aborted == [0]


def test_deadlines_pass_while_a_request_waits_or_is_encoded(encoder: Encoder) -> None:
    """Each at its own time, whatever is in front of it."""
    now_s = CLOCK.now()
    encoder.queue.put(1, "late", now_s + 0.3, 1)
    encoder.wait_for(lambda: encoder.begun == ["late"])
    encoder.queue.put(2, "past", now_s, 2)
    encoder.queue.put(3, "soon", now_s + 0.1, 3)
    encoder.queue.put(4, "never", math.inf, 4)
    encoder.wait_for(lambda: len(encoder.ended) == 3)
    assert encoder.ended == ["gave up past", "gave up soon", "dropped late"]
    assert CLOCK.now() >= now_s + 0.3
    encoder.wait_for(lambda: encoder.begun == ["late", "never"])
    assert encoder.aborted == [1]


def test_closing_ends_the_threads(encoder: Encoder) -> None:
    """Waiting requests are never encoded."""
    before = set(threading.enumerate())
    encoder.queue.put(1, "a", math.inf, 1)
    encoder.queue.put(2, "b", math.inf, 2)
    encoder.wait_for(lambda: encoder.begun == ["a"])
    names = ("paceline-watching", "paceline-encoding")
    threads = [entry for entry in set(threading.enumerate()) - before if entry.name in names]
    assert len(threads) == 2
    encoder.queue.close()
    encoder.may_go.set()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert encoder.ended == ["encoded a"]


def test_the_most_urgent_is_next(encoder: Encoder) -> None:
    """Of waiting requests, in any order of arrival."""
    encoder.queue.put(1, "first", math.inf, 0.0)
    encoder.wait_for(lambda: encoder.begun == ["first"])
    for key, (job, turn_s) in enumerate((("later", 3.0), ("urgent", -20.0), ("soon", 2.0)), 2):
        encoder.queue.put(key, job, math.inf, turn_s)
    encoder.may_go.set()
    encoder.wait_for(lambda: len(encoder.ended) == 4)
    assert encoder.begun == ["first", "urgent", "soon", "later"]


def test_what_waits_with_embeddings_is_bounded(encoder: Encoder) -> None:
    """The next request is encoded when those in front of it have released theirs; cancels and deadlines go on."""
    encode = encoder.encode

    def holding(job: str, is_given_up: Callable[[], bool]) -> None:
        encoder.queue.hold(ord(job), 11)
        encode(job, is_given_up)

    encoder.queue._encode = holding
    encoder.may_go.set()
    for job in "abc":
        encoder.queue.put(ord(job), job, math.inf, ord(job))
    encoder.wait_for(lambda: encoder.ended == ["encoded a"])
    encoder.queue.release(ord("b"))
    encoder.wait_for(lambda: encoder.ended == ["encoded a", "gave up b"])
    assert encoder.begun == ["a"]
    encoder.queue.let_go(77)
    encoder.queue.let_go(ord("a"))
    encoder.wait_for(lambda: encoder.ended == ["encoded a", "gave up b", "encoded c"])


def test_what_was_encoded_or_given_up_is_not_kept(encoder: Encoder) -> None:
    """A request may hold half a gigabyte of files, and the next one may never come."""

    class Job:
        def __init__(self, name: str) -> None:
            self.name = name

        def __str__(self) -> str:
            return self.name

    jobs = [Job("encoded"), Job("late"), Job("cancelled")]
    alive = [weakref.ref(job) for job in jobs]
    for key, deadline_s in enumerate((math.inf, CLOCK.now() + 0.01, math.inf)):
        encoder.queue.put(key, jobs.pop(0), deadline_s, key)  # type: ignore[arg-type]
    encoder.wait_for(lambda: bool(encoder.ended))
    encoder.queue.release(2)
    encoder.may_go.set()
    encoder.wait_for(lambda: len(encoder.ended) == 3)
    encoder.begun.clear()
    end_s = CLOCK.now() + 20
    while any(ref() is not None for ref in alive):
        assert CLOCK.now() < end_s, [str(ref()) for ref in alive]
        time.sleep(0.001)


def test_tenants_alternate(encoder: Encoder) -> None:
    """A tenant's images are not encoded after all of a tenant that sent more and sent them before."""
    encoder.queue.put(1, "first", math.inf, 0.0, "a")
    encoder.wait_for(lambda: encoder.begun == ["first"])
    for key, (job, tenant) in enumerate((("a2", "a"), ("a3", "a"), ("a4", "a"), ("b1", "b"), ("b2", "b")), 2):
        encoder.queue.put(key, job, math.inf, float(key), tenant)
    encoder.may_go.set()
    encoder.wait_for(lambda: len(encoder.ended) == 6)
    assert encoder.begun == ["first", "a2", "b1", "a3", "b2", "a4"]
