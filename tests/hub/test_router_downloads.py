"""A router that downloads models of the hub for its clients, and deletes them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.hub.stand_in_hub import StandInHub
from tests.server.running import RunningServer

from paceline import demo_model_path
from paceline.server.flags import DiskFiles, ModelPresets, resolve
from paceline.server.router.router_application import build_router_app

pytestmark = pytest.mark.native
NAME = "user/demo:Q8_0"


def router() -> RunningServer:
    files = DiskFiles(lambda _: None)
    found = resolve(["--models-max", "1", "-np", "1", "-c", "512"], {}, files)
    return RunningServer(
        found.settings, wait=False, build=lambda settings, _: build_router_app(settings, ModelPresets(found, files))
    )


def follow(server: RunningServer, act: Callable[[], Any], last: str) -> list[dict[str, Any]]:
    """Act, and return the events up to one of this name."""
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
        progress = [one["data"] for one in events if one["event"] == "download_progress"]
        assert progress[-1]["demo-Q8_0.gguf"]["done"] == demo_model_path().stat().st_size
        (entry,) = client.get("/models").json()["data"]
        assert (entry["id"], entry["source"], entry["can_remove"]) == (NAME, "cache", True)
        assert client.post("/models", json={"model": NAME}).status_code == 400
        response = client.post("/completion", json={"model": NAME, "prompt": "Once", "n_predict": 2})
        assert response.status_code == 200
        assert client.delete(f"/models?model={NAME}").json() == {"success": True}
        assert client.get("/models").json()["data"] == []
        assert client.delete(f"/models?model={NAME}").status_code == 404


def test_what_the_hub_does_not_have_is_refused_at_once(hub: StandInHub) -> None:
    """And what is no name of a repository."""
    hub.add("user/demo").files["demo-Q8_0.gguf"] = b"GGUF"
    with router() as server, server.client() as client:
        assert client.post("/models", json={"model": "user/nothing"}).status_code == 404
        assert client.post("/models", json={"model": "user/demo:Q2_K"}).status_code == 404
        assert client.post("/models", json={"model": "nothing"}).status_code == 400
