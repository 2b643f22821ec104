"""Requests end to end: completed, streamed, refused, cancelled, and aborted when the client disconnects."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import httpx
import pytest
from tests.server.stand_in import prompts

from paceline.errors import DecodeError
from paceline.streaming import FinishReason

ENDLESS = {"max_tokens": None}


def events(text: str) -> list[str]:
    """The data of the events, comments aside."""
    return [part.removeprefix("data: ") for part in text.split("\n\n") if part.startswith("data: ")]


def test_streamed_text_is_the_collected_text(worlds: Any) -> None:
    """For one prompt and for several, choice by choice."""
    world = worlds()
    for count in (1, 3):
        whole = world.post(prompts=prompts(count), sampling={"max_tokens": 20}).json()["texts"]
        response = world.post(prompts=prompts(count), sampling={"max_tokens": 20}, stream=True)
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        *parts, done = events(response.text)
        assert done == "[DONE]"
        texts = [""] * count
        for part in map(json.loads, parts):
            texts[part["prompt"]] += part["text"]
        assert texts == whole
        assert [len(text) for text in texts] == [20] * count


def test_the_opening_of_a_stream_comes_before_the_first_token(worlds: Any) -> None:
    """While the engine still computes the prompt."""
    world = worlds()
    world.engine.backend.hold()
    body = {"prompts": prompts(1), "stream": True, "opening": "data: here\n\n"}
    with world.client.stream("POST", "/v1/probe", json=body) as response:
        parts = response.iter_text()
        assert next(parts) == "data: here\n\n"
        world.engine.backend.gate.set()
        assert events("".join(parts))[-1] == "[DONE]"


def test_a_full_queue_is_a_429_with_the_time_to_wait_and_begins_nothing(worlds: Any) -> None:
    """If only some of several prompts have a place, none of them runs."""
    world = worlds(num_slots=1, max_queue=1)
    world.engine.backend.hold()
    with world.raw(prompts=prompts(1)):
        world.engine.backend.wait_for_pass()
        response = world.post(prompts=prompts(2), stream=True)
        assert response.status_code == 429
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert response.json()["error"]["code"] == "queue_full"
        assert world.client.get("/health/ready").status_code == 503
        world.engine.backend.gate.set()
        assert {world.engine.ends.reason(), world.engine.ends.reason()} == {FinishReason.LENGTH, FinishReason.CANCELLED}


def test_more_prompts_than_the_server_ever_takes_are_a_400(worlds: Any) -> None:
    """Trying again would not help, so it is not called a full queue."""
    world = worlds(num_slots=1, max_queue=1)
    response = world.post(prompts=prompts(3))
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_params")


def test_a_prompt_that_is_too_long_is_refused_with_its_numbers(worlds: Any) -> None:
    """In OpenAI's words, with llama-server's members."""
    response = worlds(num_cells=5000).post(prompts=["x" * 6000], stream=True)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["n_prompt_tokens"], error["n_ctx"]) == ("context_length_exceeded", 6000, 5000)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_a_disconnect_frees_the_slot_of_a_running_request(worlds: Any, streaming: bool, half: bool) -> None:
    """Whether it streams or not, in the tick after; a socket that is only half closed counts as disconnected."""
    world = worlds(num_slots=1)
    world.engine.backend.hold()
    connection = world.raw(prompts=prompts(1), stream=streaming, sampling=ENDLESS)
    world.engine.backend.wait_for_pass()
    connection.shutdown(socket.SHUT_WR) if half else connection.close()
    world.server.until(lambda: world.server.service.request_registry.count == 0)
    world.engine.backend.gate.set()
    assert world.engine.ends.reason() is FinishReason.CANCELLED
    world.engine.ends.freed()
    world.server.do(world.server.service.in_flight.wait_idle())
    world.engine.assert_empty()
    connection.close()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_disconnect_takes_a_request_out_of_the_queue(worlds: Any, streaming: bool) -> None:
    """It never gets a slot; the earlier request goes on."""
    world = worlds(num_slots=1)
    world.engine.backend.hold()
    with world.raw(prompts=prompts(1)) as first:
        world.engine.backend.wait_for_pass()
        second = world.raw(prompts=prompts(1), stream=streaming, sampling=ENDLESS)
        world.server.until(lambda: world.server.service.request_registry.count == 2)
        second.close()
        world.server.until(lambda: world.server.service.request_registry.count == 1)
        world.engine.backend.gate.set()
        assert {world.engine.ends.reason(), world.engine.ends.reason()} == {FinishReason.CANCELLED, FinishReason.LENGTH}
        assert b"200 OK" in first.recv(65536)
    world.server.do(world.server.service.in_flight.wait_idle())
    world.engine.assert_empty()


def test_a_disconnect_in_the_middle_of_a_stream_frees_its_slot(worlds: Any) -> None:
    """The client has read some of it and breaks off."""
    world = worlds(num_slots=1)
    world.engine.hold_after(5)
    with world.client.stream("POST", "/v1/probe", json=streamed(sampling=ENDLESS)) as response:
        assert next(response.iter_lines()).startswith("data: ")
    world.server.until(lambda: world.server.service.request_registry.count == 0)
    world.engine.backend.gate.set()
    assert world.engine.ends.reason() is FinishReason.CANCELLED
    world.engine.ends.freed()
    world.server.do(world.server.service.in_flight.wait_idle())
    world.engine.assert_empty()


def test_a_failing_pass_ends_a_stream_with_one_error_and_then_done(worlds: Any) -> None:
    """After a 200 there is one terminal event, and the mark of the end."""
    world = worlds()
    world.engine.faults.next_passes.extend([DecodeError("/secret/place broke")] * 5)
    response = world.post(**streamed())
    assert response.status_code == 200
    *_, last, done = events(response.text)
    assert json.loads(last)["error"]["code"] == "decode_error"
    assert "/secret" not in last
    assert done == "[DONE]"
    assert response.text.count('"error"') == 1


def test_a_failing_pass_is_a_500_where_nothing_was_streamed(worlds: Any) -> None:
    """With our code, in the API's shape."""
    world = worlds()
    world.engine.faults.next_passes.extend([DecodeError("broke")] * 5)
    response = world.post(prompts=prompts(1))
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")


