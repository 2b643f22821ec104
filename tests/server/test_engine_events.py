"""GET /v1/engine/events, and the data for the start of a page: over fake engines, a router of them, and the demo model."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tests.server import probe
from tests.server.event_client import watching
from tests.server.running import LONG_S, RunningServer
from tests.server.stand_in import StandInLLM

from paceline.engine.worker.supervisor import RestartLimits
from paceline.server.settings import ApiKey, ServerSettings
from paceline.testing.fake_engine_client import fake_worker_engine

KEYS = {"api_keys": (ApiKey(secret="b", tenant="blue"), ApiKey(secret="r", tenant="red"))}
ENDLESS = {"max_tokens": 10**6}
ROOM = {"num_cells": 400_000}
PROMPT = "a prompt that is long enough to be cached, and then some more of it"


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def test_a_watcher_sees_a_request_from_its_start_to_its_end(worlds: Any) -> None:
    """A snapshot first, then changes: its slot with its name, ticks with its rows, marks of start and end."""
    world = worlds(**ROOM)
    with watching(world.client) as events:
        name, first = events.next()
        assert (name, first["slots"], first["ticks"], first["others"]) == ("snapshot", [], [], None)
        assert first["config"]["num_slots"] == 2
        assert abs(first["unix_s"] - time.time()) < LONG_S
        with world.raw("mine", prompts=[PROMPT], sampling=ENDLESS, stream=True):
            state = events.until(lambda state: bool(state["slots"]) and bool(state["tree"]["nodes"]))
            (slot,) = state["slots"]
            assert (slot["id"], slot["request_id"], slot["prompt_tokens"]) == (0, "mine", len(PROMPT))
            assert state["tree"]["nodes"][0]["running"] == [[slot["key"], 0]]
            events.until(lambda state: (state["slots"][0]["tokens_per_s"] or 0) > 0)
            events.until(lambda state: state["rates"]["generated_per_s"] > 0)
        events.until(lambda state: not state["slots"])
        assert [mark["what"] for mark in events.marks] == ["started", "cancelled"]
        assert {row[1] for tick in events.ticks for row in tick["rows"]} == {slot["key"]}
        starts = [tick["t"] for tick in events.ticks]
        assert starts == sorted(set(starts))
        assert events.names.count("snapshot") == 1


def test_events_come_at_most_ten_times_a_second(worlds: Any) -> None:
    """However fast the ticks are; more than 25 of them in one event are merged."""
    world = worlds(**ROOM)
    with (
        world.raw(prompts=["abc"], sampling=ENDLESS, stream=True),
        watching(world.client, max_nodes=0, interval_ms=100) as events,
    ):
        events.next()
        assert "tree" not in events.state
        began_s = time.monotonic()
        sizes = [len(events.next()[1].get("ticks", [])) for _ in range(10)]
        assert time.monotonic() - began_s > 0.85
        assert max(sizes) <= 26
        assert max(tick["n"] for tick in events.ticks) > 1


def test_the_tree_comes_at_most_once_a_second(worlds: Any) -> None:
    """Though it grows with every request: a view of it takes time between two passes."""
    world = worlds(**ROOM)
    with watching(world.client, interval_ms=100) as events:
        events.next()
        began_s, num_trees = time.monotonic(), 0
        for number in range(1000):
            world.post(prompts=[f"{number} {PROMPT}"], sampling={"max_tokens": 2})
            num_trees += "tree" in events.next()[1]
            if num_trees == 3:
                break
        assert num_trees == 3
        assert time.monotonic() - began_s > 1.85  # the first of them may come at once


def test_an_idle_engine_is_quiet(worlds: Any) -> None:
    """After the first events there are comments alone."""
    world = worlds({"heartbeat_s": 0.2})
    with world.client.stream("GET", "/v1/engine/events") as response:
        lines: list[str] = []
        for line in response.iter_lines():
            lines.append(line)
            if lines[-6:] == [": ping", ""] * 3:
                break
        assert sum(line.startswith("event: ") for line in lines) <= 3


def test_nothing_is_looked_at_before_and_after_a_client_watches(worlds: Any) -> None:
    """The log of the engine is off, no task is left, and the next client begins with a snapshot."""
    world = worlds()
    watch = world.server.service.engine_watch
    assert not watch.is_on
    with watching(world.client) as events:
        events.next()
        assert watch.is_on
    world.server.until(lambda: not watch.is_on)
    assert watch._task is None
    with watching(world.client) as events:
        assert events.next()[0] == "snapshot"


def test_a_second_watcher_gets_the_ticks_that_the_first_has_seen(worlds: Any) -> None:
    """As many as requested; none for zero."""
    world = worlds()
    with watching(world.client) as first:
        first.next()
        world.post(prompts=["abc"], sampling={"max_tokens": 12})
        first.until(lambda _: len(first.ticks) >= 12)
        with watching(world.client) as second, watching(world.client, history=0) as third:
            assert len(second.next()[1]["ticks"]) >= 12
            assert third.next()[1]["ticks"] == []
        first.until(lambda state: state["rates"]["generated_per_s"] == 0)  # it goes on


def test_a_watcher_that_joins_does_not_wait_for_a_slower_one(worlds: Any) -> None:
    """The look that comes for the first one in a minute is made at once for the second."""
    world = worlds(**ROOM)
    with world.raw(prompts=["abc"], sampling=ENDLESS, stream=True), watching(world.client, interval_ms=60_000) as first:
        first.next()
        began_s = time.monotonic()
        with watching(world.client) as second:
            assert second.next()[0] == "snapshot"
            second.until(lambda _: len(second.ticks) > 50)
        assert time.monotonic() - began_s < 30


def test_a_failed_tick_does_not_end_the_stream(worlds: Any) -> None:
    """Nor does it end the engine: its log begins anew."""
    world = worlds(**ROOM)
    with watching(world.client) as events:
        with world.raw(prompts=["abc"], sampling=ENDLESS, stream=True):
            events.until(lambda state: bool(state["slots"]))
            world.fail_the_next_tick()
            events.until(lambda state: not state["slots"])
        assert events.names.count("snapshot") >= 2
        with world.raw(prompts=["def"], sampling=ENDLESS, stream=True):
            events.until(lambda state: bool(state["slots"]))


def test_tenants_see_their_own_requests_and_sums_of_the_rest(worlds: Any) -> None:
    """No name, key, slot or number of tokens of another tenant is in any event."""
    world = worlds(KEYS, num_slots=3, **ROOM)
    with world.server.client(headers=bearer("b")) as blue, world.server.client(headers=bearer("r")) as red:
        body = {"prompts": [PROMPT], "sampling": ENDLESS, "stream": True}
        with (
            blue.stream("POST", "/v1/probe", json=body, headers={"x-request-id": "of-blue"}) as one,
            red.stream("POST", "/v1/probe", json=body, headers={"x-request-id": "of-red"}) as two,
        ):
            replies = [one.iter_lines(), two.iter_lines()]  # kept, as losing one closes its response
            for reply in replies:
                next(reply)
            with watching(blue) as events:
                state = events.until(
                    lambda state: bool(state["slots"] and state["others"] and state["others"]["tree_nodes"])
                )
                assert state["config"]["tenant"] == "blue"
                assert [slot["request_id"] for slot in state["slots"]] == ["of-blue"]
                assert state["others"]["slots"] == 1
                assert "of-red" not in str(state)
                events.until(lambda _: any("others" in tick for tick in events.ticks))
                keys = {row[1] for tick in events.ticks for row in tick["rows"]}
                assert keys == {state["slots"][0]["key"]}
            with watching(red) as events:
                assert [slot["request_id"] for slot in events.until(lambda state: bool(state["slots"]))["slots"]] == [
                    "of-red"
                ]


def test_the_stream_needs_a_key_where_others_do(worlds: Any) -> None:
    """So do the facts for pages."""
    world = worlds(KEYS)
    for path in ("/v1/engine/events", "/v1/engine/page", "/v1/engine/model"):
        assert world.client.get(path).status_code == 401, path
        assert world.client.get(path, headers=bearer("wrong")).status_code == 401, path
    assert world.client.get("/v1/engine/page", headers=bearer("r")).json()["tenant"] == "red"


@pytest.mark.parametrize("wrong", ["interval_ms=99", "interval_ms=x", "max_nodes=-1", "max_nodes=5000", "history=-1"])
def test_wrong_parameters_are_refused(worlds: Any, wrong: str) -> None:
    """With the parameter's name."""
    response = worlds().client.get(f"/v1/engine/events?{wrong}")
    assert response.status_code == 400
    assert wrong.partition("=")[0] in response.json()["error"]["message"]


