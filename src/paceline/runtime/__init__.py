"""llama.cpp as safe Python objects: the low-level API.

Nothing here schedules; one context, one call at a time. Every object frees its memory with `close()`, as a context
manager, or when collected, in any order: what is needed by others lives as long as they do.
"""

from paceline.runtime import ending as _ending
from paceline.runtime import log as _log
from paceline.runtime.adapters import Adapter
from paceline.runtime.build import BuildInfo, build_info
from paceline.runtime.chat_format import ChatFormat, RenderedPrompt
from paceline.runtime.context import Context, Positions
from paceline.runtime.device import Device, available_memory, backend_features, devices, physical_cores, total_memory
from paceline.runtime.embedder import Embedder
from paceline.runtime.masks import MaskSlots
from paceline.runtime.model import MemoryClass, Model
from paceline.runtime.sampler import Sampler
from paceline.runtime.sequence_state import CellState
from paceline.runtime.step import SamplerDraws, StepResult, StepRow, StepRowResult, TopLogprobs
from paceline.runtime.tokenizer import Tokenizer

_log.install()
_ending.install()

__all__ = [
    "Adapter",
    "BuildInfo",
    "CellState",
    "ChatFormat",
    "Context",
    "Device",
    "Embedder",
    "MaskSlots",
    "MemoryClass",
    "Model",
    "Positions",
    "RenderedPrompt",
    "Sampler",
    "SamplerDraws",
    "StepResult",
    "StepRow",
    "StepRowResult",
    "Tokenizer",
    "TopLogprobs",
    "available_memory",
    "backend_features",
    "build_info",
    "devices",
    "physical_cores",
    "total_memory",
]
