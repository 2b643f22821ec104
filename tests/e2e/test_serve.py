"""`paceline serve` as a new user meets it: curl, the `openai` package, signals, and the end of its processes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.e2e.served import LONG_S, Served, Worker
from tests.exact import EXACT_FLAGS

from paceline.cli.trace import summarize
from paceline.observability.trace_file import EngineRestarted, read_trace

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them"),
]

FLAGS = (*EXACT_FLAGS, "-np", "4")
TOLD: dict[str, Any] = {"model": "paceline-demo", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
ENDLESS: dict[str, Any] = {**TOLD, "max_tokens": 900}
FOR_LONG: dict[str, Any] = {**ENDLESS, "n": 64}
"""As long as the model goes on, again and again: its client may be slow, and still it has not ended."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One that the tests share which leave it as it was."""
    with Served(*FLAGS) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    """The package's client, set up as its users do."""
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", timeout=LONG_S, max_retries=0) as client:
        yield client


# ---- the openai package


def test_the_package_gets_the_same_text_whole_and_streamed(client: openai.OpenAI) -> None:
    """Completions and chats; the stream has a usage on request."""
    whole = client.completions.create(**TOLD)
    assert whole.usage is not None and whole.usage.completion_tokens == 12
    chunks = list(client.completions.create(**TOLD, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12
    asked: dict[str, Any] = {
        "model": "paceline-demo",
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "temperature": 0,
        "max_completion_tokens": 12,
    }
    chat = client.chat.completions.create(**asked)
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(parts) == chat.choices[0].message.content
    assert [model.id for model in client.models.list()] == ["paceline-demo"]


def test_breaking_out_of_a_stream_frees_its_slot(served: Served, client: openai.OpenAI) -> None:
    """Leaving the loop and closing the stream cancel the request."""
    before = served.metrics()['paceline_requests_finished_total{reason="cancelled"}']
    with client.completions.create(**FOR_LONG, stream=True, extra_body={"ignore_eos": True}) as stream:
        for _ in stream:
            break
    served.assert_idle()
    assert served.metrics()['paceline_requests_finished_total{reason="cancelled"}'] == before + 1


def test_the_asynchronous_client_has_many_streams_at_once(served: Served) -> None:
    """More requests than slots, some finished and some abandoned."""

    async def num_streamed(client: openai.AsyncOpenAI, seed: int) -> int:
        asked = {**TOLD, "temperature": 1, "extra_body": {"ignore_eos": True}}
        stream = await client.completions.create(**asked, seed=seed, stream=True)
        return len("".join([chunk.choices[0].text async for chunk in stream]))

    async def left(client: openai.AsyncOpenAI) -> None:
        async with await client.completions.create(**ENDLESS, stream=True) as stream:
            async for _ in stream:
                break

    async def asked() -> int | None:
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", timeout=LONG_S) as client:
            lengths = await asyncio.gather(
                *(num_streamed(client, seed) for seed in range(12)), *(left(client) for _ in range(6))
            )
            assert all(lengths[:12])
            whole = await client.completions.create(**TOLD)
            return whole.usage and whole.usage.completion_tokens

    assert asyncio.run(asked()) == 12
    served.assert_idle()


def test_the_package_raises_its_own_errors(client: openai.OpenAI) -> None:
    """The status selects the class, which has message and field."""
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.completions.create(**{**TOLD, "temperature": -1})
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


# ---- curl


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_curl_shows_the_events_as_they_come(served: Served) -> None:
    """With only curl's own headers; the last event is the mark of the end."""
    body = json.dumps({**TOLD, "stream": True, "stream_options": {"include_usage": True}})
    done = subprocess.run(
        ["curl", "-sN", served.url + "/v1/completions", "-d", body], capture_output=True, timeout=LONG_S, check=True
    )
    events = done.stdout.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    payloads = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert payloads[-2]["choices"][0]["finish_reason"] == "length"
    assert payloads[-1]["usage"]["completion_tokens"] == 12


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_a_curl_that_is_interrupted_frees_its_slot(served: Served) -> None:
    """In the middle of its response."""
    body = json.dumps({**ENDLESS, "stream": True, "ignore_eos": True})
    command = ["curl", "-sN", served.url + "/completion", "-d", body]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as curl:
        assert curl.stdout is not None
        assert curl.stdout.read(1) == b"d"
        curl.send_signal(signal.SIGINT)
    served.assert_idle()


# ---- how it begins and ends

HOLD = """
import os, sys
if "paceline.engine.worker" in sys.orig_argv:
    with open(os.environ["TEST_HOLD"]) as file:
        file.read()
"""


def held_worker(folder: Path) -> tuple[Path, dict[str, str]]:
    """Return a pipe, and the environment in which a worker starts only once the pipe is written to."""
    gate = folder / "gate"
    os.mkfifo(gate)
    (folder / "sitecustomize.py").write_text(HOLD)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return gate, {"PYTHONPATH": path, "TEST_HOLD": str(gate)}


def test_health_is_loading_and_then_ok(tmp_path: Path) -> None:
    """The port is open and responds while the worker has not even begun; requests get 503 with Retry-After."""
    gate, held = held_worker(tmp_path)
    with Served(*FLAGS, is_ready=False, **held) as served:
        response = served.get("/health")
        assert response.status_code == 503
        assert (response.json()["status"], response.json()["progress"]) == ("loading", 0)
        assert served.get("/health/live").status_code == 200
        assert served.get("/health/ready").status_code == 503
        refused = httpx.post(served.url + "/v1/completions", json=TOLD, timeout=LONG_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
        assert int(refused.headers["retry-after"]) > 0
        gate.write_text("go on")
        served.wait_for("is ready")
        assert served.get("/health").json() == {"status": "ok"}
        assert served.get("/health/ready").status_code == 200
        served.signal(signal.SIGTERM)
        assert served.code() == 0


def test_a_signal_while_it_loads_ends_it(tmp_path: Path) -> None:
    """It exits without an error, and its worker with it."""
    _, held = held_worker(tmp_path)
    with Served(*FLAGS, is_ready=False, **held) as served, served.worker() as worker:
        served.signal(signal.SIGTERM)
        assert served.code() == 0
        worker.wait_gone()


def test_a_signal_lets_streams_end_and_takes_nothing_new() -> None:
    """The worker stands still meanwhile, so that the stream certainly runs when the signal comes."""
    with ThreadPoolExecutor(1) as threads, Served(*FLAGS) as served, served.worker() as worker:
        worker.signal(signal.SIGSTOP)
        asked = {**TOLD, "max_tokens": 300, "ignore_eos": True, "stream_options": {"include_usage": True}}
        reading = threads.submit(events_of, served, asked)
        served.wait_until(lambda: served.metrics()["paceline_http_streams_open"] == 1, "the stream has begun")
        served.signal(signal.SIGTERM)
        served.wait_for("ending")
        refused = httpx.post(served.url + "/v1/completions", json=TOLD, timeout=LONG_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutdown")
        worker.signal(signal.SIGCONT)
        events = reading.result(LONG_S)
        assert served.code() == 0
        worker.wait_gone()
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["usage"]["completion_tokens"] == 300


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_server_and_worker_at_once(number: signal.Signals) -> None:
    """A worker that is stopped is ended as well."""
    with Served(*FLAGS) as served, served.worker() as worker:
        worker.signal(signal.SIGSTOP)
        body = {**TOLD, "stream": True}
        with httpx.stream("POST", served.url + "/v1/completions", json=body, timeout=LONG_S) as response:
            assert response.status_code == 200
            served.signal(number)
            served.wait_for("ending")
            served.signal(number)
            assert served.code() == 128 + number
        worker.wait_gone()


def test_idle_connections_beyond_the_descriptors_stop_nothing() -> None:
    """1,100 connections at a limit of 1,024: requests are served, a killed worker is replaced, the limit is reported."""
    with Served("-t", "1", num_descriptors=1024) as server, ExitStack() as closing:
        server.wait_for("at most 832 connections at once instead of 2048")
        address = ("127.0.0.1", httpx.URL(server.url).port)
        for _ in range(1100):
            closing.enter_context(socket.create_connection(address, timeout=LONG_S))
        assert server.get("/health").status_code == 200
        with server.worker() as worker:
            worker.signal(signal.SIGKILL)
            worker.wait_gone()
        body = {"prompt": "Once", "max_tokens": 2}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=LONG_S).status_code == 200
        assert 832 <= server.num_files() < 960


def test_a_log_that_is_not_read_stops_nothing() -> None:
    """2,000 requests are served meanwhile, their lines arrive in order once they are read, and a signal ends the server."""
    with Served("-t", "1", "-v") as server, server.client() as client:
        server.reads.clear()
        for number in range(2000):
            assert client.get("/health", headers={"x-request-id": f"r{number}"}).status_code == 200
        assert client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 2}).status_code == 200
        server.reads.set()
        server.wait_for("/v1/completions")
        lines = [json.loads(line) for line in server.lines if line.startswith("{")]
        assert [line["request_id"] for line in lines[-901:-1]] == [f"r{number}" for number in range(1100, 2000)]
        server.reads.clear()
        for _ in range(1000):
            client.get("/health")
        server.signal(signal.SIGTERM)
        assert server._process.wait(LONG_S) == 0


def test_a_log_whose_reader_is_gone_stops_nothing() -> None:
    """The server goes on without it, and a signal ends it in order."""
    with Served("-t", "1", "-v") as server, server.client() as client:
        server.close_stderr()
        for _ in range(50):
            assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 2}).status_code == 200
        server.signal(signal.SIGTERM)
        assert server.code() == 0


