"""What callers ask of the worker, at the end of it."""

from __future__ import annotations

from typing import Any, cast

from paceline.engine.worker import messages
from paceline.engine.worker.questions import Questions
from paceline.engine.worker.worker_process import WorkerProcess


class Listener:
    """A worker that receives everything and sends nothing."""

    is_ready = True

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def send(self, message: Any) -> None:
        self.heard.append(message)


def test_a_query_during_shutdown_gets_one_result() -> None:
    """A late caller ends what is left, perhaps in the middle of the ending itself: no future is resolved twice."""
    questions, worker, late = Questions(lambda: None), Listener(), []
    for _ in range(3):
        questions.ask_stats().add_done_callback(lambda _: late.append(questions.ask_slots()))
    questions.pass_on(cast(WorkerProcess, worker))
    assert [type(one) for one in worker.heard] == [messages.AskStats] * 3
    questions.end()
    assert [one.result(0) for one in late] == [None] * 3
