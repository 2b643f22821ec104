"""Keyword arguments as TypedDicts, by which type checkers and editors know them, and signatures that `help` shows.

The types below the line are written by `python tools/write_keywords.py` from `SamplingParams`, `RequestOptions`, `EngineConfig`,
`ContextOptions`, `Model.load` and the tables of `engine.arguments`, which sort keywords. To add an option:

1. Add the field, its check and its documentation to the record. If it takes more types than it keeps, annotate it with
   `Annotated[kept, accepted]`; `int`, `float` and tuples need no such annotation.
2. Run `python tools/write_keywords.py`.

Keywords of chats alone are in `chat_client.chat_arguments.ChatOwnKeywords`. Methods take the TypedDict of their kind, such as
`**options: Unpack[GenerateKeywords]`, below `with_keywords`. Every option takes None: its default, or no limit for max_tokens.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    Never,
    Protocol,
    SupportsIndex,
    TypeAlias,
    TypedDict,
    TypeVar,
    get_overloads,
)


class IntArray(Protocol):
    """An array of integers, for example NumPy's."""

    @property
    def ndim(self) -> int: ...  # noqa: D102 - NumPy's
    def tolist(self) -> object: ...  # noqa: D102 - likewise


# No Any is among the types: an Any in `**options` would hide the result of an overload from mypy.
if TYPE_CHECKING:
    import numpy as np

    Int: TypeAlias = int | SupportsIndex
    Float: TypeAlias = float | np.float32 | np.float16 | SupportsIndex
else:  # NumPy takes a tenth of a second to import
    Int, Float = int, float
TokenIds: TypeAlias = Sequence[Int] | IntArray

_F = TypeVar("_F", bound=Callable[..., Any])
_ALIAS = re.compile(r"\b(Int|Float)\b")  # shown as int and float


def with_keywords(*sources: Callable[..., Any], **defaults: object) -> Callable[[_F], _F]:
    """Decorate a function with a last parameter `**options: Unpack[NAME]`: its signature shows the keywords of the TypedDict.

    Args:
        sources: Records and functions; their parameters have the defaults of the keywords.
        **defaults: Defaults that differ from the defaults of the sources. A keyword without any default shows None.
    """

    def decorate(function: _F) -> _F:
        signature = inspect.signature(function)
        *own, options = _with_types_of_overloads(function, signature)
        table = function.__globals__[options.annotation.removeprefix("Unpack[").removesuffix("]")]
        shown = [
            parameter.replace(default=defaults[parameter.name]) if parameter.name in defaults else parameter
            for parameter in _parameters(table, sources)
        ]
        function.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
        return function

    return decorate


def _with_types_of_overloads(function: Callable[..., Any], signature: inspect.Signature) -> list[inspect.Parameter]:
    """Return the parameters of a function. A parameter that is Any has the types that its overloads take."""
    overloads = [overload.__annotations__ for overload in get_overloads(function)]
    shown = []
    for parameter in signature.parameters.values():
        taken = [of_overload[parameter.name] for of_overload in overloads if parameter.name in of_overload]
        if parameter.annotation == "Any" and taken:
            types = dict.fromkeys(kind for annotation in taken for kind in _members(annotation))
            types |= {"None": types.pop("None")} if "None" in types else {}  # comes last
            parameter = parameter.replace(annotation=" | ".join(types))  # noqa: PLW2901 - the same parameter
        shown.append(parameter)
    return shown


def _members(annotation: str) -> list[str]:
    """Return the types of a union, each as it is written."""
    node = ast.parse(annotation, mode="eval").body
    members: list[str] = []
    while isinstance(node, ast.BinOp):
        members.append(ast.unparse(node.right))
        node = node.left
    return [ast.unparse(node), *reversed(members)]


def set_constructor(record: type, table: type) -> None:
    """Show the keywords of a TypedDict as the signature of a dataclass."""
    record.__signature__ = inspect.Signature(_parameters(table, (record,)))  # type: ignore[attr-defined]


@functools.cache
def _parameters(table: type, sources: tuple[Callable[..., Any], ...]) -> list[inspect.Parameter]:
    """Return a parameter for each keyword of a TypedDict, with its default."""
    defaults = {name: default for source in sources for name, default in _defaults(source).items()}
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(name),
            annotation=_ALIAS.sub(lambda found: found[0].lower(), getattr(hint, "__forward_arg__", str(hint))),
        )
        for name, hint in table.__annotations__.items()
    ]


