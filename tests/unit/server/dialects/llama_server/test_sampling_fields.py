"""From llama-server's fields to SamplingParams: names, special values, bounds, grammars, biases, adapters."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from tests.media_requests import request_media
from tests.unit.server.dialects.llama_server.letters import letters

from paceline.errors import InvalidParams, InvalidType, Unsupported
from paceline.params import PatternTrigger, SamplingParams
from paceline.sampling_table import API_DEFAULTS
from paceline.server.dialects.llama_server.completion_request import (
    BANNED_BIAS,
    RANDOM_SEED,
    ParseContext,
    parse_lora_scales,
    parse_options,
    parse_params,
)
from paceline.server.dialects.llama_server.llama_bodies import CompletionBody, LoraScale
from paceline.server.dialects.request_body import MarkedImages

BASE = SamplingParams(**API_DEFAULTS["llama_server"])


def read(fields: dict[str, Any], base: SamplingParams = BASE) -> tuple[SamplingParams, list[str]]:
    """Return the params of a body, and its warnings."""
    warnings: list[str] = []
    setting = ParseContext(
        base=base, tokenizer=letters(), images=MarkedImages("<m>", request_media()), adapters=("first", "second")
    )
    return parse_params(CompletionBody.model_validate(fields), setting, warnings), warnings


def params(**fields: Any) -> SamplingParams:
    """Return the params of a body without warnings."""
    found, warnings = read(fields)
    assert warnings == []
    return found


def test_an_empty_body_has_the_defaults() -> None:
    """The API's defaults: no limit of tokens, else llama.cpp's."""
    assert params() == SamplingParams(max_tokens=None)


def test_fields_keep_their_names_but_for_two() -> None:
    """repeat_last_n is penalty_last_n, n_cmpl is n."""
    found = params(
        temperature=0.3, top_k=7, typical_p=0.9, repeat_last_n=-1, n_cmpl=3, mirostat_tau=2, dry_penalty_last_n=-1
    )
    wanted = BASE.replace(
        temperature=0.3, top_k=7, typical_p=0.9, penalty_last_n=-1, n=3, mirostat_tau=2, dry_penalty_last_n=-1
    )
    assert found == wanted


def options(**fields: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the options of a body, and its warnings."""
    warnings: list[str] = []
    return parse_options(CompletionBody.model_validate(fields), warnings), warnings


def test_most_drafts_have_llama_servers_name_too() -> None:
    """Above the possible number it counts as the most; our field comes first."""
    assert options(**{"speculative.n_max": 3}) == ({"max_draft": 3}, [])
    assert options(**{"speculative.n_max": 0.0}) == ({"max_draft": 0}, [])
    assert options(**{"speculative.n_max": 64}) == ({"max_draft": 64}, [])
    most, warnings = options(**{"speculative.n_max": 100})
    assert (most, warnings) == ({"max_draft": 64}, ["speculative.n_max: 100 counts as 64"])
    both, warnings = options(**{"speculative.n_max": 3, "max_draft": 5})
    assert both == {"max_draft": 5}
    assert "speculative.n_max" in warnings[0]
    for wrong in (-1, 2**31, "3", True):
        with pytest.raises(ValidationError, match=r"speculative\.n_max"):
            options(**{"speculative.n_max": wrong})


@pytest.mark.parametrize("name", ["n_predict", "max_tokens", "max_completion_tokens"])
def test_the_length_has_three_names(name: str) -> None:
    """All three are accepted, and -1 is the server's default."""
    assert params(**{name: 9}).max_tokens == 9
    assert params(**{name: 0}).max_tokens == 0
    assert params(**{name: -1}).max_tokens is None
    assert read({name: -1}, BASE.replace(max_tokens=77))[0].max_tokens == 77


def test_the_first_of_two_lengths_counts() -> None:
    """n_predict before the others, unless it is null."""
    assert params(n_predict=3, max_tokens=5).max_tokens == 3
    assert params(n_predict=None, max_tokens=5).max_tokens == 5


@pytest.mark.parametrize("seed", [-1, RANDOM_SEED])
def test_two_seeds_are_drawn(seed: int) -> None:
    """-1, and its value in 32 bits."""
    assert params(seed=seed).seed is None
    assert params(seed=7).seed == 7
    assert params(seed=-2).seed == RANDOM_SEED - 1


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("temperature", -1, 0),
        ("top_k", -5, 0),
        ("top_n_sigma", -3, -1),
        ("adaptive_target", -9, -1),
        ("typical_p", 2, 1),
    ],
)
def test_values_beyond_off_are_off(name: str, value: float, wanted: float) -> None:
    """Without a warning, as this is their meaning."""
    assert getattr(params(**{name: value}), name) == wanted


@pytest.mark.parametrize(
    ("name", "value", "wanted"), [("top_p", 1.5, 1), ("min_p", -0.1, 0), ("mirostat", 7, 2), ("xtc_threshold", 3, 1)]
)
def test_what_llama_server_clamps_is_clamped_and_reported(name: str, value: float, wanted: float) -> None:
    """No silent change."""
    found, warnings = read({name: value})
    assert getattr(found, name) == wanted
    assert warnings == [
        f"{name}: {float(value) if name != 'mirostat' else value} counts as {wanted}.0"
    ] or warnings == [f"{name}: {value} counts as {wanted}"]


def test_a_dry_base_below_one_is_the_servers() -> None:
    """It is replaced by the server's, with a warning."""
    found, warnings = read({"dry_base": 0.5})
    assert found.dry_base == BASE.dry_base
    assert "dry_base" in warnings[0]


