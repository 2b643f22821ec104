"""Read command line, environment and file into lists of `GivenFlag`. Pure.

Texts become values later, so a text that a stronger source replaces never causes an error.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline import validation
from paceline.errors import InvalidParams
from paceline.server.flags.flag import ENV_PREFIX, SWITCH, Flag, Kind, Origin, on_one_line
from paceline.server.flags.table import BY_KEY, BY_NAME, ENV_NAMES, FLAGS

_SEE: Final = "paceline serve --help"
_FLAGS_ELSEWHERE: Final = {  # of vLLM and of llama-cpp-python's server: the same flag here, or a sentence about it
    "--chat-format": "--chat-template",
    "--dtype": "a GGUF file has its types already; --cache-type-k and --cache-type-v are those of the KV cache",
    "--enable-auto-tool-choice": "leave it out: tools work by the model's own template",
    "--enable-lora": "--lora",
    "--enable-prefix-caching": "--cache-prompt",
    "--enable-reasoning": "--reasoning-format",
    "--enforce-eager": "leave it out: nothing is compiled when a model loads",
    "--gpu-memory-utilization": "--fit-target is the memory that the model and its KV cache leave free",
    "--kv-cache-dtype": "--cache-type-k and --cache-type-v are the types of the KV cache",
    "--max-model-len": "--ctx-size",
    "--max-num-batched-tokens": "--batch-size",
    "--max-num-seqs": "--parallel",
    "--model-path": "--model",
    "--n-ctx": "--ctx-size",
    "--n-threads": "--threads",
    "--num-ctx": "--ctx-size",
    "--quantization": "a GGUF file is quantised already; choose a file, such as -m hf:USER/REPO:Q4_K_M",
    "--reasoning-parser": "leave it out: thinking is read by the model's own template",
    "--served-model-name": "--alias",
    "--speculative-config": "--model-draft, --spec-type and --draft-max say what proposes tokens",
    "--ssl-certfile": "--ssl-cert-file",
    "--ssl-keyfile": "--ssl-key-file",
    "--tensor-parallel-size": "all GPUs are used; --device, --split-mode and --tensor-split choose how",
    "--tokenizer": "a GGUF file has its tokenizer",
    "--tool-call-parser": "leave it out: calls are read by the model's own template",
    "--trust-remote-code": "leave it out: no code of a repository is run",
    "--uvicorn-log-level": "--log-verbosity",
}
_SECTION: Final = "serve"
_LLAMA_PREFIX: Final = "LLAMA_ARG_"
# PACELINE_RPC is what a build was told, too: such words are left in shells, and are no addresses.
_BUILD_VARIABLE: Final = "PACELINE_RPC"
_BUILD_WORDS: Final = ("", "0", "1", "OFF", "ON", "NO", "YES", "FALSE", "TRUE")
_MIN_SIMILARITY: Final = 0.85  # of a PACELINE_ variable that counts as a typo: other programs use the prefix too


@dataclass(frozen=True, slots=True)
class GivenFlag:
    """A flag and the texts given for it, in order. label: its spelling there, for messages."""

    flag: Flag
    label: str
    texts: tuple[str, ...]
    kind: Kind

    @property
    def origin(self) -> Origin:
        """The origin of settings that this flag sets."""
        return Origin(self.kind, self.label)

    def value(self) -> Any:
        """Return the value. Raises `InvalidParams`; readers of secrets do not quote the text."""
        values = [self.flag.reader(self.label, text) for text in self.texts]
        return tuple(one for value in values for one in value) if self.flag.many else values[-1]


def from_arguments(argv: Sequence[str]) -> list[GivenFlag]:
    """Read the command line, in order. Raises `InvalidParams` for an unknown flag or a missing value."""
    found, rest = [], list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, attached = _split(word)
        flag, is_true = _lookup(name, word)
        if equals and not is_true:
            raise InvalidParams(f"{name} takes no value, not {attached!r:.80}; write it alone")
        if equals:
            text = attached
        elif flag.metavar == SWITCH:
            text = "true" if is_true else "false"
        else:
            text = " ".join(_values(name, flag, rest))
        found.append(GivenFlag(flag, name, (text,), "flag"))
    return found


def from_environment(environ: Mapping[str, str]) -> list[GivenFlag]:
    """Read variables, in the order of the table. PACELINE_ ones win over llama-server's."""
    found = []
    for flag in FLAGS:
        for name in (*flag.own_envs, flag.off_env, flag.env):
            if name is not None and name in environ and not _is_of_a_build(name, environ[name]):
                text = "false" if name == flag.off_env else environ[name]
                found.append(GivenFlag(flag, name, (text,), "environment"))
                break
    return found


