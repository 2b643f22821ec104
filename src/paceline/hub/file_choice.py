"""Choose files of a repository as llama.cpp does: the model's quantisation, the parts of a split set, the projector.

A name means the same file as in llama.cpp's `common/download.cpp`. No input or output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from paceline import validation
from paceline.errors import ModelNotFound
from paceline.hub.references import visible

_FIRST: Final = "Q4_K_M"
_SECOND: Final = "Q8_0"
_SPLIT: Final = re.compile(r"(?P<prefix>.+)-(?P<index>[0-9]{5})-of-(?P<count>[0-9]{5})", re.IGNORECASE)
_TAG: Final = re.compile(r"[-.]([A-Z0-9_]+)$", re.IGNORECASE)
_NUMBER: Final = re.compile(r"[0-9]+")
_NO_MODELS: Final = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")  # in names of other kinds of files
_SHOWN: Final = 12


@dataclass(frozen=True, slots=True)
class RepoFile:
    """A file of a repository.

    Attributes:
        path: Its path in the repository.
        size: Bytes.
        blob: Its name in a cache, a hash.
        sha256: The hash of its content, if known.
    """

    path: str
    size: int | None = None
    blob: str | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one model: its parts in order, the reason for the choice, and the projector for images."""

    parts: tuple[RepoFile, ...]
    why: str
    projector: RepoFile | None = None

    @property
    def first(self) -> RepoFile:
        """The file to load."""
        return self.parts[0]

    @property
    def size(self) -> int | None:
        """Bytes of all parts; None if a size is unknown."""
        sizes = [part.size for part in self.parts if part.size is not None]
        return sum(sizes) if len(sizes) == len(self.parts) else None


Fits = Callable[[ModelFiles], bool]
"""Whether a model would fit into this machine's memory."""


@dataclass(frozen=True, slots=True)
class _NameParts:
    prefix: str
    tag: str
    index: int
    count: int


def choose_files(
    files: Sequence[RepoFile], *, repo: str, quantisation: str | None = None, file: str | None = None, fits: Fits
) -> ModelFiles:
    """Choose the model of a repository, in the order in which the hub lists its files.

    The named file wins, then the named quantisation, then Q4_K_M, then the first of Q8_0 and all others that fits into
    memory, and at last the smallest model. Raises `ModelNotFound` with the nearest names.
    """
    if file is not None:
        first = next((each for each in files if each.path == file), None)
        if first is None:
            raise ModelNotFound(f"{repo} has no file {file!r}; {nearest_names(file, [each.path for each in files])}")
        return _model(files, first, "as named")
    models = [each for each in files if is_model_file(each.path) and _parts_of(each.path).index == 1]
    if not models:
        raise _no_models(files, repo)
    if quantisation is not None:
        first = _of_quantisation(models, quantisation)
        if first is None:
            near = nearest_names(quantisation.upper(), quantisations(models))
            raise ModelNotFound(f"{repo} has no quantisation {quantisation!r}; {near}")
        return _model(files, first, "as named")
    return _by_default(files, models, fits)


def is_model_file(path: str) -> bool:
    """Return whether a file is a model: GGUF, and no projector, importance matrix or draft head."""
    name = path.rpartition("/")[2]
    return path.endswith(".gguf") and not any(word in name for word in _NO_MODELS)


def is_projector_file(path: str) -> bool:
    """Return whether a file is a projector for images."""
    return path.endswith(".gguf") and "mmproj" in path


def quantisation_of(path: str) -> str:
    """Return the quantisation at the end of a file's name in capitals, or an empty text."""
    return _parts_of(path).tag


def quantisations(files: Sequence[RepoFile]) -> list[str]:
    """Return the quantisations of a repository's models, in the hub's order."""
    models = (each.path for each in files if is_model_file(each.path) and _parts_of(each.path).index == 1)
    return list(dict.fromkeys(quantisation_of(path) or path for path in models))


