"""Streams of requests with an X-Conversation-Id: read again, looked up, ended, and kept within limits."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.polling import wait_until
from tests.server import probe
from tests.server.running import LONG_S
from tests.server.stand_in import StandInEngine
from tests.server.world import World

from paceline.server.resumable_streams import ResumableStream, ResumableStreams
from paceline.server.settings import ApiKey
from paceline.streaming import FinishReason

Worlds = Callable[..., World]
CONVERSATION = {"X-Conversation-Id": "talk 1::org/model"}
QUERY = {"conv_id": "talk 1::org/model"}
STREAM: dict[str, Any] = {"prompts": ["a"], "stream": True}
ENDLESS: dict[str, Any] = {**STREAM, "sampling": probe.ENDLESS}


def read_all(client: httpx.Client, start: int = 0, **headers: str) -> bytes:
    response = client.get("/v1/stream", params={**QUERY, "from": start}, headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return response.content


def looked_up(client: httpx.Client, *ids: str, **headers: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.post(
        "/v1/streams/lookup", json={"conversation_ids": list(ids)}, headers=headers
    ).json()
    return found


def leave_early(client: httpx.Client, body: dict[str, Any], headers: dict[str, str]) -> bytes:
    """Start a stream, read its first bytes, and disconnect."""
    with client.stream("POST", "/v1/probe", json=body, headers=headers) as response:
        assert response.status_code == 200
        return next(response.iter_raw())


# ---- over HTTP


def test_an_ended_stream_is_read_again_from_any_byte(worlds: Worlds) -> None:
    """The same bytes, the end marker included."""
    world = worlds()
    sent = world.client.post("/v1/probe", json=STREAM, headers=CONVERSATION).content
    assert sent.endswith(b"data: [DONE]\n\n")
    assert read_all(world.client) == sent
    assert read_all(world.client, 10) == sent[10:]
    assert read_all(world.client, len(sent)) == b""


def test_a_request_outlives_its_client_and_is_resumed_where_that_left(worlds: Worlds) -> None:
    """Text after the hang-up reaches the resuming client."""
    world = worlds()
    world.engine.hold_after(3)
    first = leave_early(world.client, STREAM, CONVERSATION)
    world.engine.backend.gate.set()
    rest = read_all(world.client, len(first))
    assert rest.endswith(b"data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in (first + rest).split(b"\n\n") if line.startswith(b"data: {")]
    assert events[-1]["reason"] == "length"
    assert world.engine.ends.reason() is FinishReason.LENGTH
    assert sum(len(event["ids"]) for event in events) == 8


def test_a_client_may_leave_before_the_first_token(worlds: Worlds) -> None:
    """While the prompt is computed, nothing has been sent yet."""
    world = worlds()
    world.engine.backend.hold()
    with world.server.raw("POST", "/v1/probe", STREAM, **CONVERSATION):
        wait_until(lambda: bool(looked_up(world.client, "talk 1")))
    world.engine.backend.gate.set()
    assert read_all(world.client).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("body", "headers"),
    [(ENDLESS, {}), (ENDLESS, {"X-Conversation-Id": ""}), ({**ENDLESS, "stream": False}, CONVERSATION)],
)
def test_other_requests_end_with_their_client(worlds: Worlds, body: dict[str, Any], headers: dict[str, str]) -> None:
    """Without the header, and if the response is not streamed."""
    world = worlds()
    world.engine.hold_after(3)
    with world.server.raw("POST", "/v1/probe", body, **headers):
        wait_until(lambda: world.engine.num_open == 1)
    world.engine.backend.gate.set()
    assert world.engine.ends.reason() is FinishReason.CANCELLED
    assert looked_up(world.client, "talk 1") == []


def test_several_readers_follow_a_running_stream(worlds: Worlds) -> None:
    """Each from its own place, all to the end."""
    world = worlds()
    world.engine.hold_after(3)
    first = leave_early(world.client, STREAM, CONVERSATION)
    found: list[bytes] = []
    readers = [
        threading.Thread(target=lambda at=at: found.append(read_all(world.client, at))) for at in (0, len(first))
    ]
    for reader in readers:
        reader.start()
    world.engine.backend.gate.set()
    for reader in readers:
        reader.join(LONG_S)
    longer, shorter = sorted(found, key=len, reverse=True)
    assert longer == first + shorter


def test_a_lookup_finds_a_conversation_and_its_variants(worlds: Worlds) -> None:
    """By the whole id, or by the part before ::; other streams are not shown."""
    world = worlds()
    sent = world.client.post("/v1/probe", json=STREAM, headers=CONVERSATION).content
    (one,) = looked_up(world.client, "talk 1", "talk", "other")
    assert one["conversation_id"] == CONVERSATION["X-Conversation-Id"]
    assert (one["is_done"], one["total_bytes"]) == (True, len(sent))
    assert one["completed_at"] >= one["started_at"] > 0
    assert looked_up(world.client, CONVERSATION["X-Conversation-Id"]) == [one]
    assert looked_up(world.client) == []
    assert world.client.post("/v1/streams/lookup", content="{").status_code == 400


def test_a_running_stream_is_not_done(worlds: Worlds) -> None:
    """It has no time of completion."""
    world = worlds()
    world.engine.hold_after(3)
    leave_early(world.client, STREAM, CONVERSATION)
    (one,) = looked_up(world.client, "talk 1")
    assert (one["is_done"], one["completed_at"]) == (False, 0)
    assert one["total_bytes"] > 0


def test_deleting_a_stream_ends_its_request_and_forgets_it(worlds: Worlds) -> None:
    """Readers get the end; a second time is fine."""
    world = worlds()
    world.engine.hold_after(3)
    with world.client.stream("POST", "/v1/probe", json=ENDLESS, headers=CONVERSATION) as running:
        lines = running.iter_lines()
        next(lines)
        assert world.client.delete("/v1/stream", params=QUERY).status_code == 204
        world.engine.backend.gate.set()
        last = [line for line in lines if line]
    assert world.engine.ends.reason() is FinishReason.CANCELLED
    assert last[-1] == "data: [DONE]"
    assert json.loads(last[-2][6:])["error"]["code"] == "cancelled"
    assert world.client.get("/v1/stream", params=QUERY).status_code == 404
    assert world.client.delete("/v1/stream", params=QUERY).status_code == 204


def test_deleting_a_stream_ends_a_request_that_is_still_prepared(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no stream yet, and it never runs; until then it is loading, and not gone."""
    world, has_begun, may_go_on = worlds(), threading.Event(), threading.Event()
    prepare = StandInEngine.prepare

    def slowly(self: StandInEngine, *args: Any) -> Any:
        has_begun.set()
        assert may_go_on.wait(LONG_S)
        return prepare(self, *args)

    monkeypatch.setattr(StandInEngine, "prepare", slowly)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(world.client.post, "/v1/probe", json=ENDLESS, headers=CONVERSATION)
        assert has_begun.wait(LONG_S)
        assert world.client.get("/v1/stream", params=QUERY).status_code == 503
        assert world.client.delete("/v1/stream", params=QUERY).status_code == 204
        may_go_on.set()
        assert sending.result(LONG_S).json()["error"]["code"] == "cancelled"
    assert world.engine.num_open == 0
    assert world.client.get("/v1/stream", params=QUERY).status_code == 404
    assert world.client.post("/v1/probe", json=STREAM, headers=CONVERSATION).content.endswith(b"data: [DONE]\n\n")


