"""Define what table, readers, setters and resolution of flags share: a flag's record, its actions, and the draft of the settings.

The draft lives for one resolution; single values are checked by `EngineConfig` and `SamplingParams`. Any thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from paceline import validation
from paceline.config import CONFIG_NAMES, EngineConfig
from paceline.errors import InvalidParams, ModelLoadError
from paceline.hub import LocalModel, ModelReference, local_model
from paceline.params import FIELDS, SamplingParams

Reader = Callable[[str, str], Any]
"""Takes the flag's name for messages and the text; returns the value or raises `InvalidParams`."""

Setter = Callable[["Draft", Any, str], None]
"""Takes the draft, the value and the flag's name for messages; stores in the draft what follows."""

ENV_PREFIX: Final = "PACELINE_"
SWITCH: Final = ""  # the metavar of a flag that takes no value


@dataclass(frozen=True, slots=True)
class Store:
    """Store the value in the settings. into: targets apart by spaces, such as "engine.n_ctx" or "server.port".

    convert: called with the value first. setter: stores it, where that takes more than putting it into the targets.
    """

    into: str
    setter: Setter | None = None
    convert: Callable[[Any], Any] | None = None

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets."""
        return tuple(self.into.split())


@dataclass(frozen=True, slots=True)
class Ignore:
    """Start without it; a printed note says why nothing is lost."""

    why: str


@dataclass(frozen=True, slots=True)
class NoOp:
    """Do nothing, without a note: the flag requests what holds anyway."""


@dataclass(frozen=True, slots=True)
class Reject:
    """Do not start. way_out: a sentence that says what to do instead."""

    way_out: str


@dataclass(frozen=True, slots=True)
class Print:
    """Print something in place of serving."""

    what: Literal["help", "version", "config"]


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """Read more flags from the file that the value names."""


Action = Store | Ignore | NoOp | Reject | Print | ReadConfig
NO_OP: Final = NoOp()


@dataclass(frozen=True, slots=True)
class Flag:
    """One row of the table.

    spelled: its names, apart by spaces, the short ones first. metavar: its value's name; `SWITCH` for none. reader: from text
    to value. env: llama-server's environment variable. off: names that mean False. many: may be repeated and adds up; its
    reader returns a tuple. actions: other actions for certain values. default: what holds without it, where the dataclasses
    do not say. secret: its value is never shown. ours: llama-server does not have it. table: in a file its value may be a
    table, which its reader gets as JSON.
    """

    spelled: str
    metavar: str
    reader: Reader
    action: Action
    text: str
    env: str | None = None
    off: str = ""
    many: bool = False
    actions: Mapping[Any, Action] = field(default_factory=dict)
    default: str = ""
    secret: bool = False
    ours: bool = False
    table: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names that take a value or mean True."""
        return tuple(self.spelled.split())

    @property
    def off_names(self) -> tuple[str, ...]:
        """The names that mean False."""
        return tuple(self.off.split())

    @property
    def long_name(self) -> str:
        """The name that files, PACELINE_ variables and messages use: the first long one."""
        return next(name for name in self.names if name.startswith("--"))

    @property
    def own_envs(self) -> tuple[str, ...]:
        """The environment variables made of the long names; none for a flag that only prints."""
        if isinstance(self.action, Print):
            return ()
        long_names = [name for name in self.names if name.startswith("--")]
        return tuple(ENV_PREFIX + re.sub("[-.]", "_", name[2:]).upper() for name in long_names)

    @property
    def off_env(self) -> str | None:
        """llama-server's variable that means False by being set, whatever its value."""
        if self.env is None or not self.off or not self.env.startswith("LLAMA_ARG_"):
            return None
        return self.env.replace("LLAMA_ARG_", "LLAMA_ARG_NO_")

    def action_of(self, value: Any) -> Action:
        """Return the action for this value."""
        return self.actions.get(value, self.action) if self.actions else self.action


Kind = Literal["flag", "environment", "file", "default", "derived"]


class Files(Protocol):
    """The file system as a resolution needs it."""

    def read(self, path: Path) -> bytes:
        """Return the bytes of a file. Raises `OSError`."""

    def is_file(self, path: Path) -> bool:
        """Return whether there is such a file."""

    def is_folder(self, path: Path) -> bool:
        """Return whether there is such a folder."""

    def names(self, folder: Path) -> list[str]:
        """Return the names of what is in a folder, sorted. Raises `OSError`."""

    def download(
        self,
        model: ModelReference,
        target: Path | None,
        *,
        offline: bool,
        hf_token: str | None,
        with_projector: bool = False,
    ) -> LocalModel:
        """Return the files of a model that is given by name. Raises as `paceline.hub.local_model`."""

    def cached_models(self) -> Mapping[str, Path]:
        """Return the models in the caches of this machine that have a name, by that name."""

    def trained_context(self, model: Path | None) -> int:
        """Return the tokens that a model (None: the demo model) was trained with. Raises `ModelLoadError`."""


MAX_FILE_BYTES: Final = 16 << 20
"""Largest file that a flag names and whose text is used: keys, presets, schemas, grammars, chat templates."""


class DiskFiles:
    """`Files` on the disk and on the network. note: receives lines about downloads. Blocking; any thread."""

    def __init__(self, note: Callable[[str], object]) -> None:
        self._note = note

    def read(self, path: Path) -> bytes:
        """Return the bytes of a file, which may be a pipe. Raises `OSError`."""
        return validation.read_file(path, MAX_FILE_BYTES, pipes=True)

    def is_file(self, path: Path) -> bool:
        """Return whether there is something to open."""
        return path.exists() and not path.is_dir()

    def is_folder(self, path: Path) -> bool:
        """Return whether there is such a folder."""
        return path.is_dir()

    def download(
        self,
        model: ModelReference,
        target: Path | None,
        *,
        offline: bool,
        hf_token: str | None,
        with_projector: bool = False,
    ) -> LocalModel:
        """Return the files of a model, downloaded if need be."""
        try:
            return local_model(
                model,
                target=target,
                offline=offline,
                hf_token=hf_token,
                with_projector=with_projector,
                note=self._note,
            )
        except KeyboardInterrupt:
            self._note("the download was stopped; the next start continues it")
            raise

    def names(self, folder: Path) -> list[str]:
        """Return the names of what is in a folder, sorted. Raises `OSError`."""
        return sorted(path.name for path in folder.iterdir())

    def cached_models(self) -> dict[str, Path]:
        """Return the models of the hub's caches and of Ollama's, by the names that requests use."""
        from paceline.hub.found_models import find_models
        from paceline.hub.hub_settings import hub_settings

        named = (found for found in find_models(hub_settings()) if found.name.startswith(("hf:", "ollama:")))
        return {found.name.removeprefix("hf:"): found.path for found in named}

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


class Unset:
    """The value of a flag that means what holds without it."""

    def __repr__(self) -> str:
        return "automatic"


UNSET: Final = Unset()


def on_one_line(given: str | Path) -> str:
    """Return a text or path for a message: as it is, or quoted where it has characters that would break a line."""
    text = str(given)
    return text if text.isprintable() else repr(text)


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
