"""The stream of what an engine does, GET /v1/engine/events: one watch of the engine, and a reader for each client."""
