"""The draft of the settings while flags are applied: values, their origins and notes. Lives for one resolution.

Single values are checked by `EngineConfig` and `SamplingParams`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from paceline.config import CONFIG_NAMES, EngineConfig
from paceline.errors import InvalidParams, ModelLoadError
from paceline.params import FIELDS, SamplingParams
from paceline.server.flags.readers import UNSET, on_one_line

Kind = Literal["flag", "environment", "file", "default", "derived"]


class Files(Protocol):
    """The file system as a resolution needs it."""

    def read(self, path: Path) -> bytes:
        """Return the bytes of a file. Raises `OSError`."""

    def is_file(self, path: Path) -> bool:
        """Return whether there is such a file."""

    def is_folder(self, path: Path) -> bool:
        """Return whether there is such a folder."""

    def trained_context(self, model: Path | None) -> int:
        """Return the tokens that a model (None: the demo model) was trained with. Raises `ModelLoadError`."""


class DiskFiles:
    """`Files` on the disk. Blocking; any thread."""

    def read(self, path: Path) -> bytes:
        """Return the bytes of a file, which may be a pipe. Raises `OSError`."""
        return path.read_bytes()

    def is_file(self, path: Path) -> bool:
        """Return whether there is something to open."""
        return path.exists() and not path.is_dir()

    def is_folder(self, path: Path) -> bool:
        """Return whether there is such a folder."""
        return path.is_dir()

    def trained_context(self, model: Path | None) -> int:
        """Read a model's context length from its file. Raises `ModelLoadError` where that is no model or has none."""
        from paceline.demo import demo_model_path
        from paceline.runtime.gguf_file import read_gguf

        path = demo_model_path() if model is None else model
        metadata = read_gguf(path).metadata
        try:
            architecture = metadata[b"general.architecture"].value
            found = metadata[architecture + b".context_length"].value
        except (KeyError, TypeError):
            found = None
        if not isinstance(found, int) or found < 1:
            raise ModelLoadError(f"{path} does not say with how many tokens it was trained; give -c a number")
        return found


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from. name: of the flag, the variable, the file and its key, or the reason it was derived for."""

    kind: Kind
    name: str = ""

    def __str__(self) -> str:
        return {"default": "default", "derived": f"derived: {self.name}"}.get(self.kind, self.name)


DEFAULT = Origin("default")


class Draft:
    """Settings being resolved. Targets are named "engine.n_ctx", "sampling.seed", "server.port"; "aside.x" is for later steps."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.origin = DEFAULT  # of the flag that is being applied
        self.notes: list[str] = []
        self.origins: dict[str, Origin] = {}
        self._values: dict[str, Any] = {}

    def get(self, target: str, default: Any = None) -> Any:
        """Return the value so far."""
        return self._values.get(target, default)

    def put(self, target: str, value: Any, label: str) -> None:
        """Set a value, or unset it. Raises `InvalidParams` that names the flag where it is out of its range."""
        self.origins[target] = self.origin
        if value is UNSET:
            self._values.pop(target, None)
        else:
            self._values[target] = checked(target, value, label)

    def derive(self, target: str, value: Any, why: str) -> None:
        """Set a value that follows from others."""
        self._values[target], self.origins[target] = value, Origin("derived", why)

    def drop(self, target: str) -> None:
        """Remove a value and its origin."""
        self._values.pop(target, None)
        self.origins.pop(target, None)

    def place(self, name: str) -> dict[str, Any]:
        """Return all values of one place, such as "engine", by their names."""
        return {
            key.removeprefix(f"{name}."): value for key, value in self._values.items() if key.startswith(f"{name}.")
        }

    def text_of(self, path: Path, label: str) -> str:
        """Read the text of a file that a flag names. Raises `InvalidParams`."""
        try:
            return self.files.read(path).decode()
        except UnicodeDecodeError as error:
            raise InvalidParams(
                f"{label}: {on_one_line(path)} is not UTF-8: stray byte at offset {error.start}"
            ) from None
        except OSError as error:
            raise InvalidParams(f"{label}: cannot read {on_one_line(path)}: {error.strerror or error}") from None


def checked(target: str, value: Any, label: str) -> Any:
    """Return the value if `EngineConfig` or `SamplingParams` accepts it; raise their error with the flag's name."""
    place, _, name = target.partition(".")
    try:
        if place == "sampling" and name in FIELDS:
            SamplingParams(**{name: value})
        elif place == "engine" and name in CONFIG_NAMES:
            EngineConfig(**{"isolation": "process", name: value})
    except InvalidParams as error:
        raise InvalidParams(str(error).replace(name, label, 1)) from None
    return value
