"""Sorts the keywords of callers into options of engine, model, context, draft model, sampling and requests."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from paceline import validation
from paceline.config import CONFIG_NAMES, EngineConfig
from paceline.engine.adapters import adapter_paths
from paceline.errors import InvalidParams, InvalidType
from paceline.hub import check_is_path, is_reference, parse_reference
from paceline.keywords import (
    EngineContextKeywords,
    EngineKeywords,
    GenerateRequestKeywords,
    ModelKeywords,
    RequestKeywords,
)
from paceline.params import FIELDS, HAS_NONE, NAMES_ELSEWHERE, SamplingKeywords, SamplingParams
from paceline.request import MAX_INTERVAL, OPTION_NAMES, RequestOptions
from paceline.sampling_table import PARAMETERS
from paceline.scheduling.strategies import check_strategy_name
from paceline.speculation.named_drafter import DRAFT_MODEL, check_drafter_name, draft_heads_of, drafter_parts
from paceline.streaming import StreamChannel

if TYPE_CHECKING:
    from paceline.observability.metrics import Instrument
    from paceline.runtime import Model
    from paceline.scheduling.strategies import BatchStrategy
    from paceline.speculation.drafter import BatchDrafter, Drafter

    AnyDrafter: TypeAlias = str | Mapping[str, Any] | Drafter | BatchDrafter

DRAFT_NAMES: Final = frozenset({"draft_model", "draft_options"})
_OWN: Final = frozenset({"p_min", "chunk_size"})
_LEAST_CHUNK, _MOST_CHUNK, USUAL_CHUNK = 16, 4096, 256
_LEAST_SIZES: Final = {"n_ctx": 2, "n_batch": 2}  # the last proposal and a token after it
# Context options that the draft model takes over from the target if they are not set.
_INHERITED: Final = ("n_threads", "n_threads_batch", "flash_attn", "op_offload")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftArguments:
    """The options of a draft model.

    Attributes:
        model: A path, a name, or a `Model`.
        load: Options of its loading.
        context: Options of its context.
        n_ctx: Cells; None: as many as the target has.
        p_min: Tokens that the draft model finds less likely are not proposed.
        chunk_size: Most tokens of a sequence in a tick while it catches up; None: `USUAL_CHUNK`, or the size of a batch.
    """

    model: Any
    load: Mapping[str, Any]
    context: Mapping[str, Any]
    n_ctx: int | None
    p_min: float
    chunk_size: int | None


def draft_arguments(
    options: Mapping[str, Any], model_names: frozenset[str], context_names: frozenset[str]
) -> DraftArguments | None:
    """Return the arguments of the draft model; None without one.

    model_names, context_names: options of loading and of a context. Raises `InvalidParams` and `InvalidType`.
    """
    model, given = options.get("draft_model"), options.get("draft_options")
    _check_named(model, options.get("speculation"))
    if model is None:
        if given:
            raise InvalidParams("draft_options are given, and no draft_model; name one, or leave them out")
        return None
    _check_source(model)
    found = _checked_mapping({} if given is None else given, model_names | context_names | _OWN)
    own = {name: found.pop(name) for name in _OWN if name in found}
    inherited = {name: options[name] for name in _INHERITED if options.get(name) is not None}
    context = {**inherited, **{name: value for name, value in found.items() if name in context_names}}
    _check_sizes(context, own.get("chunk_size"))
    n_ctx = context.pop("n_ctx", None)
    return DraftArguments(
        model=model,
        load={name: value for name, value in found.items() if name in model_names},
        context=context,
        n_ctx=n_ctx,
        p_min=validation.number("draft_options['p_min']", own.get("p_min", 0.0), 0, 1),
        chunk_size=own.get("chunk_size"),
    )


def _check_sizes(context: Mapping[str, Any], chunk_size: Any) -> None:
    for name, least in _LEAST_SIZES.items():
        if context.get(name) is not None:
            validation.integer(f"draft_options[{name!r}]", context[name], least, 2**31 - 256)
    if context.get("max_rollback"):
        raise InvalidParams(
            f"draft_options['max_rollback']={context['max_rollback']!r:.20} has no use: it is for recurrent states, which draft "
            "models cannot have; leave it out"
        )
    if chunk_size is not None:
        validation.integer("draft_options['chunk_size']", chunk_size, _LEAST_CHUNK, _MOST_CHUNK)
        check_chunk(chunk_size, context.get("n_batch"))


def check_chunk(chunk_size: int, n_batch: int | None) -> None:
    """Raise `InvalidParams` if a batch of the draft model is smaller than a chunk. n_batch: None if not known yet."""
    if n_batch is not None and chunk_size > n_batch:
        raise InvalidParams(
            f"draft_options['chunk_size']={chunk_size} is more than a batch of the draft model has, n_batch={n_batch}; lower it, "
            "or raise draft_options['n_batch']"
        )


def with_draft(speculation: Any, options: Mapping[str, Any]) -> Any:
    """Return the option `speculation`, "draft-model" if only a draft model is given."""
    return DRAFT_MODEL if speculation is None and options.get("draft_model") is not None else speculation


def _check_named(model: object, speculation: Any) -> None:
    """Raise `InvalidParams` if only one of draft_model and speculation names a draft model."""
    parts = [] if speculation is None else drafter_parts(speculation)
    is_named = any(
        part == DRAFT_MODEL or (isinstance(part, Mapping) and part.get("name") == DRAFT_MODEL) for part in parts
    )
    if is_named and model is None:
        raise InvalidParams(f"speculation names {DRAFT_MODEL!r}, and there is none; give draft_model=PATH")
    if model is not None and parts and not is_named:
        raise InvalidParams(
            f"draft_model is given, and speculation={speculation!r:.80} does not use it; add {DRAFT_MODEL!r} to speculation, "
            "or leave speculation out"
        )


def _check_source(model: object) -> None:
    try:
        if is_reference(model):
            parse_reference(str(model))
        elif not isinstance(model, (str, os.PathLike)) and type(model).__name__ != "Model":
            raise InvalidType(f"must be a path, a name or a Model, not {model!r:.80}")
        elif isinstance(model, str):
            check_is_path(model)
    except InvalidParams as error:
        raise type(error)(f"draft_model: {error}") from error


def _checked_mapping(given: object, known: frozenset[str]) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise InvalidType(f"draft_options must be a mapping such as {{'n_gpu_layers': 0}}, not {given!r:.80}")
    try:
        validation.reject_unknown(given, known, "Model.load, ContextOptions, p_min and chunk_size")
    except InvalidType as error:
        raise InvalidType(f"draft_options: {error}") from None
    return validation.given(given)


ModelPath: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A path or a name; for a split file also its parts."""

