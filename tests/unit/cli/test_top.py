"""The picture of `paceline top`: the sums of events, and its fit into terminals."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from paceline.cli.screen import TopPicture, TopState
from paceline.cli.watch import LocalEvents, ServerEvents, read_events
from paceline.errors import EngineError, InvalidParams
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.testing import FakeEngineClient


def slot(number: int, **changes: Any) -> dict[str, Any]:
    found = {
        "id": number, "state": "decoding", "key": 10 + number, "request_id": f"request-{number}", "choice": 0,
        "prompt_tokens": 512, "cached_tokens": 480, "computed_tokens": 600, "generated_tokens": 89, "max_tokens": 256,
        "running_s": 2.0, "tokens_per_s": 41.5, "num_preempted": 0, "priority": 0,
    }  # fmt: skip
    return found | changes


def tick(ms: float, *, num_prefill: int = 0, **more: Any) -> dict[str, Any]:
    rows = [[0, 10, 0, num_prefill, 1, 0, 1]]
    return {"t": 0.0, "ms": ms, "step_ms": ms, "n": 1, "running": 1, "waiting": 0, "cells": 1, "rows": rows, **more}


def snapshot(num_slots: int = 3) -> dict[str, Any]:
    return {
        "now_s": 1.0, "model": "some-model",
        "config": {"num_slots": 8, "num_cells": 8192, "host_bytes": 1 << 28, "itl_target_ms": 50.0},
        "engine": {"state": "ticking", "is_alive": True, "worker_pid": 1, "num_restarts": 2, "num_crashes": 0},
        "slots": [slot(number) for number in range(num_slots)],
        "others": {"slots": 2, "prefilling": 0, "decoding": 2, "paused": 0, "waiting": 0, "tokens_per_s": 9.0,
                   "tree_nodes": 1, "tree_tokens": 5},
        "queue": {"waiting": 3, "sequences": [], "embeddings": 0},
        "memory": {"cells": 100, "free_cells": 8092, "running_cells": 60, "cached_cells": 40, "host_bytes": 0, "rss_bytes": None},
        "rates": {"generated_per_s": 320.0, "prefill_per_s": 0.0, "ticks_per_s": 41.0},
        "tree": {"num_nodes": 2, "num_tokens": 20, "is_complete": False, "nodes": [
            {"id": 1, "parent": None, "start": 0, "end": 480, "running": [[10, 0], [11, 0]], "cached": 1, "on_device": True,
             "on_host": False, "has_state": False}]},
        "ticks": [tick(12.0), tick(80.0, num_prefill=9)], "marks": [],
    }  # fmt: skip


def drawn(
    state: TopState, width: int = 120, height: int = 40, status: str = "", *, shows_keys: bool = False
) -> list[str]:
    console = Console(width=width, height=height, force_terminal=True, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(TopPicture(state, "http://here", status, shows_keys))
    return capture.get().rstrip("\n").split("\n")


def test_updates_replace_members_and_add_ticks() -> None:
    """A snapshot begins anew; the end is noted."""
    state = TopState()
    state.take("snapshot", snapshot())
    state.take("update", {"now_s": 1.1, "slots": [], "ticks": [tick(5.0)], "marks": [{"what": "ended"}]})
    assert (state.members["slots"], len(state.columns), state.members["model"]) == ([], 3, "some-model")
    state.take("snapshot", snapshot() | {"ticks": []})
    assert (len(state.members["slots"]), len(state.columns)) == (3, 0)
    state.take("end", {"reason": "shutdown"})
    assert state.is_over


def test_the_picture_says_what_runs_and_how_fast() -> None:
    """Slots of others are sums; a shared prefix names its requests."""
    state = TopState()
    state.take("snapshot", snapshot())
    text = "\n".join(drawn(state))
    for part in (
        "some-model", "http://here", "2 restarts", "320 tok/s", "slots 5/8 · 3 waiting · 2 of other tenants", "#10 request-0",
        "longest 80.0 ms, target 50 ms (over it)", "cells 100 of 8,192 (60 running, 40 cached)", "2 nodes, 20 tokens, and more",
        "tokens 0 to 480", "#10 #11 1 cached",
    ):  # fmt: skip
        assert part in text, part


@pytest.mark.parametrize("width", [20, 60, 89, 200])
@pytest.mark.parametrize("height", [5, 24, 60])
def test_the_picture_is_no_wider_and_no_higher_than_the_terminal(width: int, height: int) -> None:
    """With more slots than fit, and no update yet of the members sent once a second."""
    state = TopState()
    state.take("snapshot", snapshot(num_slots=50))
    lines = drawn(state, width, height)
    assert max(map(cell_len, lines)) <= width
    assert len(lines) <= max(height, 24)
    assert "more" in "\n".join(lines)


def test_the_smallest_usual_terminal_cuts_no_line() -> None:
    """At 80 by 24 the state, the legend and the memory are whole, and the keys fit in if they are asked for."""
    state = TopState()
    counts = dict.fromkeys(("completed", "cancelled", "failed", "preemptions", "cached_prompt_tokens"), 100)
    counts |= {"prompt_tokens": 123_456, "generated_tokens": 54_321, "draft_tokens": 0, "accepted_tokens": 0}
    times = {"p50": 0.01, "p95": 0.02, "p99": 0.05}
    found = snapshot(8) | {"counts": counts, "histograms": {"ttft_s": times, "itl_s": times}}
    found["memory"]["rss_bytes"] = 500 << 20
    state.take("snapshot", found)
    lines = drawn(state, 80, 24, shows_keys=True)
    assert len(lines) <= 24
    text = "\n".join(lines)
    assert "…" not in text
    for part in ("41 ticks/s", "magenta: embedding", "process 500 MiB", "54,321 generated", "#10 request-0", "? shows"):
        assert part in text, part
    assert "? shows" not in "\n".join(drawn(state, 80, 24))


def test_names_of_requests_reach_the_terminal_as_text() -> None:
    """Control characters of a client's name do nothing."""
    state = TopState()
    state.take("snapshot", snapshot() | {"slots": [slot(0, request_id="a\x1b[2Jb")]})
    assert "\x1b[2J" not in "\n".join(drawn(state))


