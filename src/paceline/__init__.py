"""paceline: an LLM engine for Python on llama.cpp.

Names are imported when they are first used, so that `import paceline` loads neither the native core nor a model.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from paceline.errors import CapacityError, EngineError, ModelError, PacelineError, RequestError

if TYPE_CHECKING:
    from paceline.demo import demo_model_path
    from paceline.params import SamplingParams
    from paceline.runtime import Context, Embedder, Model, Sampler, Tokenizer
    from paceline.text import TextPipe

__version__ = _version("paceline")

_HOMES = {
    "Context": "paceline.runtime",
    "Embedder": "paceline.runtime",
    "Model": "paceline.runtime",
    "Sampler": "paceline.runtime",
    "SamplingParams": "paceline.params",
    "TextPipe": "paceline.text",
    "Tokenizer": "paceline.runtime",
    "demo_model_path": "paceline.demo",
}

__all__ = [
    "CapacityError",
    "Context",
    "Embedder",
    "EngineError",
    "Model",
    "ModelError",
    "PacelineError",
    "RequestError",
    "Sampler",
    "SamplingParams",
    "TextPipe",
    "Tokenizer",
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
