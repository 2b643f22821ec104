"""The fields of a chat completion that the web page lets people set: bounds, the server's defaults, and help. Pure.

Sampling parameters are those of `sampling_table` that have a label.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from paceline.params import SamplingParams, help_of
from paceline.sampling_table import PARAMETERS, Parameter

Group = Literal["Length", "Sampling", "Penalties", "Output", "Advanced"]
Kind = Literal["number", "integer", "boolean", "text", "texts", "json"]


@dataclass(frozen=True, slots=True)
class ChatParameter:
    """A field of the body.

    Attributes:
        field: The field of `SamplingParams` that has the default; None: it is `default`.
    """

    name: str
    label: str
    group: Group
    kind: Kind
    help: str
    minimum: float | None = None
    maximum: float | None = None
    step: float | None = None
    choices: tuple[Any, ...] | None = None
    field: str | None = None
    default: Any = None

    def members(self, sampling: SamplingParams) -> dict[str, Any]:
        """Return the members of the page's JSON. sampling: what holds where a request leaves all open."""
        default = self.default if self.field is None else getattr(sampling, self.field)
        return {
            "name": self.name,
            "label": self.label,
            "group": self.group,
            "type": self.kind,
            "default": list(default) if isinstance(default, tuple) else default,
            "minimum": self.minimum,
            "maximum": self.maximum,
            "step": self.step,
            "choices": None if self.choices is None else list(self.choices),
            "help": self.help,
        }


_TEXTS: Final = {  # where the page has no words of the command line or of Python
    "max_tokens": "Most tokens of a reply, thinking included; without a value as many as the context holds.",
    "stop": "A stop text: generation ends before it.",
    "seed": "The same seed gives the same draws; without a value they differ each time.",
}


def _of(row: Parameter) -> ChatParameter:
    low, high = row.slider or (row.low, row.high)
    about, kind = _TEXTS.get(row.name) or help_of(row.name), cast(Kind, row.kind)
    group = cast(Group, row.group)
    return ChatParameter(row.name, row.label, group, kind, about, low, high, row.step, row.choices, field=row.name)


# fmt: off
_PARAMETERS: Final = (
    *(_of(row) for row in PARAMETERS if row.label),
    ChatParameter("priority", "Priority", "Advanced", "integer",
                  "Higher runs first; ten seconds of waiting make up for one level.", -1_000_000, 1_000_000, 1, default=0),
    ChatParameter("speculation", "Speculation", "Advanced", "boolean",
                  "Whether tokens may be proposed ahead of decoding. The output is the same.", default=True),
    ChatParameter("cache_prompt", "Cache the prompt", "Advanced", "boolean",
                  "Whether cached prefixes may be used, and this prompt be cached.", default=True),
    ChatParameter("timeout_s", "Time limit", "Advanced", "number",
                  "Seconds until the reply ends, finished or not.", 1, 86_400, 1),
)
# fmt: on

_THINKING: Final = ChatParameter(
    "reasoning_budget_tokens",
    "Most tokens of thinking",
    "Length",
    "integer",
    "Most tokens of thinking; 0: none; -1: as the server has it.",
    -1,
    2**31 - 1,
    1,
    default=-1,
)


def chat_parameters(sampling: SamplingParams, *, thinks: bool) -> list[dict[str, Any]]:
    """Return the fields in the order to show them. sampling: what holds without any; thinks: whether the model may think."""
    return [parameter.members(sampling) for parameter in _shown(thinks=thinks)]


def _shown(*, thinks: bool) -> Iterator[ChatParameter]:
    yield _PARAMETERS[0]
    if thinks:
        yield _THINKING
    yield from _PARAMETERS[1:]
