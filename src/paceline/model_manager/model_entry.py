"""What a manager knows of a model before it is loaded: its name, its file, its options and the rules for keeping it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from paceline import validation
from paceline.errors import InvalidParams, InvalidType

_OF_THE_MANAGER: Final = ("progress", "cancel")  # options of a load that the manager sets itself


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model that a `ModelManager` loads by name. Immutable. None is the default of every field but the name.

    Attributes:
        name: The name by which requests ask for it.
        model: A path to a GGUF file, or a name such as "hf:user/repo:Q4_K_M"; None: the demo model of the package.
        options: Keywords of `LLM`: num_slots, n_ctx, chat_template, lora, sleep_idle_s ... Without `isolation` the engine
            runs in a process of its own.
        aliases: Other names for it.
        pinned: Whether it is never evicted to make room for another one.
        load_on_startup: Whether it is loaded when the manager starts, or when an update adds or changes it, not when it is
            first asked for.
        unload_idle_s: Seconds without a user after which it is unloaded; None: never. With `sleep_idle_s` among the options
            only the memory of its process is freed, and it is back sooner.
        stop_timeout_s: Seconds that its requests have to end when it is unloaded.

    Raises:
        InvalidParams: A value is out of its range; the message names the model and the field.
        InvalidType: A value has the wrong type.
    """

    name: str
    model: str | os.PathLike[str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    aliases: Sequence[str] = ()
    pinned: bool = False
    load_on_startup: bool = False
    unload_idle_s: float | None = None
    stop_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        validation.set_defaults(self)
        if not validation.text("name", self.name):
            raise InvalidParams("name of a model is empty")
        where = f"model {self.name!r}: "
        if self.model is not None:
            validation.path(f"{where}model", self.model)
        if not isinstance(self.options, Mapping):
            raise InvalidType(f"{where}options must be a mapping, not {self.options!r:.80}")
        for name in _OF_THE_MANAGER:
            if name in self.options:
                raise InvalidParams(f"{where}{name} is set by the manager; watch its statuses instead")
        self._check_aliases(where)
        validation.boolean(f"{where}pinned", self.pinned)
        validation.boolean(f"{where}load_on_startup", self.load_on_startup)
        validation.number(f"{where}stop_timeout_s", self.stop_timeout_s, 0)
        if self.unload_idle_s is not None:
            validation.number(f"{where}unload_idle_s", self.unload_idle_s, above=0)
            if self.pinned:
                raise InvalidParams(f"{where}unload_idle_s contradicts pinned: a pinned model stays loaded")

    def _check_aliases(self, where: str) -> None:
        if isinstance(self.aliases, str) or not isinstance(self.aliases, Sequence):
            raise InvalidType(f"{where}aliases must be a list of names, not {self.aliases!r:.80}")
        for alias in self.aliases:
            if not validation.text(f"{where}an alias", alias):
                raise InvalidParams(f"{where}an alias is empty")

    @property
    def names(self) -> tuple[str, ...]:
        """Its name and its aliases."""
        return (self.name, *self.aliases)
