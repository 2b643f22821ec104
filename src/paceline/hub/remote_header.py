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
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline.errors import Aborted, DiskFull, HubUnavailable, ModelLoadError, ModelNotFound
from paceline.hub.download import DownloadObserver, LineObserver
from paceline.hub.file_choice import quantisations
from paceline.hub.locate import ListedModel, LocalModel, Locator, part_urls
from paceline.hub.network import (
    PASSING,
    Overloaded,
    body_pieces,
    content_range,
    new_client,
    open_response,
    refused,
    retry_after_s,
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

if TYPE_CHECKING:
    import httpx

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
        observer=LineObserver(note),
        cancel=threading.Event() if cancel is None else cancel,
    )
    found = _look_up(locator, reference)
    if isinstance(found, ModelHeaders):
        yield found
        return
    with tempfile.TemporaryDirectory(prefix="paceline-header-") as folder:
        yield found.read(locator, Path(folder))


@dataclass(frozen=True, slots=True)
class _RemoteFile:
    url: str
    name: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _RemoteModel:
    """A model that is not on this machine. files: all parts."""

    name: str
    files: tuple[_RemoteFile, ...]
    quantisations: tuple[str, ...] = ()
    has_projector: bool = False

    def read(self, locator: Locator, folder: Path) -> ModelHeaders:
        """Request the headers of all parts, into files of the folder."""
        paths = tuple(_header_file(locator, file, folder) for file in self.files)
        return ModelHeaders(
            name=self.name,
            paths=paths,
            size=sum(path.stat().st_size for path in paths),
            is_local=False,
            files=tuple(file.name for file in self.files),
            quantisations=self.quantisations,
            has_projector=self.has_projector,
        )


def _look_up(locator: Locator, reference: ModelReference) -> ModelHeaders | _RemoteModel:
    match reference:
        case HubReference():
            listed = locator.look_up(reference)
            if isinstance(listed, LocalModel):
                return _of_local(listed)
            local = locator.complete(listed)
            return _of_listed(listed) if local is None else _of_local(local, listed)
        case UrlReference():
            found = locator.downloaded(reference)
            if found is not None:
                return _of_local(found)
            if locator.settings.offline:
                raise ModelNotFound(f"{reference} was not downloaded before, and offline forbids to request its header")
            files = tuple(_RemoteFile(url, name, {}) for url, name in part_urls(reference))
            return _RemoteModel(str(reference), files)
        case _:
            return _of_local(locator.locate(reference))


def _of_local(model: LocalModel, listed: ListedModel | None = None) -> ModelHeaders:
    chosen = None if listed is None else listed.chosen.projector
    return ModelHeaders(
        name=model.name,
        paths=model.parts,
        size=sum(part.stat().st_size for part in model.parts),
        is_local=True,
        files=tuple(part.name for part in model.parts),
        quantisations=() if listed is None else tuple(quantisations(listed.listing.files)),
        has_projector=(model.projector or chosen) is not None,
    )


def _of_listed(listed: ListedModel) -> _RemoteModel:
    api, listing = listed.api, listed.listing
    headers = api.headers()
    return _RemoteModel(
        name=listed.name,
        files=tuple(
            _RemoteFile(api.url(listing.repo, listing.commit, part.path), part.path, headers)
            for part in listed.chosen.parts
        ),
        quantisations=tuple(quantisations(listing.files)),
        has_projector=listed.chosen.projector is not None,
    )


def _header_file(locator: Locator, file: _RemoteFile, folder: Path) -> Path:
    """Request the header of a file, in a few steps at most, and return a sparse file of the whole file's length."""
    count = _FIRST_BYTES
    while True:
        data, total = first_bytes(file, count, locator.observer, locator.cancel)
        is_short = len(data) < count
        file_bytes = max(len(data), total or 0) if is_short else total
        if file_bytes is not None and file_bytes > _MOST_FILE_BYTES:
            raise ModelLoadError(f"{file.name}: the server says that it has {file_bytes} bytes, more than any model")
        if read_gguf_start(data, file.name, file_bytes) is not None:
            return _sparse_file(folder / Path(file.name).name, data, file_bytes or 0)
        if is_short:  # the server limits its ranges; a larger request would return no more
            raise HubUnavailable(
                f"the server sent {len(data)} of the first {count} bytes of {file.name}, in which its header does not end; "
                "try again later, or download the model"
            )
        if count >= _MOST_BYTES:
            raise ModelLoadError(f"{file.name}: its header does not end within {_MOST_BYTES >> 20} MiB")
        count *= _GROWTH


def _sparse_file(path: Path, data: bytes, file_bytes: int) -> Path:
    try:
        with path.open("wb") as target:
            target.write(data)
            target.truncate(max(file_bytes, len(data)))
    except OSError as error:
        raise DiskFull(f"cannot keep the header of {path.name} in {path.parent}: {error.strerror or error}") from None
    return path


def first_bytes(
    file: _RemoteFile, count: int, observer: DownloadObserver, cancel: threading.Event
) -> tuple[bytes, int | None]:
    """Return the first bytes of a file, at most `count`, and its length if the server sends it.

    Repeats the request if the server is overloaded. Raises `AccessDenied`, `ModelNotFound`, `HubUnavailable`, `Aborted`.
    """
    try:
        return with_retries(
            lambda: _request(file, count, cancel), _WAITS_S, observer.note, cancel, f"reading {file.name}"
        )
    except Overloaded as error:
        raise HubUnavailable(f"{error}; try again later") from None


def _request(file: _RemoteFile, count: int, cancel: threading.Event) -> tuple[bytes, int | None]:
    import httpx

    wanted = {**file.headers, "range": f"bytes=0-{count - 1}"}
    data = bytearray()
    try:
        with new_client() as client, open_response(client, file.url, wanted) as response:
            if response.status_code in PASSING:
                raise Overloaded(
                    f"{response.url.host} is overloaded (HTTP {response.status_code})",
                    retry_after_s(response.headers.get("retry-after")),
                )
            if response.status_code not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
                raise refused(response, file.name, file.url)
            for piece in body_pieces(response):
                data += piece
                if len(data) >= count:  # a server without ranges sends more
                    break
                if cancel.is_set():
                    raise Aborted(f"reading {file.name} was stopped")
            return bytes(data[:count]), _length_of(response)
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise HubUnavailable(f"cannot read {file.name} from {without_secrets(file.url)}: {error}") from None


def _length_of(response: httpx.Response) -> int | None:
    """Return the length of the whole file; None if the response has none."""
    if response.status_code == HTTPStatus.PARTIAL_CONTENT:
        return content_range(response.headers.get("content-range", ""))[1]
    return whole_number(response.headers.get("content-length", ""))
