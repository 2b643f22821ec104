"""What every HTTP request goes through before a route sees it. Plain ASGI; on the event loop."""
