"""An HTTP client that costs little: sockets, and no more of the protocol than the server's responses use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a response. headers: names in lower case."""

    status: int
    headers: dict[str, str]


class RawConnection:
    """One connection; one request at a time. is_whole: the last response was read to its end, and another request may be sent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.is_whole = True

    @classmethod
    async def open(cls, port: int) -> Self:
        """To this machine."""
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def post(self, path: str, body: dict[str, Any], request_id: str = "") -> Head:
        """Send a request and read the head of its response."""
        self.send(path, body, request_id)
        return await self.head()

    def send(self, path: str, body: dict[str, Any], request_id: str = "") -> None:
        """Send a request."""
        data = json.dumps(body).encode()
        name = f"x-request-id: {request_id}\r\n" if request_id else ""
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{name}content-length: {len(data)}\r\n\r\n"
        self.is_whole = False
        self._writer.write(head.encode() + data)

    async def head(self) -> Head:
        """Read the head of a response."""
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
        pairs = (line.partition(":") for line in lines)
        return Head(int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs})

    async def whole(self, head: Head) -> bytes:
        """Return the rest of a response."""
        if "content-length" in head.headers:
            body = await self._reader.readexactly(int(head.headers["content-length"]))
        else:
            body = b"".join([part async for part in self._chunks()])
        self.is_whole = True
        return body

    async def events(self) -> AsyncIterator[str]:
        """The data of a stream's events, to its end; comments are left out."""
        rest = b""
        async for part in self._chunks():
            *events, rest = (rest + part).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: "):
                    yield event[6:].decode()
                else:
                    assert event.startswith(b":"), event
        assert rest == b"", rest
        self.is_whole = True

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self._reader.readline(), 16):
            part = await self._reader.readexactly(size + 2)
            yield part[:-2]
        assert await self._reader.readline() == b"\r\n"

    def close(self) -> None:
        """At once, whatever is under way."""
        self._writer.close()
