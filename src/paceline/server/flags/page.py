"""The page docs/guide/flags.md, made from the table of flags.

python -m paceline.server.flags.page > docs/guide/flags.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

from paceline.server.flags.defaults import default_of
from paceline.server.flags.flag import Fate, Flag, Ignored, Prints, ReadsConfig, Refused, Same, Sets
from paceline.server.flags.table import GROUPS

_INTRODUCTION: Final = """\
# Flags of `paceline serve`

Every flag of llama-server is known here, by all of its names, and so is its environment variable. Most do what they do
there. Some have no effect because there is nothing here that they could change: they are taken, and a line on stderr says
why. Some ask for what this server cannot do, or cannot do yet: it does not start with them, and says what to do instead.
A name that is not known is refused, with the nearest that is. `paceline serve --print-config` shows what every setting came
out as, where it came from, and all notes.

## Where flags are read from

The command line is stronger than the environment, the environment than the file of `--config`, the file than the defaults.
Of each flag the strongest source counts, alone: a list on the command line replaces the list of a variable. Different flags
that fill one list, such as `--api-key` and `--api-key-file`, add up.

* **Command line:** `--name value` or `--name=value`, `_` is as good as `-` in a long name. A switch stands alone; many have
  a second name that turns them off. Given twice, the last one counts; what is marked *may be repeated* adds up.
* **Environment:** llama-server's variable (`LLAMA_ARG_CTX_SIZE`), or `PACELINE_` and the long name in capitals with `_`
  (`PACELINE_CTX_SIZE`), which wins over the former. Switches take on, off, true, false, 1, 0, enabled and disabled. Where a
  switch has an off name, `LLAMA_ARG_NO_...` turns it off by being there, whatever its value.
* **File:** TOML, on its top level, with long names as keys, with `-` or `_` and without the dashes before. Values are texts,
  numbers, true and false; for what may be repeated also lists of them. Paths in it are relative to where the server starts.

        model = "model.gguf"
        ctx-size = 32768
        parallel = 8
        slots = false
        api-key-file = "keys.txt"

## What differs

* **Context.** `-c` is the size of one pool of KV cells that all slots share, as with llama-server's `--kv-unified`. It is
  never cut into equal parts: one request may use nearly all of it, and requests wait while there is no room. So `-c 32768
  -np 8` is room for 32768 tokens in all, at most as many for one request as the model was trained with.
* **Slots.** `-np -1` is 8, where llama-server takes 4.
* **Metrics** are on without `--metrics`; `--no-metrics` turns them off. CORS is off without `--cors-origins`.
* **Batches** beyond the context are lowered to it, as llama.cpp does; a note says so.
* **Keys.** A file of `--api-key-file` is read as llama-server reads it, blanks at the ends of lines aside. Keys with a tenant
  are in a file of their own, `--tenant-key-file`, with `TENANT:KEY` a line, so that no key with a colon is misread. An empty
  `--api-key`, or a file without a key, is refused: it would open the server.
* **Names.** Without a key and TLS only requests for certain names are answered, see `--allowed-hosts` and
  [server.md](server.md); llama-server answers to any.
* **Sampling** flags are defaults for requests that do not say. They win over the model's own and over the API's.
"""


def markdown() -> str:
    """The text of the page."""
    return "\n".join([_INTRODUCTION, *(line for title in GROUPS for line in _group(title)), ""])


def _group(title: Any) -> Iterator[str]:
    yield from (f"## {title}", "")
    yield "| flag | variable | default | what it does |"
    yield "|---|---|---|---|"
    for flag in GROUPS[title]:
        yield f"| {_names(flag)} | {_variables(flag)} | {_escaped(default_of(flag))} | {_escaped(_meaning(flag))} |"
    yield ""


def _names(flag: Flag) -> str:
    value = f" {flag.metavar}" if flag.metavar else ""
    return _escaped(" ".join([*(f"`{name}{value}`" for name in flag.names), *(f"`{name}`" for name in flag.off_names)]))


def _variables(flag: Flag) -> str:
    return " ".join(f"`{name}`" for name in (flag.env, *flag.own_envs[:1]) if name is not None)


def _meaning(flag: Flag) -> str:
    parts = [flag.text, _fate(flag.fate)]
    parts += [f"`{_value(value)}`: {_fate(fate)}" for value, fate in flag.but.items() if not isinstance(fate, Same)]
    parts += [
        f"`{_value(value)}` is fine." for value, fate in flag.but.items() if isinstance(fate, Same) and flag.metavar
    ]
    if flag.many:
        parts.append("May be repeated.")
    if flag.ours:
        parts.append("*Not llama-server's.*")
    return " ".join(filter(None, parts))


def _fate(fate: Fate) -> str:
    match fate:
        case Ignored(why):
            return f"**No effect:** {why}."
        case Refused(way_out):
            return f"**Refused:** {way_out}."
        case Sets() | Same() | Prints() | ReadsConfig():
            return ""


def _value(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.stdout.write(markdown())
