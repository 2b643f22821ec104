"""A router that downloads models of the hub for its clients, and deletes them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.hub.stand_in_hub import StandInHub
from tests.hub.test_commands import put_ollama
from tests.server.running import RunningServer

from paceline import demo_model_path
from paceline.hub.caches import find_models
from paceline.hub.references import hub_settings
from paceline.server.flags import DiskFiles, ModelPresets, resolve
from paceline.server.router.router_app import build_router_app

pytestmark = pytest.mark.native
NAME = "user/demo:Q8_0"


def router(*argv: str) -> RunningServer:
    files = DiskFiles(lambda _: None)
    found = resolve(["--models-max", "1", "-np", "1", "-c", "512", *argv], {}, files)
    return RunningServer(
        found.settings, wait=False, build=lambda settings, _: build_router_app(settings, ModelPresets(found, files))
    )


def follow(server: RunningServer, act: Callable[[], Any], last: str) -> list[dict[str, Any]]:
    """Act, and return the events up to an event of this name."""
    seen: list[dict[str, Any]] = []
    with server.client() as client, client.stream("GET", "/models/sse") as response:
        lines = response.iter_lines()
        next(lines)
        thread = threading.Thread(target=act)
        thread.start()
        for line in lines:
            if line.startswith("data: "):
                seen.append(json.loads(line[6:]))
                if seen[-1]["event"] == last:
                    break
        thread.join()
    return seen


def test_a_model_is_downloaded_served_and_deleted(hub: StandInHub) -> None:
    """Its progress is reported, then it is listed; after the deletion it is unknown."""
    hub.add("user/demo").files["demo-Q8_0.gguf"] = demo_model_path().read_bytes()
    with router() as server, server.client() as client:
        assert client.get("/models").json()["data"] == []
        events = follow(server, lambda: client.post("/models", json={"model": NAME}), "download_finished")
        progress = [event["data"] for event in events if event["event"] == "download_progress"]
        assert progress[-1]["demo-Q8_0.gguf"]["done"] == demo_model_path().stat().st_size
        (entry,) = client.get("/models").json()["data"]
        assert (entry["id"], entry["source"], entry["can_remove"]) == (NAME, "cache", True)
        assert client.post("/models", json={"model": NAME}).status_code == 400
        response = client.post("/completion", json={"model": NAME, "prompt": "Once", "n_predict": 2})
        assert response.status_code == 200
        assert client.delete(f"/models?model={NAME}").json() == {"success": True}
        assert client.get("/models").json()["data"] == []
        assert client.delete(f"/models?model={NAME}").status_code == 404


def test_a_model_of_ollamas_is_not_deleted(hub: StandInHub, tmp_path: Path) -> None:
    """The error says how to delete it, and it stays loaded; the list says that it cannot be removed."""
    put_ollama(tmp_path, "llama3.2:1b", demo_model_path().read_bytes())
    with router() as server, server.client() as client:
        name = "ollama:llama3.2:1b"
        assert client.post("/completion", json={"model": name, "prompt": "x", "n_predict": 1}).status_code == 200
        response = client.delete(f"/models?model={name}")
        assert response.status_code >= 400
        assert "ollama rm llama3.2:1b" in response.json()["error"]["message"]
        (entry,) = client.get("/models").json()["data"]
        assert (entry["source"], entry["can_remove"], entry["status"]["state"]) == ("cache", False, "loaded")


@pytest.mark.parametrize("key", ["model", "hf-repo", "lora-modules"])
def test_a_file_of_a_preset_is_not_deleted(hub: StandInHub, tmp_path: Path, key: str) -> None:
    """Whether the preset names it by its path or in the hub; the error names the preset, and the model stays loaded."""
    hub.add("user/demo").files["demo-Q8_0.gguf"] = demo_model_path().read_bytes()
    presets = tmp_path / "presets.ini"
    presets.write_text("[*]\n")
    with router("--models-preset", str(presets)) as server, server.client() as client:
        follow(server, lambda: client.post("/models", json={"model": NAME}), "download_finished")
        (found,) = find_models(hub_settings())
        value = {"model": found.path.resolve(), "hf-repo": NAME, "lora-modules": f"style={found.path}"}[key]
        own = f"model = {demo_model_path()}\n" if key == "lora-modules" else ""
        presets.write_text(f"[mine]\n{own}{key} = {value}\n")
        assert client.get("/models?reload=1").status_code == 200
        assert client.post("/completion", json={"model": NAME, "prompt": "x", "n_predict": 1}).status_code == 200
        response = client.delete(f"/models?model={NAME}")
        assert (response.status_code, response.json()["error"]["code"]) == (400, 400), response.text
        assert "preset 'mine'" in response.json()["error"]["message"]
        states = {entry["id"]: entry["status"]["state"] for entry in client.get("/models").json()["data"]}
        assert states[NAME] == "loaded" and found.path.is_file()
        presets.write_text("[*]\n")
        assert client.get("/models?reload=1").status_code == 200
        assert client.delete(f"/models?model={NAME}").json() == {"success": True}
        assert not found.path.exists()


def test_what_the_hub_does_not_have_is_refused_at_once(hub: StandInHub) -> None:
    """And an invalid name of a repository."""
    hub.add("user/demo").files["demo-Q8_0.gguf"] = b"GGUF"
    with router() as server, server.client() as client:
        assert client.post("/models", json={"model": "user/nothing"}).status_code == 404
        assert client.post("/models", json={"model": "user/demo:Q2_K"}).status_code == 404
        assert client.post("/models", json={"model": "nothing"}).status_code == 400
