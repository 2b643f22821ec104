"""Find the files of a model by its name: in the caches, or downloaded.

Downloads go to huggingface_hub's cache, in its layout. A copy of the same file in a cache of llama.cpp or Ollama is used in
place. Blocking; any thread.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit, urlunsplit

from paceline.errors import AccessDenied, HubUnavailable, ModelNotFound
from paceline.hub.caches import (
    PART_SUFFIX,
    CachedRepo,
    LocalModel,
    cached_repos,
    flat_path,
    full_name,
    ollama_blob,
    ollama_models,
    snapshot_files,
    url_folder,
    url_lock,
)
from paceline.hub.download import (
    Download,
    DownloadObserver,
    check_space,
    fetch,
    tag_file,
    translating_disk_errors,
)
from paceline.hub.file_choice import (
    Fits,
    ModelFiles,
    RepoFile,
    choose_files,
    nearest_names,
    quantisation_of,
    split_names,
)
from paceline.hub.network import HubApi, RepoListing, are_same_version, new_client, open_response
from paceline.hub.references import HubReference, HubSettings, ModelReference, OllamaReference, UrlReference

_LARGEST_BY_HTTP: Final = 50_000_000_000  # bytes; larger files are sent over the hub's own protocol alone


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model in a listing of the hub. name: its full name."""

    api: HubApi
    listing: RepoListing
    chosen: ModelFiles
    name: str


