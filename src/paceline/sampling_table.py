"""The table of sampling parameters: the range, flags, options, names over HTTP and place on the web page of each parameter.

`SamplingParams` has the same parameters as fields, with types, defaults and the sentences that describe them. A new parameter is
a field there, a row here, and for the drawing of tokens an option of the native sampler. Checks, the flags of `paceline serve`,
the options of `paceline generate` and `chat`, the fields of HTTP bodies and the sliders of the page are made from the two.
Standard library only; imports nothing of the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Kind = Literal["number", "integer", "boolean", "text", "texts", "json", "object", "code"]
Group = Literal["Length", "Sampling", "Penalties", "Output"]
Api = Literal["llama_server", "ollama", "openai"]

INT32: Final = 2**31 - 1
LARGE: Final = 1e6  # greater numbers have no meaning here, and 32-bit arithmetic begins to fail


@dataclass(frozen=True, slots=True)
class Parameter:
    """A sampling parameter.

    Attributes:
        name: The field of `SamplingParams`.
        kind: The kind of its values. Command lines cannot set an "object"; only programs can set "code".
        low: The least value of a number.
        high: The greatest value of a number.
        group: The heading under which command lines and the page list it; None: they do not have it.
        flags: The names of the flag of `paceline serve`, separated by spaces; empty: there is no flag. The first long name is the
            key in config files. The other command lines take these names too.
        env: llama-server's environment variable.
        file_flags: The names of the flag that reads the value from a file.
        metavar: The name of the value in help texts; None: the usual name of the kind.
        help: The sentence of flags and options; empty: the sentence of the field.
        label: Its name on the page; empty: the page does not have it.
        slider: Least value, greatest value and step on the page, if they differ from the range.
        step: The step on the page.
        choices: The only values.
        apis: The APIs whose bodies have it, separated by spaces; another name follows a colon. "openai": OpenAI documents it, and
            the body declares its type. The bodies of OpenAI's API have all other parameters too, except "code".
        elsewhere: Names that OpenAI-compatible servers have for it, separated by spaces.
        off: The least and the greatest value for llama-server, if values beyond them mean the same as the bound: off.
        is_clamped: Whether llama-server takes the nearest value in the range, with a warning.
        gguf: Its key in a model file, after general.sampling.
        ours: Whether llama-server does not have it.
        is_optional: Whether None is a value of its own, as an error says.
        is_shown: Whether a chat's /show lists it also with its default.
    """

    name: str
    kind: Kind
    low: float | None = None
    high: float | None = None
    group: Group | None = None
    flags: str = ""
    env: str | None = None
    file_flags: str = ""
    metavar: str | None = None
    help: str = ""
    label: str = ""
    slider: tuple[float, float] | None = None
    step: float | None = None
    choices: tuple[int, ...] | None = None
    apis: str = ""
    elsewhere: str = ""
    off: tuple[float | None, float | None] | None = None
    is_clamped: bool = False
    gguf: str = ""
    ours: bool = False
    is_optional: bool = False
    is_shown: bool = False

    @property
    def option(self) -> str:
        """The long name of the option of `paceline generate`."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_repeated(self) -> bool:
        """Whether a flag or option may be repeated."""
        return self.kind == "texts" or self.name == "logit_bias"


SAMPLERS = (
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature", "adaptive_p", "infill",
)  # fmt: skip
SAMPLER_LETTERS: Final[Mapping[str, str]] = {
    "d": "dry", "k": "top_k", "y": "typ_p", "p": "top_p", "s": "top_n_sigma", "m": "min_p", "t": "temperature", "x": "xtc",
    "i": "infill", "e": "penalties", "a": "adaptive_p",
}  # fmt: skip
DEFAULT_SAMPLERS = SAMPLERS[:9]
SAMPLER_NAMES: Final[Mapping[str, str]] = {
    **{spelling: name for name in SAMPLERS for spelling in (name, name.replace("_", "-"), name.replace("_", ""))},
    "nucleus": "top_p",
    "temp": "temperature",
    "typ": "typ_p",
}
"""Samplers by all of llama-server's spellings."""

_LLAMA, _BOTH, _ALL = "llama_server", "llama_server ollama", "llama_server ollama openai"
_ENV = "LLAMA_ARG_"

