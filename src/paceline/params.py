"""Sampling parameters of a request: how tokens are drawn, when generation ends, which log-probabilities are returned.

The spelling and meaning of a sampler's options are llama.cpp's. Standard library only; nothing here knows a model:
token ids are checked against the vocabulary when a `Sampler` is built.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Never, Self, Unpack

from paceline import validation
from paceline.errors import InvalidParams, InvalidType
from paceline.keywords import Int, PlainSamplingKeywords, TokenIds, set_constructor
from paceline.sampling_table import BY_NAME, DEFAULT_SAMPLERS, INT32, LARGE, PARAMETERS, SAMPLERS

LogprobsMode = Literal["raw", "sampled"]

_MAX_INFILL_CANDIDATES = 1000
_MAX_TRIGGER_CHARS = 256
_MAX_SCHEMA_CHARS = 2**18
_MAX_SCHEMA_DEPTH = 100
_MAX_TRIGGERS = 2048  # some chat formats have one for each tool

_NUMBERS, _INTEGERS, _BOOLEANS = (
    tuple(row for row in PARAMETERS if row.kind == kind) for kind in ("number", "integer", "boolean")
)
_TEXTS: dict[str, tuple[int, int, int | None]] = {  # most of them, most characters of each, and of all together
    "stop": (256, 4096, 2**14),
    "bad_words": (1024, 256, 2**15),
    "dry_sequence_breakers": (64, 40, None),
}
HAS_NONE = frozenset({"max_tokens"})
"""Fields in which None is not the default: until the context is full."""
_CONSTRAINTS = ("grammar", "json_schema", "regex", "choice", "lark", "constraint")
NAMES_ELSEWHERE = {  # options of requests in other packages: the same option here, or a sentence about it
    **{name: row.name for row in PARAMETERS for name in row.elsewhere.split()},
    "best_of": "n",
    "do_sample": "temperature=0 takes the likeliest token, and any other temperature samples",
    "eos_token_id": "stop_token_ids",
    "extra_body": "every option is a keyword of its own: min_p=0.1",
    "format": "json_schema",
    "function_call": "llm.chat(messages, tool_choice=...) says whether the model calls a tool",
    "functions": "llm.chat(messages, tools=[...]) takes the functions that the model may call",
    "guided_choice": "choice",
    "guided_decoding": "name the constraint itself: json_schema, regex, choice, grammar or lark",
    "guided_grammar": "grammar",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "images": "images are parts of the prompt: [paceline.Image(path), text]",
    "include_stop_str_in_output": "the text ends before the stop, and `stop` of the result has it",
    "keep_alive": "sleep_idle_s of LLM frees the memory of an idle model",
    "logits_processor": "logits_processors",
    "lora_request": "lora",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "mirostat_mode": "mirostat",
    "model": "an LLM has one model; ModelManager has several by name",
    "n_predict": "max_tokens",
    "num_keep": "nothing is dropped from a context while it generates; truncate of generate cuts the prompt",
    "num_predict": "max_tokens",
    "num_return_sequences": "n",
    "options": "every option is a keyword of its own: temperature=0.2",
    "penalize_newline": "logit_bias can forbid or favour any token",
    "penalize_nl": "logit_bias can forbid or favour any token",
    "progress": "LLM.generate and LLM.chat take it for lists; AsyncLLM has no progress",
    "random_seed": "seed",
    "sampling_params": "the parameter is named params",
    "schema": "json_schema",
    "skip_special_tokens": "special=True keeps control tokens in the text; they are left out otherwise",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "stop_words": "stop",
    "stopping_criteria": "leave the loop over llm.stream(), which cancels the request, or name texts in stop",
    "stream": "call llm.stream_chat(messages) in a chat, or llm.stream(prompt)",
    "structured_outputs": "name the constraint itself: json_schema, regex, choice, grammar or lark",
    "system": 'the system message is the first message of a chat: {"role": "system", "content": ...}',
    "temp": "temperature",
    "text_format": "llm.chat(messages, response_model=...) takes a type",
    "tfs_z": "llama.cpp has no tail-free sampling any more; top_p and min_p cut the tail",
    "think": 'reasoning_effort="none" of a chat switches thinking off for templates that can',
    "thinking_token_budget": "thinking=ThinkingParams(budget=...) bounds thinking",
    "timeout": "timeout_s",
    "top_logprobs": "logprobs",
    "truncate_prompt_tokens": 'truncate="left" of generate cuts a long prompt; chats have context_overflow="drop_oldest"',
    "use_tqdm": "progress=True shows a bar while a list runs",
}
_MAX_CHOICE_CHARS = 2**18
_MAX_PROCESSORS = 16
_MAX_TAG_CHARS = 256
_MAX_PATTERN_CHARS = 2**14
_MAX_MESSAGE_CHARS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingParams:
    """The beginning and the end of a model's thinking, and its greatest length.

    Attributes:
        start: The text that begins thinking, for example "<think>"; empty if only the prompt can begin it.
        ends: The texts that end it; any of them. The first is written when the budget is used up.
        is_open: Whether the prompt ends inside thinking already.
        budget: Most tokens of thinking; 0: none at all; None: no limit.
        message: Text that is written before the end when the budget is used up.

    Raises:
        InvalidParams: A value is out of its range; the message names the field.
        InvalidType: A value has the wrong type, or a field is unknown.
    """

    start: str = ""
    ends: tuple[str, ...] = ()
    is_open: bool = False
    budget: int | None = None
    message: str = ""

    def __new__(cls, **options: Any) -> Self:
        """Refuse unknown options, naming the nearest known one."""
        validation.reject_unknown(options, [field.name for field in dataclasses.fields(cls)], "ThinkingParams")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        validation.set_defaults(self)
        for name, most in (("start", _MAX_TAG_CHARS), ("message", _MAX_MESSAGE_CHARS)):
            if len(validation.text(f"thinking.{name}", getattr(self, name))) > most:
                raise InvalidParams(f"thinking.{name} must have at most {most} characters")
        object.__setattr__(self, "ends", _texts("thinking.ends", self.ends, 16, _MAX_TAG_CHARS))
        if not self.ends:
            raise InvalidParams("thinking.ends must have at least one text, such as '</think>'")
        validation.boolean("thinking.is_open", self.is_open)
        if not (self.start or self.is_open):
            raise InvalidParams("thinking.start must not be empty where the prompt does not end inside thinking")
        if self.budget is not None:
            object.__setattr__(self, "budget", validation.integer("thinking.budget", self.budget, 0, INT32, "or None"))


@dataclass(frozen=True, slots=True)
class PatternTrigger:
    r"""A regular expression that begins a lazy grammar, for example `PatternTrigger(r"^\s*(\{)")`.

    It is looked for after each token, in the text so far: `$` and `(?!...)` see no further. The grammar begins at the first
    group that is not empty, or else at the beginning of the match. Syntax and meaning are as in llama.cpp's triggers (ECMAScript,
    on the bytes of UTF-8), without back references, `\b` and lookahead other than `(?!...)`; control tokens have their text.

    Attributes:
        pattern: The expression, of at most 16,384 characters and 8 groups that capture.
        is_full: Whether the whole text has to match, not a part of it.

    Raises:
        InvalidParams: The pattern is empty or too long.
        InvalidType: A value has the wrong type.
    """

    pattern: str
    is_full: bool = False

    def __post_init__(self) -> None:
        validation.set_defaults(self)
        if not 1 <= len(validation.text("pattern", self.pattern)) <= _MAX_PATTERN_CHARS:
            raise InvalidParams(f"pattern must have 1 to {_MAX_PATTERN_CHARS} characters, not {len(self.pattern)}")
        validation.boolean("is_full", self.is_full)


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """Holds the arguments of tool calls to their schemas, beside the `grammar` that says how calls are spelt.

    Attributes:
        lark: A Lark grammar of the calls in a message, from the text on with which they begin. `%json` has a schema.
        triggers: The beginnings of calls, in the forms of `SamplingParams.grammar_triggers`; text before them is free.

    Raises:
        InvalidParams: There is no trigger, or one is malformed.
        InvalidType: A value has the wrong type.
    """

    lark: str
    triggers: tuple[str | int | PatternTrigger | Mapping[str, Any], ...]

    def __post_init__(self) -> None:
        validation.text("call_grammar.lark", self.lark)
        object.__setattr__(self, "triggers", _triggers(self.triggers))
        if not self.triggers:
            raise InvalidParams("call_grammar.triggers must have at least one trigger")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to generate: length, sampling, constraints and log-probabilities of one request.

    Immutable, comparable and hashable. Names and meanings are llama.cpp's. A `Sampler` reads what decides the next token;
    `Context.generate` also reads max_tokens and stop_token_ids. None is the default of every field but max_tokens.

    Attributes:
        max_tokens: Most tokens that a choice may have; None: until the context is full.
        min_tokens: Fewest tokens of a choice: before, no end-of-generation token and none of stop_token_ids is drawn.
        stop: Texts that end generation. They are not part of the text.
        stop_token_ids: Token ids that end generation.
        ignore_eos: Whether generation goes on after the model's end-of-generation token.
        max_repetition: End a choice whose last tokens, that many of them, are the same n-gram at least four times in a row; 0
            is off, and 1 and 2 count as 3. Every eighth token is checked, from min_tokens on.
        n: Number of choices for the prompt.
        temperature: Randomness of the draw; 0 takes the likeliest token after biases, penalties and masks.
        dynatemp_range: Most by which the temperature goes up or down with the entropy of the distribution; 0 is off.
        dynatemp_exponent: Exponent of the entropy in the dynamic temperature.
        samplers: Names of the samplers that apply, in order. A sampler that is not listed does nothing, not even the temperature,
            except a temperature of 0.
        top_k: Keep the k likeliest tokens; 0 or -1 is off.
        top_p: Keep the likeliest tokens whose probabilities add up to p; 1 is off.
        min_p: Keep the tokens with at least p times the probability of the likeliest; 0 is off.
        typical_p: Keep the tokens whose surprise is nearest to the mean and whose probabilities add up to p; 1 is off.
        top_n_sigma: Keep the tokens whose logits are within n standard deviations of the greatest; -1 or 0 is off.
        xtc_probability: Probability with which the likeliest tokens are left out; 0 is off.
        xtc_threshold: Probability that tokens need for XTC to leave them out, all but the least likely of them.
        mirostat: Version of mirostat, 1 or 2, which replaces all samplers but the temperature; 0 is off.
        mirostat_tau: Entropy in bits that mirostat aims at.
        mirostat_eta: Learning rate of mirostat.
        adaptive_target: Probability of drawn tokens that "adaptive_p", the last of samplers, aims at; -1 is off.
        adaptive_decay: Decay of the history that "adaptive_p" keeps: greater values adapt more slowly.
        repeat_penalty: Factor that lowers the logits of tokens among the last penalty_last_n of prompt and text; 1 is off.
        frequency_penalty: Lower a token's logit by so much for each time that it is in the last penalty_last_n tokens; 0 is off.
        presence_penalty: Lower a token's logit by so much if it is in the last penalty_last_n tokens at all; 0 is off.
        penalty_last_n: Number of tokens that the three penalties look back over; 0 is off, -1 is all of them.
        dry_multiplier: Strength of DRY, the penalty for repeated sequences; 0 is off.
        dry_base: Base of DRY's penalty, whose exponent is the length of the repetition beyond dry_allowed_length.
        dry_allowed_length: Longest repetition that DRY does not penalise, in tokens.
        dry_penalty_last_n: Number of tokens that DRY looks back over; -1 is the context that the model was trained with.
        dry_sequence_breakers: Texts at which DRY ends a repetition.
        logit_bias: Numbers that are added to logits, by token id; kept as pairs in the order of the ids.
        seed: The same seed draws the same tokens, whatever else runs; None or -1 draws a new seed for every sampler.
        grammar: A GBNF grammar. At most one of grammar, json_schema, regex, choice, lark and constraint.
        grammar_root: The rule with which the grammar begins.
        grammar_prefix: Text of the prompt's end that the grammar begins with; it has a match before the first token.
        grammar_lazy: Whether text is free until one of grammar_triggers comes, with which the grammar begins.
        grammar_triggers: Texts, found as they are, or, with a ^ in front, only at the beginning; token ids; or regular
            expressions, as `PatternTrigger` or a mapping of its fields. A token that would complete a trigger with a text
            that the grammar does not allow is not drawn.
        json_schema: A JSON schema as text, a mapping or a bool.
        disable_any_whitespace: Whether JSON of a schema is compact, without blanks between its tokens. Tool calls keep theirs.
        regex: A regular expression that the whole text matches, in the syntax of Rust's regex crate: without look-around and
            back references.
        choice: Texts, of which the reply is one.
        lark: A grammar in llguidance's variant of Lark's syntax; the text is what its rule `start` derives.
        constraint: A constraint of your own: an object with the methods of `paceline.constraints.Constraint`, of which each
            choice gets a copy; a function that makes one of a `TokenTable`; or the name of one, as "module:attr", which
            isolation="process" needs.
        call_grammar: What the arguments of tool calls are held to, as `CallGrammar` or a mapping of its fields; beside a grammar.
        thinking: Where thinking begins and ends, as `ThinkingParams` or a mapping of its fields: a constraint holds for what
            comes outside of it, and its length can be limited. None: all text is alike.
        logits_processors: Functions of your own that change the logits of each token before it is drawn, in order:
            (token_ids, logits) -> logits, with the tokens that the choice has generated and an array of float32, which may be
            changed in place. Or their names, as "module:attr", which isolation="process" needs. See `sampling` for the cost.
        allowed_token_ids: The only tokens that may come; None: all.
        bad_words: Texts that may not come, as the tokens they are encoded to, with and without a space in front.
        logprobs: None for none, 0 for each token's own log-probability, k for the k most likely as well; natural logarithms.
        logprobs_mode: "raw": of the model's own distribution; "sampled": of the one that was drawn from.
        prompt_logprobs: As logprobs, for the tokens of the prompt.
        prompt_logprobs_start: Number of tokens at the beginning of the prompt without log-probabilities. They may come from the
            cache; with 0, the default, the whole prompt is computed, and its first token alone has none.
        echo: Whether the prompt is part of the text.

    Raises:
        InvalidParams: A value is out of its range; the message names the field.
        InvalidType: A value has the wrong type, or a field is unknown.
    """

    max_tokens: int | None = 256
    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    samplers: tuple[str, ...] = DEFAULT_SAMPLERS
    seed: int | None = None
    stop: tuple[str, ...] | str = ()
    stop_token_ids: Annotated[tuple[int, ...], TokenIds] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_repetition: int = 0
    n: int = 1
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    echo: bool = False
    grammar: str | None = None
    grammar_root: str = "root"
    grammar_prefix: str = ""
    grammar_lazy: bool = False
    grammar_triggers: tuple[str | int | PatternTrigger | Mapping[str, Any], ...] = ()
    json_schema: Mapping[str, Any] | str | bool | None = None
    disable_any_whitespace: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    lark: str | None = None
    constraint: Any = None
    call_grammar: CallGrammar | Mapping[str, Any] | None = None
    thinking: ThinkingParams | Mapping[str, Any] | None = None
    logits_processors: Annotated[tuple[Any, ...], Sequence[Callable[[Never, Never], object] | str]] = ()
    allowed_token_ids: Annotated[tuple[int, ...] | None, TokenIds] = None
    bad_words: tuple[str, ...] = ()

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[SamplingKeywords]) -> None: ...

    def __new__(cls, **options: Any) -> Self:
        """Refuse unknown options, naming the nearest known one."""
        validation.reject_unknown(options, FIELDS, "SamplingParams", NAMES_ELSEWHERE)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        validation.set_defaults(self, keep=HAS_NONE)
        self._check_numbers()
        self._check_sequences()
        self._check_constraint()
        self._check_together()

    def replace(self, **changes: Unpack[SamplingKeywords]) -> Self:
        """Return a copy with some fields changed.

        Args:
            **changes: Fields and their new values; None is the default of a field, as in the constructor.

        Returns:
            The new params.

        Raises:
            InvalidParams: A value is out of its range, or a field is unknown.
        """
        validation.reject_unknown(changes, FIELDS, "SamplingParams", NAMES_ELSEWHERE)
        wanted: dict[str, Any] = {**changes}  # the constructor takes more types than the fields have
        return dataclasses.replace(self, **wanted)

    @property
    def first_scored(self) -> int:
        """Index of the first prompt token that has log-probabilities, if they are wanted."""
        return max(1, self.prompt_logprobs_start)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        for row in _NUMBERS:
            self._set(row.name, validation.number(row.name, getattr(self, row.name), row.low, row.high))
        for row in _INTEGERS:
            value, hint = getattr(self, row.name), "or None" if row.is_optional else None
            if value is not None:
                self._set(row.name, validation.integer(row.name, value, row.low, row.high, hint))
        for row in _BOOLEANS:
            validation.boolean(row.name, getattr(self, row.name))
        if self.seed == -1:
            self._set("seed", None)

    def _check_sequences(self) -> None:
        if isinstance(self.stop, str):
            self._set("stop", (self.stop,))
        for name, (count, length, total) in _TEXTS.items():
            self._set(name, _texts(name, getattr(self, name), count, length, total))
        self._set("stop_token_ids", tuple(validation.token_ids("stop_token_ids", self.stop_token_ids, INT32)))
        if self.allowed_token_ids is not None:
            allowed = tuple(validation.token_ids("allowed_token_ids", self.allowed_token_ids, INT32))
            if not allowed:
                raise InvalidParams("allowed_token_ids must name at least one token, or be None to allow all")
            self._set("allowed_token_ids", allowed)
        self._set("logits_processors", _processors(self.logits_processors))
        self._set("logit_bias", _biases(self.logit_bias))
        self._set("samplers", _order(self.samplers))

    def _check_constraint(self) -> None:
        given = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidParams(f"{' and '.join(given)} exclude each other: set one of {', '.join(_CONSTRAINTS)}")
        for name in ("grammar", "regex", "lark"):
            if getattr(self, name) is not None:
                self._set(name, validation.text(name, getattr(self, name)))
        if self.choice is not None:
            self._set("choice", _texts("choice", self.choice, 10_000, 4096))
            if not self.choice:
                raise InvalidParams("choice must have at least one text to choose")
            if sum(map(len, self.choice)) > _MAX_CHOICE_CHARS:
                raise InvalidParams(f"choice must have at most {_MAX_CHOICE_CHARS} characters in all")
        if self.constraint is not None:
            _check_own_constraint(self.constraint)
        for name, parse in (("call_grammar", _call_grammar), ("thinking", _thinking)):
            if getattr(self, name) is not None:
                self._set(name, parse(getattr(self, name)))
        if self.json_schema is not None:
            self._set("json_schema", _schema(self.json_schema))
        self._set("grammar_root", validation.text("grammar_root", self.grammar_root))
        self._set("grammar_prefix", validation.text("grammar_prefix", self.grammar_prefix))
        self._set("grammar_triggers", _triggers(self.grammar_triggers))

    def _check_together(self) -> None:
        self._set("logprobs_mode", validation.choice("logprobs_mode", self.logprobs_mode, ("raw", "sampled")))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParams(f"min_tokens must not exceed max_tokens ({self.max_tokens}), not {self.min_tokens}")
        if self.grammar_lazy and (self.grammar is None or not self.grammar_triggers):
            raise InvalidParams("grammar_lazy needs a grammar and grammar_triggers that it begins with")
        if self.grammar_prefix and (self.grammar is None or self.grammar_lazy):
            raise InvalidParams("grammar_prefix needs a grammar, and one that is not lazy")
        if self.grammar_triggers and not self.grammar_lazy:
            raise InvalidParams("grammar_triggers have no meaning without grammar_lazy=True")
        before = self.samplers[: self.samplers.index("infill")] if "infill" in self.samplers else ("top_k",)
        if "infill" in self.samplers and not ("top_k" in before and 1 <= self.top_k <= _MAX_INFILL_CANDIDATES):
            raise InvalidParams(
                f"samplers: 'infill' needs 'top_k' before it, with a top_k of 1 to {_MAX_INFILL_CANDIDATES} "
                f"(top_k is {self.top_k}): its cost grows with the square of the candidates"
            )


FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))
_DESCRIBED = dict(re.findall(r"^ +(\w+): (.+)$", SamplingParams.__doc__ or "", re.MULTILINE))


def help_of(name: str) -> str:
    """Return the sentence about a parameter for flags, options and the web page."""
    return BY_NAME[name].help or _DESCRIBED.get(name, "")


def flag_help(name: str) -> str:
    """Return the sentence about a parameter for flags and options, which names other flags in place of their fields."""

    def flag(match: re.Match[str]) -> str:
        row = BY_NAME.get(match[0])
        return match[0] if row is None else next(flag for flag in row.flags.split() if flag.startswith("--"))

    return BY_NAME[name].help or re.sub(r"\b[a-z]+(?:_[a-z]+)+\b", flag, help_of(name))


class ChatSamplingKeywords(PlainSamplingKeywords, total=False):
    """Fields of `SamplingParams` that a chat takes."""

    grammar_triggers: Sequence[str | Int | PatternTrigger | Mapping[str, object]] | None
    call_grammar: CallGrammar | Mapping[str, object] | None
    thinking: ThinkingParams | Mapping[str, object] | None


class SamplingKeywords(ChatSamplingKeywords, total=False):
    """Fields of `SamplingParams`."""

    echo: bool | None


set_constructor(SamplingParams, SamplingKeywords)


