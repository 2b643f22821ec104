"""The engine: its thread, its backend, and `EngineClient`, which is all that its callers need.

Names are imported when they are first used, so that the process that plans a model's memory loads no engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.engine.adapters import LoraAdapter
    from paceline.engine.client import EngineClient
    from paceline.engine.prompts import prefix_hash
    from paceline.kv_cache import HashedPrefix, PrefixDigest

_HOMES = {
    "EngineClient": "paceline.engine.client",
    "HashedPrefix": "paceline.kv_cache",
    "LoraAdapter": "paceline.engine.adapters",
    "PrefixDigest": "paceline.kv_cache",
    "prefix_hash": "paceline.engine.prompts",
}

__all__ = ["EngineClient", "HashedPrefix", "LoraAdapter", "PrefixDigest", "prefix_hash"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'paceline.engine' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
