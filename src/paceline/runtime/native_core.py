"""The compiled core as a part of this process: the facts of its build, its log, and the end of its objects and calls.

Its log goes to `logging.getLogger("paceline.llama")`, on the thread of the native call that just returned, in order.
llama.cpp logs the details of loading a model as "info"; they become DEBUG, so that an application that logs at INFO stays
readable. So do warnings about corrections that llama.cpp makes by itself, and about a context that is longer than the model was
trained for: all sequences share it, and none gets longer than that.

At exit Python ends a daemon thread when its native call returns, in the middle of C++ frames that cannot be unwound, which
aborts the process. So the calls are ended before.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import re
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from paceline import _native
from paceline.errors import Closed


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildInfo:
    """Facts that were fixed when the core was compiled.

    Folders are of the machine that built it; a folder in the builder's home is reported in the user's home.
    backend: cpu, cuda, metal, vulkan or hip, and backend_reason why. flags: NAME=VALUE as given to llama.cpp's build.
    sanitizers: empty, or a list like "address,undefined". assertions: whether llama.cpp's debug assertions are compiled in.
    own_attention: whether attention on a CPU may be computed by paceline's own kernel (see `runtime.attention`).
    rpc: whether ggml's RPC backend is linked (PACELINE_RPC=ON).
    own_matmul: whether matrix products on a CPU may be computed by paceline's own kernels (see `runtime.matmul`).
    """

    backend: str
    backend_reason: str
    llama_cpp_version: str
    llama_cpp_commit: str
    llama_cpp_source: str
    build_type: str
    sanitizers: str
    flags: tuple[str, ...]
    compiler: str
    target: str
    cache_dir: str
    cache_entry: str
    assertions: bool
    own_attention: bool
    rpc: bool
    own_matmul: bool


def build_info() -> BuildInfo:
    """Return the facts of the loaded core."""
    facts = _native.build_info()
    return BuildInfo(**{**facts, "flags": tuple(facts["flags"])})


class Closeable(ABC):
    """An object that is closed by `close()` or at the end of a `with` block."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def native_fact(name: str) -> Any:
    """Return a read-only property with the value that the native object has under this name."""
    return property(lambda self: getattr(self.native, name))


_Made = TypeVar("_Made", bound=Closeable)


class SharedOwners:
    """The objects that hold a model's memory besides the `Model`, so that `Model.free` can close them. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the other fields
        self._owners: weakref.WeakSet[Closeable] = weakref.WeakSet()
        self._are_closed = False

    def add(self, owner: _Made) -> _Made:
        """Record an object that was just made from the model, and return it. Raises `Closed` if the model was freed."""
        with self._lock:
            if not self._are_closed:
                self._owners.add(owner)
                return owner
        owner.close()
        raise Closed("the model was closed")

    def close(self) -> None:
        """Close every recorded object that still exists; idempotent."""
        with self._lock:
            self._are_closed = True
            owners = list(self._owners)
        for owner in owners:
            owner.close()


def trim_heap() -> None:
    """Return freed memory to the system if the C library can (`malloc_trim` of glibc); takes some milliseconds.

    A vocabulary is many small blocks, which the C library keeps for itself when they are freed.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(ctypes.c_size_t(0))


logger = logging.getLogger("paceline.llama")

END_TIMEOUT_S = 10.0  # for calls that no abort reaches, like a wait for a mask

_HARMLESS = re.compile(
    r"possible training context overflow|its type will be overridden|attribute to USER_DEFINED|from EOG list"
    r"|model default pooling_type is \[-1\]|to 'true' for Gemma4|setting new yarn_attn_factor|not divisible by n_seq_max"
)
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}


def install() -> None:
    """Connect the log and the end of calls; called once, when `paceline.runtime` is imported."""
    # Without a handler, Python writes warnings to stderr; a library stays silent.
    logger.addHandler(logging.NullHandler())
    _native.set_log_sink(_log_line)
    atexit.register(end_calls)


def end_calls(timeout_s: float = END_TIMEOUT_S) -> None:
    """End native calls in other threads: passes and loads raise `Aborted`, new calls raise `Closed`.

    Waits for the calls, at most timeout_s. A call that takes longer never returns to Python.
    """
    returned = _native.end_calls(timeout_s)
    for thread in threading.enumerate():
        if thread.ident in returned:
            # It may be about to print the error of the call; ended while it holds the lock of stderr, it would make
            # Python abort. A thread that Python did not start cannot be joined.
            with contextlib.suppress(RuntimeError, AssertionError):
                thread.join(1.0)


def _log_line(level: int, line: str) -> None:
    chosen = _LEVELS.get(level, logging.DEBUG)
    if chosen == logging.WARNING and _HARMLESS.search(line):
        chosen = logging.DEBUG
    logger.log(chosen, "%s", line)