# The table is laid out by hand. Help, flags.md and the page list the parameters in this order.
# fmt: off
PARAMETERS: Final[tuple[Parameter, ...]] = (
    Parameter("max_tokens", "integer", 0, INT32, "Length", "-n --predict --n-predict", _ENV + "N_PREDICT",
              help="Maximum of tokens to generate; -1: until the context is full.", label="Max tokens", step=1,
              apis="ollama:num_predict", is_optional=True, is_shown=True),
    Parameter("min_tokens", "integer", 0, INT32, "Length",
              help="Minimum of tokens to generate before the model may end.", ours=True, apis=_LLAMA),
    Parameter("max_repetition", "integer", 0, 8192, "Length", "--max-repetition", apis=_LLAMA, ours=True,
              help="End a choice that repeats an n-gram for so many tokens, at least four times; 0 is off."),
    Parameter("stop", "texts", group="Length", flags="-r --reverse-prompt", metavar="TEXT", label="Stop sequences",
              apis="ollama openai", help="Stop when the model generates this text, which is left out."),
    Parameter("ignore_eos", "boolean", group="Length", flags="--ignore-eos", label="Ignore the end",
              help="Go on after the model's end-of-generation token.", apis=_LLAMA),
    Parameter("temperature", "number", 0, LARGE, "Sampling", "--temp --temperature", _ENV + "TEMPERATURE",
              label="Temperature", slider=(0, 2), step=0.05, gguf="temp", apis=_ALL, off=(0, None), is_shown=True),
    Parameter("top_p", "number", 0, 1, "Sampling", "--top-p", _ENV + "TOP_P",
              label="Top p", step=0.01, gguf="top_p", apis=_ALL, is_clamped=True, is_shown=True),
    Parameter("top_k", "integer", -1, INT32, "Sampling", "--top-k", _ENV + "TOP_K",
              label="Top k", slider=(0, INT32), step=1, gguf="top_k", apis=_BOTH, off=(0, None), is_shown=True),
    Parameter("min_p", "number", 0, 1, "Sampling", "--min-p", _ENV + "MIN_P",
              label="Min p", step=0.01, gguf="min_p", apis=_BOTH, is_clamped=True, is_shown=True),
    Parameter("typical_p", "number", 0, 1, "Sampling", "--typical --typical-p",
              label="Typical p", step=0.01, apis=_BOTH, off=(None, 1), elsewhere="typ_p"),
    Parameter("top_n_sigma", "number", -1, LARGE, "Sampling", "--top-nsigma --top-n-sigma",
              label="Top n sigma", step=0.1, apis=_LLAMA, off=(-1, None)),
    Parameter("xtc_probability", "number", 0, 1, "Sampling", "--xtc-probability",
              label="XTC probability", step=0.01, gguf="xtc_probability", apis=_LLAMA, is_clamped=True),
    Parameter("xtc_threshold", "number", 0, 1, "Sampling", "--xtc-threshold",
              label="XTC threshold", step=0.01, gguf="xtc_threshold", apis=_LLAMA, is_clamped=True),
    Parameter("dynatemp_range", "number", 0, LARGE, "Sampling", "--dynatemp-range",
              label="Dynamic temperature", step=0.05, apis=_LLAMA),
    Parameter("dynatemp_exponent", "number", 0, LARGE, "Sampling", "--dynatemp-exp",
              label="Its exponent", step=0.05, apis=_LLAMA),
    Parameter("mirostat", "integer", 0, 2, "Sampling", "--mirostat",
              label="Mirostat", step=1, choices=(0, 1, 2), gguf="mirostat", apis=_BOTH, is_clamped=True),
    Parameter("mirostat_tau", "number", 0, LARGE, "Sampling", "--mirostat-ent",
              label="Mirostat entropy", step=0.1, gguf="mirostat_tau", apis=_BOTH),
    Parameter("mirostat_eta", "number", 0, LARGE, "Sampling", "--mirostat-lr",
              label="Mirostat rate", step=0.01, gguf="mirostat_eta", apis=_BOTH),
    Parameter("adaptive_target", "number", -1, 1, "Sampling", "--adaptive-target",
              label="Adaptive target", step=0.01, apis=_LLAMA, off=(-1, None), is_clamped=True),
    Parameter("adaptive_decay", "number", 0, 0.99, "Sampling", "--adaptive-decay",
              label="Adaptive decay", step=0.01, apis=_LLAMA),
    Parameter("seed", "integer", -1, 2**64 - 1, "Sampling", "-s --seed", label="Seed", slider=(0, 2**53), step=1,
              help="The same seed draws the same tokens; -1 draws a new seed.", apis="ollama", is_shown=True),
    Parameter("samplers", "text", group="Sampling", flags="--samplers", metavar="NAME;...",
              help=f"Names of the samplers to apply, in order, separated by semicolons: {'; '.join(DEFAULT_SAMPLERS)}."),
    Parameter("logit_bias", "object", group="Sampling", flags="-l --logit-bias", metavar="TOKEN+BIAS",
              help="Add to the logit of a token id, as 15043+1 or 15043-1."),
    Parameter("repeat_penalty", "number", 1 / LARGE, LARGE, "Penalties", "--repeat-penalty", _ENV + "REPEAT_PENALTY",
              label="Repeat penalty", step=0.05, gguf="penalty_repeat", apis=_BOTH, elsewhere="repetition_penalty",
              is_shown=True),
    Parameter("penalty_last_n", "integer", -1, INT32, "Penalties", "--repeat-last-n", label="Looks back", step=1,
              apis="llama_server:repeat_last_n ollama:repeat_last_n", gguf="penalty_last_n", elsewhere="repeat_last_n"),
    Parameter("presence_penalty", "number", -LARGE, LARGE, "Penalties", "--presence-penalty", _ENV + "PRESENCE_PENALTY",
              label="Presence penalty", slider=(-2, 2), step=0.05, apis=_ALL),
    Parameter("frequency_penalty", "number", -LARGE, LARGE, "Penalties", "--frequency-penalty", _ENV + "FREQUENCY_PENALTY",
              label="Frequency penalty", slider=(-2, 2), step=0.05, apis=_ALL),
    Parameter("dry_multiplier", "number", 0, LARGE, "Penalties", "--dry-multiplier",
              label="DRY multiplier", step=0.05, apis=_LLAMA),
    Parameter("dry_base", "number", 0, LARGE, "Penalties", "--dry-base",
              label="DRY base", slider=(1, LARGE), step=0.05, apis=_LLAMA),
    Parameter("dry_allowed_length", "integer", 0, INT32, "Penalties", "--dry-allowed-length",
              label="DRY allowed length", step=1, apis=_LLAMA),
    Parameter("dry_penalty_last_n", "integer", -1, 1_000_000, "Penalties", "--dry-penalty-last-n",
              label="DRY looks back", step=1, apis=_LLAMA),
    Parameter("dry_sequence_breakers", "texts", group="Penalties", flags="--dry-sequence-breaker", metavar="TEXT",
              help="A text at which DRY counts anew, in place of the default ones; none: no text."),
    Parameter("grammar", "text", group="Output", flags="--grammar", file_flags="--grammar-file", metavar="GBNF",
              label="Grammar", help="Generate only text that this GBNF grammar allows."),
    Parameter("json_schema", "json", group="Output", flags="-j --json-schema", file_flags="-jf --json-schema-file",
              metavar="JSON", label="JSON schema", help="Generate only JSON that this JSON schema allows."),
    Parameter("disable_any_whitespace", "boolean", group="Output", flags="--disable-any-whitespace", ours=True,
              help="Generate the JSON of a schema without whitespace between its tokens.", apis=_LLAMA),
    Parameter("regex", "text", group="Output", metavar="REGEX", label="Regular expression",
              help="Generate only text that this regular expression matches.", ours=True, apis=_LLAMA),
    Parameter("choice", "texts", group="Output", metavar="TEXT",
              help="Generate one of the texts that are given in this way.", ours=True, apis=_LLAMA),
    Parameter("lark", "text", group="Output", metavar="LARK",
              help="Generate only text that this Lark grammar allows.", ours=True, apis=_LLAMA),
    Parameter("bad_words", "texts", group="Output", metavar="TEXT",
              help="A text that the model must not generate.", ours=True, apis=_LLAMA),
    Parameter("n", "integer", 1, 256, apis="openai"),
    Parameter("logprobs", "integer", 0, 1000, is_optional=True),
    Parameter("prompt_logprobs", "integer", 0, 1000, is_optional=True),
    Parameter("prompt_logprobs_start", "integer", 0, INT32, elsewhere="logprob_start_len"),
    Parameter("echo", "boolean"),
    Parameter("grammar_lazy", "boolean"),
    *(Parameter(name, "object", ours=True, apis=_LLAMA) for name in ("stop_token_ids", "grammar_root", "allowed_token_ids")),
    *(Parameter(name, "object") for name in ("logprobs_mode", "grammar_prefix", "grammar_triggers", "call_grammar")),
    *(Parameter(name, "code") for name in ("constraint", "thinking", "logits_processors")),
)
# fmt: on