def _items(name: str, values: object) -> Sequence[Any]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sequence):
        raise InvalidType(f"{name} must be a list or tuple, not {type(values).__name__}")
    return values


def _texts(name: str, values: object, count: int, length: int, total: int | None = None) -> tuple[str, ...]:
    items = _items(name, values)
    if len(items) > count:
        raise InvalidParams(f"{name} must have at most {count} texts, not {len(items)}")
    texts = tuple(validation.text(f"{name}[{index}]", item) for index, item in enumerate(items))
    for index, text in enumerate(texts):
        if not 1 <= len(text) <= length:
            raise InvalidParams(f"{name}[{index}] must have 1 to {length} characters, not {len(text)}")
    if total is not None and (found := sum(map(len, texts))) > total:
        raise InvalidParams(f"{name} must have at most {total} characters together, not {found}")
    return texts


def _biases(biases: object) -> tuple[tuple[int, float], ...]:
    pairs: Iterable[Any] = biases.items() if isinstance(biases, Mapping) else _items("logit_bias", biases)
    result: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise InvalidType(f"logit_bias must map token ids to numbers; {pair!r} is not such a pair")
        token = validation.integer("logit_bias: the token id", pair[0], 0, INT32)
        result[token] = validation.number(f"logit_bias[{token}]", pair[1], -LARGE, LARGE)
    return tuple(sorted(result.items()))


