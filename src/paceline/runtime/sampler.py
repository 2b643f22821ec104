"""Samplers: apply `SamplingParams` to rows of logits, token by token.

The native sampler (native/sampler.hpp) does the work; this module sets its options and checks arguments.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from paceline import _native, validation
from paceline.constraints.gbnf_schemas import check_keywords
from paceline.errors import Closed, GrammarError, InvalidParams, InvalidType, StateError, Unsupported
from paceline.params import FIELDS, PatternTrigger, SamplingParams
from paceline.runtime.model import Model
from paceline.runtime.native_core import Closeable, SharedOwners, native_fact

LogitRow = npt.NDArray[np.float32]
TokenMask = npt.NDArray[np.uint32]

_SPACE_RULE = re.compile(r"^space ::= .*$", re.MULTILINE)
_LONG_EXPONENT, _SHORT_EXPONENT = "[eE] [-+]? integral-part", "[eE] [-+]? [0-9]{1,2}"
_GBNF_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|#[^\n]*|\[\^?(?P<class>(?:\\.|[^\]\\])*)\]', re.DOTALL)
_GBNF_CHAR = r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\[^xuU]|[^\]\\]"
_GBNF_RANGE = re.compile(rf"({_GBNF_CHAR})(?:-({_GBNF_CHAR}))?", re.DOTALL)
_NO_BLANKS, _FEW_BLANKS = '""', '| " " | "\\\\n"{1,2} [ \\\\t]{0,16}'
_CONVERTED = ("seed", "choice", "samplers", "allowed_token_ids", "grammar")  # by `_options`
_SAME = tuple(name for name in FIELDS if hasattr(_native.SamplerOptions, name) and name not in _CONVERTED)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural logarithm of a token's probability, with the token's bytes."""

    token_id: int
    logprob: float
    bytes: bytes


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The logprob of one token, and the most likely tokens at its position, most likely first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


