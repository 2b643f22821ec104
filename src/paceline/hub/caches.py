"""The models in the caches of huggingface_hub, llama.cpp, paceline and Ollama: found and used in place, removed on request.

Models of Ollama are never changed. huggingface_hub and llama.cpp share a layout of repositories: blobs by hash, snapshots with
links to blobs, refs with commits.

    models--USER--REPO/blobs/HASH, HASH.incomplete
    models--USER--REPO/snapshots/COMMIT/PATH -> ../../blobs/HASH
    models--USER--REPO/refs/main

Blocking; no network, and huggingface_hub is not loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from paceline import validation
from paceline.errors import ModelNotFound, Unsupported
from paceline.hub.download import is_locked, locked_at_once
from paceline.hub.file_choice import (
    RepoFile,
    choose_files,
    is_model_file,
    is_projector_file,
    nearest_names,
    quantisation_of,
    split_names,
)
from paceline.hub.references import (
    HubReference,
    HubSettings,
    ModelReference,
    OllamaReference,
    UrlReference,
    parse_hub_reference,
)

_FRESH_S: Final = 60.0  # a part that grew less than a minute ago is being downloaded


Source = Literal["huggingface", "llama.cpp", "ollama", "url"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model with its files on this machine.

    Attributes:
        name: Its full name, such as "hf:user/repo:Q4_K_M", which loads it.
        source: The owner of its cache.
        parts: All files of a split set in order, or the single file.
        projector: The file for its images, if there is any.
        why: The reason for the quantisation, if it was chosen.
    """

    name: str
    source: Source
    parts: tuple[Path, ...]
    projector: Path | None = None
    why: str = ""

    @property
    def path(self) -> Path:
        """The file to load."""
        return self.parts[0]

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(part.stat().st_size for part in self.parts)

    @property
    def modified(self) -> float:
        """The time of the last change of a part, in Unix seconds."""
        return max(part.stat().st_mtime for part in self.parts)

    @property
    def quantisation(self) -> str:
        """The quantisation in the file's name; empty without one, as for Ollama's models."""
        return quantisation_of(self.path.name)


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file that no model needs: a part of a download, a blob without a name, a snapshot without a branch.

    Attributes:
        path: The file or folder.
        size: Bytes.
        what: Its kind, in words.
        lock: The lock of downloads that write it; None if no download does.
    """

    path: Path
    size: int
    what: str
    lock: Path | None = None


def find_models(settings: HubSettings) -> list[LocalModel]:
    """Return all models by source, then by name."""
    found: list[LocalModel] = []
    for cache in settings.repository_caches:
        for repo in cached_repos(cache):
            found += _of_repo(settings, repo)
    # Downloads of older versions of llama.cpp are named by path, since USER_REPO_FILE does not tell the end of USER.
    found += _by_path((path for path in settings.llama_cache.glob("*.gguf") if is_model_file(path.name)), "llama.cpp")
    found += _by_path(settings.url_cache.rglob("*.gguf"), "url")
    found += ollama_models(settings.ollama)
    return found


def matching_models(settings: HubSettings, reference: ModelReference | Path) -> list[LocalModel]:
    """Return the models of a name or a path; a repository without a quantisation means all. Raises `ModelNotFound`."""
    models = find_models(settings)
    found = [each for each in models if _is_meant(settings, each, reference)]
    if not found:
        if isinstance(reference, Path) and reference.is_file():
            raise ModelNotFound(
                f"no cache has {reference}, a file outside the caches; `paceline info {reference}` shows it"
            )
        names = [each.name for each in models]
        hint = nearest_names(_name_of(reference), names) if names else "the caches have no models"
        raise ModelNotFound(f"no cache has {_name_of(reference)}; {hint}")
    return found


def remove_models(settings: HubSettings, models: list[LocalModel]) -> int:
    """Delete the files of models and blobs that no snapshot links to; return the freed bytes.

    Raises as `check_removable`, before a file is deleted.
    """
    check_removable(models)
    freed = 0
    contents: set[Path] = set()
    for part in (part for model in models for part in model.parts):
        if part.is_symlink():
            contents.add(part.resolve())
        else:
            freed += part.stat().st_size
        part.unlink(missing_ok=True)
        for beside in (".etag", ".json", PART_SUFFIX):
            part.with_name(part.name + beside).unlink(missing_ok=True)
    names = {reference.repo for model in models if isinstance(reference := _hub_reference(model), HubReference)}
    for cache in settings.repository_caches:
        for repo in (each for each in cached_repos(cache) if each.repo in names):
            freed += _remove_contents(repo, contents)
    return freed


def check_removable(models: list[LocalModel]) -> None:
    """Raise `Unsupported` if a model belongs to Ollama."""
    for model in models:
        if model.source == "ollama":
            name = model.name.removeprefix("ollama:")
            raise Unsupported(f"{model.name} belongs to Ollama; remove it with `ollama rm {name}`")


def find_leftovers(settings: HubSettings) -> list[Leftover]:
    """Return removable files of repositories with models and of other downloads, except running downloads."""
    found: list[Leftover] = []
    for cache in settings.repository_caches:
        for repo in cached_repos(cache):
            found += _leftovers_of(repo)
    for part in sorted(settings.url_cache.rglob(f"*{PART_SUFFIX}")):
        lock = url_lock(part.with_name(part.name.removesuffix(PART_SUFFIX)))
        if not _is_written(part, lock):
            found.append(Leftover(part, part.stat().st_size, "part of a download", lock))
    return found


def remove_leftovers(leftovers: list[Leftover]) -> list[Leftover]:
    """Delete leftovers under the locks of downloads; return the deleted leftovers, as a download may have begun meanwhile."""
    deleted = []
    for leftover in leftovers:
        with nullcontext(True) if leftover.lock is None else locked_at_once(leftover.lock) as is_free:
            if is_free:
                _delete(leftover.path)
                deleted.append(leftover)
    return deleted


# ---- finding


def _of_repo(settings: HubSettings, repo: CachedRepo) -> Iterator[LocalModel]:
    current = repo.snapshot(None)
    for snapshot in repo.snapshots():
        files = snapshot_files(snapshot)
        revision = None if snapshot == current else snapshot.name
        source: Source = "huggingface" if repo.cache == settings.cache else "llama.cpp"
        for path in [each.path for each in files if is_model_file(each.path)]:
            names = split_names(path)
            if path != names[0]:
                continue
            parts = tuple(snapshot / name for name in names)
            if not all(part.is_file() for part in parts):
                continue
            reference = HubReference(repo.repo, *_short(files, repo.repo, path), revision)
            yield LocalModel(name=f"hf:{reference}", source=source, parts=parts)


def _short(files: list[RepoFile], repo: str, path: str) -> tuple[str | None, str | None]:
    """Return the quantisation if it names this file, else the file."""
    quantisation = quantisation_of(path)
    if quantisation:
        with suppress(ModelNotFound):
            chosen = choose_files(files, repo=repo, quantisation=quantisation, fits=lambda _: True)
            if chosen.first.path == path:
                return quantisation, None
    return None, path


def _by_path(paths: Iterable[Path], source: Source) -> Iterator[LocalModel]:
    for path in sorted(paths):
        parts = tuple(path.with_name(name) for name in split_names(path.name))
        if path == parts[0] and all(part.is_file() for part in parts):
            yield LocalModel(name=str(path), source=source, parts=parts)


def _is_meant(settings: HubSettings, model: LocalModel, reference: ModelReference | Path) -> bool:
    match reference:
        case Path():
            return any(part.absolute() == reference.absolute() for part in model.parts)
        case UrlReference():
            return url_folder(settings, reference) / Path(reference.file_name).name in model.parts
        case OllamaReference(name):
            return model.name == f"ollama:{full_name(name)}"
    own = _hub_reference(model)
    if not isinstance(own, HubReference):  # an older version of llama.cpp downloaded it: "a_b" may be a/b or a_b/
        is_file = reference.file is not None and reference.revision is None
        return is_file and flat_path(settings.llama_cache, reference.repo, reference.file or "") in model.parts
    if own.repo.lower() != reference.repo.lower():
        return False
    if reference.revision is not None:
        snapshots = (CachedRepo(cache, own.repo).snapshot(reference.revision) for cache in settings.repository_caches)
        if not any(model.path.is_relative_to(each) for each in snapshots if each is not None):
            return False
    if reference.file is not None:
        return model.path.as_posix().endswith(f"/{reference.file}")
    quantisation = reference.quantisation
    return quantisation is None or quantisation.upper() in (own.quantisation or "", model.quantisation)


def _hub_reference(model: LocalModel) -> ModelReference | None:
    return parse_hub_reference(model.name) if model.name.startswith("hf:") else None


def _name_of(reference: ModelReference | Path) -> str:
    return f"hf:{reference}" if isinstance(reference, HubReference) else str(reference)


# ---- removing


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
        path.with_name(path.name + ".etag").unlink(missing_ok=True)


def _remove_contents(repo: CachedRepo, contents: set[Path]) -> int:
    """Delete blobs without a link, and the whole repository if at most projectors remain."""
    snapshots = repo.snapshots()
    gone = contents - _linked(snapshots)
    freed = 0
    for blob in [each for each in repo.blobs.iterdir() if each.resolve() in gone] if repo.blobs.is_dir() else []:
        freed += blob.stat().st_size
        blob.unlink()
    parts = list(repo.blobs.glob(f"*{PART_SUFFIX}"))
    left = [snapshot / each.path for snapshot in snapshots for each in snapshot_files(snapshot)]
    if all(is_projector_file(each.name) for each in left) and not any(
        _is_written(each, repo.lock_of(each)) for each in parts
    ):
        freed += sum(each.stat().st_size for each in {*parts, *(file.resolve() for file in left)})
        shutil.rmtree(repo.folder, ignore_errors=True)
    return freed


def _linked(snapshots: Iterable[Path]) -> set[Path]:
    """Return the blobs with a link in a snapshot."""
    return {path.resolve() for each in snapshots for path in each.rglob("*") if path.is_symlink()}


def _leftovers_of(repo: CachedRepo) -> Iterator[Leftover]:
    for part in sorted(repo.blobs.glob(f"*{PART_SUFFIX}")):
        if not _is_written(part, repo.lock_of(part)):
            yield Leftover(part, part.stat().st_size, f"part of a download of {repo.repo}", repo.lock_of(part))
    snapshots = repo.snapshots()
    if not any(each.path.endswith(".gguf") for snapshot in snapshots for each in snapshot_files(snapshot)):
        return  # a repository of other programs
    branches = repo.commits()
    detached = [each for each in snapshots if branches and each.name not in branches]
    kept = _linked(snapshot for snapshot in snapshots if snapshot not in detached)
    for snapshot in detached:
        yield Leftover(snapshot, 0, f"snapshot of {repo.repo} that no branch has any more")
    with suppress(OSError):
        for blob in sorted(repo.blobs.iterdir()):
            lock = repo.lock_of(blob)
            if blob.suffix != PART_SUFFIX and blob.resolve() not in kept and not _is_written(blob, lock):
                what = f"content of {repo.repo} that no snapshot has any more"
                yield Leftover(blob, blob.stat().st_size, what, lock)


def _is_written(path: Path, lock: Path) -> bool:
    """Return whether a download writes a file: it holds the lock, or it wrote a moment ago."""
    if is_locked(lock):
        return True
    with suppress(OSError):
        return time.time() - path.stat().st_mtime < _FRESH_S
    return True


_PREFIX: Final = "models--"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_MAX_REF_BYTES: Final = 4096
PART_SUFFIX: Final = ".incomplete"


@dataclass(frozen=True, slots=True)
class CachedRepo:
    """A repository in a cache."""

    cache: Path
    repo: str

    @property
    def folder(self) -> Path:
        """Its folder, which need not exist."""
        return self.cache / (_PREFIX + self.repo.replace("/", "--"))

    @property
    def blobs(self) -> Path:
        """The folder of blobs."""
        return self.folder / "blobs"

    def blob_lock(self, blob: str) -> Path:
        """Return the file that paceline and huggingface_hub lock while a blob is downloaded."""
        return self.cache / ".locks" / self.folder.name / f"{blob}.lock"

    def lock_of(self, path: Path) -> Path:
        """Return the lock for writing a blob or its part: HASH, HASH.incomplete, HASH.RANDOM.incomplete."""
        return self.blob_lock(path.name.partition(".")[0])

    def link(self, commit: str, path: str, blob: str) -> Path:
        """Link a blob into a snapshot and return the path. A file system without links gets the file itself."""
        place = self.folder / "snapshots" / commit / path
        place.parent.mkdir(parents=True, exist_ok=True)
        aside = place.with_name(f".{os.getpid()}.{threading.get_ident()}.link")
        try:
            aside.symlink_to(os.path.relpath(self.blobs / blob, place.parent))
        except OSError:
            aside = self.blobs / blob
        aside.replace(place)
        return place

    def snapshot(self, revision: str | None) -> Path | None:
        """Return the folder of a revision. None means main, else any branch, else the newest snapshot."""
        commit = self._commit_of("main" if revision is None else revision)
        if commit is None and revision is not None:
            commit = revision if _COMMIT.fullmatch(revision) else None
        if commit is None and revision is None:
            commit = next((found for name in self._refs() if (found := self._commit_of(name))), None)
        if commit is not None:
            folder = self.folder / "snapshots" / commit
            return folder if folder.is_dir() else None
        return max(self.snapshots(), key=lambda each: each.stat().st_mtime, default=None) if revision is None else None

    def snapshots(self) -> list[Path]:
        """Return the folders of all commits."""
        with suppress(OSError):
            return sorted(each for each in (self.folder / "snapshots").iterdir() if each.is_dir())
        return []

    def commits(self) -> set[str]:
        """Return the commits of branches and tags."""
        return {commit for name in self._refs() if (commit := self._commit_of(name)) is not None}

    def set_ref(self, revision: str | None, commit: str) -> None:
        """Save the commit of a branch or tag, so that it is found offline."""
        if revision is not None and _COMMIT.fullmatch(revision):
            return
        ref = self.folder / "refs" / ("main" if revision is None else revision)
        with suppress(OSError):
            if ref.read_text(encoding="utf-8") == commit:
                return
        ref.parent.mkdir(parents=True, exist_ok=True)
        new = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
        new.write_text(commit, encoding="utf-8")
        new.replace(ref)

    def _commit_of(self, ref: str) -> str | None:
        with suppress(OSError, ValueError):
            commit = validation.read_file(self.folder / "refs" / ref, _MAX_REF_BYTES).decode().strip()
            return commit if _COMMIT.fullmatch(commit) else None
        return None

    def _refs(self) -> list[str]:
        refs = self.folder / "refs"
        return sorted(each.relative_to(refs).as_posix() for each in refs.rglob("*") if each.is_file())


def cached_repos(cache: Path) -> Iterator[CachedRepo]:
    """Return the repositories of models in a cache, sorted by name."""
    names: list[str] = []
    with suppress(OSError):
        names = sorted(each.name for each in cache.iterdir() if each.name.startswith(_PREFIX) and each.is_dir())
    for name in names:
        user, separator, repo = name.removeprefix(_PREFIX).partition("--")
        if separator:
            yield CachedRepo(cache, f"{user}/{repo}")


def snapshot_files(snapshot: Path) -> list[RepoFile]:
    """Return the complete files of a snapshot, by path; links without a blob do not count."""
    files = (each for each in sorted(snapshot.rglob("*")) if each.is_file())
    return [RepoFile(each.relative_to(snapshot).as_posix(), each.stat().st_size) for each in files]


def flat_path(folder: Path, repo: str, path: str) -> Path:
    """Return the path at which older versions of llama.cpp keep a file of a repository."""
    return folder / f"{repo}_{path}".replace("/", "_")


def url_folder(settings: HubSettings, reference: UrlReference) -> Path:
    """Return the folder for downloads from the folder of a URL."""
    parts = urlsplit(reference.url)
    place = f"{parts.scheme}://{parts.hostname}:{parts.port}{parts.path.rpartition('/')[0]}"
    return settings.url_cache / hashlib.sha256(place.encode()).hexdigest()[:16]


def url_lock(target: Path) -> Path:
    """Return the lock for a download from a URL."""
    return target.with_name(f".{target.name}.lock")


_MODEL: Final = "application/vnd.ollama.image.model"
_PROJECTOR: Final = "application/vnd.ollama.image.projector"
_MAX_MANIFEST_BYTES: Final = 1 << 20
_REGISTRY: Final = "registry.ollama.ai"
_LIBRARY: Final = "library"


def ollama_models(folder: Path) -> Iterator[LocalModel]:
    """Return the models in Ollama's folder whose files exist, by the names of `ollama list`."""
    manifests = folder / "manifests"
    for manifest in sorted(each for each in manifests.rglob("*") if each.is_file()):
        place = manifest.relative_to(manifests).parts
        if len(place) < 2:
            continue
        try:
            layers: list[dict[str, Any]] = json.loads(validation.read_file(manifest, _MAX_MANIFEST_BYTES))["layers"]
            digests = {layer["mediaType"]: str(layer["digest"]).replace(":", "-") for layer in layers}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            continue
        path, projector = (folder / "blobs" / digests.get(kind, "none") for kind in (_MODEL, _PROJECTOR))
        if path.is_file():
            *owners, tag = place
            owners = owners[1:] if owners[:1] == [_REGISTRY] else owners
            owners = owners[1:] if owners[:1] == [_LIBRARY] else owners
            name = f"ollama:{'/'.join(owners)}:{tag}"
            has_projector = projector.is_file()
            yield LocalModel(name=name, source="ollama", parts=(path,), projector=projector if has_projector else None)


def ollama_blob(folder: Path, sha256: str, size: int | None) -> Path | None:
    """Return Ollama's copy of a file, found by its hash."""
    path = folder / "blobs" / f"sha256-{sha256}"
    return path if path.is_file() and size in (None, path.stat().st_size) else None


def full_name(name: str) -> str:
    """Return a model's name with its tag, which is "latest" by default."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"
