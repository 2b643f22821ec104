"""The engine's own process: `python -m paceline.engine.worker SOCKET BOX PARENT`, started by its front only.

main thread        listens to the front; ends the process when the front is gone
preparing thread   loads the model, then prepares requests
encoding thread    prepares requests with images or audio; a watching thread gives up those that ended
engine's thread    ticks, and sends the events of each tick
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import pickle
import queue
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from paceline import validation
from paceline.clock import MonotonicClock
from paceline.engine.adapters import name_of
from paceline.engine.arguments import EngineArguments, engine_arguments
from paceline.engine.backend import Backend, as_paceline_error
from paceline.engine.core import Cancel, EndSlow, Engine, RequestCommand, SetInterval, SetPaused, Stop
from paceline.engine.engine_thread import Runner
from paceline.engine.inbox import Inbox
from paceline.engine.media_encoder import EncodingQueue, MediaEncoder
from paceline.engine.questions import Call, Reply, Resources, find_question
from paceline.engine.worker import messages
from paceline.engine.worker.black_box import BEAT_S, BlackBox, PassAllowance, TracingExecutor, WorkerPulse
from paceline.engine.worker.messages import Link
from paceline.engine.worker.worker_requests import RequestPreparer, SocketSink, WorkQueue
from paceline.engine.worker.worker_telemetry import WorkerTrace
from paceline.errors import InvalidParams, PacelineError
from paceline.observability.metrics import Instruments, Metrics, resolve_instruments
from paceline.request import RequestOptions, turn_s
from paceline.sequence import next_deadline_s

_log = logging.getLogger("paceline.engine")

_UNBOUNDED = 2**62  # the front has the bounds
_PROGRESS_STEP = 0.005
_SPARE_S = 0.05  # without a setup: it takes a while
_ENGINE_STOPPED = 70  # exit status: the engine's thread gave up
_PR_SET_PDEATHSIG = 1
# These signals go to every process of a terminal or of a service; the front handles them.
_OF_THE_GROUP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Worker:
    """One engine and the socket to its front."""

    def __init__(self, end: socket.socket, box: BlackBox) -> None:
        self._box = box
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._link = Link(end, self._wake)
        self._inbox = Inbox(_UNBOUNDED)
        self._metrics = Metrics()
        self._clock = MonotonicClock()
        self._work = WorkQueue[messages.Setup | messages.EngineRequest | _GivenUp]()
        self._encoding: EncodingQueue[messages.EngineRequest] | None = None
        self._queueing = threading.Lock()  # for encoding, by the listening thread and the preparing one
        self._encoder: MediaEncoder | None = None
        self._preparer: RequestPreparer | None = None
        self._runner: Runner | None = None
        self._may_leave = self._has_ended = False
        self._socket_sink: SocketSink | None = None
        self._resources: Resources | None = None
        self._abort: Callable[[], None] = lambda: None
        threading.Thread(target=self._prepare, name="paceline-preparing", daemon=True).start()

    def listen(self) -> None:
        """Process messages of the front until it ends the worker. The end of the socket ends the process."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            selector.register(self._link, selectors.EVENT_READ)
            while True:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._link.is_backed_up else 0)
                selector.modify(self._link, wanted)
                self._box.listen(self._clock.now())
                selector.select(BEAT_S)
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                self._link.flush()
                received = self._link.receive()
                if received is None:
                    os._exit(0)  # whatever other threads are in
                for data in received:
                    self._do(messages.decode_down(data))
                if self._may_leave:
                    break
                if self._has_ended and not self._link.is_backed_up:
                    os._exit(_ENGINE_STOPPED)  # another worker may do better
        if self._runner is not None:
            self._runner.close(drain=False, timeout_s=None)

    def _do(self, message: messages.Down) -> None:
        match message:
            case messages.Setup():
                self._work.put(message)
            case messages.EngineRequest():
                self._take_request(message)
            case Cancel() | SetPaused() | SetInterval() | EndSlow():
                self._pass_on(message)
            case Stop():
                self._stop()
            case Call():
                self._take_call(message)
            case messages.Leave():
                self._may_leave = True

    def _stop(self) -> None:
        if self._encoder is not None:
            self._encoder.stop()  # else requests whose images or audio wait would be encoded first
        self._inbox.put(Stop())
        self._abort()

    @property
    def _ready(self) -> RequestPreparer:
        assert self._preparer is not None  # noqa: S101 - the front waits for Ready
        return self._preparer

    def _end(self) -> None:
        """Note the end of the engine's thread, and report the metrics: much of the disk cache is written at the end."""
        self._report()
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def _report(self) -> None:
        self._send(messages.Stats(list(self._metrics.snapshot())))

    def _take_call(self, call: Call) -> None:
        """Answer a question of the front: now, after a tick, or on a thread of its own if that takes time."""
        sink, resources = self._socket_sink, self._resources
        assert sink is not None  # noqa: S101 - the front waits for Ready
        assert resources is not None  # noqa: S101
        try:
            place = find_question(call).place
            if place == "tick":
                sink.answer(call, self._clock.now() + call.delay_s)
            elif place == "thread":
                threading.Thread(target=self._answer_beside_ticks, args=(call, resources), daemon=True).start()
            else:
                self._answer(call, resources)
        except Exception as error:  # noqa: BLE001 - the front is to know
            self._send(Reply(call.number, None, as_paceline_error(error)))

    def _answer_beside_ticks(self, call: Call, resources: Resources) -> None:
        with self._box.asked():
            self._answer(call, resources)

    def _answer(self, call: Call, resources: Resources) -> None:
        try:
            question = find_question(call)
            reply = question.reply(call.number, question.answer(resources, *question.args(call)))
        except Exception as error:  # noqa: BLE001 - the front is to know
            reply = Reply(call.number, None, as_paceline_error(error))
        self._send(reply)

    def _send(self, message: messages.Up) -> None:
        self._link.send(messages.encode(message))

    # ---- requests

    def _pass_on(self, command: RequestCommand) -> None:
        """Pass a command on to its request; a cancel ends the encoding of its images. Listening thread."""
        self._ready.pass_on(command)
        if isinstance(command, Cancel) and self._encoding is not None:
            self._encoding.release(command.key)

    def _take_request(self, message: messages.EngineRequest) -> None:
        """Pass a request on to the thread that prepares it. Listening thread."""
        self._ready.expect(message.key)
        if message.is_embedding or not message.attachments or self._encoding is None:
            self._work.put(message, message.options.get("tenant", ""))
        else:
            self._have_encoded(message)

    def _have_encoded(self, message: messages.EngineRequest) -> None:
        """Queue a request for encoding its images or audio before it is prepared. Listening or preparing thread."""
        assert self._encoding is not None  # noqa: S101 - as the caller saw
        options = RequestOptions(**message.options)
        deadline_s = next_deadline_s(options, message.submitted_s, message.progress)
        with self._queueing:
            turn = turn_s(message.submitted_s, options.priority)
            self._encoding.put(message.key, message, deadline_s, turn, options.tenant)

    def _give_up(self, message: messages.EngineRequest) -> None:
        """Have a request prepared without encoding its images or audio, since it has ended. Watching thread."""
        self._work.put(_GivenUp(message), message.options.get("tenant", ""))

    # ---- the preparing thread

    def _prepare(self) -> None:
        try:
            message = self._work.get(_SPARE_S)
        except queue.Empty:  # a spare worker imports modules before its setup comes
            with contextlib.suppress(Exception):  # `_start` imports it again, and reports the error
                import paceline.engine.engine_factory  # noqa: F401
            message = self._work.get()
        while True:
            if isinstance(message, messages.Setup):
                self._set_up(message)
            elif isinstance(message, _GivenUp):
                self._ready.prepare(message.message)
            elif message.is_embedding and message.attachments and self._encoding is not None:
                self._reserve(message)
            else:
                self._ready.prepare(message)
            message = self._work.get()

    def _reserve(self, message: messages.EngineRequest) -> None:
        """Make the context of an embedding request with images, then queue it for encoding unless it was cancelled meanwhile."""
        assert self._encoding is not None  # noqa: S101 - as the caller saw
        if self._ready.reserve(message):
            self._have_encoded(message)
            if self._ready.is_cancelled(message.key):  # else its cancel comes later
                self._encoding.release(message.key)

    def _set_up(self, setup: messages.Setup) -> None:
        try:
            messages.check_protocol(setup.protocol)
            sys.path[:] = setup.path
            self._log_to_front(setup.log_level)
            self._send(self._start(setup))
        except Exception as error:  # noqa: BLE001 - the front is to know
            self._send(messages.Refused(messages.PROTOCOL, as_paceline_error(error)))

    def _start(self, setup: messages.Setup) -> messages.Ready:
        """Make the engine and its thread."""
        zero_s = setup.trace_start_s
        trace = None if zero_s is None else WorkerTrace(zero_s, lambda lines: self._send(messages.Traced(lines)))
        wanted = (*resolve_instruments(setup.instruments), *(() if trace is None else (trace,)))
        instruments = Instruments(wanted, own=self._metrics)
        progress = {"progress": _Progress(self._send)} if setup.reports_progress else {}
        arguments = engine_arguments({**setup.options, **progress, **_drafter(setup.drafter)})
        from paceline.engine.engine_factory import Parts, assemble, build
        from paceline.runtime.model import model_facts

        def make(arguments: EngineArguments) -> Parts:
            if setup.backend is None:
                paths: Any = setup.model
                return build(None if not paths else paths[0] if len(paths) == 1 else paths, arguments)
            backend, limits = validation.import_named(setup.backend)(setup.backend_options)
            return Parts(backend=backend, limits=limits, at_end=(backend.close,))

        parts = assemble(make, arguments, self._clock, instruments)
        backend, scheduler, calibration, at_end = parts.backend, parts.scheduler, parts.calibration, parts.at_end
        self._encoder = parts.encoder
        if parts.encoder is not None:
            at_end = (parts.encoder.close, *at_end)
        if setup.num_restarts and calibration is not None:  # requests wait, or a pass of it crashed
            calibration.end()
            calibration = None
        scheduler.reports_held_back = True
        sink = self._socket_sink = SocketSink(self._link, self._inbox, backend, self._report, trace)
        lost = {key: failure for key, path in setup.adapters.items() if (failure := _load_again(backend, key, path))}
        self._preparer = preparer = RequestPreparer(self._inbox, sink, backend, self._box, lost, self._encoder)
        if self._encoder is not None:
            self._encoding = EncodingQueue(
                encode=preparer.encode, give_up=self._give_up, abort=self._encoder.cancel, clock=self._clock
            )
            preparer.on_encoded, self._inbox.on_left = self._encoding.hold, self._encoding.let_go
        executor = TracingExecutor(
            backend, self._clock, self._box, PassAllowance(arguments.config, scheduler.cost_model)
        )
        self._abort = backend.abort
        folder = arguments.config.state_folder
        self._resources = parts.resources(folder, sink.ask, self._inbox.next_key, self._report)
        if setup.num_restarts:
            instruments.engine_restarted(self._clock.now())
        engine = Engine(self._inbox, scheduler, executor, calibration)
        pulse = WorkerPulse(self._clock, self._box, arguments.config.hang_timeout_s)
        self._runner = Runner(
            engine, self._inbox, sink, pulse, backend.abort, (*parts.saving(engine), *at_end, self._end)
        )
        facts = {} if parts.model is None else model_facts(parts.model)
        return messages.Ready(messages.PROTOCOL, asdict(parts.limits), facts, list(parts.adapters))

    def _log_to_front(self, level: int) -> None:
        logger = logging.getLogger("paceline")
        logger.addHandler(_ToFront(self._send))
        logger.setLevel(level)
        logger.propagate = False