_log = logging.getLogger("paceline.engine")
_T = TypeVar("_T")

_READING_NAMES = ("interval", "max_buffered_tokens", "slow_reader")
_MODEL_NAMES = frozenset(
    (
        "n_gpu_layers",
        "devices",
        "split_mode",
        "tensor_split",
        "main_gpu",
        "load_mode",
        "check_tensors",
        "use_extra_bufts",
        "packed_cache",
        "kv_overrides",
        "tensor_overrides",
        "cpu_moe",
        "n_cpu_moe",
        "n_cpu_ffn",
        "progress",
        "cancel",
    )
)
_OBJECTS = frozenset({"progress", "cancel"})  # among them
# Context options that follow from the engine's own.
_DERIVED = frozenset({"n_seq_max", "n_outputs_max", "embeddings", "pooling", "kv_unified", "attention"})
# Options of requests that generate no text; the model defines how a reranker's pairs are tokenised.
_RERANKING_OPTIONS = frozenset({"queue_timeout_s", "timeout_s", "request_id", "truncate"})
# Tenants do not share encoded images and audio.
_EMBEDDING_OPTIONS = _RERANKING_OPTIONS | {"add_special", "parse_special", "tenant", "cache_salt"}
SCORING_OPTIONS: Final = frozenset(
    {
        "priority", "queue_timeout_s", "timeout_s", "request_id", "lora", "add_special", "parse_special", "cache_prompt",
        "tenant", "tenant_weight", "cache_salt",
    }
)  # fmt: skip
"""Options of scoring choices."""
_PREFIX_OPTIONS = frozenset({"tenant", "cache_salt", "lora", "add_special", "parse_special"})
_NAMES_ELSEWHERE = {  # options of models and engines in other packages: the same option here, or a sentence about it
    "batch_size": "n_batch",
    "block_size": "the KV cache is shared by cells, not by blocks",
    "chat_format": "the parameter is named chat_template",
    "chat_handler": "mmproj",
    "clip_model_path": "mmproj",
    "context_length": "n_ctx",
    "context_window": "n_ctx",
    "cpu_offload_gb": "n_gpu_layers says how many layers a GPU computes; the CPU computes the others",
    "ctx_size": "n_ctx",
    "device": "devices",
    "device_map": "devices",
    "download_dir": "HF_HOME says where the cache of the Hugging Face Hub lies",
    "dtype": "a GGUF file has its types already; type_k and type_v are those of the KV cache",
    "embedding": "any LLM embeds: llm.embed(texts)",
    "enable_chunked_prefill": "prompts are always computed in chunks, of chunk_size tokens at most",
    "enable_lora": "lora",
    "enable_prefix_caching": "cache_prompt",
    "enforce_eager": "leave it out: nothing is compiled when a model loads",
    "gpu_layers": "n_gpu_layers",
    "gpu_memory_utilization": "fit_target_bytes is the memory that the model and its KV cache leave free",
    "kv_cache_dtype": "type_k and type_v are the types of the KV cache",
    "kv_cache_memory_bytes": "fit_cache_bytes",
    "last_n_tokens_size": "penalty_last_n of a request says how far back penalties look",
    "local_files_only": "offline=True looks for the model in the caches alone",
    "logits_all": "logprobs and prompt_logprobs of a request ask for log-probabilities",
    "lora_modules": "lora",
    "lora_path": "lora",
    "low_vram": "n_gpu_layers and offload_kqv say what a GPU keeps",
    "max_context_length": "n_ctx",
    "max_model_len": "n_ctx",
    "max_model_length": "n_ctx",
    "max_num_batched_tokens": "n_batch",
    "max_num_queued_reqs": "max_queue",
    "max_num_queued_tokens": "max_queue_tokens",
    "max_num_seqs": "num_slots",
    "max_seq_len": "n_ctx",
    "model_path": 'the model is the first argument: LLM("model.gguf")',
    "num_batch": "n_batch",
    "num_ctx": "n_ctx",
    "num_gpu": "n_gpu_layers",
    "num_thread": "n_threads",
    "parallel": "num_slots",
    "pooling_type": "pooling of llm.embed() chooses the pooling",
    "quantization": "a GGUF file is quantised already; choose a file, such as hf:USER/REPO:Q4_K_M",
    "repo_id": 'LLM("hf:USER/REPO:QUANT") loads a model of the Hugging Face Hub',
    "revision": 'the name has it: LLM("hf:USER/REPO@REVISION")',
    "rope_scaling_type": "rope_scaling",
    "served_model_name": "--alias of `paceline serve` names the model for clients",
    "spec_model": "draft_model",
    "speculative_config": "speculation, draft_model and max_draft say what proposes tokens, and how many",
    "speculative_model": "draft_model",
    "swap_space": "host_cache_bytes",
    "task": "any LLM generates and embeds; a reranking model reranks",
    "tensor_parallel_size": "all GPUs are used; devices, split_mode and tensor_split choose how",
    "threads": "n_threads",
    "tokenizer": "a GGUF file has its tokenizer, and llm.tokenizer is it",
    "trust_remote_code": "leave it out: no code of a repository is run",
    "use_mlock": 'load_mode="mlock" keeps the weights in memory',
    "use_mmap": 'load_mode="mmap" maps the file, and load_mode="none" reads it',
    "verbose": "the loggers paceline.llama and paceline.engine say more at the level DEBUG",
}
METHODS_ELSEWHERE = {  # of engines in other packages: what to use here
    "beam_search": "generate with n > 1",
    "create_chat_completion": "chat(messages), or stream_chat(messages)",
    "create_completion": "generate(prompt), or stream(prompt)",
    "create_embedding": "embed(texts)",
    "detokenize": "tokenizer.decode(ids)",
    "encode": "tokenizer.encode(text) for token ids, or embed(texts) for vectors",
    "get_tokenizer": "tokenizer",
    "n_ctx": "limits.max_positions",
    "n_vocab": "tokenizer.n_vocab",
    "save_state": "save_prefix(name, prompt)",
    "load_state": "load_prefix(name)",
    "sleep": "the option sleep_idle_s of LLM, or a ModelManager",
    "token_eos": "tokenizer.eos",
    "tokenize": "tokenizer.encode(text)",
    "wake_up": "the option sleep_idle_s of LLM, or a ModelManager",
}
_OF_CHATS = (
    "add_generation_prompt",
    "chat_template",
    "chat_template_kwargs",
    "context_overflow",
    "continue_final_message",
    "max_retries",
    "max_tool_rounds",
    "parallel_tool_calls",
    "reasoning_effort",
    "reasoning_format",
    "response_format",
    "response_model",
    "run_tools",
    "schema_in_prompt",
    "tool_choice",
    "tools",
)


