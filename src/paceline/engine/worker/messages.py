"""Messages between front and worker, as msgpack. Records of the engine travel as they are, errors by their code.

The first message each way carries the protocol's version; a worker of another version is refused. Messages arrive in the order in
which they were sent. Any thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from paceline import validation
from paceline.engine.core import RequestCommand, Stop
from paceline.engine.questions import Call, Reply
from paceline.errors import EngineError, PacelineError, PromptTooLong
from paceline.kv_cache import MediaItem
from paceline.media import Attachment, MediaExtent, restored
from paceline.observability.metric_table import Sample
from paceline.output import Vocabulary
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.scheduling.records import EmbeddingRequest, RequestEvent
from paceline.sequence import GenerationState, Progress, Request

PROTOCOL = 18
_DEFAULT_PARAMS, _DEFAULT_OPTIONS = SamplingParams(), RequestOptions()


class _Message(msgspec.Struct, frozen=True, array_like=True):
    pass


# ---- front to worker


class Setup(_Message, frozen=True, tag="setup"):
    """The first message: the engine to be made.

    Attributes:
        model: Paths of the model; empty for the demo model.
        options: Options of `LLM` without those of the front.
        instruments: Names of instruments.
        path: Folders in which Python finds modules.
        log_level: The front ignores records below it.
        backend: `module:attr` of a function that makes backend and limits from backend_options, in place of llama.cpp.
        num_restarts: Number of earlier workers.
        reports_progress: Whether to report the progress of loading.
        trace_start_s: The clock at the beginning of the engine's trace; None without a trace.
        adapters: Files by their keys, for a later worker, which goes on without the files that it cannot load.
        drafter: A pickled object for the option speculation; empty without an object.
    """

    protocol: int
    model: list[str]
    options: dict[str, Any]
    instruments: list[str]
    path: list[str]
    log_level: int
    backend: str | None = None
    backend_options: dict[str, Any] = {}
    num_restarts: int = 0
    reports_progress: bool = False
    trace_start_s: float | None = None
    adapters: dict[str, str] = {}
    drafter: bytes = b""


class AttachmentData(_Message, frozen=True):
    """An image or audio of a prompt; see `Image` and `Audio`."""

    format: str
    extent: MediaExtent
    data: bytes
    name: str = ""


class EngineRequest(_Message, frozen=True, tag="request"):
    """A request for text or embeddings, new or continued.

    Attributes:
        key: Of the request.
        prompts: Token ids: of one prompt, or of texts to be embedded.
        params: Sampling parameters by name that differ from the defaults; None for an embedding request.
        options: Request options by name that differ from the defaults.
        submitted_s: When it was accepted.
        progress: What has happened to it on other engines.
        states: Of its choices.
        echo: See `Request`.
        pooling: Of an embedding request.
        media: The items of its prompts, see `Request` and `EmbeddingRequest`.
        attachments: The images and audio of these items, in order.
    """

    key: int
    prompts: list[list[int]]
    params: dict[str, Any] | None
    options: dict[str, Any]
    submitted_s: float
    progress: Progress = msgspec.field(default_factory=Progress)
    states: list[GenerationState | None] = []
    echo: str = ""
    pooling: str | None = None
    media: tuple[MediaItem, ...] = ()
    attachments: tuple[AttachmentData, ...] = ()

    def moved_in_time(self, by_s: float) -> EngineRequest:
        """Return a copy with its times moved: to ages before it goes to another machine, and back to times there."""
        return msgspec.structs.replace(self, submitted_s=self.submitted_s + by_s, progress=self.progress.moved(by_s))

    def restored_attachments(self) -> tuple[Attachment, ...]:
        """Return the images and audio."""
        return tuple(restored(file.format, file.extent, file.data, file.name) for file in self.attachments)

    @property
    def is_embedding(self) -> bool:
        """Whether it has texts to be embedded."""
        return self.params is None

    def for_text(self, params: SamplingParams, options: RequestOptions, vocabulary: Vocabulary, **more: Any) -> Request:
        """Return the request for text. more: fields of `Request`. Raises `InvalidParams` for wrong states."""
        validation.integer("the number of states", len(self.states), params.n, params.n)
        (prompt,) = self.prompts
        validation.integer("the number of prompt tokens", len(prompt), 1)
        text = {"prompt": prompt, "params": params, "lora": options.lora, "vocabulary": vocabulary, "echo": self.echo}
        return Request(**{**self._common(options), **text, **more})

    def for_embedding(self, options: RequestOptions, **more: Any) -> EmbeddingRequest:
        """Return the embedding request. more: fields of `EmbeddingRequest`."""
        return EmbeddingRequest(**{**self._common(options), "texts": self.prompts, "pooling": self.pooling, **more})

    def _common(self, options: RequestOptions) -> dict[str, Any]:
        return {"options": options, **{name: getattr(self, name) for name in _COMMON}}


_COMMON = ("key", "submitted_s", "progress", "media")


def engine_request(
    request: Request | EmbeddingRequest, states: list[GenerationState | None] | None = None
) -> EngineRequest:
    """Return a request as another process takes it. states: of its choices, if it is for text."""
    common: dict[str, Any] = {
        **{name: getattr(request, name) for name in _COMMON},
        "options": _changed(request.options, _DEFAULT_OPTIONS),
        "attachments": tuple(
            AttachmentData(file.format, file.extent, file.data, file.name) for file in request.attachments
        ),
    }
    if isinstance(request, EmbeddingRequest):
        return EngineRequest(prompts=request.texts, params=None, pooling=request.pooling, **common)
    params = _changed(request.params, _DEFAULT_PARAMS)
    return EngineRequest(prompts=[request.prompt], params=params, states=states or [], echo=request.echo, **common)


def _changed(record: Any, default: Any) -> dict[str, Any]:
    """Return the fields that differ from the defaults; pairs of names and scales as a mapping, which is how they are given."""
    changed = {
        field.name: getattr(record, field.name)
        for field in dataclasses.fields(record)
        if getattr(record, field.name) != getattr(default, field.name)
    }
    if changed.get("lora"):
        changed["lora"] = dict(changed["lora"])
    return changed


class Leave(_Message, frozen=True, tag="leave"):
    """End the worker in good order. The end of the socket without this message ends it at once."""


Down = Setup | EngineRequest | RequestCommand | Stop | Call | Leave


# ---- worker to front


class Ready(_Message, frozen=True, tag="ready"):
    """The engine runs. facts: of the model; adapters: their names."""

    protocol: int
    limits: dict[str, Any]
    facts: dict[str, Any]
    adapters: list[str]


class Refused(_Message, frozen=True, tag="refused"):
    """The engine could not be made."""

    protocol: int
    error: PacelineError


class Happened(_Message, frozen=True, tag="tick"):
    """All events of requests in one tick, whole or not at all."""

    events: list[RequestEvent]


class Logged(_Message, frozen=True, tag="log"):
    """A log record for the front's loggers."""

    logger: str
    level: int
    text: str


