"""Results that callers wait for: the registry of questions and embeddings an engine has still to reply to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from paceline.errors import PacelineError

_A = TypeVar("_A")
_B = TypeVar("_B")


class PendingResults:
    """Futures by the key of their command or request; each is resolved once, by whichever thread takes it out."""

    def __init__(self) -> None:
        self._futures: dict[int, Future[list[Any]]] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._futures))  # not tuple(), which other threads may interrupt halfway

    def add(self, key: int) -> Future[list[Any]]:
        """Return a new future, which `resolve` sets."""
        future = self._futures[key] = Future()
        return future

    def discard(self, key: int) -> None:
        """Forget a future that is never to be set, because its request was refused."""
        self._futures.pop(key, None)

    def resolve(self, key: int, result: list[Any], error: PacelineError | None = None) -> None:
        """Set a result, or the error instead of it; do nothing if the key is resolved or its future was cancelled."""
        future = self._futures.pop(key, None)
        if future is None:
            return
        try:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        except InvalidStateError:  # its caller cancelled it
            return


def map_future(source: Future[_A], function: Callable[[_A], _B]) -> Future[_B]:
    """Map a Future's result through a function, on the thread that sets it; fail as it does, or as the function.

    Cancelling the returned future only stops waiting: `source` goes on.
    """
    mapped: Future[_B] = Future()

    def pass_on(done: Future[_A]) -> None:
        if not mapped.set_running_or_notify_cancel():
            return
        try:
            result = function(done.result())
        except Exception as error:  # noqa: BLE001 - it is the future's outcome
            mapped.set_exception(error)
        else:
            mapped.set_result(result)

    source.add_done_callback(pass_on)
    return mapped
