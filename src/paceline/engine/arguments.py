"""What callers write as keywords, sorted: sampling, request options, engine, model and context."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from paceline import validation
from paceline.config import CONFIG_NAMES, EngineConfig
from paceline.errors import InvalidParams, InvalidType
from paceline.params import FIELDS, SamplingParams
from paceline.request import MAX_INTERVAL, OPTION_NAMES, RequestOptions
from paceline.scheduling.named_strategy import check_strategy_name
from paceline.streaming import StreamChannel

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
        "kv_overrides",
        "progress",
        "cancel",
    )
)
# Context options that follow from the engine's own.
_DERIVED = frozenset({"n_seq_max", "n_outputs_max", "embeddings", "pooling", "kv_unified", "attention"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineArguments:
    """The keywords of `LLM` and `AsyncLLM`, by whom they are for."""

    config: EngineConfig
    model: Mapping[str, Any]
    context: Mapping[str, Any]
    lora: Any
    instruments: Any


def engine_arguments(options: Mapping[str, Any]) -> EngineArguments:
    """Sorts them. Raises `InvalidType`, a `TypeError`, for an unknown one, with the nearest that is known."""
    from paceline.runtime.context_options import ContextOptions

    context_names = ContextOptions.names() - _DERIVED
    others = {"lora", "instruments"}
    known = CONFIG_NAMES | _MODEL_NAMES | context_names | others
    validation.reject_unknown(options, known, "LLM, EngineConfig, Model.load and ContextOptions")
    config = EngineConfig(**_only(options, CONFIG_NAMES))
    check_strategy_name(config.strategy)
    return EngineArguments(
        config=config,
        model=_only(options, _MODEL_NAMES),
        context=_only(options, context_names),
        lora=options.get("lora", ()),
        instruments=_instruments(options.get("instruments", ())),
    )


def request_arguments(
    defaults: SamplingParams, params: SamplingParams | None, options: Mapping[str, Any]
) -> tuple[SamplingParams, RequestOptions]:
    """Return the keywords of a request. Sampling keywords change `params`, or `defaults` where there are none."""
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidType(f"params must be SamplingParams, not {type(params).__name__}")
    validation.reject_unknown(options, frozenset(FIELDS) | OPTION_NAMES, "SamplingParams and RequestOptions")
    base = defaults if params is None else params
    sampling = _only(options, FIELDS)
    return base.replace(**sampling) if sampling else base, RequestOptions(**_only(options, OPTION_NAMES))


def streamed_arguments(
    defaults: SamplingParams,
    params: SamplingParams | None,
    options: Mapping[str, Any],
    channel: StreamChannel | None,
) -> tuple[SamplingParams, RequestOptions]:
    """As `request_arguments`, for a request that is read through a channel which the caller made, if there is one.

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
    if "interval" in options and rest.interval != own:
        raise InvalidParams(
            f"interval is {rest.interval} among the request's options and {own} on its channel; give it in one place"
        )
    return sampling, dataclasses.replace(rest, interval=own)


def check_channel(channel: object) -> None:
    """Raise `InvalidType` or `InvalidParams` if this is not a channel that can be attached to a request."""
    if channel is None:
        return
    if not isinstance(channel, StreamChannel):
        raise InvalidType(f"channel must be a StreamChannel, not {type(channel).__name__}")
    channel.check_new()


def collected_arguments(
    defaults: SamplingParams, params: SamplingParams | None, options: Mapping[str, Any]
) -> tuple[SamplingParams, RequestOptions]:
    """As `request_arguments`, for a completion that is only read at its end: no chunk wakes a reader, no reader is slow."""
    for name in _READING_NAMES:
        if name in options:
            raise InvalidParams(f"{name} means nothing where the answer is collected at its end; use stream")
    return request_arguments(defaults, params, {**options, "interval": MAX_INTERVAL})


def _instruments(given: object) -> Any:
    """Return a sequence, which may be read twice; `Instruments` checks its members."""
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise InvalidType(f"instruments must be a list of Instrument objects, not {given!r:.80}")
    return given


def _only(options: Mapping[str, Any], names: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in names}
