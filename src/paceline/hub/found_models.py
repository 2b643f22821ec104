"""What the caches of this machine have: huggingface_hub's, llama.cpp's, paceline's own and Ollama's. Found, not copied.

Models of the first three can be removed; Ollama's are left to Ollama. Blocking; no network.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.errors import ModelNotFound, Unsupported
from paceline.hub.download_lock import is_locked, locked_at_once
from paceline.hub.file_choice import (
    RepoFile,
    choose_files,
    is_model_file,
    is_projector_file,
    nearest_names,
    quantisation_of,
    split_names,
)
from paceline.hub.hub_settings import HubSettings
from paceline.hub.locate import Source, flat_path, url_folder, url_lock
from paceline.hub.ollama_cache import full_name, ollama_models
from paceline.hub.references import (
    HubReference,
    ModelReference,
    OllamaReference,
    UrlReference,
    parse_hub_reference,
)
from paceline.hub.repository_cache import PART_SUFFIX, CachedRepo, cached_repos, snapshot_files

_FRESH_S: Final = 60.0  # a part that grew less than a minute ago is being downloaded


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model in a cache.

    name: by which it can be loaded. quantisation: by its file's name; may be empty. parts: its files in order, one unless it
    is split. size: their bytes. modified: Unix seconds.
    """

    name: str
    source: Source
    parts: tuple[Path, ...]
    size: int
    modified: float
    quantisation: str = ""

    @property
    def path(self) -> Path:
        """The file to load."""
        return self.parts[0]


@dataclass(frozen=True, slots=True)
class Leftover:
    """What no model needs: a part of a download, a content without a name, a snapshot that no branch has any more.

    lock: held by a download that writes it; None for what no download writes.
    """

    path: Path
    size: int
    what: str
    lock: Path | None = None


def find_models(settings: HubSettings) -> list[FoundModel]:
    """Return all models, those of one source together, by name."""
    found: list[FoundModel] = []
    for cache in settings.repository_caches:
        for repo in cached_repos(cache):
            found += _of_repo(settings, repo)
    found += _flat(settings)
    found += _of_urls(settings)
    found += _of_ollama(settings)
    return found


def matching_models(settings: HubSettings, wanted: ModelReference | Path) -> list[FoundModel]:
    """Return the models that a name or a path means: of a repository without a quantisation all. Raises `ModelNotFound`."""
    models = find_models(settings)
    found = [each for each in models if _is_meant(settings, each, wanted)]
    if not found:
        if isinstance(wanted, Path) and wanted.is_file():
            raise ModelNotFound(f"no cache has {wanted}, a file outside the caches; `paceline info {wanted}` shows it")
        names = [each.name for each in models]
        hint = nearest_names(_name_of(wanted), names) if names else "the caches have no models"
        raise ModelNotFound(f"no cache has {_name_of(wanted)}; {hint}")
    return found


def remove_models(settings: HubSettings, models: list[FoundModel]) -> int:
    """Delete the files of models, and contents that nothing else names; return the bytes that are free now.

    Raises as `check_removable`, before anything is deleted.
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


def check_removable(models: list[FoundModel]) -> None:
    """Raise `Unsupported` for models of Ollama's."""
    for model in models:
        if model.source == "ollama":
            name = model.name.removeprefix("ollama:")
            raise Unsupported(f"{model.name} belongs to Ollama; remove it with `ollama rm {name}`")


def find_leftovers(settings: HubSettings) -> list[Leftover]:
    """Return what can be removed of repositories with models and of other downloads, but not what is being downloaded."""
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
    """Delete them under the locks of downloads, and return those that are gone: a download may have begun meanwhile."""
    return [each for each in leftovers if _remove_leftover(each)]


# ---- finding


def _of_repo(settings: HubSettings, repo: CachedRepo) -> Iterator[FoundModel]:
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
            yield _model(f"hf:{reference}", source, parts, quantisation_of(path))


def _short(files: list[RepoFile], repo: str, path: str) -> tuple[str | None, str | None]:
    """Return the quantisation where that names this file, else the file."""
    quantisation = quantisation_of(path)
    if quantisation:
        with suppress(ModelNotFound):
            chosen = choose_files(files, repo=repo, quantisation=quantisation, fits=lambda _: True)
            if chosen.first.path == path:
                return quantisation, None
    return None, path


def _flat(settings: HubSettings) -> Iterator[FoundModel]:
    """Return what older versions of llama.cpp have downloaded, by path: USER_REPO_FILE does not say where USER ends."""
    for path in sorted(settings.llama_cache.glob("*.gguf")):
        names = split_names(path.name)
        parts = tuple(path.with_name(name) for name in names)
        if path == parts[0] and is_model_file(path.name) and all(part.is_file() for part in parts):
            yield _model(str(path), "llama.cpp", parts, quantisation_of(path.name))


