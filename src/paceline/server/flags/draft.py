"""What is put together while flags are applied, one after the other: values, where each came from, and notes.

Lives for one resolution. Knows no flag; the checks of single values are those of `EngineConfig` and `SamplingParams`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from paceline.config import CONFIG_NAMES, EngineConfig
from paceline.errors import InvalidParams
from paceline.params import FIELDS, SamplingParams
from paceline.server.flags.reading import UNSET, on_one_line

Kind = Literal["flag", "environment", "file", "default", "derived"]


class Files(Protocol):
    """What a resolution asks of the disk."""

    def read(self, path: Path) -> bytes:
        """The bytes of a file. Raises `OSError`."""

    def is_file(self, path: Path) -> bool:
        """Whether there is such a file."""

    def is_folder(self, path: Path) -> bool:
        """Whether there is such a folder."""

    def trained_context(self, model: Path | None) -> int:
        """Tokens that a model (None: the demo model) was trained with. Raises `ModelLoadError`."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from. name: of the flag, the variable, the file and its key, or the reason it was derived for."""

    kind: Kind
    name: str = ""

    def __str__(self) -> str:
        return {"default": "default", "derived": f"derived: {self.name}"}.get(self.kind, self.name)


DEFAULT = Origin("default")


class Draft:
    """Settings in the making. Targets are named "engine.n_ctx", "sampling.seed", "server.port"; "aside.x" is for later steps."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.origin = DEFAULT  # of the flag that is being applied
        self.notes: list[str] = []
        self.origins: dict[str, Origin] = {}
        self._values: dict[str, Any] = {}

    def get(self, target: str, default: Any = None) -> Any:
        """The value so far."""
        return self._values.get(target, default)

    def put(self, target: str, value: Any, label: str) -> None:
        """Sets a value, or unsets it. Raises `InvalidParams` in the words of the flag where it is out of its range."""
        self.origins[target] = self.origin
        if value is UNSET:
            self._values.pop(target, None)
        else:
            self._values[target] = checked(target, value, label)

    def derive(self, target: str, value: Any, why: str) -> None:
        """Sets a value that follows from others."""
        self._values[target], self.origins[target] = value, Origin("derived", why)

    def drop(self, target: str) -> None:
        """Takes a value back, and where it came from."""
        self._values.pop(target, None)
        self.origins.pop(target, None)

    def place(self, name: str) -> dict[str, Any]:
        """All values of one place, such as "engine", by their names."""
        return {
            key.removeprefix(f"{name}."): value for key, value in self._values.items() if key.startswith(f"{name}.")
        }

    def text_of(self, path: Path, label: str) -> str:
        """The text of a file that a flag names. Raises `InvalidParams`."""
        try:
            return self.files.read(path).decode()
        except UnicodeDecodeError as error:
            raise InvalidParams(
                f"{label}: {on_one_line(path)} is not UTF-8: stray byte at offset {error.start}"
            ) from None
        except OSError as error:
            raise InvalidParams(f"{label}: cannot read {on_one_line(path)}: {error.strerror or error}") from None


def checked(target: str, value: Any, label: str) -> Any:
    """The value; what `EngineConfig` and `SamplingParams` have against it is said in the words of the flag."""
    place, _, name = target.partition(".")
    try:
        if place == "sampling" and name in FIELDS:
            SamplingParams(**{name: value})
        elif place == "engine" and name in CONFIG_NAMES:
            EngineConfig(**{"isolation": "process", name: value})
    except InvalidParams as error:
        raise InvalidParams(str(error).replace(name, label, 1)) from None
    return value
