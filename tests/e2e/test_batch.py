"""`paceline batch run` with the demo model: interrupted, killed and finished."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest
from tests.e2e.commands import TIMEOUT_S, paceline_, started
from tests.polling import wait_until

pytestmark = pytest.mark.native

NUM_LINES = 60


def test_a_batch_goes_on_after_ctrl_c_and_kill(tmp_path: Path) -> None:
    """Each line has one result after three runs; Ctrl-C exits with 130 and says how far it came."""
    source, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True}
    lines = [{"custom_id": f"{number}", "url": "/v1/completions", "body": body} for number in range(NUM_LINES)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ("batch", "run", str(source), "-o", str(results), "-t", "1", "-c", "2048")

    def num_results() -> int:
        return results.read_bytes().count(b"\n") if results.exists() else 0

    with started(*command) as process:
        wait_until(lambda: num_results() > 0)
        process.send_signal(signal.SIGINT)
        _, notes = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    num_before = num_results()
    assert f"{num_before} result" in notes.decode() and "Traceback" not in notes.decode()
    assert 0 < num_before < NUM_LINES
    with started(*command) as process:
        wait_until(lambda: num_results() > num_before)
        process.kill()
        process.communicate(timeout=TIMEOUT_S)
    assert num_results() < NUM_LINES
    done = paceline_(*command)
    assert done.returncode == 0, done.stderr.decode()
    entries = [json.loads(line) for line in results.read_bytes().splitlines()]
    assert Counter(entry["custom_id"] for entry in entries) == Counter(line["custom_id"] for line in lines)
    assert {entry["response"]["body"]["usage"]["completion_tokens"] for entry in entries} == {40}