def test_deleting_a_stream_ends_every_request_of_it_that_has_only_begun_to_come(worlds: Worlds) -> None:
    """From its headers on, before its body has come, and also if there are two; a later request runs."""
    world, may_go_on = worlds(), threading.Event()
    begun = [threading.Event(), threading.Event()]

    def body(has_begun: threading.Event) -> Iterator[bytes]:
        data = json.dumps(ENDLESS).encode()
        yield data[:5]
        has_begun.set()
        assert may_go_on.wait(LONG_S)
        yield data[5:]

    headers = {**CONVERSATION, "content-type": "application/json"}
    with ThreadPoolExecutor(2) as pool:
        sending = [pool.submit(world.client.post, "/v1/probe", content=body(item), headers=headers) for item in begun]
        assert all(item.wait(LONG_S) for item in begun)
        service: Any = world.server.app.state.service
        world.server.until(lambda: len(service.resumable_streams._waiting.get((b"", QUERY["conv_id"]), ())) == 2)
        assert world.client.get("/v1/stream", params=QUERY).status_code == 503
        assert world.client.delete("/v1/stream", params=QUERY).status_code == 204
        may_go_on.set()
        assert [item.result(LONG_S).json()["error"]["code"] for item in sending] == ["cancelled"] * 2
    assert world.engine.num_open == 0
    assert world.client.post("/v1/probe", json=STREAM, headers=CONVERSATION).content.endswith(b"data: [DONE]\n\n")


