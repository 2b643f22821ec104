"""A server with several models of its own processes: the demo model and a tiny one, by presets and by TOML."""

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
from tests.possessions import open_files
from tests.server.running import RunningServer

from paceline.demo import demo_model_path
from paceline.model_manager.engine_loader import resident_bytes
from paceline.server.flags import DiskFiles, ModelPresets, resolve
from paceline.server.router.router_app import build_router_app
from paceline.testing.models import LlamaSpec, write_lora, write_model

BODY = {"prompt": "Once upon a time", "n_predict": 8, "temperature": 0}


@pytest.fixture(autouse=True)
def no_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the models of the test are there."""
    for name in ("HF_HUB_CACHE", "LLAMA_CACHE", "OLLAMA_MODELS"):
        monkeypatch.setenv(name, str(tmp_path / name))


@pytest.fixture
def routers() -> Iterator[Callable[..., RunningServer]]:
    """Make servers of flags, and close them."""
    made: list[RunningServer] = []

    def make(*argv: str) -> RunningServer:
        files = DiskFiles(lambda _: None)
        found = resolve([*argv, "-np", "2"], {}, files)
        presets = ModelPresets(found, files)
        server = RunningServer(
            found.settings, wait=False, build=lambda settings, _: build_router_app(settings, presets)
        )
        made.append(server)
        return server

    yield make
    for server in made:
        server.close()


def status(server: RunningServer, name: str) -> Any:
    service: Any = server.app.state.service
    return service.models.manager.status(name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the tiny model."""
    made = tmp_path / "models"
    made.mkdir()
    write_model(made / "tiny.gguf", LlamaSpec(n_ctx_train=2048))
    return made


@pytest.mark.full
def test_fifty_loads_of_a_model_leave_nothing_behind(routers: Callable[..., RunningServer], folder: Path) -> None:
    """Every unloaded model's service dies, no descriptor stays, and the process has no more memory than before."""
    server = routers("--models-dir", str(folder), "--no-spare-worker")
    models: Any = server.app.state.service.models
    services: list[weakref.ref[Any]] = []
    descriptors: list[int] = []
    resident: list[int] = []
    with server.client() as client:
        for _ in range(50):
            assert client.post("/completion", json={**BODY, "model": "tiny"}).status_code == 200
            services += map(weakref.ref, models.services())
            assert client.post("/models/unload", json={"model": "tiny"}).status_code == 200
            server.until(lambda: status(server, "tiny").state == "unloaded")
            gc.collect()
            descriptors.append(sum(open_files().values()))
            resident.append(resident_bytes(os.getpid()) or 0)
    assert len(services) == 50
    assert [service() for service in services[:-1]] == [None] * 49
    assert descriptors[-1] <= descriptors[5]
    assert resident[-1] - resident[5] < 4 << 20


def test_a_worker_that_is_killed_takes_no_other_model_along(
    routers: Callable[..., RunningServer], tmp_path: Path, folder: Path
) -> None:
    """The other model's stream goes on; its own next request is served by a new process."""
    presets = tmp_path / "presets.ini"
    presets.write_text(f"[demo]\nmodel = {demo_model_path()}\nctx-size = 1024\nload-on-startup = 1\n")
    server = routers("--models-preset", str(presets), "--models-dir", str(folder))
    with server.client() as client:
        before = client.post("/completion", json={**BODY, "model": "tiny"})
        assert before.status_code == 200, before.text
        body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True, "model": "demo"}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            killed = status(server, "tiny").worker_pid
            os.kill(killed, signal.SIGKILL)
            assert "data: [DONE]" in list(lines)
        again = client.post("/completion", json={**BODY, "model": "tiny"})
        assert again.json()["content"] == before.json()["content"]
        assert status(server, "tiny").worker_pid != killed
        props = client.get("/props?model=tiny").json()
        assert (props["model_path"], props["model_alias"]) == ("tiny.gguf", "tiny")


def test_a_toml_file_names_models_with_their_options(
    routers: Callable[..., RunningServer], tmp_path: Path, folder: Path
) -> None:
    """Options of the engine, limits of the manager; the command line overrides both. One sleeps, the other is evicted."""
    presets = tmp_path / "models.toml"
    presets.write_text(
        "max_loaded = 1\n[models.demo]\nn_ctx = 512\nsleep_idle_s = 0.2\naliases = ['d']\n"
        f"[models.small]\nmodel = '{folder / 'tiny.gguf'}'\nnum_slots = 7\n"
    )
    server = routers("--models-preset", str(presets))
    with server.client() as client:
        assert client.post("/completion", json={**BODY, "model": "d"}).status_code == 200
        slots = client.get("/slots?model=demo").json()
        assert len(slots) == 2 and slots[0]["n_ctx"] == 512
        server.until(lambda: status(server, "demo").state == "sleeping")
        assert client.get("/props?model=demo").json()["is_sleeping"] is True
        assert client.get("/models").json()["data"][0]["status"]["value"] == "sleeping"
        assert client.post("/completion", json={**BODY, "model": "demo"}).status_code == 200
        assert client.post("/completion", json={**BODY, "model": "small"}).status_code == 200
        assert len(client.get("/slots?model=small").json()) == 2
        shown = client.post("/api/show", json={"model": "demo"}).json()
        assert shown["details"]["format"] == "gguf"


