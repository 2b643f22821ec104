"""The LoRA adapters of an engine, by the names that requests use, and projector files beside a model. Any thread.

Each load gets a new key: backend, KV cache and worker know adapters by their keys alone, so a name that is loaded again with
another file shares nothing with the earlier adapter.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from paceline import validation
from paceline.engine.backend import Lora
from paceline.errors import (
    AdapterError,
    AdapterFileNotFound,
    AdapterNotFound,
    InvalidParams,
    InvalidType,
    ModelLoadError,
)
from paceline.request import RequestOptions

_NUMBER_MARK: Final = "\0"  # before the number in the key of a later load; no name has it


@dataclasses.dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A LoRA adapter that requests may use.

    Attributes:
        name: The name that requests use.
        path: Its file; empty if the backend has none.
        key: The engine's name for this load, unique over all loads; the same as `name` if that is new. Not shown to users.
    """

    name: str
    path: str
    key: str


def adapter_paths(lora: object) -> dict[str, Path]:
    """Return the files of the option `lora` by name. A list of paths has their stems as names."""
    if isinstance(lora, Mapping):
        return {_checked_name("lora: the name", name): validation.path("lora", path) for name, path in lora.items()}
    if not isinstance(lora, Sequence) or isinstance(lora, (str, bytes)):
        raise InvalidType(f"lora must be a list of paths or a mapping of names to paths, not {type(lora).__name__}")
    paths = [validation.path("lora", path) for path in lora]
    named = {_checked_name("lora: the name", path.stem): path for path in paths}
    if len(named) < len(paths):
        raise InvalidParams("lora has two files of the same name; give a mapping of names to paths")
    return named


def _checked_name(label: str, name: object) -> str:
    text = validation.text(label, name)
    if not text.isprintable():
        raise InvalidParams(f"{label} must have no control characters: {text!r:.200}")
    return text


def name_of(key: str) -> str:
    """Return the name under which an adapter was loaded, for messages: users do not know keys."""
    return key.partition(_NUMBER_MARK)[0]


def check_adapter_file(path: Path) -> None:
    """Raise `AdapterError` if there is no file; the backend checks its content."""
    try:
        exists, is_file = path.exists(), path.is_file()
    except OSError as error:  # a name that is too long, a folder that may not be searched
        raise AdapterError(f"cannot open the adapter file {path}: {error.strerror or error}") from None
    if not exists:
        raise AdapterFileNotFound(f"there is no adapter file {path}", str(path))
    if not is_file:
        raise AdapterError(f"the adapter {path} is not a file; give the path of a GGUF file")


