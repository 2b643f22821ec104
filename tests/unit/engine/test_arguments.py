"""Keywords, sorted by their recipient; unknown keywords are refused with the nearest name."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import CONFIG_NAMES, EngineConfig
from paceline.engine.arguments import collected_arguments, engine_arguments, request_arguments
from paceline.errors import InvalidParams, InvalidType
from paceline.observability.metrics import Instrument
from paceline.params import FIELDS, SamplingParams
from paceline.request import OPTION_NAMES, RequestOptions
from paceline.runtime.context_options import ContextOptions


def test_every_keyword_reaches_its_owner() -> None:
    """Engine, model and context options are separated, and none is dropped."""
    arguments = engine_arguments(
        {
            "num_slots": 3,
            "max_queue": 7,
            "n_gpu_layers": 5,
            "n_ctx": 512,
            "flash_attn": "off",
            "lora": ["a"],
            "instruments": (1,),
        }
    )
    assert arguments.config == EngineConfig(num_slots=3, max_queue=7)
    assert arguments.model == {"n_gpu_layers": 5}
    assert arguments.context == {"n_ctx": 512, "flash_attn": "off"}
    assert (arguments.lora, arguments.instruments) == (["a"], (1,))


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("num_slot", "num_slots"), ("nctx", "n_ctx"), ("n_gpu_layer", "n_gpu_layers"), ("Lora", "lora")],
)
def test_the_error_for_an_unknown_keyword_names_the_nearest(name: str, nearest: str) -> None:
    """It is a TypeError that suggests the right one."""
    with pytest.raises(TypeError, match=f"did you mean '{nearest}'"):
        engine_arguments({name: 1})


@pytest.mark.parametrize("name", ["n_seq_max", "n_outputs_max", "embeddings", "kv_unified"])
def test_what_follows_from_others_cannot_be_given(name: str) -> None:
    """Options of a context that the engine decides are unknown to it."""
    with pytest.raises(TypeError):
        engine_arguments({name: 1})


@pytest.mark.parametrize(
    "options",
    [
        {"num_slots": 0},
        {"num_slots": 257},
        {"num_slots": True},
        {"max_queue": -1},
        {"chunk_size": 0},
        {"itl_target_ms": 0},
        {"max_tick_ms": 0},
        {"max_tick_ms": float("nan")},
        {"max_queue_tokens": 0},
        {"max_embedding_tokens": 0},
    ],
)
def test_a_configuration_with_which_nothing_could_run_is_refused(options: dict[str, object]) -> None:
    """Zero slots, zero time and the like name the field."""
    with pytest.raises(InvalidParams, match=next(iter(options))):
        engine_arguments(options)


def test_sampling_keywords_change_the_params_and_the_others_are_options() -> None:
    """A request's options override the given object's; defaults come from the engine."""
    defaults = SamplingParams(temperature=0.1, top_k=7)
    params, options = request_arguments(defaults, None, {"top_k": 3, "priority": 2})
    assert (params.temperature, params.top_k, options.priority) == (0.1, 3, 2)
    params, options = request_arguments(defaults, SamplingParams(seed=1), {"top_k": 3})
    assert params == SamplingParams(seed=1, top_k=3)
    assert options == RequestOptions()


def test_every_field_of_a_request_is_taken() -> None:
    """Each sampling field and each option can be given as a keyword."""
    whole = SamplingParams()
    sampling = {name: getattr(whole, name) for name in FIELDS}
    rest = {name: getattr(RequestOptions(), name) for name in OPTION_NAMES}
    assert request_arguments(whole, None, {**sampling, **rest}) == (whole, RequestOptions())


@pytest.mark.parametrize(("name", "nearest"), [("max_token", "max_tokens"), ("priorty", "priority")])
def test_the_error_for_an_unknown_request_keyword_names_the_nearest(name: str, nearest: str) -> None:
    """A field that would be ignored is never accepted."""
    with pytest.raises(TypeError, match=f"did you mean '{nearest}'"):
        request_arguments(SamplingParams(), None, {name: 1})


@pytest.mark.parametrize("sort", [request_arguments, collected_arguments])
def test_a_keyword_that_is_none_counts_as_left_out(sort: Any) -> None:
    """It overrides neither params nor the model's defaults; max_tokens=None is until the context is full."""
    defaults, given = SamplingParams(temperature=0.1), SamplingParams(temperature=0.2, seed=7, stop="x", max_tokens=3)
    nothing = dict.fromkeys([*FIELDS, *OPTION_NAMES])
    del nothing["max_tokens"]
    assert sort(defaults, None, nothing) == sort(defaults, None, {})
    assert sort(defaults, given, nothing) == sort(defaults, given, {})
    assert sort(defaults, given, {"max_tokens": None})[0] == given.replace(max_tokens=None)


