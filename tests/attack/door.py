"""Attacks on connections: bodies without a key, idle and slow connections, ambiguous framing, a log that is not read."""

from __future__ import annotations

import json
import re
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from tests.attack.harness import MB, Attack, figure, measured, post
from tests.e2e.served import LONG_S, Served

FLAGS = ("-np", "4", "-c", "1024", "-t", "1")
BODY = {"prompt": "Once upon a time", "max_tokens": 2}
BYTES = json.dumps(BODY).encode()
LARGEST = 64 << 20
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
KEY = b"authorization: Bearer secret\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n" % (len(BYTES), BYTES)
TLS = Path(__file__).parents[1] / "server" / "tls"


def _connect(server: Served, timeout_s: float = LONG_S) -> socket.socket:
    return socket.create_connection(("127.0.0.1", httpx.URL(server.url).port), timeout=timeout_s)


def _send_slowly(connection: socket.socket, head: bytes, num_bytes: int) -> None:
    """Send a head and a body of a given size, or as much as the server takes, except its last byte."""
    part = bytes(1 << 20)
    try:
        connection.sendall(head + b"content-length: %d\r\n\r\n" % num_bytes)
        for _ in range(num_bytes // len(part) - 1):
            connection.sendall(part)
        connection.sendall(part[: (num_bytes - 1) % len(part)])
    except OSError:  # it has responded, and closed the connection
        pass


def _exchange(server: Served, *parts: bytes, timeout_s: float = 5.0) -> list[bytes]:
    """Return the statuses of all responses on a connection of its own, which parts were sent on, a packet each."""
    received = b""
    with _connect(server, timeout_s) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(0.05)
            while got := connection.recv(65536):
                received += got
        except OSError:  # it stays open, or was reset
            pass
    return re.findall(rb"HTTP/1\.1 (\d{3}) ", received)


def bodies_without_key() -> str:
    """Send four bodies of 64 MiB, each without its last byte, to a public path; then one request with a key."""
    with Served(*FLAGS, "--api-key", "secret") as server, ExitStack() as closing, measured(server) as now:
        for _ in range(4):
            connection = closing.enter_context(_connect(server))
            _send_slowly(connection, b"POST /health HTTP/1.1\r\nhost: localhost\r\n", LARGEST)
        begin = time.monotonic()
        status = post(server, "/v1/completions", BODY, authorization="Bearer secret").status_code
        waited_s = time.monotonic() - begin
    held = status == 200 and now.server_mb < 60
    return figure(f"status {status} after {waited_s:.1f} s; {now}", held=held)


def bodies_of_a_tenant() -> str:
    """Send four bodies with the key of one tenant; then a body of 32 MiB with another tenant's key."""
    with tempfile.NamedTemporaryFile("w") as keys:
        keys.write("first:one\nsecond:two\n")
        keys.flush()
        with Served(*FLAGS, "--tenant-key-file", keys.name) as server, ExitStack() as closing:
            for _ in range(4):
                connection = closing.enter_context(_connect(server))
                _send_slowly(connection, HEAD + b"authorization: Bearer one\r\n", LARGEST)
            body = json.dumps({**BODY, "user": "x" * (32 << 20)}).encode()
            status = post(server, "/v1/completions", body, authorization="Bearer two").status_code
    return figure(f"status {status}", held=status == 200)


@contextmanager
def _crowd(server: Served, number: int, sent: bytes) -> Iterator[None]:
    """Hold so many connections, each of which sent the same."""
    with ExitStack() as closing:
        for _ in range(number):
            connection = closing.enter_context(_connect(server))
            try:
                connection.sendall(sent)
            except OSError:  # closed for another one
                pass
        yield


def _crowded(sent: bytes, *flags: str) -> str:
    with Served(*FLAGS, *flags, num_descriptors=1024) as server, _crowd(server, 1100, sent):
        begin = time.monotonic()
        health = httpx.get(f"{server.url}/health", timeout=LONG_S, verify=False).status_code
        health_s = time.monotonic() - begin
        with server.worker() as worker:
            worker.signal(signal.SIGKILL)
            worker.wait_gone()
        begin = time.monotonic()
        replayed = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=LONG_S, verify=False).status_code
        replaced_s = time.monotonic() - begin
        now = (
            f"/health {health} after {health_s:.2f} s, {replayed} from a new worker after {replaced_s:.1f} s, "
            f"{server.num_files()} descriptors of 1,024"
        )
    return figure(now, held=(health, replayed) == (200, 200) and health_s < 5)


def idle_connections() -> str:
    """Hold 1,100 connections that send nothing."""
    return _crowded(b"")


