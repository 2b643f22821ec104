"""Numbered slots, norms of vectors, settings as they are shown."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.params import PatternTrigger, SamplingParams
from paceline.server.dialects.llama_server.completion_request import (
    BANNED_BIAS,
    RANDOM_SEED,
    brief_settings,
    full_settings,
)
from paceline.server.dialects.llama_server.llama_routes import normalize_as
from paceline.server.dialects.llama_server.slots import SlotContent, VirtualSlots


def test_a_request_that_does_not_say_runs_under_the_number_longest_unused() -> None:
    """Of idle slots; if all are taken, a request runs beside another."""
    slots = VirtualSlots(2)
    assert [slots.begin("") for _ in range(3)] == [0, 1, 0]
    slots.end("", 1, None)
    assert slots.begin("") == 1


def test_a_number_beyond_the_last_begins_again() -> None:
    """Numbers wrap around, as with llama-server."""
    assert VirtualSlots(4).begin("", 6) == 2


def test_a_number_holds_what_ran_last_for_each_tenant_alone() -> None:
    """A request that left nothing changes nothing."""
    slots = VirtualSlots(2)
    slots.begin("a", 1)
    slots.end("a", 1, SlotContent((1, 2)))
    slots.begin("a", 1)
    slots.end("a", 1, None)
    assert slots.held("a", 1).token_ids == (1, 2)
    assert slots.held("b", 1).token_ids == slots.held("a", 0).token_ids == ()
    slots.put("a", 1)
    assert slots.held("a", 1) == SlotContent()


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [(-1, [3.0, -4.0]), (0, [24570.0, -32760.0]), (1, [3 / 7, -4 / 7]), (2, [0.6, -0.8]), (400, [0.75, -1.0])],
)
def test_vectors_have_llama_servers_norms(kind: int, wanted: list[float]) -> None:
    """None, largest component, sum, length, and higher powers without overflow."""
    assert normalize_as(np.array([3, -4], dtype=np.float32), kind) == pytest.approx(wanted)


@pytest.mark.parametrize("kind", [-1, 0, 1, 2, 7])
def test_a_vector_of_nothing_stays_one(kind: int) -> None:
    """A zero vector is not divided by its norm."""
    assert normalize_as(np.zeros(3, dtype=np.float32), kind).tolist() == [0, 0, 0]


def test_settings_are_shown_under_llama_servers_names() -> None:
    """No limit of tokens is -1, a drawn seed is the largest, and banned tokens have null for a bias."""
    params = SamplingParams(
        max_tokens=None, ignore_eos=True, logit_bias={5: 1.5, 6: BANNED_BIAS}, penalty_last_n=9, stop="x"
    )
    shown = full_settings(params, (8, 7), stream=True, others={"lora": [{"id": 0, "scale": 1.0}]})
    assert (shown["n_predict"], shown["max_tokens"], shown["seed"], shown["repeat_last_n"]) == (-1, -1, RANDOM_SEED, 9)
    assert shown["logit_bias"] == [
        {"bias": 1.5, "token": 5}, {"bias": None, "token": 6}, {"bias": None, "token": 7}, {"bias": None, "token": 8},
    ]  # fmt: skip
    assert (shown["stop"], shown["stream"], shown["lora"]) == (["x"], True, [{"id": 0, "scale": 1.0}])
    assert set(brief_settings(params)) == set(shown) - {
        "dry_sequence_breakers", "stop", "logit_bias", "grammar", "grammar_lazy", "grammar_triggers", "preserved_tokens",
    }  # fmt: skip


def test_grammars_and_schemas_are_shown() -> None:
    """A schema as it is, beside an empty grammar."""
    lazy = SamplingParams(grammar="root ::= x", grammar_lazy=True, grammar_triggers=("a", 3, PatternTrigger("b", True)))
    shown = full_settings(lazy, (), stream=False, others={})
    assert shown["grammar_triggers"] == [
        {"type": 1, "value": "a"},
        {"type": 0, "value": "", "token": 3},
        {"type": 3, "value": "b"},
    ]
    assert "json_schema" not in shown
    shown = full_settings(SamplingParams(json_schema={"type": "object"}), (), stream=False, others={})
    assert (shown["grammar"], shown["json_schema"]) == ("", {"type": "object"})