def test_a_route_that_cannot_render_ends_its_stream_in_order(worlds: Any) -> None:
    """The request is cancelled, its client reads an error without internal details."""
    world = worlds(num_cells=400_000)
    response = world.post(**streamed(sampling=ENDLESS), broken=True)
    *_, last, done = events(response.text)
    assert json.loads(last)["error"]["code"] == "internal_error"
    assert done == "[DONE]"
    assert world.engine.ends.reason() is FinishReason.CANCELLED


def test_a_route_that_fails_leaves_nothing_running(worlds: Any) -> None:
    """Whatever it had begun, with or without a reader."""
    world = worlds(num_cells=400_000)
    assert world.client.post("/v1/left", json={"prompts": prompts(2)}).status_code == 500
    assert {world.engine.ends.reason(), world.engine.ends.reason()} == {FinishReason.CANCELLED}
    assert world.server.call(lambda: world.server.service.request_registry.count) == 0


@pytest.mark.parametrize("streaming", [False, True])
def test_a_deadline_is_reported_as_an_error(worlds: Any, streaming: bool) -> None:
    """A stream ends with the code; a response without a stream has a status."""
    world = worlds()
    world.engine.backend.hold()
    body = {"prompts": prompts(1), "stream": streaming, "options": {"queue_timeout_s": 1e-9}, "sampling": ENDLESS}
    with world.raw(prompts=prompts(1)), world.raw(prompts=prompts(1)):
        world.engine.backend.wait_for_pass()
        world.server.until(lambda: world.server.service.request_registry.count == 2)
        with world.raw(**body) as third:
            world.server.until(lambda: world.server.service.request_registry.count == 3)
            world.engine.backend.gate.set()
            received = read_all(third)
    assert b'"code":"deadline"' in received
    assert (b" 504 " in received) is not streaming
    assert received.rstrip().endswith(b"[DONE]\n\n\r\n0") is streaming


