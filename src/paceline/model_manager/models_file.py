"""The options of a manager, and the TOML file that has them with its models. Standard library only.

The file's top level has the fields of `ManagerSettings` but entries, `[defaults]` what all models have in common, and each
`[models.NAME]` the fields of `ModelEntry` and any options of `LLM`, side by side.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline import validation
from paceline.errors import InvalidParams, InvalidType
from paceline.hub import is_reference
from paceline.model_manager.model_entry import ModelEntry
from paceline.model_manager.room_plan import RoomLimits

_UNITS: Final = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_ENTRY_FIELDS: Final = frozenset(one.name for one in dataclasses.fields(ModelEntry)) - {"name", "options"}
_PATHS: Final = ("model", "state_folder", "trace")  # relative to the file's folder
_TABLES: Final = ("defaults", "models")


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

    @property
    def room_limits(self) -> RoomLimits:
        """The limits of what is loaded."""
        return RoomLimits(max_bytes=self.memory_budget, max_loaded=self.max_loaded or None)


_OPTIONS: Final = tuple(one.name for one in dataclasses.fields(ManagerSettings) if one.name != "entries")


def manager_settings(
    models: str | os.PathLike[str] | Iterable[ModelEntry] | ManagerSettings, **options: Any
) -> ManagerSettings:
    """Return the settings of entries or of a file, with the options that are not None over them. Raises `InvalidParams`."""
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


def changed_settings(
    models: str | os.PathLike[str] | Iterable[ModelEntry] | ManagerSettings, options: Mapping[str, Any]
) -> Iterable[ModelEntry] | ManagerSettings:
    """Return what a manager is updated with: the settings of a file under the options that the manager was made with.

    Entries and settings are returned as they are. Raises `InvalidParams`.
    """
    if isinstance(models, (str, os.PathLike)):
        return manager_settings(models, **options)
    if isinstance(models, ManagerSettings):
        return models
    if not isinstance(models, Iterable):
        raise InvalidType(f"models must be entries, settings or the path of a TOML file, not {models!r:.80}")
    return models


def read_models_file(path: str | os.PathLike[str]) -> ManagerSettings:
    """Return what a TOML file of models has. Raises `InvalidParams`, which names the file, the table and the key."""
    where = validation.path("models", path)
    try:
        content = tomllib.loads(validation.read_file(where, validation.MAX_CONFIG_BYTES, pipes=True).decode())
    except OSError as error:
        raise InvalidParams(f"{where} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # of a number of thousands of digits, and of deep nesting
        raise InvalidParams(f"{where} is not a TOML file: {error}") from None
    try:
        return _settings(content, where.absolute().parent)
    except InvalidParams as error:
        raise type(error)(f"{where}: {error}") from None


def models_table(content: Mapping[str, Any], folder: Path) -> ManagerSettings:
    """Return what a file of models says that was read already. folder: the file's. Raises `InvalidParams`."""
    return _settings(content, folder)


def byte_count(name: str, value: object) -> int:
    """Return a number of bytes, given as such or as a text like "12 GiB". Raises `InvalidParams`."""
    if not isinstance(value, str):
        return validation.integer(name, value, 1)
    match = _SIZE.fullmatch(value)
    unit = None if match is None else _UNITS.get(match[2].upper())
    if match is None or unit is None:
        raise InvalidParams(f'{name} must be a number of bytes, such as "12 GiB" or "800 MB", not {value!r:.80}')
    return validation.integer(name, int(float(match[1]) * unit), 1)


def _settings(content: Mapping[str, Any], folder: Path) -> ManagerSettings:
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
    if "isolation" not in options:
        options["isolation"] = "process"
    try:
        return ModelEntry(name=name, options=options, **fields)
    except InvalidParams as error:
        raise type(error)(f"[models.{name}]: {error}") from None
