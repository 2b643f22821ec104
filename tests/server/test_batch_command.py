"""`paceline batch run --url` against a server, and the errors of the command."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.server.running import RunningServer
from typer.testing import CliRunner, Result

from paceline.cli import batch_command
from paceline.cli.app import build_app

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