def test_a_model_whose_file_is_missing_fails_alone(
    routers: Callable[..., RunningServer], tmp_path: Path, folder: Path
) -> None:
    """503 with the file's name; the others are served."""
    presets = tmp_path / "presets.ini"
    presets.write_text(f"[gone]\nmodel = {tmp_path / 'gone.gguf'}\n")
    server = routers("--models-preset", str(presets), "--models-dir", str(folder))
    with server.client() as client:
        response = client.post("/completion", json={**BODY, "model": "gone"})
        assert response.status_code == 503
        assert "gone.gguf" in response.text and str(tmp_path) not in response.text
        assert client.post("/completion", json={**BODY, "model": "tiny"}).status_code == 200


def test_an_adapter_is_named_in_place_of_its_model(
    routers: Callable[..., RunningServer], tmp_path: Path, folder: Path
) -> None:
    """Of a preset before its model is loaded, and one that was loaded while it ran; the list has both with their parent."""
    for seed, name in enumerate(("sql", "poems"), 1):
        write_lora(tmp_path / f"{name}-lora.gguf", LlamaSpec(n_ctx_train=2048), seed=seed)
    presets = tmp_path / "presets.ini"
    presets.write_text(
        f"[demo]\nmodel = {demo_model_path()}\n[small]\nmodel = {folder / 'tiny.gguf'}\n"
        f"lora-modules = sql={tmp_path / 'sql-lora.gguf'}\nenable-lora-loading = 1\n"
    )
    server = routers("--models-preset", str(presets), "-c", "1024")

    def parents(client: httpx.Client) -> dict[str, str]:
        return {entry["id"]: entry["parent"] for entry in client.get("/v1/models").json()["data"] if "parent" in entry}

    with server.client() as client:
        assert parents(client) == {"sql": "small"}
        assert client.get("/v1/models/sql").json()["root"] == "sql-lora.gguf"
        of_sql = client.post(
            "/v1/completions", json={"prompt": "Once", "max_tokens": 8, "temperature": 0, "model": "sql"}
        )
        assert of_sql.status_code == 200, of_sql.text
        assert status(server, "small").state == "loaded" and status(server, "demo").state == "unloaded"
        of_model = client.post(
            "/v1/completions", json={"prompt": "Once", "max_tokens": 8, "temperature": 0, "model": "small"}
        )
        assert of_sql.json()["choices"][0]["text"] != of_model.json()["choices"][0]["text"]
        body = {"lora_name": "poems", "lora_path": str(tmp_path / "poems-lora.gguf")}
        assert client.post("/v1/load_lora_adapter?model=small", json=body).status_code == 200
        assert parents(client) == {"sql": "small", "poems": "small"}
        assert client.post("/completion", json={**BODY, "model": "poems:latest"}).status_code == 200
        assert client.post("/v1/unload_lora_adapter?model=small", json={"lora_name": "poems"}).status_code == 200
        assert client.post("/completion", json={**BODY, "model": "poems"}).status_code == 404


def test_an_adapter_that_was_unloaded_stays_unknown_when_its_model_gets_other_settings(
    routers: Callable[..., RunningServer], tmp_path: Path, folder: Path
) -> None:
    """Settings that the engine does not have give the model a new application, and its name stays that of no model."""
    write_lora(tmp_path / "sql.gguf", LlamaSpec(n_ctx_train=2048))
    section = f"[small]\nmodel = {folder / 'tiny.gguf'}\nlora-modules = sql={tmp_path / 'sql.gguf'}\nenable-lora-loading = 1\n"
    presets = tmp_path / "presets.ini"
    presets.write_text(section)
    server = routers("--models-preset", str(presets), "-c", "1024")
    query = {"model": "small"}
    with server.client() as client:
        assert client.post("/completion", json={**BODY, "model": "sql"}).status_code == 200
        assert client.post("/v1/unload_lora_adapter", params=query, json={"lora_name": "sql"}).status_code == 200
        presets.write_text(f"{section}tags = changed\n")
        assert client.get("/models?reload=1").status_code == 200
        ask = {**BODY, "model": "sql"}
        response = client.post("/completion", params=query, json=ask)
        assert response.status_code == 404, response.text
        assert status(server, "small").state == "loaded"


def test_an_adapter_of_several_models_is_ambiguous(
    routers: Callable[..., RunningServer], tmp_path: Path, folder: Path
) -> None:
    """The error names the models; none is loaded."""
    write_lora(tmp_path / "sql.gguf", LlamaSpec(n_ctx_train=2048))
    section = f"model = {folder / 'tiny.gguf'}\nlora-modules = sql={tmp_path / 'sql.gguf'}\n"
    presets = tmp_path / "presets.ini"
    presets.write_text(f"[a]\n{section}[b]\n{section}")
    server = routers("--models-preset", str(presets))
    with server.client() as client:
        response = client.post("/completion", json={**BODY, "model": "sql"})
        assert response.status_code == 400
        assert "'a', 'b'" in response.text
        assert status(server, "a").state == "unloaded"
