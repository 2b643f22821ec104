"""The models and options of a manager: `ModelEntry`, `ManagerSettings`, and the TOML file that has both.

The file's top level has the fields of `ManagerSettings` except entries, `[defaults]` has options of all models, and each
`[models.NAME]` has fields of `ModelEntry` and any options of `LLM`, side by side.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from paceline import validation
from paceline.errors import InvalidParams, InvalidType
from paceline.hub import is_reference

_OF_THE_MANAGER: Final = ("progress", "cancel")  # options of a load that the manager sets itself
_UNITS: Final = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_PATHS: Final = ("model", "state_folder", "trace")  # relative to the file's folder
_TABLES: Final = ("defaults", "models")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model that a `ModelManager` loads by name. Immutable. None is the default of every field except the name.

    Attributes:
        name: The name by which requests ask for it.
        model: A path to a GGUF file, or a name such as "hf:user/repo:Q4_K_M"; None: the demo model of the package.
        options: Keywords of `LLM`: num_slots, n_ctx, chat_template, lora, sleep_idle_s ... Without `isolation` the engine
            runs in a process of its own.
        aliases: Other names for it.
        pinned: Whether it is never evicted to make room for another model.
        load_on_startup: Whether it is loaded when the manager starts, or when an update adds or changes it, not when it is
            first asked for.
        unload_idle_s: Seconds without a user after which it is unloaded; None: never. With `sleep_idle_s` among the options
            only the memory of its process is freed, and it is back sooner.
        stop_timeout_s: Seconds that its requests have to end when it is unloaded.

    Raises:
        InvalidParams: A value is out of its range; the message names the model and the field.
        InvalidType: A value has the wrong type.
    """

    name: str
    model: str | os.PathLike[str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may have a token of the hub
    aliases: Sequence[str] = ()
    pinned: bool = False
    load_on_startup: bool = False
    unload_idle_s: float | None = None
    stop_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        validation.set_defaults(self)
        if not validation.text("name", self.name):
            raise InvalidParams("name of a model is empty")
        where = f"model {self.name!r}: "
        if self.model is not None:
            validation.path(f"{where}model", self.model)
        if not isinstance(self.options, Mapping):
            raise InvalidType(f"{where}options must be a mapping, not {self.options!r:.80}")
        for name in _OF_THE_MANAGER:
            if name in self.options:
                raise InvalidParams(f"{where}{name} is set by the manager; watch its statuses instead")
        if isinstance(self.aliases, str) or not isinstance(self.aliases, Sequence):
            raise InvalidType(f"{where}aliases must be a list of names, not {self.aliases!r:.80}")
        for alias in self.aliases:
            if not validation.text(f"{where}an alias", alias):
                raise InvalidParams(f"{where}an alias is empty")
        validation.boolean(f"{where}pinned", self.pinned)
        validation.boolean(f"{where}load_on_startup", self.load_on_startup)
        validation.number(f"{where}stop_timeout_s", self.stop_timeout_s, 0)
        if self.unload_idle_s is not None:
            validation.number(f"{where}unload_idle_s", self.unload_idle_s, above=0)
            if self.pinned:
                raise InvalidParams(f"{where}unload_idle_s contradicts pinned: a pinned model stays loaded")

    @property
    def names(self) -> tuple[str, ...]:
        """Its name and its aliases."""
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerSettings:
    """The options of a manager, resolved.

    Attributes:
        entries: The models.
        memory_budget: Bytes that the loaded models may take together; None: no limit.
        max_loaded: Models that may be loaded at once; 0: no limit.
        wait_timeout_s: Seconds that a user of a model waits for room; None: no limit.
        patience_s: Seconds that a model waits for room while others take new users.
    """

    entries: tuple[ModelEntry, ...] = ()
    memory_budget: int | None = None
    max_loaded: int = 4
    wait_timeout_s: float | None = None
    patience_s: float = 5.0

    def __post_init__(self) -> None:
        for entry in self.entries:
            validation.instance("an entry of models", entry, ModelEntry)
        if self.memory_budget is not None:
            validation.integer("memory_budget", self.memory_budget, 1)
        validation.integer("max_loaded", self.max_loaded, 0)
        validation.number("patience_s", self.patience_s, 0)
        if self.wait_timeout_s is not None:
            validation.number("wait_timeout_s", self.wait_timeout_s, 0)


Models = str | os.PathLike[str] | Iterable[ModelEntry] | ManagerSettings
"""The argument `models` of a manager: the path of a file, entries, or settings."""

_ENTRY_FIELDS: Final = frozenset(field_.name for field_ in dataclasses.fields(ModelEntry)) - {"name", "options"}
_OPTIONS: Final = tuple(field_.name for field_ in dataclasses.fields(ManagerSettings) if field_.name != "entries")


def manager_settings(models: Models, **options: Any) -> ManagerSettings:
    """Return the settings of entries or of a file. Options that are not None override them. Raises `InvalidParams`."""
    given = {name: value for name, value in options.items() if value is not None}
    if "memory_budget" in given:
        given["memory_budget"] = byte_count("memory_budget", given["memory_budget"])
    if isinstance(models, (str, os.PathLike)):
        models = read_models_file(models)
    if isinstance(models, ManagerSettings):
        return dataclasses.replace(models, **given)
    if not isinstance(models, Iterable):
        raise InvalidType(f"models must be entries or the path of a TOML file, not {models!r:.80}")
    return ManagerSettings(entries=tuple(models), **given)


def changed_settings(models: Models, options: Mapping[str, Any]) -> Iterable[ModelEntry] | ManagerSettings:
    """Return the argument of an update: entries and settings as they are, a file with the manager's own options over it."""
    if isinstance(models, (str, os.PathLike)):
        return manager_settings(models, **options)
    if isinstance(models, ManagerSettings):
        return models
    if not isinstance(models, Iterable):
        raise InvalidType(f"models must be entries, settings or the path of a TOML file, not {models!r:.80}")
    return models


def read_models_file(path: str | os.PathLike[str]) -> ManagerSettings:
    """Return the models and options of a TOML file. Raises `InvalidParams`, which names the file, the table and the key."""
    where = validation.path("models", path)
    try:
        content = tomllib.loads(validation.read_file(where, validation.MAX_CONFIG_BYTES, pipes=True).decode())
    except OSError as error:
        raise InvalidParams(f"{where} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # of a number of thousands of digits, and of deep nesting
        raise InvalidParams(f"{where} is not a TOML file: {error}") from None
    try:
        return models_table(content, where.absolute().parent)
    except InvalidParams as error:
        raise type(error)(f"{where}: {error}") from None


def models_table(content: Mapping[str, Any], folder: Path) -> ManagerSettings:
    """Return the models and options of a parsed file. Raises `InvalidParams`. folder: the file's folder."""
    options = {key: value for key, value in content.items() if key not in _TABLES}
    for key, value in options.items():
        if isinstance(value, Mapping):
            raise InvalidParams(
                f"unknown table [{key}]; models stand in [models.NAME], what all of them have in [defaults]"
            )
    validation.reject_unknown(options, (*_OPTIONS, *_TABLES))
    if "memory_budget" in options:
        options["memory_budget"] = byte_count("memory_budget", options["memory_budget"])
    models = _table("models", content.get("models", {}))
    defaults = _table("defaults", content.get("defaults", {}))
    if "aliases" in defaults:
        raise InvalidParams("[defaults]: aliases are of one model; put them into its table")
    entries = [_entry(name, {**defaults, **_table(f"models.{name}", table)}, folder) for name, table in models.items()]
    return ManagerSettings(entries=tuple(entries), **options)


def byte_count(name: str, value: object) -> int:
    """Return a number of bytes, given as a number or as a text ("12 GiB"). Raises `InvalidParams`."""
    if not isinstance(value, str):
        return validation.integer(name, value, 1)
    match = _SIZE.fullmatch(value)
    unit = None if match is None else _UNITS.get(match[2].upper())
    if match is None or unit is None:
        raise InvalidParams(f'{name} must be a number of bytes, such as "12 GiB" or "800 MB", not {value!r:.80}')
    return validation.integer(name, int(float(match[1]) * unit), 1)


def _table(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidType(f"[{name}] must be a table, not {value!r:.80}")
    return value


def _entry(name: str, table: Mapping[str, Any], folder: Path) -> ModelEntry:
    fields = {key: value for key, value in table.items() if key in _ENTRY_FIELDS}
    options = {key: value for key, value in table.items() if key not in _ENTRY_FIELDS}
    for values in (fields, options):
        for key in _PATHS:
            value = values.get(key)
            if isinstance(value, str) and not is_reference(value):
                values[key] = str(folder / Path(value).expanduser())
    options.setdefault("isolation", "process")
    try:
        return ModelEntry(name=name, options=options, **fields)
    except InvalidParams as error:
        raise type(error)(f"[models.{name}]: {error}") from None
