"""A server with several models over fake engines: the model of a request, its waiting, its failures."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.server.router_world import PRESETS
from tests.server.running import LONG_S

BODY = {"prompt": "once", "n_predict": 3}
STREAM = {"prompt": "once", "max_tokens": 3, "stream": True}


def test_a_request_loads_the_model_that_it_names(routers: Any) -> None:
    """By name or alias, in the body or the query; no other model is loaded."""
    world = routers()
    assert world.client.post("/completion", json={**BODY, "model": "s"}).status_code == 200
    assert world.client.post("/completion?model=small", json=BODY).status_code == 200
    assert world.client.get("/slots?model=large").status_code == 200
    assert world.loader.loads == ["small", "large"]
    assert [world.state(name) for name in ("small", "large", "other")] == ["loaded", "loaded", "unloaded"]


def test_the_service_of_an_unloaded_model_is_freed(routers: Any) -> None:
    """Nothing in the process holds it any more, however often the model is loaded."""
    world = routers()
    models: Any = world.server.app.state.service.models
    services: list[weakref.ref[Any]] = []
    for _ in range(3):
        assert world.client.post("/completion", json={**BODY, "model": "small"}).status_code == 200
        services += map(weakref.ref, models.services())
        assert world.client.post("/models/unload", json={"model": "small"}).status_code == 200
        world.until("small", "unloaded")
        world.server.until(lambda: not models.all_ready())
        gc.collect()
    assert len(services) == 3
    assert [service() for service in services[:-1]] == [None, None]


@pytest.mark.parametrize(
    ("path", "body", "read"),
    [
        ("/completion", BODY, lambda body: (body["error"]["code"], body["error"]["type"])),
        ("/v1/completions", BODY, lambda body: (body["error"]["code"], body["error"]["param"])),
        ("/v1/chat/completions", {"messages": []}, lambda body: (body["error"]["code"], body["error"]["param"])),
        ("/v1/responses", {"input": "x"}, lambda body: (body["error"]["code"], body["error"]["param"])),
        ("/v1/messages", {"messages": []}, lambda body: (body["error"]["type"], body["type"])),
        ("/api/chat", {"messages": []}, lambda body: (body["error"][:14], "")),
        ("/v1/embeddings", {"input": "x"}, lambda body: (body["error"]["code"], body["error"]["param"])),
    ],
)
def test_unknown_names_are_404_with_the_nearest_one(routers: Any, path: str, body: Any, read: Any) -> None:
    """In the shape of each API."""
    response = routers().client.post(path, json={**body, "model": "smal"})
    assert response.status_code == 404
    assert "'small'" in response.text
    expected = {
        "/completion": (404, "not_found_error"),
        "/v1/messages": ("not_found_error", "error"),
        "/api/chat": ("there is no mo", ""),
    }
    assert read(response.json()) == expected.get(path, ("model_not_found", "model"))


def test_a_request_without_a_name_is_refused(routers: Any) -> None:
    """Also a body that is no object, or no JSON, or a model that is no text."""
    client = routers().client
    for options in ({"json": BODY}, {"json": [1]}, {"content": b""}):
        assert "model name is missing" in client.post("/completion", **options).json()["error"]["message"]
    assert "not JSON" in client.post("/completion", content=b"{").json()["error"]["message"]
    assert client.post("/completion", json={"model": 3}).status_code == 400
    assert client.get("/slots").status_code == 400


def test_routes_of_models_are_no_others(routers: Any) -> None:
    """404 and 405 as with one model, and nothing is loaded for them."""
    world = routers()
    assert world.client.get("/nothing?model=small").status_code == 404
    assert world.client.get("/completion?model=small").status_code == 405
    assert world.client.post("/nothing", json={"model": "small"}).status_code == 404
    assert world.loader.loads == []


def test_autoload_is_a_flag_and_a_parameter(routers: Any) -> None:
    """A request wins over the flag; a scrape of metrics loads nothing unless it asks for that."""
    world = routers("--no-models-autoload")
    refused = world.client.post("/completion", json={**BODY, "model": "small"})
    assert refused.status_code == 400 and "not loaded" in refused.json()["error"]["message"]
    assert world.client.post("/completion?autoload=true", json={**BODY, "model": "small"}).status_code == 200
    assert world.client.post("/completion", json={**BODY, "model": "small"}).status_code == 200
    assert world.client.get("/props?model=large&autoload=0").status_code == 400
    assert routers().client.get("/metrics?model=small").status_code == 400


PAGE = {"sec-fetch-site": "cross-site", "user-agent": "Mozilla/5.0"}
MODEL_GETS = [
    "/props",
    "/slots",
    "/lora-adapters",
    "/tokenizer_info",
    "/metrics",
    "/v1/engine/events",
    "/v1/engine/model",
]
GETS_OF_SERVER = ["/v1/files", "/v1/batches", "/v1/usage"]


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", MODEL_GETS)
def test_a_read_by_a_page_of_another_origin_loads_nothing(routers: Any, path: str, method: str) -> None:
    """Not even if its address asks for that: an image on any page may have this address."""
    world = routers()
    response = world.client.request(method, f"{path}?model=small&autoload=true", headers=PAGE)
    assert response.status_code == 400
    assert method == "HEAD" or "X-Requested-With" in response.json()["error"]["message"]
    assert world.loader.loads == [] and world.state("small") == "unloaded"


def test_the_list_of_reads_is_complete(routers: Any) -> None:
    """Every GET route of a model is among the tried routes."""
    app, found = routers().server.app, set[str]()
    for route in app.openapi()["paths"].items():
        path, methods = route
        if "get" in methods and "{" not in path:
            found.add(path)
    without_models = {"/", "/health", "/v1/health", "/health/live", "/health/ready", "/v1/models", "/models"}
    without_models |= {"/models/sse", "/v1/stream", "/v1/engine/page", "/api/tags", "/api/ps", "/api/version"}
    assert found - without_models - set(GETS_OF_SERVER) == set(MODEL_GETS)


@pytest.mark.parametrize("path", GETS_OF_SERVER)
def test_a_read_of_what_the_server_keeps_loads_nothing(routers: Any, path: str) -> None:
    """The address may name a model, as any other."""
    world = routers()
    assert world.client.get(f"{path}?model=small").status_code in (200, 400)
    assert world.loader.loads == []


@pytest.mark.parametrize("headers", [{"x-requested-with": "x"}, {"sec-fetch-site": "same-origin"}])
def test_a_read_with_consent_loads_a_model(routers: Any, headers: dict[str, str]) -> None:
    """A header that no page can send to another origin without being asked for, or the server's own page."""
    world = routers()
    assert world.client.get("/slots?model=small", headers={**PAGE, **headers}).status_code == 200
    assert world.loader.loads == ["small"]


