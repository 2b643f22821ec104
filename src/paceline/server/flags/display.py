"""Show flags and settings: `paceline serve --help`, `--print-config`, and the tables of docs/guide/flags.md.

python -m paceline.server.flags.display docs/guide/flags.md
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
        Section("Server", _columns(_server_rows(resolved))),
        Section("Engine", _columns(_engine_rows(resolved))),
        Section("Sampling, where a request does not say", _columns(_sampling_rows(resolved))),
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


def _row(resolved: Resolved, target: str, value: Any) -> tuple[str, str, str]:
    """Return the name, the value or the default in words, and the origin of a setting."""
    if value in (None, (), {}, ""):
        setting = (flag for flag in FLAGS if isinstance(flag.action, Store) and target in flag.action.targets)
        text = next((default_of(flag) for flag in setting if flag.default), "none")
    else:
        text = shown(value)
    return target.partition(".")[2], text, str(resolved.origins.get(target, DEFAULT))


def _server_rows(resolved: Resolved) -> Iterator[tuple[str, str, str]]:
    for setting in dataclasses.fields(resolved.settings):
        if setting.name not in _ELSEWHERE:
            yield _row(resolved, f"server.{setting.name}", getattr(resolved.settings, setting.name))


def _engine_rows(resolved: Resolved) -> Iterator[tuple[str, str, str]]:
    given: Mapping[str, Any] = resolved.settings.engine_options
    targets = (target for flag in FLAGS if isinstance(flag.action, Store) for target in flag.action.targets)
    for target in dict.fromkeys(targets):
        place, _, name = target.partition(".")
        if place == "engine":
            yield _row(resolved, target, given[name] if name in given else getattr(EngineConfig(), name, None))


def _sampling_rows(resolved: Resolved) -> Iterator[tuple[str, str, str]]:
    for name, value in resolved.settings.sampling.items():
        text = "until the context is full" if name == "max_tokens" and value is None else shown(value)
        yield name, text, str(resolved.origins.get(f"sampling.{name}", DEFAULT))
    yield "all others", SAMPLING, str(DEFAULT)


def _columns(rows: Iterable[tuple[str, str, str]]) -> tuple[str, ...]:
    listed = list(rows)
    names, values = (min(40, max(len(row[column]) for row in listed)) for column in (0, 1))
    return tuple(f"  {name:<{names}}  {value:<{values}}  {origin}" for name, value, origin in listed)


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
        tenants = sum(bool(key.tenant) for key in value)
        return f"{len(value)} (not shown)" + (f", {tenants} of them with a tenant" if tenants else "")
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


def write_tables(page: Path) -> None:
    """Replace the tables of the page of flags, which follow its introduction."""
    introduction, _, _ = page.read_text(encoding="utf-8").partition(f"## {next(iter(GROUPS))}\n")
    page.write_text(introduction + markdown(), encoding="utf-8")


def markdown() -> str:
    """Return the tables of the page of flags, a table for each group."""
    return "\n".join([*(line for title in GROUPS for line in _table_of(title)), ""])


def _table_of(title: str) -> Iterator[str]:
    yield from (f"## {title}", "", "| flag | variable | default | what it does |", "|---|---|---|---|")
    for flag in GROUPS[title]:
        value = f" {flag.metavar}" if flag.metavar else ""
        names = [*(f"`{name}{value}`" for name in flag.names), *(f"`{name}`" for name in flag.off_names)]
        variables = [f"`{name}`" for name in (flag.env, *flag.own_envs[:1]) if name is not None]
        cells = (" ".join(names), " ".join(variables), default_of(flag), _meaning_cell(flag))
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"
    yield ""


def _meaning_cell(flag: Flag) -> str:
    parts = [flag.text, _effect_of(flag.action)]
    for value, action in flag.actions.items():
        shown_value = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
        if not isinstance(action, NoOp):
            parts.append(f"`{shown_value}`: {_effect_of(action)}")
        elif flag.metavar:
            parts.append(f"`{shown_value}` is fine.")
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
        case _:
            return ""


if __name__ == "__main__":
    write_tables(Path(sys.argv[1]))