def test_before_the_first_event_there_is_a_sentence() -> None:
    """Nothing else is known."""
    assert "connecting" in "\n".join(drawn(TopState(), status="connecting to http://here ..."))


def test_comments_of_a_stream_are_passed_over() -> None:
    """And so are the lines between events."""
    lines = [": ping", "", "event: snapshot", 'data: {"a": 1}', "", "event: end", 'data: {"reason": "failed"}', ""]
    assert list(read_events(iter(lines))) == [("snapshot", {"a": 1}), ("end", {"reason": "failed"})]


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://x", "http://", "", "http://[::1"])
def test_invalid_url_is_refused(url: str) -> None:
    """Before anything is connected to."""
    with pytest.raises(InvalidParams, match="URL"):
        ServerEvents(url)


def test_a_server_that_is_not_there_is_an_error() -> None:
    """At once; only a connection that was there is tried again."""
    source = ServerEvents("http://127.0.0.1:9")
    source.run(lambda *_: None, threading.Event())
    assert isinstance(source.failure, EngineError)
    assert "cannot be reached" in str(source.failure)


def test_an_engine_of_this_process_is_watched() -> None:
    """Until it is stopped; nothing is left running."""
    engine, state, stop = FakeEngineClient(), TopState(), threading.Event()
    source = LocalEvents(engine, "fake", interval_ms=100)

    def take(name: str, members: Any) -> None:
        state.take(name, members)
        if state.columns:
            stop.set()

    params = SamplingParams(max_tokens=3000, ignore_eos=True)
    channel = engine.accept(engine.prepare("on and on", params, RequestOptions()))
    try:
        source.run(take, stop)
    finally:
        channel.cancel()
        engine.close()
    assert state.members["model"] == "fake"
    assert source.failure is None