def test_a_page_of_another_origin_may_read_of_a_loaded_model(routers: Any) -> None:
    """That changes nothing; whether the page sees the response, CORS decides."""
    world = routers()
    assert world.client.post("/completion", json={**BODY, "model": "small"}).status_code == 200
    assert world.client.get("/slots?model=small", headers=PAGE).status_code == 200


@pytest.mark.parametrize("path", ["/models", "/v1/models"])
def test_a_page_of_another_origin_does_not_have_the_list_read_again(routers: Any, path: str) -> None:
    """403 with the way out; the list itself is not refused."""
    world = routers()
    world.files.contents["p.ini"] = PRESETS + "[new]\nmodel = new.gguf\n"
    refused = world.client.get(f"{path}?reload=1", headers=PAGE)
    assert refused.status_code == 403 and "X-Requested-With" in refused.json()["error"]["message"]
    listed = world.client.get(path, headers=PAGE).json()["data"]
    assert [model["id"] for model in listed] == ["small", "large", "other"]
    listed = world.client.get(f"{path}?reload=1", headers={**PAGE, "x-requested-with": "x"}).json()["data"]
    assert [model["id"] for model in listed] == ["small", "large", "other", "new"]


def test_a_failed_load_is_reported_and_the_next_request_tries_again(routers: Any) -> None:
    """503 with the reason, without folders; the other models go on."""
    world = routers()
    world.fail("small")
    response = world.client.post("/v1/completions", json={"prompt": "x", "model": "small"})
    assert response.status_code == 503 and response.json()["error"]["message"] == "the file small.gguf is damaged"
    entry = world.client.get("/v1/models/small").json()["status"]
    assert (entry["value"], entry["failed"], entry["exit_code"]) == ("unloaded", True, 1)
    world.loader.failures.clear()
    assert world.client.post("/completion", json={**BODY, "model": "small"}).status_code == 200
    assert "failed" not in world.client.get("/v1/models/small").json()["status"]


def test_a_stream_gets_comments_while_its_model_is_loaded(routers: Any) -> None:
    """The response begins early, and goes on as the model's own; x-request-id is there."""
    world = routers("--heartbeat-s", "0.02")
    world.loader.gate.clear()
    with world.client.stream("POST", "/v1/completions", json={**STREAM, "model": "small"}) as response:
        lines = response.iter_lines()
        assert response.status_code == 200 and response.headers["x-request-id"]
        assert response.headers["content-type"].startswith("text/event-stream")
        assert next(lines) == ": ping"
        world.loader.gate.set()
        events = [line for line in lines if line.startswith("data: ")]
    assert json.loads(events[0][6:])["model"] == "small"
    assert events[-1] == "data: [DONE]"


