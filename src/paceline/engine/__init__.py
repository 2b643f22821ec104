"""The engine: its thread, its backend, and `EngineClient`, which is all that its callers need."""

from paceline.engine.client import EngineClient
from paceline.engine.prompts import prefix_hash
from paceline.kv_cache import HashedPrefix, PrefixDigest

__all__ = ["EngineClient", "HashedPrefix", "PrefixDigest", "prefix_hash"]
