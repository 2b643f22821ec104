"""llama.cpp as safe Python objects: the low-level API.

Nothing here schedules; a context runs one call at a time. Every object frees its memory with `close()`, as a context
manager, or when it is collected, in any order: objects keep alive what they were made from.
"""

from paceline.runtime import native_core as _native_core
from paceline.runtime.context import Context, Positions
from paceline.runtime.device import Device, available_memory, backend_features, devices, physical_cores, total_memory
from paceline.runtime.embedder import Embedder
from paceline.runtime.memory_estimate import DeviceMemory, MemoryEstimate
from paceline.runtime.memory_plan import memory_in_use, on_empty_machine, plan_memory
from paceline.runtime.model import Adapter, MemoryClass, Model
from paceline.runtime.native_core import BuildInfo, build_info
from paceline.runtime.sampler import Sampler
from paceline.runtime.sequence_state import CellState
from paceline.runtime.step import MaskSlots, SamplerDraws, StepResult, StepRow, StepRowResult, TopLogprobs
from paceline.runtime.tokenizer import Tokenizer

_native_core.install()

__all__ = [
    "Adapter",
    "BuildInfo",
    "CellState",
    "Context",
    "Device",
    "DeviceMemory",
    "Embedder",
    "MaskSlots",
    "MemoryClass",
    "MemoryEstimate",
    "Model",
    "Positions",
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
    "memory_in_use",
    "on_empty_machine",
    "physical_cores",
    "plan_memory",
    "total_memory",
]
