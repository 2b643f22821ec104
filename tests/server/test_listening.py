"""The addresses that a server listens on: all of them, or none and a reason."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tests.ports import free_port
from tests.server.program import ENVIRONMENT, PROGRAM
from tests.server.running import LONG_S

from paceline.server.listeners import CannotListen, Listeners, host_of, inherited_sockets, num_connections, url_of
from paceline.server.settings import ServerSettings
from paceline.server.web_page import is_guarded

HAS_IPV6 = socket.has_dualstack_ipv6()


def over(path: Path) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=LONG_S)


def test_a_server_listens_at_every_address(programs: Any, tmp_path: Path) -> None:
    """Addresses of both families and a Unix socket; its file is gone when the server has ended."""
    path = tmp_path / "llm.sock"
    hosts = ["127.0.0.1", str(path)]
    program = programs(0.05, ",".join(hosts))
    program.wait_for("is ready")
    assert f" and unix://{path}" in next(line for line in program.lines if "listening on" in line)
    assert not any("warning" in line for line in program.lines)
    assert httpx.get(program.url + "/health", timeout=LONG_S).json() == {"status": "ok"}
    with over(path) as client:
        assert client.get("/health").json() == {"status": "ok"}
        body = {"prompts": ["a"], "stream": True, "sampling": {"max_tokens": None}}
        with client.stream("POST", "/v1/probe", json=body) as response:
            program.signal(signal.SIGTERM)
            assert list(response.iter_lines())[-2] == "data: [DONE]"
    assert program.code() == 0
    assert not path.exists()


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_socket_of_the_service_manager_replaces_the_host(programs: Any, address: str) -> None:
    """Whether the server is open to others is decided by this socket. It outlives the server."""
    other = "0.0.0.0" if address == "127.0.0.1" else "127.0.0.1"
    with socket.create_server((address, 0)) as inherited:
        program = programs(0, other, inherited.fileno())
        program.wait_for("is ready")
        assert program.url == f"http://127.0.0.1:{inherited.getsockname()[1]}"
        assert any("set an API key" in line for line in program.lines) == (address == "0.0.0.0")
        assert ("--api-key" in httpx.get(program.url, timeout=LONG_S).text) == (address == "0.0.0.0")
        program.signal(signal.SIGTERM)
        assert program.code() == 0
        socket.create_connection(inherited.getsockname(), timeout=LONG_S).close()


def test_a_unix_socket_of_the_service_manager_keeps_its_file(programs: Any, tmp_path: Path) -> None:
    """The service manager made it, and starts the next server with it."""
    path = tmp_path / "llm.socket"
    with socket.socket(socket.AF_UNIX) as inherited:
        inherited.bind(str(path))
        inherited.listen()
        program = programs(0, "127.0.0.1", inherited.fileno())
        program.wait_for("is ready")
        with over(path) as client:
            assert client.get("/health").json() == {"status": "ok"}
        program.signal(signal.SIGTERM)
        assert program.code() == 0
    assert path.exists()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_descriptor_that_does_not_listen_is_named(kind: socket.SocketKind) -> None:
    """As of a unit with ListenDatagram= or with Accept=yes."""
    with socket.socket(socket.AF_INET, kind) as inherited:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, "0", "127.0.0.1", str(inherited.fileno())],
            pass_fds=[inherited.fileno()], env=ENVIRONMENT, capture_output=True, timeout=LONG_S,
        )  # fmt: skip
    assert done.returncode == 1
    assert b"descriptor 3 of the service manager is no stream socket that listens" in done.stderr


def test_a_socket_of_another_family_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a unit with ListenStream=vsock:... It has neither an IP address nor a path."""
    other: Any = SimpleNamespace(family=-1, type=socket.SOCK_STREAM, getsockopt=lambda *_: 1)
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setattr("paceline.server.listeners.socket.socket", lambda **_: other)
    with pytest.raises(CannotListen, match="descriptor 3 of the service manager is neither of IP nor a Unix socket"):
        inherited_sockets()


