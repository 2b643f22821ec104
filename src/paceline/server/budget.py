"""Bytes that requests hold together: what is left of a fixed number, and the share of each. On the event loop."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Budget:
    """max_bytes: of all shares together. Nobody waits for it: a share that cannot grow says so at once."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = self.free_bytes = max_bytes

    def share(self) -> Share:
        """One of no bytes yet."""
        return Share(self)


class Share:
    """What one request holds of it; a context manager, which gives it back."""

    def __init__(self, budget: Budget) -> None:
        self._budget, self._num_bytes = budget, 0

    def grow(self, num_bytes: int) -> bool:
        """Takes so many bytes more; answers False, and takes none, where so many are not left."""
        if num_bytes > self._budget.free_bytes:
            return False
        self._budget.free_bytes -= num_bytes
        self._num_bytes += num_bytes
        return True

    def give_back(self) -> None:
        """All of it; once more is no mistake."""
        self._budget.free_bytes += self._num_bytes
        self._num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()