class Sampler(Closeable):
    """Samples the tokens of one choice.

    The k-th draw depends only on the logits, the params, (seed, choice, k) and the tokens before, so a new sampler that
    gets the prompt (`accept_prompt`) and every generated token (`accept`) continues as the first would have. Mirostat and
    adaptive-p have further state, which `state` carries over.

    `sample` only chooses; accept each generated token exactly once. A call that raises leaves the sampler
    as it was. Keeps the model alive until it is closed. Safe to call from several threads; they wait for each other.

    choice: index among the `n` choices of a request; each draws independently. is_masked: whether every row comes processed by
    logits_processors, and with a mask for json_schema, regex, choice and lark (see `paceline.constraints`); otherwise it follows
    json_schema and choice by itself, by way of a GBNF grammar.
    Raises `InvalidParams` for a token id outside the vocabulary, `GrammarError` for a grammar that does not compile,
    `Unsupported` if the model or this version lacks a feature.
    """

    def __init__(
        self, params: SamplingParams, model: Model | _native.Model, *, choice: int = 0, is_masked: bool = False
    ) -> None:
        if not isinstance(params, SamplingParams):
            raise InvalidType(f"params must be SamplingParams, not {type(params).__name__}")
        validation.integer("choice", choice, 0, 2**32 - 1)
        self._params = params
        self._native: _native.Sampler | None = _native.Sampler(
            _native_model(model), _options(params, choice, is_masked)
        )
        self._owners = model.owners if isinstance(model, Model) else SharedOwners()
        self._owners.add(self)

    @property
    def native(self) -> _native.Sampler:
        """The native object. Raises `Closed` after `close()`."""
        if self._native is None:
            raise Closed("the sampler was closed")
        return self._native

    @property
    def params(self) -> SamplingParams:
        """The params it was built from."""
        return self._params

    seed: int = native_fact("seed")
    """The seed of its draws; random if the params have none."""
    choice: int = native_fact("choice")
    """Index of the choice it draws."""
    num_generated: int = native_fact("num_generated")
    """Number of generated tokens it has accepted: the k of the next draw."""
    n_vocab: int = native_fact("n_vocab")
    """The length of a row of logits."""

    def sample(self, logits: LogitRow, mask: TokenMask | None = None) -> int:
        """Return the next token for a row of logits, float32 of shape (n_vocab,); the row is not changed.

        mask: uint32 of shape (ceil(n_vocab / 32),), bit t % 32 of word t // 32 set if token t is allowed.
        The same call again returns the same token: nothing changes until `accept`. Raises `SamplingError` if no token is
        allowed or a logit is NaN or +inf.
        """
        row = self._row(logits)
        return int(self.native.sample(row, None if mask is None else self._mask(mask)).token)

    def sample_with_logprobs(
        self, logits: LogitRow, mask: TokenMask | None = None, *, k: int = 0
    ) -> tuple[int, Logprobs]:
        """Sample, and return the token's logprob and the k highest as well, by the params' `logprobs_mode`."""
        validation.integer("k", k, 0, self.n_vocab)
        row = self._row(logits)
        draw = self.native.sample(row, None if mask is None else self._mask(mask), k)
        return int(draw.token), self._records(int(draw.token), draw.logprobs)

    def logprobs(self, logits: LogitRow, token_id: int, k: int = 0) -> Logprobs:
        """Return the logprob of a token by the model's own distribution over a row, and the k highest."""
        validation.integer("token_id", token_id, 0, self.n_vocab - 1)
        validation.integer("k", k, 0, self.n_vocab)
        return self._records(token_id, self.native.logprobs(self._row(logits), token_id, k))

    def accept(self, token_id: int) -> None:
        """Accept a generated token as the next, exactly once each. Raises `InvalidParams` if the grammar forbids it."""
        self.native.accept(validation.integer("token_id", token_id, 0, self.n_vocab - 1))

    def accept_prompt(self, token_ids: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Add tokens that were not generated to the history for penalties, DRY and bad_words; k and grammar stay."""
        ids = validation.token_ids("token_ids", token_ids, self.n_vocab)
        self.native.accept_prompt(np.array(ids, dtype=np.int32))

    def is_eog(self, token_id: int) -> bool:
        """Return whether a token ends generation."""
        return bool(self.native.is_eog(validation.integer("token_id", token_id, 0, self.n_vocab - 1)))

    def set_grammar_asleep(self, asleep: bool) -> None:
        """Set whether the next tokens are thinking, in which a lazy grammar ignores triggers."""
        self.native.set_grammar_asleep(validation.boolean("asleep", asleep))

    @property
    def may_end(self) -> bool:
        """Whether the text is valid by the grammar as it is; True without one."""
        return bool(self.native.may_end())

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows nothing more."""
        return bool(self.native.is_complete())

    def allowed_mask(self) -> TokenMask:
        """Return the tokens allowed next by grammar, bans, bad_words and min_tokens, as a mask for `sample`."""
        mask: TokenMask = self.native.allowed_mask()
        return mask

    def reset(self) -> None:
        """Drop prompt and generated tokens; the seed stays, also a random one."""
        self.native.reset()

    def clone(self, *, choice: int | None = None) -> Self:
        """Return a copy that continues independently; with another `choice` it draws other tokens from here on."""
        if choice is not None:
            validation.integer("choice", choice, 0, 2**32 - 1)
        copied = copy.copy(self)
        copied._native = self.native.clone(choice)  # noqa: SLF001 - a copy of our own
        return self._owners.add(copied)

    def state(self) -> bytes:
        """Return its progress, seed included, as bytes for `restore` of a sampler with the same params."""
        state: bytes = self.native.state()
        return state

    def restore(self, state: bytes) -> None:
        """Restore a saved state. Raises `StateError` if the bytes are damaged or of other params or vocabulary."""
        if not isinstance(state, (bytes, bytearray, memoryview)):
            raise InvalidType(f"state must be bytes, not {type(state).__name__}")
        if len(state) > 2**31:
            raise StateError(f"{len(state)} bytes are not a saved sampler")
        self.native.restore(bytes(state))

    def close(self) -> None:
        """Free the memory; idempotent. Other calls raise `Closed` from then on."""
        self._native = None

    def _row(self, logits: object) -> LogitRow:
        return _array("logits", logits, np.dtype(np.float32), self.n_vocab)

    def _mask(self, mask: object) -> TokenMask:
        return _array("mask", mask, np.dtype(np.uint32), (self.n_vocab + 31) // 32)

    def _records(self, token_id: int, native: Any) -> Logprobs:
        top = zip(native.ids, native.values, strict=True)
        return Logprobs(self._record(token_id, native.chosen), tuple(self._record(*entry) for entry in top))

    def _record(self, token_id: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(token_id, logprob, self.native.token_bytes(token_id))


def _array(name: str, value: object, dtype: np.dtype[Any], length: int) -> npt.NDArray[Any]:
    if not isinstance(value, np.ndarray) or value.dtype != dtype:
        found = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise InvalidType(f"{name} must be a NumPy array of {dtype}, not {found}")
    if value.shape != (length,):
        raise InvalidParams(f"{name} must have the shape ({length},), not {value.shape}")
    return np.ascontiguousarray(value)


def _native_model(model: object) -> _native.Model:
    if isinstance(model, _native.Model):
        return model
    return validation.instance("model", model, Model).native


def _options(params: SamplingParams, choice: int, is_masked: bool) -> _native.SamplerOptions:
    options = _native.SamplerOptions()
    options.seed = secrets.randbits(64) if params.seed is None else params.seed
    options.choice = choice
    for name in _SAME:
        value = getattr(params, name)
        setattr(options, name, list(value) if isinstance(value, tuple) else value)
    options.samplers = [getattr(_native.SamplerKind, name) for name in params.samplers]
    options.sampled_logprobs = params.logprobs_mode == "sampled"
    options.allowed_token_ids = None if params.allowed_token_ids is None else list(params.allowed_token_ids)
    options.grammar = _grammar(params, is_masked)
    return options


def _grammar(params: SamplingParams, is_masked: bool) -> _native.GrammarOptions | None:
    text = params.grammar
    if not is_masked and params.logits_processors:
        raise Unsupported("a Sampler alone runs no logits_processors; use an LLM, or change the rows yourself")
    if is_masked:
        pass
    elif any(rule is not None for rule in (params.regex, params.lark, params.constraint, params.call_grammar)):
        raise Unsupported(
            "a Sampler alone follows grammar, json_schema and choice; use an LLM, or mask the rows yourself"
        )
    elif params.choice is not None:
        text = "root ::= " + " | ".join(map(_literal, params.choice))
    elif isinstance(params.json_schema, str):  # SamplingParams keeps it as text
        text = spaced_grammar(grammar_of_schema(params.json_schema), is_compact=params.disable_any_whitespace)
    if text is None:
        return None
    _check_ranges(text)
    grammar = _native.GrammarOptions()
    grammar.text = text
    grammar.root = params.grammar_root if params.grammar is not None else "root"
    grammar.prefix = params.grammar_prefix
    grammar.lazy = params.grammar_lazy
    grammar.trigger_words = [trigger for trigger in params.grammar_triggers if isinstance(trigger, str)]
    grammar.trigger_tokens = [trigger for trigger in params.grammar_triggers if isinstance(trigger, int)]
    patterns = [trigger for trigger in params.grammar_triggers if isinstance(trigger, PatternTrigger)]
    if patterns:
        grammar.trigger_patterns = [_native.PatternTrigger(pattern.pattern, pattern.is_full) for pattern in patterns]
    return grammar


def _check_ranges(grammar: str) -> None:
    """Raise `GrammarError` if a range of characters ends before its beginning: llama.cpp takes it for empty."""
    for token in _GBNF_TOKEN.finditer(grammar):
        for first, last in _GBNF_RANGE.findall(token["class"] or ""):
            if last and _gbnf_code(first) > _gbnf_code(last):
                raise GrammarError(
                    f"grammar: the range {first}-{last} in {token[0][:40]} matches nothing: its end comes before its "
                    f"beginning; write {last}-{first}"
                )


def _gbnf_code(char: str) -> int:
    if len(char) < 2 or char[0] != "\\":
        return ord(char)
    if len(char) > 2:
        return int.from_bytes(bytes.fromhex(char[2:]))
    return ord({"n": "\n", "r": "\r", "t": "\t"}.get(char[1], char[1]))


def grammar_of_schema(schema: str) -> str:
    """Return a GBNF grammar of a JSON schema. Raises `GrammarError` if it cannot be enforced."""
    check_keywords(json.loads(schema))
    return _native.grammar_of_json_schema(schema)


def spaced_grammar(grammar: str, *, is_compact: bool) -> str:
    """Return a grammar of a JSON schema with at most 16 blanks of indentation, or without blanks between the tokens of JSON.

    Exponents of numbers get two digits, with which every number is finite.
    """
    spaced = _SPACE_RULE.sub(f"space ::= {_NO_BLANKS if is_compact else _FEW_BLANKS}", grammar)
    return spaced.replace(_LONG_EXPONENT, _SHORT_EXPONENT)


def _literal(text: str) -> str:
    escaped = "".join(c if c.isalnum() or c == " " else f"\\U{ord(c):08X}" for c in text)
    return f'"{escaped}"'