def test_a_request_is_cancelled_by_its_id(worlds: Any) -> None:
    """Its stream ends with that code; a second cancel finds nothing."""
    world = worlds()
    world.engine.hold_after(5)
    headers = {"x-request-id": "mine/1"}
    with world.client.stream("POST", "/v1/probe", json=streamed(sampling=ENDLESS), headers=headers) as response:
        assert response.headers["x-request-id"] == "mine/1"
        lines = response.iter_lines()
        next(lines)
        done = httpx.post(world.server.url + "/v1/requests/mine%2F1/cancel")
        assert done.json() == {"id": "mine/1", "cancelled": True}
        world.engine.backend.gate.set()
        rest = events("\n".join(lines) + "\n\n")
    assert json.loads(rest[-2])["error"]["code"] == "cancelled"
    assert rest[-1] == "[DONE]"
    again = world.client.post("/v1/requests/mine%2F1/cancel")
    assert again.json()["cancelled"] is False


def test_a_cancelled_request_that_does_not_stream_gets_one_response(worlds: Any) -> None:
    """Its client gets one response, with the error."""
    world = worlds()
    world.engine.backend.hold()
    with world.raw(prompts=prompts(1), sampling=ENDLESS, request_id="x") as waiting:
        world.engine.backend.wait_for_pass()
        world.server.call(world.server.service.request_registry.cancel_all)
        world.engine.backend.gate.set()
        received = read_all(waiting)
    assert received.startswith(b"HTTP/1.1 499")
    assert b'"code":"cancelled"' in received


def test_several_open_requests_may_have_one_id(worlds: Any) -> None:
    """It is the client's; cancelling it cancels all of them."""
    world = worlds()
    world.engine.backend.hold()
    with (
        world.raw(request_id="same", **streamed(sampling=ENDLESS)) as one,
        world.raw(request_id="same", **streamed(sampling=ENDLESS)) as two,
    ):
        world.server.until(lambda: world.server.service.request_registry.count == 2)
        assert world.client.post("/v1/requests/same/cancel").json()["cancelled"] is True
        world.engine.backend.gate.set()
        assert all(b'"code":"cancelled"' in read_all(each) for each in (one, two))


def test_a_waiting_stream_sends_keep_alives(worlds: Any) -> None:
    """Comments come while it waits, also before the first token."""
    world = worlds({"heartbeat_s": 0.01})
    world.engine.backend.hold()
    with world.client.stream("POST", "/v1/probe", json=streamed()) as response:
        lines = response.iter_lines()
        assert [next(lines) for _ in range(4)] == [": ping", "", ": ping", ""]
        world.engine.backend.gate.set()
        assert list(lines)[-2] == "data: [DONE]"


def test_a_reader_that_stops_reading_loses_its_stream_and_the_slot_is_free(worlds: Any) -> None:
    """The tokens buffered for it stay bounded, however many the model generates."""
    world = worlds(num_cells=400_000)
    with world.raw(**streamed(sampling=ENDLESS, options={"max_buffered_tokens": 100})):
        assert world.engine.ends.reason() is FinishReason.SLOW_READER
        world.engine.ends.freed()


def test_choices_of_one_prompt_come_in_one_stream(worlds: Any) -> None:
    """Each with its number and its end."""
    response = worlds().post(**streamed(sampling={"n": 2, "seed": 1, "temperature": 1.0, "max_tokens": 5}))
    parts = [json.loads(part) for part in events(response.text)[:-1]]
    assert {part["choice"] for part in parts} == {0, 1}
    assert sum(part["reason"] == "length" for part in parts) == 2


def streamed(**more: Any) -> dict[str, Any]:
    return {"prompts": prompts(1), "stream": True, **more}


def read_all(connection: socket.socket) -> bytes:
    """Read to the end of a response on an open connection: the last chunk, or as many bytes as the head announces."""
    received = b""
    while not is_whole(received):
        part = connection.recv(65536)
        assert part, received
        received += part
    return received


def is_whole(received: bytes) -> bool:
    head, _, body = received.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    return len(body) >= int(length[1]) if length else received.endswith(b"\r\n0\r\n\r\n")
