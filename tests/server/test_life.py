"""How a server begins and ends: loading, a model that cannot be loaded, draining, signals."""

from __future__ import annotations

import asyncio
import json
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tests.server.running import LONG_S, RunningServer
from tests.server.stand_in import StandInEngine, StandInLLM

from paceline.errors import InvalidParams, ModelLoadError, WorkerUnresponsive
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.server.application import build_app
from paceline.server.listeners import Listeners
from paceline.server.operator_lines import STDERR
from paceline.server.routes import ApiRoute
from paceline.server.service import Service
from paceline.server.serving import ENGINE_ENDED, ServerConfig, Serving
from paceline.server.settings import ServerSettings
from paceline.server.startup import prepare_loop


def test_the_port_is_open_while_the_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """/health has the progress; routes that need the model respond with 503; the page is served."""
    monkeypatch.setattr("paceline.server.web_page.built_files", dict)  # the page of links
    llm = StandInLLM(is_loaded=False)
    with RunningServer(ServerSettings(), llm, wait=False) as server, server.client() as client:
        llm.progress = 0.25
        response = client.get("/health")
        assert response.status_code == 503
        error = {"code": 503, "message": "Loading model", "type": "unavailable_error"}
        assert response.json() == {"error": error, "status": "loading", "progress": 0.25}
        assert client.get("/health/live").status_code == 200
        assert client.get("/health/ready").status_code == 503
        assert "loading, 25%" in client.get("/").text
        llm.load.set()
        server.do(server.service.loaded.wait())
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/health/ready").status_code == 200


def test_a_server_has_metrics_while_its_model_loads() -> None:
    """Of HTTP and of the process; those of the engine come with the engine."""
    llm = StandInLLM(is_loaded=False)

    async def main() -> tuple[str, str]:
        app = build_app(ServerSettings(), llm)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            await client.get("/health")
            loading = (await client.get("/metrics")).raise_for_status().text
            llm.load.set()
            await app.state.service.loaded.wait()
            return loading, (await client.get("/metrics")).raise_for_status().text

    loading, loaded = asyncio.run(asyncio.wait_for(main(), LONG_S))
    assert 'paceline_http_requests_total{method="GET",route="/health",status="503"} 1.0' in loading
    assert "process_resident_memory_bytes" in loading
    assert "paceline_engine_alive" not in loading
    assert "paceline_engine_alive 1.0" in loaded


@pytest.mark.parametrize("kind", [ModelLoadError, InvalidParams])
def test_a_model_that_cannot_be_loaded_is_reported_without_its_folder(kind: type[Exception]) -> None:
    """Every health route reports it, also after an error in the settings."""
    llm = StandInLLM(failure=kind("cannot read the model file /srv/our private/model.gguf: no such file"))
    with RunningServer(ServerSettings(), llm, wait=False) as server, server.client() as client:
        server.do(server.service.loaded.wait())
        for path in ("/health", "/health/live", "/health/ready"):
            response = client.get(path)
            assert response.status_code == 503
            assert "model file model.gguf: no such file" in response.json()["error"]["message"]


def test_an_engine_that_has_ended_is_neither_healthy_nor_live_nor_ready() -> None:
    """The server itself goes on and reports it."""
    llm = StandInLLM()
    with RunningServer(ServerSettings(), llm) as server, server.client() as client:
        llm.engine.close()
        for path in ("/health", "/health/live", "/health/ready"):
            assert client.get(path).status_code == 503


def test_a_draining_server_refuses_new_requests_and_completes_running_requests() -> None:
    """Health goes on, cancelling as well."""
    engine = StandInEngine()
    from tests.server import probe

    with (
        RunningServer(ServerSettings(), StandInLLM(engine), routes=(probe.routes,)) as server,
        server.client() as client,
    ):
        engine.backend.hold()
        with client.stream("POST", "/v1/probe", json={"prompts": ["a"], "stream": True}) as running:
            server.call(server.service.drain)
            refused = client.post("/v1/probe", json={"prompts": ["b"]})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "shutdown"
            assert client.get("/health/ready").status_code == 503
            assert client.post("/v1/requests/none/cancel").json()["cancelled"] is False
            engine.backend.gate.set()
            assert list(running.iter_lines())[-2] == "data: [DONE]"


