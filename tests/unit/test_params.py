"""SamplingParams: defaults, refusals, copies."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import pytest

from paceline.chat import ChatOptions
from paceline.config import EngineConfig
from paceline.errors import InvalidParams, InvalidType
from paceline.model_manager import ModelEntry
from paceline.params import FIELDS, PatternTrigger, SamplingParams, ThinkingParams
from paceline.request import RequestOptions
from paceline.runtime.context_options import ContextOptions
from paceline.sampling_table import DEFAULT_SAMPLERS, SAMPLERS

NUMBERS = [
    *("temperature", "dynatemp_range", "dynatemp_exponent", "top_p", "min_p", "typical_p", "top_n_sigma"),
    *("xtc_probability", "xtc_threshold", "mirostat_tau", "mirostat_eta", "adaptive_target", "adaptive_decay"),
    *("repeat_penalty", "frequency_penalty", "presence_penalty", "dry_multiplier", "dry_base"),
]
INTEGERS = ["top_k", "mirostat", "penalty_last_n", "dry_allowed_length", "dry_penalty_last_n", "min_tokens", "n"]
OPTIONAL_INTEGERS = ["max_tokens", "logprobs", "prompt_logprobs", "seed"]


def test_the_defaults_match_the_design() -> None:
    """Without arguments the values are llama.cpp's and the documented values."""
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p) == (
        256,
        0.8,
        40,
        0.95,
        0.05,
    )
    assert (params.typical_p, params.top_n_sigma, params.xtc_probability, params.mirostat) == (1.0, -1.0, 0.0, 0)
    assert (params.repeat_penalty, params.frequency_penalty, params.presence_penalty) == (1.0, 0.0, 0.0)
    assert (params.penalty_last_n, params.seed, params.stop, params.stop_token_ids) == (64, None, (), ())
    assert (params.ignore_eos, params.min_tokens, params.logprobs, params.n, params.echo) == (False, 0, None, 1, False)
    assert params.samplers == DEFAULT_SAMPLERS
    assert DEFAULT_SAMPLERS == (
        "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature",
    )  # fmt: skip


def test_params_are_frozen_equal_and_hashable() -> None:
    """Params are values: they cannot change, and equal params are interchangeable, also after pickling."""
    params = SamplingParams(stop=["a"], logit_bias={5: 1}, samplers=["top_k"], allowed_token_ids=[1])  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]
    same = SamplingParams(stop=("a",), logit_bias=((5, 1.0),), samplers=("top_k",), allowed_token_ids=(1,))
    assert params == same
    assert hash(params) == hash(same)
    assert pickle.loads(pickle.dumps(params)) == params


@pytest.mark.parametrize("call", [SamplingParams, SamplingParams().replace])
def test_an_unknown_option_is_a_type_error_with_the_nearest(call: Any) -> None:
    """The error for a misspelt option suggests the nearest one."""
    with pytest.raises(TypeError, match="unknown option 'temprature'; did you mean 'temperature'"):
        call(temprature=1)


def test_replace_checks_like_the_constructor() -> None:
    """A copy with changes has the new values, and wrong changes are refused."""
    params = SamplingParams(seed=1, stop="x")
    assert params.replace(top_k=7) == SamplingParams(seed=1, stop="x", top_k=7)
    with pytest.raises(InvalidParams, match="top_k must be an integer"):
        params.replace(top_k=-2)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, -1e30])
def test_numbers_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    """NaN, infinities and absurd sizes raise InvalidParams and name the field and the value."""
    with pytest.raises(InvalidParams, match=f"{name} must be a finite number.*not"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", NUMBERS + INTEGERS)
@pytest.mark.parametrize("value", [True, "1", [1], b"1", 1j])
def test_invalid_number_is_refused_by_name(name: str, value: Any) -> None:
    """Bools and strings are no numbers: InvalidType, which is a TypeError."""
    with pytest.raises(InvalidType, match=f"{name} must be") as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("name", INTEGERS + OPTIONAL_INTEGERS)
@pytest.mark.parametrize("value", [-2, 2**64, -(2**70)])
def test_integers_out_of_range_are_refused_by_name(name: str, value: int) -> None:
    """Integers beyond their range raise InvalidParams."""
    with pytest.raises(InvalidParams, match=f"{name} must be an integer"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("record", [SamplingParams, RequestOptions, EngineConfig, ContextOptions, ChatOptions])
def test_none_is_the_default_of_every_field(record: Any) -> None:
    """Each alone and all together; max_tokens=None alone has a meaning of its own."""
    names = [field.name for field in dataclasses.fields(record) if field.name != "max_tokens"]
    assert len(names) > 8
    for name in names:
        assert record(**{name: None}) == record(), name
    assert record(**dict.fromkeys(names)) == record()


def test_none_is_the_default_of_fields_with_fields_of_their_own() -> None:
    """Thinking and patterns; a field without a default stays required."""
    assert ThinkingParams(ends=("</t>",), is_open=True, start=None, message=None, budget=None) == ThinkingParams(
        ends=("</t>",), is_open=True
    )
    assert PatternTrigger("a", is_full=None) == PatternTrigger("a")  # type: ignore[arg-type]
    assert ModelEntry(name="a", options=None, aliases=None, pinned=None, stop_timeout_s=None) == ModelEntry(name="a")  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="pattern must be a str, not None"):
        PatternTrigger(None)  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="name must be a str, not None"):
        ModelEntry(name=None)  # type: ignore[arg-type]


