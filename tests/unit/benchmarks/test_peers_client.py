"""The client and the driver against a server of a few lines."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, Self

import pytest
from benchmarks.peers.client import Call, LlamaServerDialect, OpenAiDialect, Reply, read_reply, stream
from benchmarks.peers.driver import Run
from benchmarks.peers.workloads import PlannedRequest, Segment, Workload

Body = dict[str, Any]
Send = Callable[[str], Awaitable[None]]
Serve = Callable[[Body, Send], Awaitable[None]]
CALL = Call(token_ids=[1, 2, 3], text="a b c", max_tokens=2)


def event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def token(number: int) -> str:
    return event(content="x", tokens=[number], stop=False)


def end(generated: int, prompt: int = 3) -> str:
    return event(content="", tokens=[], stop=True, tokens_predicted=generated, tokens_evaluated=prompt)


class FakeServer:
    """Passes the body of every request and a `send` to `serve`, which writes the response."""

    def __init__(self, serve: Serve) -> None:
        self.bodies: list[Body] = []
        self._handlers: set[asyncio.Task[None]] = set()
        self._serve = serve

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._begin, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await asyncio.gather(*self._handlers)
        await self._server.wait_closed()

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._handlers.add(asyncio.create_task(self._handle(reader, writer)))

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)

        async def send(text: str) -> None:
            data = text.encode()
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await writer.drain()

        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await self._serve(body, send)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def ask(serve: Serve, call: Call = CALL, leaves_after: int | None = None) -> tuple[Reply, list[int], list[Body]]:
    async with FakeServer(serve) as server:
        counts: list[int] = []
        reply = await stream(
            server.port, LlamaServerDialect(), call, on_events=counts.append, leaves_after=leaves_after
        )
        return reply, counts, server.bodies


def test_tokens_come_with_their_times_and_totals() -> None:
    """Each event at its own time, and the totals of the last one."""

    async def serve(_: Body, send: Send) -> None:
        await send(token(7))
        await asyncio.sleep(0.05)
        await send(token(8))
        await send(end(2))

    reply, counts, bodies = asyncio.run(ask(serve))
    assert (reply.status, reply.num_generated, reply.num_prompt, reply.token_ids) == ("complete", 2, 3, [7, 8])
    assert reply.sizes == [1, 1]
    assert reply.times_s[1] - reply.times_s[0] >= 0.04
    assert counts[-1] == 3
    assert (bodies[0]["prompt"], bodies[0]["n_predict"], bodies[0]["ignore_eos"]) == ([1, 2, 3], 2, True)


def test_a_schema_and_an_adapter_are_in_the_request() -> None:
    """With a schema the model may end the text."""
    body = LlamaServerDialect().body(Call(token_ids=[1], text="", max_tokens=2, schema={"type": "null"}, adapter=1))
    assert (body["json_schema"], body["ignore_eos"], body["lora"]) == (
        {"type": "null"},
        False,
        [{"id": 1, "scale": 1.0}],
    )


def test_a_client_that_leaves_hangs_up() -> None:
    """After the wanted events; its reply counts the tokens until then."""

    async def serve(_: Body, send: Send) -> None:
        for number in range(1000):
            await send(token(number))
            await asyncio.sleep(0.002)

    reply, counts, _ = asyncio.run(ask(serve, leaves_after=3))
    assert reply.status == "left"
    assert 3 <= reply.num_generated == counts[-1] < 50


@pytest.mark.parametrize(
    ("texts", "problem"),
    [([token(1)], "data: "), ([token(1), event(error={"message": "full"})], "full"), ([], "HTTP/1.1 200")],
)
def test_a_response_without_its_end_is_a_failure(texts: list[str], problem: str) -> None:
    """A broken connection, an error within the stream, an empty one."""

    async def serve(_: Body, send: Send) -> None:
        for text in texts:
            await send(text)

    reply, _, _ = asyncio.run(ask(serve))
    assert reply.status == "failed"
    assert problem in reply.problem


def test_no_server_is_a_failure() -> None:
    """With the system's words."""

    async def refused() -> Reply:
        async with FakeServer(generate) as server:
            port = server.port
        return await stream(port, LlamaServerDialect(), CALL, on_events=lambda _: None)

    reply = asyncio.run(refused())
    assert (reply.status, reply.problem.split(":")[0]) == ("failed", "no connection")


def test_events_are_read_across_pieces() -> None:
    """An event belongs to the piece in which its line ended."""
    data = (token(1) + token(2) + end(2)).encode()
    pieces = [(1.0, data[:20]), (2.0, data[20:80]), (3.0, data[80:])]
    reply = read_reply(pieces, 0.5, LlamaServerDialect(), 2, has_left=False)
    assert (reply.status, reply.token_ids, reply.times_s, reply.end_s) == ("complete", [1, 2], [2.0, 3.0], 3.0)