def _hints_at(options: Iterable[str], elsewhere: Mapping[str, str], use: str) -> dict[str, str]:
    """Return hints for options of another call, by their own names and their names in other packages. use: a format of a hint."""
    named = {**elsewhere, **{name: name for name in options}}
    return {name: use.format(hint) if hint in named else hint for name, hint in named.items()}


_USE_OF_CHATS = "it is an option of a chat: llm.chat(messages, {}=...)"
_OF_REQUESTS = _hints_at(_OF_CHATS, {}, _USE_OF_CHATS) | _hints_at(
    (*FIELDS, *OPTION_NAMES), NAMES_ELSEWHERE, "it is an option of a request: llm.generate(prompt, {}=...)"
)


class GenerateKeywords(SamplingKeywords, GenerateRequestKeywords, total=False):
    """Keywords of `LLM.generate`."""


class StreamKeywords(SamplingKeywords, RequestKeywords, total=False):
    """Keywords of `LLM.stream`."""


class LLMKeywords(EngineKeywords, ModelKeywords, EngineContextKeywords, total=False):
    """Keywords of `LLM`."""

    strategy: str | Mapping[str, Any] | BatchStrategy | None
    speculation: AnyDrafter | Sequence[AnyDrafter] | None
    lora: Sequence[str | os.PathLike[str]] | Mapping[str, str | os.PathLike[str]] | None
    draft_model: str | os.PathLike[str] | Model | None
    draft_options: Mapping[str, Any] | None
    instruments: Sequence[Instrument | str] | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineArguments:
    """The keywords of `LLM` and `AsyncLLM`, sorted. draft: None without a draft model. given: the names of all given keywords."""

    config: EngineConfig
    model: Mapping[str, Any]
    context: Mapping[str, Any]
    lora: Any
    instruments: Any
    draft: DraftArguments | None = None
    given: frozenset[str] = frozenset()