@dataclass(frozen=True, slots=True)
class _GivenUp:
    """A request that has ended before its images or audio were encoded."""

    message: messages.EngineRequest


class _ToFront(logging.Handler):
    """Sends log records to the front, whose loggers filter and write them."""

    def __init__(self, send: Callable[[messages.Up], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record."""
        try:
            self._send(messages.Logged(record.name, record.levelno, self.format(record)))
        except Exception:  # noqa: BLE001 - as any handler
            self.handleError(record)


class _Progress:
    """Reports the progress of loading to the front, in steps of half a percent."""

    def __init__(self, send: Callable[[messages.Up], None]) -> None:
        self._send, self._reported = send, -1.0

    def __call__(self, fraction: float) -> None:
        """Report this fraction, if it is a step further."""
        if fraction - self._reported >= _PROGRESS_STEP or (fraction >= 1.0 > self._reported):
            self._reported = fraction
            self._send(messages.Loading(fraction))


def _drafter(pickled: bytes) -> dict[str, Any]:
    """Return the option `speculation` if it is an object."""
    if not pickled:
        return {}
    try:
        return {"speculation": pickle.loads(pickled)}  # noqa: S301 - of our own front
    except Exception as error:
        raise InvalidParams(
            f"speculation: the drafter cannot be unpickled in the worker: {type(error).__name__}: {error}; give it as "
            '"module:attr"'
        ) from error


def _load_again(backend: Backend, key: str, path: str) -> PacelineError | None:
    """Load an adapter of an earlier worker; return the error if it cannot be loaded."""
    try:
        backend.load_adapter(key, path)
    except Exception as error:  # noqa: BLE001 - its requests fail, and no others
        _log.error("the adapter %r could not be loaded again: %s", name_of(key), error)
        return as_paceline_error(error)
    return None


def _die_with(parent: int) -> None:
    """End this process with its front, also if a call keeps the main thread from noticing the socket's end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _report_crashes() -> None:
    """Write the Python stack of a crash to stderr, without the C stack of Python 3.14, which displaces llama.cpp's message."""
    if sys.version_info >= (3, 14):
        faulthandler.enable(all_threads=False, c_stack=False)
    else:
        faulthandler.enable(all_threads=False)


def main() -> NoReturn:
    """Run the worker process."""
    for number in _OF_THE_GROUP:
        signal.signal(number, signal.SIG_IGN)
    end, box, parent = map(int, sys.argv[1:4])
    _die_with(parent)
    _report_crashes()
    Worker(socket.socket(fileno=end), BlackBox(box)).listen()
    sys.exit(0)


if __name__ == "__main__":
    main()
