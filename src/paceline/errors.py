"""All errors that paceline raises, as one tree.

    PacelineError
    ├── RequestError: the call is wrong, and the same call will fail again
    │   ├── InvalidParams (also a ValueError) ── InvalidType (also a TypeError)
    │   ├── PromptTooLong, TextTooLong, GrammarError, TemplateError, ChatParseError, ResponseModelError, BatchError, TraceError
    │   └── ModelNotFound, ModelNotLoaded, AccessDenied, AdapterNotFound, Unsupported
    ├── CapacityError: there is no room now; try later, or with less
    │   └── NotEnoughMemory, NoKvSlot, QueueFull, ModelsBusy, AdapterInUse, DiskFull, HubUnavailable
    ├── EngineError: the call was valid, and the engine failed
    │   ├── SamplingError ── NoTokenAllowed
    │   ├── EngineStopped ── ModelChanged, ModelUnloaded
    │   ├── DecodeError, Aborted, StrategyError, DrafterError, EngineDied, WorkerUnresponsive, RpcServerUnavailable
    │   └── Cancelled, DeadlineExceeded, Closed
    └── ModelError: a file is wrong
        ├── ModelLoadError ── ModelFileNotFound (also a FileNotFoundError), ModelFileForbidden (also a PermissionError)
        ├── AdapterError ── AdapterFileNotFound (also a FileNotFoundError), AdapterFileForbidden (also a PermissionError)
        └── DownloadError, StateError

Each class has a stable `code` for programs: its name in snake case. The message names the field, the value and the way out.
The native core raises these by their class name.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from typing import Any, ClassVar


class PacelineError(Exception):
    """Base class of all errors of paceline. `code` is a stable name for programs."""

    code: ClassVar[str] = "paceline_error"

    def __init_subclass__(cls, **options: Any) -> None:
        """Set the code: the name of the class in snake case. A class of another package has the code of its base."""
        super().__init_subclass__(**options)
        if cls.__module__ == __name__:
            cls.code = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


class RequestError(PacelineError):
    """The call cannot be served as it is; the same call will fail again."""


class InvalidParams(RequestError, ValueError):
    """A parameter has a value out of its range."""


class InvalidType(InvalidParams, TypeError):
    """A parameter has the wrong type (a bool is not an int), or an option is unknown."""


class PromptTooLong(RequestError):
    """The prompt has more tokens than the context can hold.

    Attributes:
        num_tokens: Tokens of the prompt; None if not known.
        max_tokens: Tokens that fit; None if not known.
        is_counted: False if `num_tokens` is a lower bound, of a prompt that was refused before it was tokenised.
    """

    def __init__(
        self, message: str, num_tokens: int | None = None, max_tokens: int | None = None, is_counted: bool = True
    ) -> None:
        super().__init__(message)
        self.num_tokens, self.max_tokens, self.is_counted = num_tokens, max_tokens, is_counted


class TextTooLong(RequestError):
    """The text is longer than the tokenizer can take in one piece."""


class GrammarError(RequestError, ValueError):
    """The grammar does not parse, or exceeds the limits on grammars."""


class TemplateError(RequestError, ValueError):
    """The chat template does not parse, refuses the conversation, fails, or takes more time or memory than it may."""


class ChatParseError(RequestError, ValueError):
    """The generated text is not of the chat format that its prompt asked for; the text itself is the content then."""


class ResponseModelError(RequestError, ValueError):
    """A reply is no instance of the response_model that its chat asked for: it was cut off, or its content does not match.

    Attributes:
        text: The content that was generated.
        reply: The whole `ChatReply`; None if it is not known.
    """

    def __init__(self, message: str, text: str = "", reply: object = None) -> None:
        super().__init__(message)
        self.text, self.reply = text, reply


class Unsupported(RequestError):
    """This model, its kind of memory or this build does not support the request."""


class BatchError(RequestError):
    """Some prompts or conversations of a list failed; raised after all of them ended.

    Whether the call was wrong or can work later depends on the errors among the outcomes, not on this class.

    Attributes:
        outcomes: The `Completion`, in a chat the `ChatReply`, or the error of each prompt, in order.
    """

    def __init__(self, message: str, outcomes: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.outcomes: tuple[Any, ...] = tuple(outcomes)


class TraceError(RequestError, ValueError):
    """The file is not a trace of an engine, is damaged, or was written by an unknown version."""


class ModelNotFound(RequestError):
    """There is no repository, file, quantisation, cached or managed model of that name; the message has the nearest names."""


class ModelNotLoaded(RequestError):
    """The model is known but not loaded, and the request asked not to load it."""


class AccessDenied(RequestError):
    """The repository is gated or private, and there is no token, or one that may not read it."""


class AdapterNotFound(RequestError):
    """No LoRA adapter of that name is loaded."""


class CapacityError(PacelineError):
    """There is no room now; a smaller request, or the same one later, can work."""


class NotEnoughMemory(CapacityError):
    """The model, context or batch does not fit into the memory of this machine."""


class NoKvSlot(CapacityError):
    """The KV cache has no free cells for this batch; nothing was changed."""


class QueueFull(CapacityError):
    """The queue is full; the request was not queued."""


class ModelsBusy(CapacityError):
    """A model waited too long for room: the loaded models were in use, or pinned."""


class AdapterInUse(CapacityError):
    """Requests that use a LoRA adapter did not end in time, so it was not unloaded."""


class DiskFull(CapacityError):
    """The disk has no space for a download; the received part is kept, and the next attempt continues it."""


class HubUnavailable(CapacityError):
    """The hub or a web server cannot be reached, is overloaded, or broke off; the received part is kept."""


class EngineError(PacelineError):
    """A valid call failed in the engine."""


class DecodeError(EngineError):
    """llama.cpp could not compute a valid batch; every row is back in its previous state."""


class Aborted(EngineError):
    """The call was stopped from another thread; every row is back in its previous state."""


class SamplingError(EngineError):
    """No token can be drawn: every token is masked, or the logits hold NaN."""


class NoTokenAllowed(SamplingError):
    """No token may come next: masks, bans and grammar together leave none."""


class StrategyError(EngineError):
    """A batch strategy failed or returned an invalid plan; the message names it."""


class DrafterError(EngineError):
    """A drafter failed or proposed an invalid token; the message names it."""


class EngineStopped(EngineError):
    """The engine was shut down or is shutting down; it accepts no requests."""


class ModelUnloaded(EngineStopped):
    """The model was unloaded while the request ran, or while it waited for the model."""


class ModelChanged(EngineStopped):
    """A file of the model was replaced while the engine had it, so a new worker would have loaded another model."""


class EngineDied(EngineError):
    """The worker process died: the request made it crash, or it crashed for any reason and requests are not replayed.

    Attributes:
        signal: Name of the signal that ended the worker; None if it exited.
        last_words: The end of its output to stderr, for example llama.cpp's reason.
    """

    def __init__(self, message: str, signal: str | None = None, last_words: str = "") -> None:
        super().__init__(message)
        self.signal, self.last_words = signal, last_words


class WorkerUnresponsive(EngineError):
    """The worker process did not reply to a question in time: it computes a long pass, or hangs; try again later."""


class RpcServerUnavailable(EngineError):
    """An RPC server that computes a part of the model cannot be reached, is busy, was lost, or is of another version.

    The message names its address. An engine that has lost one looks for it again and again, and works once it is back.
    """


class Cancelled(EngineError):
    """The request was cancelled before it had a result. Streams report this by their finish reason instead."""


class DeadlineExceeded(EngineError):
    """The request ran out of time before it had a result. Streams report this by their finish reason instead."""


class Closed(EngineError):
    """The object was closed and cannot be used any more."""


class ModelError(PacelineError):
    """A file cannot be used: a model, an adapter or a saved state."""


class ModelLoadError(ModelError):
    """The file is not a model that llama.cpp can load."""


class _OfFile(OSError):
    """Base of errors about a file: `errno` and `filename` of an `OSError`, and a message of its own."""

    _errno: ClassVar[int]

    def __init__(self, message: str, filename: str | None = None) -> None:
        super().__init__(message)
        self.errno, self.filename = self._errno, filename

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.filename)


class ModelFileNotFound(ModelLoadError, _OfFile, FileNotFoundError):
    """There is no file at the path of the model, draft model or projector."""

    _errno = errno.ENOENT


class ModelFileForbidden(ModelLoadError, _OfFile, PermissionError):
    """The file of the model, draft model or projector may not be read by this user."""

    _errno = errno.EACCES


class AdapterError(ModelError):
    """The file is not a LoRA adapter, or not one for this model."""


class AdapterFileNotFound(AdapterError, _OfFile, FileNotFoundError):
    """There is no file at the path of the adapter."""

    _errno = errno.ENOENT


class AdapterFileForbidden(AdapterError, _OfFile, PermissionError):
    """The file of the adapter may not be read by this user."""

    _errno = errno.EACCES


class DownloadError(ModelError):
    """The downloaded file is not the announced file: another checksum or size, or no GGUF file at all."""


class StateError(ModelError):
    """The bytes are not a saved state, are damaged, or belong to another model."""


def named_error(name: str, message: str, filename: str | None = None) -> PacelineError:
    """Return the error of that class name, as another process or the native core names it. filename: of a missing file."""
    kind = globals().get(name)
    if isinstance(kind, type) and issubclass(kind, _OfFile) and issubclass(kind, PacelineError):
        return kind(message, filename)
    made: PacelineError = (
        kind(message) if isinstance(kind, type) and issubclass(kind, PacelineError) else EngineError(message)
    )
    return made
