"""From bodies to the engine's request."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from tests.unit.server.dialects.llama_server.letters import letters

from paceline.errors import InvalidParams, InvalidType
from paceline.params import SamplingParams
from paceline.sampling_table import API_DEFAULTS
from paceline.server.api_errors import ApiException, api_error_of, naming_param, openai_error_body
from paceline.server.dialects.dialect import model_warning
from paceline.server.dialects.openai.openai_requests import (
    OPTION_EXTRAS,
    SAMPLING_EXTRAS,
    OpenAIChatBody,
    OpenAICompletionBody,
    ParsedRequest,
    chat_options_of,
    parse_chat,
    parse_completion,
)
from paceline.server.service import Service
from paceline.server.settings import ServerSettings


def completion(*, strict: bool = False, **body: Any) -> ParsedRequest:
    parsed = OpenAICompletionBody.model_validate({"prompt": "x", **body})
    return parse_completion(parsed, SamplingParams(**API_DEFAULTS["completion"]), {}, letters(), strict=strict)


def chat(*, strict: bool = False, **body: Any) -> ParsedRequest:
    parsed = OpenAIChatBody.model_validate({"messages": [], **body})
    return parse_chat(parsed, SamplingParams(**API_DEFAULTS["chat"]), {}, letters(), strict=strict)


def test_an_empty_body_has_the_defaults_of_its_api() -> None:
    """16 tokens of a completion, any number of a conversation, temperature and top_p 1."""
    ours, theirs = completion().params, chat().params
    assert (ours.max_tokens, ours.temperature, ours.top_p, ours.n, ours.seed) == (16, 1, 1, 1, None)
    assert (theirs.max_tokens, theirs.temperature, theirs.top_p) == (None, 1, 1)


def test_a_client_can_choose_no_code_of_the_servers() -> None:
    """The name of a user's constraint is no field of a body, and the format's own settings are none either."""
    for parse in (completion, chat):
        for name in ("constraint", "logits_processors"):
            with pytest.raises(ApiException, match=f"{name} is not supported"):
                parse(**{name: "os:system"})
        asked = parse(thinking={"start": "<think>"})
        assert asked.params.thinking is None
        assert asked.warnings[0].startswith("thinking is not a field")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "json_schema",
            json.dumps(SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json_object": True, "regex": None}}, "json_schema", '{"type": "object"}'),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ("a", "b")),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "grammar", 'root ::= "a"'),
        ({"guided_json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a"]}, "choice", ("a",)),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"lark": 'start: "a"'}, "lark", 'start: "a"'),
    ],
)
def test_every_spelling_of_a_constraint_is_understood(body: dict[str, Any], field: str, value: Any) -> None:
    """OpenAI's, vLLM's and our own, in completions and in chats; a server's default gives way."""
    for parse in (completion, chat):
        assert getattr(parse(**body).params, field) == value
    base = SamplingParams(grammar="root ::= [a]", grammar_lazy=True, grammar_triggers=("x",))
    parsed = parse_completion(OpenAICompletionBody.model_validate({"prompt": "x", **body}), base, {}, letters())
    assert getattr(parsed.params, field) == value
    assert parsed.params.grammar_lazy is (field == "grammar")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "json and structured_outputs.regex exclude"),
        ({"structured_outputs": 5}, "structured_outputs"),
        ({"guided_regex": "a", "regex": "b"}, "exclude each other"),
        ({"guided_regex": "a", "guided_json": {}}, "exclude each other"),
        ({"response_format": {"type": "json_object"}, "choice": ["a"]}, "response_format and choice exclude"),
        ({"guided_choice": "yes"}, "choice"),
    ],
)
def test_constraints_that_make_no_sense_are_refused(body: dict[str, Any], message: str) -> None:
    """By the names that the client has used."""
    with pytest.raises((InvalidParams, ValidationError), match=message):
        chat(**body)


def test_null_is_as_good_as_absent() -> None:
    """For OpenAI's fields and for ours."""
    names = (
        "max_tokens",
        "temperature",
        "n",
        "stop",
        "seed",
        "logit_bias",
        "logprobs",
        "top_k",
        "priority",
        "user",
        "best_of",
    )
    asked = completion(**dict.fromkeys(names))
    assert asked == completion()
    assert asked.warnings == ()