def engine_arguments(options: Mapping[str, Any]) -> EngineArguments:
    """Sort the keywords of an engine; None is the default of each.

    Raises `InvalidType`, a `TypeError`, for an unknown keyword, with the nearest known keyword.
    """
    from paceline.runtime.context_options import ContextOptions

    context_names = ContextOptions.names() - _DERIVED
    others = {"lora", "instruments"} | DRAFT_NAMES
    known = CONFIG_NAMES | _MODEL_NAMES | context_names | others
    validation.reject_unknown(
        options, known, "LLM, EngineConfig, Model.load and ContextOptions", _OF_REQUESTS | _NAMES_ELSEWHERE
    )
    options = validation.given(options)
    config = EngineConfig(**_only(options, CONFIG_NAMES))
    check_strategy_name(config.strategy)
    check_drafter_name(config.speculation)
    draft = draft_arguments(options, _MODEL_NAMES - _OBJECTS, context_names)
    config = dataclasses.replace(config, speculation=with_draft(config.speculation, options))
    heads = draft_heads_of(config.speculation)
    has_own_heads = heads is not None and heads.model is None
    adapter_paths(options.get("lora", ()))  # raises for wrong paths
    instruments = options.get("instruments", ())  # a sequence, as it may be read twice
    if isinstance(instruments, (str, bytes)) or not isinstance(instruments, Sequence):
        raise InvalidType(f"instruments must be a list of Instrument objects, not {instruments!r:.80}")
    return EngineArguments(
        config=config,
        model=_only(options, _MODEL_NAMES) | ({"draft_heads": True} if has_own_heads else {}),
        context=_only(options, context_names),
        lora=options.get("lora", ()),
        instruments=instruments,
        draft=draft,
        given=frozenset(options),
    )