def test_the_stream_ends_when_the_server_does(worlds: Any) -> None:
    """With a clear event, at once: nothing waits for viewers."""
    world = worlds({"drain_s": LONG_S})
    with watching(world.client) as events:
        events.next()
        world.server.call(world.server.service.drain)
        while (event := events.next())[0] != "end":
            pass
        assert event[1] == {"reason": "shutdown"}


def test_the_stream_ends_when_the_engine_fails(worlds: Any) -> None:
    """A client that connects later gets the same end."""
    world = worlds()
    with watching(world.client) as events:
        events.next()
        world.engine.close()
        while (event := events.next())[0] != "end":
            pass
        assert event[1] == {"reason": "failed"}
    with watching(world.client) as events:
        assert events.next() == ("end", {"reason": "failed"})


def test_a_watched_model_of_a_router_is_named_in_the_query(routers: Any) -> None:
    """Watching loads none; an unknown one is not there."""
    world = routers()
    assert world.client.get("/v1/engine/events?model=nothing").status_code == 404
    assert world.client.get("/v1/engine/events").status_code == 400
    response = world.client.get("/v1/engine/events?model=small")
    assert (response.status_code, world.loader.loads) == (response.status_code, [])
    assert response.status_code >= 400
    world.client.post("/completion", json={"prompt": "once", "n_predict": 3, "model": "small"})
    with watching(world.client, model="small") as events:
        assert events.next()[1]["model"] == "small"
        assert world.client.post("/models/unload", json={"model": "small"}).status_code == 200
        while (event := events.next())[0] != "end":
            pass
        assert event[1] == {"reason": "unloaded"}