def split_names(name: str) -> list[str]:
    """Return the names of all parts of a split set, given the name of any part. A single file is its only part."""
    parts = _parts_of(name)
    if parts.count <= 1:
        return [name]
    return [f"{parts.prefix}-{index:05d}-of-{parts.count:05d}.gguf" for index in range(1, parts.count + 1)]


def _parts_of(path: str) -> _NameParts:
    if not path.endswith(".gguf"):
        return _NameParts("", "", 0, 0)
    prefix, index, count = path.removesuffix(".gguf"), 1, 1
    split = _SPLIT.fullmatch(prefix)
    if split is not None:
        prefix, index, count = split["prefix"], int(split["index"]), int(split["count"])
    tag = _TAG.search(prefix)
    return _NameParts(prefix, "" if tag is None else tag[1].upper(), index, count)


def _by_default(files: Sequence[RepoFile], models: Sequence[RepoFile], fits: Fits) -> ModelFiles:
    preferred = _of_quantisation(models, _FIRST)
    if preferred is not None:
        return _model(files, preferred, f"{_FIRST} is the default")
    second = _of_quantisation(models, _SECOND)
    ordered = [
        _model(files, each, "") for each in ([second] if second else []) + [m for m in models if m is not second]
    ]
    too_large = list(takewhile(lambda model: not fits(model), ordered))
    if len(too_large) == len(ordered):
        smallest = min(ordered, key=lambda model: model.size or 0)
        return _model(files, smallest.first, f"there is no {_FIRST}, and nothing fits into memory: the smallest")
    chosen = ordered[len(too_large)]
    if too_large:
        name = quantisation_of(too_large[0].first.path) or too_large[0].first.path
        return _model(files, chosen.first, f"there is no {_FIRST}, and {name} does not fit into memory")
    return _model(files, chosen.first, f"there is no {_FIRST}")


def _of_quantisation(models: Sequence[RepoFile], quantisation: str) -> RepoFile | None:
    pattern = re.compile(re.escape(quantisation) + "[.-]", re.IGNORECASE)
    return next((each for each in models if pattern.search(each.path)), None)


def _model(files: Sequence[RepoFile], first: RepoFile, why: str) -> ModelFiles:
    """Return the model with all parts of a set, in order. Raises `ModelNotFound` if the repository lacks a part."""
    by_path = {each.path: each for each in files}
    names = split_names(first.path)
    missing = [name for name in names if name not in by_path]
    if missing:
        raise ModelNotFound(
            visible(f"{first.path} is one of {len(names)} parts, and {missing[0]} is missing beside it")
        )
    return ModelFiles(tuple(by_path[name] for name in names), why, _projector(files, first.path))


def _projector(files: Sequence[RepoFile], model: str) -> RepoFile | None:
    """Return the projector with the nearest number of bits in the model's folder or the nearest folder above it."""
    folders = model.split("/")[:-1]
    bits = _bits(model)
    best: tuple[int, int] | None = None
    found = None
    for each in files:
        own = each.path.split("/")[:-1]
        if not is_projector_file(each.path) or own != folders[: len(own)]:
            continue
        rank = (-len(own), abs(_bits(each.path) - bits))
        if best is None or rank < best:
            best, found = rank, each
    return found


def _bits(path: str) -> int:
    number = _NUMBER.search(_parts_of(path).tag)
    return 0 if number is None else int(number[0])


def _no_models(files: Sequence[RepoFile], repo: str) -> ModelNotFound:
    if any(each.path.endswith((".safetensors", ".bin")) for each in files):
        return ModelNotFound(
            f"{repo} has no GGUF file, only weights for other programs; look for a repository named {repo}-GGUF, "
            "or convert them with llama.cpp's convert_hf_to_gguf.py"
        )
    return ModelNotFound(f"{repo} has no GGUF file of a model")


def nearest_names(name: str, names: Sequence[str]) -> str:
    """Return "did you mean ..." for a message, or the list of names if none is near."""
    names = [visible(each) for each in names]
    near = validation.nearest_names(name, names, most=3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    if not names:
        return "there are no others"
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"there is {', '.join(names[:_SHOWN])}{rest}"
