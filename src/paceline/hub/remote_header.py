"""Read the headers of a model on the network without downloading it.

The first bytes go to a sparse file of the model's length, which any reader of GGUF files can read: metadata and shapes are
there, the weights are not. Blocking; no more than the header is requested.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Final

from paceline.errors import Aborted, DiskFull, HubUnavailable, ModelLoadError, ModelNotFound
from paceline.hub.caches import LocalModel
from paceline.hub.download import DownloadObserver
from paceline.hub.file_choice import quantisations
from paceline.hub.locate import ListedModel, Locator, part_urls
from paceline.hub.network import (
    Passing,
    body_pieces,
    content_range,
    new_client,
    open_response,
    refused,
    whole_number,
    with_retries,
)
from paceline.hub.references import (
    HubReference,
    ModelReference,
    UrlReference,
    hub_settings,
    parse_reference,
    without_secrets,
)
from paceline.runtime.gguf_file import read_gguf_start

_log = logging.getLogger("paceline.hub")

_FIRST_BYTES: Final = 1 << 20
_GROWTH: Final = 8  # vocabularies of 250,000 tokens take some 10 MB
_MOST_BYTES: Final = 1 << 26  # a header that does not end within these is damaged
_MOST_FILE_BYTES: Final = 1 << 44
_WAITS_S: Final = (1.0, 1.0)  # before each retry


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHeaders:
    """Files with the headers of a model.

    Attributes:
        name: The full name.
        paths: All parts; sparse files if the model is not on this machine.
        size: Bytes of the whole model.
        is_local: Whether it is on this machine.
        files: The names of the files.
        quantisations: All quantisations in the listing of its repository.
        has_projector: Whether it has a projector for images.
    """

    name: str
    paths: tuple[Path, ...]
    size: int
    is_local: bool
    files: tuple[str, ...]
    quantisations: tuple[str, ...] = ()
    has_projector: bool = False


@contextmanager
def model_headers(
    model: str | ModelReference,
    *,
    offline: bool = False,
    hf_token: str | None = None,
    cancel: threading.Event | None = None,
    note: Callable[[str], object] = _log.info,
) -> Iterator[ModelHeaders]:
    """Yield the headers of a named model, from the caches or from the first bytes of its files.

    Chooses the same files as `local_model` and downloads nothing; temporary files are deleted after the block. Raises as
    `local_model`, and `ModelLoadError` if a file is not valid GGUF.
    """
    reference = parse_reference(model) if isinstance(model, str) else model
    locator = Locator(
        settings=hub_settings(token=hf_token, offline=offline),
        observer=DownloadObserver(note),
        cancel=threading.Event() if cancel is None else cancel,
    )
    listed: ListedModel | None = None
    match reference:
        case HubReference():
            found = locator.look_up(reference)
            listed = None if isinstance(found, LocalModel) else found
            local = found if isinstance(found, LocalModel) else locator.complete(found)
        case UrlReference():
            local = locator.downloaded(reference)
            if local is None and locator.settings.offline:
                raise ModelNotFound(f"{reference} was not downloaded before, and offline forbids to request its header")
        case _:
            local = locator.locate(reference)
    all_quantisations = () if listed is None else tuple(quantisations(listed.listing.files))
    projector = None if listed is None else listed.chosen.projector
    if local is not None:
        yield ModelHeaders(
            name=local.name,
            paths=local.parts,
            size=local.size,
            is_local=True,
            files=tuple(part.name for part in local.parts),
            quantisations=all_quantisations,
            has_projector=(local.projector or projector) is not None,
        )
        return
    name, headers, files = str(reference), {}, []
    if listed is not None:
        name, headers, listing = listed.name, listed.api.headers(), listed.listing
        paths = [part.path for part in listed.chosen.parts]
        files = [_RemoteFile(listed.api.url(listing.repo, listing.commit, path), path, headers) for path in paths]
    elif isinstance(reference, UrlReference):
        files = [_RemoteFile(url, part, headers) for url, part in part_urls(reference)]
    with tempfile.TemporaryDirectory(prefix="paceline-header-") as folder:
        parts = tuple(_header_file(locator, file, Path(folder)) for file in files)
        yield ModelHeaders(
            name=name,
            paths=parts,
            size=sum(part.stat().st_size for part in parts),
            is_local=False,
            files=tuple(file.name for file in files),
            quantisations=all_quantisations,
            has_projector=projector is not None,
        )


@dataclass(frozen=True, slots=True)
class _RemoteFile:
    url: str
    name: str
    headers: Mapping[str, str]


def _header_file(locator: Locator, file: _RemoteFile, folder: Path) -> Path:
    """Request the header of a file, in a few steps at most, and return a sparse file of the whole file's length."""
    count = _FIRST_BYTES
    while True:
        try:
            data, total = with_retries(
                partial(first_bytes, file, count, locator.cancel),
                _WAITS_S,
                locator.observer.note,
                locator.cancel,
                f"reading {file.name}",
            )
        except Passing as error:
            raise HubUnavailable(f"{error}; try again later") from None
        is_short = len(data) < count
        file_bytes = max(len(data), total or 0) if is_short else total
        if file_bytes is not None and file_bytes > _MOST_FILE_BYTES:
            raise ModelLoadError(f"{file.name}: the server says that it has {file_bytes} bytes, more than any model")
        if read_gguf_start(data, file.name, file_bytes) is not None:
            break
        if is_short:  # the server limits its ranges; a larger request would return no more
            raise HubUnavailable(
                f"the server sent {len(data)} of the first {count} bytes of {file.name}, in which its header does not end; "
                "try again later, or download the model"
            )
        if count >= _MOST_BYTES:
            raise ModelLoadError(f"{file.name}: its header does not end within {_MOST_BYTES >> 20} MiB")
        count *= _GROWTH
    path = folder / Path(file.name).name
    try:
        with path.open("wb") as target:
            target.write(data)
            target.truncate(max(file_bytes or 0, len(data)))
    except OSError as error:
        raise DiskFull(f"cannot keep the header of {path.name} in {path.parent}: {error.strerror or error}") from None
    return path


def first_bytes(file: _RemoteFile, count: int, cancel: threading.Event) -> tuple[bytes, int | None]:
    """Return the first bytes of a file, at most `count`, and the length of the whole file if the server sends it."""
    import httpx

    headers = {**file.headers, "range": f"bytes=0-{count - 1}"}
    data = bytearray()
    try:
        with new_client() as client, open_response(client, file.url, headers) as response:
            if response.status_code not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
                raise refused(response, file.name, file.url)
            for piece in body_pieces(response):
                data += piece
                if len(data) >= count:  # a server without ranges sends more
                    break
                if cancel.is_set():
                    raise Aborted(f"reading {file.name} was stopped")
            length = whole_number(response.headers.get("content-length", ""))
            if response.status_code == HTTPStatus.PARTIAL_CONTENT:
                length = content_range(response.headers.get("content-range", ""))[1]
            return bytes(data[:count]), length
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise HubUnavailable(f"cannot read {file.name} from {without_secrets(file.url)}: {error}") from None
