"""The bodies of llama-server's requests: accepted, refused and ignored fields."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from paceline.server.dialects.llama_server.llama_bodies import CompletionBody, RerankBody


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", True),
        ("temperature", "0.5"),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("n_predict", 1.5),
        ("n_predict", -2),
        ("n_predict", True),
        ("n_predict", 2**31),
        ("stream", 1),
        ("n_cmpl", 0),
        ("stop", [1]),
        ("top_k", "40"),
        ("lora", [{"scale": 1}]),
        ("lora", {"id": 0}),
        ("repeat_last_n", -2),
        ("stop", ["x"] * 2000),
    ],
)
def test_a_value_of_another_type_or_beyond_its_bounds_is_refused(field: str, value: Any) -> None:
    """A bool is no number, a text is none, and a number with a fraction is no integer."""
    with pytest.raises(ValidationError, match=field):
        CompletionBody.model_validate({"prompt": "x", field: value})


def test_a_whole_number_may_be_written_with_a_point() -> None:
    """JSON has one kind of number."""
    body = CompletionBody.model_validate({"n_predict": 12.0, "temperature": 1, "seed": -1.0, "max_draft": 4.0})
    assert (body.n_predict, body.temperature, body.seed, body.max_draft) == (12, 1.0, -1, 4)
    assert isinstance(body.n_predict, int)


def test_a_client_can_choose_no_code_of_the_servers() -> None:
    """The name of a constraint of one's own is no field."""
    assert not {"constraint", "logits_processors", "thinking"} & CompletionBody.model_fields.keys()


def test_null_is_as_good_as_absent() -> None:
    """For every field, and nothing is reported as ignored."""
    names = [*(field.alias or name for name, field in CompletionBody.model_fields.items()), "unheard_of"]
    body = CompletionBody.model_validate(dict.fromkeys(names))
    assert body == CompletionBody(unheard_of=None)
    assert body.field_warnings() == []


def test_an_ignored_field_is_named_but_for_what_asks_for_nothing() -> None:
    """Unknown fields, and known fields without effect here, unless they have their default."""
    body = CompletionBody.model_validate(
        {"foo": 0, "n_keep": 5, "n_discard": 0, "speculative.n_min": 3, "preserved_tokens": [], "verbose": False}
    )
    assert [field_warning.split()[0] for field_warning in body.field_warnings()] == [
        "n_keep",
        "speculative.n_min",
        "foo",
    ]


def test_text_that_utf8_cannot_carry_is_refused() -> None:
    """If it would come back in the response, like names of unknown fields."""
    with pytest.raises(ValidationError, match="surrogate"):
        RerankBody.model_validate({"query": "q", "model": "\ud800"})
    with pytest.raises(ValidationError, match="unicode"):
        CompletionBody.model_validate({"\ud800": 1})


def test_required_fields_are_required() -> None:
    """A query."""
    with pytest.raises(ValidationError, match="query"):
        RerankBody.model_validate({"documents": ["a"]})


def test_of_many_ignored_fields_some_are_named() -> None:
    """The warning has the number of the others."""
    sentences = RerankBody.model_validate({"query": "q", **{f"field{i}": i for i in range(100)}}).field_warnings()
    assert len(sentences) == 17
    assert sentences[-1] == "84 more unknown fields were ignored"
