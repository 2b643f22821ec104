"""From the bodies of Ollama's requests to the parts of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from paceline.chat import template_kwargs
from paceline.errors import PacelineError
from paceline.params import SamplingParams
from paceline.sampling_table import API_DEFAULTS
from paceline.server.api_errors import ApiException
from paceline.server.dialects.ollama.ollama_requests import (
    OllamaChatBody,
    OllamaGenerateBody,
    ParsedOllama,
    is_unload,
    parse_ollama,
)


def variables(given: Mapping[str, Any], effort: str | None) -> dict[str, Any]:
    return template_kwargs(given, effort)


def parsed(kind: Any = OllamaChatBody, *, strict: bool = False, **body: Any) -> ParsedOllama:
    base = SamplingParams(**API_DEFAULTS["ollama"])
    return parse_ollama(kind.model_validate(body), base, variables, "auto", strict=strict)


def test_a_small_body_has_ollamas_defaults() -> None:
    """Without a limit on the length."""
    params = parsed().params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.9, 0)
    assert (params.repeat_penalty, params.penalty_last_n, params.max_tokens, params.logprobs) == (1.1, 64, None, None)


def test_options_are_the_engines_under_other_names() -> None:
    """Options that a running model cannot change are named in warnings."""
    options = {
        "num_predict": 7, "repeat_last_n": -1, "temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.9,
        "repeat_penalty": 1.2, "presence_penalty": 1, "frequency_penalty": 0.5, "mirostat": 2, "mirostat_tau": 4,
        "mirostat_eta": 0.2, "seed": 5, "stop": ["a", "b"],
    }  # fmt: skip
    found = parsed(options={**options, "num_ctx": 9, "num_gpu": None, "penalize_newline": True})
    names = {"num_predict": "max_tokens", "repeat_last_n": "penalty_last_n"}
    expected = {**options, "stop": ("a", "b")}
    assert {name: getattr(found.params, names.get(name, name)) for name in options} == expected
    assert [warning.split()[0] for warning in found.warnings] == ["options.num_ctx", "options.penalize_newline"]


@pytest.mark.parametrize("limit", [0, -1, -2])
def test_no_limit_is_no_limit(limit: int) -> None:
    """Whatever the server has."""
    assert parsed(options={"num_predict": limit}).params.max_tokens is None


def test_thinking_reaches_the_template() -> None:
    """As a switch or as an effort; otherwise the template decides."""
    assert parsed().chat.kwargs == {}
    assert parsed(think=True).chat.kwargs == {"enable_thinking": True}
    assert parsed(think=False).chat.kwargs == {"enable_thinking": False}
    assert parsed(think="low").chat.kwargs == {"enable_thinking": True, "reasoning_effort": "low"}


def test_a_format_constrains_the_output() -> None:
    """Any JSON object, or an object of a schema."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for wanted, expected in (("json", {"type": "object"}), (schema, schema)):
        assert json.loads(str(parsed(format=wanted).params.json_schema)) == expected
    assert parsed(format="").params.json_schema is None


def test_logprobs_are_returned_on_request() -> None:
    """top_logprobs alone asks for nothing."""
    assert parsed(logprobs=True, top_logprobs=3).num_top == 3
    assert parsed(logprobs=True).params.logprobs == 0
    assert parsed(top_logprobs=3).num_top is None


def test_unknown_fields_and_options_have_a_warning() -> None:
    """With the nearest name. So have options of Ollama that have no effect here."""
    found = parsed(nonsense=1, other=None, options={"num_ctx": 4096, "temprature": 1, "num_gpu": None})
    assert found.warnings == (
        "nonsense is not a field of this endpoint and was ignored",
        "options.num_ctx has no effect here and was ignored",
        "options.temprature is not a field of this endpoint and was ignored; did you mean temperature?",
    )


@pytest.mark.parametrize("body", [{"nonsense": 1}, {"options": {"temprature": 1}}])
def test_unknown_fields_are_refused_where_the_server_is_strict(body: dict[str, Any]) -> None:
    """Options of Ollama that have no effect here are none."""
    parsed(strict=True, options={"num_ctx": 4096})
    with pytest.raises(ApiException, match="is not a field"):
        parsed(strict=True, **body)


def test_options_may_be_whole_floats_and_empty_stops() -> None:
    """Programs in languages without integers write 40.0."""
    options = {
        "num_predict": 100.0,
        "top_k": 40.0,
        "seed": 1.0,
        "repeat_last_n": 64.0,
        "stop": ["", "x"],
        "temperature": 3,
    }
    params = parsed(options=options).params
    assert (params.max_tokens, params.top_k, params.seed, params.penalty_last_n) == (100, 40, 1, 64)
    assert (params.stop, params.temperature) == (("x",), 3)
    assert parsed(options={"stop": "", "num_predict": -1.0}).params == parsed().params


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"options": []}, "options must be an object"),
        ({"options": {"top_p": 5}}, "options.top_p must be"),
        ({"options": {"num_predict": "x"}}, "options.num_predict must be"),
        ({"options": {"num_predict": 100.5}}, "options.num_predict must be an integer"),
        ({"options": {"top_k": "40"}}, "options.top_k must be an integer"),
        ({"options": {"seed": True}}, "options.seed must be an integer"),
        ({"options": {"repeat_last_n": -5}}, "options.repeat_last_n must be"),
        ({"options": {"stop": [5]}}, r"options.stop\[0\] must be"),
        ({"format": "xml"}, "format must be"),
        ({"format": 5}, "format must be"),
        ({"think": "hard"}, "think must be"),
        ({"think": 5}, "think must be"),
        ({"suffix": "x", "images": ["y"]}, "suffix and images exclude each other"),
        ({"template": "{{ .Prompt }}"}, "template is not supported"),
        ({"context": [1]}, "context is not supported"),
        ({"suffix": "x", "system": "y"}, "suffix and system exclude each other"),
    ],
)
def test_malformed_fields_are_refused_by_name(body: dict[str, Any], place: str) -> None:
    """In Ollama's terms."""
    with pytest.raises(PacelineError, match=place):
        parsed(OllamaGenerateBody, **body)


def test_a_model_is_unloaded_by_a_time_of_zero() -> None:
    """However it is spelt."""
    assert all(is_unload(OllamaChatBody(keep_alive=time)) for time in (0, "0", "0s"))
    assert not any(is_unload(OllamaChatBody(keep_alive=time)) for time in (None, 5, "5m", -1))
