"""Runs the application: the socket, the signals, the end. On the main thread."""

from __future__ import annotations

import uvicorn

from paceline.server.app import build_app
from paceline.server.settings import ServerSettings


def serve(settings: ServerSettings) -> int:
    """Serves until it is told to end; answers the process's exit code."""
    uvicorn.run(build_app(settings), host=settings.host, port=settings.port, access_log=False, server_header=False)
    return 0
