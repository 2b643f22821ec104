"""Rows of the table: how tokens are chosen where a request does not say."""

from __future__ import annotations

from typing import Final

from paceline import validation
from paceline.errors import InvalidParams
from paceline.params import DEFAULT_SAMPLERS, SAMPLERS
from paceline.server.flags import applying, reading
from paceline.server.flags.flag import SAME, SWITCH, Apply, Flag, Group, Ignored, Reader, Sets
from paceline.server.sampler_names import LETTERS, OTHER_NAMES


def _order(label: str, text: str) -> tuple[str, ...]:
    """Names between semicolons; they may be written with -, _ or neither."""
    known = {spelling: name for name in SAMPLERS for spelling in (name, name.replace("_", "-"), name.replace("_", ""))}
    known |= OTHER_NAMES
    names = [name.strip().lower() for name in text.split(";") if name.strip()]
    return tuple(known[name] if name in known else validation.choice(label, name, SAMPLERS) for name in names)


def _letters(label: str, text: str) -> tuple[str, ...]:
    for letter in text:
        if letter not in LETTERS:
            raise InvalidParams(
                f"{label} must be of the letters {''.join(sorted(LETTERS))}, one a sampler, not {text!r:.80}"
            )
    return tuple(LETTERS[letter] for letter in text)


def _sampler(  # noqa: PLR0913 - a row
    spelled: str,
    field: str,
    text: str,
    *,
    env: str | None = None,
    read: Reader | None = None,
    apply: Apply | None = None,
    metavar: str = "N",
) -> Flag:
    return Flag(spelled, metavar, read or reading.number(), Sets((f"sampling.{field}",), apply), text, env=env)


_INTEGER = reading.integer(-(2**31))

