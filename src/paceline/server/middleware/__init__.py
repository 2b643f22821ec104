"""ASGI middleware that every HTTP request passes before its route. On the event loop."""
