"""Show flags and settings: `paceline serve --help`, `--print-config`, and the page docs/guide/flags.md. Pure.

python -m paceline.server.flags.display > docs/guide/flags.md
"""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.config import EngineConfig
from paceline.server.flags.resolution import Resolved
from paceline.server.flags.setters import DEFAULT
from paceline.server.flags.table import (
    FLAGS,
    GROUPS,
    NO_LIMIT,
    SWITCH,
    Action,
    Flag,
    Ignore,
    NoOp,
    Print,
    ReadConfig,
    Reject,
    Store,
)
from paceline.server.settings import ApiKey, ServerSettings

_MAX_VALUE_CHARS: Final = 90
SAMPLING: Final = "the model's own, else the API's"
_NAMES_WIDTH: Final = 30
_OBVIOUS: Final = ("", "off", "none", SAMPLING)  # defaults that help does not repeat
_TITLES: Final[dict[str, str]] = {"Sampling": "Sampling, where a request does not say"}
_ELSEWHERE: Final = ("engine_options", "sampling")  # settings that have a part of their own
_ABOUT: Final = """\
Serves a model over HTTP, with the APIs of OpenAI and of llama-server. Without -m, the small demo model that comes along.

Flags are llama-server's, short and long, and some of its own. Each can be set by a variable as well: by llama-server's \
(LLAMA_ARG_CTX_SIZE), or by PACELINE_ and the long name (PACELINE_CTX_SIZE); and in a TOML file, see --config. The command \
line is stronger than variables, these than the file. docs/guide/flags.md has all of them.
"""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and the lines under it."""

    title: str
    lines: tuple[str, ...]


def help_sections(width: int) -> list[Section]:
    """Return the help, in lines of `width` characters."""
    about = tuple(line for paragraph in _ABOUT.split("\n\n") for line in ("", *textwrap.wrap(paragraph, width)))
    sections = [Section("Usage: paceline serve [FLAG [VALUE]]...", about)]
    for title, flags in GROUPS.items():
        lines = [
            line
            for flag in flags
            if not isinstance(flag.action, Ignore | NoOp | Reject)
            for line in _help_lines(flag, width)
        ]
        if lines:
            sections.append(Section(_TITLES.get(title, title), tuple(lines)))
    sections.append(Section("Taken, and without effect here", tuple(_names_of((Ignore, NoOp), width))))
    sections.append(Section("Refused, with what to do instead", tuple(_names_of((Reject,), width))))
    sections.append(Section("Exit codes", ("  0 served and ended, 1 failed, 2 wrong usage.",)))
    return sections


def config_sections(resolved: Resolved) -> list[Section]:
    """Return every setting with its value and origin; secrets are not shown."""
    return [
        Section("Server", tuple(_columns(_server_rows(resolved)))),
        Section("Engine", tuple(_columns(_engine_rows(resolved)))),
        Section("Sampling, where a request does not say", tuple(_columns(_sampling_rows(resolved)))),
        Section("Notes", tuple(f"  {note}" for note in resolved.notes) or ("  none",)),
    ]


def _help_lines(flag: Flag, width: int) -> Iterator[str]:
    names = ", ".join((*flag.names, *flag.off_names))
    head = f"  {names} {flag.metavar}".rstrip()
    default = default_of(flag)
    text = flag.text if default in _OBVIOUS else f"{flag.text} (default: {default})"
    body = textwrap.wrap(text, width - _NAMES_WIDTH, break_on_hyphens=False)
    if len(head) < _NAMES_WIDTH - 1:
        yield f"{head:<{_NAMES_WIDTH}}{body.pop(0)}"
    else:
        yield from textwrap.wrap(
            head, width, subsequent_indent="      ", break_on_hyphens=False, break_long_words=False
        )
    yield from (" " * _NAMES_WIDTH + line for line in body)


def _names_of(kinds: tuple[type, ...], width: int) -> Iterator[str]:
    """Return the first names of flags of these actions, each group by itself."""
    for title, flags in GROUPS.items():
        names = ", ".join(flag.names[0] for flag in flags if isinstance(flag.action, kinds))
        if names:
            yield from textwrap.wrap(
                f"{title}: {names}", width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
            )


def _server_rows(resolved: Resolved) -> Iterator[tuple[str, str, str]]:
    for setting in dataclasses.fields(resolved.settings):
        if setting.name not in _ELSEWHERE:
            target = f"server.{setting.name}"
            yield (setting.name, _value(target, getattr(resolved.settings, setting.name)), _origin(resolved, target))


def _engine_rows(resolved: Resolved) -> Iterator[tuple[str, str, str]]:
    given: Mapping[str, Any] = resolved.settings.engine_options
    for name in _names("engine"):
        target = f"engine.{name}"
        value = given[name] if name in given else getattr(EngineConfig(), name, None)
        yield name, _value(target, value), _origin(resolved, target)


def _sampling_rows(resolved: Resolved) -> Iterator[tuple[str, str, str]]:
    for name, value in resolved.settings.sampling.items():
        text = "until the context is full" if name == "max_tokens" and value is None else shown(value)
        yield name, text, _origin(resolved, f"sampling.{name}")
    yield "all others", SAMPLING, str(DEFAULT)


def _value(target: str, value: Any) -> str:
    """Return the value, or the default in words."""
    return _words(target) if value in (None, (), {}, "") else shown(value)


def _words(target: str) -> str:
    setting = (flag for flag in FLAGS if isinstance(flag.action, Store) and target in flag.action.targets)
    return next((default_of(flag) for flag in setting if flag.default), "none")


def _names(place: str) -> list[str]:
    """Return the names of one place, in the order of the table."""
    targets = (target for flag in FLAGS if isinstance(flag.action, Store) for target in flag.action.targets)
    return list(dict.fromkeys(target.partition(".")[2] for target in targets if target.startswith(f"{place}.")))


def _origin(resolved: Resolved, target: str) -> str:
    return str(resolved.origins.get(target, DEFAULT))


def _columns(rows: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    listed = list(rows)
    names, values = (min(40, max(len(row[column]) for row in listed)) for column in (0, 1))
    for name, value, origin in listed:
        yield f"  {name:<{names}}  {value:<{values}}  {origin}"


def default_of(flag: Flag) -> str:
    """Return a flag's default in a few words; empty for flags that set nothing."""
    if not isinstance(flag.action, Store) or flag.default:
        return flag.default
    place, _, name = flag.action.targets[0].partition(".")
    if place == "sampling":
        return SAMPLING
    value = getattr(EngineConfig() if place == "engine" else ServerSettings(), name)
    return "off" if value is None and flag.metavar == SWITCH else shown(value)