def test_a_model_that_is_changed_while_it_is_loaded_is_served_with_its_new_settings(routers: Any) -> None:
    """The request that waits for it as well."""
    world = routers()
    world.loader.gate.clear()
    assert world.client.post("/models/load", json={"model": "small"}).status_code == 200
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(world.client.post, "/completion", json={"prompt": "x", "model": "small"})
        world.files.contents["p.ini"] = PRESETS.replace("small.gguf", "smaller.gguf\npredict = 2")
        assert world.client.get("/models?reload=1").status_code == 200
        world.loader.gate.set()
        assert waiting.result().json()["tokens_predicted"] == 2


@pytest.mark.parametrize(
    ("path", "body", "ending"),
    [
        ("/v1/completions", {"prompt": "x"}, ["data: {", "data: [DONE]"]),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, ["data: {", "data: [DONE]"]),
        ("/completion", {"prompt": "x"}, ["data: {", "data: [DONE]"]),
        ("/v1/messages", {"messages": [], "max_tokens": 1}, ["event: error", "data: {"]),
        ("/v1/responses", {"input": "x"}, ["event: error", "data: {", "event: response.failed", "data: {"]),
    ],
)
def test_a_stream_that_has_begun_reports_a_failed_load_as_its_last_event(
    routers: Any, path: str, body: Any, ending: list[str]
) -> None:
    """In the shape of its API, once."""
    world = routers("--heartbeat-s", "0.02")
    world.loader.gate.clear()
    world.fail("small")
    with world.client.stream("POST", path, json={**body, "model": "small", "stream": True}) as response:
        lines = response.iter_lines()
        first = {"/v1/messages": "event: ping", "/v1/responses": "event: response.created"}
        assert next(lines) == first.get(path, ": ping")
        world.loader.gate.set()
        pings = (
            *(":", "event: ping", 'data: {"type":"ping"}', "event: response.in_progress"),
            *('data: {"type":"response.created"', 'data: {"type":"response.in_progress"'),
        )
        rest = [line for line in lines if line and not line.startswith(pings)]
    assert [line[: len(start)] for line, start in zip(rest, ending, strict=True)] == ending
    assert "damaged" in "".join(rest)


def test_a_stream_that_has_begun_reports_a_wrong_request_as_its_last_event(routers: Any) -> None:
    """An error that would have been a 400 of the model's own."""
    world = routers("--heartbeat-s", "0.02")
    world.loader.gate.clear()
    body = {"prompt": "x", "temperature": -1, "model": "small", "stream": True}
    with world.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines) == ": ping"
        world.loader.gate.set()
        rest = [line for line in lines if line and not line.startswith(":")]
    assert json.loads(rest[0][6:])["error"]["param"] == "temperature"
    assert rest[1:] == ["data: [DONE]"]


def _numbered(lines: list[str]) -> list[dict[str, Any]]:
    """Return the events of a response, with numbers without a gap and a single id."""
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    return events


@pytest.mark.parametrize(
    ("damage", "words", "param"), [("load", "damaged", None), ("request", "temperature", "temperature")]
)
def test_a_response_begins_while_its_model_is_loaded(routers: Any, damage: str, words: str, param: str | None) -> None:
    """With events that clients count; the failure continues their numbers and id."""
    world = routers("--heartbeat-s", "0.02")
    world.loader.gate.clear()
    if damage == "load":
        world.fail("small")
    body = {"input": "x", "model": "small", "stream": True, "temperature": -1}
    with world.client.stream("POST", "/v1/responses", json=body) as response:
        lines, seen = response.iter_lines(), list[str]()
        while sum(line == "event: response.in_progress" for line in seen) < 3:
            seen.append(next(lines))
        world.loader.gate.set()
        events = _numbered([*seen, *lines])
    kinds = [event["type"] for event in events]
    assert kinds.count("response.created") == 1
    assert kinds[:4] == ["response.created", *["response.in_progress"] * 3]
    assert events[0]["response"]["model"] == "small"
    assert kinds[-2:] == ["error", "response.failed"]
    assert words in events[-2]["message"]
    assert events[-2]["param"] == param


def test_a_load_that_is_over_soon_leaves_statuses_as_they_are(routers: Any) -> None:
    """An error is a status then, also of a stream."""
    world = routers()
    world.fail("small")
    assert world.client.post("/v1/completions", json={**STREAM, "model": "small"}).status_code == 503


@pytest.mark.parametrize(("method", "path", "body"), [("POST", "/completion", BODY), ("GET", "/slots", None)])
def test_a_client_that_leaves_while_its_model_is_loaded_is_forgotten(
    routers: Any, method: str, path: str, body: Any
) -> None:
    """Nothing runs for it afterwards; a client that stays is served."""
    world = routers("--models-max", "1")
    world.loader.gate.clear()
    url = f"{path}?model=small"
    with world.server.raw(method, url, body):
        world.users("small", 1)
    world.users("small", 0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(world.client.request, method, url, json=body)
        world.users("small", 1)
        world.loader.gate.set()
        assert waiting.result().status_code == 200


def test_all_requests_for_a_model_that_is_loaded_wait_for_one_load(routers: Any) -> None:
    """It is loaded once."""
    world = routers()
    world.loader.gate.clear()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(world.client.post, "/completion", json={**BODY, "model": "small"}) for _ in range(4)]
        world.users("small", 4)
        world.loader.gate.set()
        assert [item.result().status_code for item in waiting] == [200] * 4
    assert world.loader.loads == ["small"]


