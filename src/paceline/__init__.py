"""paceline: an LLM engine for Python on llama.cpp.

Names are imported when they are first used, so that `import paceline` loads neither the native core nor a model.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.errors import (
    Aborted,
    AccessDenied,
    AdapterError,
    AdapterFileForbidden,
    AdapterFileNotFound,
    AdapterInUse,
    AdapterNotFound,
    BatchError,
    Cancelled,
    CapacityError,
    ChatParseError,
    Closed,
    DeadlineExceeded,
    DecodeError,
    DiskFull,
    DownloadError,
    DrafterError,
    EngineDied,
    EngineError,
    EngineStopped,
    GrammarError,
    HubUnavailable,
    InvalidParams,
    InvalidType,
    ModelChanged,
    ModelError,
    ModelFileForbidden,
    ModelFileNotFound,
    ModelLoadError,
    ModelNotFound,
    ModelNotLoaded,
    ModelsBusy,
    ModelUnloaded,
    NoKvSlot,
    NotEnoughMemory,
    NoTokenAllowed,
    PacelineError,
    PromptTooLong,
    QueueFull,
    RequestError,
    ResponseModelError,
    RpcServerUnavailable,
    SamplingError,
    StateError,
    StrategyError,
    TemplateError,
    TextTooLong,
    TraceError,
    Unsupported,
    WorkerUnresponsive,
)

if TYPE_CHECKING:
    from paceline.async_llm import AsyncLLM
    from paceline.chat_client.chat_call import ChatReply
    from paceline.chat_client.chat_streams import AsyncChatStream, ChatStream
    from paceline.chat_client.conversations import AsyncConversation, Conversation
    from paceline.chat_client.function_tools import FunctionTool
    from paceline.chat_client.request_batch import BatchResult
    from paceline.demo import demo_draft_model_path, demo_model_path, demo_vision_model_path
    from paceline.engine.memory_needs import estimate_memory
    from paceline.llm import LLM
    from paceline.media import Audio, Image
    from paceline.model_manager import AsyncModelManager, ModelEntry, ModelManager, ModelStatus
    from paceline.observability.metrics import Instrument
    from paceline.output import TextPipe
    from paceline.params import CallGrammar, PatternTrigger, SamplingParams, ThinkingParams
    from paceline.request import RequestOptions
    from paceline.runtime import (
        Context,
        DeviceMemory,
        Embedder,
        MemoryEstimate,
        Model,
        QuantizedModel,
        Sampler,
        TensorTypeUse,
        Tokenizer,
        quantize,
    )
    from paceline.scheduling.records import EndRecord, RequestRecord, TickRecord
    from paceline.scheduling.strategies import BatchStrategy, SchedulerView, TokenAllocation
    from paceline.speculation.drafter import BatchDrafter, Drafter, SharingDrafter
    from paceline.speculation.drafters.ngram import NgramDrafter
    from paceline.streaming import (
        AsyncBatchStream,
        AsyncStream,
        BatchStream,
        FinishReason,
        Stream,
        StreamChannel,
        StreamChunk,
        TokenLogprobs,
        TokenText,
        Usage,
    )
    from paceline.streaming.chunk import Choice, ChoiceScore, Classification, Completion, Score

    __version__: str

_MODULES: dict[str, tuple[str, ...]] = {
    "paceline.async_llm": ("AsyncLLM",),
    "paceline.chat_client.chat_call": ("ChatReply",),
    "paceline.chat_client.chat_streams": ("AsyncChatStream", "ChatStream"),
    "paceline.chat_client.conversations": ("AsyncConversation", "Conversation"),
    "paceline.chat_client.function_tools": ("FunctionTool",),
    "paceline.chat_client.request_batch": ("BatchResult",),
    "paceline.demo": ("demo_draft_model_path", "demo_model_path", "demo_vision_model_path"),
    "paceline.engine.memory_needs": ("estimate_memory",),
    "paceline.llm": ("LLM",),
    "paceline.media": ("Audio", "Image"),
    "paceline.model_manager": ("AsyncModelManager", "ModelEntry", "ModelManager", "ModelStatus"),
    "paceline.observability.metrics": ("Instrument",),
    "paceline.output": ("TextPipe",),
    "paceline.params": ("CallGrammar", "PatternTrigger", "SamplingParams", "ThinkingParams"),
    "paceline.request": ("RequestOptions",),
    "paceline.runtime": (
        "Context",
        "DeviceMemory",
        "Embedder",
        "MemoryEstimate",
        "Model",
        "QuantizedModel",
        "Sampler",
        "TensorTypeUse",
        "Tokenizer",
        "quantize",
    ),
    "paceline.scheduling.records": ("EndRecord", "RequestRecord", "TickRecord"),
    "paceline.scheduling.strategies": ("BatchStrategy", "SchedulerView", "TokenAllocation"),
    "paceline.speculation.drafter": ("BatchDrafter", "Drafter", "SharingDrafter"),
    "paceline.speculation.drafters.ngram": ("NgramDrafter",),
    "paceline.streaming": (
        "AsyncBatchStream",
        "AsyncStream",
        "BatchStream",
        "FinishReason",
        "Stream",
        "StreamChannel",
        "StreamChunk",
        "TokenLogprobs",
        "TokenText",
        "Usage",
    ),
    "paceline.streaming.chunk": ("Choice", "ChoiceScore", "Classification", "Completion", "Score"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

_NAMES_ELSEWHERE = {  # in other packages
    "AsyncEngineArgs": "the options of AsyncLLM",
    "AsyncLLMEngine": "AsyncLLM",
    "EngineArgs": "the options of LLM",
    "GuidedDecodingParams": "json_schema, regex, choice or grammar of SamplingParams",
    "LLMEngine": "LLM",
    "Llama": "LLM",
    "LlamaGrammar": "grammar of SamplingParams",
    "LoRARequest": "lora={name: scale} of a request, with LLM(lora={name: path})",
    "RequestOutput": "Completion",
    "StructuredOutputsParams": "json_schema, regex, choice or grammar of SamplingParams",
}

__all__ = [  # noqa: RUF022 - sorted as sorted() does
    "Aborted",
    "AccessDenied",
    "AdapterError",
    "AdapterFileForbidden",
    "AdapterFileNotFound",
    "AdapterInUse",
    "AdapterNotFound",
    "AsyncBatchStream",
    "AsyncChatStream",
    "AsyncConversation",
    "AsyncLLM",
    "AsyncModelManager",
    "AsyncStream",
    "Audio",
    "BatchDrafter",
    "BatchError",
    "BatchResult",
    "BatchStrategy",
    "BatchStream",
    "CallGrammar",
    "Cancelled",
    "CapacityError",
    "ChatParseError",
    "ChatReply",
    "ChatStream",
    "Choice",
    "ChoiceScore",
    "Classification",
    "Closed",
    "Completion",
    "Context",
    "Conversation",
    "DeadlineExceeded",
    "DecodeError",
    "DeviceMemory",
    "DiskFull",
    "DownloadError",
    "Drafter",
    "DrafterError",
    "Embedder",
    "EndRecord",
    "EngineDied",
    "EngineError",
    "EngineStopped",
    "FinishReason",
    "FunctionTool",
    "GrammarError",
    "HubUnavailable",
    "Image",
    "Instrument",
    "InvalidParams",
    "InvalidType",
    "LLM",
    "MemoryEstimate",
    "Model",
    "ModelChanged",
    "ModelEntry",
    "ModelError",
    "ModelFileForbidden",
    "ModelFileNotFound",
    "ModelLoadError",
    "ModelManager",
    "ModelNotFound",
    "ModelNotLoaded",
    "ModelStatus",
    "ModelUnloaded",
    "ModelsBusy",
    "NgramDrafter",
    "NoKvSlot",
    "NoTokenAllowed",
    "NotEnoughMemory",
    "PacelineError",
    "PatternTrigger",
    "PromptTooLong",
    "QuantizedModel",
    "QueueFull",
    "RequestError",
    "RequestOptions",
    "RequestRecord",
    "ResponseModelError",
    "RpcServerUnavailable",
    "Sampler",
    "SamplingError",
    "SamplingParams",
    "SchedulerView",
    "Score",
    "SharingDrafter",
    "StateError",
    "StrategyError",
    "Stream",
    "StreamChannel",
    "StreamChunk",
    "TemplateError",
    "TensorTypeUse",
    "TextPipe",
    "TextTooLong",
    "ThinkingParams",
    "TickRecord",
    "TokenAllocation",
    "TokenLogprobs",
    "TokenText",
    "Tokenizer",
    "TraceError",
    "Unsupported",
    "Usage",
    "WorkerUnresponsive",
    "__version__",
    "demo_draft_model_path",
    "demo_model_path",
    "demo_vision_model_path",
    "estimate_memory",
    "quantize",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if name == "__version__":
        from importlib.metadata import version

        value = version("paceline")
    elif home is None:
        hint = f"; use {_NAMES_ELSEWHERE[name]}" if name in _NAMES_ELSEWHERE else ""
        raise AttributeError(f"module 'paceline' has no attribute {name!r}{hint}")
    else:
        value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
