"""Computing on other hosts with ggml's RPC servers, and lending the devices of this machine to other hosts.

llama.cpp ends the process if a server refuses, is silent, has another version or is lost later. So `greet` checks it first, in
Python, over the server's own protocol, and `connect` is only called in a process that may die. The protocol has no
authentication and no encryption.

    request   command (1 byte), size (8 bytes), payload      reply   size (8 bytes), payload      little endian
"""

from __future__ import annotations

import logging
import os
import re
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline import _native
from paceline.errors import EngineError, InvalidParams, RpcServerUnavailable, Unsupported
from paceline.runtime.device import Device, devices, physical_cores

_log = logging.getLogger("paceline.rpc")

GREETING_S: Final = 10.0  # the longest that a greeting takes
LENT_DEVICE: Final = re.compile(r"rpc\d+", re.IGNORECASE)
"""The names that llama.cpp gives to devices of servers."""

_GET_DEVICE_MEMORY, _HELLO, _DEVICE_COUNT = 11, 14, 15
_CAPABILITIES: Final = bytes(24)  # none: plain TCP
_SIZE = struct.Struct("<Q")
_connected: list[RpcServer] = []


@dataclass(frozen=True, slots=True)
class RpcServer:
    """A server that was greeted.

    Attributes:
        address: As given.
        endpoint: The address with an IPv4 address.
        protocol: The version of its protocol.
        devices: Its devices, with llama.cpp's names for the first server.
    """

    address: str
    endpoint: str
    protocol: tuple[int, int, int]
    devices: tuple[Device, ...]


def greet(address: str, timeout_s: float = GREETING_S) -> RpcServer:
    """Ask a server for its version and devices.

    Args:
        address: "host:port", as `validation.addresses` returns it.
        timeout_s: Time for the whole greeting.

    Raises:
        RpcServerUnavailable: The server is missing, busy, hangs, or cannot be used by this build; names the address.
        Unsupported: This build has no RPC backend.
    """
    wanted = _native.rpc_protocol()
    deadline_s = time.monotonic() + timeout_s
    host, _, port = address.rpartition(":")
    endpoint = _resolved(address, host, int(port))
    try:
        with socket.create_connection(endpoint, timeout=timeout_s) as connection:
            line = _Line(connection, address, deadline_s)
            protocol = _agreed_protocol(line, wanted)
            (count,) = struct.unpack("<I", line.ask(_DEVICE_COUNT, b"", 4))
            devices = _devices(line, count)
    except ConnectionRefusedError:
        raise RpcServerUnavailable(
            f"the RPC server {address} refuses connections: start it there with `paceline rpc-serve`, or correct the address"
        ) from None
    except TimeoutError:
        raise RpcServerUnavailable(
            f"the RPC server {address} said nothing for {timeout_s:g} s: it serves one program at a time, so it may be busy "
            "with another; or it hangs, cannot be reached, or is no RPC server"
        ) from None
    except OSError as error:
        raise RpcServerUnavailable(f"the RPC server {address} cannot be reached: {error.strerror or error}") from None
    return RpcServer(address, f"{endpoint[0]}:{endpoint[1]}", protocol, devices)


def greet_all(addresses: Sequence[str], timeout_s: float = GREETING_S) -> list[RpcServer]:
    """Greet servers; name their devices in order. Raises as `greet`, and `InvalidParams` for two names of one server."""
    found: list[RpcServer] = []
    num_devices = 0
    for address in addresses:
        server = greet(address, timeout_s)
        for other in found:
            if other.endpoint == server.endpoint:
                raise InvalidParams(f"rpc: {other.address} and {address} are the same server; leave one of them out")
        devices = tuple(
            Device(f"RPC{num_devices + place}", address, device.kind, device.free_bytes, device.total_bytes)
            for place, device in enumerate(server.devices)
        )
        num_devices += len(devices)
        found.append(RpcServer(address, server.endpoint, server.protocol, devices))
    num_own = sum(device.kind in ("gpu", "igpu") for device in _native.devices())
    if num_devices + num_own >= _native.max_devices():
        raise InvalidParams(
            f"rpc: these servers have {num_devices} devices and this machine {num_own}; llama.cpp takes fewer than "
            f"{_native.max_devices()} in all; leave servers out"
        )
    return found


def connect(addresses: Sequence[str], timeout_s: float) -> None:
    """Make the devices of servers known to llama.cpp, before this machine's devices. Once in a process.

    After this the process ends if a server is lost: it closes the connection, or is silent for timeout_s while llama.cpp waits
    for it. Raises as `greet_all`.
    """
    servers = greet_all(addresses, min(timeout_s, GREETING_S))
    for server in servers:
        _native.rpc_add_server(server.endpoint, server.address, timeout_s)
    _connected[:] = servers


def rpc_devices(addresses: Sequence[str], timeout_s: float) -> list[Device]:
    """Return the devices of servers with the memory that is free now, connected or not. Raises as `greet_all`."""
    if _connected:
        addresses_of = {device.name: server.address for server in _connected for device in server.devices}
        return [
            Device(device.name, addresses_of[device.name], device.kind, device.free_bytes, device.total_bytes)
            for device in _native.devices()
            if device.name in addresses_of
        ]
    return [device for server in greet_all(addresses, min(timeout_s, GREETING_S)) for device in server.devices]


