"""Changes of models for those that follow them. On the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Self

from paceline.model_manager.model_status import ModelState, ModelStatus

if TYPE_CHECKING:
    from paceline.model_manager.managed_model import ManagedModel

_MOST_KEPT: Final = 1024  # events for a reader that does not read; older ones are dropped


class StatusReader:
    """The events for one subscriber, in order: an async iterator.

    Of a model whose state stays the same, only the newest event is kept.
    """

    def __init__(self) -> None:
        self._events: deque[ModelStatus] = deque(maxlen=_MOST_KEPT)
        self._changed = asyncio.Event()
        self._is_ended = False

    def put(self, status: ModelStatus) -> None:
        """Add an event."""
        for place in range(len(self._events) - 1, -1, -1):
            if self._events[place].name == status.name:
                if self._events[place].state == status.state:
                    self._events[place] = status
                    return
                break
        self._events.append(status)
        self._changed.set()

    def end(self) -> None:
        """End the iteration after what is there."""
        self._is_ended = True
        self._changed.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ModelStatus:
        while not self._events:
            if self._is_ended:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._events.popleft()


class StatusFeed:
    """Changes the states of models, and reports every change to the readers."""

    def __init__(self) -> None:
        self._readers: list[StatusReader] = []
        self._is_ended = False

    def subscribe(self) -> StatusReader:
        """Return a reader of the events from now on."""
        reader = StatusReader()
        self._readers.append(reader)
        if self._is_ended:
            reader.end()
        return reader

    def unsubscribe(self, reader: StatusReader) -> None:
        """End a reader."""
        if reader in self._readers:
            self._readers.remove(reader)
        reader.end()

    def change(self, model: ManagedModel[Any], state: ModelState) -> None:
        """Note a model's state, and report it."""
        if model.state != state:
            model.state, model.since_s = state, time.time()
            model.progress = 1.0 if state in ("loaded", "sleeping") else 0.0
        self.report(model)

    def report(self, model: ManagedModel[Any]) -> None:
        """Report that something has changed, unless readers would take it for a change of the model that has its name now."""
        if self._readers and not model.is_replaced:
            status = model.status()
            for reader in self._readers:
                reader.put(status)

    def end(self) -> None:
        """End all readers, now and later."""
        self._is_ended = True
        for reader in self._readers.copy():
            self.unsubscribe(reader)
