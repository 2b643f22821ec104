"""The fields of a chat completion that a page lets people set: bounds, the server's defaults, and help. Pure.

What a field does is said where the flag of the same field says it, so that no sentence is written twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from paceline.params import SamplingParams
from paceline.server.flags.table import BY_NAME

Group = Literal["Length", "Sampling", "Penalties", "Output", "Advanced"]
Kind = Literal["number", "integer", "boolean", "text", "texts", "json"]


@dataclass(frozen=True, slots=True)
class ChatParameter:
    """One field of the body. help: a sentence, or the flag that has it. field: of `SamplingParams`, where the default is."""

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

    @property
    def text(self) -> str:
        """The sentence."""
        return BY_NAME[self.help][0].text if self.help.startswith("--") else self.help

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
            "help": self.text,
        }


def _number(  # noqa: PLR0913, PLR0917 - a row
    name: str, label: str, group: Group, flag: str, low: float, high: float | None, step: float
) -> ChatParameter:
    return ChatParameter(name, label, group, "number", flag, low, high, step, field=name)


def _integer(name: str, label: str, group: Group, flag: str, low: int, high: int | None) -> ChatParameter:
    return ChatParameter(name, label, group, "integer", flag, low, high, 1, field=name)


_INT32: Final = 2**31 - 1

# fmt: off
_PARAMETERS: Final = (
    _integer("max_tokens", "Most tokens", "Length",
             "Most tokens of a reply, thinking included; without a value as many as the context holds.", 0, _INT32),
    ChatParameter("stop", "Stop texts", "Length", "texts", "--reverse-prompt", field="stop"),
    ChatParameter("ignore_eos", "Ignore the end", "Length", "boolean", "--ignore-eos", field="ignore_eos"),
    _number("temperature", "Temperature", "Sampling", "--temp", 0, 2, 0.05),
    _number("top_p", "Top p", "Sampling", "--top-p", 0, 1, 0.01),
    _integer("top_k", "Top k", "Sampling", "--top-k", 0, _INT32),
    _number("min_p", "Min p", "Sampling", "--min-p", 0, 1, 0.01),
    _number("typical_p", "Typical p", "Sampling", "--typical", 0, 1, 0.01),
    _number("top_n_sigma", "Top n sigma", "Sampling", "--top-nsigma", -1, 1e6, 0.1),
    _number("xtc_probability", "XTC probability", "Sampling", "--xtc-probability", 0, 1, 0.01),
    _number("xtc_threshold", "XTC threshold", "Sampling", "--xtc-threshold", 0, 1, 0.01),
    _number("dynatemp_range", "Dynamic temperature", "Sampling", "--dynatemp-range", 0, 1e6, 0.05),
    _number("dynatemp_exponent", "Its exponent", "Sampling", "--dynatemp-exp", 0, 1e6, 0.05),
    ChatParameter("mirostat", "Mirostat", "Sampling", "integer", "--mirostat", 0, 2, 1, (0, 1, 2), field="mirostat"),
    _number("mirostat_tau", "Mirostat entropy", "Sampling", "--mirostat-ent", 0, 1e6, 0.1),
    _number("mirostat_eta", "Mirostat rate", "Sampling", "--mirostat-lr", 0, 1e6, 0.01),
    _number("adaptive_target", "Adaptive target", "Sampling", "--adaptive-target", -1, 1, 0.01),
    _number("adaptive_decay", "Adaptive decay", "Sampling", "--adaptive-decay", 0, 0.99, 0.01),
    ChatParameter("seed", "Seed", "Sampling", "integer",
                  "The same seed gives the same draws; without a value they differ each time.", 0, 2**53, 1, field="seed"),
    _number("repeat_penalty", "Repeat penalty", "Penalties", "--repeat-penalty", 1e-6, 1e6, 0.05),
    _integer("penalty_last_n", "Looks back", "Penalties", "--repeat-last-n", -1, _INT32),
    _number("presence_penalty", "Presence penalty", "Penalties", "--presence-penalty", -2, 2, 0.05),
    _number("frequency_penalty", "Frequency penalty", "Penalties", "--frequency-penalty", -2, 2, 0.05),
    _number("dry_multiplier", "DRY multiplier", "Penalties", "--dry-multiplier", 0, 1e6, 0.05),
    _number("dry_base", "DRY base", "Penalties", "--dry-base", 1, 1e6, 0.05),
    _integer("dry_allowed_length", "DRY allowed length", "Penalties", "--dry-allowed-length", 0, _INT32),
    _integer("dry_penalty_last_n", "DRY looks back", "Penalties", "--dry-penalty-last-n", -1, 1_000_000),
    ChatParameter("json_schema", "JSON schema", "Output", "json", "--json-schema", field="json_schema"),
    ChatParameter("regex", "Regular expression", "Output", "text",
                  "A regular expression that the output must match.", field="regex"),
    ChatParameter("grammar", "Grammar", "Output", "text", "--grammar", field="grammar"),
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
    _INT32,
    1,
    default=-1,
)


def chat_parameters(sampling: SamplingParams, *, thinks: bool) -> list[dict[str, Any]]:
    """Return the fields in the order to show them. sampling: what holds without any; thinks: whether the model may think."""
    return [one.members(sampling) for one in _shown(thinks=thinks)]


def _shown(*, thinks: bool) -> Iterator[ChatParameter]:
    yield _PARAMETERS[0]
    if thinks:
        yield _THINKING
    yield from _PARAMETERS[1:]
