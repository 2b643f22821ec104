"""The flags of `paceline serve`: llama-server's and our own.

One table (`table`) of records (`flag`) with readers (text to value) and setters (value to settings); `sources` reads command
line, environment and file, `resolution` turns them into `ServerSettings`, and `display` shows them. `model_presets` and
`preset_file` find the models of a server that serves several.
"""

from __future__ import annotations

from paceline.server.flags.flag import DiskFiles, Files, Origin
from paceline.server.flags.model_presets import ModelPreset, ModelPresets
from paceline.server.flags.resolution import Resolved, resolve, resolve_table

__all__ = ["DiskFiles", "Files", "ModelPreset", "ModelPresets", "Origin", "Resolved", "resolve", "resolve_table"]
