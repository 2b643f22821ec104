"""The sockets that a server listens on: all addresses of the settings, or none and a reason."""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import stat
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from paceline import validation
from paceline.server.settings import ServerSettings, is_socket_path

_BACKLOG = 1024
_PROBE_S = 1.0  # timeout of the connection that looks for a running server


class CannotListen(OSError):
    """A socket cannot be opened, or a certificate not be used; the message has the reason."""


class Listeners:
    """Open sockets, in the order of `settings.hosts`; a context manager that closes them and removes Unix sockets' files."""

    def __init__(self, settings: ServerSettings) -> None:
        """Open all sockets. Raises `CannotListen`, with no socket left open."""
        self._closing = ExitStack()
        self.sockets: list[socket.socket] = []
        is_alone = sum(not is_socket_path(host) for host in settings.hosts) == 1
        try:
            for host in settings.hosts:
                self.sockets.append(self._closing.enter_context(_listener(host, settings.port, is_alone=is_alone)))
                if is_socket_path(host):
                    self._closing.callback(_remove, Path(host), Path(host).stat().st_ino)
        except BaseException:
            self._closing.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    @property
    def are_private(self) -> bool:
        """Return whether only this machine can reach them."""
        return all(map(_is_private, self.sockets))


def tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """Return the server's side of TLS; None without a certificate. Raises `CannotListen` where it cannot be used."""
    if settings.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        for path in filter(None, (settings.ssl_certfile, settings.ssl_keyfile)):
            validation.open_file(path).close()  # OpenSSL waits for the writer of a pipe
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise CannotListen(
            f"cannot use the certificate {settings.ssl_certfile} with its key: {error.strerror or error}"
        ) from None
    return context


def url_of(listener: socket.socket, settings: ServerSettings) -> str:
    """Return the URL for a client on this machine."""
    if listener.family == socket.AF_UNIX:
        return f"unix://{listener.getsockname()}{settings.root_path}"
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if settings.ssl_certfile else 'http'}://{shown}:{port}{settings.root_path}"


def _listener(host: str, port: int, *, is_alone: bool) -> socket.socket:
    try:
        return _unix_socket(Path(host)) if is_socket_path(host) else _tcp_socket(host, port, is_alone=is_alone)
    except OSError as error:
        where = host if is_socket_path(host) else f"{host} port {port}"
        raise CannotListen(f"cannot listen on {where}: {error.strerror or error}") from None


def _tcp_socket(host: str, port: int, *, is_alone: bool) -> socket.socket:
    """Listen on a name's first address, IPv4 before IPv6. :: accepts IPv4 as well where it is the only host."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    is_any = host == "::" and is_alone and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=is_any)


def _unix_socket(path: Path) -> socket.socket:
    """Listen on a path. Replaces the file of a server that has crashed, and no other file."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_stale_socket(path):
            path.unlink()
        listener.bind(os.fspath(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.strerror is None:  # the path is too long
            raise OSError(f"{error}; give a shorter path") from None
        raise
    return listener


def _is_stale_socket(path: Path) -> bool:
    """Return whether there is a socket file without a listener."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_S)
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:
                return True
    return False


def _remove(path: Path, inode: int) -> None:
    """Remove a Unix socket's file, unless another server has replaced it."""
    with suppress(FileNotFoundError):
        if path.lstat().st_ino == inode:
            path.unlink()


def _is_private(listener: socket.socket) -> bool:
    if listener.family == socket.AF_UNIX:
        return True
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback
