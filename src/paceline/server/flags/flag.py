"""The records that the table of flags is made of: what a flag is called, how its value is read, what becomes of it.

Standard library only; knows no single flag. Any thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Reader = Callable[[str, str], Any]
"""Takes the spelling for messages and the text that was given; answers the value or raises `InvalidParams`."""

Apply = Callable[[Any, Any, str], None]
"""Takes a `Draft`, the value and the spelling, and puts into the draft what follows."""

ENV_PREFIX: Final = "PACELINE_"
SWITCH: Final = ""  # the metavar of a flag that takes no value

Group = Literal[
    "Model and memory",
    "Engine",
    "Sampling",
    "Chat, embeddings, infill",
    "Network",
    "Endpoints",
    "Log",
    "This command",
    "Processors and loading",
    "Downloads",
    "Speculation",
    "Images and video",
    "Several models, tools, web pages",
]


@dataclass(frozen=True, slots=True)
class Sets:
    """The value goes into the settings. targets: where to, as "engine.n_ctx", "sampling.seed" or "server.port".

    apply: how, where it is more than the value itself.
    """

    targets: tuple[str, ...]
    apply: Apply | None = None


@dataclass(frozen=True, slots=True)
class Ignored:
    """Nothing follows from it, and nothing is lost; a printed note says why."""

    why: str


@dataclass(frozen=True, slots=True)
class Same:
    """It asks for what is so anyway; nothing is said."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The server does not start with it. way_out: a sentence that says what to do."""

    way_out: str


@dataclass(frozen=True, slots=True)
class Prints:
    """The command writes something and ends."""

    what: Literal["help", "version", "config"]


@dataclass(frozen=True, slots=True)
class ReadsConfig:
    """The value is the file that more flags come from."""


Fate = Sets | Ignored | Same | Refused | Prints | ReadsConfig
SAME: Final = Same()


@dataclass(frozen=True, slots=True)
class Flag:
    """One row of the table.

    spelled: its names, apart by spaces, the short ones first. metavar: its value's name; `SWITCH` for none. read: from text
    to value. env: llama-server's environment variable. off: names that say False. many: may be given again, and adds up; its
    reader answers a tuple. but: other fates for certain values. default: what holds without it, where the dataclasses do not
    say. secret: its value is never shown. ours: llama-server does not have it.
    """

    spelled: str
    metavar: str
    read: Reader
    fate: Fate
    text: str
    env: str | None = None
    off: str = ""
    many: bool = False
    but: Mapping[Any, Fate] = field(default_factory=dict)
    default: str = ""
    secret: bool = False
    ours: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names that give a value or say True."""
        return tuple(self.spelled.split())

    @property
    def off_names(self) -> tuple[str, ...]:
        """The names that say False."""
        return tuple(self.off.split())

    @property
    def long_name(self) -> str:
        """The name that files, PACELINE_ variables and messages use: the first long one."""
        return next(name for name in self.names if name.startswith("--"))

    @property
    def own_envs(self) -> tuple[str, ...]:
        """The environment variables that follow from the long names; none for what only prints."""
        if isinstance(self.fate, Prints):
            return ()
        long_names = [name for name in self.names if name.startswith("--")]
        return tuple(ENV_PREFIX + re.sub("[-.]", "_", name[2:]).upper() for name in long_names)

    @property
    def off_env(self) -> str | None:
        """llama-server's variable that says False by being there, whatever its value."""
        if self.env is None or not self.off or not self.env.startswith("LLAMA_ARG_"):
            return None
        return self.env.replace("LLAMA_ARG_", "LLAMA_ARG_NO_")

    def fate_of(self, value: Any) -> Fate:
        """What becomes of it with this value."""
        return self.but.get(value, self.fate) if self.but else self.fate