def test_unsupported_fields_that_would_change_the_output_are_refused() -> None:
    """min_keep beyond one."""
    assert params(min_keep=1) == BASE
    with pytest.raises(Unsupported, match="min_keep"):
        read({"min_keep": 2})


def test_stops_without_letters_are_dropped() -> None:
    """The rest is the request's; nothing left: the server's."""
    assert params(stop=["a", "", "b", "a"]).stop == ("a", "b")
    assert params(stop="x").stop == ("x",)
    assert read({"stop": [""]}, BASE.replace(stop=("its own",)))[0].stop == ("its own",)


def test_a_grammar_wins_over_a_schema() -> None:
    """An empty one is none; a schema without members means any object."""
    assert params(grammar="", json_schema={"type": "string"}).json_schema == '{"type": "string"}'
    assert params(json_schema={}).json_schema == '{"type": "object"}'
    found, warnings = read({"grammar": "root ::= [a-z]", "json_schema": {}})
    assert (found.grammar, found.json_schema) == ("root ::= [a-z]", None)
    assert "json_schema" in warnings[0]


def test_a_lazy_grammar_has_words_tokens_and_patterns_as_triggers() -> None:
    """Triggers have llama-server's numbers for their kinds."""
    lazy = {"grammar": "root ::= x", "grammar_lazy": True}
    triggers = [{"type": 1, "value": "<tool>"}, {"type": 0, "value": "", "token": 12}]
    patterns = [{"type": 2, "value": "a.*"}, {"type": 3, "value": "b"}]
    found = params(**lazy, grammar_triggers=[*triggers, *patterns])
    assert found.grammar_triggers == ("<tool>", 12, PatternTrigger("a.*"), PatternTrigger("b", is_full=True))
    for wrong in ({"type": 4, "value": "a"}, {"type": 2, "value": ""}):
        with pytest.raises(InvalidParams, match=r"grammar_triggers\[0\]\.(type must be|pattern must have 1 to)"):
            read({**lazy, "grammar_triggers": [wrong]})


def test_probabilities_are_asked_for_by_two_names() -> None:
    """0 asks for none; after sampling only on request."""
    assert params(n_probs=0).logprobs is None
    assert params(logprobs=3).logprobs == 3
    assert params(n_probs=2, logprobs=3).logprobs == 2
    assert params(n_probs=2, post_sampling_probs=True).logprobs_mode == "sampled"


@pytest.mark.parametrize(
    "form", [[[97, 1.5], [98, 1.5]], [["ab", 1.5]], {"97": 1.5, "98": 1.5}, {"ab": 1.5}, {"97": 1.5, "b": 1.5}]
)
def test_biases_have_five_forms(form: Any) -> None:
    """Pairs or an object, ids or texts; a text's tokens all get it."""
    assert params(logit_bias=form).logit_bias == ((97, 1.5), (98, 1.5))


def test_false_is_never_and_biases_of_one_token_add_up() -> None:
    """Biases of one token are summed, as with llama-server."""
    assert params(logit_bias=[[97, False]]).logit_bias == ((97, BANNED_BIAS),)
    assert params(logit_bias=[[97, 1], ["a", 2.5]]).logit_bias == ((97, 3.5),)


def test_biases_have_an_end() -> None:
    """More than a vocabulary needs are refused before they are looked at."""
    with pytest.raises(InvalidParams, match="65536"):
        read({"logit_bias": [None] * 65537})


def test_invalid_biases_are_left_out_and_reported() -> None:
    """Another shape, true, an id that the vocabulary has not."""
    found, warnings = read({"logit_bias": [[97], "x", [97, True], [97, None], [400, 1], [-1, 1], [97, 2]]})
    assert found.logit_bias == ((97, 2.0),)
    assert len(warnings) == 6


@pytest.mark.parametrize(
    ("name", "value"), [("logit_bias", 3), ("logit_bias", "x"), ("json_schema", "{}"), ("json_schema", 4)]
)
def test_values_that_may_be_large_are_checked_where_they_are_read(name: str, value: Any) -> None:
    """The checks do not run on the event loop."""
    with pytest.raises(InvalidType, match=name):
        read({name: value})


def test_samplers_have_names_other_names_and_letters() -> None:
    """Invalid and repeated names are left out with a warning."""
    assert params(samplers=["top-k", "Temp", "minp", "typ", "nucleus"]).samplers == (
        "top_k",
        "temperature",
        "min_p",
        "typ_p",
        "top_p",
    )
    assert params(samplers="edskypmxt").samplers == SamplingParams().samplers
    found, warnings = read({"samplers": ["top_k", "magic", "top_k"]})
    assert found.samplers == ("top_k",)
    assert len(warnings) == 2


def test_breakers_must_be_some() -> None:
    """An empty list is refused, as with llama-server."""
    assert params(dry_sequence_breakers=["x"]).dry_sequence_breakers == ("x",)
    with pytest.raises(InvalidParams, match="dry_sequence_breakers"):
        read({"dry_sequence_breakers": []})


def test_adapters_are_named_by_number() -> None:
    """Unknown names are reported."""
    warnings: list[str] = []
    entries = [LoraScale(id=1, scale=0.5), LoraScale(id=7, scale=1.0)]
    assert parse_lora_scales(entries, ("first", "second"), warnings) == {"second": 0.5}
    assert warnings == ["lora: there is no adapter 7, and it was ignored"]
