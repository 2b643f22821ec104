"""The flags of `paceline serve`: llama-server's and our own.

`table` has a row for each flag, with its reader (`readers`: text to value) and, if it needs one, its setter (`setters`: value to
settings). `resolution` reads command line, environment and file and turns them into `ServerSettings`; `presets` does it for each
model of a server that serves several; `display` shows flags and settings.
"""

from __future__ import annotations

from paceline.server.flags.presets import ModelPreset, ModelPresets, SettingsSource
from paceline.server.flags.resolution import Resolved, resolve, resolve_table
from paceline.server.flags.setters import DiskFiles, Origin

__all__ = [
    "DiskFiles",
    "ModelPreset",
    "ModelPresets",
    "Origin",
    "Resolved",
    "SettingsSource",
    "resolve",
    "resolve_table",
]
