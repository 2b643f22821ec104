"""Options of the server and of a request together."""

from __future__ import annotations

import pytest

from paceline.errors import InvalidParams
from paceline.server.dialects.request_fields import merge_options, parse_samplers


def test_no_request_outlives_the_servers_limit() -> None:
    """It may ask for less time and not for more; other options it sets as it likes."""
    assert merge_options({"timeout_s": 5.0, "priority": 1}, {"timeout_s": 9.0, "priority": 2}) == {
        "timeout_s": 5.0,
        "priority": 2,
    }
    assert merge_options({"timeout_s": 5.0}, {"timeout_s": 2.0})["timeout_s"] == 2.0
    assert merge_options({"timeout_s": None}, {"timeout_s": 2.0})["timeout_s"] == 2.0


def test_more_samplers_than_a_request_can_mean_are_refused() -> None:
    """Each repeated name has a warning, so that a long list would become a longer one of texts."""
    warnings: list[str] = []
    assert parse_samplers(["top_k"] * 256, warnings) == ("top_k",)
    assert len(warnings) == 255
    for samplers in (["top_k"] * 257, "k" * 257):
        with pytest.raises(InvalidParams, match="samplers must have at most 256 names or letters, not 257"):
            parse_samplers(samplers, warnings)
