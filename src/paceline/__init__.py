"""paceline: an LLM engine for Python on llama.cpp.

Names are imported when they are first used, so that `import paceline` loads neither the native core nor a model.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from paceline.errors import CapacityError, EngineError, ModelError, PacelineError, RequestError

if TYPE_CHECKING:
    from paceline.async_llm import AsyncLLM
    from paceline.completion import Choice, Completion, Score
    from paceline.demo import demo_model_path
    from paceline.llm import LLM
    from paceline.params import SamplingParams
    from paceline.request import RequestOptions
    from paceline.runtime import Context, Embedder, Model, Sampler, Tokenizer
    from paceline.scheduling.instrument import Instrument
    from paceline.scheduling.view import BatchStrategy
    from paceline.streaming import AsyncStream, FinishReason, Stream, StreamChannel, StreamChunk, Usage
    from paceline.text import TextPipe

__version__ = _version("paceline")

_HOMES = {
    "AsyncLLM": "paceline.async_llm",
    "AsyncStream": "paceline.streaming",
    "BatchStrategy": "paceline.scheduling.view",
    "Choice": "paceline.completion",
    "Completion": "paceline.completion",
    "Context": "paceline.runtime",
    "Embedder": "paceline.runtime",
    "FinishReason": "paceline.streaming",
    "Instrument": "paceline.scheduling.instrument",
    "LLM": "paceline.llm",
    "Model": "paceline.runtime",
    "RequestOptions": "paceline.request",
    "Sampler": "paceline.runtime",
    "SamplingParams": "paceline.params",
    "Score": "paceline.completion",
    "Stream": "paceline.streaming",
    "StreamChannel": "paceline.streaming",
    "StreamChunk": "paceline.streaming",
    "TextPipe": "paceline.text",
    "Tokenizer": "paceline.runtime",
    "Usage": "paceline.streaming",
    "demo_model_path": "paceline.demo",
}

__all__ = [  # noqa: RUF022 - sorted as sorted() does
    "AsyncLLM",
    "AsyncStream",
    "BatchStrategy",
    "CapacityError",
    "Choice",
    "Completion",
    "Context",
    "Embedder",
    "EngineError",
    "FinishReason",
    "Instrument",
    "LLM",
    "Model",
    "ModelError",
    "PacelineError",
    "RequestError",
    "RequestOptions",
    "Sampler",
    "SamplingParams",
    "Score",
    "Stream",
    "StreamChannel",
    "StreamChunk",
    "TextPipe",
    "Tokenizer",
    "Usage",
    "__version__",
    "demo_model_path",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
