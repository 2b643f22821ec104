"""llama.cpp as safe Python objects: the low-level API.

Nothing here schedules; a context runs one call at a time. Every object frees its memory with `close()`, as a context
manager, or when it is collected, in any order: an object keeps its model alive.
"""

# isort: off
from paceline.runtime.compiled_core import CompiledCore, loaded_core  # first, since it loads the core

# isort: on
from paceline.runtime import native_core as _native_core
from paceline.runtime.context import Context, DraftWish, OperationTime, Positions
from paceline.runtime.device import Device, available_memory, backend_features, devices, physical_cores, total_memory
from paceline.runtime.embedder import Embedder
from paceline.runtime.memory import (
    DeviceMemory,
    MemoryEstimate,
    memory_in_use,
    on_empty_machine,
    plan_memory,
    plan_projector,
    projector_weights,
)
from paceline.runtime.model import Adapter, MemoryClass, Model
from paceline.runtime.native_core import BuildInfo, build_info, trim_heap
from paceline.runtime.projector import MediaPart, MediaProjector, decoded_pixels, decoded_samples, num_samples
from paceline.runtime.projector_file import ProjectorFacts, projector_facts
from paceline.runtime.quantisation import QuantizedModel, TensorTypeUse, quantize
from paceline.runtime.sampler import Sampler
from paceline.runtime.sequence_state import CellState
from paceline.runtime.step import MaskSlots, SamplerDraws, StepResult, StepRow, StepRowResult, TopLogprobs
from paceline.runtime.tokenizer import Tokenizer

_native_core.install()

__all__ = [
    "Adapter",
    "BuildInfo",
    "CellState",
    "CompiledCore",
    "Context",
    "Device",
    "DeviceMemory",
    "DraftWish",
    "Embedder",
    "MaskSlots",
    "MediaPart",
    "MediaProjector",
    "MemoryClass",
    "MemoryEstimate",
    "Model",
    "OperationTime",
    "Positions",
    "ProjectorFacts",
    "QuantizedModel",
    "Sampler",
    "SamplerDraws",
    "StepResult",
    "StepRow",
    "StepRowResult",
    "TensorTypeUse",
    "Tokenizer",
    "TopLogprobs",
    "available_memory",
    "backend_features",
    "build_info",
    "decoded_pixels",
    "decoded_samples",
    "devices",
    "loaded_core",
    "memory_in_use",
    "num_samples",
    "on_empty_machine",
    "physical_cores",
    "plan_memory",
    "plan_projector",
    "projector_facts",
    "projector_weights",
    "quantize",
    "total_memory",
    "trim_heap",
]