def test_long_work_of_some_leaves_threads_for_others() -> None:
    """With any number of processors: tokenising long texts must not hold up short texts."""

    async def main() -> None:
        app, gate = build_app(SETTINGS, StandInLLM()), threading.Event()
        config = ServerConfig(app, SETTINGS, None)
        with Listeners(SETTINGS) as listeners:
            serving = Serving(app, config, listeners, prepare_loop())
            running = asyncio.create_task(serving.run())
            await app.state.service.loaded.wait()
            held = [asyncio.create_task(asyncio.to_thread(gate.wait, LONG_S)) for _ in range(40)]
            try:
                assert await asyncio.wait_for(asyncio.to_thread(int), LONG_S / 2) == 0
            finally:
                gate.set()
            await asyncio.gather(*held)
            serving.end()
            assert await running == 0

    asyncio.run(main())


SETTINGS = ServerSettings(port=0)


def test_the_time_until_it_is_ready_counts_from_the_beginning_of_the_load(capfd: pytest.CaptureFixture[str]) -> None:
    """Which is before there is an application."""

    async def main() -> int:
        app, said = build_app(SETTINGS, StandInLLM()), asyncio.Event()
        ready_line = app.state.service.ready_line

        def noting(seconds: float) -> str:
            said.set()
            return str(ready_line(seconds))

        app.state.service.ready_line = noting
        with Listeners(SETTINGS) as listeners:
            config, signals = ServerConfig(app, SETTINGS, None), prepare_loop()
            serving = Serving(app, config, listeners, signals, time.monotonic() - 1000)
            running = asyncio.create_task(serving.run())
            await asyncio.wait_for(said.wait(), LONG_S)
            serving.end()
            return await running

    assert asyncio.run(main()) == 0
    STDERR.flush(LONG_S)
    assert "ready after 100" in capfd.readouterr().err