def test_an_option_of_the_engine_that_is_none_counts_as_left_out() -> None:
    """Of the engine, the model, its context, the draft model and the adapters."""
    names = [*CONFIG_NAMES, *ContextOptions.names(), "n_gpu_layers", "split_mode", "main_gpu", "lora", "instruments"]
    given = [name for name in names if name not in ("n_seq_max", "n_outputs_max", "embeddings", "pooling")]
    given = [name for name in given if name not in ("kv_unified", "attention")]
    assert engine_arguments(dict.fromkeys(given)) == engine_arguments({})
    drafts = {"draft_model": "d.gguf", "draft_options": {"p_min": None, "chunk_size": None, "split_mode": None}}
    assert engine_arguments(drafts).draft == engine_arguments({"draft_model": "d.gguf"}).draft


def test_collected_output_comes_as_one_chunk() -> None:
    """Blocking generation takes one chunk, and options about reading are refused with the way out."""
    params, options = collected_arguments(SamplingParams(), None, {"top_k": 3, "priority": 3})
    assert (params.top_k, options.priority, options.max_buffered_tokens) == (3, 3, None)
    assert options.interval > 100_000
    for name, value in (("interval", 1), ("max_buffered_tokens", 8), ("slow_reader", "cancel")):
        with pytest.raises(
            InvalidParams, match=f"{name} has no effect on a completion that is returned whole; use stream"
        ):
            collected_arguments(SamplingParams(), None, {name: value})


def test_the_error_for_a_keyword_like_none_names_the_documentation() -> None:
    """No list of fifty names."""
    with pytest.raises(
        TypeError, match=r"^unknown option 'zzz'; there are \d+, see SamplingParams and RequestOptions$"
    ):
        request_arguments(SamplingParams(), None, {"zzz": 1})
    with pytest.raises(
        TypeError, match=r"^unknown option 'zzz'; there are \d+, see LLM, EngineConfig, Model\.load and "
    ):
        engine_arguments({"zzz": 1})


@pytest.mark.parametrize("instruments", [3, "metrics", iter(()), Instrument()])
def test_instruments_are_a_list(instruments: object) -> None:
    """Anything else is refused by its name, an iterator as well, which could be looked at only once."""
    with pytest.raises(InvalidType, match="^instruments must be a list of Instrument objects, not "):
        engine_arguments({"instruments": instruments})


def test_params_must_be_params() -> None:
    """A mapping in their place is refused by its type."""
    with pytest.raises(InvalidType, match="must be SamplingParams, not dict"):
        request_arguments(SamplingParams(), {"top_k": 1}, {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"priority": True},
        {"priority": 2.5},
        {"interval": 0},
        {"interval": -1},
        {"timeout_s": 0},
        {"timeout_s": -1},
        {"timeout_s": float("inf")},
        {"queue_timeout_s": float("nan")},
        {"ttft_timeout_s": "1"},
        {"truncate": "up"},
        {"max_buffered_tokens": 0},
        {"slow_reader": "wait"},
        {"special": 1},
        {"request_id": 5},
        {"lora": ["name"]},
        {"lora": {"name": float("nan")}},
        {"lora": {3: 1.0}},
    ],
)
def test_bad_options_are_refused_before_any_work(options: dict[str, object]) -> None:
    """The field is named; nothing is clamped."""
    with pytest.raises(InvalidParams, match=next(iter(options))):
        request_arguments(SamplingParams(), None, options)


@pytest.mark.parametrize(
    "options", [{"max_tokens": -1}, {"temperature": -1}, {"temperature": float("nan")}, {"top_p": 1.5}, {"n": 0}]
)
def test_bad_sampling_is_refused_before_any_work(options: dict[str, object]) -> None:
    """Documented ranges hold for keywords too."""
    with pytest.raises(InvalidParams, match=next(iter(options))):
        request_arguments(SamplingParams(), None, options)


def test_adapters_without_effect_are_left_out() -> None:
    """A scale of 0 is no adapter, and the order of names does not matter."""
    one, other = RequestOptions(lora={"b": 1, "a": 0.5, "c": 0}), RequestOptions(lora={"a": 0.5, "b": 1.0})
    assert one == other
    assert one.lora == (("a", 0.5), ("b", 1.0))