def test_replacing_by_none_sets_the_default() -> None:
    """In `replace`; max_tokens becomes None."""
    params = SamplingParams(temperature=0.1, seed=5, stop="x", max_tokens=9)
    assert params.replace(temperature=None, seed=None, stop=None, max_tokens=None) == SamplingParams(max_tokens=None)


@pytest.mark.parametrize("name", OPTIONAL_INTEGERS)
def test_optional_integers_may_be_none_but_not_true(name: str) -> None:
    """None means without; a bool is refused."""
    assert getattr(SamplingParams(**{name: None}), name) is None
    with pytest.raises(InvalidType, match=name):
        SamplingParams(**{name: True})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be a finite number >= 0"),
        ({"top_p": 1.01}, "top_p must be a finite number >= 0 and <= 1"),
        ({"repeat_penalty": 0}, "repeat_penalty must be"),
        ({"adaptive_decay": 1.0}, "adaptive_decay must be"),
        ({"mirostat": 3}, "mirostat must be"),
        ({"n": 0}, "n must be"),
        ({"max_tokens": -1}, "max_tokens must be an integer.*or None"),
        ({"min_tokens": 300}, "min_tokens must not exceed max_tokens"),
        ({"logprobs": 1001}, "logprobs must be"),
        ({"logprobs_mode": "after"}, "logprobs_mode must be one of"),
        ({"samplers": ("topk",)}, r"samplers\[0\] must be one of.*did you mean 'top_k'"),
        ({"samplers": ("top_k", "top_k")}, "samplers names 'top_k' twice"),
        ({"samplers": ("infill",)}, "'infill' needs 'top_k' before it"),
        ({"samplers": ("top_k", "infill"), "top_k": 0}, "'infill' needs 'top_k' before it"),
        ({"samplers": ("top_k", "infill"), "top_k": 1001}, "'infill' needs 'top_k' before it"),
        ({"samplers": ("infill", "top_k")}, "'infill' needs 'top_k' before it"),
        ({"stop": ("",)}, r"stop\[0\] must have 1 to"),
        ({"stop": "x" * 5000}, r"stop\[0\] must have 1 to"),
        ({"stop": ("x",) * 257}, "stop must have at most 256 texts"),
        ({"stop": ("x" * 4096,) * 4 + ("x",)}, "stop must have at most 16384 characters together, not 16385"),
        ({"bad_words": ("x" * 256,) * 129}, "bad_words must have at most 32768 characters together"),
        ({"stop": ("\ud800",)}, r"stop\[0\] has a lone surrogate"),
        ({"bad_words": ("",)}, r"bad_words\[0\]"),
        ({"bad_words": ("x" * 257,)}, r"bad_words\[0\]"),
        ({"dry_sequence_breakers": ("x" * 41,)}, r"dry_sequence_breakers\[0\]"),
        ({"stop_token_ids": (-1,)}, r"stop_token_ids\[0\]"),
        ({"allowed_token_ids": ()}, "allowed_token_ids must name at least one"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: the token id must be"),
        ({"logit_bias": {1: math.nan}}, r"logit_bias\[1\] must be a finite number"),
        ({"grammar": "x", "regex": "y"}, "grammar and regex exclude each other"),
        ({"json_schema": True, "choice": ("a",)}, "json_schema and choice exclude each other"),
        ({"choice": ()}, "choice must have at least one"),
        ({"json_schema": "{"}, "json_schema is not valid JSON"),
        ({"json_schema": {"a": math.nan}}, "json_schema is not valid JSON"),
        ({"json_schema": {"a": object()}}, "json_schema is not valid JSON"),
        ({"json_schema": "[" * 200 + "]" * 200}, "nested 100 deep"),
        ({"json_schema": "[" * 100_000 + "]" * 100_000}, "json_schema"),
        ({"json_schema": {"enum": ["x" * 300_000]}}, "262144 characters"),
        ({"grammar_lazy": True}, "grammar_lazy needs a grammar"),
        ({"grammar": "x", "grammar_lazy": True}, "grammar_lazy needs a grammar and grammar_triggers"),
        ({"grammar": "x", "grammar_triggers": ("a",)}, "without grammar_lazy=True"),
        ({"grammar_triggers": (-1,)}, r"grammar_triggers\[0\]"),
        ({"grammar_triggers": ("",)}, r"grammar_triggers\[0\] must have 1 to 256 characters"),
        ({"grammar_triggers": ("^",)}, r"grammar_triggers\[0\] must have 1 to 256 characters"),
        ({"grammar_triggers": ("(" * 257,)}, r"grammar_triggers\[0\] must have 1 to 256 characters"),
        ({"grammar_triggers": ({"pattern": ""},)}, r"grammar_triggers\[0\]\.pattern must have 1 to 16384 characters"),
        ({"grammar_triggers": ({"is_full": True},)}, r"grammar_triggers\[0\] must have a pattern"),
    ],
)  # fmt: skip
def test_values_that_make_no_sense_are_refused_with_the_way_out(options: dict[str, Any], message: str) -> None:
    """Each impossible value or combination raises InvalidParams, which names the field."""
    with pytest.raises(InvalidParams, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", 5), ("stop", {"a": 1}), ("stop", (5,)), ("stop", b"x"),
        ("stop_token_ids", "12"), ("stop_token_ids", (1.0,)), ("stop_token_ids", (True,)),
        ("logit_bias", [1, 2]), ("logit_bias", {"1": 1.0}), ("logit_bias", {1: "x"}), ("logit_bias", {True: 1.0}),
        ("samplers", "top_k"), ("samplers", (1,)), ("grammar", 5), ("grammar", b"root"),
        ("regex", 5), ("choice", "yes"), ("choice", (1,)), ("json_schema", 5), ("json_schema", [1]),
        ("allowed_token_ids", 5), ("bad_words", "x"), ("ignore_eos", 1), ("echo", "yes"),
        ("grammar_triggers", "x"), ("grammar_triggers", (1.5,)),
        ("grammar_triggers", ({"pattern": 5},)), ("seed", 1.0), ("seed", "1"),
        ("logprobs_mode", 1), ("grammar_lazy", 0),
    ],
)  # fmt: skip
def test_wrong_types_are_refused_by_name(name: str, value: Any) -> None:
    """A value of the wrong type raises InvalidType and names its field."""
    with pytest.raises(InvalidType, match=name):
        SamplingParams(**{name: value})


