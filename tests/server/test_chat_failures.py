"""Chats of every API on a failing engine: their own errors, at their own places, and free slots."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from tests.server.dialects import DIALECTS, STORY, Dialect, Event, OpenStreams
from tests.server.openai_world import OpenAIServer
from tests.server.running import RunningServer
from tests.server.stand_in import StandInLLM

from paceline.errors import DecodeError
from paceline.server.settings import ServerSettings
from paceline.streaming import FinishReason

pytestmark = pytest.mark.native

EACH = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
FAILED = "the device is gone"
ENDLESS: dict[str, Any] = {"sampling": {"ignore_eos": True}}
APART: dict[str, Any] = {
    "isolation": "process",
    "instruments": (),
    "num_slots": len(DIALECTS),
    "n_ctx": 1024 * len(DIALECTS),
}


class Passes:
    """Lets the passes of a server's engine fail from some on."""

    def __init__(self, server: OpenAIServer) -> None:
        self._backend = server.engine._backend
        self._step = self._backend.step
        self._left: int | None = None
        self._backend.step = self._counted

    def fail_after(self, num_passes: int | None) -> None:
        """None: they do not fail any more."""
        self._left = num_passes

    def _counted(self, rows: Any, lora: Any) -> Any:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise DecodeError(FAILED)
        return self._step(rows, lora)


@pytest.fixture(scope="module")
def world() -> Iterator[OpenAIServer]:
    with OpenAIServer() as world:
        world.passes = Passes(world)  # type: ignore[attr-defined]
        yield world


@pytest.fixture
def passes(world: OpenAIServer) -> Iterator[Passes]:
    passes: Passes = world.passes  # type: ignore[attr-defined]
    yield passes
    passes.fail_after(None)


def assert_free(world: OpenAIServer) -> None:
    """Every slot becomes free, and no request stays open."""
    world.until(lambda: not any(slot.is_processing for slot in world.engine.slots()))
    world.until(lambda: world.engine.num_open == 0)


def read(dialect: Dialect, response: httpx.Response) -> list[Event]:
    """Return the events of a stream to its end."""
    return [event for line in response.iter_lines() if (event := dialect.event(line)) is not None]


# ---- a pass that fails


@EACH
@pytest.mark.parametrize("tool", [False, True], ids=["text", "call"])
def test_a_pass_that_fails_ends_a_stream_with_the_apis_error(
    world: OpenAIServer, passes: Passes, dialect: Dialect, *, tool: bool
) -> None:
    """After generated text, or a part of a call; the next request is served."""
    passes.fail_after(50 if tool else 12)
    with world.client() as client:
        body, headers = dialect.body(400, tool=tool), {"x-request-id": "failed"}
        with client.stream("POST", dialect.path, json=body, headers=headers) as failed:
            assert failed.status_code == 200
            events = read(dialect, failed)
        assert any(dialect.has_text(event) for event in events)
        assert dialect.failure(events) == FAILED
        assert world.watch.ending("failed").reason is FinishReason.ERROR
        assert_free(world)
        passes.fail_after(None)
        with client.stream("POST", dialect.path, json=dialect.body(8)) as fine:
            assert dialect.ending(read(dialect, fine)) in ("length", "incomplete", "max_tokens")


@EACH
def test_a_pass_that_fails_before_the_first_byte_is_a_500(
    world: OpenAIServer, passes: Passes, dialect: Dialect
) -> None:
    """Without streaming, in the API's shape."""
    passes.fail_after(3)
    with world.client() as client:
        response = client.post(dialect.path, json=dialect.body(400, stream=False))
    assert response.status_code == 500
    assert dialect.error_message(response.json()) == FAILED
    assert_free(world)