def test_openai_events_count_as_tokens_where_they_have_text() -> None:
    """The totals equal the usage's."""
    chunks = [event(choices=[{"text": "a"}]), event(choices=[{"text": ""}])]
    data = "".join([*chunks, event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 2}), "data: [DONE]\n\n"])
    reply = read_reply([(1.0, data.encode())], 0.5, OpenAiDialect(), 2, has_left=False)
    assert (reply.status, reply.sizes, reply.num_generated, reply.num_prompt) == ("complete", [1], 2, 3)
    assert OpenAiDialect().body(CALL)["prompt"] == "a b c"


# ---- the driver


class FakePrompts:
    """Ids are the seed, as often as the segment is long."""

    def token_ids(self, segments: tuple[Segment, ...], variation: int = 0) -> list[int]:
        return [segment.seed for segment in segments for _ in range(segment.length)]

    def text(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))


def planned(seed: int, **options: Any) -> PlannedRequest:
    return PlannedRequest(role="r", segments=(Segment(seed, 2),), **{"max_tokens": 2} | options)


def drive(serve: Serve, *requests: PlannedRequest, **options: Any) -> tuple[list[Reply], list[Body], int]:
    """Run the requests; returns replies and the bodies that the server got, without that of the warm-up."""
    workload = Workload(name="w", title="", requests=requests, tuned=(), headline="tokens_per_s", **options)

    async def run() -> tuple[list[Reply], list[Body], int]:
        async with FakeServer(serve) as server:
            kills: list[int] = []
            running = SimpleNamespace(port=server.port, kill_engine=lambda: kills.append(1))
            replies = await Run(workload, FakePrompts(), running, LlamaServerDialect()).all()
            return replies, server.bodies[1:], len(kills)

    return asyncio.run(run())


async def generate(body: Body, send: Send) -> None:
    for number in range(body["n_predict"]):
        await send(token(100 + number))
        await asyncio.sleep(0.001)
    await send(end(body["n_predict"], len(body["prompt"])))


def test_a_turn_continues_what_was_generated() -> None:
    """Its prompt is the earlier prompt, the earlier output and its own segments."""
    replies, bodies, _ = drive(generate, planned(1), planned(2, after=(0,), continues=0))
    assert [body["prompt"] for body in bodies] == [[1, 1], [1, 1, 100, 101, 2, 2]]
    assert [reply.status for reply in replies] == ["complete", "complete"]


def test_a_request_begins_when_another_one_has_got_so_far() -> None:
    """While the other still runs."""
    replies, _, _ = drive(generate, planned(1, max_tokens=100), planned(2, after=(0,), after_events=10))
    assert replies[0].times_s[9] <= replies[1].start_s < replies[0].end_s


def test_a_closed_loop_has_at_most_its_width_at_once() -> None:
    """In the order of the table."""
    open_now, most = 0, 0

    async def serve(body: Body, send: Send) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await generate(body, send)
        open_now -= 1

    replies, bodies, _ = drive(serve, *(planned(seed, max_tokens=5) for seed in range(6)), width=2)
    assert most == 2
    assert [body["prompt"][0] for body in bodies] == sorted(body["prompt"][0] for body in bodies)
    assert len(replies) == 6


def test_the_engine_is_killed_once() -> None:
    """After some events of the first stream that has them."""
    _, _, kills = drive(generate, planned(1, max_tokens=40), planned(2, max_tokens=40), kills_engine=True)
    assert kills == 1


@pytest.mark.parametrize(("short", "cut"), [(1, 0), (0, 1)])
def test_a_reply_of_another_length_is_a_failure(short: int, cut: int) -> None:
    """Fewer tokens than asked for, or a prompt that was cut: its speed is no speed of this workload."""

    async def serve(body: Body, send: Send) -> None:
        is_warm_up = body["prompt"][0] == 0
        await send(token(1))
        await send(end(body["n_predict"] - short * (not is_warm_up), len(body["prompt"]) - cut))

    replies, _, _ = drive(serve, planned(1))
    assert replies[0].status == "failed"
    assert f"{2 - short} of 2 tokens, for {2 - cut} of 2 of the prompt" in replies[0].problem


@pytest.mark.parametrize(
    ("reason", "status", "generated"), [("length", "complete", 5), ("stop", "failed", 0), (None, "failed", 0)]
)
def test_a_server_without_totals_counts_by_the_length(reason: str | None, status: str, generated: int) -> None:
    """Its events have no text for parts of characters, so that they cannot be counted."""
    data = event(choices=[{"text": ""}]) + event(choices=[{"text": "", "finish_reason": reason}])
    reply = read_reply([(1.0, data.encode())], 0.5, OpenAiDialect(), 5, has_left=False)
    assert (reply.status, reply.num_generated, reply.sizes) == (status, generated, [])
