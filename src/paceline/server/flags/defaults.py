"""What holds where a flag is not given, and how values are written for people. Pure; standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paceline.config import EngineConfig
from paceline.server.flags.applying import NO_LIMIT
from paceline.server.flags.flag import SWITCH, Flag, Sets
from paceline.server.settings import ApiKey, ServerSettings

_MOST: Final = 90  # characters of a value
SAMPLING: Final = "the model's own, else the API's"


def default_of(flag: Flag) -> str:
    """What holds without it, in a few words; empty for flags that set nothing."""
    if not isinstance(flag.fate, Sets) or flag.default:
        return flag.default
    place, _, name = flag.fate.targets[0].partition(".")
    if place == "sampling":
        return SAMPLING
    value = getattr(EngineConfig() if place == "engine" else ServerSettings(), name)
    return "off" if value is None and flag.metavar == SWITCH else shown(value)


def shown(value: Any) -> str:
    """A value on one line, shortened; of keys only how many there are."""
    if isinstance(value, tuple) and value and all(isinstance(one, ApiKey) for one in value):
        return _keys(value)
    text = _text(value)
    return text if len(text) <= _MOST else text[: _MOST - 3] + "..."


def _text(value: Any) -> str:
    if value is None or value in ((), [], {}):
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if value == NO_LIMIT:
        return "no limit"
    if isinstance(value, str | Path):
        text = str(value)
        return text if text.isprintable() and text.strip() == text != "" else json.dumps(text, ensure_ascii=False)
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, ensure_ascii=False, default=str)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _keys(keys: tuple[ApiKey, ...]) -> str:
    tenants = sum(bool(key.tenant) for key in keys)
    return f"{len(keys)} (not shown)" + (f", {tenants} of them with a tenant" if tenants else "")