def test_a_page_learns_of_the_models_of_a_router(routers: Any) -> None:
    """With their states; the first loaded model is the default."""
    world = routers()
    page = world.client.get("/v1/engine/page").json()
    assert page["is_router"]
    assert [(model["id"], model["state"]) for model in page["models"]] == [
        ("small", "unloaded"), ("large", "unloaded"), ("other", "unloaded"),
    ]  # fmt: skip
    assert page["default_model"] == "small"
    assert page["models"][0]["aliases"] == ["s"]
    world.client.post("/completion", json={"prompt": "once", "n_predict": 3, "model": "large"})
    page = world.client.get("/v1/engine/page").json()
    assert (page["default_model"], page["models"][1]["state"]) == ("large", "loaded")
    world.fail("other")
    world.client.post("/completion", json={"prompt": "once", "n_predict": 3, "model": "other"})
    failed = world.client.get("/v1/engine/page").json()["models"][2]
    assert failed["state"] == "failed"
    assert "damaged" in failed["error"]
    assert "/secret" not in failed["error"]


def test_the_demo_model_is_watched_while_it_chats(client: httpx.Client) -> None:
    """The whole way: a chat's cached prefix, the tree, memory, distributions."""
    body = {"messages": [{"role": "user", "content": "Tell me a story about a fox"}], "max_tokens": 20, "seed": 1}
    with watching(client) as events:
        events.next()
        for _ in range(2):
            assert client.post("/v1/chat/completions", json=body).status_code == 200
        events.until(lambda state: sum(state.get("histograms", {"itl_s": {"counts": ()}})["itl_s"]["counts"]) > 0)
        events.until(lambda _: [mark["what"] for mark in events.marks].count("ended") == 2)
        events.until(lambda state: state["tree"]["num_nodes"] > 0)
        state = events.until(lambda state: state["counts"]["completed"] >= 2)  # once a second
    assert state["histograms"]["ttft_s"]["p50"] > 0
    assert state["tree"]["num_nodes"] > 0
    assert state["memory"]["cells"] > 0
    assert {"started", "ended"} == {mark["what"] for mark in events.marks}


