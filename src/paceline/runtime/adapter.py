"""LoRA adapters of a model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Self

from paceline import _native
from paceline.errors import AdapterError, Closed
from paceline.runtime.closeable import Closeable
from paceline.runtime.gguf_check import check_adapter
from paceline.runtime.gguf_file import file_fingerprint


class Adapter(Closeable):
    """A LoRA adapter in memory, made by `Model.load_adapter`. Keeps its model alive; free it with `close()`.

    A closed adapter that a context applies is freed when the context drops it.
    """

    def __init__(self, native: _native.Adapter, path: Path) -> None:
        self._native: _native.Adapter | None = native
        self.path = path
        self.fingerprint = file_fingerprint([path])

    @classmethod
    def load(cls, model: _native.Model, path: Path) -> Self:
        """Load an adapter file for a model. Raises `AdapterError` where the file is no adapter or does not fit the model."""
        if not path.is_file():
            raise AdapterError(f"there is no adapter file {path}")
        check_adapter(path)
        return cls(_native.Adapter.load(model, str(path)), path)

    @property
    def native(self) -> _native.Adapter:
        """The native object. Raises `Closed` after `close()`."""
        if self._native is None:
            raise Closed(f"the adapter {self.path.name} was closed")
        return self._native

    @cached_property
    def metadata(self) -> Mapping[str, str]:
        """The scalar metadata of the adapter's file, as text."""
        return MappingProxyType(dict(self.native.metadata))

    def close(self) -> None:
        """Free the memory; idempotent."""
        self._native = None

    def __repr__(self) -> str:
        return f"Adapter({self.path.name!r}{', closed' if self._native is None else ''})"