def test_the_least_recently_used_idle_model_makes_room(routers: Any) -> None:
    """A busy one is waited for."""
    world = routers("--models-max", "2")
    for name in ("small", "large"):
        assert world.client.post("/completion", json={**BODY, "model": name}).status_code == 200
    world.loader.engines["small"].backend.hold()
    with ThreadPoolExecutor(2) as pool:
        busy = pool.submit(world.client.post, "/completion", json={**BODY, "model": "small"})
        world.users("small", 1)
        assert world.client.post("/completion", json={**BODY, "model": "other"}).status_code == 200
        assert (world.state("small"), world.state("large")) == ("loaded", "unloaded")
        world.loader.engines["small"].backend.gate.set()
        assert busy.result().status_code == 200


def test_models_are_loaded_and_unloaded_on_request(routers: Any) -> None:
    """The response comes at once; a state that already holds is an error, as in llama-server."""
    world = routers()
    client = world.client
    assert client.post("/models/load", json={"model": "small"}).json() == {"success": True}
    world.until("small", "loaded")
    assert client.post("/models/load", json={"model": "s"}).status_code == 400
    assert client.post("/models/unload", json={"model": "small"}).json() == {"success": True}
    world.until("small", "unloaded")
    assert client.post("/models/unload", json={"model": "small"}).status_code == 400
    for path in ("/models/load", "/models/unload"):
        assert client.post(path, json={"model": "smal"}).status_code == 404
        assert client.post(path, json={}).status_code == 400


def test_unloading_ends_streams_that_do_not_end_in_time(routers: Any) -> None:
    """With an error event that says why; other models' streams go on."""
    world = routers()
    body = {"prompt": "x", "max_tokens": 100_000, "model": "small", "stream": True}
    assert world.client.post("/completion", json={**BODY, "model": "large"}).status_code == 200
    with world.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        unloading = world.client.post("/models/unload", json={"model": "small", "timeout_s": 0})
        assert unloading.status_code == 200
        rest = [line for line in lines if line]
    error = json.loads(rest[-2][6:])["error"]
    assert (error["code"], rest[-1]) == ("model_unloaded", "data: [DONE]")
    assert "'small' was unloaded" in error["message"]
    assert world.state("large") == "loaded"


def test_unloading_waits_for_requests_that_end_in_time(routers: Any) -> None:
    """They are complete."""
    world = routers()
    assert world.client.post("/completion", json={**BODY, "model": "small"}).status_code == 200
    world.loader.engines["small"].backend.hold()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(world.client.post, "/completion", json={**BODY, "model": "small"})
        world.users("small", 1)
        assert world.client.post("/models/unload", json={"model": "small", "timeout_s": 60}).status_code == 200
        world.until("small", "unloading")
        assert world.client.get("/v1/models/small").json()["status"]["value"] == "loaded"
        world.loader.engines["small"].backend.gate.set()
        assert running.result().status_code == 200
    world.until("small", "unloaded")


def test_requests_are_cancelled_by_id_whichever_model_runs_them(routers: Any) -> None:
    """The route needs no name of a model."""
    world = routers()
    body = {"prompt": "x", "max_tokens": 100_000, "model": "small", "stream": True}
    with world.client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "mine"}) as response:
        lines = response.iter_lines()
        next(lines)
        assert world.client.post("/v1/requests/mine/cancel").json() == {"id": "mine", "cancelled": True}
        assert "cancelled" in "".join(lines)
    assert world.client.post("/v1/requests/mine/cancel").json()["cancelled"] is False