@cache
def names_elsewhere() -> dict[str, str]:
    """Return a hint for each name that is an option of another package, of `LLM` or of a chat, but not of a request."""
    from paceline.runtime.context_options import ContextOptions

    of_engine = CONFIG_NAMES | _MODEL_NAMES | ContextOptions.names() | DRAFT_NAMES
    of_engines = _hints_at(of_engine, _NAMES_ELSEWHERE, "it is an option of the engine: LLM(model, {}=...)")
    return of_engines | NAMES_ELSEWHERE | _hints_at(_OF_CHATS, {}, _USE_OF_CHATS)


def refuse_rpc(config: EngineConfig) -> None:
    """Raise `InvalidParams` for RPC servers if the engine computes in this process, which a lost server would end."""
    if config.rpc_addresses:
        raise InvalidParams(
            f'rpc={list(config.rpc_addresses)} needs isolation="process": llama.cpp ends the process that loses a server'
        )


def request_arguments(
    defaults: SamplingParams, params: object, options: Mapping[str, Any]
) -> tuple[SamplingParams, RequestOptions]:
    """Sort the keywords of a request. They change `params`, or `defaults` without params; None changes nothing."""
    if params is not None and not isinstance(params, SamplingParams):
        hint = "; a list of them goes with a list of prompts" if isinstance(params, (list, tuple)) else ""
        raise InvalidType(f"params must be SamplingParams, not {type(params).__name__}{hint}")
    known = frozenset(FIELDS) | OPTION_NAMES
    validation.reject_unknown(options, known, "SamplingParams and RequestOptions", names_elsewhere())
    options = given_options(options)
    base = defaults if params is None else params
    sampling = _only(options, FIELDS)
    return base.replace(**sampling) if sampling else base, RequestOptions(**_only(options, OPTION_NAMES))


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the keywords of a request that are None, as if they were left out, except max_tokens: its None means no limit."""
    return validation.given(options, HAS_NONE)


def streamed_arguments(
    defaults: SamplingParams,
    params: SamplingParams | None,
    options: Mapping[str, Any],
    channel: StreamChannel | None,
) -> tuple[SamplingParams, RequestOptions]:
    """Sort the keywords of a request with a channel that the caller may have made.

    Raises `InvalidParams` if the channel has served a request already, or if the options and the channel have different
    intervals.
    """
    sampling, rest = request_arguments(defaults, params, options)
    if channel is None:
        return sampling, rest
    check_channel(channel)
    own = channel.own_interval
    if own is None:
        return sampling, rest
    if options.get("interval") is not None and rest.interval != own:
        raise InvalidParams(
            f"interval is {rest.interval} among the request's options and {own} on its channel; give it in one place"
        )
    return sampling, dataclasses.replace(rest, interval=own)


def batch_entries(
    params: object, channel: object, num_prompts: int
) -> list[tuple[SamplingParams | None, StreamChannel | None]]:
    """Return the parameters and the channel of each of several prompts.

    Args:
        params: A list with an entry for each prompt, or the parameters of all prompts.
        channel: A list with a channel or None for each prompt; None: no prompt has a channel.
        num_prompts: The number of prompts.

    Raises:
        InvalidType: An entry has the wrong type, or one channel is given for all prompts.
        InvalidParams: A list has another length, a channel was used before, or a channel is in the list twice.
    """
    if isinstance(channel, StreamChannel):
        raise InvalidType(f"channel must be a list with a StreamChannel for each of the {num_prompts} prompts")
    channels, all_params = _per_prompt("channel", channel, num_prompts), _batch_params(params, num_prompts)
    places: dict[int, int] = {}
    for place, given in enumerate(channels):
        check_channel(given, f"channel[{place}]")
        if given is not None and (first := places.setdefault(id(given), place)) < place:
            raise InvalidParams(f"channel[{place}] is channel[{first}], and a channel serves one request")
    return list(zip(all_params, channels, strict=True))


def _batch_params(params: object, num_prompts: int) -> list[SamplingParams | None]:
    all_params = _per_prompt("params", params, num_prompts)
    for place, given in enumerate(all_params):
        if given is not None and not isinstance(given, SamplingParams):
            name = f"params[{place}]" if isinstance(params, Sequence) else "params"
            raise InvalidType(f"{name} must be SamplingParams, not {type(given).__name__}")
    return all_params


def batch_arguments(params: object, num_prompts: int, sort: Callable[[SamplingParams | None], _T]) -> list[_T]:
    """Return the arguments of each of several prompts.

    Args:
        params: A list with an entry for each prompt, or the parameters of all prompts.
        num_prompts: The number of prompts.
        sort: Returns the arguments of a prompt with these parameters; called once for each object.

    Raises:
        InvalidType: An entry has the wrong type.
        InvalidParams: The list has another length, or `sort` raises it.
    """
    all_params = _batch_params(params, num_prompts)
    if not all_params:
        sort(None)  # raises for wrong options
    made = {key: sort(given) for key, given in {id(given): given for given in all_params}.items()}
    return [made[id(given)] for given in all_params]


def _per_prompt(name: str, values: object, num_prompts: int) -> list[Any]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        return [values] * num_prompts
    if len(values) != num_prompts:
        raise InvalidParams(f"{name} must have an entry for each of the {num_prompts} prompts, not {len(values)}")
    return list(values)


def checked_index(request_index: int | None) -> int:
    """Return the caller's number of a request; 0 for None."""
    return 0 if request_index is None else validation.integer("request_index", request_index, 0)