def shown(value: Any) -> str:
    """Return a value on one line, shortened; of keys only their number."""
    if isinstance(value, tuple) and value and all(isinstance(item, ApiKey) for item in value):
        return _keys(value)
    text = _value_text(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."


def _value_text(value: Any) -> str:
    if value is None or value in ((), [], {}):
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if value == NO_LIMIT:
        return "no limit"
    if isinstance(value, str | Path):
        text = str(value)
        return text if text.isprintable() and text.strip() == text != "" else json.dumps(text, ensure_ascii=False)
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, ensure_ascii=False, default=str)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _keys(keys: tuple[ApiKey, ...]) -> str:
    tenants = sum(bool(key.tenant) for key in keys)
    return f"{len(keys)} (not shown)" + (f", {tenants} of them with a tenant" if tenants else "")


_INTRODUCTION: Final = """\
# Flags of `paceline serve`

```sh
paceline serve -m model.gguf -c 32768 -np 8 --api-key-file keys.txt
paceline serve --config server.toml --print-config
```

All of llama-server's flags are known, with all of their names and environment variables. Most do
the same here. Some have no effect, and a line on stderr says why. Some are refused because this
server does not support them, with what to do instead. An unknown flag is refused with the nearest
known one. `--print-config` prints every setting, its source and all notes.

## Command line, environment, config file

The command line wins over the environment, the environment over the [config
file](command_line.md#one-config-file-for-all-commands), the file over the defaults. Of each flag
only the strongest source counts: a list on the command line replaces the list of a variable.
Different flags that fill one list, such as `--api-key` and `--api-key-file`, add up. A model that
is chosen on the command line replaces that of a variable or of the file, whichever flag names it; a
model of a variable replaces that of the file.

* **Command line:** `--name value` or `--name=value`, `_` is as good as `-` in a long name. A switch
  stands alone; many have a second name that turns them off. Given twice, the last one counts; what
  is marked *may be repeated* adds up.
* **Environment:** llama-server's variable (`LLAMA_ARG_CTX_SIZE`), or `PACELINE_` and the long name
  in capitals with `_` (`PACELINE_CTX_SIZE`), which wins over the former. Switches take on, off,
  true, false, 1, 0, enabled and disabled. Where a switch has an off name, `LLAMA_ARG_NO_...` turns
  it off by being there, whatever its value.
* **File:** that of `--config` or `PACELINE_CONFIG`, else `~/.config/paceline/config.toml`. TOML, in
  its section `[serve]` or on its top level, which other commands read as well, with long names as
  keys, with `-` or `_` and without the dashes before. Values are texts, numbers, true and false;
  for what may be repeated also lists of them, and for `strategy` also a table. Paths in it are
  relative to where the server starts.

```toml
model = "model.gguf"

[serve]
ctx-size = 32768
parallel = 8
slots = false
api-key-file = "keys.txt"
```

## Differences from llama-server

* **Context.** `-c` is the size of one pool of KV cells that all slots share, as with llama-server's
  `--kv-unified`. It is never cut into equal parts: one request may use nearly all of it, and
  requests wait while there is no room. So `-c 32768 -np 8` is room for 32768 tokens in all, at most
  as many for one request as the model was trained with.
* **Slots.** `-np -1` is 8, where llama-server takes 4.
* **Metrics** are on without `--metrics`; `--no-metrics` turns them off. CORS is off without
  `--cors-origins`.
* **Batches** beyond the context are lowered to it, as llama.cpp does; a note says so.
* **Keys.** A file of `--api-key-file` is read as llama-server reads it, blanks at the ends of lines
  aside. Keys with a tenant are in a file of their own, `--tenant-key-file`, with `TENANT:KEY` a
  line, so that no key with a colon is misread. An empty `--api-key`, or a file without a key, is
  refused: it would open the server.
* **Host names.** Without a key and TLS only requests to certain host names are accepted, see
  `--allowed-hosts` and [host names](server.md#host-names-dns-rebinding); llama-server accepts any.
* **Sampling** flags are defaults for requests that do not say. They win over the model's own and
  over the API's.
"""


