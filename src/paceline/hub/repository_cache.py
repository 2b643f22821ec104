"""Repositories in folders laid out as huggingface_hub does: blobs by hash, snapshots with links to them, refs with commits.

    models--USER--REPO/blobs/HASH, HASH.incomplete
    models--USER--REPO/snapshots/COMMIT/PATH -> ../../blobs/HASH
    models--USER--REPO/refs/main

llama.cpp has the same layout. Reads files alone: no network, and huggingface_hub is not loaded.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline import validation
from paceline.hub.file_choice import RepoFile

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
        """Its folder, whether it is there or not."""
        return self.cache / (_PREFIX + self.repo.replace("/", "--"))

    @property
    def blobs(self) -> Path:
        """The folder of contents."""
        return self.folder / "blobs"

    def blob_lock(self, blob: str) -> Path:
        """Return the file that is locked while a blob is downloaded, by huggingface_hub as well."""
        return self.cache / ".locks" / self.folder.name / f"{blob}.lock"

    def lock_of(self, path: Path) -> Path:
        """Return the lock under which a blob, or the part of one, is written: HASH, HASH.incomplete, HASH.RANDOM.incomplete."""
        return self.blob_lock(path.name.partition(".")[0])

    def link(self, commit: str, path: str, blob: str) -> Path:
        """Give a blob its place in a snapshot, and return the place. A file system without links gets the file itself."""
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
        """Return the folder of a revision; without one of main, else of any branch, else the newest."""
        wanted = "main" if revision is None else revision
        commit = self._commit_of(wanted)
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
        """Return the commits that branches and tags have."""
        return {commit for name in self._refs() if (commit := self._commit_of(name)) is not None}

    def set_ref(self, revision: str | None, commit: str) -> None:
        """Note which commit a branch or tag has, so that it is found offline."""
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
    """Return the complete files of a snapshot, by path; a link to a blob that is gone is none."""
    files = (each for each in sorted(snapshot.rglob("*")) if each.is_file())
    return [RepoFile(each.relative_to(snapshot).as_posix(), each.stat().st_size) for each in files]
