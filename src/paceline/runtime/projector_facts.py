"""What the header of a projector's file (mmproj) says of it, without loading it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.runtime.gguf_file import GgufFile, ValueType, read_gguf
from paceline.runtime.projector_check import check_projector, tensors_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorFacts:
    """Facts about a projector.

    path: of the file. modalities: "image", "audio" or both, sorted. kinds: of its projectors, as llama.cpp names them.
    weights_bytes: of its tensors. image_size, patch_size: of its encoder of images, in pixels; None without one.
    """

    path: str
    modalities: tuple[str, ...]
    kinds: tuple[str, ...]
    weights_bytes: int
    image_size: int | None
    patch_size: int | None


def projector_facts(path: Path) -> ProjectorFacts:
    """Return what a projector's file says. Raises `ModelLoadError` for one that is none or damaged."""
    check_projector(path)
    file = read_gguf(path)
    names = {"image": "vision", "audio": "audio"}
    found = {name: _flag(file, f"clip.has_{encoder}_encoder") for name, encoder in names.items()}
    kinds = (_text(file, "clip.projector_type"), *(_text(file, f"clip.{one}.projector_type") for one in names.values()))
    return ProjectorFacts(
        path=str(path),
        modalities=tuple(sorted(name for name, is_there in found.items() if is_there)),
        kinds=tuple(dict.fromkeys(one for one in kinds if one)),
        weights_bytes=tensors_bytes(path, file),
        image_size=_number(file, "clip.vision.image_size") if found["image"] else None,
        patch_size=_number(file, "clip.vision.patch_size") if found["image"] else None,
    )


def _flag(file: GgufFile, key: str) -> bool:
    value = file.metadata.get(key.encode())
    return value is not None and value.type is ValueType.BOOL and bool(value.value)


def _text(file: GgufFile, key: str) -> str:
    value = file.metadata.get(key.encode())
    return value.value.decode(errors="replace") if value is not None and value.type is ValueType.STRING else ""


def _number(file: GgufFile, key: str) -> int | None:
    value = file.metadata.get(key.encode())
    return int(value.value) if value is not None and value.type is ValueType.UINT32 else None
