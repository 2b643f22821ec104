"""The options of a request besides its prompt."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from paceline.errors import InvalidParams
from paceline.request import OPTION_NAMES, RequestOptions


class Fancy(str):
    """A text with something more."""

    __slots__ = ()


def test_values_are_kept_in_their_plain_types() -> None:
    """They can be sent to another process, whatever numeric or text type the caller used."""
    given: dict[str, Any] = {
        "priority": np.int64(3),
        "timeout_s": np.float32(1.5),
        "interval": np.int16(2),
        "max_buffered_tokens": np.int64(7),
        "truncate": Fancy("left"),
        "slow_reader": Fancy("cancel"),
        "tenant": np.str_("a"),
        "cache_salt": Fancy("b"),
        "request_id": Fancy("c"),
        "lora": {Fancy("d"): np.float64(0.5)},
    }
    options = RequestOptions(**given)
    plain = {int, float, bool, str, tuple, type(None)}
    assert {type(getattr(options, name)) for name in OPTION_NAMES} <= plain
    assert [type(each) for each in options.lora[0]] == [str, float]
    assert dataclasses.replace(options, priority=0) == dataclasses.replace(RequestOptions(**given), priority=0)


def test_a_backlog_without_measure_is_refused() -> None:
    """The error names the bound; None means no limit."""
    with pytest.raises(InvalidParams, match="max_buffered_tokens must be an integer >= 1 and <= 2147483647"):
        RequestOptions(max_buffered_tokens=2**70)
