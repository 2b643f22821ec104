"""The registry of results that callers wait for: questions to an engine or its worker, and embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from paceline.errors import PacelineError

_A = TypeVar("_A")
_B = TypeVar("_B")


class PendingResults:
    """Futures by the key of their command or request; each is resolved once, by the thread that removes it."""

    def __init__(self) -> None:
        self._futures: dict[int, Future[Any]] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._futures))  # a copy in one step; tuple() may be interrupted by other threads

    def add(self, key: int) -> Future[Any]:
        """Return a new future, to be set by `resolve`."""
        future: Future[Any] = Future()
        self._futures[key] = future
        return future

    def discard(self, key: int) -> None:
        """Remove a future without setting it, because its request was refused."""
        self._futures.pop(key, None)

    def resolve(self, key: int, result: Any, error: PacelineError | None = None) -> None:
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


def end_each(keys: Iterable[int], end: Callable[[int], object]) -> None:
    """Call `end` with every key, and once more with those for which it raised, because memory is short for instance.

    Raises the first exception of the second attempts, after all of them.
    """
    failed: list[int] = []
    for key in keys:
        try:
            end(key)
        except Exception:  # noqa: BLE001 - tried again below
            failed.append(key)
    failures: list[Exception] = []
    for key in failed:
        try:
            end(key)
        except Exception as error:  # noqa: BLE001 - raised below
            failures.append(error)
    if failures:
        raise failures[0]