def test_every_parameter_of_a_page_is_taken_with_its_default_and_at_its_bounds(client: httpx.Client) -> None:
    """The server refuses none that the page would let people choose."""
    found = client.get("/v1/engine/model").json()
    assert (found["modalities"], found["has_chat_template"]) == (["text"], True)
    parameters = found["parameters"]
    names = [parameter["name"] for parameter in parameters]
    assert len(set(names)) == len(names)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    for parameter in parameters:
        assert parameter["help"].endswith("."), parameter
        values = [parameter["default"], parameter["minimum"], parameter["maximum"], *(parameter["choices"] or ())]
        for value in [value for value in values if value is not None]:
            if parameter["name"] == "max_tokens" and value > 1:
                continue
            response = client.post("/v1/chat/completions", json=body | {parameter["name"]: value})
            assert response.status_code == 200, (parameter["name"], value, response.text)
            assert "warnings" not in response.json(), (parameter["name"], value)


def test_the_page_of_one_model_says_how_it_is(server: RunningServer, client: httpx.Client) -> None:
    """Its names, state and links; without keys there is no tenant."""
    page = client.get("/v1/engine/page").json()
    (model,) = page["models"]
    assert (model["id"], model["state"], model["progress"], model["error"]) == ("paceline-demo", "loaded", 1.0, None)
    assert (page["is_router"], page["tenant"], page["default_model"]) == (False, "", "paceline-demo")
    for link in page["links"].values():
        assert client.get(f"/{link}").status_code == 200


def test_another_worker_begins_with_a_snapshot() -> None:
    """State of the dead worker is void; the request goes on in the next worker, under its name."""
    backend = {"num_cells": 400_000, "eos_every": 10**9}
    engine: Any = fake_worker_engine(backend_options=backend, restarts=RestartLimits(first_wait_s=0.0))
    engine.model = SimpleNamespace(metadata={}, chat_templates={})  # what a server reads of one
    with (
        RunningServer(ServerSettings(), StandInLLM(engine), routes=(probe.routes,)) as server,
        server.client() as client,
    ):
        body = {"prompts": [PROMPT], "sampling": ENDLESS, "stream": True}
        with (
            client.stream("POST", "/v1/probe", json=body, headers={"x-request-id": "mine"}),
            watching(client) as events,
        ):
            first = events.until(lambda state: bool(state["slots"]) and state["engine"]["worker_pid"] is not None)
            assert first["config"]["isolation"] == "process"
            pid = first["engine"]["worker_pid"]
            os.kill(pid, signal.SIGKILL)
            after = events.until(
                lambda state: bool(state["slots"]) and state["engine"]["worker_pid"] not in (pid, None)
            )
            assert [slot["request_id"] for slot in after["slots"]] == ["mine"]
            assert after["engine"]["num_restarts"] == 1
            assert events.names.count("snapshot") >= 2
            events.until(lambda _: bool(events.ticks))


def test_a_watched_engine_falls_asleep_and_is_not_woken() -> None:
    """Looking on is no use of it: the stream says that it sleeps, and goes on."""
    options = {"num_cells": 400_000, "eos_every": 10**9}
    engine: Any = fake_worker_engine(sleep_idle_s=0.3, backend_options=options)
    engine.model = SimpleNamespace(metadata={}, chat_templates={})
    with (
        RunningServer(ServerSettings(), StandInLLM(engine), routes=(probe.routes,)) as server,
        server.client() as client,
        watching(client) as events,
    ):
        short = {"prompts": ["abc"], "sampling": {"max_tokens": 3}}
        assert client.post("/v1/probe", json=short).status_code == 200
        events.until(lambda state: state["engine"]["state"] == "sleeping")
        asleep = events.until(lambda state: state["engine"]["worker_pid"] is None)  # it takes a moment to end
        assert (asleep["engine"]["state"], asleep["engine"]["is_alive"]) == ("sleeping", True)
        # One that lasts, as the engine may sleep again before the next look.
        endless = {"prompts": ["abc"], "sampling": ENDLESS, "stream": True}
        with client.stream("POST", "/v1/probe", json=endless):
            events.until(lambda state: state["engine"]["worker_pid"] is not None)
