"""The sockets that a server listens on, the acceptors of their connections, and the list of this user's running servers.

Each server keeps a file in the user's state folder, locked while the server runs. The lock ends with the process, so a file
without a lock belongs to a server that crashed.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import ipaddress
import json
import logging
import os
import socket
import ssl
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from paceline import validation
from paceline.server.settings import ServerSettings, is_socket_path

if TYPE_CHECKING:
    from paceline.server.connection import OpenConnections


_BACKLOG = 1024
_FIRST_INHERITED = 3  # SD_LISTEN_FDS_START of sd_listen_fds(3)
_MAX_INHERITED = 100
_MAX_DESCRIPTORS = 192  # for connections that are refused, workers, their models, files and images that are fetched
_MAX_PEM_BYTES = 32 << 10  # of a certificate or key from a pipe; it has to fit into another pipe
_MAX_ACCEPTED = 32  # connections between two turns of the event loop
_RETRY_S = 0.1  # until connections are accepted again after descriptors or memory ran out
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_log = logging.getLogger("paceline.server")
_PROBE_S = 1.0  # timeout of the connection that looks for a running server


class CannotListen(OSError):
    """A socket cannot be opened, or a certificate cannot be used; the message has the reason."""


def inherited_sockets() -> list[socket.socket]:
    """Return the sockets that a service manager opened for this process (socket activation). Raises `CannotListen`."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    number = os.environ.get("LISTEN_FDS", "0")
    if not (number.isascii() and number.isdigit() and int(number) <= _MAX_INHERITED):
        raise CannotListen(f"LISTEN_FDS must be a number of sockets, 0 to {_MAX_INHERITED}, got {number!r}")
    sockets = []
    for descriptor in range(_FIRST_INHERITED, _FIRST_INHERITED + int(number)):
        try:
            inherited = socket.socket(fileno=descriptor)
            is_listening = inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError as error:
            raise CannotListen(f"cannot use descriptor {descriptor} of the service manager: {error.strerror}") from None
        if not is_listening or inherited.type != socket.SOCK_STREAM:
            raise CannotListen(f"descriptor {descriptor} of the service manager is no stream socket that listens")
        if inherited.family not in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
            raise CannotListen(f"descriptor {descriptor} of the service manager is neither of IP nor a Unix socket")
        inherited.set_inheritable(False)
        sockets.append(inherited)
    return sockets


def host_of(listener: socket.socket) -> str:
    """Return the address of a listening socket as it stands in `ServerSettings.hosts`."""
    return _unix_name(listener) if listener.family == socket.AF_UNIX else str(listener.getsockname()[0])


def _unix_name(listener: socket.socket) -> str:
    """Return the path of a Unix socket, or its abstract name after an @."""
    name = listener.getsockname()
    return f"@{name[1:].decode(errors='replace')}" if isinstance(name, bytes) else str(name)


class Listeners:
    """Open sockets; a context manager that closes them and removes the files of Unix sockets that it made."""

    def __init__(self, settings: ServerSettings, inherited: Sequence[socket.socket] = ()) -> None:
        """Open a socket for each of `settings.hosts`. Raises `CannotListen`, with no socket left open.

        inherited: sockets to listen on instead.
        """
        self._closing = ExitStack()
        self.sockets: list[socket.socket] = list(map(self._closing.enter_context, inherited))
        if inherited:
            return
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
    """Return the context of TLS; None without a certificate. Raises `CannotListen` if the certificate cannot be used."""
    if settings.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_certificate(context, settings)
    return context


def load_certificate(context: ssl.SSLContext, settings: ServerSettings) -> None:
    """Give a context the certificate of the settings, for new connections. Raises `CannotListen` if it cannot be used."""
    if settings.ssl_certfile is None:
        return
    try:
        with ExitStack() as opened:
            certificate = opened.enter_context(_openable(settings.ssl_certfile))
            key = None if settings.ssl_keyfile is None else opened.enter_context(_openable(settings.ssl_keyfile))
            context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise CannotListen(
            f"cannot use the certificate {settings.ssl_certfile} with its key: {error.strerror or error}"
        ) from None


@contextmanager
def _openable(path: Path) -> Iterator[Path]:
    """Yield the path of a file, or of a copy of a pipe's content: OpenSSL would wait for ever for a pipe's writer."""
    with validation.open_file(path, pipes=True) as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            yield path
            return
        data = file.read(_MAX_PEM_BYTES + 1)
    reading, writing = os.pipe()  # a private key is not to be written to a disk
    try:
        with os.fdopen(writing, "wb", buffering=0) as copy:
            os.set_blocking(writing, False)
            is_whole = copy.write(data) == len(data) <= _MAX_PEM_BYTES
        if not is_whole:
            raise OSError(errno.EFBIG, f"it has more than {_MAX_PEM_BYTES} bytes, the most that are read of a pipe")
        yield Path(f"/dev/fd/{reading}")
    finally:
        os.close(reading)


def url_of(listener: socket.socket, settings: ServerSettings) -> str:
    """Return the URL for a client on this machine."""
    if listener.family == socket.AF_UNIX:
        return f"unix://{_unix_name(listener)}{settings.root_path}"
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
    """Listen on a name's first address, IPv4 before IPv6. :: accepts IPv4 as well if it is the only host."""
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(addresses, key=lambda info: info[0] != socket.AF_INET)
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
    with suppress(FileNotFoundError):
        if path.lstat().st_ino == inode:
            path.unlink()


