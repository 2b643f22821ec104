"""A server with a replaced model file: it loads the model again, or refuses requests on demand."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.running import RunningServer

from paceline.server.flags import DiskFiles, ModelPresets, resolve
from paceline.server.router.router_app import build_router_app
from paceline.server.settings import ServerSettings
from paceline.testing.models import CHAT_TEMPLATE, LlamaSpec, numbered, write_lora, write_model

SPEC = LlamaSpec(n_ctx_train=2048)
OTHER_VOCABULARY = LlamaSpec(n_ctx_train=2048, vocabulary=numbered(400))
BODY = {"prompt": [5, 6, 7], "n_predict": 12, "temperature": 0, "ignore_eos": True, "return_tokens": True}
LONG = {"prompt": [5, 6, 7], "max_tokens": 1500, "ignore_eos": True, "stream": True}
ENGINE: dict[str, Any] = {"isolation": "process", "num_slots": 2, "n_ctx": 2048, "n_threads": 1}


def replace(path: Path, spec: Any, **options: Any) -> None:
    """Put another model into the place of one, as a download does."""
    write_model(path.with_suffix(".new"), spec, seed=1, **options).replace(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A tiny model in a folder of its own."""
    folder = tmp_path / "models"
    folder.mkdir()
    return write_model(folder / "tiny.gguf", SPEC)


@pytest.fixture
def serve(path: Path) -> Iterator[Callable[..., RunningServer]]:
    """Start servers of the model, and close them."""
    made: list[RunningServer] = []

    def start(model_changed: Any = "reload", *, lora_loading: bool = False, **engine: Any) -> RunningServer:
        options = {**ENGINE, **engine}
        settings = ServerSettings(
            model=path, engine_options=options, model_changed=model_changed, lora_loading=lora_loading
        )
        made.append(RunningServer(settings))
        return made[-1]

    yield start
    for server in made:
        server.close()


def expected(path: Path) -> list[int]:
    """Return the tokens that a server with the file of now generates."""
    with RunningServer(ServerSettings(model=path, engine_options=ENGINE)) as server, server.client() as client:
        found: list[int] = client.post("/completion", json=BODY).json()["tokens"]
        return found


def until_loaded(server: RunningServer, old: Any) -> None:
    """Wait until the server has another engine than `old`."""
    server.until(lambda: server.service.is_loaded and server.service._front.engine is not old)


def refused(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 503, response.text
    found: dict[str, Any] = response.json()["error"]
    return found


@pytest.mark.parametrize("spec", [SPEC, OTHER_VOCABULARY], ids=["same-vocabulary", "other-vocabulary"])
def test_a_model_that_was_replaced_is_loaded_again_after_a_crash(
    serve: Callable[..., RunningServer], path: Path, spec: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The stream in flight ends with an error; later requests are the new model's alone, with its tokenizer and template."""
    server = serve()
    old = server.engine
    with server.client() as client:
        before = client.post("/completion", json=BODY).json()["tokens"]
        with client.stream("POST", "/v1/completions", json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            replace(path, spec, metadata={"tokenizer.chat_template": CHAT_TEMPLATE})
            os.kill(old.worker_pid, signal.SIGKILL)
            rest = list(lines)
        assert any("model_changed" in line and "tiny.gguf was replaced" in line for line in rest)
        assert str(path.parent) not in "".join(rest)
        until_loaded(server, old)
        after = client.post("/completion", json=BODY).json()["tokens"]
        assert after == expected(path) != before
        props = client.get("/props").json()
        assert props["chat_template"] == CHAT_TEMPLATE
        chat = {"messages": [{"role": "user", "content": "abc"}]}
        assert client.post("/apply-template", json=chat).json()["prompt"].startswith("<|im_start|>user\nabc<|im_end|>")
        assert client.get("/v1/models").json()["data"][0]["meta"]["n_vocab"] == spec.vocabulary.size
    assert caplog.text.count("the model is loaded again") == 1
    gone = weakref.ref(old)
    del old
    gc.unfreeze()  # a server that runs as a program freezes what is left after a load, here with the engine that the test held
    server.until(lambda: gc.collect() >= 0)
    assert gone() is None


@pytest.mark.parametrize("spec", [SPEC, OTHER_VOCABULARY], ids=["same-vocabulary", "other-vocabulary"])
def test_a_model_that_was_replaced_in_its_sleep_is_loaded_again(
    serve: Callable[..., RunningServer], path: Path, spec: Any
) -> None:
    """The request that wakes it gets a 503 with Retry-After, and later requests get the new model."""
    server = serve(sleep_idle_s=0.1)
    with server.client() as client:
        client.post("/completion", json=BODY)
        old = server.engine
        server.until(lambda: old.worker_pid is None)
        replace(path, spec)
        response = client.post("/completion", json=BODY)
        replaced = "tiny.gguf was replaced since the model was loaded; load the model again"
        assert refused(response)["message"] in (replaced, "Loading model")  # by whether the load has begun already
        assert int(response.headers["retry-after"]) >= 1
        until_loaded(server, old)
        assert client.post("/completion", json=BODY).json()["tokens"] == expected(path)


def test_a_file_that_is_not_complete_yet_is_tried_again(
    serve: Callable[..., RunningServer], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health reports that the load has failed; the server goes on when the copy is complete."""
    monkeypatch.setattr("paceline.server.service._LONGEST_WAIT_S", 0.1)
    server = serve()
    old, whole = server.engine, write_model(path.with_name("whole.new"), SPEC, seed=1).read_bytes()
    with server.client() as client:
        path.write_bytes(whole[: len(whole) // 3])
        os.kill(old.worker_pid, signal.SIGKILL)
        server.until(lambda: server.service.failure is not None)
        assert client.get("/health").status_code == 503
        assert "tiny.gguf" in refused(client.post("/completion", json=BODY))["message"]
        path.write_bytes(whole)
        until_loaded(server, old)
        assert client.get("/health").status_code == 200
        assert client.post("/completion", json=BODY).json()["tokens"] == expected(path)


def test_adapters_of_clients_are_loaded_with_the_model_again(
    serve: Callable[..., RunningServer], path: Path, tmp_path: Path
) -> None:
    """One that does not fit any more is not found: its requests do not get the model without it."""
    other = LlamaSpec(n_ctx_train=2048, n_embd=32)
    fits, lost = write_lora(tmp_path / "fits.gguf", SPEC), write_lora(tmp_path / "lost.gguf", SPEC)
    server = serve(lora_loading=True)
    old = server.engine
    with server.client() as client:
        for adapter in (fits, lost):
            body = {"lora_name": adapter.stem, "lora_path": str(adapter)}
            assert client.post("/v1/load_lora_adapter", json=body).status_code == 200
        write_lora(lost, other)
        os.kill(old.worker_pid, signal.SIGKILL)
        until_loaded(server, old)
        asked = {"prompt": [5, 6], "max_tokens": 2}
        statuses = {
            name: client.post("/v1/completions", json={**asked, "model": name}).status_code
            for name in ("fits", "lost", "tiny.gguf")
        }
    assert statuses == {"fits": 200, "lost": 404, "tiny.gguf": 200}


def test_a_replaced_model_is_refused_if_that_was_asked_for(serve: Callable[..., RunningServer], path: Path) -> None:
    """Requests and health get 503 with the reason, and no other model is served."""
    server = serve("refuse")
    with server.client() as client:
        replace(path, SPEC)
        os.kill(server.engine.worker_pid, signal.SIGKILL)
        server.until(lambda: server.service.failure is not None)
        assert client.get("/health").status_code == client.get("/health/ready").status_code == 503
        assert refused(client.post("/completion", json=BODY))["message"].startswith("tiny.gguf was replaced")


@pytest.mark.parametrize("action", ["reload", "refuse"])
def test_one_of_several_models_is_loaded_again_or_refused(path: Path, tmp_path: Path, action: str) -> None:
    """The request that notices gets a 503; a refused model is loaded again by /models/load alone."""
    files = DiskFiles(lambda _: None)
    flags = ["--models-dir", str(path.parent), "-np", "2", "--model-changed", action, "--no-spare-worker"]
    found = resolve([*flags, "--sleep-idle-seconds", "0.1"], dict.fromkeys(("HF_HUB_CACHE",), str(tmp_path)), files)
    server = RunningServer(
        found.settings, wait=False, build=lambda settings, _: build_router_app(settings, ModelPresets(found, files))
    )
    models: Any = server.app.state.service.models
    body = {**BODY, "model": "tiny"}
    try:
        with server.client() as client:
            assert client.post("/completion", json=body).status_code == 200
            server.until(lambda: models.manager.status("tiny").worker_pid is None)
            replace(path, OTHER_VOCABULARY)
            assert "was replaced" in refused(client.post("/completion", json=body))["message"]
            server.until(lambda: models.manager.status("tiny").state == "failed")
            if action == "refuse":
                assert "was replaced" in refused(client.post("/completion", json=body))["message"]
                assert client.post("/models/load", json={"model": "tiny"}).status_code == 200
                server.until(lambda: models.manager.status("tiny").is_loaded)
            assert client.post("/completion", json=body).json()["tokens"] == expected(path)
    finally:
        server.close()
