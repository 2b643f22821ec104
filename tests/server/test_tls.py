"""The server over TLS. The certificate in tls/ is for 127.0.0.1, self-signed, and of no use elsewhere."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from tests.server.running import LONG_S, RunningServer
from tests.server.stand_in import StandInLLM

from paceline.server.listeners import Listeners, url_of
from paceline.server.settings import ServerSettings
from paceline.server.startup import serve

FOLDER = Path(__file__).parent / "tls"
CERTIFICATE, KEY = FOLDER / "certificate.pem", FOLDER / "key.pem"
SETTINGS = ServerSettings(ssl_certfile=CERTIFICATE, ssl_keyfile=KEY, port=0)


@pytest.fixture
def tls() -> Iterator[RunningServer]:
    with RunningServer(SETTINGS, StandInLLM()) as running:
        yield running


def test_a_client_that_trusts_the_certificate_is_served(tls: RunningServer) -> None:
    """One that does not, or does not speak TLS, is not."""
    url = f"https://127.0.0.1:{tls.port}/health"
    trusting = ssl.create_default_context(cafile=CERTIFICATE)
    with httpx.Client(verify=trusting, timeout=LONG_S) as client:
        assert client.get(url).json() == {"status": "ok"}
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(url, timeout=LONG_S)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{tls.port}/health", timeout=LONG_S)


def test_a_client_without_a_handshake_is_cut_off() -> None:
    """After as long as it may take to send its headers; until then it counts among the connections."""
    settings = replace(SETTINGS, body_timeout_s=1.0, max_connections=2)
    with RunningServer(settings, StandInLLM()) as running, ExitStack() as closing:
        for _ in range(2):
            silent = closing.enter_context(socket.create_connection(("127.0.0.1", running.port), timeout=LONG_S))
            assert silent.recv(1) == b""
        waiting = [closing.enter_context(socket.create_connection(("127.0.0.1", running.port))) for _ in range(8)]
        trusting = ssl.create_default_context(cafile=CERTIFICATE)
        with httpx.Client(verify=trusting, timeout=LONG_S) as client:
            assert client.get(f"https://127.0.0.1:{running.port}/health").status_code == 200
        assert all(silent.recv(1) == b"" for silent in waiting)


def test_the_address_has_https() -> None:
    """People copy it."""
    with Listeners(SETTINGS) as listeners:
        (listener,) = listeners.sockets
        assert url_of(listener, SETTINGS) == f"https://127.0.0.1:{listener.getsockname()[1]}"


def test_a_certificate_that_cannot_be_read_ends_the_server_before_it_listens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the code 1 and one line."""
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for certificate in (broken, tmp_path / "missing.pem"):
        assert serve(ServerSettings(ssl_certfile=certificate, ssl_keyfile=KEY, port=0)) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"paceline: cannot use the certificate {certificate} with its key: ")