def markdown() -> str:
    """Return the page."""
    return "\n".join([_INTRODUCTION, *(line for title in GROUPS for line in _table_of(title)), ""])


def _table_of(title: str) -> Iterator[str]:
    yield from (f"## {title}", "")
    yield "| flag | variable | default | what it does |"
    yield "|---|---|---|---|"
    for flag in GROUPS[title]:
        cells = (_names_cell(flag), _variables_cell(flag), default_of(flag), _meaning_cell(flag))
        yield f"| {' | '.join(map(_escaped, cells))} |"
    yield ""


def _names_cell(flag: Flag) -> str:
    value = f" {flag.metavar}" if flag.metavar else ""
    return " ".join([*(f"`{name}{value}`" for name in flag.names), *(f"`{name}`" for name in flag.off_names)])


def _variables_cell(flag: Flag) -> str:
    return " ".join(f"`{name}`" for name in (flag.env, *flag.own_envs[:1]) if name is not None)


def _meaning_cell(flag: Flag) -> str:
    parts = [flag.text, _effect_of(flag.action)]
    others = flag.actions.items()
    parts += [f"`{_spelled(value)}`: {_effect_of(action)}" for value, action in others if not isinstance(action, NoOp)]
    parts += [f"`{_spelled(value)}` is fine." for value, action in others if isinstance(action, NoOp) and flag.metavar]
    if flag.many:
        parts.append("May be repeated.")
    if flag.ours:
        parts.append("*Not llama-server's.*")
    return " ".join(filter(None, parts))


def _effect_of(action: Action) -> str:
    match action:
        case Ignore(why):
            return f"**No effect:** {why}."
        case Reject(way_out):
            return f"**Refused:** {way_out}."
        case Store() | NoOp() | Print() | ReadConfig():
            return ""


def _spelled(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.stdout.write(markdown())
