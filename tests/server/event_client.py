"""A client of the stream of engine events: reads them one by one, and keeps the state that they add up to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

Members = dict[str, Any]


class EventClient:
    """The events of one stream. state: the members as they are now, but for ticks and marks, which add up."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self.state: Members = {}
        self.ticks: list[Members] = []
        self.marks: list[Members] = []
        self.names: list[str] = []

    def next(self) -> tuple[str, Members]:
        """Read the next event; comments are passed over."""
        name = ""
        for line in self._lines:
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                members: Members = json.loads(line.removeprefix("data: "))
                self._take(name, members)
                return name, members
        raise AssertionError("the stream ended without an event that says so")

    def until(self, is_so: Callable[[Members], bool]) -> Members:
        """Read until the state is so, and return it; at most 600 events."""
        for _ in range(600):
            if self.state and is_so(self.state):
                return self.state
            name, _ = self.next()
            assert name != "end"
        raise AssertionError(f"it never was so: {self.state}")

    def _take(self, name: str, members: Members) -> None:
        self.names.append(name)
        if name == "snapshot":
            self.state, self.ticks, self.marks = {}, [], []
        rest = dict(members)
        self.ticks += rest.pop("ticks", [])
        self.marks += rest.pop("marks", [])
        self.state |= rest


@contextmanager
def watching(client: httpx.Client, *, headers: dict[str, str] | None = None, **params: Any) -> Iterator[EventClient]:
    """Watch an engine."""
    with client.stream("GET", "/v1/engine/events", params=params, headers=headers) as response:
        if response.status_code != 200:
            response.read()
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        yield EventClient(response.iter_lines())
