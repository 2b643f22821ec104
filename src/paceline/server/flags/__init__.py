"""The flags of `paceline serve`: llama-server's as they are, and ours; one table, one pure resolution, one way to show it."""

from __future__ import annotations

from paceline.server.flags.disk import Disk
from paceline.server.flags.draft import Files, Origin
from paceline.server.flags.resolving import Resolved, resolve

__all__ = ["Disk", "Files", "Origin", "Resolved", "resolve"]