def _order(samplers: object) -> tuple[str, ...]:
    items = tuple(
        validation.choice(f"samplers[{index}]", item, SAMPLERS)
        for index, item in enumerate(_items("samplers", samplers))
    )
    for index, item in enumerate(items):
        if item in items[:index]:
            raise InvalidParams(f"samplers names {item!r} twice")
    return items


def _triggers(triggers: object) -> tuple[str | int | PatternTrigger, ...]:
    items = _items("grammar_triggers", triggers)
    if len(items) > _MAX_TRIGGERS:
        raise InvalidParams(f"grammar_triggers must be at most {_MAX_TRIGGERS}, not {len(items)}")
    return tuple(_trigger(f"grammar_triggers[{i}]", item) for i, item in enumerate(items))


def _trigger(name: str, trigger: object) -> str | int | PatternTrigger:
    if isinstance(trigger, PatternTrigger):
        return trigger
    if isinstance(trigger, Mapping):
        validation.reject_unknown(
            trigger, [field.name for field in dataclasses.fields(PatternTrigger)], "PatternTrigger"
        )
        if "pattern" not in trigger:
            raise InvalidParams(f"{name} must have a pattern")
        try:
            return PatternTrigger(**trigger)
        except (InvalidParams, InvalidType) as error:
            raise type(error)(f"{name}.{error}") from None
    if not isinstance(trigger, str):
        return validation.integer(name, trigger, 0, INT32)
    text = validation.text(name, trigger)
    size = len(text.removeprefix("^"))
    if not 1 <= size <= _MAX_TRIGGER_CHARS:
        raise InvalidParams(f"{name} must have 1 to {_MAX_TRIGGER_CHARS} characters (besides a ^), not {size}")
    return text


