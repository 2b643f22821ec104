"""A pytest plugin for the process that runs llama-server's tests: no downloads, and a record of every outcome."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import requests
from tests.llama_server.stand_ins import write_download

_OUTCOMES = "PACELINE_SUITE_OUTCOMES"
_TESTS = "PACELINE_SUITE_TESTS"
_POLL_S = 0.05


def _download(url: str, out: str) -> str:
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    return str(write_download(url, Path(out)))


def _request(session: requests.Session, method: str, url: str, *args: Any, **options: Any) -> requests.Response:
    host = url.partition("://")[2].partition("/")[0]
    if not host.startswith(("127.0.0.1", "[::1]", "localhost")):
        raise requests.ConnectionError(f"{url}: the tests run without a network")
    try:
        response = _real_request(session, method, url, *args, **options)
    except requests.ConnectionError:
        time.sleep(_POLL_S)  # a test waits for its server, and would take the processor from it
        raise
    if url.endswith("/health") and not response.ok:
        time.sleep(_POLL_S)
    return response


_real_request = requests.Session.request
requests.Session.request = _request  # type: ignore[method-assign, assignment]
sys.modules["wget"] = ModuleType("wget")
sys.modules["wget"].download = _download  # type: ignore[attr-defined]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that are named, and leave out the starts that would only download models."""
    import utils  # type: ignore[import-not-found]  # llama-server's own

    utils.ServerPreset.load_all = staticmethod(lambda: None)
    if _TESTS in os.environ:
        wanted = set(json.loads(Path(os.environ[_TESTS]).read_text()))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
        items[:] = [item for item in items if item.nodeid in wanted]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append an outcome: of the test itself, or of a setup or teardown that did not pass."""
    if _OUTCOMES not in os.environ or (report.when != "call" and report.passed):
        return
    line = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "text": report.longreprtext}
    with Path(os.environ[_OUTCOMES]).open("a") as file:
        file.write(json.dumps(line) + "\n")