def test_lists_have_all_models_with_their_status(routers: Any) -> None:
    """llama-server's, OpenAI's, Anthropic's and Ollama's."""
    world = routers()
    world.client.post("/completion", json={**BODY, "model": "large"})
    for path in ("/models", "/v1/models"):
        data = {entry["id"]: entry for entry in world.client.get(path).json()["data"]}
        assert list(data) == ["small", "large", "other"]
        assert {name: entry["status"]["value"] for name, entry in data.items()} == {
            "small": "unloaded",
            "large": "loaded",
            "other": "unloaded",
        }
        assert data["small"]["aliases"] == ["s"] and data["small"]["status"]["preset"].startswith("[small]\n")
    assert world.client.get("/v1/models/s").json()["id"] == "small"
    assert world.client.get("/v1/models/nothing").json()["error"]["code"] == "model_not_found"
    assert [model["name"] for model in world.client.get("/api/tags").json()["models"]] == ["small", "large", "other"]
    assert [model["name"] for model in world.client.get("/api/ps").json()["models"]] == ["large"]
    assert world.client.post("/api/show", json={"model": "small:latest"}).status_code == 200
    assert world.client.post("/api/show", json={"model": "smal"}).status_code == 404
    assert world.client.post("/api/pull", json={"model": "other"}).text.endswith('{"status":"success"}\n')
    assert world.client.post("/api/pull", json={"model": "other", "stream": False}).json() == {"status": "success"}
    missing = world.client.post("/api/pull", json={"model": "smal"})
    assert (missing.status_code, missing.json()["error"].endswith("POST /models downloads a model")) == (404, True)
    for method, path in (("DELETE", "/api/delete"), ("POST", "/api/copy"), ("POST", "/api/push")):
        refused = world.client.request(method, path, json={"model": "other", "source": "other"})
        assert (refused.status_code, "GET /api/tags" in refused.json()["error"]) == (501, True)
    assert world.state("other") == "unloaded"  # a refusal loads nothing
    assert world.loader.loads == ["large"]


