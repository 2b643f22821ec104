"""`paceline rpc-serve` and the commands that use it, as a user runs them."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.e2e.commands import COMMAND, PROMPT, environment, generate, output, paceline_
from tests.e2e.served import LONG_S, Served
from tests.exact import EXACT_FLAGS
from tests.polling import wait_until
from tests.ports import free_port
from tests.rpc_world import LendingServer

from paceline.cli.machines import announce
from paceline.runtime import Device, build_info

needs_rpc = pytest.mark.skipif(not build_info().rpc, reason="this core was built without PACELINE_RPC=ON")
pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def server() -> Iterator[LendingServer]:
    with LendingServer() as made:
        yield made


@needs_rpc
def test_info_lists_the_devices_of_other_hosts(server: LendingServer) -> None:
    """With their memory; of a host that is away it says why, and shows the others all the same."""
    away = f"127.0.0.1:{free_port()}"
    facts = json.loads(output("info", "--rpc", f"{away},{server.address}", "--json"))["rpc_servers"]
    assert facts[0]["address"] == away and "refuses connections" in facts[0]["error"]
    (device,) = facts[1]["devices"]
    assert facts[1]["address"] == server.address and 0 < device["free_bytes"] <= device["total_bytes"]
    assert facts[1]["protocol"].count(".") == 2
    text = " ".join(output("info", "--rpc", f"{away},{server.address}").split())
    assert f"device RPC0 {server.address}, protocol" in text and f"{away} refuses connections" in text


@needs_rpc
def test_generate_computes_on_another_host(server: LendingServer) -> None:
    """The same text as here, and a host that is away is one line and an exit code."""
    asked = ("--temperature", "0", "-n", "12", "-c", "1024")
    assert generate(*asked, "--rpc", server.address)["text"] == generate(*asked)["text"]
    failed = paceline_("generate", PROMPT, "--rpc", f"127.0.0.1:{free_port()}")
    assert failed.returncode == 1 and b"refuses connections" in failed.stderr and b"Traceback" not in failed.stderr


@needs_rpc
def test_a_served_model_is_unavailable_while_its_host_is_away() -> None:
    """A 503 that names the host, and health says so too; both end when it is back."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    with (
        LendingServer() as lending,
        Served(*EXACT_FLAGS, "-np", "2", "-c", "2048", "--rpc", lending.address, "--rpc-timeout", "1") as served,
        httpx.Client(base_url=served.url, timeout=LONG_S) as client,
    ):
        told = client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"]
        lending.kill()
        wait_until(lambda: client.post("/v1/completions", json=body).status_code == 503)
        failed = client.post("/v1/completions", json=body)
        assert failed.status_code == 503 and lending.address in failed.json()["error"]["message"]
        assert "retry-after" in failed.headers
        wait_until(lambda: client.get("/health/ready").status_code == 503)
        lending.start()
        wait_until(lambda: client.get("/health/ready").status_code == 200)
        assert client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"] == told


@needs_rpc
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_it_with_its_connections(number: signal.Signals, code: int) -> None:
    """While an engine holds it, too."""
    with LendingServer() as lending, socket.create_connection(("127.0.0.1", lending.port)) as engine:
        lending.send(number)
        assert lending.process.wait(20) == code
        engine.settimeout(5)
        with contextlib.suppress(ConnectionResetError):  # or this, where it had not accepted the connection
            assert engine.recv(1) == b""


def _stderr_of_a_start(*flags: str, **env: str) -> str:
    """Return its output until it lends devices."""
    command = [*COMMAND, "rpc-serve", "--port", str(free_port()), *flags]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment(**env)
    ) as process:
        assert process.stderr is not None
        lines: list[bytes] = []
        while not lines or b"Lending" not in lines[-1]:
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        process.kill()
        return b"".join(lines).decode()


@needs_rpc
def test_it_says_that_it_has_no_authentication(tmp_path: Path) -> None:
    """Always; --cache has llama.cpp's folder, cleaned of damage."""
    folder = tmp_path / "rpc"
    folder.mkdir()
    (folder / "0123456789abcdef").write_bytes(b"cut off")
    said = _stderr_of_a_start("--cache", "--device", "CPU", LLAMA_CACHE=str(tmp_path))
    assert "Lending CPU" in said and "without authentication" in said and "WARNING" not in said
    assert f"tensors are kept in {folder}" in said and "Removed a damaged tensor" in said and not list(folder.iterdir())


def test_it_warns_where_other_machines_may_reach_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Loudly, before it listens."""
    announce("10.0.0.2", 50052, [Device("CPU", "a processor", "cpu", 1 << 30, 2 << 30)], None)
    said = capsys.readouterr().err
    assert "WARNING: any program that reaches 10.0.0.2:50052" in said and "no authentication and no encryption" in said


@needs_rpc
def test_what_it_cannot_do_is_one_line_and_an_exit_code() -> None:
    """A port in use, a device or host that is not there, a port that is none."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        failed = paceline_("rpc-serve", "--port", port)
        assert failed.returncode == 1 and f"cannot listen on 127.0.0.1:{port}".encode() in failed.stderr
    for flags, words in (
        (("--device", "CUDA7"), b"there is no device 'CUDA7'"),
        (("--host", "nowhere.invalid"), b"has no IPv4 address"),
        (("--port", "0"), b"--port"),
        (("--threads", "0"), b"threads"),
        (("--threads", "513"), b"threads"),
        (("--device", "CPU,cpu"), b"'cpu' is there twice"),
    ):
        failed = paceline_("rpc-serve", *flags)
        assert failed.returncode == 2 and words in failed.stderr, flags


@pytest.mark.skipif(build_info().rpc, reason="this core was built with PACELINE_RPC=ON")
def test_without_it_in_the_build_everything_says_how_to_get_it() -> None:
    """The commands, and an engine."""
    for command in (("rpc-serve",), ("generate", PROMPT, "--rpc", "127.0.0.1:50052"), ("info", "--rpc", "127.0.0.1:1")):
        failed = paceline_(*command)
        assert failed.returncode == 1 and b"PACELINE_RPC=ON" in failed.stderr, command
