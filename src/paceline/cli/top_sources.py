"""Where the events of `paceline top` come from: a server's stream, or an engine of this process. Each on a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

from paceline.errors import EngineError, InvalidParams

if TYPE_CHECKING:
    import httpx

    from paceline.engine import EngineClient

_CONNECT_S: Final = 10.0
_SILENCE_S: Final = 60.0  # longer than servers wait between two comments
_AGAIN_S: Final = 1.0

Take = Callable[[str, Mapping[str, Any]], None]
"""Called with each event."""


class EventSource(Protocol):
    """Events of an engine. status: a sentence while there are none, or they are old; failure: why there will be none."""

    name: str
    status: str
    failure: Exception | None

    def run(self, take: Take, stop: threading.Event) -> None:
        """Hand on events until `stop` is set, or there is nothing more."""


class ServerEvents:
    """The events of a server. A connection that is lost is tried again; one that never was fails."""

    def __init__(
        self, url: str, *, api_key: str | None = None, model: str | None = None, interval_ms: int = 250
    ) -> None:
        """url: of the server, or of its prefix. Raises `InvalidParams` for what is no URL."""
        import httpx

        self.name = url.rstrip("/")
        try:
            address = httpx.URL(self.name)
        except httpx.InvalidURL as error:
            raise InvalidParams(f"URL {url!r:.200} cannot be read: {error}") from None
        if address.scheme not in ("http", "https") or not address.host:
            raise InvalidParams(
                f"URL must begin with http:// or https://, as in http://127.0.0.1:8080, not {url!r:.200}"
            )
        self.status, self.failure = f"connecting to {self.name} ...", None
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._params = {"interval_ms": str(interval_ms), **({} if model is None else {"model": model})}

    failure: Exception | None

    def run(self, take: Take, stop: threading.Event) -> None:
        """See `EventSource`."""
        import httpx

        timeout = httpx.Timeout(_CONNECT_S, read=_SILENCE_S)
        was_there = False

        def begin() -> None:
            nonlocal was_there
            was_there, self.status = True, ""

        with httpx.Client(headers=self._headers, timeout=timeout) as client:
            while not stop.is_set():
                try:
                    self._read(client, take, stop, begin)
                    self.status = "the server ended the stream; trying again ..."
                except httpx.HTTPError as error:
                    if not was_there:
                        self.failure = EngineError(
                            f"{self.name} cannot be reached: {str(error) or type(error).__name__}"
                        )
                        return
                    self.status = "the connection was lost; trying again ..."
                except EngineError as error:
                    self.failure = error
                    return
                stop.wait(_AGAIN_S)

    def _read(self, client: httpx.Client, take: Take, stop: threading.Event, begin: Callable[[], None]) -> None:
        with client.stream("GET", f"{self.name}/v1/engine/events", params=self._params) as response:
            if response.status_code == 503:  # it loads, or is about to end
                response.read()
                self.status = f"{_message(response)}; trying again ..."
                return
            if response.status_code != 200:
                response.read()
                raise EngineError(f"{self.name}: {_message(response)}")
            begin()
            for name, members in read_events(response.iter_lines()):
                take(name, members)
                if stop.is_set():
                    return


def _message(response: httpx.Response) -> str:
    """Return why a server refused, in its own words where it has some."""
    with suppress(ValueError, KeyError, TypeError):
        return str(response.json()["error"]["message"])
    return f"HTTP {response.status_code}; is this a paceline server?"


def read_events(lines: Iterator[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the events of a stream: their names and members."""
    name = ""
    for line in lines:
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


class LocalEvents:
    """The events of an engine of this process."""

    def __init__(self, engine: EngineClient, model: str, *, interval_ms: int = 250) -> None:
        """model: its name, for the title."""
        self.name, self.status = "in this process", ""
        self.failure: Exception | None = None
        self._model = model
        self._engine, self._interval_s = engine, interval_ms / 1000

    def run(self, take: Take, stop: threading.Event) -> None:
        """See `EventSource`."""
        asyncio.run(self._watch(take, stop))

    async def _watch(self, take: Take, stop: threading.Event) -> None:
        from paceline.server.engine_events.engine_watch import EngineWatch
        from paceline.server.engine_events.event_reader import EventReader, engine_facts

        watch = EngineWatch(lambda: self._engine, lambda: "shutdown")
        reader = EventReader(watch, engine_facts(self._engine, self._model, ""), interval_s=self._interval_s)
        with reader:
            while not stop.is_set():
                with suppress(TimeoutError):
                    event = await asyncio.wait_for(reader.next(), 0.2)
                    take(event.name, event.members)
                    if event.name == "end":
                        return
