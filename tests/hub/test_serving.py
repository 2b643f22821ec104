"""`paceline serve` with models by name."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.hub.stand_in_hub import StandInHub

from paceline import demo_model_path

pytestmark = pytest.mark.native

SERVE = [sys.executable, "-m", "paceline", "serve", "--port", "0", "-np", "1"]


@contextmanager
def serving(*flags: str) -> Iterator[str]:
    """A server; its URL, once the model is loaded."""
    process = subprocess.Popen([*SERVE, *flags], stderr=subprocess.PIPE, text=True, env=os.environ.copy())
    assert process.stderr is not None
    try:
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if " is ready after " in line:
                break
        else:
            raise AssertionError("".join(lines))
        yield next(found[0] for line in lines if (found := re.search(r"http://\S+", line)) and "listening" in line)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


def model_ids(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/v1/models") as response:
        return [each["id"] for each in json.load(response)["data"]]


def test_a_repository_is_downloaded_and_served_under_its_name(hub: StandInHub) -> None:
    """-hf as llama-server has it; the second time with --offline."""
    hub.add("user/demo").files["demo-Q4_K_M.gguf"] = demo_model_path().read_bytes()
    with serving("-hf", "user/demo:Q4_K_M") as url:
        assert model_ids(url) == ["user/demo:Q4_K_M"]
    with serving("-m", "hf:user/demo", "--offline", "--alias", "mine") as url:
        assert model_ids(url)[0] == "mine"
    assert len(hub.requests("cdn")) == 1


def test_a_url_is_downloaded_to_where_m_says(hub: StandInHub, tmp_path: Path) -> None:
    """-mu and -m, with -c 0, which reads the file."""
    hub.files["demo.gguf"] = demo_model_path().read_bytes()
    target = tmp_path / "here.gguf"
    with serving("-mu", f"{hub.url}/files/demo.gguf", "-m", str(target), "-c", "0") as url:
        assert model_ids(url) == ["here.gguf"]
    assert target.read_bytes() == demo_model_path().read_bytes()


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["-hf", "demo"], 2, "hf:USER/REPO"),
        (["-hf", "user/none"], 1, "did you mean user/demo"),
        (["-hf", "user/demo:Q2_K"], 1, "no quantisation 'Q2_K'"),
        (["-hf", "user/demo", "--offline"], 1, "paceline pull hf:user/demo"),
    ],
)
def test_a_server_that_has_no_model_does_not_start(hub: StandInHub, flags: list[str], code: int, words: str) -> None:
    """One line and an exit code; no port is opened."""
    hub.add("user/demo", "demo-Q4_K_M.gguf")
    done = subprocess.run([*SERVE, *flags], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert words in done.stderr
    assert "listening" not in done.stderr
