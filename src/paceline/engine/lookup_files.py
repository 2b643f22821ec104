"""The lookup-cache files of a drafter: read when an engine is made, and the dynamic one written when it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import Final

from paceline import validation
from paceline.errors import InvalidParams
from paceline.speculation.drafter import Drafter, Drafters
from paceline.speculation.drafters.lookup_cache import LookupCache
from paceline.speculation.drafters.shared_ngrams import NgramCacheDrafter

_log = logging.getLogger("paceline.engine")

_MOST_BYTES: Final = 256 << 20  # of a file; about 20 times as much memory while it is read
_MOST_PAIRS: Final = 1 << 20  # of an n-gram and a follower that are written, within the time that a worker has to end


class LookupFiles:
    """Reads the files of the drafters that have some. Raises `InvalidParams` for one that cannot be read, or not be written."""

    def __init__(self, drafter: Drafter | Drafters | None) -> None:
        drafters = drafter if isinstance(drafter, tuple) else (drafter,)
        self._loaded = [_LoadedFiles(one) for one in drafters if isinstance(one, NgramCacheDrafter)]

    def put_in(self, n_vocab: int) -> None:
        """Give the drafters what was read. Raises `InvalidParams` for a file with tokens that the model has not."""
        for one in self._loaded:
            one.put_in(n_vocab)

    def save(self) -> None:
        """Write what was read and learned. Errors are logged: no caller waits for an engine that ends."""
        for one in self._loaded:
            one.save()


class _LoadedFiles:
    """The files of one drafter."""

    def __init__(self, drafter: NgramCacheDrafter) -> None:
        self._drafter = drafter
        static, dynamic = drafter.lookup_cache_static, drafter.lookup_cache_dynamic
        self._static = None if static is None else (_named("static", static), _read("static", Path(static)))
        self._dynamic = None if dynamic is None else (_named("dynamic", dynamic), _read_or_new(Path(dynamic)))

    def put_in(self, n_vocab: int) -> None:
        for name, cache in (one for one in (self._static, self._dynamic) if one is not None):
            cache.check_fits(n_vocab, name)
        if self._static is not None:
            name, cache = self._static
            num_used = self._drafter.load_static(cache)
            if not num_used:
                raise InvalidParams(
                    f"{name} has no n-gram of 2 tokens, and no others are used of a static one; give another one, or leave it out"
                )
            _log.info("%s: %d n-grams of 2 tokens", name, num_used)
        if self._dynamic is not None:
            name, cache = self._dynamic
            self._drafter.load_dynamic(cache)
            _log.info("%s: %d pairs of an n-gram and a follower", name, len(cache))
            if len(cache) > _MOST_PAIRS:
                _log.warning(
                    "%s has more than %d pairs: only the most frequent are kept when it is written", name, _MOST_PAIRS
                )
        self._static = None  # its memory is the drafter's

    def save(self) -> None:
        if self._dynamic is None or self._drafter.lookup_cache_dynamic is None:
            return
        name, before = self._dynamic
        learned = self._drafter.learned()
        if not len(learned):
            return
        cache = before.merged(learned).most_frequent(_MOST_PAIRS)
        try:
            _write(Path(self._drafter.lookup_cache_dynamic), cache.to_bytes())
        except OSError as error:
            _log.error("%s cannot be written, and what was learned is lost: %s", name, error)
            return
        _log.info("%s: %d pairs written", name, len(cache))


def _named(kind: str, path: str) -> str:
    return f"lookup_cache_{kind} {path}"


def _read(kind: str, path: Path) -> LookupCache:
    name = _named(kind, str(path))
    try:
        data = validation.read_file(path, _MOST_BYTES)
    except (OSError, ValueError) as error:  # ValueError: of a NUL in it
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidParams(f"{name} cannot be read: {reason}; give another path") from error
    return LookupCache.parse(data, name)


def _read_or_new(path: Path) -> LookupCache:
    """Return what a file has that is written to later; nothing where there is none yet."""
    name = _named("dynamic", str(path))
    status = _status(name, path)
    folder = _target(path).parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InvalidParams(
            f"{name} cannot be written: {folder} is no folder that can be written to; give another path"
        )
    return LookupCache.empty() if status is None else _read("dynamic", path)


def _status(name: str, path: Path) -> os.stat_result | None:
    """Return what is at a path; None where nothing is."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # ValueError: of a NUL in it
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidParams(f"{name} cannot be read: {reason}; give another path") from error


def _target(path: Path) -> Path:
    """Return the file itself, where a path is a link to it: links stay."""
    return Path(os.path.realpath(path))


def _write(path: Path, data: bytes) -> None:
    """Replace a file in one step. Its permissions stay; a new one is its owner's alone, as it shows what requests said."""
    target = _target(path)
    descriptor, name = tempfile.mkstemp(".part", ".lookup", target.parent)
    beside = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        if target.exists():
            beside.chmod(stat.S_IMODE(target.stat().st_mode))
        beside.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
