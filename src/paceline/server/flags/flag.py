"""Define the records of the table of flags: names, reader of the value, action. Standard library only; any thread."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from paceline.server.flags.draft import Draft

Reader = Callable[[str, str], Any]
"""Takes the flag's name for messages and the text; returns the value or raises `InvalidParams`."""

Setter = Callable[["Draft", Any, str], None]
"""Takes the draft, the value and the flag's name for messages; stores in the draft what follows."""

ENV_PREFIX: Final = "PACELINE_"
SWITCH: Final = ""  # the metavar of a flag that takes no value


@dataclass(frozen=True, slots=True)
class Store:
    """Store the value in the settings. into: targets apart by spaces, such as "engine.n_ctx" or "server.port".

    setter: how, where it is more than storing the value itself.
    """

    into: str
    setter: Setter | None = None

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets."""
        return tuple(self.into.split())


@dataclass(frozen=True, slots=True)
class Ignore:
    """Start without it; a printed note says why nothing is lost."""

    why: str


@dataclass(frozen=True, slots=True)
class NoOp:
    """Do nothing, without a note: the flag requests what holds anyway."""


@dataclass(frozen=True, slots=True)
class Reject:
    """Do not start. way_out: a sentence that says what to do instead."""

    way_out: str


@dataclass(frozen=True, slots=True)
class Print:
    """Print something in place of serving."""

    what: Literal["help", "version", "config"]


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """Read more flags from the file that the value names."""


Action = Store | Ignore | NoOp | Reject | Print | ReadConfig
NO_OP: Final = NoOp()


@dataclass(frozen=True, slots=True)
class Flag:
    """One row of the table.

    spelled: its names, apart by spaces, the short ones first. metavar: its value's name; `SWITCH` for none. reader: from text
    to value. env: llama-server's environment variable. off: names that mean False. many: may be repeated and adds up; its
    reader returns a tuple. actions: other actions for certain values. default: what holds without it, where the dataclasses
    do not say. secret: its value is never shown. ours: llama-server does not have it. table: in a file its value may be a
    table, which its reader gets as JSON.
    """

    spelled: str
    metavar: str
    reader: Reader
    action: Action
    text: str
    env: str | None = None
    off: str = ""
    many: bool = False
    actions: Mapping[Any, Action] = field(default_factory=dict)
    default: str = ""
    secret: bool = False
    ours: bool = False
    table: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names that take a value or mean True."""
        return tuple(self.spelled.split())

    @property
    def off_names(self) -> tuple[str, ...]:
        """The names that mean False."""
        return tuple(self.off.split())

    @property
    def long_name(self) -> str:
        """The name that files, PACELINE_ variables and messages use: the first long one."""
        return next(name for name in self.names if name.startswith("--"))

    @property
    def own_envs(self) -> tuple[str, ...]:
        """The environment variables made of the long names; none for a flag that only prints."""
        if isinstance(self.action, Print):
            return ()
        long_names = [name for name in self.names if name.startswith("--")]
        return tuple(ENV_PREFIX + re.sub("[-.]", "_", name[2:]).upper() for name in long_names)

    @property
    def off_env(self) -> str | None:
        """llama-server's variable that means False by being set, whatever its value."""
        if self.env is None or not self.off or not self.env.startswith("LLAMA_ARG_"):
            return None
        return self.env.replace("LLAMA_ARG_", "LLAMA_ARG_NO_")

    def action_of(self, value: Any) -> Action:
        """Return the action for this value."""
        return self.actions.get(value, self.action) if self.actions else self.action
