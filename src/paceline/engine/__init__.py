"""The engine: its thread, its backend, and `EngineClient`, which is all that its callers need."""

from paceline.engine.client import EngineClient

__all__ = ["EngineClient"]
