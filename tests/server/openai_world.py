"""A server for the tests of OpenAI's and other chat APIs, and clients of their own packages for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import ollama
import openai
from tests.server.conftest import DEMO_ENGINE
from tests.server.running import LONG_S, RunningServer

from paceline.observability.metrics import Instrument
from paceline.scheduling.records import EndRecord, RequestRecord, TickRecord
from paceline.server.in_flight import RegisteredRequest
from paceline.server.settings import ServerSettings

NAMES = ("tale", "vendor/other")
FOREVER: dict[str, Any] = {"ignore_eos": True, "top_k": 5}
"""So that a completion goes on to its limit."""


class Watch(Instrument):
    """Tells of every request when it is queued and when it ends; can hold the engine up, so that nothing ends meanwhile."""

    def __init__(self) -> None:
        self._ended: queue.SimpleQueue[EndRecord] = queue.SimpleQueue()
        self._ids: dict[int, str | None] = {}
        self._changed = threading.Condition()
        self._gate, self._is_held = threading.Event(), threading.Event()
        self._ticks_left: int | None = None

    def request_queued(self, record: RequestRecord) -> None:
        with self._changed:
            self._ids[record.key] = record.request_id
            self._changed.notify_all()

    def request_ended(self, record: EndRecord) -> None:
        self._ended.put(record)

    def tick_finished(self, record: TickRecord) -> None:
        if self._ticks_left is None:
            return
        self._ticks_left -= 1
        if self._ticks_left <= 0:
            self._is_held.set()
            assert self._gate.wait(LONG_S)

    def wait_queued(self, request_id: str) -> None:
        """Wait until the request with this id is queued."""
        with self._changed:
            assert self._changed.wait_for(lambda: request_id in self._ids.values(), LONG_S)

    def ending(self, request_id: str) -> EndRecord:
        """Return the ending of the next request with this id, once it is there."""
        while True:
            record = self._ended.get(timeout=LONG_S)
            if self._ids.get(record.key) == request_id:
                return record

    def wait_held(self) -> None:
        """Within `held`: wait until the engine waits."""
        assert self._is_held.wait(LONG_S)

    @contextmanager
    def held(self, num_ticks: int = 4) -> Iterator[None]:
        """Within the block the engine computes a few ticks and then waits for the block's end."""
        self._gate.clear()
        self._is_held.clear()
        self._ticks_left = num_ticks
        try:
            yield
        finally:
            self._ticks_left = None
            self._gate.set()


class OpenAIServer(RunningServer):
    """The demo model under two names, with embeddings. watch: instrument of its engine; engine: more options of it."""

    def __init__(self, engine: dict[str, Any] | None = None, **settings: Any) -> None:
        self.watch = Watch()
        engine = {**DEMO_ENGINE, "instruments": [self.watch], **(engine or {})}
        super().__init__(ServerSettings(**{"engine_options": engine, "embeddings": True, "aliases": NAMES, **settings}))
        self._closed: set[str] = set()
        self._changed = threading.Condition()
        self._note_closed()

    def wait_closed(self, request_id: str) -> None:
        """Wait until the server has released the request with this id, after cancelling unfinished choices."""
        with self._changed:
            assert self._changed.wait_for(lambda: request_id in self._closed, LONG_S)

    def openai(self, **options: Any) -> openai.OpenAI:
        """A client that does not try again; use it as a context manager."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=LONG_S, **options)

    def anthropic(self, **options: Any) -> anthropic.Anthropic:
        """Return a client of the `anthropic` package, like `openai`."""
        return anthropic.Anthropic(base_url=self.url, max_retries=0, timeout=LONG_S, **{"api_key": "none", **options})

    def async_anthropic(self) -> anthropic.AsyncAnthropic:
        """Return an asynchronous client of the `anthropic` package."""
        return anthropic.AsyncAnthropic(base_url=self.url, api_key="none", max_retries=0, timeout=LONG_S)

    def ollama(self) -> ollama.Client:
        """Return a client of the `ollama` package; close it, or use it as a context manager."""
        return ollama.Client(host=self.url, timeout=LONG_S)

    def async_ollama(self) -> ollama.AsyncClient:
        """Return an asynchronous client of the `ollama` package."""
        return ollama.AsyncClient(host=self.url, timeout=LONG_S)

    def async_openai(self, **options: Any) -> openai.AsyncOpenAI:
        """Return an asynchronous client, like `openai`."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=LONG_S, **options)

    def _note_closed(self) -> None:
        request_registry = self.service.request_registry
        remove = request_registry.remove

        def noted(request: RegisteredRequest) -> None:
            remove(request)
            with self._changed:
                self._closed.add(request.request_id)
                self._changed.notify_all()

        request_registry.remove = noted  # type: ignore[method-assign]