def test_a_second_request_of_a_conversation_replaces_the_first(worlds: Worlds) -> None:
    """The first one is cancelled."""
    world = worlds()
    world.engine.hold_after(3)
    leave_early(world.client, ENDLESS, CONVERSATION)
    threading.Timer(0.1, world.engine.backend.gate.set).start()
    sent = world.client.post("/v1/probe", json=STREAM, headers=CONVERSATION).content
    assert {world.engine.ends.reason(), world.engine.ends.reason()} == {FinishReason.CANCELLED, FinishReason.LENGTH}
    assert read_all(world.client) == sent


def test_a_request_that_is_refused_leaves_the_stream_of_its_conversation(worlds: Worlds) -> None:
    """Nothing of it was started."""
    world = worlds()
    sent = world.client.post("/v1/probe", json=STREAM, headers=CONVERSATION).content
    wrong = {**STREAM, "sampling": {"temperature": -1}}
    assert world.client.post("/v1/probe", json=wrong, headers=CONVERSATION).status_code == 400
    assert read_all(world.client) == sent


def test_another_key_sees_no_stream(worlds: Worlds) -> None:
    """Not even that there is one; and it cannot end it."""
    keys = (ApiKey(secret="mine", tenant="a"), ApiKey(secret="other", tenant="b"), ApiKey(secret="third", tenant="a"))
    world = worlds({"api_keys": keys})
    mine = {"Authorization": "Bearer mine"}
    sent = world.client.post("/v1/probe", json=STREAM, headers={**CONVERSATION, **mine}).content
    for secret in ("other", "third"):
        other = {"Authorization": f"Bearer {secret}"}
        missing = world.client.get("/v1/stream", params={"conv_id": "none"}, headers=other)
        response = world.client.get("/v1/stream", params=QUERY, headers=other)
        assert (response.status_code, response.json()) == (404, missing.json())
        assert looked_up(world.client, "talk 1", **other) == []
        assert world.client.delete("/v1/stream", params=QUERY, headers=other).status_code == 204
    assert world.client.get("/v1/stream", params=QUERY).status_code == 401
    assert read_all(world.client, **mine) == sent


@pytest.mark.parametrize(
    ("params", "status"),
    [
        ({}, 400),
        ({"conv_id": ""}, 400),
        ({"conv_id": "x" * 1025}, 400),
        ({"conv_id": "none"}, 404),
        ({**QUERY, "from": "-1"}, 400),
        ({**QUERY, "from": "x"}, 400),
        ({**QUERY, "from": "1" * 21}, 400),
    ],
)
def test_values_that_cannot_be_read_are_refused(worlds: Worlds, params: dict[str, str], status: int) -> None:
    """With a status, before any event."""
    world = worlds()
    world.client.post("/v1/probe", json=STREAM, headers=CONVERSATION)
    response = world.client.get("/v1/stream", params=params)
    assert response.status_code == status
    assert response.json()["error"]["message"]


def test_a_route_that_fails_before_the_stream_leaves_nothing_running(worlds: Worlds) -> None:
    """There is no client to end it by leaving."""
    world = worlds()
    world.engine.hold_after(3)
    assert world.client.post("/v1/left", json={"prompts": ["a"]}, headers=CONVERSATION).status_code == 500
    world.engine.backend.gate.set()
    assert world.engine.ends.reason() is FinishReason.CANCELLED
    assert read_all(world.client) == b""


def test_an_id_that_is_too_long_is_refused(worlds: Worlds) -> None:
    """Before anything runs."""
    world = worlds()
    response = world.client.post("/v1/probe", json=STREAM, headers={"X-Conversation-Id": "x" * 1025})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Conversation-Id"
    world.engine.assert_empty()