def test_a_killed_server_takes_its_worker_along() -> None:
    """Whatever the worker is at; the client sees that its stream was cut."""
    with Served(*FLAGS) as served, served.worker() as worker:
        body = {**FOR_LONG, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", served.url + "/v1/completions", json=body, timeout=LONG_S) as response:
            lines = response.iter_lines()
            next(lines)
            served.signal(signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                list(lines)
        assert served.code() == -signal.SIGKILL
        worker.wait_gone()


def test_a_killed_worker_is_replaced_and_its_streams_go_on() -> None:
    """The stream has every token, once; there is one worker afterwards, and another one."""
    with Served(*FLAGS) as served, served.worker() as worker:
        alone = events_of(served, {**ENDLESS, "ignore_eos": True})
        body = {**ENDLESS, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", served.url + "/v1/completions", json=body, timeout=LONG_S) as response:
            lines = response.iter_lines()
            first = next(lines)
            worker.signal(signal.SIGKILL)
            events = [line.removeprefix("data: ") for line in [first, *lines] if line]
        worker.wait_gone()
        # Only the beginning is compared: what is computed anew rounds otherwise, and near ties come.
        assert text_of(events)[:40] == text_of(alone)[:40]
        assert (json.loads(events[-2])["usage"]["completion_tokens"], events[-1]) == (900, "[DONE]")
        with served.worker() as successor:
            assert served.children() == [successor.pid]
            assert successor.pid != worker.pid
            served.assert_idle()
            assert served.metrics()["paceline_engine_restarts_total"] == 1
            served.signal(signal.SIGTERM)
            assert served.code() == 0
            successor.wait_gone()


def test_a_crash_loop_is_shown_and_loses_no_stream_until_max_restarts_ends_the_server() -> None:
    """Kills in a row: /health is 503 while there is no worker, /health/live stays 200, every stream is whole; then code 70."""
    with ThreadPoolExecutor(9) as threads, Served(*FLAGS, "--max-restarts", "4") as served:
        asked = {**TOLD, "max_tokens": 100, "ignore_eos": True, "stream_options": {"include_usage": True}}
        streams = [threads.submit(events_of, served, asked) for _ in range(8)]
        pids: list[int] = []
        for number in range(4):
            pids.append(kill_next(served, pids))
            served.wait_until(
                lambda n=number + 1: served.get("/metrics").text.find(f"{IN_A_ROW} {n}.0") >= 0, "the crash"
            )
            assert served.get("/health/live").status_code == 200
        served.wait_until(lambda: served.get("/health").json().get("status") == "crash_loop", "the crash loop is shown")
        streams.append(threads.submit(events_of, served, asked))
        for stream in streams:
            events = stream.result(LONG_S)
            # Not compared with the text alone: passes of other sizes round otherwise, and a near tie may fall the other way.
            assert (json.loads(events[-2])["usage"]["completion_tokens"], events[-1]) == (100, "[DONE]")
        assert served.get("/health").json() == {"status": "ok"}
        waiting = threads.submit(events_of, served, {**FOR_LONG, "ignore_eos": True})
        served.wait_until(lambda: served.metrics()["paceline_http_streams_open"] == 1, "the stream has begun")
        kill_next(served, pids)
        events = waiting.result(LONG_S)
        assert (json.loads(events[-2])["error"]["code"], events[-1]) == ("engine_stopped", "[DONE]")
        assert served.code() == 70
        assert "ending: the engine's process crashed once more after max_restarts=4 restarts in a row" in "".join(
            served.lines
        )


IN_A_ROW = "paceline_engine_crashes_in_a_row"


def kill_next(served: Served, killed: list[int]) -> int:
    """Kill the next worker, ready or not; return its process id."""
    served.wait_until(lambda: any(pid not in killed for pid in served.children()), "there is another worker")
    pid = next(pid for pid in served.children() if pid not in killed)
    with Worker(pid) as worker:
        worker.signal(signal.SIGKILL)
        worker.wait_gone()
    return pid


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_trace_is_recorded_and_an_instrument_attached(isolation: str, tmp_path: Path) -> None:
    """The trace is whole when the server has ended, over a death of the worker too; the instrument saw every request."""
    trace, seen = tmp_path / "trace.jsonl", tmp_path / "seen"
    (tmp_path / "watching.py").write_text(WATCHING)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    flags = ("--isolation", isolation, "--trace", str(trace), "--instrument", "watching:Seen")
    with Served(*FLAGS, *flags, PYTHONPATH=path, TEST_SEEN=str(seen)) as served:
        for number in range(2):
            assert len(events_of(served, TOLD)) > 2
            if isolation == "process" and number == 0:
                kill_next(served, [])
        served.assert_idle()
        served.signal(signal.SIGTERM)
        assert served.code() == 0
    found = read_trace(trace)
    summary = summarize(found)
    assert not found.is_truncated
    assert (summary.num_requests, summary.num_generated) == (2, 24)
    restarts = [event for event in found.events if isinstance(event, EngineRestarted)]
    assert len(restarts) == (isolation == "process")
    assert len(seen.read_text().split()) == 2


WATCHING = """
import os
from paceline.observability.metrics import Instrument

class Seen(Instrument):
    def request_queued(self, record):
        with open(os.environ["TEST_SEEN"], "a") as file:
            print(record.key, file=file)
"""


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_over_tls_with_keys_from_a_file_nothing_secret_is_written(tmp_path: Path) -> None:
    """The package's client gets in with a key, and not without; the log has neither keys nor prompts."""
    key, certificate, keys = tmp_path / "key.pem", tmp_path / "certificate.pem", tmp_path / "keys"
    kind = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", *kind, *name, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=LONG_S)
    keys.write_text("first-secret\nsecond-secret\n")
    flags = ["--ssl-key-file", str(key), "--ssl-cert-file", str(certificate), "--api-key-file", str(keys)]
    with Served(*FLAGS, *flags) as served:
        assert served.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(certificate))
        for secret in ("second-secret", "no-secret"):
            with openai.OpenAI(
                base_url=served.url + "/v1", api_key=secret, max_retries=0, http_client=httpx.Client(verify=trusted)
            ) as client:
                if secret == "no-secret":
                    with pytest.raises(openai.AuthenticationError):
                        client.completions.create(**TOLD)
                else:
                    chunks = list(client.completions.create(**TOLD, stream=True))
                    assert chunks[-1].choices[0].finish_reason is not None
        served.signal(signal.SIGTERM)
        assert served.code() == 0
        written = "".join(served.lines)
    assert '"status":200' in written and '"status":401' in written
    assert "secret" not in written and TOLD["prompt"] not in written


def events_of(served: Served, body: dict[str, Any]) -> list[str]:
    """The data of a completion's events."""
    with httpx.stream(
        "POST", served.url + "/v1/completions", json={**body, "stream": True}, timeout=LONG_S
    ) as response:
        assert response.status_code == 200, response.read()
        return [line.removeprefix("data: ") for line in response.iter_lines() if line and not line.startswith(":")]


def text_of(events: list[str]) -> str:
    """Return their joined text."""
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])
