"""The worker's queue of requests to prepare."""

from __future__ import annotations

import queue
import threading

import pytest
from tests.running_engine import LONG_S

from paceline.engine.worker.worker_requests import WorkQueue


def test_tenants_take_turns() -> None:
    """A tenant's request is prepared after one of another, however many came first; each tenant's in order."""
    work = WorkQueue[str]()
    for name in ("a1", "a2", "a3", "b1", "a4", "c1", "b2"):
        work.put(name, name[0])
    taken = [work.get() for _ in range(3)]
    work.put("d1", "d")
    taken += [work.get() for _ in range(5)]
    assert taken == ["a1", "b1", "c1", "a2", "b2", "d1", "a3", "a4"]
    with pytest.raises(queue.Empty):
        work.get(0.0)


def test_work_of_another_thread_ends_the_wait() -> None:
    """Waiting without a limit ends with work of any tenant."""
    work, taken = WorkQueue[str](), list[str]()
    thread = threading.Thread(target=lambda: taken.append(work.get()))
    thread.start()
    work.put("a1", "a")
    thread.join(LONG_S)
    assert taken == ["a1"]