class Stats(_Message, frozen=True, tag="stats"):
    """The current metrics."""

    samples: list[Sample]


class Loading(_Message, frozen=True, tag="loading"):
    """The loaded fraction of the model, 0.0 to 1.0; sent if the setup asks for it."""

    fraction: float


class Traced(_Message, frozen=True, tag="trace"):
    """Events for the engine's trace, as its lines."""

    lines: list[str]


Up = Ready | Refused | Happened | Logged | Stats | Reply | Loading | Traced


# ---- coding


def _codes(base: type[PacelineError]) -> Iterator[tuple[str, type[PacelineError]]]:
    if "code" in vars(base):  # other classes are decoded as their base class
        yield base.code, base
    for child in base.__subclasses__():
        yield from _codes(child)


def _encode_error(value: object) -> list[str | int | None]:
    if isinstance(value, PromptTooLong):
        return [value.code, str(value), value.num_tokens, value.max_tokens, value.is_counted]
    if isinstance(value, PacelineError):
        return [value.code, str(value), *([value.filename] if isinstance(value, OSError) else [])]
    raise NotImplementedError(f"{type(value).__name__} does not go between processes")


def _decode_error(kind: type, value: object) -> PacelineError:
    if not (issubclass(kind, PacelineError) and isinstance(value, list) and len(value) >= 2):
        raise NotImplementedError(f"{kind.__name__} does not go between processes")
    code, *said = value
    return dict(_codes(PacelineError)).get(code, EngineError)(*said)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_error)