def test_a_class_as_json_schema_is_refused_with_the_option_that_takes_types() -> None:
    """Chats take types."""
    with pytest.raises(InvalidType, match="not the class int; llm.chat takes a type as response_model=int$"):
        SamplingParams(json_schema=int)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("seed", -1, None), ("seed", 0, 0), ("seed", 2**64 - 1, 2**64 - 1), ("top_k", -1, -1), ("top_k", 0, 0),
        ("penalty_last_n", -1, -1), ("max_tokens", 0, 0), ("temperature", 0, 0.0), ("stop", "x", ("x",)),
        ("stop", ["x", "y"], ("x", "y")), ("logit_bias", {}, ()),
        ("logit_bias", {7: 1, 3: -2.5}, ((3, -2.5), (7, 1.0))),
        ("json_schema", {"type": "null"}, '{"type": "null"}'), ("json_schema", '{"type":"null"}', '{"type": "null"}'),
        ("samplers", [], ()), ("samplers", list(SAMPLERS[::-1][1:]), SAMPLERS[::-1][1:]), ("min_tokens", 256, 256),
        ("allowed_token_ids", [1, 2], (1, 2)), ("temperature", 1e6, 1e6),
    ],
)  # fmt: skip
def test_values_at_the_edges_are_kept(name: str, value: Any, kept: Any) -> None:
    """Allowed values are kept in immutable form; -1 as a seed means none."""
    params = SamplingParams(**{name: value})
    assert getattr(params, name) == kept
    assert type(getattr(params, name)) is type(kept)
    assert params.replace() == params


def test_numpy_scalars_become_python_numbers() -> None:
    """Numbers of NumPy are numbers, and are stored as Python's."""
    import numpy as np

    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3))  # type: ignore[arg-type]
    assert (type(params.temperature), type(params.top_k)) == (float, int)


def test_texts_become_plain_str() -> None:
    """Whatever subclass of it the caller had."""
    import numpy as np

    text = np.str_("root")
    params = SamplingParams(
        stop=[text],
        grammar=text,
        grammar_root=text,
        grammar_lazy=True,
        grammar_triggers=[text],
        samplers=[np.str_("top_k")],
    )
    kept = [params.grammar, params.grammar_root, *params.stop, *params.grammar_triggers, *params.samplers]
    assert {type(item) for item in kept} == {str}


def test_every_field_is_documented() -> None:
    """The docstring names every field."""
    assert SamplingParams.__doc__ is not None
    assert [name for name in FIELDS if name not in SamplingParams.__doc__] == []


def test_sequence_breakers_have_no_limit_together() -> None:
    """The most of them, of the most characters."""
    breakers = tuple(f"{number:02}".ljust(40, "x") for number in range(64))
    assert SamplingParams(dry_sequence_breakers=breakers).dry_sequence_breakers == breakers
