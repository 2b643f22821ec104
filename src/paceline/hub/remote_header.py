"""Read the headers of a model on the hub without downloading it: what it is, and what it would need.

The first bytes go to a sparse file of the model's length, so that whatever reads a GGUF file reads this one: metadata and
shapes are there, the weights are not. Blocking; no more than the header is requested.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.errors import ModelLoadError, ModelNotFound
from paceline.hub.file_choice import RepoFile, quantisations
from paceline.hub.hub_api import HubApi, RepoListing
from paceline.hub.locate import Locator, hub_name
from paceline.hub.references import HubReference
from paceline.hub.transfer import first_bytes
from paceline.runtime.gguf_file import read_gguf

_FIRST_BYTES: Final = 1 << 20
_GROWTH: Final = 8  # vocabularies of 250,000 tokens take some 10 MB
_MOST_BYTES: Final = 1 << 26  # a header that does not end within these is damaged


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model that was not downloaded.

    paths: sparse files with its headers, of a split set all parts. size: bytes of the whole model. quantisations: of the
    repository. has_projector: whether it has one for images.
    """

    name: str
    paths: tuple[Path, ...]
    size: int
    quantisations: tuple[str, ...]
    has_projector: bool


@contextmanager
def hub_model(locator: Locator, reference: HubReference) -> Iterator[HubModel]:
    """Choose a model of the hub as `Locator.locate` does, and read its headers; the files are gone after the block.

    Raises what `Locator.locate` raises, and `ModelLoadError` for a file that is no valid GGUF.
    """
    if locator.settings.offline:
        raise ModelNotFound(f"hf:{reference} is not in the caches, and offline forbids to ask the hub about it")
    api = HubApi(locator.settings, locator.observer, locator.cancel)
    listing = api.listing(reference.repo, reference.revision)
    chosen = locator.choose(listing, reference)
    with tempfile.TemporaryDirectory(prefix="paceline-header-") as folder:
        yield HubModel(
            name=hub_name(reference, chosen),
            paths=tuple(_header_file(api, listing, part, Path(folder)) for part in chosen.parts),
            size=chosen.size or 0,
            quantisations=tuple(quantisations(listing.files)),
            has_projector=chosen.projector is not None,
        )


def _header_file(api: HubApi, listing: RepoListing, file: RepoFile, folder: Path) -> Path:
    path = folder / Path(file.path).name
    url, headers = api.url(listing.repo, listing.commit, file.path), api.headers()
    count = _FIRST_BYTES
    while True:
        data = first_bytes(url, headers, count, file.path)
        is_whole = len(data) < count or len(data) == file.size
        with path.open("wb") as target:
            target.write(data)
            target.truncate(max(file.size or 0, len(data)))
        try:
            if is_whole or read_gguf(path).header_bytes <= len(data):
                return path
        except ModelLoadError:
            if not data.startswith(b"GGUF") or count >= _MOST_BYTES:
                raise
        if count >= _MOST_BYTES:
            raise ModelLoadError(f"{file.path}: its header does not end within {_MOST_BYTES >> 20} MiB")
        count *= _GROWTH