def test_a_reader_that_leaves_ends_nothing(worlds: Worlds) -> None:
    """Neither the request nor another reader."""
    world = worlds()
    world.engine.hold_after(3)
    first = leave_early(world.client, STREAM, CONVERSATION)
    with world.client.stream("GET", "/v1/stream", params=QUERY) as reading:
        again = next(reading.iter_raw())
        assert again[: len(first)] == first[: len(again)]  # a piece has the bytes that have come by then
    world.engine.backend.gate.set()
    assert read_all(world.client).endswith(b"data: [DONE]\n\n")


def test_a_stream_is_cancelled_by_its_request_id_as_well(worlds: Worlds) -> None:
    """As every request."""
    world = worlds()
    world.engine.hold_after(3)
    leave_early(world.client, ENDLESS, {**CONVERSATION, "X-Request-Id": "r1"})
    assert world.client.post("/v1/requests/r1/cancel").json()["cancelled"] is True
    world.engine.backend.gate.set()
    assert b'"code":"cancelled"' in read_all(world.client)


def test_a_draining_server_ends_streams_without_a_reader(worlds: Worlds) -> None:
    """Streams with a reader may complete."""
    world = worlds()
    world.engine.hold_after(3)
    leave_early(world.client, ENDLESS, {"X-Conversation-Id": "left"})
    streams = world.server.service.resumable_streams
    world.server.until(lambda: all(not stream.num_readers for stream in streams.lookup(b"", ["left"])))
    with world.client.stream("POST", "/v1/probe", json=STREAM, headers=CONVERSATION) as running:
        world.server.call(world.server.service.drain)
        world.engine.backend.gate.set()
        assert list(running.iter_lines())[-2] == "data: [DONE]"
    assert {world.engine.ends.reason(), world.engine.ends.reason()} == {FinishReason.CANCELLED, FinishReason.LENGTH}
    world.server.do(world.server.service.in_flight.wait_idle())


def test_shutting_down_ends_every_stream(worlds: Worlds) -> None:
    """With the error that says so."""
    world = worlds()
    world.engine.hold_after(3)
    with world.client.stream("POST", "/v1/probe", json=ENDLESS, headers=CONVERSATION) as running:
        lines = running.iter_lines()
        next(lines)
        world.engine.close()
        last = [line for line in lines if line]
    assert last[-1] == "data: [DONE]"
    assert json.loads(last[-2][6:])["error"]["code"] == "shutdown"


# ---- limits


def test_a_request_that_comes_later_replaces_what_came_before_whichever_is_ready_first() -> None:
    """The earlier request is cancelled if it still waits; a later waiting request goes on."""
    streams, cancelled = ResumableStreams(), []
    one, two, three = (lambda name=name: cancelled.append(name) for name in ("one", "two", "three"))
    with streams.waiting(b"", "talk", one), streams.waiting(b"", "talk", two), streams.waiting(b"", "talk", three):
        stream = streams.open(b"", "talk", lambda: cancelled.append("stream of two"), two)
        assert cancelled == ["one"]
        assert streams.find(b"", "talk") is stream
        streams.open(b"", "talk", lambda: None, three)
        assert cancelled == ["one", "stream of two", "two"]


async def put(stream: ResumableStream, data: bytes) -> None:
    await stream.receive({"type": "http.response.body", "body": data, "more_body": True})


async def read(stream: ResumableStream, offset: int = 0) -> bytes:
    read, is_last = b"", False
    with stream.reading(offset) as next_bytes:
        while not is_last:
            data, is_last = await next_bytes()
            read += data
    return read


def test_the_oldest_bytes_of_a_long_stream_are_dropped() -> None:
    """Offsets go on counting; one that was dropped is reported."""

    async def main() -> None:
        stream = ResumableStreams(max_stream_bytes=10).open(b"", "c", lambda: None)
        await put(stream, b"0123456789")
        await put(stream, b"abc")
        stream.finish()
        await put(stream, b"ignored")
        assert (stream.total_bytes, stream.dropped_bytes) == (13, 3)
        assert await read(stream, 3) == b"3456789abc"
        stream.lost_event = b"lost"
        assert await read(stream, 2) == b"lost"

    asyncio.run(main())