def test_the_packages_raise_what_a_stream_ends_with(world: OpenAIServer, passes: Passes) -> None:
    """Their own errors, with the message; nothing passes for a whole message."""
    talk: Any = [{"role": "user", "content": STORY}]

    def broken(client: Any, stream: Callable[[Any], Any], error: type[Exception]) -> Exception:
        passes.fail_after(12)
        parts: list[Any] = []
        with client, pytest.raises(error, match=FAILED) as raised:
            for part in stream(client):
                parts.append(part)  # noqa: PERF402 - those before the error count
        assert parts
        return raised.value

    def chat(client: openai.OpenAI) -> Any:
        return client.chat.completions.create(model="tale", messages=talk, max_tokens=400, temperature=0, stream=True)

    def message(client: anthropic.Anthropic) -> Any:
        with client.messages.stream(model="tale", messages=talk, max_tokens=400) as stream:
            yield from stream

    error = broken(world.openai(), chat, openai.APIError)
    assert isinstance(error, openai.APIError)
    assert (error.code, error.type) == ("decode_error", "server_error")
    error = broken(world.anthropic(), message, anthropic.APIStatusError)
    assert isinstance(error, anthropic.APIStatusError)
    assert error.body == {"type": "error", "error": {"type": "api_error", "message": FAILED}}
    broken(world.ollama(), lambda client: client.chat("tale", talk, stream=True), ollama.ResponseError)
    broken(world.ollama(), lambda client: client.generate("tale", STORY, stream=True), ollama.ResponseError)


def test_the_openai_package_reads_a_response_that_failed(world: OpenAIServer, passes: Passes) -> None:
    """By its events, with the generated text in the failed response."""
    passes.fail_after(12)
    with world.openai() as client:
        events = list(client.responses.create(model="tale", input=STORY, temperature=0, stream=True))
    error, failed = events[-2:]
    assert isinstance(error, openai.types.responses.ResponseErrorEvent)
    assert (error.message, error.code) == (FAILED, "decode_error")
    assert isinstance(failed, openai.types.responses.ResponseFailedEvent)
    response = failed.response
    assert response.status == "failed"
    assert response.error is not None
    assert (response.error.code, response.error.message) == ("server_error", FAILED)
    assert response.output
    assert response.usage is None


def test_the_packages_raise_their_errors_for_a_500(world: OpenAIServer, passes: Passes) -> None:
    """Each its own for that status."""
    talk: Any = [{"role": "user", "content": STORY}]
    passes.fail_after(0)
    with world.openai() as client:
        with pytest.raises(openai.InternalServerError, match=FAILED):
            client.chat.completions.create(model="tale", messages=talk)
        with pytest.raises(openai.InternalServerError, match=FAILED):
            client.responses.create(model="tale", input=STORY)
    with world.anthropic() as claude, pytest.raises(anthropic.InternalServerError, match=FAILED):
        claude.messages.create(model="tale", messages=talk, max_tokens=9)
    with world.ollama() as llama:
        for call in (lambda: llama.chat("tale", talk), lambda: llama.generate("tale", STORY)):
            with pytest.raises(ollama.ResponseError, match=FAILED) as raised:
                call()
            assert raised.value.status_code == 500


# ---- a server without room, loading, or shutting down


@EACH
def test_a_server_without_room_says_so_in_the_apis_shape(dialect: Dialect) -> None:
    """429, but 529 in Anthropic's API and 503 in Ollama's, with the time to wait, streamed or not."""
    with OpenAIServer({"num_slots": 1, "max_queue": 0}) as small, small.client() as client:
        with small.watch.held(), client.stream("POST", dialect.path, json=dialect.body(400)):
            for stream in (False, True):
                full = client.post(dialect.path, json=dialect.body(5, stream=stream))
                assert dialect.is_busy(full.status_code)
                assert int(full.headers["retry-after"]) >= 1
                assert dialect.error_message(full.json())


def test_a_server_that_loads_or_drains_refuses_chats_in_every_apis_shape() -> None:
    """503 with the time to wait."""
    llm = StandInLLM(is_loaded=False)
    with RunningServer(ServerSettings(), llm, wait=False) as server, server.client() as client:
        for words in ("Loading model", "shutting down"):
            for dialect in DIALECTS:
                refused = client.post(dialect.path, json=dialect.body(5))
                assert refused.status_code == 503, dialect.name
                assert int(refused.headers["retry-after"]) >= 1
                assert words in dialect.error_message(refused.json())
            llm.load.set()
            server.do(server.service.loaded.wait())
            server.call(server.service.drain)


# ---- a worker that dies


def kill(server: RunningServer) -> int:
    """Kill the worker of this server's engine; return its process id."""
    pid: int = server.engine.worker_pid
    os.kill(pid, signal.SIGKILL)
    return pid


