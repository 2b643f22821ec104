"""The engine: the tick, its thread, its instruments."""
