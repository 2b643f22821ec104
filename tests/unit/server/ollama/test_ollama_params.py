"""From the bodies of Ollama's requests to what a chat is made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from paceline.chat import template_kwargs
from paceline.errors import PacelineError
from paceline.params import SamplingParams
from paceline.server.ollama.ollama_bodies import OllamaChatBody, OllamaGenerateBody, is_unload
from paceline.server.ollama.ollama_params import OLLAMA_DEFAULTS, ParsedOllama, parse_ollama


def variables(given: Mapping[str, Any], effort: str | None) -> dict[str, Any]:
    return template_kwargs(given, effort)


def parsed(kind: Any = OllamaChatBody, **body: Any) -> ParsedOllama:
    return parse_ollama(kind.model_validate(body), SamplingParams(**OLLAMA_DEFAULTS), variables, "auto")


def test_a_small_body_has_ollamas_defaults() -> None:
    """Without a limit on the length."""
    params = parsed().params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.9, 0)
    assert (params.repeat_penalty, params.penalty_last_n, params.max_tokens, params.logprobs) == (1.1, 64, None, None)


def test_options_are_the_engines_under_other_names() -> None:
    """Those that a running model cannot change are named in warnings."""
    options = {
        "num_predict": 7, "repeat_last_n": -1, "temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.9,
        "repeat_penalty": 1.2, "presence_penalty": 1, "frequency_penalty": 0.5, "mirostat": 2, "mirostat_tau": 4,
        "mirostat_eta": 0.2, "seed": 5, "stop": ["a", "b"],
    }  # fmt: skip
    found = parsed(options={**options, "num_ctx": 9, "num_gpu": None, "penalize_newline": True})
    names = {"num_predict": "max_tokens", "repeat_last_n": "penalty_last_n"}
    expected = {**options, "stop": ("a", "b")}
    assert {name: getattr(found.params, names.get(name, name)) for name in options} == expected
    assert [one.partition(":")[0] for one in found.warnings] == ["options.num_ctx", "options.penalize_newline"]


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
    """Any JSON object, or one of a schema."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for wanted, expected in (("json", {"type": "object"}), (schema, schema)):
        assert json.loads(str(parsed(format=wanted).params.json_schema)) == expected
    assert parsed(format="").params.json_schema is None


def test_logprobs_are_returned_on_request() -> None:
    """top_logprobs alone asks for nothing."""
    assert parsed(logprobs=True, top_logprobs=3).num_top == 3
    assert parsed(logprobs=True).params.logprobs == 0
    assert parsed(top_logprobs=3).num_top is None


def test_unknown_fields_are_named_in_warnings() -> None:
    """As Ollama ignores them; very many of them are one warning."""
    assert parsed(nonsense=1, other=None).warnings == ("nonsense: accepted, and without a meaning here",)
    assert len(parsed(**{f"x{index}": 1 for index in range(99)}).warnings) == 1


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"options": []}, "options must be an object"),
        ({"options": {"top_p": 5}}, "options.top_p must be"),
        ({"options": {"num_predict": "x"}}, "options.num_predict must be"),
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
