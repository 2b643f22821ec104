"""The check of fields that an endpoint does not act on."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from paceline.errors import InvalidParams
from paceline.server.api_errors import ApiException
from paceline.server.dialects.request_body import (
    FieldRules,
    RequestBody,
    cap_warnings,
    check_fields,
    merge_options,
    parse_samplers,
)


class Inner(RequestBody):
    """An object in a body."""

    depth: int | None = None


class Outer(RequestBody):
    """A body with every kind of field."""

    rules: ClassVar[FieldRules] = FieldRules(
        without_effect=("user",),
        declared_without_effect=("tier",),
        unsupported={"sound": "leave it out"},
        harmless={"tier": ("auto",), "sound": ("off",)},
        renamed=("old",),
        hints={"key": "send it as a header"},
    )

    number: int | None = None
    share: float | None = None
    anything: Any = None
    tier: str | None = None
    inner: Inner | None = None


def warnings(*, strict: bool = False, **fields: Any) -> list[str]:
    return Outer.model_validate(fields).field_warnings(strict=strict)


def test_each_kind_of_field_has_its_own_warning() -> None:
    """Fields that the endpoint acts on, other names of these, and null have none."""
    assert warnings(number=1, old=2, user=None, unheard=None) == []
    assert warnings(user="me") == ["user has no effect here and was ignored"]
    assert warnings(tier="fast") == ["tier has no effect here and was ignored"]
    assert warnings(numbr=1) == ["numbr is not a field of this endpoint and was ignored; did you mean number?"]
    assert warnings(key=1) == ["key is not a field of this endpoint and was ignored; send it as a header"]
    assert warnings(inner={"x y": 1}) == ["inner.'x y' is not a field of this endpoint and was ignored"]


@pytest.mark.parametrize("fields", [{"user": ""}, {"user": {}}, {"tier": "auto"}, {"sound": False}, {"sound": "off"}])
def test_values_that_ask_for_nothing_have_no_warning(fields: dict[str, Any]) -> None:
    """They match the endpoint's behaviour anyway."""
    assert warnings(**fields) == []


@pytest.mark.parametrize("strict", [False, True])
def test_an_unsupported_field_is_an_error(strict: bool) -> None:
    """With the way out."""
    with pytest.raises(ApiException, match="sound is not supported here; leave it out") as raised:
        warnings(strict=strict, sound="on")
    assert (raised.value.api_error.status, raised.value.api_error.code) == (400, "unsupported")


@pytest.mark.parametrize(
    ("fields", "param"), [({"numbr": 1}, "numbr"), ({"inner": {"dept": 1}}, "inner.dept"), ({"x" * 500: 1}, "x" * 80)]
)
def test_an_unknown_field_is_an_error_if_strict(fields: dict[str, Any], param: str) -> None:
    """Known fields without effect are none."""
    assert len(warnings(strict=True, user="me", tier="fast", old=1, unheard=None)) == 2
    with pytest.raises(ApiException, match="is not a field of this endpoint; ") as raised:
        warnings(strict=True, **fields)
    assert (raised.value.api_error.param, raised.value.api_error.code) == (param, "unknown_parameter")


def test_a_field_may_have_the_name_of_a_method() -> None:
    """Its value is the request's."""
    assert warnings(copy=None, model_dump=None) == []
    assert len(warnings(copy=1, field_warnings=1)) == 2


def test_warnings_are_bounded() -> None:
    """In number and in length."""
    found = check_fields({f"{index}{'x' * 10_000}": 1 for index in range(1000)}, ("number",))
    assert len(found) == 17
    assert found[-1] == "984 more unknown fields were ignored"
    assert max(map(len, found)) < 200
    assert cap_warnings(["w"] * 32) == ("w",) * 32
    assert cap_warnings(["w"] * 40) == (*["w"] * 32, "and 8 more warnings")
    assert cap_warnings(["w"] * 33)[-1] == "and 1 more warning"


@pytest.mark.parametrize(("given", "found"), [(100.0, 100), (-1.0, -1), (2.0**63, 2**63), (7, 7)])
def test_a_whole_float_is_an_integer(given: float, found: int) -> None:
    """Also in fields that are checked later."""
    body = Outer.model_validate({"number": given, "anything": given, "share": given})
    assert (body.number, body.anything, body.share) == (found, found, given)
    assert isinstance(body.number, int)
    assert isinstance(body.anything, int)
    assert isinstance(body.share, float)


@pytest.mark.parametrize("value", [100.5, "100", True, float("nan"), float("inf"), 1e300, [1]])
def test_other_values_are_no_integers(value: Any) -> None:
    """The error names the field."""
    with pytest.raises(ValidationError) as raised:
        Outer.model_validate({"number": value})
    assert raised.value.errors()[0]["loc"] == ("number",)


def test_no_request_outlives_the_servers_limit() -> None:
    """It may ask for less time and not for more; other options it sets as it likes."""
    assert merge_options({"timeout_s": 5.0, "priority": 1}, {"timeout_s": 9.0, "priority": 2}) == {
        "timeout_s": 5.0,
        "priority": 2,
    }
    assert merge_options({"timeout_s": 5.0}, {"timeout_s": 2.0})["timeout_s"] == 2.0
    assert merge_options({"timeout_s": None}, {"timeout_s": 2.0})["timeout_s"] == 2.0


def test_more_samplers_than_a_request_can_mean_are_refused() -> None:
    """Each repeated name has a warning, so that a long list would become a longer list of texts."""
    warnings: list[str] = []
    assert parse_samplers(["top_k"] * 256, warnings) == ("top_k",)
    assert len(warnings) == 255
    for samplers in (["top_k"] * 257, "k" * 257):
        with pytest.raises(InvalidParams, match="samplers must have at most 256 names or letters, not 257"):
            parse_samplers(samplers, warnings)
