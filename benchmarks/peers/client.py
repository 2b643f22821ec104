"""A cheap HTTP client: one socket a request, which stores the received bytes with their times and parses them afterwards."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Status = Literal["complete", "left", "failed"]


@dataclass(slots=True)
class Reply:
    """The response to a request. Times are seconds of `time.perf_counter`; `sizes` are the tokens of each event in `times_s`."""

    start_s: float
    end_s: float = 0.0
    status: Status = "failed"
    problem: str = ""
    times_s: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_prompt: int = 0
    num_generated: int = 0
    is_full: bool = False  # ended for its length: it has all the tokens it may have


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One completion to request: greedy, streamed, of a prompt of token ids."""

    token_ids: list[int]
    text: str  # the same prompt, for servers that take no ids
    max_tokens: int
    schema: dict[str, Any] | None = None
    adapter: int | None = None


class Dialect(Protocol):
    """The request for a completion in a server's API, and the parser of its events."""

    path: str
    takes_ids: bool

    def body(self, call: Call) -> dict[str, Any]:
        """Return the request's JSON."""

    def read(self, event: dict[str, Any], reply: Reply) -> int:
        """Note the totals that the event carries, and return how many tokens came with it."""


class LlamaServerDialect:
    """`/completion`, as llama-server and paceline have it."""

    path = "/completion"
    takes_ids = True

    def body(self, call: Call) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "prompt": call.token_ids, "n_predict": call.max_tokens, "stream": True, "temperature": 0, "seed": 1,
            "ignore_eos": call.schema is None, "cache_prompt": True, "return_tokens": True,
        }  # fmt: skip
        if call.schema is not None:
            fields["json_schema"] = call.schema
        if call.adapter is not None:
            fields["lora"] = [{"id": call.adapter, "scale": 1.0}]
        return fields

    def read(self, event: dict[str, Any], reply: Reply) -> int:
        if event.get("stop"):
            reply.num_generated = event["tokens_predicted"]
            reply.num_prompt = event["tokens_evaluated"]
        ids = event.get("tokens") or []
        reply.token_ids += ids
        return len(ids)


class OpenAiDialect:
    """`/v1/completions` with a prompt of text, for servers that have nothing else: an event counts as one token."""

    path = "/v1/completions"
    takes_ids = False

    def body(self, call: Call) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "prompt": call.text, "max_tokens": call.max_tokens, "stream": True, "temperature": 0, "seed": 1,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        if call.schema is not None:
            fields["response_format"] = {"type": "json_object", "schema": call.schema}
        return fields

    def read(self, event: dict[str, Any], reply: Reply) -> int:
        if usage := event.get("usage"):
            reply.num_prompt, reply.num_generated = usage["prompt_tokens"], usage["completion_tokens"]
        choices = event.get("choices", ())
        reply.is_full |= any(choice.get("finish_reason") == "length" for choice in choices)
        return int(any(choice.get("text") for choice in choices))


class StreamReader(asyncio.Protocol):
    """Send one request and keep the bytes of its response with their times. `closed` is done when the connection ends."""

    def __init__(self, request: bytes, on_events: Callable[[int], None]) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pieces: list[tuple[float, bytes]] = []
        self.has_left = False
        self._request, self._on_events = request, on_events
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Keep the bytes, and report how many events begin in them."""
        self.pieces.append((time.perf_counter(), data))
        if num_events := data.count(b"data: {"):
            self._on_events(num_events)

    def leave(self) -> None:
        """Hang up."""
        if self._transport is not None and not self.closed.done():
            self.has_left = True
            self._transport.abort()

    def connection_lost(self, _: Exception | None) -> None:
        """Complete `closed`: whether the response was whole is in the bytes."""
        if not self.closed.done():
            self.closed.set_result(None)


def request_bytes(dialect: Dialect, call: Call) -> bytes:
    """Return the request as the bytes of HTTP; the server closes the connection at its end."""
    data = json.dumps(dialect.body(call)).encode()
    head = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\nconnection: close"
    return f"POST {dialect.path} HTTP/1.1\r\n{head}\r\n\r\n".encode() + data


def read_reply(
    pieces: list[tuple[float, bytes]], start_s: float, dialect: Dialect, max_tokens: int, *, has_left: bool
) -> Reply:
    """Parse the received bytes: an event's time is the time of the piece in which its line ended.

    If a server reports no totals, a reply that ended for its length has `max_tokens`.
    """
    reply = Reply(start_s, end_s=pieces[-1][0] if pieces else time.perf_counter())
    rest = b""
    for time_s, data in pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    reply.problem = str(event["error"])[:300]
                elif num_tokens := dialect.read(event, reply):
                    reply.times_s.append(time_s)
                    reply.sizes.append(num_tokens)
    if reply.is_full and not reply.num_generated:
        reply.num_generated = max_tokens
    if has_left:
        reply.status = "left"
        reply.num_generated = sum(reply.sizes)
    elif reply.num_generated and not reply.problem:
        reply.status = "complete"
    elif not reply.problem:
        reply.problem = b"".join(data for _, data in pieces)[-300:].decode(errors="replace") or "no response"
    return reply


async def stream(
    port: int, dialect: Dialect, call: Call, *, on_events: Callable[[int], None], leaves_after: int | None = None
) -> Reply:
    """Run one request; a client that leaves hangs up after `leaves_after` events."""
    loop = asyncio.get_running_loop()
    num_events = 0

    def count(num_new: int) -> None:
        nonlocal num_events
        num_events += num_new
        on_events(num_events)
        if leaves_after is not None and num_events >= leaves_after:
            reader.leave()

    reader = StreamReader(request_bytes(dialect, call), count)
    start_s = time.perf_counter()
    try:
        await loop.create_connection(lambda: reader, "127.0.0.1", port)
    except OSError as error:
        return Reply(start_s, end_s=time.perf_counter(), problem=f"no connection: {error}")
    await reader.closed
    return read_reply(reader.pieces, start_s, dialect, call.max_tokens, has_left=reader.has_left)