def check_channel(channel: object, name: str = "channel") -> None:
    """Raise `InvalidType` or `InvalidParams` if this is not a channel that can be attached to a request."""
    if channel is None:
        return
    if not isinstance(channel, StreamChannel):
        raise InvalidType(f"{name} must be a StreamChannel, not {type(channel).__name__}")
    channel.check_new()


def collected_arguments(
    defaults: SamplingParams, params: object, options: Mapping[str, Any]
) -> tuple[SamplingParams, RequestOptions]:
    """Sort the keywords of a completion that is read as a whole: no chunk wakes a reader, and no reader is slow."""
    for name in _READING_NAMES:
        if options.get(name) is not None:
            raise InvalidParams(f"{name} has no effect on a completion that is returned whole; use stream")
    return request_arguments(defaults, params, {**options, "interval": MAX_INTERVAL})


def embedding_options(options: Mapping[str, Any]) -> RequestOptions:
    """Return the request options of an embedding. Raises `InvalidType` for an option without a meaning there."""
    validation.reject_unknown(options, _EMBEDDING_OPTIONS)
    return RequestOptions(**options)


def reranking_options(options: Mapping[str, Any]) -> RequestOptions:
    """Return the request options of reranking. Raises `InvalidType` for an option without a meaning there."""
    validation.reject_unknown(options, _RERANKING_OPTIONS)
    return RequestOptions(**options)


def prefix_options(options: Mapping[str, Any]) -> RequestOptions:
    """Return the request options of saving and loading prefixes. Raises `InvalidType` for an option without a meaning there."""
    validation.reject_unknown(options, _PREFIX_OPTIONS)
    return RequestOptions(**options)


def _only(options: Mapping[str, Any], names: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in names}


def sampling_defaults(metadata: Mapping[str, str]) -> SamplingParams:
    """Return the default sampling parameters, with the values of a model's file."""
    return SamplingParams(**model_sampling_params(metadata))


def model_sampling_params(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that a model's file sets. Invalid values are logged and left out."""
    found: dict[str, Any] = {}
    for row in PARAMETERS:
        text = metadata.get(f"general.sampling.{row.gguf}") if row.gguf else None
        if text is None:
            continue
        try:
            value: Any = int(text) if row.kind == "integer" else float(text)
            found[row.name] = getattr(SamplingParams(**{row.name: value}), row.name)
        except (ValueError, InvalidParams) as error:
            _log.warning("the model's general.sampling.%s is ignored: %s", row.gguf, error)
    return found
