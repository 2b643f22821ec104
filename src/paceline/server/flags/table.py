"""All flags of `paceline serve`, in groups, and the ways to find one: by name, by environment variable, by key of a file."""

from __future__ import annotations

from typing import Final

from paceline.server.flags import (
    rows_chat,
    rows_command,
    rows_engine,
    rows_machine,
    rows_model,
    rows_network,
    rows_sampling,
    rows_unbuilt,
)
from paceline.server.flags.flag import Flag, Group, Prints, ReadsConfig

GROUPS: Final[dict[Group, tuple[Flag, ...]]] = {
    name: rows
    for module in (
        rows_model,
        rows_engine,
        rows_sampling,
        rows_chat,
        rows_network,
        rows_command,
        rows_machine,
        rows_unbuilt,
    )
    for name, rows in module.GROUPS.items()
}

FLAGS: Final = tuple(flag for rows in GROUPS.values() for flag in rows)

BY_NAME: Final = {
    **{name: (flag, True) for flag in FLAGS for name in flag.names},
    **{name: (flag, False) for flag in FLAGS for name in flag.off_names},
}
"""Each name, with whether it says True (or takes a value) or False."""

BY_KEY: Final = {
    name[2:]: found
    for name, found in BY_NAME.items()
    if name.startswith("--") and not isinstance(found[0].fate, Prints | ReadsConfig)
}
"""The long names as they stand in a file."""

ENV_NAMES: Final = frozenset(
    name for flag in FLAGS for name in (*flag.own_envs, flag.env, flag.off_env) if name is not None
)
