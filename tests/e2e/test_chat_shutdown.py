"""Chats of every API while `paceline serve` ends: whole within the time to drain, ended in order behind it."""

from __future__ import annotations

import signal
import sys

import pytest
from tests.e2e.served import Served
from tests.exact import EXACT_FLAGS
from tests.server.dialects import DIALECTS, OpenStreams

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them"),
]

FLAGS = (*EXACT_FLAGS, "-np", str(len(DIALECTS)), "-c", str(1024 * len(DIALECTS)), "--ignore-eos")


def test_a_signal_lets_chats_of_every_api_end() -> None:
    """The worker stands still meanwhile, so that all of them certainly run when the signal comes."""
    with Served(*FLAGS) as served, served.worker() as worker:
        worker.signal(signal.SIGSTOP)
        with OpenStreams(served.url, max_tokens=60) as streams:
            served.wait_until(lambda: served.metrics()["paceline_http_streams_open"] == len(DIALECTS), "all have begun")
            served.signal(signal.SIGTERM)
            served.wait_for("ending")
            worker.signal(signal.SIGCONT)
            ended = streams.wait_ended()
        assert served.code() == 0
        worker.wait_gone()
    for dialect in DIALECTS:
        assert dialect.ending(ended[dialect.name]) in ("length", "incomplete", "max_tokens"), dialect.name


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_chats_that_take_longer_end_with_the_error_of_their_api(number: int) -> None:
    """With their text until then; the process ends with 0, and its worker with it."""
    with Served(*FLAGS, "--drain-s", "0") as served, served.worker() as worker:
        with OpenStreams(served.url, max_tokens=900) as streams:
            streams.wait_begun()
            served.signal(number)
            ended = streams.wait_ended()
        assert served.code() == 0
        worker.wait_gone()
    for dialect in DIALECTS:
        assert dialect.failure(ended[dialect.name]) == "the server is shutting down", dialect.name