def read_toml(path: Path, data: bytes) -> dict[str, Any]:
    """Read a TOML file. Raises `InvalidParams` that names it for invalid TOML."""
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise InvalidParams(f"{on_one_line(path)} is not UTF-8: stray byte at offset {error.start}") from None
    except (ValueError, RecursionError) as error:  # of a number of thousands of digits as well
        raise InvalidParams(f"{on_one_line(path)} is not valid TOML: {error}") from None


def from_config(path: Path, table: Mapping[str, Any], other_names: Callable[[], Collection[str]]) -> list[GivenFlag]:
    """Read the config file of all commands: the flags on its top level, and those of [serve], which win.

    other_names: returns the names on the top level that are for other commands. Raises `InvalidParams` that names the file
    for an unknown key or a wrong type.
    """
    section = table.get(_SECTION, {})
    if not isinstance(section, Mapping):
        raise InvalidParams(f"{on_one_line(path)}: {_SECTION} must be a section [{_SECTION}]")
    unknown = [key for key in table if _key(key) not in BY_KEY and key != _SECTION]
    if unknown:
        _reject_unknown(f"{on_one_line(path)}: ", unknown, BY_KEY.keys() | set(other_names()))
    own = from_table(path, section, f"[{_SECTION}] ")
    names = {given.flag.long_name for given in own}
    common = from_table(path, {key: value for key, value in table.items() if _key(key) in BY_KEY})
    return [given for given in common if given.flag.long_name not in names] + own


def from_table(path: Path, table: Mapping[str, Any], section: str = "") -> list[GivenFlag]:
    """Read a table of a TOML file. Raises `InvalidParams` that names the file for an unknown key or a wrong type."""
    return [_from_key(f"{on_one_line(path)}: {section}", key, value) for key, value in table.items()]


def _is_of_a_build(name: str, text: str) -> bool:
    return name == _BUILD_VARIABLE and text.upper() in _BUILD_WORDS


def odd_variables(environ: Mapping[str, str]) -> list[str]:
    """Return notes on variables that look as if they were meant for the server, and are unknown or of a build."""
    notes = []
    for name in sorted(environ):
        if _is_of_a_build(name, environ[name]):
            notes.append(f"{name}={environ[name]} is for builds and not used here; as a flag it has addresses (--rpc)")
        prefix = next((one for one in (_LLAMA_PREFIX, ENV_PREFIX) if name.startswith(one)), None)
        if prefix is None or name in ENV_NAMES:
            continue
        known = [one.removeprefix(prefix) for one in ENV_NAMES if one.startswith(prefix)]
        nearest = validation.nearest_names(name.removeprefix(prefix), known, min_similarity=_MIN_SIMILARITY)
        if nearest or prefix == _LLAMA_PREFIX:
            hint = f"; did you mean {prefix}{nearest[0]}?" if nearest else ""
            notes.append(f"{name} is not known and not used{hint}")
    return notes


