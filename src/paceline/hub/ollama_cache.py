"""Models that Ollama has downloaded: manifests by name, blobs by SHA-256. Found and read, never changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline import validation

_MODEL: Final = "application/vnd.ollama.image.model"
_PROJECTOR: Final = "application/vnd.ollama.image.projector"
_MAX_MANIFEST_BYTES: Final = 1 << 20
_REGISTRY: Final = "registry.ollama.ai"
_LIBRARY: Final = "library"


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """A model of Ollama's whose file is there. name: as `ollama list` shows it."""

    name: str
    path: Path
    size: int
    projector: Path | None = None


def ollama_models(folder: Path) -> Iterator[OllamaModel]:
    """Return the models in Ollama's folder, by name."""
    manifests = folder / "manifests"
    for manifest in sorted(each for each in manifests.rglob("*") if each.is_file()):
        found = _read(folder, manifest, manifest.relative_to(manifests).parts)
        if found is not None:
            yield found


def ollama_blob(folder: Path, sha256: str, size: int | None) -> Path | None:
    """Return Ollama's copy of a file, known by its hash."""
    path = folder / "blobs" / f"sha256-{sha256}"
    return path if path.is_file() and size in (None, path.stat().st_size) else None


def full_name(name: str) -> str:
    """Return a model's name with its tag, which is "latest" by default."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _read(folder: Path, manifest: Path, parts: tuple[str, ...]) -> OllamaModel | None:
    if len(parts) < 2:
        return None
    try:
        layers: list[dict[str, Any]] = json.loads(validation.read_file(manifest, _MAX_MANIFEST_BYTES))["layers"]
        digests = {layer["mediaType"]: str(layer["digest"]).replace(":", "-") for layer in layers}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    path = folder / "blobs" / digests.get(_MODEL, "none")
    if not path.is_file():
        return None
    projector = folder / "blobs" / digests.get(_PROJECTOR, "none")
    return OllamaModel(_name(parts), path, path.stat().st_size, projector if projector.is_file() else None)


def _name(parts: tuple[str, ...]) -> str:
    *place, tag = parts
    if place[:1] == [_REGISTRY]:
        place = place[1:]
    if place[:1] == [_LIBRARY]:
        place = place[1:]
    return f"{'/'.join(place)}:{tag}"
