"""Messages between front and worker, as msgpack. Records of the engine travel as they are, errors by their code.

The first message each way carries the protocol's version; a worker of another one is refused. Of what follows, order on
the socket is order in time. Any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from paceline.engine.commands import RequestCommand, Stop
from paceline.engine.questions import Call, Reply
from paceline.errors import EngineError, PacelineError, PromptTooLong
from paceline.kv_cache import MediaItem
from paceline.media import MediaExtent
from paceline.observability.metrics_snapshot import Sample
from paceline.sequence import GenerationState
from paceline.streaming.chunk import StreamChunk, TokenLogprobs

PROTOCOL = 15


class _Message(msgspec.Struct, frozen=True, array_like=True):
    pass


# ---- front to worker


class Setup(_Message, frozen=True, tag="setup"):
    """The first one: what to load. model: paths, none for the demo model. options: of `LLM`, without those of the front.

    path: where Python finds modules. backend: `module:attr` of a function that makes backend and limits from
    backend_options, in place of llama.cpp. log_level: below it the front ignores records. num_restarts: how many workers
    there were before. reports_progress: whether to report how far loading is. trace_start_s: the clock at the beginning of the
    engine's trace; None: there is none. adapters: files by their keys, of a later worker, which goes on without those that it
    cannot load. drafter: an object for the option speculation, pickled; empty without one.
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


class Life(_Message, frozen=True):
    """What has happened to a request apart from its tokens. Times are of the system-wide clock that both sides read."""

    started_s: float | None = None
    first_token_s: float | None = None
    num_cached: int = 0
    cached_from: str | None = None


class AttachmentData(_Message, frozen=True):
    """An image or audio of a prompt; see `Image` and `Audio`."""

    format: str
    extent: MediaExtent
    data: bytes
    name: str = ""


class Generate(_Message, frozen=True, tag="generate"):
    """A request for text, new or continued. params, options: by name, those that differ from the defaults.

    media: the items whose keys are in the prompt. attachments: what they are of, in order.
    """

    key: int
    prompt: list[int]
    params: dict[str, Any]
    options: dict[str, Any]
    echo: str
    submitted_s: float
    life: Life
    states: list[GenerationState | None]
    media: tuple[MediaItem, ...] = ()
    attachments: tuple[AttachmentData, ...] = ()


class Embed(_Message, frozen=True, tag="embed"):
    """Texts to be embedded. media: their items, see `EmbeddingRequest`. attachments: what they are of, in order."""

    key: int
    texts: list[list[int]]
    pooling: str | None
    options: dict[str, Any]
    submitted_s: float
    started_s: float | None
    media: tuple[MediaItem, ...] = ()
    attachments: tuple[AttachmentData, ...] = ()


class Leave(_Message, frozen=True, tag="leave"):
    """End the worker in good order. Without it the end of the socket ends it at once."""


Down = Setup | Generate | Embed | RequestCommand | Stop | Call | Leave


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


class Chunk(_Message, frozen=True, tag="c"):
    """What a tick brought to a choice: a chunk, if there is one, and all tokens drawn, held back or of a stop or not.

    unsent_logprobs: where logprobs are wanted, with a chunk those of what it leaves held back, without one those of what was
    drawn.
    sampler_state: see `GenerationState`. is_last: the request's.
    """

    key: int
    choice: int
    chunk: StreamChunk | None
    drawn: tuple[int, ...]
    unsent_logprobs: tuple[TokenLogprobs, ...]
    sampler_state: bytes | None
    is_last: bool


class Lived(_Message, frozen=True, tag="l"):
    """What has changed in a request's life; sent before the chunk of the same tick. started: it left the queue just now."""

    key: int
    life: Life
    started: bool


class Freed(_Message, frozen=True, tag="f"):
    """The request's slots are free and its memory is reclaimable."""

    key: int


class Vectors(_Message, frozen=True, tag="v"):
    """An embedding request has ended: float32 vectors, or why there are none."""

    key: int
    vectors: list[bytes]
    error: PacelineError | None


class Failed(_Message, frozen=True, tag="x"):
    """A request could not be prepared, and never reached the engine."""

    key: int
    error: PacelineError


Part = Chunk | Lived | Freed | Vectors | Failed


class Happened(_Message, frozen=True, tag="tick"):
    """All that one tick brought, whole or not at all."""

    parts: list[Part]


class Logged(_Message, frozen=True, tag="log"):
    """A log record for the front's loggers."""

    logger: str
    level: int
    text: str


class Stats(_Message, frozen=True, tag="stats"):
    """The current metrics."""

    samples: list[Sample]


class Loading(_Message, frozen=True, tag="loading"):
    """Fraction of the model that is loaded, 0.0 to 1.0; sent if the setup asks for it."""

    fraction: float


class Traced(_Message, frozen=True, tag="trace"):
    """Events for the engine's trace, as its lines."""

    lines: list[str]


Up = Ready | Refused | Happened | Logged | Stats | Reply | Loading | Traced


def replaced(setup: Setup, backend: str, backend_options: dict[str, Any]) -> Setup:
    """Return the same setup with another backend, for tests."""
    return msgspec.structs.replace(setup, backend=backend, backend_options=backend_options)


def restarted(setup: Setup, num_restarts: int, adapters: Mapping[str, str]) -> Setup:
    """Return the same setup for a later worker. adapters: those of the moment, in place of the first worker's."""
    return msgspec.structs.replace(
        setup,
        options={name: value for name, value in setup.options.items() if name != "lora"},
        num_restarts=num_restarts,
        reports_progress=setup.reports_progress and not num_restarts,
        adapters=dict(adapters),
    )


# ---- coding


def _codes(base: type[PacelineError]) -> Iterator[tuple[str, type[PacelineError]]]:
    if "code" in vars(base):  # others are decoded as their base class
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
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError)  # the latter where the name of a message is no text


def encode(message: Down | Up) -> bytes:
    """Return the message's bytes."""
    return _encoder.encode(message)


def decode_down(data: bytes) -> Down:
    """Decode a message of the front. Raises `EngineError` for bytes that are no such message."""
    try:
        message: Down = _down.decode(data)
    except _UNREADABLE as error:
        raise EngineError(f"the front sent what this worker does not know: {error}") from None
    return message


def decode_up(data: bytes) -> Up:
    """Decode a message of the worker. Raises `EngineError` for bytes that are no such message."""
    try:
        message: Up = _up.decode(data)
    except _UNREADABLE as error:
        raise EngineError(f"the worker sent what this engine does not know: {error}") from None
    return message


def check_protocol(version: int) -> None:
    """Raise `EngineError` for another version, which was installed while this one ran."""
    if version != PROTOCOL:
        raise EngineError(
            f"the worker speaks version {version} of the protocol and its front version {PROTOCOL}: paceline was "
            "changed on disk while it ran; start the program anew"
        )
