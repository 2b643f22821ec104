"""Which projector's file goes with a model: the one that was given, or the one beside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import ModelLoadError


def projectors_beside(paths: Sequence[Path]) -> list[Path]:
    """Return the files beside a model that have "mmproj" in their names, sorted. paths: of the model."""
    found = paths[0].parent.glob("*.gguf")
    return sorted(one for one in found if "mmproj" in one.name.lower() and one not in paths)


def projector_file(paths: Sequence[Path], wanted: str | os.PathLike[str] | bool | None) -> Path | None:
    """Return the projector of a model, None for none; see `EngineConfig.mmproj`. paths: of the model.

    Raises `ModelLoadError` where the one beside the model is wanted, and there is none, or more than one.
    """
    if wanted is False:
        return None
    if wanted is not None and wanted is not True:
        return Path(wanted)
    found = projectors_beside(paths)
    if wanted is True and len(found) != 1:
        there = f"{len(found)}: {', '.join(one.name for one in found)}" if found else "none"
        raise ModelLoadError(
            f"mmproj: there must be one projector, mmproj-*.gguf, beside the model, and {paths[0].parent} has {there}; "
            "give its path"
        )
    return found[0] if len(found) == 1 else None