@pytest.mark.skipif(sys.platform != "linux", reason="abstract names are Linux's")
def test_an_abstract_socket_is_shown_by_its_name_after_an_at_sign() -> None:
    """As systemd writes it. Only this machine reaches it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0paceline-{os.getpid()}")
        assert host_of(listener) == f"@paceline-{os.getpid()}"
        assert url_of(listener, ServerSettings()) == f"unix://@paceline-{os.getpid()}"
        assert is_guarded(ServerSettings(hosts=(host_of(listener),)))


@pytest.mark.parametrize("number", ["", "one", "-1", "1.0", "\N{ARABIC-INDIC DIGIT ONE}", "100000"])
def test_a_number_of_sockets_that_cannot_be_is_named(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any descriptor is looked at."""
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", number)
    with pytest.raises(CannotListen, match=f"LISTEN_FDS must be a number of sockets, 0 to 100, got '{number}'"):
        inherited_sockets()


def test_addresses_of_both_families_have_the_same_port() -> None:
    """With several addresses :: is IPv6 alone, so that 0.0.0.0 can be beside it; alone it is both."""
    port = free_port()
    if not HAS_IPV6:
        with pytest.raises(CannotListen, match="::"):
            Listeners(ServerSettings(hosts=("0.0.0.0", "::"), port=port))
        return
    with Listeners(ServerSettings(hosts=("0.0.0.0", "::"), port=port)) as listeners:
        assert [socket.getsockname()[1] for socket in listeners.sockets] == [port, port]
        assert not listeners.are_private
    with Listeners(ServerSettings(hosts=("::",), port=0)) as listeners:
        socket.create_connection(("127.0.0.1", listeners.sockets[0].getsockname()[1]), timeout=LONG_S).close()


def test_one_address_that_cannot_be_had_is_named_and_none_is_kept(tmp_path: Path) -> None:
    """Earlier listeners are closed, and the files of sockets gone."""
    path, port = tmp_path / "a.sock", free_port()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=f"cannot listen on 127.0.0.1 port {busy}: "):
            Listeners(ServerSettings(hosts=(str(path), "127.0.0.1"), port=busy))
    assert not path.exists()
    with pytest.raises(CannotListen, match=f"cannot listen on no.such.invalid port {port}: "):
        Listeners(ServerSettings(hosts=("127.0.0.1", "no.such.invalid"), port=port))
    with Listeners(ServerSettings(hosts=("127.0.0.1",), port=port)) as listeners:
        assert url_of(listeners.sockets[0], ServerSettings()) == f"http://127.0.0.1:{port}"


def test_a_socket_that_was_left_behind_is_replaced(tmp_path: Path) -> None:
    """A killed server leaves its socket, which the next one replaces."""
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with Listeners(ServerSettings(hosts=(str(path),))), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


@pytest.mark.parametrize("kind", ["listener", "file", "folder", "long"])
def test_what_is_no_left_behind_socket_stays_and_is_named(tmp_path: Path, kind: str) -> None:
    """A server that runs, any other file, a folder that is not there, a path that is too long."""
    path = {"folder": tmp_path / "none" / "a.sock", "long": tmp_path / ("a" * 120 + ".sock")}.get(
        kind, tmp_path / "a.sock"
    )
    with socket.socket(socket.AF_UNIX) as live:
        if kind == "listener":
            live.bind(str(path))
            live.listen()
        if kind == "file":
            path.write_text("mine")
        with pytest.raises(CannotListen, match=f"cannot listen on {path}: "):
            Listeners(ServerSettings(hosts=(str(path),)))
    assert path.exists() == (kind in ("listener", "file"))


def test_the_file_of_another_server_is_left_alone(tmp_path: Path) -> None:
    """One that has taken the path over."""
    path = tmp_path / "a.sock"
    with Listeners(ServerSettings(hosts=(str(path),))):
        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
    assert path.exists()


@pytest.mark.parametrize(
    ("soft", "hard", "refused", "expected"),
    [
        (1024, 20_000, (), (2048, 20_000)),
        (1024, 1024, (), (832, 1024)),
        (100, 100, (), (50, 100)),
        (256, resource.RLIM_INFINITY, (resource.RLIM_INFINITY,), (2048, 2240)),
        (256, 9000, (9000, 2240), (128, 256)),
        (256, resource.RLIM_INFINITY, (), (2048, resource.RLIM_INFINITY)),
    ],
)
def test_connections_fit_the_descriptors(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, refused: tuple[int, ...], expected: tuple[int, int]
) -> None:
    """The soft limit is raised as far as it can be, and some descriptors are left for workers and files."""
    limits = [soft, hard]

    def set_limit(_: int, wanted: tuple[int, int]) -> None:
        if wanted[0] in refused:
            raise ValueError("not allowed")
        limits[:] = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    assert (num_connections(2048), limits[0]) == expected
