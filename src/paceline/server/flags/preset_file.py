"""Read llama-server's preset files: INI, with a section for each model and the names of flags as keys. Pure.

    [*]                       for all models
    ctx-size = 8192
    [my-model]                its name in requests
    hf-repo = user/repo:Q8_0

A value ends at the first ; or #, which begin a comment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline import validation
from paceline.errors import InvalidParams
from paceline.server.flags import readers as read
from paceline.server.flags.flag import Print, ReadConfig, Reader, on_one_line
from paceline.server.flags.sources import GivenFlag
from paceline.server.flags.table import BY_NAME, FLAGS

ALL_MODELS: Final = "*"
"""The section whose keys hold for all models."""

_HEADER = re.compile(r"\[[ \t]*([^\]]+?)[ \t]*\]")
_KEY = re.compile(r"([A-Za-z_][A-Za-z0-9_.-]*)[ \t]*=[ \t]*(.*)", re.DOTALL)
_COMMENT = re.compile(r"[ \t]*[;#].*", re.DOTALL)
_LINE_ENDS = re.compile(r"\r\n|\n|\r")
_TAG_END = re.compile(r"[-.]([A-Za-z0-9_]+)$")
_RESERVED: Final = "version"  # a key that llama-server passes over
_LONGEST_S: Final = 1e9

PRESET_KEYS: Final[Mapping[str, Reader]] = {
    "load-on-startup": read.switch,
    "stop-timeout": read.number(0, _LONGEST_S),
    "dedup-cache-models": read.switch,
    "pinned": read.switch,
    "unload-idle-seconds": read.seconds("never", None),
}
"""The keys that are no flags; the last two are ours."""

_BY_VARIABLE: Final = {
    **{flag.env: (flag, True) for flag in FLAGS if flag.env is not None},
    **{flag.off_env: (flag, False) for flag in FLAGS if flag.off_env is not None},
}


@dataclass(frozen=True, slots=True)
class PresetSection:
    """One section. flags: in order; options: values of `PRESET_KEYS`."""

    name: str
    flags: tuple[GivenFlag, ...]
    options: Mapping[str, Any]


def read_presets(path: Path, data: bytes) -> dict[str, PresetSection]:
    """Return the sections by name, `ALL_MODELS` among them if it is there.

    Raises `InvalidParams` that names file, line, section and key for what is no line of a preset, an unknown key or a value
    of one of `PRESET_KEYS` that is wrong.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidParams(f"{on_one_line(path)} is not UTF-8: stray byte at offset {error.start}") from None
    sections: dict[str, dict[str, str]] = {}
    current: dict[str, str] | None = None
    for number, line in enumerate(_LINE_ENDS.split(text), 1):
        content = _COMMENT.sub("", line, count=1).strip(" \t")
        if not content:
            continue
        if header := _HEADER.fullmatch(content):
            current = sections[canonical_name(header[1])] = {}
        elif key := _KEY.fullmatch(content):
            if key[1] == _RESERVED:
                continue
            if current is None:
                raise InvalidParams(
                    f"{on_one_line(path)}, line {number}: {key[1]} stands before the first section; put it under [*]"
                )
            current[key[1]] = key[2]
        else:
            raise InvalidParams(
                f"{on_one_line(path)}, line {number}: {content!r:.80} is neither [SECTION] nor KEY = VALUE"
            )
    return {name: _section(path, name, keys) for name, keys in sections.items()}


def canonical_name(name: str) -> str:
    """Return a model's name with its tag in capitals, as llama-server writes it: user/repo:q8_0 is user/repo:Q8_0."""
    base, colon, tag = name.rpartition(":")
    if not colon:
        return name
    found = _TAG_END.search(tag)
    return f"{base}:{(found[1] if found else tag).upper()}"


def _section(path: Path, name: str, keys: Mapping[str, str]) -> PresetSection:
    flags: list[GivenFlag] = []
    options: dict[str, Any] = {}
    for key, text in keys.items():
        label = f"{on_one_line(path)}: [{name}] {key}"
        if (reader := PRESET_KEYS.get(key.replace("_", "-"))) is not None:
            options[key.replace("_", "-")] = reader(label, text)
        else:
            flags.append(_flag(label, f"{on_one_line(path)}: [{name}]", key, text))
    return PresetSection(name, tuple(flags), options)


def _flag(label: str, where: str, key: str, text: str) -> GivenFlag:
    """Return the flag that a key names: by a long name, a short one or llama-server's variable."""
    found = next((BY_NAME[one] for one in (f"--{key.replace('_', '-')}", f"-{key}") if one in BY_NAME), None)
    found = found or _BY_VARIABLE.get(key)
    if found is None or isinstance(found[0].action, Print | ReadConfig):
        names = [name.lstrip("-") for name in BY_NAME]
        try:
            validation.reject_unknown([key], [*names, *PRESET_KEYS], "docs/guide/flags.md")
        except InvalidParams as error:
            raise InvalidParams(f"{where}: {error}") from None
        raise InvalidParams(f"{where}: {key} is of the command line alone; leave it out")
    flag, is_true = found
    if not is_true:
        text = "false" if read.switch(label, text) else "true"
    return GivenFlag(flag, label, (text,), "file")