def test_the_server_has_properties_health_and_a_page_of_its_own(routers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They need no model and load none."""
    monkeypatch.setattr("paceline.server.web_page.built_files", dict)  # the page of links
    world = routers("--models-max", "3", "--no-models-autoload")
    props = world.client.get("/props").json()
    assert (props["role"], props["max_instances"], props["models_autoload"]) == ("router", 3, False)
    for body in ({}, {"model": "small"}):
        assert world.client.post("/props", json=body).status_code == 501  # without --props
    for path in ("/health", "/v1/health", "/health/live", "/health/ready"):
        assert world.client.get(path).json()["status"] == "ok"
    assert "small (unloaded)" in world.client.get("/").text
    paths = world.client.get("/openapi.json").json()["paths"]
    assert {"/models/load", "/models/sse", "/v1/chat/completions", "/api/chat"} <= set(paths)
    assert world.loader.loads == []


def test_events_report_every_change_of_status(routers: Any) -> None:
    """As llama-server's documentation has them."""
    world = routers()
    with world.client.stream("GET", "/models/sse") as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        assert response.headers["content-type"].startswith("text/event-stream")
        world.client.post("/completion", json={**BODY, "model": "small"})
        world.client.post("/models/unload", json={"model": "small"})
        seen = []
        while not seen or seen[-1]["data"]["status"] != "unloaded":
            seen.append(json.loads(next(lines)[6:]))
    assert {(event["model"], event["event"]) for event in seen} == {("small", "model_status")}
    statuses = list(dict.fromkeys(event["data"]["status"] for event in seen))
    assert statuses == ["loading", "loaded", "unloaded"]
    assert seen[-1]["data"]["exit_code"] == 0
    assert any("progress" in event["data"] for event in seen)


def test_metrics_have_a_label_for_each_model(routers: Any) -> None:
    """Of one model they are as a server of it would have them."""
    world = routers()
    for name in ("small", "large"):
        world.client.post("/completion", json={**BODY, "model": name})
    text = world.client.get("/metrics").text
    for name in ("small", "large"):
        assert f'paceline_requests_total{{kind="generate",model="{name}"}} 1.0' in text
        assert f'llamacpp:tokens_predicted_total{{model="{name}"}} 3.0' in text
    assert 'paceline_model_loaded{model="other"} 0.0' in text
    assert 'route="/completion",status="200"' in text
    families = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    assert 'paceline_requests_total{kind="generate"} 1.0' in world.client.get("/metrics?model=small").text


def test_metrics_read_the_manager_on_its_loop(routers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its models change there, also in the middle of a scrape."""
    world = routers()
    manager: Any = world.server.app.state.service.models.manager
    statuses, threads = manager.statuses, []
    monkeypatch.setattr(manager, "statuses", lambda: threads.append(threading.get_ident()) or statuses())
    assert world.client.get("/metrics").status_code == 200
    assert set(threads) == {world.server.call(threading.get_ident)}


def test_presets_are_read_again(routers: Any) -> None:
    """Models that are gone or changed are unloaded; the others stay. A wrong file changes nothing."""
    world = routers()
    for name in ("small", "large"):
        world.client.post("/completion", json={**BODY, "model": name})
    world.files.contents["p.ini"] = PRESETS.replace("[large]", "[new]").replace("small.gguf", "smaller.gguf")
    ids = [entry["id"] for entry in world.client.get("/models?reload=1").json()["data"]]
    assert sorted(ids) == ["new", "other", "small"]
    assert world.state("small") == "unloaded"
    assert world.client.post("/completion", json={**BODY, "model": "large"}).status_code == 404
    world.files.contents["p.ini"] = "[small]\nnonsense\n"
    assert world.client.get("/models?reload=1").status_code == 400
    assert len(world.client.get("/models").json()["data"]) == 3


def test_limits_of_a_file_are_read_again(routers: Any, tmp_path: Path) -> None:
    """Lower limits evict idle models; flags override them, and a wrong limit changes nothing."""
    path, tables = tmp_path / "models.toml", "[models.a]\n[models.b]\n"
    path.write_text(f"max_loaded = 2\n{tables}")
    world = routers(file=str(path))
    for name in "ab":
        assert world.client.post("/completion", json={**BODY, "model": name}).status_code == 200
    path.write_text(f"max_loaded = 1\nmemory_budget = '1 GiB'\n{tables}")
    assert world.client.get("/models?reload=1").status_code == 200
    world.until("a", "unloaded")
    assert world.state("b") == "loaded"
    assert world.client.get("/props").json()["max_instances"] == 1
    manager: Any = world.server.app.state.service.models.manager
    assert manager.settings.memory_budget == 1 << 30
    path.write_text(f"max_loaded = -1\n{tables}[models.c]\n")
    refused = world.client.get("/models?reload=1")
    assert refused.status_code == 400 and "max_loaded" in refused.json()["error"]["message"]
    assert (manager.settings.max_loaded, manager.names()) == (1, ["a", "b"])
    path.write_text(f"max_loaded = 5\nmemory_budget = '1 GiB'\n{tables}")
    by_flags = routers("--models-max", "3", "--models-memory", "64", file=str(path))
    assert by_flags.client.get("/models?reload=1").status_code == 200
    found = by_flags.server.app.state.service.models.manager.settings
    assert (found.max_loaded, found.memory_budget) == (3, 64 << 20)


def test_a_changed_model_is_served_while_its_last_requests_end(routers: Any) -> None:
    """They end as they began; a request that comes meanwhile waits for the new one, and has its settings."""
    world = routers()
    assert world.client.post("/completion", json={**BODY, "model": "small"}).status_code == 200
    old = world.loader.engines["small"]
    old.backend.hold()
    world.files.contents["p.ini"] = PRESETS.replace("small.gguf", "smaller.gguf\npredict = 2")
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(world.client.post, "/completion", json={**BODY, "model": "small"})
        world.users("small", 1)
        reloading = pool.submit(world.client.get, "/models?reload=1")
        world.until("small", "unloading")
        late = pool.submit(world.client.post, "/completion", json={"prompt": "x", "model": "s"})
        world.users("small", 2)
        assert world.client.get("/v1/models/small").status_code == 200
        old.backend.gate.set()
        assert running.result().json()["tokens_predicted"] == 3
        assert reloading.result().status_code == 200
        assert late.result().json()["tokens_predicted"] == 2
    assert world.loader.loads == ["small", "small"]
    assert world.loader.engines["small"] is not old


def test_a_reload_does_not_wait_for_what_an_earlier_one_unloads(routers: Any) -> None:
    """It has the new models while the last request of a changed one runs, for which the earlier reload waits."""
    world = routers(presets=PRESETS.replace("[small]\n", "[small]\nstop-timeout = 300\n"))
    assert world.client.post("/completion", json={**BODY, "model": "small"}).status_code == 200
    old = world.loader.engines["small"]
    old.backend.hold()
    changed = PRESETS.replace("small.gguf", "smaller.gguf")
    world.files.contents["p.ini"] = changed
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(world.client.post, "/completion", json={**BODY, "model": "small"})
        world.users("small", 1)
        first = pool.submit(world.client.get, "/models?reload=1")
        world.until("small", "unloading")
        world.files.contents["p.ini"] = f"{changed}[new]\nmodel = new.gguf\n"
        second = pool.submit(world.client.get, "/models?reload=1")
        try:
            assert "new" in [entry["id"] for entry in second.result(timeout=20).json()["data"]]
            assert not first.done() and not running.done()
        finally:
            old.backend.gate.set()
        assert running.result().status_code == first.result().status_code == 200


def test_a_request_that_waits_for_a_model_that_is_removed_gets_404(routers: Any) -> None:
    """As if it had come after that."""
    world = routers()
    world.loader.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(world.client.post, "/completion", json={**BODY, "model": "large"})
        world.users("large", 1)
        world.files.contents["p.ini"] = PRESETS.replace("[large]", "[new]")
        assert world.client.get("/models?reload=1").status_code == 200
        assert waiting.result().status_code == 404


def test_settings_that_no_engine_has_are_read_again_too(routers: Any) -> None:
    """A loaded model stays so, and is served with the new models."""
    world = routers()
    assert world.client.post("/v1/completions", json={"prompt": "x", "model": "small"}).status_code == 200
    world.files.contents["p.ini"] = PRESETS.replace("[small]\n", "[small]\npredict = 2\n")
    assert world.client.get("/models?reload=1").status_code == 200
    assert world.client.post("/completion", json={"prompt": "x", "model": "small"}).json()["tokens_predicted"] == 2
    assert world.loader.loads == ["small"]


def test_lists_leave_out_a_model_that_is_being_removed(routers: Any) -> None:
    """They are there while its last request ends."""
    world = routers()
    assert world.client.post("/completion", json={**BODY, "model": "large"}).status_code == 200
    world.loader.engines["large"].backend.hold()
    service: Any = world.server.app.state.service
    world.files.contents["p.ini"] = PRESETS.replace("large", "new")
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(world.client.post, "/completion", json={**BODY, "model": "large"})
        world.users("large", 1)
        reloading = pool.submit(world.client.get, "/models?reload=1")
        world.server.until(lambda: "large" not in service.models.manager.names())
        for path in ("/models", "/api/tags", "/"):
            response = world.client.get(path)
            assert response.status_code == 200 and "large" not in response.text
        world.loader.engines["large"].backend.gate.set()
        assert running.result().status_code == 200
        assert "new" in [entry["id"] for entry in reloading.result().json()["data"]]


def test_an_application_that_cannot_be_built_is_tried_once_a_request(routers: Any, caplog: Any) -> None:
    """503; nothing is tried in between, which would keep the model in use for ever."""
    world = routers(presets=PRESETS.replace("[small]\n", "[small]\nchat-template = {% if %}\n"))
    response = world.client.post("/completion", json={**BODY, "model": "small"})
    assert response.status_code == 503, response.text
    world.users("small", 0)
    tries = len([record for record in caplog.records if "could not be loaded" in record.message])
    time.sleep(0.5)
    assert len([record for record in caplog.records if "could not be loaded" in record.message]) - tries <= 1
    assert tries <= 2


def test_a_model_that_wakes_keeps_its_service(routers: Any) -> None:
    """Scales of adapters that were set, for instance; a stream of it does not count as one that was unloaded."""
    world = routers()
    assert world.client.post("/completion", json={**BODY, "model": "small"}).status_code == 200
    models: Any = world.server.app.state.service.models
    before = models.ready("small")
    loaded = models.manager._models["small"].run.loaded
    for _ in range(2):
        loaded.is_asleep = True
        assert world.client.get("/models").status_code == 200
        world.server.call(models.manager._arrange)
        assert world.state("small") == "sleeping"
        assert world.client.post("/completion", json={**BODY, "model": "small"}).status_code == 200
        assert models.ready("small") is before
        assert before.closing_error is None


def test_a_model_of_the_cache_is_deleted_by_any_of_its_names(routers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter's name is not a model, and models of a preset or a folder are not deleted: the errors name the model."""
    world = routers(presets="[*]\nalias = d\n")
    name = "user/demo:Q8_0"
    world.files.cached[name] = Path("/cache/demo.gguf")
    assert world.client.get("/models?reload=1").status_code == 200
    service: Any = world.server.app.state.service
    removed: list[str] = []

    async def remove(name: str) -> None:
        removed.append(name)

    async def check(_name: str, _presets: object) -> None:
        pass

    monkeypatch.setattr(service.downloads, "remove", remove)
    monkeypatch.setattr(service.downloads, "check_removable", check)
    for item in (name, "d", f"{name}:latest"):
        assert world.client.delete("/models", params={"model": item}).json() == {"success": True}
    assert removed == [name] * 3
    assert world.client.delete("/models?model=user/demo:Q8").status_code == 404
    world.files.contents["p.ini"] = f"[{name}]\nalias = d\nlora-modules = sql=a.gguf\n"
    world.files.contents["a.gguf"] = ""
    assert world.client.get("/models?reload=1").status_code == 200
    for item, words in (("d", f"model '{name}' is not of the cache"), ("sql", f"an adapter of the model '{name}'")):
        refused = world.client.delete("/models", params={"model": item})
        assert refused.status_code == 400 and words in refused.json()["error"]["message"]
    assert removed == [name] * 3


def test_an_event_that_cannot_be_handled_is_logged_where_it_happens(
    routers: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The models are followed on, and the server is closed in order."""
    world = routers()
    service: Any = world.server.app.state.service
    report = service.feed.report

    def fail_once(status: Any) -> None:
        service.feed.report = report
        raise ZeroDivisionError

    monkeypatch.setattr(service.feed, "report", fail_once)
    assert world.client.post("/completion", json={**BODY, "model": "small"}).status_code == 200
    assert "of the model small could not be followed" in caplog.text
    world.server.until(lambda: service.models.ready("small") is not None)
    assert world.client.post("/models/unload", json={"model": "small"}).status_code == 200
    world.until("small", "unloaded")
    world.server.until(lambda: service.models.ready("small") is None)
    world.server.do(service.aclose())


def test_keys_and_limits_hold_before_any_model_is_looked_for(routers: Any) -> None:
    """Once, for all models."""
    world = routers("--api-key", "secret", "--max-body-bytes", "200")
    assert world.client.post("/completion", json={**BODY, "model": "small"}).status_code == 401
    assert world.client.get("/models").status_code == 401
    headers = {"authorization": "Bearer secret"}
    long = {"prompt": "x" * 300, "model": "small"}
    assert world.client.post("/completion", json=long, headers=headers).status_code == 413
    assert world.loader.loads == []
    assert world.client.post("/completion", json={**BODY, "model": "small"}, headers=headers).status_code == 200


def test_no_body_is_read_before_a_key_and_a_route_are_known(routers: Any) -> None:
    """For all models and for the server's own routes."""
    world = routers("--api-key", "secret")
    keyed = b"authorization: Bearer secret\r\n"
    cases = [(path, b"", b"401") for path in (b"/health", b"/completion", b"/models/load", b"/v1/responses")]
    for path, headers, expected in (*cases, (b"/nothing", keyed, b"404"), (b"/health", keyed, b"405")):
        with socket.create_connection(("127.0.0.1", world.server.port), timeout=LONG_S) as connection:
            head = b"POST %b HTTP/1.1\r\nhost: localhost\r\n%bcontent-length: 100\r\n\r\n{" % (path, headers)
            connection.sendall(head)
            received = b""
            while part := connection.recv(65536):
                received += part
        assert received.startswith(b"HTTP/1.1 " + expected), path
    budget = world.server.app.state.service.body_budget
    assert budget.free_bytes == budget.max_bytes


def test_a_resumable_stream_is_read_again_without_its_model_s_name(routers: Any) -> None:
    """Also while its model waits, a client that leaves does not end it."""
    world = routers("--heartbeat-s", "0.02")
    world.loader.gate.clear()
    headers = {"x-conversation-id": "talk"}
    with world.client.stream("POST", "/v1/completions", json={**STREAM, "model": "small"}, headers=headers) as response:
        assert next(response.iter_lines()) == ": ping"
    world.loader.gate.set()
    service: Any = world.server.app.state.service
    world.server.until(lambda: (one := service.kept.resumable_streams.find(b"", "talk")) is not None and one.is_done)
    text = world.client.get("/v1/stream?conv_id=talk").text
    assert text.endswith("data: [DONE]\n\n")


def test_a_stream_is_ended_while_its_model_is_loaded(routers: Any) -> None:
    """The request that waits is refused; its stream is a 503 meanwhile."""
    world = routers()
    world.loader.gate.clear()
    headers = {"x-conversation-id": "talk"}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(world.client.post, "/v1/completions", json={**STREAM, "model": "small"}, headers=headers)
        world.users("small", 1)
        assert world.client.get("/v1/stream?conv_id=talk").status_code == 503
        assert world.client.delete("/v1/stream?conv_id=talk").status_code == 204
        assert waiting.result().status_code == 400 and "cancelled by a stop" in waiting.result().text
    assert world.client.get("/v1/stream?conv_id=talk").status_code == 404


def test_draining_ends_waiting_requests_and_events(routers: Any) -> None:
    """None of them holds the server up."""
    world = routers()
    world.loader.gate.clear()
    closed = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(world.client.post, "/completion", json={**BODY, "model": "small"})
        world.users("small", 1)
        service: Any = world.server.app.state.service
        world.server.do(service.aclose())
        assert waiting.result().status_code == 503
        closed.set()
    assert closed.is_set()
    assert world.client.post("/completion", json={**BODY, "model": "small"}).status_code == 503


def test_models_are_managed_by_the_operator_where_there_are_tenants(routers: Any) -> None:
    """Loading, unloading, downloads, deletions and rereading the presets refuse a tenant's key; its requests load models."""
    world = routers("--api-key", "operator", "--tenant-key-file", "keys", keys="a:first\nb:second\n")

    def status(key: str, method: str, path: str, **more: Any) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return int(world.client.request(method, path, headers=headers, **more).status_code)

    for method, path, more in (
        ("POST", "/models/load", {"json": {"model": "small"}}),
        ("POST", "/models/unload", {"json": {"model": "small"}}),
        ("GET", "/models?reload=1", {}),
        ("POST", "/models", {"json": {"model": "small"}}),
        ("DELETE", "/models?model=small", {}),
    ):
        assert status("first", method, path, **more) == 403, path
        assert status("operator", method, path, **more) != 403, path
    assert status("first", "GET", "/models") == 200
    assert status("first", "POST", "/completion", json={**BODY, "model": "small"}) == 200
    assert status("second", "POST", "/lora-adapters?model=small", json=[]) == 403
    shares = world.loader.engines["small"]._inbox._shares
    for key in range(-1000, 0):
        if shares.why_refused("a", 1) is None:
            shares.add(key, "a", 1)
    assert "the share of tenant 'a' in the queue is full" in shares.why_refused("a", 1)
    assert shares.why_refused("b", 1) is None
    for key in range(-1000, 0):
        shares.ended(key)