def _of_urls(settings: HubSettings) -> Iterator[FoundModel]:
    for path in sorted(settings.url_cache.rglob("*.gguf")):
        parts = tuple(path.with_name(name) for name in split_names(path.name))
        if path == parts[0] and all(part.is_file() for part in parts):
            yield _model(str(path), "url", parts, quantisation_of(path.name))


def _of_ollama(settings: HubSettings) -> Iterator[FoundModel]:
    for model in ollama_models(settings.ollama):
        yield _model(f"ollama:{model.name}", "ollama", (model.path,), "")


def _model(name: str, source: Source, parts: tuple[Path, ...], quantisation: str) -> FoundModel:
    facts = [part.stat() for part in parts]
    return FoundModel(
        name=name,
        source=source,
        parts=parts,
        size=sum(each.st_size for each in facts),
        modified=max(each.st_mtime for each in facts),
        quantisation=quantisation,
    )


def _is_meant(settings: HubSettings, model: FoundModel, wanted: ModelReference | Path) -> bool:
    match wanted:
        case Path():
            return any(part.absolute() == wanted.absolute() for part in model.parts)
        case HubReference():
            own = _hub_reference(model)
            if isinstance(own, HubReference):
                return _is_model_of(settings, model, own, wanted)
            return _is_flat_file_of(settings, model, wanted)
        case UrlReference():
            return url_folder(settings, wanted) / Path(wanted.file_name).name in model.parts
        case OllamaReference(name):
            return model.name == f"ollama:{full_name(name)}"


def _is_model_of(settings: HubSettings, model: FoundModel, own: HubReference, wanted: HubReference) -> bool:
    if own.repo.lower() != wanted.repo.lower() or not _is_of_revision(settings, model, own, wanted.revision):
        return False
    if wanted.file is not None:
        return model.path.as_posix().endswith(f"/{wanted.file}")
    quantisation = wanted.quantisation
    return quantisation is None or quantisation.upper() in (own.quantisation or "", model.quantisation)


def _is_flat_file_of(settings: HubSettings, model: FoundModel, reference: HubReference) -> bool:
    """Return whether an older version of llama.cpp has downloaded this file; by the file alone, as "a_b" may be a/b or a_b/."""
    if reference.file is None or reference.revision is not None:
        return False
    return flat_path(settings.llama_cache, reference.repo, reference.file) in model.parts


def _is_of_revision(settings: HubSettings, model: FoundModel, own: HubReference, revision: str | None) -> bool:
    if revision is None:
        return True
    snapshots = (CachedRepo(cache, own.repo).snapshot(revision) for cache in settings.repository_caches)
    return any(model.path.is_relative_to(each) for each in snapshots if each is not None)


def _hub_reference(model: FoundModel) -> ModelReference | None:
    return parse_hub_reference(model.name) if model.name.startswith("hf:") else None


def _name_of(reference: ModelReference | Path) -> str:
    return f"hf:{reference}" if isinstance(reference, HubReference) else str(reference)


# ---- removing


def _remove_leftover(leftover: Leftover) -> bool:
    if leftover.lock is None:
        _delete(leftover.path)
        return True
    with locked_at_once(leftover.lock) as is_free:
        if is_free:
            _delete(leftover.path)
        return is_free


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
        path.with_name(path.name + ".etag").unlink(missing_ok=True)


def _remove_contents(repo: CachedRepo, contents: set[Path]) -> int:
    """Delete contents that no snapshot links to any more, and the repository where at most projectors are left of it."""
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


def _linked(snapshots: list[Path]) -> set[Path]:
    """Return the contents that snapshots link to."""
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
    kept = {
        path.resolve() for each in snapshots if each not in detached for path in each.rglob("*") if path.is_symlink()
    }
    for snapshot in detached:
        yield Leftover(snapshot, 0, f"snapshot of {repo.repo} that no branch has any more")
    with suppress(OSError):
        for blob in sorted(repo.blobs.iterdir()):
            lock = repo.lock_of(blob)
            if blob.suffix != PART_SUFFIX and blob.resolve() not in kept and not _is_written(blob, lock):
                what = f"content of {repo.repo} that no snapshot has any more"
                yield Leftover(blob, blob.stat().st_size, what, lock)


def _is_written(path: Path, lock: Path) -> bool:
    """Return whether a download writes a file: one that holds the lock, or, without it, has written a moment ago."""
    if is_locked(lock):
        return True
    with suppress(OSError):
        return time.time() - path.stat().st_mtime < _FRESH_S
    return True
