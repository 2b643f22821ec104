"""One worker process, as its front sees it: its setup, start, messages and end. Supervising thread only, but for the setup."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import selectors
import signal
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from paceline import validation
from paceline.engine.adapters import projector_file
from paceline.engine.inbox import FrontInbox
from paceline.engine.spare_workers import SPARE_WORKERS, module_path
from paceline.engine.worker import messages
from paceline.engine.worker.black_box import Beat, BlackBox, LastSeen
from paceline.engine.worker.messages import Link
from paceline.errors import InvalidParams, PacelineError, RpcServerUnavailable
from paceline.runtime import Model
from paceline.runtime.gguf_check import files_beside
from paceline.speculation.named_drafter import draft_heads_of

_OF_THE_FRONT = frozenset(
    {
        "isolation",
        "on_engine_death",
        "max_restarts",
        "sleep_idle_s",
        "instruments",
        "progress",
        "cancel",
        "trace",
        "trace_max_bytes",
    }
)


def worker_setup(model: Any, options: Mapping[str, Any], trace_start_s: float | None = None) -> messages.Setup:
    """Return the first message to a worker. Raises `InvalidParams` for an object that cannot go to another process."""
    options = validation.given(options)
    strategy = options.get("strategy", "")
    if not isinstance(strategy, (str, Mapping)):
        raise _no_object("strategy", strategy)
    drafter, is_object = options.get("speculation"), _is_object(options.get("speculation"))
    return messages.Setup(
        protocol=messages.PROTOCOL,
        model=_paths(model),
        options={
            name: _plain(name, value)
            for name, value in options.items()
            if name not in _OF_THE_FRONT and not (is_object and name == "speculation")
        },
        drafter=_pickled(drafter) if is_object else b"",
        instruments=_names(options.get("instruments", ())),
        path=module_path(),
        log_level=logging.getLogger("paceline").getEffectiveLevel(),
        reports_progress=options.get("progress") is not None or options.get("cancel") is not None,
        trace_start_s=trace_start_s,
    )


def model_files(setup: messages.Setup) -> list[Path]:
    """Return the files that a worker loads, without LoRA adapters: splits, projector, draft model and draft heads."""
    paths, options = [Path(path) for path in setup.model], setup.options
    given = options.get("draft_model") or ()
    files = [*_split(paths), *_split([Path(path) for path in ([given] if isinstance(given, str) else given)])]
    with suppress(PacelineError, OSError):  # the worker reports it
        if paths and (projector := projector_file(paths, options.get("mmproj"))) is not None:
            files.append(projector)
    with suppress(PacelineError):
        heads = draft_heads_of(options.get("speculation"))
        if heads is not None and heads.model is not None:
            files.append(Path(heads.model).absolute())
    return files


def _split(paths: list[Path]) -> Sequence[Path]:
    """Return all parts of a split set that is named by its first part."""
    with suppress(PacelineError):
        return files_beside(paths[0]) if len(paths) == 1 else paths
    return paths


def _paths(model: Any) -> list[str]:
    if isinstance(model, Model):
        raise InvalidParams(
            'model is loaded already, and isolation="process" loads it in a process of its own; give its path instead'
        )
    if model is None:
        from paceline.demo import demo_model_path

        model = demo_model_path()
    paths = [model] if isinstance(model, (str, os.PathLike)) else list(model)
    return [str(Path(path).absolute()) for path in paths]


def _names(instruments: Any) -> list[str]:
    if isinstance(instruments, str):
        raise InvalidParams(f"instruments must be a list of names, not the text {instruments!r}")
    for instrument in instruments:
        if not isinstance(instrument, str) or ":" not in instrument:
            raise _no_object("instruments", instrument)
    return list(instruments)


def _is_object(speculation: object) -> bool:
    if isinstance(speculation, (list, tuple)):
        return any(map(_is_object, speculation))
    return speculation is not None and not isinstance(speculation, (str, Mapping))


def _pickled(drafter: object) -> bytes:
    """Return the bytes of one or several drafters. Raises `InvalidParams` if one cannot be pickled or found by the worker."""
    if isinstance(drafter, (list, tuple)):
        for member in drafter:
            _pickled(member)
    name = type(drafter).__name__
    if type(drafter).__module__ == "__main__":
        raise InvalidParams(
            f'speculation: {name} is defined in __main__, which the worker of isolation="process" does not run; move it into '
            'a module of its own, or use isolation="thread"'
        )
    try:
        return pickle.dumps(drafter)
    except Exception as error:
        raise InvalidParams(
            f'speculation: this {name} does not pickle ({error}), and lives in the worker with isolation="process"; give it '
            'as "module:attr", or use isolation="thread"'
        ) from error


def _no_object(name: str, value: object) -> InvalidParams:
    return InvalidParams(
        f'{name} must be named as "module:attr" with isolation="process", since it lives in the worker; '
        f"a {type(value).__name__} cannot go there"
    )


def _plain(name: str, value: Any) -> Any:
    """Return the value as messages carry it."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of a subclass, such as NumPy's, the plain value
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, os.PathLike):
        return str(Path(value).absolute())
    if isinstance(value, Mapping):
        return {key: _plain(name, each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(name, each) for each in value]
    raise InvalidParams(
        f'{name} must be made of texts, numbers, paths, lists and mappings with isolation="process", '
        f"not of a {type(value).__name__}"
    )


_log = logging.getLogger("paceline.engine")

_READABLE, _WRITABLE = selectors.EVENT_READ, selectors.EVENT_WRITE
_PATIENCE_S = 5.0  # from the end of the socket to the end of the process, core dumps included
MAX_BYTES = 8192
_MAX_LINES = 20
# Lines that faulthandler adds after the stack; the cause comes before them.
_NOISE = re.compile(r"(?m)^(Extension modules: .*|\n)")
# Signals by which a process ends itself. Others come from outside (the out-of-memory killer, an operator) and blame no request.
FATAL_SIGNALS = frozenset(
    (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS)
)
_LOST_SERVER = re.compile(r"(?m)^the RPC server \S+ was lost: .*$")
_children: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Hang:
    """The reason for which a worker was killed. is_outside: another process had stopped it, so no request is to blame."""

    reason: str
    is_outside: bool


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a worker. code: its exit status, or the negated signal that ended it. hang: the reason for a kill."""

    code: int
    seen: LastSeen
    last_words: str
    hang: Hang | None = None

    @property
    def is_crash(self) -> bool:
        """Whether the process ended itself by a fault, or hung; otherwise another process killed it, or it exited in order."""
        if self.hang is not None:
            return not self.hang.is_outside
        return -self.code in FATAL_SIGNALS

    @property
    def signal(self) -> str | None:
        """The name of the signal that ended it."""
        if self.code >= 0:
            return None
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"

    @property
    def lost_server(self) -> RpcServerUnavailable | None:
        """The error of a lost RPC server that ended the process, from its last words (native/rpc_sockets.cpp)."""
        found = _LOST_SERVER.search(self.last_words) if self.is_crash else None
        return None if found is None else RpcServerUnavailable(found[0])

    def __str__(self) -> str:
        if self.hang is not None:
            return f"the engine's process hung and was killed: {self.hang.reason}"
        how = f"exited with status {self.code}" if self.signal is None else f"was ended by {self.signal}"
        return f"the engine's process {how}" + (f"; its last words:\n{self.last_words}" if self.last_words else "")


class LastWords:
    """The last bytes that a worker writes to stderr, for the error of its death. Reads a pipe and never waits."""

    def __init__(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._data = b""

    def fileno(self) -> int:
        """Return the pipe's descriptor; -1 after the other side has closed it."""
        return self._pipe

    def read(self) -> bool:
        """Read the bytes in the pipe and return whether more may come."""
        while self._pipe >= 0:
            try:
                data = os.read(self._pipe, MAX_BYTES)
            except (BlockingIOError, InterruptedError):
                return True
            if not data:
                self.close()
            self._data = (self._data + data)[-MAX_BYTES:]
        return False

    @property
    def text(self) -> str:
        """The last lines, without noise."""
        lines = _NOISE.sub("", self._data.decode("utf-8", "replace")).strip().splitlines()
        return "\n".join(lines[-_MAX_LINES:])

    def close(self) -> None:
        """Close the pipe; idempotent."""
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            os.close(pipe)


class WorkerProcess:
    """Starts a worker, or takes a spare one, and sends it its setup."""

    def __init__(self, setup: messages.Setup) -> None:
        """Take or start the process. Raises `OSError` if no process can be started."""
        launched = SPARE_WORKERS.take(setup.path)
        self._process = launched.process
        self.makes_sense = True  # no bytes have come that are no message
        self.ready_s: float | None = None  # when its engine ran
        self._hang: Hang | None = None
        self._page_reads = 0
        try:
            self.box = BlackBox(launched.box)
            self.last_words = LastWords(launched.stderr)
            self.link = Link(launched.socket)
            _children.add(self)
            self.send(setup)
        except BaseException:
            _children.discard(self)
            launched.end()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether its engine runs."""
        return self.ready_s is not None

    def send(self, message: messages.Down) -> None:
        """Send the worker a message; never waits."""
        self.link.send(messages.encode(message))

    def beat(self) -> Beat | None:
        """Return its last sign of life. Any thread."""
        return self.box.read_beat()

    def reap(self, patience_s: float = _PATIENCE_S) -> Death:
        """Wait for the end of the process, kill it if that takes longer, and free its resources."""
        try:
            code = self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            try:
                code = self._process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:  # it is in a system call that does not end, and ends with that
                _log.error("the engine's process %d does not end, though it was killed", self.pid)
                code = -signal.SIGKILL
        self.last_words.read()
        death = Death(code, self.box.read(), self.last_words.text, self._hang)
        self._close()
        return death

    def kill(self) -> None:
        """End the process at once; it is still to be reaped."""
        self._process.kill()

    def kill_hung(self, reason: str, *, is_silent: bool) -> None:
        """End the process because it hangs. is_silent: whether all of its threads are silent.

        If the system does not report that a process was stopped, silence counts as that.
        """
        state = _read_stat(self.pid)[0]
        self._hang = Hang(reason, is_outside=state == "T" if state else is_silent)
        self.kill()

    def is_excused(self) -> bool:
        """Return whether a debugger has stopped the process, or it waits for memory that is read from disk (Linux)."""
        state, page_reads = _read_stat(self.pid)
        is_paging = page_reads > self._page_reads
        self._page_reads = page_reads
        return is_paging or state == "t" or _is_traced(self.pid)

    def _close(self) -> None:
        self.link.close()
        self.last_words.close()
        self.box.close()

    def forget(self) -> None:
        """Close the descriptors that a forked child of the front has inherited, so that the worker sees its own front's end."""
        self._process.returncode = 0
        self.box.forget()
        with contextlib.suppress(OSError):
            self._close()


def _read_stat(pid: int) -> tuple[str, int]:
    """Return a process's state and its number of major page faults; "" and 0 where the system does not report them."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[9])
    except (OSError, ValueError, IndexError):
        return "", 0


def _is_traced(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return re.search(r"^TracerPid:\s+[1-9]", status, re.MULTILINE) is not None


def _forget_all() -> None:
    for child in tuple(_children):
        child.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


class Watching:
    """The descriptors that the supervising thread waits for: inbox, socket and stderr of a worker. A context manager."""

    def __init__(self, inbox: FrontInbox) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(inbox, _READABLE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._selector.close()

    def wait(self, timeout_s: float | None) -> list[object]:
        """Return the objects that are ready within timeout_s; None: wait without a limit."""
        return [key.fileobj for key, _ in self._selector.select(timeout_s)]

    def add(self, worker: WorkerProcess) -> None:
        """Watch a worker that was started."""
        self._selector.register(worker.link, _READABLE)
        self._selector.register(worker.last_words, _READABLE)

    def remove(self, worker: WorkerProcess) -> None:
        """Stop watching a worker that is gone."""
        self._forget(worker.link)
        self._forget(worker.last_words)

    def refresh(self, worker: WorkerProcess) -> None:
        """Wait for room in the socket if bytes are kept for it, and stop waiting for a closed stderr."""
        self._selector.modify(worker.link, _READABLE | (_WRITABLE if worker.link.is_backed_up else 0))
        if worker.last_words.fileno() < 0:
            self._forget(worker.last_words)

    def _forget(self, watched: object) -> None:
        """Unregister by identity, as its descriptor may be closed."""
        for key in tuple(self._selector.get_map().values()):
            if key.fileobj is watched:
                self._selector.unregister(key.fd)
