"""The viewer of a trace: its contents, and that no text of a trace becomes code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.app import build_app
from paceline.cli.trace import PLACE, viewer_data, viewer_html
from paceline.errors import Unsupported
from paceline.observability.trace_file import Trace, TraceRecorder, read_trace
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.server import web_page
from paceline.testing import FakeEngineClient

VIEWER = f"<!doctype html><title>x</title>{PLACE}<script>run()</script>"
EVIL = "</script><script>alert(1)</script><!--"


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A trace of two requests."""
    path = tmp_path / "trace.jsonl"
    with TraceRecorder(path) as recorder:
        engine = FakeEngineClient(instruments=[recorder])
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        channels = [
            engine.accept(engine.prepare("a prompt", params, RequestOptions(request_id=name))) for name in ("one", EVIL)
        ]
        for channel in channels:
            assert list(channel)
        engine.close()
    return path


def data_in(html: str) -> Any:
    begin, end = PLACE.split("null")
    return json.loads(html.partition(begin)[2].partition(end)[0])


def test_a_viewer_has_the_ticks_requests_and_stays_of_its_trace(recorded: Path) -> None:
    """In the form of the stream of engine events."""
    found = viewer_data(read_trace(recorded), title="mine")
    assert found["title"] == "mine"
    assert "2 requests" in found["summary"]
    assert [request["generated_tokens"] for request in found["requests"]] == [8, 8]
    assert {request["reason"] for request in found["requests"]} == {"length"}
    assert sum(row[6] for tick in found["ticks"] for row in tick["rows"]) == 16
    assert [(stay["slot"], stay["ending"]) for stay in found["stays"]] == [(0, "ended"), (1, "ended")]
    times = [mark["t"] for mark in found["marks"]]
    assert times == sorted(times)
    assert [mark["what"] for mark in found["marks"]].count("started") == 2
    assert found["config"]["num_slots"] == 4


def test_no_name_of_a_request_ends_the_data(recorded: Path) -> None:
    """It is text there, and reads back as it was."""
    html = viewer_html(VIEWER, read_trace(recorded), title=EVIL)
    assert html.count("<script") == VIEWER.count("<script")
    assert "<!--" not in html
    found = data_in(html)
    assert (found["title"], found["requests"][1]["request_id"]) == (EVIL, EVIL)


def test_an_empty_trace_has_a_viewer() -> None:
    """With nothing in it."""
    found = data_in(viewer_html(VIEWER, Trace(()), title="empty"))
    assert (found["ticks"], found["requests"], found["config"]["num_slots"]) == ([], [], 0)


def test_a_viewer_without_a_place_for_data_is_refused() -> None:
    """It is of another version."""
    with pytest.raises(Unsupported, match="another version"):
        viewer_html("<!doctype html>", Trace(()), title="x")


def test_the_command_writes_the_viewer_or_says_what_is_missing(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the built page the error says how to build it."""
    monkeypatch.setattr(web_page, "built_folder", lambda: tmp_path / "webui")
    out = tmp_path / "out.html"
    arguments = ["trace", "show", str(recorded), "--html", str(out)]
    missing = CliRunner().invoke(build_app(), arguments)
    assert missing.exit_code == 1
    assert "PACELINE_WEBUI" in missing.output
    assert not out.exists()
    (tmp_path / "webui").mkdir()
    (tmp_path / "webui/trace.html").write_text(VIEWER)
    assert CliRunner().invoke(build_app(), arguments).exit_code == 0
    assert data_in(out.read_text())["title"] == "trace.jsonl"