_down = msgspec.msgpack.Decoder(Down, dec_hook=_decode_error)
_up = msgspec.msgpack.Decoder(Up, dec_hook=_decode_error)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError)  # the latter if the name of a message is no text


def encode(message: Down | Up) -> bytes:
    """Return the message's bytes."""
    return _encoder.encode(message)


def decode_down(data: bytes) -> Down:
    """Decode a message of the front. Raises `EngineError` for other bytes."""
    try:
        message: Down = _down.decode(data)
    except _UNREADABLE as error:
        raise EngineError(f"the front sent what this worker does not know: {error}") from None
    return message


def decode_up(data: bytes) -> Up:
    """Decode a message of the worker. Raises `EngineError` for other bytes."""
    try:
        message: Up = _up.decode(data)
    except _UNREADABLE as error:
        raise EngineError(f"the worker sent what this engine does not know: {error}") from None
    return message


def check_protocol(version: int) -> None:
    """Raise `EngineError` for another version, which was installed while this process ran."""
    if version != PROTOCOL:
        raise EngineError(
            f"the worker speaks version {version} of the protocol and its front version {PROTOCOL}: paceline was "
            "changed on disk while it ran; start the program anew"
        )


_READ_BYTES = 2**18
_PARTS = 64  # calls of `send` whose messages go out in one write
MAX_BYTES = 2**30
_HEADER = 4


class Link:
    """Owns the socket, and keeps the bytes that it does not take yet. on_backlog: called if bytes are kept; must not wait."""

    def __init__(self, end: socket.socket, on_backlog: Callable[[], None] | None = None) -> None:
        end.setblocking(False)
        self._socket = end
        self._reader = FrameReader()
        # One buffer for all reads: allocating this size again and again fragments the heap.
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._rest = b""  # guarded by _sending: the part of a frame that the socket did not take
        self._is_over = False
        self._on_backlog = on_backlog

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def send(self, *messages: bytes) -> None:
        """Send messages in order, in one write if the socket takes them; do nothing if the other side is gone."""
        if self._is_over:
            return
        self._queue.put(b"".join(map(framed, messages)))
        self.flush()
        if self.is_backed_up and self._on_backlog is not None:
            self._on_backlog()

    def flush(self) -> None:
        """Send as many bytes as the socket takes now."""
        # A thread that finds the lock taken returns: the holder checks the queue again after its release.
        while not self._is_over and self.is_backed_up and self._sending.acquire(blocking=False):
            try:
                if not self._send_some():
                    return
            except OSError:  # the other side is gone; `receive` reports it
                self._is_over = True
            finally:
                self._sending.release()

    @property
    def is_backed_up(self) -> bool:
        """Whether bytes are left to be sent."""
        return bool(self._rest) or not self._queue.empty()

    def receive(self) -> list[bytes] | None:
        """Return the complete messages; None if the other side is gone. Does not wait."""
        try:
            size = self._socket.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        return self._reader.feed(self._buffer[:size]) if size else None

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._is_over = True
        self._socket.close()

    def _send_some(self) -> bool:
        """Return whether the socket takes more."""
        parts = [self._rest]
        with contextlib.suppress(queue.Empty):
            while len(parts) < _PARTS:
                parts.append(self._queue.get_nowait())
        data = b"".join(parts)
        self._rest = data
        with contextlib.suppress(BlockingIOError, InterruptedError):
            self._rest = data[self._socket.send(data) :]
        return not self._rest


def framed(message: bytes) -> bytes:
    """Return the message with its length before it. Raises `EngineError` if it is too long."""
    _check_size(len(message))
    return len(message).to_bytes(_HEADER, "big") + message


class FrameReader:
    """Joins bytes, split anywhere, to complete messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Return the messages that are complete now. Raises `EngineError` for a length above the maximum."""
        self._data += data
        messages, begin = [], 0
        while (end := self._end(begin)) is not None:
            messages.append(bytes(self._data[begin + _HEADER : end]))
            begin = end
        del self._data[:begin]
        return messages

    def _end(self, begin: int) -> int | None:
        if len(self._data) - begin < _HEADER:
            return None
        size = int.from_bytes(self._data[begin : begin + _HEADER], "big")
        _check_size(size)
        end = begin + _HEADER + size
        return end if end <= len(self._data) else None


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise EngineError(f"a message of {size} bytes, and {MAX_BYTES} is the most that goes between processes")
