"""LoRA adapters of a model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Self

from paceline import _native
from paceline.errors import AdapterError, Closed
from paceline.runtime.closing import Closing
from paceline.runtime.file_sample import file_fingerprint
from paceline.runtime.gguf_check import check_adapter


class Adapter(Closing):
    """A LoRA adapter in memory, made by `Model.load_adapter`. Keeps its model alive; free it with `close()`.

    Closing one that a context applies takes effect when the context lets go of it.
    """

    def __init__(self, native: _native.Adapter, path: Path) -> None:
        self._native: _native.Adapter | None = native
        self.path = path
        self.fingerprint = file_fingerprint([path])

    @classmethod
    def load(cls, model: _native.Model, path: Path) -> Self:
        """Loads an adapter file for a model. Raises `AdapterError` where it is none or does not fit."""
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
        """Lets go of the memory; idempotent."""
        self._native = None

    def __repr__(self) -> str:
        return f"Adapter({self.path.name!r}{', closed' if self._native is None else ''})"