def slow_heads() -> str:
    """Hold 1,100 connections with half a head each."""
    return _crowded(b"GET /health HTTP/1.1\r\nx: y")


def silent_tls() -> str:
    """Hold 1,100 connections to a server with TLS that begin no handshake."""
    return _crowded(b"", "--ssl-cert-file", str(TLS / "certificate.pem"), "--ssl-key-file", str(TLS / "key.pem"))


def tls_timeout() -> str:
    """Hold a connection that begins no handshake, with --timeout 2."""
    flags = ("--ssl-cert-file", str(TLS / "certificate.pem"), "--ssl-key-file", str(TLS / "key.pem"), "--timeout", "2")
    with Served(*FLAGS, *flags) as server, _connect(server) as connection:
        begin = time.monotonic()
        connection.recv(1)
        seconds = time.monotonic() - begin
    return figure(f"cut off after {seconds:.1f} s", held=seconds < 10)


def trailers() -> str:
    """Send a key in a trailer, in the head's packet and in a later one."""
    close = b"connection: close\r\n"
    with Served(*FLAGS, "--api-key", "secret") as server:
        same = _exchange(server, HEAD + CHUNKED + close + b"\r\n" + CHUNKS + KEY + b"\r\n")
        split = _exchange(server, HEAD + CHUNKED + close + b"\r\n", CHUNKS + KEY + b"\r\n")
    return figure(f"same packet {same}, later packet {split}", held=same == split == [b"401"])


def smuggling() -> str:
    """Send requests with an ambiguous end; each must be refused, or be one request."""
    length = b"content-length: %d\r\n" % len(BYTES)
    chunked = CHUNKED + b"\r\n" + CHUNKS + b"\r\n"
    inner = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    refused = (
        b"content-length: 5\r\n" + chunked,
        CHUNKED + length + b"\r\n" + CHUNKS + b"\r\n",
        length + length + b"\r\n" + BYTES,
        length + b"content-length: 1\r\n\r\n" + BYTES,
        b"content-length: +%d\r\n\r\n" % len(BYTES) + BYTES,
        b"x: a\r\n folded\r\n" + length + b"\r\n" + BYTES,
        b"transfer-encoding:\r\n chunked\r\n\r\n" + CHUNKS + b"\r\n",
        b"x: a\n" + length + b"\r\n" + BYTES,
        length.replace(b"\r\n", b"\n") + b"\n" + BYTES,
        CHUNKED + b"\r\n" + CHUNKS.replace(b"\r\n", b"\n") + b"\n",
        CHUNKED + b"\r\n" + CHUNKS.replace(b"\r\n", b";a=b\n", 1) + b"\r\n",
        CHUNKED + b"\r\n0x" + CHUNKS + b"\r\n",
        CHUNKED + chunked,
        b"transfer-encoding: xchunked\r\n\r\n" + CHUNKS + b"\r\n",
        b"transfer-encoding : chunked\r\n\r\n" + CHUNKS + b"\r\n",
        b"host: elsewhere\r\n" + length + b"\r\n" + BYTES,
    )
    one = (
        CHUNKED + b"\r\n" + CHUNKS.replace(b"\r\n", b";a=b\r\n", 1) + b"\r\n",
        b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: %d\r\n\r\n" % len(inner) + inner,
    )
    with Served(*FLAGS) as server:
        taken = [tail for tail in refused if _exchange(server, HEAD + tail) != [b"400"]]
        taken += [tail for tail in one if len(_exchange(server, HEAD + tail, timeout_s=1)) != 1]
        head, _, body = one[1].partition(b"\r\n\r\n")
        split = _exchange(server, HEAD + head + b"\r\n\r\n", body, timeout_s=1)
    now = f"{len(refused) - len(taken)} of {len(refused)} refused, body of an upgrade sent later: {split}"
    return figure(f"{now} {taken or ''}", held=not taken and split == [b"400"])


def endless_trailer() -> str:
    """Send 400 MB of one trailer."""
    with Served(*FLAGS) as server, measured(server) as now, _connect(server) as connection:
        sent = 0
        try:
            connection.sendall(HEAD + CHUNKED + b"\r\n" + CHUNKS + b"x: ")
            for _ in range(400):
                connection.sendall(b"y" * MB)
                sent += 1
        except OSError:  # it was refused
            pass
    return figure(f"{sent} MB taken; {now}", held=sent < 20 and now.server_mb < 30)


