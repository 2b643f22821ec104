"""`paceline ps` beside servers in processes of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.commands import COMMAND, environment
from tests.e2e.served import LONG_S, Served

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them"),
]
KEY = "secret-of-a-server"


def run_ps(state: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    variables = environment(XDG_STATE_HOME=str(state), **env)
    return subprocess.run(
        [*COMMAND, "ps", *args], env=variables, capture_output=True, text=True, check=False, timeout=60
    )


def rows(state: Path, *args: str, **env: str) -> list[dict[str, Any]]:
    done = run_ps(state, "--json", *args, **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ask_for_long(url: str) -> None:
    """Keep all slots busy until the server ends: the reader of a whole reply never makes it pause."""
    body = {"prompt": "Once", "max_tokens": 900, "n": 64, "ignore_eos": True}
    with suppress(httpx.HTTPError):
        httpx.post(f"{url}/v1/completions", json=body, timeout=LONG_S)


def test_servers_their_models_and_slots(tmp_path: Path) -> None:
    """Busy slots are counted, keys are needed and not stored, and neither a crash nor an end leaves a row."""
    state = {"XDG_STATE_HOME": str(tmp_path)}
    assert rows(tmp_path) == []
    assert "`paceline serve` starts one" in run_ps(tmp_path).stderr
    began = time.time()
    with (
        Served("-np", "3", "-t", "1", "--drain-s", "0", **state) as first,
        Served("-np", "2", "--api-key", KEY, "-a", "kept", **state) as second,
    ):
        threading.Thread(target=ask_for_long, args=(first.url,), daemon=True).start()
        while True:  # until the request has begun, and in a tick in which no slot is between two sequences
            busy, closed = sorted(rows(tmp_path), key=lambda row: row["pid"] != first.pid)
            if busy["busy"] == 3:
                break
        assert (busy["model"], busy["url"], busy["pid"]) == ("paceline-demo", first.url, first.pid)
        assert (busy["busy"], busy["slots"], busy["state"]) == (3, 3, "ready")
        assert busy["size"] > 4_000_000 and began < busy["started"] < time.time()
        assert (closed["model"], closed["size"], closed["slots"], closed["pid"]) == ("kept", None, None, second.pid)
        assert "API key" in closed["state"]
        known = {row["model"]: row["slots"] for row in rows(tmp_path, PACELINE_API_KEY=KEY)}
        assert known == {"paceline-demo": 3, "kept": 2}
        assert KEY not in "".join(file.read_text() for file in (tmp_path / "paceline" / "servers").iterdir())
        table = run_ps(tmp_path).stdout.splitlines()
        assert table[0].split() == ["MODEL", "SIZE", "ADDRESS", "SLOTS", "UP", "SINCE"]
        assert len(table) == 3 and any(first.url in line and "/3" in line for line in table)
        (asked,) = rows(tmp_path, "--url", f"{second.url}/v1", "--api-key", KEY)
        assert (asked["model"], asked["slots"], asked["pid"]) == ("kept", 2, None)
        refused = run_ps(tmp_path, "--url", second.url)
        assert refused.returncode == 1 and "API key" in refused.stderr
        second.signal(signal.SIGKILL)
        second.code()
        assert [row["pid"] for row in rows(tmp_path)] == [first.pid]
        first.signal(signal.SIGTERM)
        assert first.code() == 0
        assert rows(tmp_path) == [] and list((tmp_path / "paceline" / "servers").iterdir()) == []


def test_a_server_of_several_models_loads_none_for_it(tmp_path: Path, long_model: Path) -> None:
    """It is listed without a model, and then with the loaded model."""
    state = {"XDG_STATE_HOME": str(tmp_path)}
    flags = ("--models-dir", str(long_model.parent), "-np", "2", "-c", "512")
    with Served(*flags, is_ready=False, **state) as served:
        served.wait_for("ready after")
        (row,) = rows(tmp_path)
        assert (row["model"], row["slots"], row["state"]) == (None, None, "ready")
        assert "(none loaded)" in run_ps(tmp_path).stdout
        body = {"model": "long", "prompt": "Once", "max_tokens": 1}
        assert httpx.post(f"{served.url}/v1/completions", json=body, timeout=LONG_S).status_code == 200
        (row,) = rows(tmp_path)
        assert (row["model"], row["busy"], row["slots"]) == ("long", 0, 2)


@pytest.mark.parametrize(
    ("url", "code", "words"), [("localhost:1", 2, "--url must begin"), ("http://127.0.0.1:9", 1, "does not answer")]
)
def test_a_url_without_a_server_is_one_line(tmp_path: Path, url: str, code: int, words: str) -> None:
    """It names the address."""
    done = run_ps(tmp_path, "--url", url)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert url in done.stderr and words in done.stderr
