"""Every error paceline raises on purpose, as one tree.

    PacelineError
    ├── RequestError          the caller's doing: change the call
    │   ├── InvalidParams     a value is out of its range (also a ValueError)
    │   │   └── InvalidType   a value has the wrong type (also a TypeError)
    │   ├── PromptTooLong     more tokens than the context holds
    │   ├── TextTooLong       text the tokenizer cannot take in one piece
    │   ├── GrammarError      a grammar that does not parse
    │   ├── TemplateError     a chat template that does not parse, or refuses the conversation
    │   ├── BatchError        some of several prompts failed; it has all outcomes
    │   ├── TraceError        not a trace, or a damaged one
    │   └── Unsupported       the model or its memory cannot do this
    ├── CapacityError         try later, or with less
    │   ├── NotEnoughMemory   would not fit into this machine's memory
    │   ├── NoKvSlot          no free cells in the KV cache
    │   └── QueueFull         as many requests wait as may
    ├── EngineError           ours: the call was right
    │   ├── DecodeError       llama.cpp failed on a valid batch
    │   ├── Aborted           a running call was told to stop
    │   ├── SamplingError     no token can be drawn (all masked, or NaN)
    │   ├── StrategyError     a batch strategy planned what cannot be
    │   ├── EngineStopped     the engine takes no requests any more
    │   ├── EngineDied        the engine's process died under the request
    │   ├── Cancelled         the request was cancelled before it had a result
    │   ├── DeadlineExceeded  the request ran out of time before it had a result
    │   └── Closed            the object was closed before
    └── ModelError            the file's
        ├── ModelLoadError    not a model llama.cpp can load
        ├── AdapterError      not an adapter, or not for this model
        └── StateError        not a saved state, damaged, or of another model

`code` is stable and meant for programs; the message is for people and names the field, the value and the way out.
The native core raises these by their class name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class PacelineError(Exception):
    """Base of everything paceline raises on purpose."""

    code: ClassVar[str] = "paceline_error"


class RequestError(PacelineError):
    """The call cannot be served as it is; the same call will fail again."""

    code = "request_error"


class InvalidParams(RequestError, ValueError):
    """A parameter has a value outside of what it may be."""

    code = "invalid_params"


class InvalidType(InvalidParams, TypeError):
    """A parameter has a type it may not have (a bool is no int)."""

    code = "invalid_type"


class PromptTooLong(RequestError):
    """The prompt has more tokens than the context can hold. num_tokens: so many; max_tokens: what fits; None: not told."""

    code = "prompt_too_long"

    def __init__(self, message: str, num_tokens: int | None = None, max_tokens: int | None = None) -> None:
        super().__init__(message)
        self.num_tokens, self.max_tokens = num_tokens, max_tokens


class TextTooLong(RequestError):
    """The text is longer than the tokenizer can take in one piece."""

    code = "text_too_long"


class GrammarError(RequestError, ValueError):
    """The grammar does not parse, or exceeds the limits on grammars."""

    code = "grammar_error"


class TemplateError(RequestError, ValueError):
    """The chat template does not parse, refuses the conversation, fails, or takes more time or memory than it may."""

    code = "template_error"


class Unsupported(RequestError):
    """This model, its memory or this build cannot do what was asked."""

    code = "unsupported"


class BatchError(RequestError):
    """Some of several prompts failed, after all of them ended. `outcomes`: of each prompt its result or its error.

    Whose doing it was, and whether the same call can work later, is said by these errors and not by the class of this one.
    """

    code = "batch_error"

    def __init__(self, message: str, outcomes: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.outcomes = tuple(outcomes)


class TraceError(RequestError, ValueError):
    """The file is no trace of an engine, is damaged, or was written by a version that is not known here."""

    code = "trace_error"


class CapacityError(PacelineError):
    """There is no room now; less of it, or later, can work."""

    code = "capacity_error"


class NotEnoughMemory(CapacityError):
    """What was asked for would not fit into the memory of this machine."""

    code = "not_enough_memory"


class NoKvSlot(CapacityError):
    """The KV cache has no free cells for this batch; nothing was changed."""

    code = "no_kv_slot"


class QueueFull(CapacityError):
    """The engine holds as many requests as it may; nothing was queued."""

    code = "queue_full"


class EngineError(PacelineError):
    """A valid call failed on our side."""

    code = "engine_error"


class DecodeError(EngineError):
    """llama.cpp could not compute a valid batch; every row is back where it was."""

    code = "decode_error"


class Aborted(EngineError):
    """The call was stopped from another thread; every row is back where it was."""

    code = "aborted"


class SamplingError(EngineError):
    """No token can be drawn: every token is masked, or the logits hold NaN."""

    code = "sampling_error"


class StrategyError(EngineError):
    """A batch strategy failed, or planned what cannot be; the message names it."""

    code = "strategy_error"


class EngineStopped(EngineError):
    """The engine was shut down, or is about to be: it takes no requests any more."""

    code = "engine_stopped"


class EngineDied(EngineError):
    """The process that computed the request died: because of it, or, where requests are not replayed, of anything.

    signal: the name of the signal that ended the process, None where it exited. last_words: the end of what it wrote to
    stderr, llama.cpp's reason among it.
    """

    code = "engine_died"

    def __init__(self, message: str, signal: str | None = None, last_words: str = "") -> None:
        super().__init__(message)
        self.signal, self.last_words = signal, last_words


class Cancelled(EngineError):
    """The request was cancelled before it had a result. A stream says so with its finish reason instead."""

    code = "cancelled"


class DeadlineExceeded(EngineError):
    """The request ran out of time before it had a result. A stream says so with its finish reason instead."""

    code = "deadline_exceeded"


class Closed(EngineError):
    """The object was closed and cannot be used any more."""

    code = "closed"


class ModelError(PacelineError):
    """Something about a file: a model, an adapter, a saved state."""

    code = "model_error"


class ModelLoadError(ModelError):
    """The file is not a model that llama.cpp can load."""

    code = "model_load_error"


class AdapterError(ModelError):
    """The file is not a LoRA adapter, or not one for this model."""

    code = "adapter_error"


class StateError(ModelError):
    """The bytes are not a saved state, are damaged, or belong to another model."""

    code = "state_error"
