"""`paceline batch run --url` against a server, and the errors of the command."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.running import RunningServer
from typer.testing import CliRunner, Result

from paceline.cli import batch_command, terminal
from paceline.cli.app import build_app
from paceline.server.batch_run import BatchEntry, BatchFailure, BatchFiles, new_id

pytestmark = pytest.mark.native

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "Hello"},
}


def run(source: Path, *options: str) -> Result:
    arguments = ["batch", "run", str(source), "-o", str(source.with_name("out.jsonl")), *options]
    return CliRunner().invoke(build_app(), arguments, catch_exceptions=False)


def read_entries(path: Path) -> dict[str, Any]:
    entries = [json.loads(line) for line in path.read_bytes().splitlines()]
    return {entry["custom_id"]: entry["response"] for entry in entries}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    lines = [{"custom_id": url, "url": url, "body": body} for url, body in BODIES.items()]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_every_endpoint_runs_through_a_server(
    server: RunningServer, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that makes no vectors refuses one line, which is an error; the exit code says so."""
    monkeypatch.setattr(batch_command, "_REPORT_S", 0.0)
    done = run(source, "--url", f"{server.url}/v1", "--concurrency", "1")
    assert done.exit_code == 1
    assert "1 of 4 lines, 0 errors, " in done.stderr
    assert done.stderr.endswith(f"3 results in {source.with_name('out.jsonl')}, 1 error in "
                                f"{source.with_name('out.errors.jsonl')}\n")  # fmt: skip
    results, errors = read_entries(source.with_name("out.jsonl")), read_entries(source.with_name("out.errors.jsonl"))
    assert results.keys() == BODIES.keys() - {"/v1/embeddings"}
    assert results["/v1/completions"]["body"]["usage"]["completion_tokens"] == 2
    assert results["/v1/completions"]["request_id"]
    assert errors["/v1/embeddings"]["body"]["error"]["code"] == "unsupported"
    again = run(source, "--url", "http://127.0.0.1:9", "--quiet")  # nothing is left to ask a server for
    assert (again.exit_code, again.stderr) == (1, "")
    assert read_entries(source.with_name("out.jsonl")) == results


def test_a_model_is_filled_in_and_a_server_may_stall_for_an_hour(
    server: RunningServer, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model of -m, into bodies that name none."""
    sent: list[dict[str, Any]] = []
    clients: list[httpx.AsyncClient] = []
    post = httpx.AsyncClient.post

    async def note(client: httpx.AsyncClient, url: str, **options: Any) -> httpx.Response:
        clients.append(client)
        sent.append(json.loads(options["content"]))
        return await post(client, url, **options)

    monkeypatch.setattr(httpx.AsyncClient, "post", note)
    body = BODIES["/v1/completions"]
    lines = [{"custom_id": name, "url": "/v1/completions", "body": body | {"model": name}} for name in ("x", "y")]
    del lines[0]["body"]["model"]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with server.client() as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
    run(source, "--url", server.url, "-m", model, "-q")
    assert sorted(body["model"] for body in sent) == sorted([model, "y"])
    assert clients[0].timeout.read == 3600


def test_progress_is_shown_before_a_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a run of long lines is no silence; the time that is left comes with the first line."""
    monkeypatch.setattr(batch_command, "_UPDATE_S", 0.001)
    monkeypatch.setattr(batch_command, "_REPORT_S", 0.0)
    notes: list[str] = []
    monkeypatch.setattr(terminal, "note", notes.append)
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"custom_id": "a", "url": "/v1/completions", "body": {}}) + "\n")

    async def main() -> None:
        with BatchFiles(source, tmp_path / "out.jsonl", tmp_path / "errors.jsonl") as files:
            files.next_window()
            async with batch_command._progress(files, 3, is_shown=True) as on_entry:
                while not notes:
                    await asyncio.sleep(0.001)
                entry = BatchEntry(new_id(), "a", None, BatchFailure("x", ""))
                files.write(entry)
                on_entry(entry)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert notes[0].startswith("0 of 3 lines, 0 errors") and "left" not in notes[0]
    assert notes[-1].startswith("1 of 3 lines, 1 error") and notes[-1].endswith(" left")


def test_options_of_the_engine_are_refused_with_a_server(source: Path) -> None:
    """They would have no effect."""
    done = run(source, "--url", "http://127.0.0.1:9", "-c", "100")
    assert (done.exit_code, "options of the engine have no effect" in done.stderr) == (2, True)


def test_a_server_that_does_not_answer_is_an_error(source: Path) -> None:
    """Before any line is an error."""
    done = run(source, "--url", "http://127.0.0.1:9")
    assert (done.exit_code, "no server answers" in done.stderr) == (2, True)
    assert not source.with_name("out.errors.jsonl").exists()


def test_requests_come_through_a_pipe(server: RunningServer, source: Path) -> None:
    """Each line runs, though none can be read twice."""
    read, write = os.pipe()
    os.write(write, source.read_bytes())
    os.close(write)
    options = ("-o", str(source.with_name("out.jsonl")), "--url", server.url, "-q")
    done = CliRunner().invoke(build_app(), ["batch", "run", f"/dev/fd/{read}", *options], catch_exceptions=False)
    os.close(read)
    assert done.exit_code == 1
    assert len(read_entries(source.with_name("out.jsonl"))) == 3


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    """And no file of results is made."""
    done = run(tmp_path / "none.jsonl")
    assert (done.exit_code, "none.jsonl" in done.stderr) == (1, True)
    assert not (tmp_path / "out.jsonl").exists()
