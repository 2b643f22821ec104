"""Parameters of which a plain run of the tests tries some, and `pytest -m full` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], every: int) -> list[Any]:
    """Return the parameters, with the mark `full` at all but each n-th, beginning with the first; tuples have several."""
    return [
        value
        if index % every == 0
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.full)
        for index, value in enumerate(values)
    ]