def test_a_worker_that_dies_ends_streams_where_that_was_asked_for() -> None:
    """on_engine_death="fail": each with its API's error; the next chat of each finds a new worker."""
    with OpenAIServer({**APART, "on_engine_death": "fail"}, **ENDLESS) as server, server.client() as client:
        with OpenStreams(server.url, max_tokens=300) as streams:
            streams.wait_begun()
            kill(server)
            ended = streams.wait_ended()
        for dialect in DIALECTS:
            assert "SIGKILL" in dialect.failure(ended[dialect.name]), dialect.name
        assert_free(server)
        for dialect in DIALECTS:
            response = client.post(dialect.path, json=dialect.body(4, stream=False))
            assert response.status_code == 200, dialect.name


def test_a_worker_that_dies_changes_no_stream_where_it_is_replaced() -> None:
    """Each goes on and ends as it would have."""
    with OpenAIServer(APART, **ENDLESS) as server:
        with OpenStreams(server.url, max_tokens=300) as streams:
            streams.wait_begun()
            kill(server)
            ended = streams.wait_ended()
        for dialect in DIALECTS:
            assert dialect.ending(ended[dialect.name]) in ("length", "incomplete", "max_tokens"), dialect.name
        assert server.engine.stats().number("paceline_engine_restarts_total") == 1
        assert_free(server)


def test_an_engine_that_gives_up_ends_streams_and_refuses_chats() -> None:
    """After a crash too many: the streams end with their APIs' errors, and later requests get a 503."""
    with OpenAIServer({**APART, "max_restarts": 1}, **ENDLESS) as server, server.client() as client:
        with OpenStreams(server.url, max_tokens=300) as streams:
            streams.wait_begun()
            first = kill(server)
            server.until(lambda: server.engine.worker_pid not in (None, first))
            kill(server)
            ended = streams.wait_ended()
        for dialect in DIALECTS:
            assert "max_restarts=1" in dialect.failure(ended[dialect.name]), dialect.name
            for stream in (False, True):
                refused = client.post(dialect.path, json=dialect.body(5, stream=stream))
                assert refused.status_code == 503, dialect.name
                assert "max_restarts=1" in dialect.error_message(refused.json())
        assert server.engine.num_open == 0


# ---- clients that leave


@EACH
def test_leaving_in_the_middle_of_a_call_frees_the_slot(world: OpenAIServer, dialect: Dialect) -> None:
    """Streamed or not, whether or not anything of the call has been sent."""
    for stream in (True, False):
        request_id = f"left-{dialect.name}-{stream}"
        body, headers = dialect.body(800, stream=stream, tool=True), {"x-request-id": request_id}

        async def leave(body: Any = body, headers: Any = headers, request_id: str = request_id) -> None:
            async with world.async_client() as client:
                leaving = asyncio.ensure_future(client.post(dialect.path, json=body, headers=headers))
                await asyncio.to_thread(world.watch.wait_queued, request_id)
                await asyncio.to_thread(world.watch.wait_held)
                leaving.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await leaving

        with world.watch.held(64):
            asyncio.run(leave())
            world.wait_closed(request_id)
        assert world.watch.ending(request_id).reason is FinishReason.CANCELLED
        assert_free(world)


@EACH
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for(
    dialect: Dialect, stream: bool, world: OpenAIServer
) -> None:
    """With the number of tokens and the context size, as clients decide by these words to shorten a conversation."""
    long = json.dumps(dialect.body(8, stream=stream)).replace(STORY, "fox " * 3000)
    with world.client() as http:
        response = http.post(dialect.path, content=long)
    assert response.status_code == 400
    expected = r"\((\d+) tokens\) exceeds the available context size \((\d+) tokens\)"
    if dialect.name == "anthropic":
        expected = r"prompt is too long: (\d+) tokens > (\d+) maximum"
    found = re.search(expected, dialect.error_message(response.json()))
    assert found is not None, response.text
    assert int(found[1]) > 3000 > int(found[2]) == world.engine.limits.max_positions
    if dialect.name != "ollama-raw":  # a prompt without a chat template
        assert "truncate" not in response.text  # it would cut the system message or the question
    if dialect.name not in ("anthropic", "ollama-raw"):
        advice = f"shorten the messages, or take a model .* at most {found[2]} tokens"
        assert re.search(advice, dialect.error_message(response.json()))
    if dialect.name in ("openai-chat", "responses"):
        error = response.json()["error"]
        assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (int(found[1]), int(found[2]))
