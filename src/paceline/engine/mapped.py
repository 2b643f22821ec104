"""A future of what another one's answer is made into."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_A = TypeVar("_A")
_B = TypeVar("_B")


def mapped(asked: Future[_A], convert: Callable[[_A], _B]) -> Future[_B]:
    """Done when `asked` is, with what `convert` makes of it, on the thread that answers; fails as it does, or as `convert`.

    Whoever cancels it only stops waiting: `asked` goes on.
    """
    answer: Future[_B] = Future()

    def pass_on(done: Future[_A]) -> None:
        if not answer.set_running_or_notify_cancel():
            return
        try:
            result = convert(done.result())
        except Exception as error:  # noqa: BLE001 - whoever waits is to know
            answer.set_exception(error)
        else:
            answer.set_result(result)

    asked.add_done_callback(pass_on)
    return answer