def strongest(sources: Iterable[Sequence[GivenFlag]]) -> tuple[list[GivenFlag], list[str]]:
    """Return each flag of its strongest source, where the last one counts, and notes; sources come weakest first.

    A flag that may be repeated keeps all of its texts.
    """
    chosen: dict[str, GivenFlag] = {}
    notes = []
    for source in sources:
        here: dict[str, GivenFlag] = {}
        for given in source:
            earlier = here.pop(given.flag.long_name, None)
            if earlier is not None and given.flag.many:
                given = GivenFlag(given.flag, given.label, earlier.texts + given.texts, given.kind)  # noqa: PLW2901
            elif earlier is not None and earlier.texts != given.texts:
                notes.append(f"{given.label} was given more than once; the last one counts")
            here[given.flag.long_name] = given
        chosen = {name: given for name, given in chosen.items() if name not in here} | here
    return list(chosen.values()), notes


def _split(word: str) -> tuple[str, str, str]:
    """Split --name=value; _ counts as - in a long name."""
    if not word.startswith("--"):
        return word, "", ""
    name, equals, value = word.partition("=")
    return name.replace("_", "-"), equals, value


def _lookup(name: str, word: str) -> tuple[Flag, bool]:
    if not name.startswith("-") or name in ("-", "--"):
        hint = f"a model is named with -m, and {_SEE} has all flags"
        raise InvalidParams(f"unexpected {word!r:.80}: every value belongs to a flag; {hint}")
    if name not in BY_NAME:
        names = [known for known in BY_NAME if known.startswith("--") == name.startswith("--")]
        validation.reject_unknown([name], names, _SEE, _FLAGS_ELSEWHERE)
    return BY_NAME[name]


def _values(name: str, flag: Flag, rest: list[str]) -> list[str]:
    """Take the values that follow a flag."""
    count = len(flag.metavar.split())
    if len(rest) < count:
        raise InvalidParams(f"{name} needs a value: {name} {flag.metavar}")
    if rest[0] in BY_NAME:
        long_name = flag.long_name
        raise InvalidParams(
            f"{name} needs a value, and {rest[0]} is a flag; write {long_name}={rest[0]} if you mean that"
        )
    taken, rest[:count] = rest[:count], []
    return taken


def _key(key: str) -> str:
    return key.replace("_", "-")


def _reject_unknown(where: str, keys: Iterable[str], known: Collection[str]) -> None:
    try:
        validation.reject_unknown(map(_key, keys), known, "docs/guide/flags.md")
    except InvalidParams as error:
        raise InvalidParams(f"{where}{error}") from None


def _from_key(where: str, key: str, value: Any) -> GivenFlag:
    _reject_unknown(where, [key], BY_KEY)
    flag, is_true = BY_KEY[_key(key)]
    label = f"{where}{key}"
    if not is_true and not isinstance(value, bool):
        raise InvalidParams(f"{label} must be true or false")
    many = isinstance(value, list) and flag.many
    texts = tuple(_text(label, one, flag) for one in (value if many else [value]))
    if not texts:
        raise InvalidParams(f"{label} is an empty list; leave it out")
    return GivenFlag(flag, label, texts if is_true else ("false" if value else "true",), "file")


def _text(label: str, value: object, flag: Flag) -> str:
    """Return a TOML value as it would be written on the command line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        try:
            return str(value)
        except ValueError:  # an integer of thousands of digits
            raise InvalidParams(f"{label} has more digits than any setting can have") from None
    if isinstance(value, dict) and flag.table:
        return _table(label, value)
    kind = "a table" if isinstance(value, dict) else "a list" if isinstance(value, list) else type(value).__name__
    raise InvalidParams(f"{label} must be a text, a number or true or false, not {kind}")


def _table(label: str, table: dict[str, Any]) -> str:
    """Return a table of texts, numbers and booleans as JSON."""
    for key, value in table.items():
        if not isinstance(value, (str, int, float)):
            raise InvalidParams(f"{label}.{key} must be a text, a number or true or false, not {type(value).__name__}")
    try:
        return json.dumps(table, allow_nan=False)
    except ValueError:  # an integer of thousands of digits, infinity or NaN
        raise InvalidParams(f"{label} has a number that no option can have") from None