class _Line:
    """A connection with a deadline for all requests. Raises `RpcServerUnavailable` for invalid replies."""

    def __init__(self, connection: socket.socket, address: str, deadline_s: float) -> None:
        self._connection, self.address, self._deadline_s = connection, address, deadline_s

    def ask(self, command: int, payload: bytes, size: int) -> bytes:
        """Send a command and return its reply, which must have `size` bytes."""
        self._wait_no_longer()
        self._connection.sendall(bytes([command]) + _SIZE.pack(len(payload)) + payload)
        (given,) = _SIZE.unpack(self._read(_SIZE.size))
        if given != size:
            raise self.refused(f"its reply to command {command} has {given} bytes instead of {size}")
        return self._read(size)

    def refused(self, why: str) -> RpcServerUnavailable:
        """Return the error for a server that cannot be used."""
        return RpcServerUnavailable(f"the RPC server {self.address} is none that this build can use: {why}")

    def _read(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            self._wait_no_longer()
            try:
                part = self._connection.recv(size - len(found))
            except ConnectionResetError:
                part = b""
            if not part:
                raise self.refused(
                    "it closed the connection; it is of another version of llama.cpp, or no RPC server at all"
                )
            found += part
        return found

    def _wait_no_longer(self) -> None:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)


def _resolved(address: str, host: str, port: int) -> tuple[str, int]:
    """Return an IPv4 address of a host, as ggml supports no other."""
    try:
        found = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise RpcServerUnavailable(f"the RPC server {address} has no IPv4 address: {why}") from None
    return str(found[0][4][0]), port


def _agreed_protocol(line: _Line, wanted: tuple[int, int, int]) -> tuple[int, int, int]:
    reply = line.ask(_HELLO, _CAPABILITIES, 4 + len(_CAPABILITIES))
    major, minor, patch = found = (reply[0], reply[1], reply[2])
    shown = ".".join(map(str, found))
    if major != wanted[0] or minor > wanted[1]:
        raise line.refused(
            f"it speaks version {shown} of the protocol, and this build {'.'.join(map(str, wanted))}; run the same version of "
            "llama.cpp on both sides"
        )
    if patch != wanted[2]:
        _log.warning(
            "the RPC server %s speaks version %s of the protocol, and this build %s: operations may have other numbers there; "
            "run the same version of llama.cpp on both sides",
            line.address,
            shown,
            ".".join(map(str, wanted)),
        )
    return found


def _devices(line: _Line, count: int) -> tuple[Device, ...]:
    if not 0 < count <= _native.max_devices():
        raise line.refused(f"it has {count} devices")
    found = []
    for place in range(count):
        free, total = struct.unpack("<QQ", line.ask(_GET_DEVICE_MEMORY, struct.pack("<I", place), 16))
        if not 0 < free <= total:
            raise line.refused(f"its device {place} has {free} bytes free of {total}")
        found.append(Device(f"RPC{place}", line.address, "gpu", free, total))
    return tuple(found)


_HASH_NAME = re.compile(r"[0-9a-f]{16}")


def lent_devices(names: Sequence[str] = ()) -> list[Device]:
    """Return the named devices; without names all GPUs, or the CPU if there is no GPU.

    Raises `InvalidParams` for an unknown or repeated name.
    """
    known = {device.name.lower(): device for device in devices()}
    for place, name in enumerate(names):
        if name.lower() in [other.lower() for other in names[:place]]:
            raise InvalidParams(f"device: {name!r} is there twice; its memory can be lent once")
        if name.lower() not in known:
            raise InvalidParams(f"device: there is no device {name!r}; this machine has {', '.join(known)}")
    if names:
        return [known[name.lower()] for name in names]
    others = [device for device in known.values() if device.kind in ("gpu", "igpu")]
    return others or [device for device in known.values() if device.kind == "cpu"]


def listening_address(host: str, port: int) -> str:
    """Return the IPv4 address of a host, and check that the port is free there.

    Raises `InvalidParams` for a host without an IPv4 address, `EngineError` if it cannot be listened on.
    """
    try:
        address = str(socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidParams(f"host: {host!r} has no IPv4 address, and ggml speaks no other: {why}") from None
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address, port))
            trial.listen()
        except OSError as error:
            raise EngineError(f"cannot listen on {address}:{port}: {error.strerror or error}") from None
    return address


def cache_folder() -> Path:
    """Return the folder for tensors, which llama.cpp's own server uses, too."""
    base = os.environ.get("LLAMA_CACHE")
    if base:
        return Path(base) / "rpc"
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "llama.cpp" / "rpc"


def checked_cache(folder: Path) -> list[Path]:
    """Create the folder if it is missing, and remove damaged tensors from it; return their paths.

    ggml trusts a file's name to be the hash of its tensor, so a file that a server wrote half before it ended would become wrong
    weights. Reads all files. Raises `OSError`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    damaged = []
    for path in sorted(folder.iterdir()):
        if _HASH_NAME.fullmatch(path.name) and path.is_file() and _native.rpc_file_hash(str(path)) != path.name:
            path.unlink()
            damaged.append(path)
    return damaged


def serve(address: str, port: int, lent: Sequence[Device], *, n_threads: int | None = None, cache: Path | None) -> None:
    """Serve programs in turn until the process ends. Once in a process, which computes nothing else.

    Raises `EngineError` if the address cannot be listened on, `Unsupported` in a build without RPC.
    """
    _native.rpc_serve(
        f"{address}:{port}",
        "" if cache is None else str(cache),
        physical_cores() if n_threads is None else n_threads,
        [device.name for device in lent],
    )


def check_is_built() -> None:
    """Raise `Unsupported` in a build without RPC."""
    if not _native.build_info()["rpc"]:
        raise Unsupported("this build of paceline has no RPC backend; build it with PACELINE_RPC=ON")


def take_log() -> None:
    """Deliver llama.cpp's log lines during `serve`, a call that never returns."""
    _native.flush_log()