def _defaults(source: Callable[..., Any]) -> dict[str, Any]:
    if dataclasses.is_dataclass(source):
        return {field.name: field.default for field in dataclasses.fields(source)}
    return {parameter.name: parameter.default for parameter in inspect.signature(source).parameters.values()}


# ---- written by `python tools/write_keywords.py`; do not edit


class PlainSamplingKeywords(TypedDict, total=False):
    """Fields of `SamplingParams`, but for those of `params.SamplingKeywords`."""

    max_tokens: Int | None
    temperature: Float | None
    dynatemp_range: Float | None
    dynatemp_exponent: Float | None
    top_k: Int | None
    top_p: Float | None
    min_p: Float | None
    typical_p: Float | None
    top_n_sigma: Float | None
    xtc_probability: Float | None
    xtc_threshold: Float | None
    mirostat: Int | None
    mirostat_tau: Float | None
    mirostat_eta: Float | None
    adaptive_target: Float | None
    adaptive_decay: Float | None
    repeat_penalty: Float | None
    frequency_penalty: Float | None
    presence_penalty: Float | None
    penalty_last_n: Int | None
    dry_multiplier: Float | None
    dry_base: Float | None
    dry_allowed_length: Int | None
    dry_penalty_last_n: Int | None
    dry_sequence_breakers: Sequence[str] | None
    logit_bias: Mapping[int, Float] | Sequence[tuple[Int, Float]] | None
    samplers: Sequence[str] | None
    seed: Int | None
    stop: Sequence[str] | str | None
    stop_token_ids: TokenIds | None
    ignore_eos: bool | None
    min_tokens: Int | None
    max_repetition: Int | None
    n: Int | None
    logprobs: Int | None
    logprobs_mode: Literal["raw", "sampled"] | None
    prompt_logprobs: Int | None
    prompt_logprobs_start: Int | None
    grammar: str | None
    grammar_root: str | None
    grammar_prefix: str | None
    grammar_lazy: bool | None
    json_schema: Mapping[str, object] | str | bool | None
    disable_any_whitespace: bool | None
    regex: str | None
    choice: Sequence[str] | None
    lark: str | None
    constraint: object
    logits_processors: Sequence[Callable[[Never, Never], object] | str] | None
    allowed_token_ids: TokenIds | None
    bad_words: Sequence[str] | None


class ChatRequestKeywords(TypedDict, total=False):
    """Fields of `RequestOptions` that a chat takes."""

    priority: Int | None
    queue_timeout_s: Float | None
    ttft_timeout_s: Float | None
    timeout_s: Float | None
    lora: Mapping[str, Float] | tuple[tuple[str, Float], ...] | None
    special: bool | None
    cache_prompt: bool | None
    speculation: bool | None
    max_draft: Int | None
    tenant: str | None
    tenant_weight: Float | None
    cache_salt: str | None
    request_id: str | None
    traceparent: str | None


class GenerateRequestKeywords(ChatRequestKeywords, total=False):
    """Fields of `RequestOptions` that a completion takes."""

    truncate: Literal["left", "right", "middle"] | None
    add_special: bool | None
    parse_special: bool | None
    suffix: str | None
    preserved_tokens: Sequence[Int] | None


class ReadingKeywords(TypedDict, total=False):
    """Fields of `RequestOptions` that concern streams."""

    interval: Int | None
    max_buffered_tokens: Int | None
    slow_reader: Literal["pause", "cancel"] | None


class RequestKeywords(GenerateRequestKeywords, ReadingKeywords, total=False):
    """Fields of `RequestOptions`."""


class RerankKeywords(TypedDict, total=False):
    """Options of reranking."""

    queue_timeout_s: Float | None
    timeout_s: Float | None
    truncate: Literal["left", "right", "middle"] | None
    request_id: str | None


class EmbedKeywords(RerankKeywords, total=False):
    """Options of embedding and classifying."""

    add_special: bool | None
    parse_special: bool | None
    tenant: str | None
    cache_salt: str | None


class ScoreKeywords(TypedDict, total=False):
    """Options of scoring choices."""

    priority: Int | None
    queue_timeout_s: Float | None
    timeout_s: Float | None
    lora: Mapping[str, Float] | tuple[tuple[str, Float], ...] | None
    add_special: bool | None
    parse_special: bool | None
    cache_prompt: bool | None
    tenant: str | None
    tenant_weight: Float | None
    cache_salt: str | None
    request_id: str | None