_SAMPLING: Final = (
    _sampler(
        "-n --predict --n-predict",
        "max_tokens",
        "Most tokens of an answer; -1: until the context is full.",
        env="LLAMA_ARG_N_PREDICT",
        read=reading.integer(-2),
        apply=applying.max_tokens,
    ),
    _sampler(
        "--temp --temperature",
        "temperature",
        "Temperature; 0 is greedy.",
        env="LLAMA_ARG_TEMPERATURE",
        apply=applying.temperature,
    ),
    _sampler(
        "--top-k",
        "top_k",
        "Only the k most likely; 0: off.",
        env="LLAMA_ARG_TOP_K",
        read=_INTEGER,
        apply=applying.top_k,
    ),
    _sampler("--top-p", "top_p", "Only the likeliest that make up p; 1: off.", env="LLAMA_ARG_TOP_P"),
    _sampler("--min-p", "min_p", "Only those with p times the likeliest's probability; 0: off.", env="LLAMA_ARG_MIN_P"),
    _sampler("--top-nsigma --top-n-sigma", "top_n_sigma", "Only logits within n deviations of the greatest; -1: off."),
    _sampler("--xtc-probability", "xtc_probability", "How often the likeliest tokens are left out; 0: off."),
    _sampler("--xtc-threshold", "xtc_threshold", "From which probability on --xtc-probability leaves out."),
    _sampler("--typical --typical-p", "typical_p", "Only tokens as surprising as expected, p of them; 1: off."),
    _sampler(
        "--repeat-last-n", "penalty_last_n", "Tokens that penalties look back over; 0: off, -1: all.", read=_INTEGER
    ),
    _sampler(
        "--repeat-penalty",
        "repeat_penalty",
        "Penalty for tokens that were there; 1: off.",
        env="LLAMA_ARG_REPEAT_PENALTY",
    ),
    _sampler(
        "--presence-penalty",
        "presence_penalty",
        "Penalty for having been there; 0: off.",
        env="LLAMA_ARG_PRESENCE_PENALTY",
    ),
    _sampler(
        "--frequency-penalty",
        "frequency_penalty",
        "Penalty for each time it was there; 0: off.",
        env="LLAMA_ARG_FREQUENCY_PENALTY",
    ),
    _sampler("--dry-multiplier", "dry_multiplier", "Strength of the penalty for repeated sequences; 0: off."),
    _sampler("--dry-base", "dry_base", "Growth of that penalty with the length.", read=reading.number(1)),
    _sampler("--dry-allowed-length", "dry_allowed_length", "Length of repetition without penalty.", read=_INTEGER),
    _sampler("--dry-penalty-last-n", "dry_penalty_last_n", "Tokens that it looks back over; 0: off.", read=_INTEGER),
    Flag(
        "--dry-sequence-breaker",
        "TEXT",
        reading.one_text,
        Sets(("sampling.dry_sequence_breakers",), applying.sequence_breakers),
        "A text at which a repetition ends, in place of the usual ones; none: no such text.",
        many=True,
    ),
    _sampler("--adaptive-target", "adaptive_target", "Probability that adaptive_p aims at; below 0: off."),
    _sampler("--adaptive-decay", "adaptive_decay", "How slowly adaptive_p changes."),
    _sampler("--dynatemp-range", "dynatemp_range", "How far the temperature moves with the entropy; 0: off."),
    _sampler("--dynatemp-exp", "dynatemp_exponent", "Exponent of that movement."),
    _sampler("--mirostat", "mirostat", "Mirostat 1 or 2 in place of the other samplers; 0: off.", read=_INTEGER),
    _sampler("--mirostat-lr", "mirostat_eta", "Learning rate of mirostat."),
    _sampler("--mirostat-ent", "mirostat_tau", "Entropy that mirostat aims at."),
    _sampler(
        "--samplers",
        "samplers",
        f"Which samplers, in order, between semicolons: {';'.join(DEFAULT_SAMPLERS)}.",
        read=_order,
        metavar="NAME;...",
    ),
    _sampler(
        "--sampler-seq --sampling-seq",
        "samplers",
        f"The same as letters: {', '.join(f'{letter} {name}' for letter, name in LETTERS.items())}.",
        read=_letters,
        metavar="LETTERS",
    ),
    _sampler(
        "-s --seed",
        "seed",
        "The same seed gives every such request the same draws; -1: a fresh one each.",
        read=reading.integer(-1, 2**64 - 1),
        apply=applying.seed,
    ),
    _sampler("--ignore-eos", "ignore_eos", "The model's own end never comes.", read=reading.switch, metavar=SWITCH),
    Flag(
        "-l --logit-bias",
        "TOKEN+BIAS",
        reading.bias,
        Sets(("sampling.logit_bias",), applying.logit_bias),
        "Adds to the logit of a token id, as in 15043+1 or 15043-1.",
        many=True,
        default="none",
    ),
    _sampler(
        "--grammar",
        "grammar",
        "A GBNF grammar that answers follow.",
        read=reading.some_text,
        apply=applying.grammar,
        metavar="GBNF",
    ),
    _sampler(
        "--grammar-file",
        "grammar",
        "A file with a grammar.",
        read=reading.path,
        apply=applying.grammar_file,
        metavar="FILE",
    ),
    _sampler(
        "-j --json-schema",
        "json_schema",
        "A JSON schema that answers follow.",
        read=reading.some_text,
        apply=applying.json_schema,
        metavar="JSON",
    ),
    _sampler(
        "-jf --json-schema-file",
        "json_schema",
        "A file with a schema.",
        read=reading.path,
        apply=applying.json_schema_file,
        metavar="FILE",
    ),
    Flag(
        "-r --reverse-prompt",
        "TEXT",
        reading.one_text,
        Sets(("sampling.stop",)),
        "A text that ends answers.",
        many=True,
        default="none",
    ),
    Flag(
        "-e --escape",
        SWITCH,
        reading.switch,
        Sets(("aside.escape",)),
        r"Read \n, \t and the like in --reverse-prompt and --dry-sequence-breaker.",
        off="--no-escape",
        default="on",
    ),
    Flag(
        "-bs --backend-sampling",
        SWITCH,
        reading.switch,
        Ignored("tokens are drawn on the CPU; answers are the same"),
        "Draw tokens on the device.",
        env="LLAMA_ARG_BACKEND_SAMPLING",
        but={False: SAME},
    ),
)

GROUPS: Final[dict[Group, tuple[Flag, ...]]] = {"Sampling": _SAMPLING}