def test_garbage_is_collected_while_the_model_loads_and_what_is_left_never_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the loop would be blocked when the first requests come, and by each full collection later."""
    llm, calls = StandInLLM(is_loaded=False), list[tuple[str, bool]]()

    async def main() -> None:
        app = build_app(SETTINGS, llm)
        collected, loaded = asyncio.Event(), app.state.service.loaded

        def collect() -> None:
            calls.append(("collect", loaded.is_set()))
            collected.set()

        def freeze() -> None:
            calls.append(("freeze", loaded.is_set()))
            serving.end()

        monkeypatch.setattr("paceline.server.serving.gc", SimpleNamespace(collect=collect, freeze=freeze))
        with Listeners(SETTINGS) as listeners:
            serving = Serving(app, ServerConfig(app, SETTINGS, None), listeners, prepare_loop())
            running = asyncio.create_task(serving.run())
            await asyncio.wait_for(collected.wait(), LONG_S)
            llm.load.set()
            assert await asyncio.wait_for(running, LONG_S) == 0

    asyncio.run(main())
    assert calls == [("collect", False), ("freeze", True)]


@pytest.mark.parametrize("task", ["_watch", "_report_life", "_reload_on_request"])
def test_a_task_of_the_server_that_fails_ends_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, task: str
) -> None:
    """With the code 1, and the error in the log: the server would not be watched any more."""

    async def fail(_: Serving) -> None:
        raise TypeError("our own mistake")

    async def main() -> int:
        app = build_app(SETTINGS, StandInLLM())
        with Listeners(SETTINGS) as listeners:
            serving = Serving(app, ServerConfig(app, SETTINGS, None), listeners, prepare_loop())
            return await asyncio.wait_for(serving.run(), LONG_S)

    monkeypatch.setattr(Serving, task, fail)
    assert asyncio.run(main()) == 1
    assert "our own mistake" in caplog.text


@pytest.mark.parametrize("start", ["", "@"], ids=["path", "abstract"])
def test_a_service_manager_gets_the_states_of_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start: str
) -> None:
    """As sd_notify(3) has them. The watchdog is kept quiet only while the engine is alive."""
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    states, answers, revived = list[bytes](), iter([False, False]), asyncio.Event()

    def is_alive(_: Service) -> bool:
        answer = next(answers, True)
        if answer and not revived.is_set():
            revived.set()
            while select.select([manager], [], [], 0)[0]:
                states.append(manager.recv(4096))
            assert b"WATCHDOG=1" not in states
        return answer

    def receive(state: bytes) -> None:
        while not any(seen.startswith(state) for seen in states):
            states.append(manager.recv(4096))

    async def main() -> int:
        app = build_app(SETTINGS, StandInLLM())
        with Listeners(SETTINGS) as listeners:
            serving = Serving(app, ServerConfig(app, SETTINGS, None), listeners, prepare_loop())
            running = asyncio.create_task(serving.run())
            await asyncio.wait_for(revived.wait(), LONG_S)
            for state in (b"WATCHDOG=1", b"READY=1\nSTATUS=" + app.state.service.names[0].encode() + b" is ready"):
                await asyncio.to_thread(receive, state)
            assert b"STOPPING=1" not in states
            serving.end()
            await asyncio.to_thread(receive, b"STOPPING=1")
            return await running

    with manager:
        manager.settimeout(LONG_S)
        manager.bind(f"{tmp_path}/notify" if not start else f"\0{tmp_path}/notify")
        monkeypatch.setenv("NOTIFY_SOCKET", f"{start}{tmp_path}/notify")
        monkeypatch.setenv("WATCHDOG_USEC", "2000")
        monkeypatch.setattr(Service, "is_alive", property(is_alive))
        assert asyncio.run(main()) == 0


def test_a_report_of_life_may_fail_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is asked so often that the service manager waits for no more than half of its time."""
    now_s, reports, answers = 0.0, list[float](), iter([True, True, False, True, True, False])

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    class Answers:
        is_draining = False

        @property
        def is_alive(self) -> bool:
            return next(answers)

    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    monkeypatch.setattr("paceline.server.serving.asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr("paceline.server.serving.tell_manager", lambda _: reports.append(now_s))
    serving: Any = SimpleNamespace(_service=Answers())
    with pytest.raises(RuntimeError):  # there are no more answers
        asyncio.run(Serving._report_life(serving))
    assert reports == [0, 15, 45, 60]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_then_ends_every_stream_in_order(programs: Any, number: int) -> None:
    """Unfinished requests have a terminal event; the process ends with 0."""
    program = programs(0.05)
    program.wait_for("is ready")
    body = {"prompts": ["a"], "stream": True, "sampling": {"max_tokens": None}}
    with httpx.stream("POST", program.url + "/v1/probe", json=body, timeout=LONG_S) as response:
        program.signal(number)
        *_, last, _, done, _ = response.iter_lines()
    assert json.loads(last.removeprefix("data: "))["error"]["code"] in ("shutdown", "engine_stopped")
    assert done == "data: [DONE]"
    assert program.code() == 0


def test_a_second_signal_ends_at_once(programs: Any) -> None:
    """Whatever still runs; the code is the signal's."""
    program = programs(LONG_S)
    program.wait_for("is ready")
    body = {"prompts": ["a"], "stream": True}
    with httpx.stream("POST", program.url + "/v1/probe", json=body, timeout=LONG_S) as response:
        assert response.status_code == 200
        program.signal(signal.SIGTERM)
        program.wait_for("ending")
        program.signal(signal.SIGTERM)
        assert program.code() == 128 + signal.SIGTERM


def test_a_server_whose_stderr_is_closed_still_ends(programs: Any) -> None:
    """It cannot write its line about the signal."""
    program = programs(0)
    program.wait_for("is ready")
    program.close_stderr()
    program.signal(signal.SIGTERM)
    assert program.code() == 0


def test_a_server_that_is_open_to_others_without_a_key_warns(programs: Any) -> None:
    """One on the loopback does not."""
    program = programs(1, "0.0.0.0")
    assert "set an API key" in program.wait_for("warning")
    assert "need --allowed-hosts NAME" in program.wait_for("clients that ask")
    quiet = programs(1)
    quiet.wait_for("is ready")
    assert not any("warning" in line for line in quiet.lines)


SERVE = (
    "import sys; from paceline.server.startup import serve; from paceline.server.settings import ServerSettings as S; "
)


def test_a_port_that_is_taken_is_reported_in_one_line(server: RunningServer) -> None:
    """With the code 1."""
    done = subprocess.run(
        [sys.executable, "-c", SERVE + f"sys.exit(serve(S(port={server.port})))"],
        capture_output=True, text=True, timeout=LONG_S,
    )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"cannot listen on 127.0.0.1 port {server.port}: " in line


@pytest.mark.native
@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_missing_model_ends_the_process_with_1_and_its_reason(isolation: str) -> None:
    """The reason does not name the folder that was searched."""
    settings = f"S(port=0, model=__import__('pathlib').Path('/no/where/m.gguf'), engine_options={{'isolation': {isolation!r}}})"
    done = subprocess.run(
        [sys.executable, "-c", SERVE + f"sys.exit(serve({settings}))"], capture_output=True, text=True, timeout=LONG_S
    )
    assert done.returncode == 1
    assert "cannot load the model: " in done.stderr
    assert "m.gguf" in done.stderr


def test_routes_are_made_before_a_request_comes(worlds: Any, monkeypatch: Any) -> None:
    """With the application."""
    world = worlds()

    def late(self: ApiRoute) -> Any:
        raise AssertionError("a route was made for a request")

    monkeypatch.setattr(ApiRoute, "get_route_handler", late)
    for path in ("/tokenize", "/v1/completions", "/completion"):
        assert world.client.post(path, json=[]).status_code == 400


def test_a_long_tick_is_life_and_one_that_never_ends_is_not(worlds: Any, monkeypatch: Any) -> None:
    """Idle is alive as well; the response has the state."""
    world = worlds()
    assert world.client.get("/health/live").json() == {"status": "ok", "state": "idle"}
    world.engine.backend.hold()
    with world.raw(prompts=["a"]):
        world.engine.backend.wait_for_pass()
        assert world.client.get("/health/live").json() == {"status": "ok", "state": "ticking"}
        assert world.server.service.is_alive
        hanging = replace(world.engine.heartbeat(), is_alive=False)
        monkeypatch.setattr(world.engine, "heartbeat", lambda: hanging)
        response = world.client.get("/health/live")
        assert (response.status_code, response.json()["state"]) == (503, "ticking")
        assert not world.server.service.is_alive
        world.engine.backend.gate.set()


def test_a_crash_loop_is_life_but_not_health_and_requests_wait(worlds: Any, monkeypatch: Any) -> None:
    """As Kubernetes expects: no restart, no new requests; requests that come all the same are accepted."""
    world = worlds()
    looping = replace(world.engine.heartbeat(), state="crash_loop", num_crashes=7, restart_in_s=3.2)
    monkeypatch.setattr(world.engine, "heartbeat", lambda: looping)
    live = world.client.get("/health/live")
    assert (live.status_code, live.json()) == (200, {"status": "ok", "state": "crash_loop"})
    for path in ("/health", "/v1/health", "/health/ready"):
        response = world.client.get(path)
        assert (response.status_code, response.headers["retry-after"]) == (503, "4")
        error = response.json()["error"]
        assert (error["code"], error["type"]) == (503, "unavailable_error")
        assert error["message"] == "the engine's worker process crashed 7 times in a row; restart in 3.2 s"
    report = world.client.get("/health").json()
    assert (report["status"], report["crashes"]) == ("crash_loop", 7)
    assert world.post(prompts=["a"], sampling={"max_tokens": 3}).status_code == 200
    metrics = world.client.get("/metrics").text
    assert "paceline_engine_alive 1.0" in metrics
    assert "paceline_engine_crashes_in_a_row 7.0" in metrics
    assert "paceline_engine_restart_wait_seconds 3.2" in metrics


def test_a_hung_worker_is_life_but_not_health_and_requests_wait(worlds: Any, monkeypatch: Any) -> None:
    """As it is being replaced; an engine that is not alive is not ready either."""
    world = worlds()
    whole = world.engine.heartbeat()
    hung = replace(whole, state="hung", num_hangs=2)
    monkeypatch.setattr(world.engine, "heartbeat", lambda: hung)
    live = world.client.get("/health/live")
    assert (live.status_code, live.json()) == (200, {"status": "ok", "state": "hung"})
    for path in ("/health", "/v1/health", "/health/ready"):
        response = world.client.get(path)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["message"].startswith("the engine's worker process hung and is replaced")
    assert world.client.get("/health").json()["status"] == "hung"
    assert world.post(prompts=["a"], sampling={"max_tokens": 3}).status_code == 200
    assert "paceline_engine_hangs_total 2.0" in world.client.get("/metrics").text
    monkeypatch.setattr(world.engine, "heartbeat", lambda: replace(whole, is_alive=False))
    assert world.client.get("/health/ready").status_code == 503


def test_a_question_that_the_worker_does_not_reply_to_is_a_503(worlds: Any, monkeypatch: Any) -> None:
    """Not a failure of the server; the client may try again."""
    world = worlds()
    unanswered: Future[Any] = Future()
    unanswered.set_exception(WorkerUnresponsive("the engine's process does not respond: no reply within 10 s"))
    monkeypatch.setattr(world.engine, "ask_slots", lambda: unanswered)
    response = world.client.get("/slots")
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "unavailable_error"
    assert "does not respond" in response.json()["error"]["message"]


def test_a_crash_loop_whose_next_worker_loads_is_reported(worlds: Any, monkeypatch: Any) -> None:
    """There is no back-off any more, and nothing is ready yet."""
    world = worlds()
    looping = replace(world.engine.heartbeat(), state="crash_loop", num_crashes=3)
    monkeypatch.setattr(world.engine, "heartbeat", lambda: looping)
    response = world.client.get("/health/ready")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["message"].endswith("crashed 3 times in a row; the next one loads")


def test_an_engine_that_gives_up_ends_the_process_with_an_error(capfd: Any) -> None:
    """Code 70, and the reason on stderr, for a service manager; a server that a signal ends has 0."""

    async def main(gives_up: bool) -> int:
        llm = StandInLLM()
        app = build_app(SETTINGS, llm)
        config = ServerConfig(app, SETTINGS, None)
        with Listeners(SETTINGS) as listeners:
            serving = Serving(app, config, listeners, prepare_loop())
            running = asyncio.create_task(serving.run())
            await app.state.service.loaded.wait()
            if gives_up:
                llm.engine._thread._engine.tick = broken
                llm.engine.accept(llm.engine.prepare("one", SamplingParams(), RequestOptions()))
            else:
                serving.end()
            return await asyncio.wait_for(running, LONG_S)

    def broken() -> None:
        raise RuntimeError("it is broken")

    assert asyncio.run(main(True)) == ENGINE_ENDED == 70
    STDERR.flush(LONG_S)
    assert "ending: 3 ticks in a row failed, the last one with RuntimeError: it is broken" in capfd.readouterr().err
    assert asyncio.run(main(False)) == 0


def test_a_request_during_loading_gets_retry_after(monkeypatch: Any) -> None:
    """It is estimated from the progress and the time so far."""
    llm = StandInLLM(is_loaded=False)
    with RunningServer(ServerSettings(), llm, wait=False) as server, server.client() as client:
        llm.progress = 0.25
        monkeypatch.setattr(server.service, "_loading_since_s", time.monotonic() - 10_000)
        response = client.post("/tokenize", json={"content": "a"})
        assert (response.status_code, response.headers["retry-after"]) == (503, "60")
        llm.load.set()
