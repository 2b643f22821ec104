"""Generate the page docs/guide/flags.md from the table of flags.

python -m paceline.server.flags.page > docs/guide/flags.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

from paceline.server.flags.display import default_of
from paceline.server.flags.flag import Action, Flag, Ignore, NoOp, Print, ReadConfig, Reject, Store
from paceline.server.flags.table import GROUPS

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

The command line wins over the environment, the environment over the file of `--config`, the file
over the defaults. Of each flag only the strongest source counts: a list on the command line
replaces the list of a variable. Different flags that fill one list, such as `--api-key` and
`--api-key-file`, add up.

* **Command line:** `--name value` or `--name=value`, `_` is as good as `-` in a long name. A switch
  stands alone; many have a second name that turns them off. Given twice, the last one counts; what
  is marked *may be repeated* adds up.
* **Environment:** llama-server's variable (`LLAMA_ARG_CTX_SIZE`), or `PACELINE_` and the long name
  in capitals with `_` (`PACELINE_CTX_SIZE`), which wins over the former. Switches take on, off,
  true, false, 1, 0, enabled and disabled. Where a switch has an off name, `LLAMA_ARG_NO_...` turns
  it off by being there, whatever its value.
* **File:** TOML, on its top level, with long names as keys, with `-` or `_` and without the dashes
  before. Values are texts, numbers, true and false; for what may be repeated also lists of them,
  and for `strategy` also a table. Paths in it are relative to where the server starts.

```toml
model = "model.gguf"
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
    return "\n".join([_INTRODUCTION, *(line for title in GROUPS for line in _group(title)), ""])


def _group(title: str) -> Iterator[str]:
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
    parts = [flag.text, _action(flag.action)]
    others = flag.actions.items()
    parts += [f"`{_value(value)}`: {_action(action)}" for value, action in others if not isinstance(action, NoOp)]
    parts += [f"`{_value(value)}` is fine." for value, action in others if isinstance(action, NoOp) and flag.metavar]
    if flag.many:
        parts.append("May be repeated.")
    if flag.ours:
        parts.append("*Not llama-server's.*")
    return " ".join(filter(None, parts))


def _action(action: Action) -> str:
    match action:
        case Ignore(why):
            return f"**No effect:** {why}."
        case Reject(way_out):
            return f"**Refused:** {way_out}."
        case Store() | NoOp() | Print() | ReadConfig():
            return ""


def _value(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.stdout.write(markdown())