def _is_private(listener: socket.socket) -> bool:
    if listener.family == socket.AF_UNIX:
        return True
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def num_connections(max_number: int) -> int:
    """Return the number of connections for which the process has descriptors, at most `max_number`, beside its other files.

    Raises the soft limit of descriptors up to the hard limit.
    """
    if sys.platform == "win32":
        return max_number
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = max_number + _MAX_DESCRIPTORS
    for limit in (hard, enough if hard == resource.RLIM_INFINITY else min(hard, enough)):
        try:  # macOS refuses a limit beyond its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        except (OSError, ValueError):
            continue
        soft = limit
        break
    if soft == resource.RLIM_INFINITY:
        return max_number
    return min(max_number, soft - min(_MAX_DESCRIPTORS, soft // 2))


class Acceptor:
    """Accepts a listener's connections while there is room. On the event loop.

    Beyond the limit, a new connection replaces the longest waiting one. If none waits, `Connection` refuses the new one; while
    many are being refused, further connections wait in the kernel's queue.
    """

    def __init__(
        self,
        listener: socket.socket,
        connect: Callable[[], asyncio.Protocol],
        all_open: OpenConnections,
        tls: Mapping[str, Any],
    ) -> None:
        """connect: makes the protocol of a connection. tls: arguments of `connect_accepted_socket`; none for plain HTTP."""
        self._listener, self._connect, self._all_open, self._tls = listener, connect, all_open, tls
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._is_accepting = self._is_closed = False
        listener.setblocking(False)
        self.resume()

    def resume(self) -> None:
        """Accept connections again, if there is room."""
        if not self._is_accepting and not self._is_closed and not self._all_open.is_full:
            self._is_accepting = True
            self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Accept no more connections, and give up unfinished handshakes."""
        self._pause()
        self._is_closed = True
        for task in self._opening:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait for the end of the handshakes."""
        if self._opening:
            await asyncio.wait(self._opening)

    def _pause(self) -> None:
        if self._is_accepting:
            self._is_accepting = False
            self._loop.remove_reader(self._listener)

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTED):
            if self._all_open.is_full:
                self._pause()
                return
            try:
                accepted, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    _log.error("cannot accept a connection: %s; trying again", error.strerror)
                    self._pause()
                    self._loop.call_later(_RETRY_S, self.resume)
                    return
                continue  # the client has gone again
            accepted.setblocking(False)
            protocol = self._connect()
            self._all_open.wait(protocol, partial(_shut, accepted))
            self._all_open.make_room()
            task = self._loop.create_task(self._open(accepted, protocol))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, accepted: socket.socket, protocol: asyncio.Protocol) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, accepted, **self._tls)
        except (OSError, asyncio.CancelledError) as error:  # TLS has errors of its own, which are OSErrors
            _log.debug("a connection was lost in its handshake: %s", error)
            self._all_open.remove(protocol)


def _shut(accepted: socket.socket) -> bool:
    """End a connection during its handshake; the task that waits for the handshake closes it."""
    with suppress(OSError):
        accepted.shutdown(socket.SHUT_RDWR)
    return True


_SUFFIX = ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A server.

    Attributes:
        pid: Its process.
        urls: Its addresses, for clients on this machine; "unix://..." for a socket.
        model: The name of its model; None for a server of several models.
        started: The time when it began to listen, in Unix seconds.
        host: The name of its machine, as several machines may share a home folder.
    """

    pid: int
    urls: Sequence[str]
    model: str | None
    started: float
    host: str


@contextmanager
def registered(urls: Sequence[str], model: str | None, started: float) -> Iterator[None]:
    """List this process as a server while the block runs. Without a folder that can be written, it is not listed."""
    server = RunningServer(pid=os.getpid(), urls=urls, model=model, started=started, host=socket.gethostname())
    try:
        descriptor, path = _create(server)
    except OSError as error:
        _log.info("`paceline ps` will not list this server: %s", error)
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):  # the folder may be read-only by now; without its lock the file counts for nothing
            path.unlink()
        os.close(descriptor)


def running_servers() -> list[RunningServer]:
    """Return the running servers, the oldest first, and remove the files of servers that crashed."""
    servers = []
    for path in _folder().glob(f"[!.]*{_SUFFIX}"):
        with suppress(OSError):  # it ended meanwhile
            server = _read(path)
            if server is not None and server.host == socket.gethostname():
                servers.append(server)
    return sorted(servers, key=lambda server: server.started)


def state_folder() -> Path:
    """Return paceline's folder in the state folder of the user."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():
        state = Path(os.path.expanduser("~/.local/state"))  # noqa: PTH111 - pathlib's raises if there is no home
    return state / "paceline"


def _folder() -> Path:
    return state_folder() / "servers"


def _create(server: RunningServer) -> tuple[int, Path]:
    """Write and lock a file, then give it the name by which other processes find it."""
    folder = _folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    running_servers()  # which removes stale files
    descriptor, name = tempfile.mkstemp(prefix=f".{server.pid}-", suffix=_SUFFIX, dir=folder)  # with mode 0600
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, json.dumps(asdict(server)).encode())
        path = folder / Path(name).name[1:]
        Path(name).rename(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        os.close(descriptor)
        raise
    return descriptor, path


def _read(path: Path) -> RunningServer | None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - of a descriptor
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            path.unlink(missing_ok=True)
            return None
        try:
            return RunningServer(**json.load(file))
        except (ValueError, TypeError):  # of another version of paceline
            return None
