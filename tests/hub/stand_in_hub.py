"""A hub of our own on loopback: the endpoints that huggingface_hub uses, and a web server for large files behind redirects.

It can be told to fail: statuses with headers, connections that are cut, bytes that are wrong, a listing that changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit

HELD_S = 30.0
TOKEN = "hf_" + "a" * 34


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def gguf(name: str, size: int = 50_000) -> bytes:
    """Bytes that begin as a GGUF file does; the same name gives the same bytes."""
    seed = hashlib.sha256(name.encode()).digest()
    return b"GGUF" + (seed * (size // 32 + 1))[: size - 4]


@dataclass
class StoredRepo:
    """A repository. files: by path, in the order of their listing."""

    files: dict[str, bytes]
    gated: bool = False
    private: bool = False
    branches: dict[str, str] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        """Of main: changes with the files."""
        digest = hashlib.sha1()
        for path, data in self.files.items():
            digest.update(path.encode() + data)
        return digest.hexdigest()

    def listing(self) -> list[dict[str, object]]:
        return [
            {"rfilename": path, "size": len(data), "blobId": sha1(data)}
            | ({"lfs": {"size": len(data), "sha256": sha256(data), "pointerSize": 134}} if is_large(path) else {})
            for path, data in self.files.items()
        ]


def is_large(path: str) -> bool:
    return path.endswith((".gguf", ".safetensors"))


@dataclass
class Fault:
    """A failure of the next request of a kind.

    status: sent instead of the file; cut_after: bytes of the body until the connection is closed; body: sent instead of the
    file's; held: until it is set, the body waits after cut_after bytes.
    """

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    body: bytes | None = None
    held: threading.Event | None = None
    ignores_range: bool = False


@dataclass
class Seen:
    """A request. kind: "api", "resolve", "cdn" or "file"."""

    method: str
    kind: str
    path: str
    headers: dict[str, str]


class StandInHub:
    """The server. repos: by name. files: by path, of the plain web server under /files/. faults: by kind, in order."""

    def __init__(self) -> None:
        self.repos: dict[str, StoredRepo] = {}
        self.files: dict[str, bytes] = {}
        self.tags: dict[str, str] = {}
        self.faults: dict[str, deque[Fault]] = {}
        self.seen: list[Seen] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="stand-in-hub", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def cdn(self) -> str:
        """Another host as far as tokens are concerned."""
        return f"http://localhost:{self.port}/cdn"

    def add(self, repo: str, *paths: str, **options: bool) -> StoredRepo:
        """Store a repository with files of these names."""
        self.repos[repo] = StoredRepo({path: gguf(path) for path in paths}, **options)
        return self.repos[repo]

    def fail(self, kind: str, *faults: Fault) -> None:
        """Have the next requests of a kind fail in this order."""
        self.faults.setdefault(kind, deque()).extend(faults)

    def fault(self, kind: str) -> Fault:
        waiting = self.faults.get(kind)
        return waiting.popleft() if waiting else Fault()

    def requests(self, kind: str, method: str = "GET") -> list[Seen]:
        return [each for each in self.seen if each.kind == kind and each.method == method]

    def by_hash(self, digest: str) -> bytes | None:
        return next(
            (data for repo in self.repos.values() for data in repo.files.values() if sha256(data) == digest), None
        )


def _handler(hub: StandInHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            """Log nothing: tests look at the recorded requests."""

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            parts = urlsplit(self.path)
            words = unquote(parts.path).strip("/").split("/")
            kind = {"api": "api", "cdn": "cdn", "files": "file"}.get(words[0], "resolve")
            hub.seen.append(Seen(self.command, kind, unquote(parts.path), dict(self.headers)))
            fault = hub.fault(kind if self.command == "GET" else f"{kind} HEAD")
            if fault.status is not None:
                self._send(fault.status, fault.headers, b"")
            elif kind == "api":
                self._api(words, parse_qs(parts.query))
            elif kind == "cdn":
                self._send_file(hub.by_hash(words[1]), fault, {})
            elif kind == "file":
                name = "/".join(words[1:])
                tag = hub.tags.get(name)
                self._send_file(hub.files.get(name), fault, {} if tag is None else {"ETag": tag})
            else:
                self._resolve(words)

        def _api(self, words: list[str], query: dict[str, list[str]]) -> None:
            if words == ["api", "models"]:
                owner = query["author"][0]
                found = [{"id": name} for name in hub.repos if name.startswith(f"{owner}/")]
                self._json(200, found)
                return
            name = "/".join(words[2:4])
            repo = hub.repos.get(name)
            is_known = self.headers.get("authorization") == f"Bearer {TOKEN}"
            if repo is None or (repo.private and not is_known):
                self._error(401, "RepoNotFound")
            elif self.headers.get("authorization") not in (None, f"Bearer {TOKEN}"):
                self._send(401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b"")
            elif words[4:5] == ["revision"] and words[5] not in ("main", repo.commit, *repo.branches):
                self._error(404, "RevisionNotFound")
            else:
                self._json(
                    200,
                    {
                        "id": name,
                        "sha": repo.commit,
                        "siblings": repo.listing(),
                        "gated": "auto" if repo.gated else False,
                    },
                )

        def _resolve(self, words: list[str]) -> None:
            repo = hub.repos.get("/".join(words[:2]))
            path = "/".join(words[4:])
            if repo is None:
                self._error(401, "RepoNotFound")
            elif repo.gated and self.headers.get("authorization") != f"Bearer {TOKEN}":
                self._error(401, "GatedRepo")
            elif path not in repo.files:
                self._error(404, "EntryNotFound")
            else:
                data = repo.files[path]
                headers = {"X-Repo-Commit": words[3]}
                if is_large(path):
                    headers |= {"X-Linked-Etag": f'"{sha256(data)}"', "X-Linked-Size": str(len(data))}
                    self._send(302, headers | {"Location": f"{hub.cdn}/{sha256(data)}"}, b"")
                else:
                    self._send(200, headers | {"ETag": f'"{sha1(data)}"'}, data)

        def _send_file(self, data: bytes | None, fault: Fault, headers: dict[str, str]) -> None:
            if data is None:
                self._send(404, {}, b"")
                return
            body, status = data if fault.body is None else fault.body, 200
            asked = self.headers.get("range")
            condition = self.headers.get("if-range")
            if asked is not None and not fault.ignores_range and condition in (None, headers.get("ETag")):
                first, last = (int(word or len(body) - 1) for word in asked.removeprefix("bytes=").split("-"))
                if first >= len(body):
                    self._send(416, {"Content-Range": f"bytes */{len(body)}"}, b"")
                    return
                last = min(last, len(body) - 1)
                headers = headers | {"Content-Range": f"bytes {first}-{last}/{len(body)}"}
                body, status = body[first : last + 1], 206
            self._send(status, headers | {"Accept-Ranges": "bytes"}, body, fault)

        def _error(self, status: int, code: str) -> None:
            self._send(status, {"X-Error-Code": code, "X-Error-Message": code}, b"")

        def _json(self, status: int, value: object) -> None:
            self._send(status, {"Content-Type": "application/json"}, json.dumps(value).encode())

        def _send(self, status: int, headers: Mapping[str, str], body: bytes, fault: Fault | None = None) -> None:
            cut = None if fault is None else fault.cut_after
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            try:
                self.wfile.write(body if cut is None else body[:cut])
                self.wfile.flush()
                if fault is not None and fault.held is not None:
                    fault.held.wait(HELD_S)
                    self.wfile.write(body[cut:])
                elif cut is not None:
                    time.sleep(0.01)  # so that the client reads what there is before the end
                    self.close_connection = True
            except OSError:
                self.close_connection = True

    return Handler


class HostileServer:
    """Sends the given bytes, without HTTP's rules, until the client leaves.

    pieces: returns the raw bytes of a response, head and all, for the first line of a request.
    """

    def __init__(self, pieces: Callable[[str], Iterator[bytes]]) -> None:
        self._pieces = pieces
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self.requests: list[str] = []
        self.num_sent = 0

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(HELD_S)
            assert not thread.is_alive(), "a client has not left"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            line = connection.recv(65_536).partition(b"\r\n")[0].decode("latin-1")
            self.requests.append(line)
            for piece in self._pieces(line):
                connection.sendall(piece)
                self.num_sent += len(piece)


def endless(piece: bytes, *, first: bytes = b"", pause_s: float = 0.0) -> Iterator[bytes]:
    """Return a piece again and again, with a pause after each."""
    yield first
    while True:
        yield piece
        time.sleep(pause_s)


def chunked(piece: bytes) -> bytes:
    """Return a chunk of a body of unknown length."""
    return b"%x\r\n%s\r\n" % (len(piece), piece)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def listing_bytes(**file: object) -> bytes:
    """Return a whole response with a repository's listing of one file, and close the connection."""
    listed = {"rfilename": "tiny-Q4_K_M.gguf", "size": 50_000, "blobId": "a" * 40} | file
    body = json.dumps({"id": "user/tiny", "sha": "b" * 40, "siblings": [listed]}).encode()
    return b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