def _processors(processors: object) -> tuple[Any, ...]:
    items = _items("logits_processors", processors)
    if len(items) > _MAX_PROCESSORS:
        raise InvalidParams(f"logits_processors must be at most {_MAX_PROCESSORS}, not {len(items)}")
    for index, item in enumerate(items):
        name = f"logits_processors[{index}]"
        if isinstance(item, str):
            _check_import_name(name, item)
        elif not callable(item):
            raise InvalidType(
                f"{name} must be a function, or the name of one as 'module:attr', not {type(item).__name__}"
            )
    return tuple(items)


def _check_import_name(name: str, text: str) -> None:
    module, colon, attribute = validation.text(name, text).partition(":")
    if not (module and colon and attribute):
        raise InvalidParams(f"{name} must be of the form 'module:attr' where it is a text, not {text!r:.80}")


def _check_own_constraint(constraint: object) -> None:
    if isinstance(constraint, str):
        _check_import_name("constraint", constraint)
    elif not (callable(constraint) or hasattr(constraint, "fill_mask")):
        raise InvalidType(
            "constraint must be an object with fill_mask and accept, a function that makes one, or the name of one as "
            f"'module:attr', not {type(constraint).__name__}"
        )


def _call_grammar(grammar: object) -> CallGrammar:
    if isinstance(grammar, Mapping):
        given = {validation.text("call_grammar: a name", name): value for name, value in grammar.items()}
        validation.reject_unknown(given, [field.name for field in dataclasses.fields(CallGrammar)], "CallGrammar")
        return CallGrammar(given.get("lark", ""), given.get("triggers", ()))
    return validation.instance("call_grammar", grammar, CallGrammar)