def unread_log() -> str:
    """Make 2,000 requests of a server whose stderr is a pipe that is not read."""
    with Served(*FLAGS) as server, server.client() as client:
        server.reads.clear()
        served = 0
        try:
            while served < 2000:
                client.get("/health", timeout=5)
                served += 1
        except httpx.TimeoutException:
            pass
    return figure(f"{served:,} of 2,000 served", held=served == 2000)


def pipelined() -> str:
    """Send 1,000 requests on one connection at once."""
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    last = request.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    with Served(*FLAGS) as server, measured(server) as now:
        statuses = Counter(_exchange(server, request * 999 + last, timeout_s=LONG_S))
    return figure(f"{statuses[b'200']:,} of 1,000 served; {now}", held=statuses[b"200"] == 1000 and now.server_mb < 30)


def wide_heads() -> str:
    """Send heads with 10,000 headers, and with a header of 1 MB."""
    many = b"".join(b"h%d: v\r\n" % number for number in range(10_000))
    with Served(*FLAGS) as server, measured(server) as now:
        statuses = [
            _exchange(server, b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + more + b"\r\n")
            for more in (many, b"x: " + b"y" * MB + b"\r\n")
        ]
    held = all(found in ([b"431"], []) for found in statuses) and now.server_mb < 30
    return figure(f"statuses {statuses}; {now}", held=held)


def unread_streams() -> str:
    """Open 100 streams of 200 tokens with log-probabilities, of which nothing is read."""
    body = json.dumps({**BODY, "max_tokens": 200, "stream": True, "ignore_eos": True, "logprobs": 20}).encode()
    head = HEAD + b"content-length: %d\r\n\r\n" % len(body)

    def ends(server: Served) -> dict[str, float]:
        return {
            name: value
            for name, value in server.metrics().items()
            if name.startswith("paceline_requests_finished_total")
        }

    with Served(*FLAGS) as server, ExitStack() as closing:
        with measured(server) as now:
            for _ in range(100):
                connection = closing.enter_context(_connect(server))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.sendall(head + body)
            server.wait_until(lambda: sum(ends(server).values()) >= 100, "all streams have ended")
            num_read = ends(server)['paceline_requests_finished_total{reason="length"}']
    return figure(f"{num_read:.0f} streams whole; {now}", held=num_read >= 96 and now.server_mb < 60)


ATTACKS = (
    Attack(
        "bodies-without-key",
        "Bodies that are sent without a key keep no request with a key from being served.",
        "every request with a key got 429 for 57 s",
        bodies_without_key,
        sample=True,
    ),
    Attack(
        "bodies-of-a-tenant",
        "Bodies of a tenant that do not arrive leave room for those of another tenant.",
        "every other tenant's request got 429 for up to 60 s",
        bodies_of_a_tenant,
    ),
    Attack(
        "idle-connections",
        "1,100 idle connections at a limit of 1,024 descriptors stop neither requests nor a restart of the worker.",
        "all connections were reset, and a killed worker could not be started",
        idle_connections,
        sample=True,
    ),
    Attack(
        "slow-heads",
        "1,100 connections with half a head each stop neither requests nor a restart of the worker.",
        "all connections were reset for 60 s, and a killed worker could not be started",
        slow_heads,
    ),
    Attack(
        "silent-tls",
        "1,100 connections without a TLS handshake stop neither requests nor a restart of the worker.",
        "all connections were reset, and they did not count among --max-connections",
        silent_tls,
    ),
    Attack("tls-timeout", "A connection without a TLS handshake is cut off after --timeout.", "60.0 s", tls_timeout),
    Attack(
        "trailers",
        "A key in a trailer of a chunked body opens nothing.",
        "200 if it came in the packet of the head",
        trailers,
        sample=True,
    ),
    Attack(
        "smuggling",
        "A request whose end is ambiguous is refused, and no body becomes another request.",
        "the body of a request with Upgrade was lost, or became a second request if it came later; two Host headers were taken",
        smuggling,
    ),
    Attack(
        "endless-trailer",
        "A trailer without an end is refused.",
        "152 MB were taken within 60 s, 295 MB of memory were kept, and /health took up to 12.4 s",
        endless_trailer,
    ),
    Attack(
        "unread-log",
        "A stderr pipe that is not read stops nothing.",
        "the server stood still after 207 requests, or 418 of /health",
        unread_log,
        sample=True,
    ),
    Attack("pipelined", "1,000 requests at once on one connection are served.", "held; server +2 MB", pipelined),
    Attack("wide-heads", "Heads with 10,000 headers or 1 MB are refused.", "held; server +1 MB", wide_heads),
    Attack(
        "unread-streams",
        "Streams that are not read occupy no slot beyond their end, and little memory of the server.",
        "held; server +6 MB",
        unread_streams,
    ),
)
