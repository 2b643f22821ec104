"""The reasoning effort of a request among the variables of a chat template."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.chat import template_kwargs


@pytest.mark.parametrize(
    ("effort", "expected"),
    [
        (None, {"a": 1, "reasoning_effort": "low"}),
        ("", {"a": 1, "reasoning_effort": "low"}),
        ("default", {"a": 1}),
        ("none", {"a": 1, "enable_thinking": False}),
        ("high", {"a": 1, "reasoning_effort": "high"}),
    ],
)
def test_the_effort_of_a_request_wins_over_the_variables(effort: str | None, expected: dict[str, Any]) -> None:
    """The word "none" turns thinking off, "default" leaves the effort to the template, and the variables are not changed."""
    variables = {"a": 1, "reasoning_effort": "low"}
    assert template_kwargs(variables, effort) == expected
    assert variables == {"a": 1, "reasoning_effort": "low"}