def fits_into_memory(model: ModelFiles) -> bool:
    """Return whether the weights fit into the free memory of the machine or of all its GPUs."""
    from paceline.runtime import available_memory, devices

    if model.size is None:
        return True
    of_gpus = sum(device.free_bytes for device in devices() if device.kind == "gpu")
    free = available_memory()
    return free is None or model.size <= max(free, of_gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Locator:
    """Finds and downloads models.

    Attributes:
        settings: The caches, the endpoint and the token.
        observer: Shows the progress.
        cancel: Ends a download; its part is kept.
        fits: Decides whether a model fits into memory if no quantisation was named.
        with_projector: Whether to download the projector, too.
    """

    settings: HubSettings
    observer: DownloadObserver = field(default_factory=DownloadObserver)
    cancel: threading.Event = field(default_factory=threading.Event)
    fits: Fits = fits_into_memory
    with_projector: bool = False

    def locate(self, reference: ModelReference, target: Path | None = None) -> LocalModel:
        """Return the files of a model, and download missing files. target: the path for the file of a URL.

        Raises `ModelNotFound`, `AccessDenied`, `HubUnavailable`, `DiskFull`, `DownloadError`, `Aborted`.
        """
        match reference:
            case HubReference():
                return self._of_hub(reference)
            case UrlReference():
                return self._of_url(reference, target)
            case OllamaReference(name):
                return self._of_ollama(name)

    def cached(self, reference: HubReference) -> LocalModel | None:
        """Return a model of the hub from the caches; None if files are missing."""
        for cache in self.settings.repository_caches:
            snapshot = CachedRepo(cache, reference.repo).snapshot(reference.revision)
            if snapshot is not None:
                found = self._in_snapshot(reference, snapshot)
                if found is not None:
                    return found
        return self._in_flat_cache(reference)

    def look_up(self, reference: HubReference) -> ListedModel | LocalModel:
        """Return the model in the hub's present listing, or its copy in the caches if the hub does not answer.

        Raises `ModelNotFound`, `AccessDenied`, `HubUnavailable`.
        """
        if self.settings.offline:
            return self._offline(reference)
        api = HubApi(self.settings, self.observer.note, self.cancel)
        try:
            listing = api.listing(reference.repo, reference.revision)
        except (HubUnavailable, AccessDenied, ModelNotFound) as error:
            found = self.cached(reference)
            if found is None:
                raise
            self.observer.note(f"{error}; using the copy in the cache")
            return found
        chosen = self._choose(reference, listing.files)
        return ListedModel(api, listing, chosen, hub_name(reference, chosen))

    def complete(self, listed: ListedModel) -> LocalModel | None:
        """Return a listed model if all of its files are in a cache of any program on this machine."""
        listing, chosen = listed.listing, listed.chosen
        snapshot = CachedRepo(self.settings.cache, listing.repo).folder / "snapshots" / listing.commit
        paths = tuple(snapshot / each.path for each in chosen.parts)
        if all(path.is_file() for path in paths):
            return LocalModel(name=listed.name, parts=paths, source="huggingface", why=chosen.why)
        return self._elsewhere(listing, chosen)

    # ---- the hub

    def _of_hub(self, reference: HubReference) -> LocalModel:
        listed = self.look_up(reference)
        if isinstance(listed, LocalModel):
            return listed
        chosen = listed.chosen
        size = "" if chosen.size is None else f", {shown_bytes(chosen.size)}"
        parts = f" and {len(chosen.parts) - 1} more parts" if len(chosen.parts) > 1 else ""
        why = "" if chosen.why == "as named" else f" ({chosen.why})"
        self.observer.note(f"{reference.repo}: {chosen.first.path}{parts}{size}{why}")
        try:
            return self._placed(listed, reference)
        except (HubUnavailable, AccessDenied) as error:
            earlier = self.cached(replace(reference, quantisation=None, file=chosen.first.path))
            needs_projector = self.with_projector and chosen.projector is not None
            if earlier is None or (needs_projector and earlier.projector is None):
                raise
            self.observer.note(f"{error}; using the copy in the cache, which may be of an earlier commit")
            return replace(earlier, name=hub_name(reference, chosen), why=chosen.why)

    def _placed(self, listed: ListedModel, reference: HubReference) -> LocalModel:
        """Return a listed model from another program's cache, or download it."""
        chosen, elsewhere = listed.chosen, self._elsewhere(listed.listing, listed.chosen)
        if elsewhere is None:
            return self._downloaded(listed, reference)
        self.observer.note(f"{chosen.first.path} is at {elsewhere.path} already, downloaded by {elsewhere.source}")
        if self.with_projector and chosen.projector is not None:
            return replace(elsewhere, projector=self._ensure(listed.api, listed.listing, chosen.projector))
        return elsewhere

    def _downloaded(self, listed: ListedModel, reference: HubReference) -> LocalModel:
        api, listing, chosen = listed.api, listed.listing, listed.chosen
        files = list(chosen.parts)
        if self.with_projector and chosen.projector is not None:
            files.append(chosen.projector)
        paths = [self._ensure(api, listing, file) for file in files]
        cached = CachedRepo(self.settings.cache, listing.repo)
        with translating_disk_errors(reference.revision or "main", cached.folder):
            cached.set_ref(reference.revision, listing.commit)
        return LocalModel(
            name=listed.name,
            parts=tuple(paths[: len(chosen.parts)]),
            projector=paths[-1] if len(paths) > len(chosen.parts) else None,
            source="huggingface",
            why=chosen.why,
        )

    def _ensure(self, api: HubApi, listing: RepoListing, file: RepoFile) -> Path:
        """Return a file's path in huggingface_hub's cache, and download it if it is missing."""
        cached = CachedRepo(self.settings.cache, listing.repo)
        place = cached.folder / "snapshots" / listing.commit / file.path
        if place.is_file():
            return place
        if file.size is not None and file.size > _LARGEST_BY_HTTP:
            with translating_disk_errors(file.path, cached.folder):
                cached.folder.mkdir(parents=True, exist_ok=True)
                check_space(file.path, cached.folder, file.size)
            return api.download(listing.repo, listing.commit, file.path)
        name = file.blob or hashlib.sha256(f"{listing.commit}/{file.path}".encode()).hexdigest()
        blob = cached.blobs / name
        download = Download(
            url=api.url(listing.repo, listing.commit, file.path),
            target=blob,
            part=blob.with_name(blob.name + PART_SUFFIX),
            lock=cached.blob_lock(name),
            name=file.path,
            size=file.size,
            sha256=file.sha256,
            headers=api.headers(),
        )
        try:
            fetch(download, self.observer, self.cancel)
        except AccessDenied:
            raise api.denied(listing.repo) from None
        with translating_disk_errors(file.path, cached.folder):
            return cached.link(listing.commit, file.path, name)

    def _elsewhere(self, listing: RepoListing, chosen: ModelFiles) -> LocalModel | None:
        """Return the same files from another program's cache, unless huggingface_hub has them."""
        settings, first = self.settings, chosen.first
        own = CachedRepo(settings.cache, listing.repo)
        if any((own.blobs / each.blob).exists() for each in chosen.parts if each.blob is not None):
            return None
        name = f"hf:{listing.repo}/{first.path}"
        of_llama = CachedRepo(settings.llama_cache, listing.repo)
        paths = [of_llama.folder / "snapshots" / listing.commit / each.path for each in chosen.parts]
        if settings.llama_cache != settings.cache and all(
            _has_size(*each) for each in zip(paths, chosen.parts, strict=True)
        ):
            return LocalModel(name=name, parts=tuple(paths), source="llama.cpp", why=chosen.why)
        flat = [flat_path(settings.llama_cache, listing.repo, each.path) for each in chosen.parts]
        if all(_has_size(*each) for each in zip(flat, chosen.parts, strict=True)):
            return LocalModel(name=name, parts=tuple(flat), source="llama.cpp", why=chosen.why)
        blob = None if first.sha256 is None else ollama_blob(settings.ollama, first.sha256, first.size)
        if blob is not None and len(chosen.parts) == 1:
            return LocalModel(name=name, parts=(blob,), source="ollama", why=chosen.why)
        return None

    def _offline(self, reference: HubReference) -> LocalModel:
        found = self.cached(reference)
        if found is not None:
            return found
        names = [each.repo for cache in self.settings.repository_caches for each in cached_repos(cache)]
        if reference.repo in names:
            hint = f"of {reference.repo}, other files are there: see `paceline list`"
        else:
            hint = nearest_names(reference.repo, names) if names else f"{self.settings.cache} has no models"
        raise ModelNotFound(
            f"hf:{reference} is not in the caches, and offline forbids to download it: {hint}; "
            f"run `paceline pull hf:{reference}` with a network, or leave out offline and HF_HUB_OFFLINE"
        )

    def _in_snapshot(self, reference: HubReference, snapshot: Path) -> LocalModel | None:
        try:
            chosen = self._choose(reference, snapshot_files(snapshot))
        except ModelNotFound:
            return None
        parts = tuple(snapshot / each.path for each in chosen.parts)
        return LocalModel(
            name=hub_name(reference, chosen),
            parts=parts,
            projector=None if chosen.projector is None else snapshot / chosen.projector.path,
            source="huggingface" if snapshot.is_relative_to(self.settings.cache) else "llama.cpp",
            why=chosen.why,
        )

    def _in_flat_cache(self, reference: HubReference) -> LocalModel | None:
        """Find downloads of older versions of llama.cpp, named USER_REPO_FILE in one folder."""
        if reference.revision is not None:
            return None
        prefix = flat_path(self.settings.llama_cache, reference.repo, "").name
        found = sorted(self.settings.llama_cache.glob(f"{prefix}*.gguf"))
        files = [RepoFile(each.name.removeprefix(prefix), each.stat().st_size) for each in found]
        try:
            chosen = self._choose(reference, files)
        except ModelNotFound:
            return None
        parts = tuple(self.settings.llama_cache / (prefix + each.path) for each in chosen.parts)
        return LocalModel(name=hub_name(reference, chosen), parts=parts, source="llama.cpp", why=chosen.why)

    def _choose(self, reference: HubReference, files: Sequence[RepoFile]) -> ModelFiles:
        return choose_files(
            files, repo=reference.repo, quantisation=reference.quantisation, file=reference.file, fits=self.fits
        )

    # ---- other places

    def downloaded(self, reference: UrlReference) -> LocalModel | None:
        """Return an earlier download of a URL's file, with all parts of a split set; None without it."""
        paths = self._url_paths(reference, None)
        if not all(path.is_file() for path in paths):
            return None
        return LocalModel(name=str(reference), parts=tuple(paths), source="url")

    def _of_url(self, reference: UrlReference, target: Path | None) -> LocalModel:
        paths = self._url_paths(reference, target)
        for (url, _), path in zip(part_urls(reference), paths, strict=True):
            self._ensure_url(url, path)
        return LocalModel(name=str(reference), parts=tuple(paths), source="url")

    def _url_paths(self, reference: UrlReference, target: Path | None) -> list[Path]:
        names = split_names(reference.file_name)
        if target is not None and len(names) == 1:
            return [target]
        folder = url_folder(self.settings, reference) if target is None else target.parent
        return [folder / Path(name).name for name in names]

    def _ensure_url(self, url: str, path: Path) -> None:
        if self.settings.offline:
            if not path.is_file():
                raise ModelNotFound(
                    f"{UrlReference(url)} was not downloaded before, and offline forbids to do it now: "
                    f"there is no {path}; leave out offline and HF_HUB_OFFLINE"
                )
            return
        is_there = path.is_file()
        if is_there and not self._has_changed(url, path):
            return
        fetch(
            Download(
                url=url,
                target=path,
                part=path.with_name(path.name + PART_SUFFIX),
                lock=url_lock(path),
                name=path.name,
                keeps_tag=True,
                replaces=is_there,
            ),
            self.observer,
            self.cancel,
        )

    def _has_changed(self, url: str, path: Path) -> bool:
        """Return whether the server has another version of a file. Without an answer it has not."""
        import httpx

        try:
            known = tag_file(path).read_text(encoding="utf-8").strip()
        except OSError:
            return False
        try:
            with new_client() as client, open_response(client, url, {}, method="HEAD") as response:
                is_success, tag = response.is_success, response.headers.get("etag")
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            self.observer.note(f"cannot ask for a newer {path.name} ({error}); using the copy in the cache")
            return False
        if is_success and tag is not None and not are_same_version(tag, known):
            self.observer.note(f"{path.name} has changed on the server")
            return True
        return False

    def _of_ollama(self, name: str) -> LocalModel:
        models = {each.name.removeprefix("ollama:"): each for each in ollama_models(self.settings.ollama)}
        found = models.get(full_name(name))
        if found is None:
            hint = nearest_names(full_name(name), list(models)) if models else "the folder has no models"
            raise ModelNotFound(
                f"Ollama has no model {name!r} in {self.settings.ollama}; {hint}; `ollama pull {name}` downloads a model"
            )
        return found


def hub_name(reference: HubReference, chosen: ModelFiles) -> str:
    """Return the full name of the chosen files."""
    quantisation = quantisation_of(chosen.first.path)
    if reference.file is not None or not quantisation:
        return f"hf:{replace(reference, quantisation=None, file=chosen.first.path)}"
    return f"hf:{replace(reference, quantisation=quantisation)}"


def part_urls(reference: UrlReference) -> list[tuple[str, str]]:
    """Return the URLs and names of all parts of a split set, given the URL of any part."""
    names = split_names(reference.file_name)
    if len(names) == 1:
        return [(reference.url, names[0])]
    parts = urlsplit(reference.url)
    base = parts.path.rpartition("/")[0]
    return [(urlunsplit(parts._replace(path=f"{base}/{quote(name)}", fragment="")), name) for name in names]


def _has_size(path: Path, file: RepoFile) -> bool:
    return path.is_file() and file.size is not None and path.stat().st_size == file.size


def shown_bytes(count: float) -> str:
    """Return a size for people: three digits and a unit of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