class AdapterRegistry:
    """The adapters that requests may name, and the names of running loads.

    Args:
        names: Adapters that the engine has from its start; their keys are their names.
        paths: The files of these adapters, if known.
    """

    def __init__(self, names: Iterable[str] = (), paths: Mapping[str, Any] | None = None) -> None:
        known = {} if paths is None else paths
        self._lock = threading.Lock()
        self._adapters = {name: LoraAdapter(name, str(known.get(name, "")), name) for name in names}
        self._num_loads = dict.fromkeys(self._adapters, 1)  # by name, also of loads that have ended
        self._loading: set[str] = set()
        self._unloaded: set[str] = set()

    def all(self) -> tuple[LoraAdapter, ...]:
        """Return the adapters in the order of loading; a replacement has the place of its predecessor."""
        with self._lock:
            return tuple(self._adapters.values())

    def find(self, name: str) -> LoraAdapter:
        """Return the adapter of a name. Raises `AdapterNotFound`."""
        adapter = self._adapters.get(name)
        if adapter is None:
            raise AdapterNotFound(f"there is no adapter {name!r}; {self._known()}")
        return adapter

    def resolve(self, options: RequestOptions) -> RequestOptions:
        """Return the options with keys of adapters in place of names. Raises `InvalidParams` for unknown names."""
        if not options.lora:
            return options
        return dataclasses.replace(options, lora={self._key(name): scale for name, scale in options.lora})

    def renew(self, lora: Lora) -> Lora:
        """Return the present keys of the adapters with these keys, with their scales: adapters may be replaced at any time.

        Raises `InvalidParams` for a name without an adapter.
        """
        return tuple(sorted((self._key(name_of(key)), scale) for key, scale in lora))

    def begin(self, name: str, *, in_place: bool) -> str:
        """Return the key of a new load, and reserve the name. Raises `InvalidParams` for a name that is taken."""
        if not _checked_name("name", name):
            raise InvalidParams("name must not be empty")
        with self._lock:
            if name in self._loading:
                raise InvalidParams(f"name: an adapter {name!r} is being loaded")
            if name in self._adapters and not in_place:
                raise InvalidParams(f"name: there is an adapter {name!r} already; unload it, or load in place of it")
            self._loading.add(name)
            number = self._num_loads[name] = self._num_loads.get(name, 0) + 1
            return name if number == 1 else f"{name}{_NUMBER_MARK}{number}"

    def cancel(self, name: str, *, is_over: bool) -> None:
        """Release the name of a failed load. is_over: whether the load has ended, so that its key may be used again."""
        with self._lock:
            self._loading.discard(name)
            if is_over:
                self._num_loads[name] -= 1

    def add(self, adapter: LoraAdapter) -> LoraAdapter | None:
        """Add a loaded adapter, and return the adapter that had this name."""
        with self._lock:
            self._loading.discard(adapter.name)
            replaced = self._adapters.get(adapter.name)
            self._adapters[adapter.name] = adapter  # one step: `find`, `resolve` and `renew` take no lock
            return replaced

    def remove(self, adapter: LoraAdapter) -> bool:
        """Remove an adapter; return whether it was still there."""
        with self._lock:
            if self._adapters.get(adapter.name) is not adapter:
                return False
            self._unloaded.add(adapter.name)  # first, so that a name which `all` misses is in it
            del self._adapters[adapter.name]
            return True

    def has_key(self, key: str) -> bool:
        """Return whether the adapter of this key still has its name: it was neither removed nor replaced."""
        adapter = self._adapters.get(name_of(key))
        return adapter is not None and adapter.key == key

    def was_unloaded(self, name: str) -> bool:
        """Return whether an adapter of this name was unloaded; it may have been loaded again."""
        return name in self._unloaded

    def _key(self, name: str) -> str:
        adapter = self._adapters.get(name)
        if adapter is None:
            raise InvalidParams(f"lora: there is no adapter {name!r}; {self._known()}")
        return adapter.key

    def _known(self) -> str:
        names = ", ".join(map(repr, tuple(self._adapters)))
        return f"known are {names or 'none; give them to the engine with lora=[...], or load one'}"


def projectors_beside(paths: Sequence[Path]) -> list[Path]:
    """Return the files beside a model that have "mmproj" in their names, sorted. paths: of the model."""
    found = paths[0].parent.glob("*.gguf")
    return sorted(path for path in found if "mmproj" in path.name.lower() and path not in paths)


def projector_file(paths: Sequence[Path], mmproj: str | os.PathLike[str] | bool | None) -> Path | None:
    """Return the projector of a model, or None; see `EngineConfig.mmproj`. paths: of the model.

    Raises `ModelLoadError` if the projector beside the model is required, and there is none, or more than one.
    """
    if mmproj is False:
        return None
    if mmproj is not None and mmproj is not True:
        return Path(mmproj)
    found = projectors_beside(paths)
    if mmproj is True and len(found) != 1:
        there = f"{len(found)}: {', '.join(path.name for path in found)}" if found else "none"
        raise ModelLoadError(
            f"mmproj: there must be one projector, mmproj-*.gguf, beside the model, and {paths[0].parent} has {there}; "
            "give its path"
        )
    return found[0] if len(found) == 1 else None
