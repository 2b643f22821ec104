"""Ending many requests where ending one of them may fail, because memory is short for instance."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def end_each(keys: Iterable[int], end: Callable[[int], object]) -> None:
    """Call `end` with every key, whatever it raises for others, and once more with the keys for which it raised.

    Raises the first of the exceptions that the second attempt raised, after all keys had theirs.
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