BY_NAME: Final[Mapping[str, Parameter]] = {row.name: row for row in PARAMETERS}

LLAMA_NAMES: Final[Mapping[str, str]] = {
    name[2:]: row.option[2:]
    for row in PARAMETERS
    for name in row.flags.split()
    if name.startswith("--") and name != row.option
}
"""llama.cpp's long names of options that are called otherwise here, without dashes."""


def rows_in(api: Api) -> dict[str, Parameter]:
    """Return the parameters in the bodies of an API, by their names there."""
    entries = ((entry.partition(":"), row) for row in PARAMETERS for entry in row.apis.split())
    return {name or row.name: row for (of_api, _, name), row in entries if of_api == api}


API_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama_server": {"max_tokens": None},
    "completion": {"temperature": 1.0, "top_p": 1.0, "max_tokens": 16},
    "chat": {"temperature": 1.0, "top_p": 1.0, "max_tokens": None},
    "ollama": {
        "temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.0, "repeat_penalty": 1.1, "penalty_last_n": 64,
        "max_tokens": None,
    },
}  # fmt: skip
"""Defaults of HTTP APIs that differ from the defaults of `SamplingParams`. "completion" and "chat" are OpenAI's."""

# fmt: off
LLAMA_SETTINGS: Final = (
    "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "top_n_sigma", "typical_p",
    "xtc_probability", "xtc_threshold", "repeat_penalty", "frequency_penalty", "presence_penalty", "dry_multiplier",
    "dry_base", "dry_allowed_length", "dry_penalty_last_n", "mirostat", "mirostat_tau", "mirostat_eta",
    "adaptive_target", "adaptive_decay", "ignore_eos", "repeat_last_n",
)
"""The order in which llama-server's `generation_settings` report parameters; parameters that are not here follow."""
# fmt: on