def _thinking(thinking: object) -> ThinkingParams:
    if isinstance(thinking, Mapping):
        return ThinkingParams(**{validation.text("thinking: a name", name): given for name, given in thinking.items()})
    return validation.instance("thinking", thinking, ThinkingParams)


def _schema(schema: object) -> str:
    """Return the schema as JSON text, which is immutable and which the native side reads."""
    if not isinstance(schema, (str, bool, Mapping)):
        if isinstance(schema, type):
            raise InvalidType(
                f"json_schema must be a JSON text, a mapping or a bool, not the class {schema.__name__}; "
                f"llm.chat takes a type as response_model={schema.__name__}"
            )
        raise InvalidType(f"json_schema must be a JSON text, a mapping or a bool, not {type(schema).__name__}")
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(dict(parsed) if isinstance(parsed, Mapping) else parsed, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidParams(f"json_schema is not valid JSON: {error}") from None
    depth = _depth(parsed)
    if len(text) > _MAX_SCHEMA_CHARS or depth > _MAX_SCHEMA_DEPTH:
        raise InvalidParams(
            f"json_schema must have at most {_MAX_SCHEMA_CHARS} characters, nested {_MAX_SCHEMA_DEPTH} deep at most, "
            f"not {len(text)} and {depth}"
        )
    return text


def _depth(value: Any) -> int:
    """Return how deep a JSON value is nested."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [child for parent in level for child in _children(parent)]
    return depth


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()