def test_openais_fields_reach_the_sampler() -> None:
    """Each under its own name."""
    params = completion(
        max_tokens=3, temperature=0.5, top_p=0.25, n=2, stop="a", seed=7, presence_penalty=1, frequency_penalty=-1.5,
        logit_bias={"5": -100, "3": 1}, logprobs=2,
    ).params  # fmt: skip
    assert (params.max_tokens, params.temperature, params.top_p, params.n) == (3, 0.5, 0.25, 2)
    assert (params.stop, params.seed, params.logprobs) == (("a",), 7, 2)
    assert (params.presence_penalty, params.frequency_penalty) == (1, -1.5)
    assert params.logit_bias == ((3, 1), (5, -100))


def test_every_own_field_is_shown_in_the_schema() -> None:
    """Its type is that of the field in the record."""
    shown = OpenAICompletionBody.model_json_schema()["properties"]
    assert set(SAMPLING_EXTRAS) | set(OPTION_EXTRAS) <= set(shown)
    assert {"tenant", "request_id", "preserved_tokens"}.isdisjoint(shown)
    assert {"type": "integer"} in shown["top_k"]["anyOf"]


def test_own_fields_reach_sampling_and_options() -> None:
    """Sampling fields become params, request fields become options."""
    asked = completion(top_k=5, min_p=0.1, bad_words=["x"], priority=3, cache_salt="s", lora={"a": 0.5})
    assert (asked.params.top_k, asked.params.min_p, asked.params.bad_words) == (5, 0.1, ("x",))
    assert (asked.options["priority"], asked.options["cache_salt"], asked.options["lora"]) == (3, "s", {"a": 0.5})