class PrefixKeywords(TypedDict, total=False):
    """Options of saving and loading prefixes."""

    lora: Mapping[str, Float] | tuple[tuple[str, Float], ...] | None
    add_special: bool | None
    parse_special: bool | None
    tenant: str | None
    cache_salt: str | None


class EngineKeywords(TypedDict, total=False):
    """Fields of `EngineConfig` that take no objects."""

    num_slots: Int | None
    chunk_size: Int | None
    max_draft: Int | None
    min_draft: Int | None
    itl_target_ms: Float | None
    max_tick_ms: Float | None
    max_queue: Int | None
    max_queue_tokens: Int | None
    when_full: Literal["wait", "refuse"] | None
    max_embedding_tokens: Int | None
    isolation: Literal["thread", "process"] | None
    on_engine_death: Literal["replay", "fail"] | None
    max_restarts: Int | None
    hang_timeout_s: Float | None
    rpc: str | Sequence[str] | None
    rpc_timeout_s: Float | None
    trace: str | os.PathLike[str] | None
    trace_max_bytes: Int | None
    sleep_idle_s: Float | None
    fit: bool | None
    fit_target_bytes: Int | Sequence[Int] | None
    fit_ctx: Int | None
    fit_cache_bytes: Int | None
    cache_prompt: bool | None
    host_cache_bytes: Int | None
    mmproj: str | os.PathLike[str] | bool | None
    mmproj_offload: bool | None
    image_min_tokens: Int | None
    image_max_tokens: Int | None
    media_cache_bytes: Int | None
    state_folder: str | os.PathLike[str] | None
    disk_cache: str | os.PathLike[str] | None
    disk_cache_bytes: Int | None


class EngineConfigKeywords(EngineKeywords, total=False):
    """Fields of `EngineConfig`."""

    strategy: object
    speculation: object


class ModelKeywords(TypedDict, total=False):
    """Options of `Model.load` that `LLM` takes."""

    n_gpu_layers: Int | None
    devices: Sequence[str] | None
    split_mode: Literal["none", "layer", "row", "tensor"] | None
    tensor_split: Sequence[Float] | None
    main_gpu: Int | None
    load_mode: Literal["auto", "none", "mmap", "mlock", "mmap_mlock", "direct_io"] | None
    check_tensors: bool | None
    use_extra_bufts: bool | None
    packed_cache: str | os.PathLike[str] | None
    kv_overrides: Mapping[str, bool | Int | Float | str] | None
    tensor_overrides: Mapping[str, str] | None
    cpu_moe: bool | None
    n_cpu_moe: Int | None
    n_cpu_ffn: Int | None
    progress: Callable[[float], object] | None
    cancel: threading.Event | None


class SharedContextKeywords(TypedDict, total=False):
    """Options of a context that `LLM` and `Embedder` take."""

    n_threads: Int | None
    n_threads_batch: Int | None
    rope_scaling: Literal["none", "linear", "yarn", "longrope"] | None
    rope_freq_base: Float | None
    rope_freq_scale: Float | None
    yarn_ext_factor: Float | None
    yarn_attn_factor: Float | None
    yarn_beta_fast: Float | None
    yarn_beta_slow: Float | None
    yarn_orig_ctx: Int | None
    flash_attn: Literal["auto", "on", "off"] | None
    type_k: str | None
    type_v: str | None
    offload_kqv: bool | None
    op_offload: bool | None
    swa_full: bool | None
    max_rollback: Int | None


class EngineContextKeywords(SharedContextKeywords, total=False):
    """Options of a context that `LLM` takes."""

    n_ctx: Int | None
    n_batch: Int | None
    n_ubatch: Int | None


class EmbedderKeywords(SharedContextKeywords, total=False):
    """Options of a context that `Embedder` takes."""

    attention: Literal["causal", "non_causal"] | None
    kv_unified: bool | None


class ContextKeywords(EngineContextKeywords, total=False):
    """Fields of `ContextOptions`."""

    n_seq_max: Int | None
    n_outputs_max: Int | None
    attention: Literal["causal", "non_causal"] | None
    kv_unified: bool | None
    embeddings: bool | None
    pooling: Literal["none", "mean", "cls", "last", "rank"] | None