def test_a_part_longer_than_the_limit_keeps_its_end() -> None:
    """And no byte more."""

    async def main() -> None:
        streams = ResumableStreams(max_stream_bytes=4)
        stream = streams.open(b"", "c", lambda: None)
        await put(stream, b"0123456789")
        stream.finish()
        assert await read(stream, 6) == b"6789"
        assert streams.total_bytes == 4

    asyncio.run(main())


def test_all_streams_together_are_limited() -> None:
    """Ended streams are evicted, the oldest first; then the largest running stream loses bytes."""

    async def main() -> None:
        streams = ResumableStreams(max_stream_bytes=10, max_total_bytes=20)
        opened = [streams.open(b"", name, lambda: None) for name in "abcd"]
        for stream in opened[:2]:
            await put(stream, b"x" * 10)
        opened[1].finish()
        opened[0].finish()
        await put(opened[2], b"y" * 5)
        assert streams.find(b"", "b") is None
        assert streams.find(b"", "a") is opened[0]
        await put(opened[3], b"z" * 10)
        assert streams.find(b"", "a") is None
        assert streams.total_bytes == 15
        more = [streams.open(b"", name, lambda: None) for name in "ef"]
        await put(more[0], b"v" * 5)
        await put(more[1], b"w" * 4)
        assert streams.total_bytes == 20
        assert opened[3].kept_bytes == 6
        for stream in (*opened, *more):
            stream.finish()
        for name in "cdef":
            streams.discard(b"", name)
        assert (streams.total_bytes, len(streams)) == (0, 0)

    asyncio.run(main())


def test_ended_streams_are_limited_in_number() -> None:
    """Empty streams take memory too; running streams are not evicted."""

    async def main() -> None:
        streams = ResumableStreams(max_streams=2)
        running = streams.open(b"", "running", lambda: None)
        for number in range(5):
            streams.open(b"", str(number), lambda: None).finish()
        assert len(streams) == 2
        assert streams.find(b"", "running") is running
        assert streams.find(b"", "4") is not None

    asyncio.run(main())


def test_an_ended_stream_is_forgotten_after_a_while() -> None:
    """A reader that has begun reads to the end."""

    async def main() -> None:
        streams = ResumableStreams(ttl_s=0)
        stream = streams.open(b"", "c", lambda: None)
        await put(stream, b"abc")
        stream.finish()
        assert streams.find(b"", "c") is stream
        while streams.find(b"", "c") is not None:
            await asyncio.sleep(0)
        assert streams.total_bytes == 0
        assert await read(stream) == b"abc"

    asyncio.run(asyncio.wait_for(main(), LONG_S))


def test_bytes_of_a_replaced_stream_count_until_it_has_ended() -> None:
    """Its request is cancelled, and its last events still come."""

    async def main() -> None:
        streams, cancelled = ResumableStreams(), []
        first = streams.open(b"", "c", lambda: cancelled.append("first"))
        await put(first, b"abc")
        second = streams.open(b"", "c", lambda: cancelled.append("second"))
        assert (cancelled, streams.find(b"", "c")) == (["first"], second)
        await put(first, b"de")
        assert streams.total_bytes == 5
        first.finish()
        assert streams.total_bytes == 0
        assert streams.find(b"", "c") is second

    asyncio.run(main())


def test_a_lookup_returns_each_stream_of_its_owner_once() -> None:
    """However many of the ids name it: by nesting, or by coming again."""
    streams = ResumableStreams()
    nested = "a" + "::" * 500
    names = ("b", nested, "b::2", "b::1", "b:c", "b::", "bb::x", "b;")
    opened = {name: streams.open(b"me", name, lambda: None) for name in names}
    streams.open(b"other", "b::3", lambda: None)

    def lookup(*ids: str) -> list[str]:
        return [stream.conversation_id for stream in streams.lookup(b"me", ids)]

    assert lookup(*(nested[:length] for length in range(1002))) == [nested]
    assert lookup(*["a"] * 10_000) == [nested]
    assert lookup("b") == ["b", "b::2", "b::1", "b::"]
    assert lookup("b::1", "b", "bb") == ["b::1", "b", "b::2", "b::", "bb::x"]
    assert lookup("b:", "b::1::") == []
    assert streams.lookup(b"me", ["b;"]) == [opened["b;"]]
    streams.discard(b"me", "b::2")
    assert lookup("b") == ["b", "b::1", "b::"]
    assert streams.lookup(b"third", ["b"]) == []