def test_a_completions_prompt_may_spell_control_tokens_by_default() -> None:
    """The prompt is the client's own."""
    assert completion().options["parse_special"] is True
    assert completion(parse_special=False).options["parse_special"] is False


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": float("inf")}, "top_p"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 100.5}, "max_tokens"),
        ({"max_tokens": "100"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"seed": 0.5}, "seed"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"logprobs": -1}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options"),
        ({"model": 5}, "model"),
    ],
)
def test_what_openai_refuses_is_refused_by_the_schema(body: dict[str, Any], param: str) -> None:
    """With the place of the field."""
    with pytest.raises(ValidationError) as raised:
        completion(**body)
    assert raised.value.errors()[0]["loc"][0] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_k": "many"}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"top_k": 40.5}, "top_k"),
        ({"min_p": float("nan")}, "min_p"),
        ({"temperature": 1e7}, "temperature"),
        ({"presence_penalty": 1e7}, "presence_penalty"),
        ({"stop": [5]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"logit_bias": 5}, "logit_bias"),
        ({"logit_bias": {"1": "5"}}, "logit_bias"),
        ({"logit_bias": {"1": True}}, "logit_bias"),
        ({"logit_bias": {"1": 1e7}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": [[5000, 1]]}, "logit_bias"),
        ({"logit_bias": [[1.5, 1]]}, "logit_bias"),
        ({"logit_bias": [[True, 1]]}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids"),
        ({"best_of": 2}, "best_of"),
        ({"priority": "high"}, "priority"),
        ({"truncate": "up"}, "truncate"),
        ({"lora": {"a": "x"}}, "lora"),
        ({"echo": True, "suffix": "x"}, "echo"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": "x"}, "prompt_logprobs"),
        ({"grammar": "root ::= x", "json_schema": {}}, "grammar"),
    ],
)
def test_what_cannot_be_is_refused_with_the_name_of_its_field(body: dict[str, Any], param: str) -> None:
    """The error's `param` is the field."""
    with pytest.raises(ApiException) as raised, naming_param(OpenAICompletionBody.model_fields):
        completion(**body)
    error = openai_error_body(raised.value.api_error)["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["message"].startswith(param)


def test_an_unknown_field_has_a_warning_with_the_nearest_known_one() -> None:
    """In completions and in chats; null is absent."""
    for parse in (completion, chat):
        asked = parse(temprature=1, client_metadata={"x": 1}, nothing=None)
        assert asked.params == parse().params
        assert asked.warnings == (
            "temprature is not a field of this endpoint and was ignored; did you mean temperature?",
            "client_metadata is not a field of this endpoint and was ignored",
        )


def test_an_unknown_field_is_refused_where_the_server_is_strict() -> None:
    """With the nearest known field; the error is OpenAI's."""
    for parse in (completion, chat):
        with pytest.raises(ApiException, match="temprature .* did you mean temperature") as raised:
            parse(strict=True, temprature=1)
        assert (raised.value.api_error.param, raised.value.api_error.code) == ("temprature", "unknown_parameter")
        assert parse(strict=True, user="me", n_predict=5).params.max_tokens == 5
    nested = [
        ({"stream": True, "stream_options": {"events": 1}}, "stream_options.events"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
            "response_format.json_schema.x",
        ),
        ({"structured_outputs": {"regex": "a", "x": 1}}, "structured_outputs.x"),
    ]
    for body, place in nested:
        with pytest.raises(ApiException, match=f"{place} is not a field"):
            chat(strict=True, **body)
        (warning,) = chat(**body).warnings
        assert warning.startswith(f"{place} is not a field")


def test_many_unknown_fields_make_few_warnings() -> None:
    """A response stays smaller than its request."""
    warnings = chat(**{f"{index}{'x' * 5000}": index for index in range(900)}, interval=1, user="me").warnings
    assert len(warnings) <= 33
    assert "884 more unknown fields were ignored" in warnings
    assert sum(map(len, warnings)) < 10_000


def test_the_tenant_is_the_keys_and_not_the_bodys() -> None:
    """Ignoring it would share prefixes that the client wants apart. The error names the field to use instead."""
    with pytest.raises(ApiException, match="tenant .* cache_salt"):
        completion(tenant="other")
    with pytest.raises(ApiException, match="tenant_weight .* API key"):
        completion(tenant_weight=9)


def test_fields_without_a_meaning_here_are_named_in_warnings() -> None:
    """OpenAI's and llama-server's; null asks for nothing."""
    warnings = completion(user="me", store=None, id_slot=3).warnings
    assert [warning.split()[0] for warning in warnings] == ["user", "id_slot"]
    assert chat(user="", store=False, metadata={}, service_tier=None, parallel_tool_calls=True).warnings == ()


def test_names_of_other_servers_are_taken_for_ours() -> None:
    """n_predict may be -1: until the context is full."""
    params = completion(n_predict=9, repeat_last_n=5, repetition_penalty=1.5).params
    assert (params.max_tokens, params.penalty_last_n, params.repeat_penalty) == (9, 5, 1.5)
    assert completion(n_predict=-1).params.max_tokens is None
    assert completion(max_completion_tokens=7).params.max_tokens == 7
    both = completion(repeat_penalty=1.5, repetition_penalty=1.25)
    assert both.params.repeat_penalty == 1.5
    assert both.warnings == ("repetition_penalty was ignored, since there is repeat_penalty as well",)
    assert completion(repeat_penalty=1.5, repetition_penalty=1.5).warnings == ()


@pytest.mark.parametrize("name", ["n_predict", "repeat_last_n", "repetition_penalty", "typ_p", "max_completion_tokens"])
def test_a_wrong_value_of_another_name_is_refused_by_that_name(name: str) -> None:
    """The client has not sent the other field."""
    for value in (True, "5", 100.5 if name == "n_predict" else -2.5):
        with pytest.raises(InvalidParams, match=f"^{name} must be"):
            completion(**{name: value})


def test_stream_options_mean_nothing_where_the_response_is_not_streamed() -> None:
    """It is named, and not passed on."""
    asked = completion(interval=4)
    assert "interval" not in asked.options
    assert asked.warnings == ("interval has no effect if stream is not true and was ignored",)
    assert completion(interval=4, stream=True).options["interval"] == 4
    asked = completion(stream_options={"include_usage": True})
    assert asked.warnings == ("stream_options has no effect if stream is not true and was ignored",)


def test_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    """There are as many as for the completion."""
    params = completion(echo=True, logprobs=2).params
    assert (params.echo, params.logprobs, params.prompt_logprobs) == (True, 2, 2)
    assert completion(echo=True).params.prompt_logprobs is None


def test_best_of_that_equals_n_is_no_wish() -> None:
    """All completions that are computed are returned."""
    assert completion(n=2, best_of=2).params.n == 2


def test_a_negative_seed_is_a_seed() -> None:
    """Only -1 is none, as in llama.cpp."""
    assert completion(seed=-2).params.seed == 2**64 - 2
    assert completion(seed=-1).params.seed is None


def test_the_newer_name_of_max_tokens_counts_in_a_chat() -> None:
    """Both are accepted; if they differ, the newer one counts."""
    assert chat(max_completion_tokens=5).params.max_tokens == 5
    assert chat(max_tokens=5).params.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=5).params.max_tokens == 5
    both = chat(max_tokens=5, max_completion_tokens=6)
    assert both.params.max_tokens == 6
    assert both.warnings == ("max_tokens was ignored, since there is max_completion_tokens as well",)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_minus_one_is_until_the_context_is_full(name: str) -> None:
    """As in llama-server; also if the endpoint has a default of its own."""
    for parse in (completion, chat):
        asked = parse(**{name: -1})
        assert (asked.params.max_tokens, asked.warnings) == (None, ())


def test_whole_floats_are_integers() -> None:
    """Programs in languages without integers write 100.0."""
    params = chat(
        max_tokens=100.0, n=1.0, seed=1.0, top_k=40.0, min_tokens=2.0, stop_token_ids=[5.0], logit_bias=[[6.0, 1.0]],
        n_predict=100.0,
    ).params  # fmt: skip
    assert (params.max_tokens, params.n, params.seed, params.top_k, params.min_tokens) == (100, 1, 1, 40, 2)
    assert (params.stop_token_ids, params.logit_bias) == ((5,), ((6, 1.0),))
    assert chat(seed=2.0**63).params.seed == 2**63


@pytest.mark.parametrize("stop", [None, [], "", [""], ["", ""]])
def test_an_empty_stop_ends_nothing(stop: Any) -> None:
    """As in llama-server. Texts beside it count."""
    assert chat(stop=stop) == chat()
    assert chat(stop=["x", ""]).params.stop == ("x",)


def test_numbers_beyond_openais_ranges_are_taken() -> None:
    """As in llama-server and vLLM."""
    params = chat(temperature=2.5, presence_penalty=3, frequency_penalty=-3, logit_bias={"5": -1000}).params
    assert (params.temperature, params.presence_penalty, params.frequency_penalty) == (2.5, 3, -3)
    assert params.logit_bias == ((5, -1000),)


def test_samplers_have_llama_servers_names() -> None:
    """Unknown names have a warning, as in its own API."""
    asked = chat(samplers=["top-k", "typ", "tfs_z", "temperature"])
    assert asked.params.samplers == ("top_k", "typ_p", "temperature")
    assert asked.warnings == ("samplers: there is no 'tfs_z', and it was ignored",)
    assert chat(samplers="kt").params.samplers == ("top_k", "temperature")
    assert chat(samplers=["tfs_z"]).params == chat().params
    assert chat(samplers=[]).params.samplers == ()


CLIENTS: dict[str, dict[str, Any]] = {
    "LangChain": {
        "model": "m", "n": 1, "temperature": 0.7, "stream": False, "frequency_penalty": 0.0, "logprobs": None, "stop": None,
        "max_tokens": None, "seed": None, "logit_bias": None, "top_p": 1.0, "best_of": 1,
    },
    "Jan": {
        "stream": True, "max_tokens": 2048.0, "n_predict": 2048.0, "stop": [], "ctx_len": 4096.0, "ngl": 99, "engine": "x",
        "top_k": 40.0, "min_p": 0.05, "repeat_last_n": 64, "dry_penalty_last_n": -1, "cache_prompt": True,
    },
    "llama-server's page": {
        "stream": True, "max_tokens": -1, "samplers": "edkypmxt", "backend_sampling": False, "timings_per_token": True,
    },
    "Open WebUI": {
        "stream": True, "stream_options": {"include_usage": True}, "chat_id": "x", "session_id": "y", "features": {},
        "variables": {}, "tool_ids": [], "files": None, "metadata": {},
    },
    "LobeChat": {
        "stream": True, "temperature": 1.0, "presence_penalty": 0, "plugins": [], "enabledSearch": False, "apiMode": "chat",
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "verbosity": "low",
    },
    "SillyTavern": {
        "max_new_tokens": 250, "max_tokens": 250, "temperature": 2.5, "sampler_seed": -1, "repetition_penalty": 1,
        "top_k": 0, "min_tokens": 0, "add_bos_token": True, "dry_sequence_breakers": '["\\n", ":"]', "ban_eos_token": False,
        "stopping_strings": ["You:"], "stop": ["You:"], "custom_token_bans": "", "banned_strings": [], "grammar_string": "",
        "samplers": ["penalties", "dry", "top_k", "typ_p", "tfs_z", "temperature"], "n_predict": 250, "num_ctx": 8192,
        "logit_bias": [], "json_schema": None, "seed": -1, "sampler_order": [6, 0, 1], "mirostat": 0, "repeat_last_n": 0,
    },
}  # fmt: skip


@pytest.mark.parametrize("client", CLIENTS)
def test_bodies_of_local_clients_are_taken(client: str) -> None:
    """In completions and in chats, with their limit."""
    body = CLIENTS[client]
    for parse, default in ((completion, 16), (chat, None)):
        limit = body.get("max_tokens") or default
        assert parse(**body).params.max_tokens == (None if limit == -1 else limit)
    assert chat(**CLIENTS["SillyTavern"]).params.dry_sequence_breakers == ("\n", ":")


@pytest.mark.parametrize("breakers", ["x", "5", "{}", "[5]"])
def test_a_text_that_is_no_list_of_breakers_is_refused(breakers: str) -> None:
    """By its field."""
    with pytest.raises(InvalidType, match="^dry_sequence_breakers"):
        chat(dry_sequence_breakers=breakers)


def test_a_chats_logprobs_are_a_switch_and_a_number() -> None:
    """The number has no meaning without the switch."""
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).params.logprobs == 3
    assert chat(logprobs=False).params.logprobs is None
    with pytest.raises(InvalidParams, match="top_logprobs"):
        chat(top_logprobs=3)
    assert chat(top_logprobs=0).params.logprobs is None


def test_a_response_format_becomes_a_schema() -> None:
    """Any object, or the given schema; text is no constraint."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert chat(response_format={"type": "text"}).params.json_schema is None
    assert chat(response_format={"type": "json_object"}).params.json_schema == '{"type": "object"}'
    described = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert chat(response_format=described).params == chat(json_schema=schema).params
    assert chat(response_format={"type": "json_schema", "schema": schema}).params == chat(json_schema=schema).params
    assert chat(response_format={"type": "text"}, regex="a").params == chat(regex="a").params


@pytest.mark.parametrize(
    "given", [{"type": "yaml"}, {}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": []}]
)
def test_a_response_format_that_is_none_is_refused(given: dict[str, Any]) -> None:
    """With its name."""
    with pytest.raises(InvalidParams, match="response_format"):
        chat(response_format=given)


@pytest.mark.parametrize(
    ("name", "wish", "nothing"),
    [
        ("functions", [{}], []),
        ("function_call", {"name": "f"}, "auto"),
        ("chat_template", "{{ messages }}", ""),
        ("documents", [{"text": "x"}], []),
        ("use_beam_search", True, False),
    ],
)
def test_fields_that_would_change_the_output_are_refused(name: str, wish: Any, nothing: Any) -> None:
    """Values that ask for nothing are accepted."""
    with pytest.raises(ApiException, match=f"{name} is not supported") as raised:
        chat(**{name: wish})
    assert (raised.value.api_error.param, raised.value.api_error.code) == (name, "unsupported")
    assert chat(**{name: nothing}).warnings == ()


@pytest.mark.parametrize(
    ("name", "wish", "nothing"),
    [
        ("modalities", ["text", "audio"], ["text"]),
        ("audio", {"voice": "x"}, None),
        ("web_search_options", {"x": 1}, {}),
        ("moderation", {"model": "x"}, None),
    ],
)
def test_fields_whose_result_can_only_be_missing_have_a_warning(name: str, wish: Any, nothing: Any) -> None:
    """The text comes without sound, search or moderation."""
    assert chat(**{name: wish}).warnings == (f"{name} has no effect here and was ignored",)
    assert chat(**{name: nothing}).warnings == ()


def test_another_models_name_is_warned_of() -> None:
    """Clients send these names; there is one model to serve them."""
    service: Any = SimpleNamespace(names=("mine",), known_names=("mine", "adapter"))
    assert model_warning(service, "gpt-4") == ("model: the one model here is 'mine'; it was used",)
    assert model_warning(service, "adapter") == model_warning(service, None) == ()


@pytest.mark.parametrize(
    "given", [{"97": 1.5}, {"97.0": 1.5}, {"a": 1.5}, [[97, 1.5]], [[97.0, 1.5]], [["a", 1.5]], [["a", 1], [97, 0.5]]]
)
def test_a_logit_bias_has_openais_shape_and_llama_servers(given: Any) -> None:
    """An object or a list of pairs, ids or texts; biases of one token add up."""
    for parse in (completion, chat):
        assert parse(logit_bias=given).params.logit_bias == ((97, 1.5),)


def test_false_bans_a_token() -> None:
    """As in llama-server."""
    assert chat(logit_bias=[[97, False]]).params.logit_bias == chat(logit_bias={"a": False}).params.logit_bias
    assert chat(logit_bias=[[97, False]]).params.logit_bias[0][1] <= -1e6  # type: ignore[index]


def test_an_error_that_names_no_field_stays_as_it_is() -> None:
    """It gets no param."""
    with pytest.raises(InvalidParams) as raised, naming_param({"prompt"}):
        raise InvalidParams("the prompt has no tokens")
    assert api_error_of(raised.value).param is None


@pytest.mark.parametrize(
    ("body", "budget"),
    [
        ({}, None),
        ({"reasoning_budget_tokens": 5}, 5),
        ({"thinking_budget_tokens": 5}, 5),
        ({"reasoning_budget_tokens": 0, "thinking_budget_tokens": 5}, 0),
        ({"reasoning_budget_tokens": -1, "thinking_budget_tokens": 5}, None),
        ({"reasoning_budget_tokens": None, "thinking_budget_tokens": 5}, 5),
    ],
)
def test_a_budget_of_thinking_has_two_names(body: dict[str, Any], budget: int | None) -> None:
    """The first one wins, as in llama-server; -1 leaves it to the server."""
    service: Any = Service(ServerSettings(reasoning_budget=7, reasoning_budget_message="So."))
    options = chat_options_of(OpenAIChatBody.model_validate({"messages": [], **body}), None, None, {}, "auto")
    assert options.thinking_budget == budget
    resolved = service.chat_options(options)
    assert (resolved.thinking_budget, resolved.thinking_message) == (7 if budget is None else budget, "So.")
    asked = OpenAIChatBody.model_validate({"messages": [], "reasoning_budget_message": "Now."})
    own = chat_options_of(asked, None, None, {}, "auto")
    assert service.chat_options(own).thinking_message == "Now."


def test_a_budget_below_minus_one_is_refused() -> None:
    """By its name."""
    with pytest.raises(ValidationError) as raised:
        chat(reasoning_budget_tokens=-2)
    assert raised.value.errors()[0]["loc"][0] == "reasoning_budget_tokens"


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "text"}},
        {"structured_outputs": {"disable_any_whitespace": True}},
        {"guided_json": ""},
    ],
)
def test_a_warning_about_a_schema_names_the_field_that_has_it(body: dict[str, Any]) -> None:
    """Fields beside it that constrain nothing are not named."""
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    (warning,) = chat(json_schema=schema, **body).warnings
    assert warning.startswith("json_schema: #/uniqueItems is left out")
