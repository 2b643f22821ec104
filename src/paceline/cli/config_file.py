"""The config file of all commands: TOML, with a section for each command. Its top level is for all commands that load a model.

    model = "hf:ggml-org/gemma-3-1b-it-GGUF"    for run, chat, generate, serve and others
    [chat]
    temperature = 0.7                           the long name of a flag, with - or _

Flags win over environment variables, variables over the section of the command, the section over the top level.
"""

from __future__ import annotations

import os
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_origin

from paceline import validation
from paceline.cli.inputs import sampling_params, usual_name
from paceline.errors import InvalidParams
from paceline.params import SamplingParams

CONFIG_VARIABLE: Final = "PACELINE_CONFIG"
MODEL_VARIABLE: Final = "PACELINE_MODEL"
LOADING_COMMANDS: Final = ("run", "chat", "generate", "serve", "demo", "bench", "perplexity", "tokenize", "embed")
_GUIDE: Final = "docs/guide/command_line.md"


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A config file that was read. table: its content."""

    path: Path
    table: Mapping[str, Any]


def default_path() -> Path:
    """Return the path of the file that is read if none is named."""
    folder = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not folder.is_absolute():
        folder = Path(os.path.expanduser("~/.config"))  # noqa: PTH111 - pathlib's raises if there is no home
    return folder / "paceline" / "config.toml"


def read_config(named: Path | None) -> ConfigFile | None:
    """Read the named file, else the default file if it exists. Raises `InvalidParams` if it cannot be read or is no TOML."""
    path = named or default_path()
    if named is None and not path.exists():
        return None
    from paceline.server.flags.resolution import read_toml

    try:
        return ConfigFile(path, read_toml(path, validation.read_file(path, validation.MAX_CONFIG_BYTES, pipes=True)))
    except OSError as error:
        raise InvalidParams(f"cannot read the config file {path}: {error.strerror or error}") from None


def option_values(config: ConfigFile, name: str, commands: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a command's options by the names of its parameters.

    Args:
        config: The file.
        name: The command's name.
        commands: All commands by their names.

    Raises:
        InvalidParams: The file has an unknown name or section, or a value of this command has a wrong type.
    """
    sections, common = _split(config, commands)
    command = commands[name]
    known = options_of(command) if name in LOADING_COMMANDS else {}
    values = _read(config, "", {key: value for key, value in common.items() if _flag(key) in known}, command)
    return values | _read(config, f"[{name}] ", sections.get(name, {}), command)


def known_names(commands: Mapping[str, Any]) -> set[str]:
    """Return the names that the top level may have beside the flags of `serve`: of sections, and of common options."""
    sections = {name for name in commands if _is_section(name, commands)}
    return sections.union(*(options_of(commands[name]) for name in LOADING_COMMANDS))


def check_config(config: ConfigFile, commands: Mapping[str, Any]) -> None:
    """Check the whole file, the section of `serve` included. Raises `InvalidParams`."""
    for name in commands:
        if name != "serve" and _is_section(name, commands):
            option_values(config, name, commands)
    from paceline.server.flags.resolution import from_config

    for given in from_config(config.path, config.table, lambda: known_names(commands)):
        given.value()


def entries(config: ConfigFile) -> Iterator[tuple[str, str]]:
    """Yield each key, with its section, and its value. Keys and tokens are not shown."""
    for key, value in config.table.items():
        if isinstance(value, Mapping):
            yield from ((f"[{key}] {inner}", _shown(inner, each)) for inner, each in value.items())
        else:
            yield key, _shown(key, value)


def _shown(key: str, value: object) -> str:
    if _flag(key) in ("api-key", "hf-token"):
        return "(not shown)"
    return str(value).lower() if isinstance(value, bool) else str(value)


def options_of(command: Any) -> dict[str, Any]:
    """Return the options of a command that a file can set, by their long names without dashes."""
    return {
        name[2:]: parameter
        for parameter in command.params
        if parameter.param_type_name == "option" and parameter.expose_value
        for name in parameter.opts
        if name.startswith("--")
    }


def _is_section(key: str, commands: Mapping[str, Any]) -> bool:
    """Return whether a key names a command with options; `trace` is a group of commands, and a flag of `serve`."""
    return key in commands and not hasattr(commands[key], "commands")


def _split(config: ConfigFile, commands: Mapping[str, Any]) -> tuple[dict[str, Mapping[str, Any]], dict[str, Any]]:
    """Return the sections and the keys of the top level. Raises `InvalidParams` for an unknown name."""
    sections: dict[str, Mapping[str, Any]] = {}
    common: dict[str, Any] = {}
    known = known_names(commands)
    for key, value in config.table.items():
        if _is_section(key, commands):
            if not isinstance(value, Mapping):
                raise InvalidParams(f"{config.path}: {key} is a command, whose options stand in a section [{key}]")
            sections[key] = value
            continue
        if _flag(key) not in known:
            from paceline.server.flags.table import BY_KEY

            _reject_unknown(f"{config.path}: ", key, known | BY_KEY.keys(), _GUIDE)
        common[key] = value
    return sections, common


def _read(config: ConfigFile, section: str, values: Mapping[str, Any], command: Any) -> dict[str, Any]:
    options = options_of(command)
    found = {}
    for key, value in values.items():
        _reject_unknown(f"{config.path}: {section}", key, options, f"paceline {command.name} --help")
        parameter = options[_flag(key)]
        name = parameter.name
        found[name] = _checked(f"{config.path}: {section}{key}", value, parameter, command)
        if name in SamplingParams.__dataclass_fields__:
            try:
                sampling_params({name: found[name]})
            except InvalidParams as error:
                raise InvalidParams(f"{config.path}: {section}{error}") from None
    return found


def _reject_unknown(where: str, key: str, known: Collection[str], see: str) -> None:
    try:
        validation.reject_unknown([_flag(key)], known, see)
    except InvalidParams as error:
        raise InvalidParams(f"{where}{error}") from None


def _checked(label: str, value: Any, parameter: Any, command: Any) -> Any:
    """Return the value of an option. Raises `InvalidParams` for a wrong type, or a number out of the option's range."""
    annotation = signature(command.callback, eval_str=True).parameters[parameter.name].annotation
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if isinstance(annotation, types.UnionType):
        annotation = next(each for each in get_args(annotation) if each is not types.NoneType)
    if get_origin(annotation) is list:
        kind = get_args(annotation)[0]
        return [_one(label, each, kind, parameter) for each in (value if isinstance(value, list) else [value])]
    return _one(label, value, annotation, parameter)


def _one(label: str, value: Any, kind: type, parameter: Any) -> Any:
    if kind is bool:
        if not isinstance(value, bool):
            raise InvalidParams(f"{label} must be true or false, not {value!r:.80}")
        return value
    low, high = getattr(parameter, "min", None), getattr(parameter, "max", None)
    if kind is int:
        return validation.integer(label, value, low, high)
    if kind is float:
        return validation.number(label, value, low, high)
    if issubclass(kind, Enum):
        return validation.choice(label, value, [each.value for each in kind])
    if not isinstance(value, str):
        raise InvalidParams(f"{label} must be a text, not {value!r:.80}")
    return value


def _flag(key: str) -> str:
    return usual_name(key.replace("_", "-"))
