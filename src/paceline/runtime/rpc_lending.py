"""Lending the devices of this machine to other hosts: ggml's RPC server. It has no authentication and no encryption."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from paceline import _native
from paceline.errors import EngineError, InvalidParams, Unsupported
from paceline.runtime.device import Device, devices, physical_cores

_HASH_NAME = re.compile(r"[0-9a-f]{16}")


def lent_devices(names: Sequence[str] = ()) -> list[Device]:
    """Return the devices of these names; without names all but the CPU, and the CPU where there is no other.

    Raises `InvalidParams` for a name that no device has, and for one that is there twice.
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
    """Return the IPv4 address of a name, after a look at whether the port is free there.

    Raises `InvalidParams` for a host without one, `EngineError` where it cannot be listened on.
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
    """Return the folder in which llama.cpp's own server keeps tensors, too."""
    base = os.environ.get("LLAMA_CACHE")
    if base:
        return Path(base) / "rpc"
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "llama.cpp" / "rpc"


def checked_cache(folder: Path) -> list[Path]:
    """Make the folder where it is missing, and remove the tensors of it that are damaged; return these.

    ggml takes a file for the tensor whose hash is its name, and does not look inside: what a server that ended had written
    half would become wrong weights. Reads all files. Raises `OSError`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    damaged = []
    for path in sorted(folder.iterdir()):
        if _HASH_NAME.fullmatch(path.name) and path.is_file() and _native.rpc_file_hash(str(path)) != path.name:
            path.unlink()
            damaged.append(path)
    return damaged


def serve(address: str, port: int, lent: Sequence[Device], *, n_threads: int | None = None, cache: Path | None) -> None:
    """Serve one program after the other until the process ends. Once in a process, which computes nothing else.

    Raises `EngineError` where the address cannot be listened on, `Unsupported` in a build without RPC.
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
    """Deliver what llama.cpp has logged meanwhile: a call that never returns delivers nothing."""
    _native.flush_log()
