"""Compiles the constraints of `SamplingParams`, by llguidance, for one vocabulary.

    json_schema ─┐
    regex        ├─ grammar (text) ── LLMatcher, cached ── a copy for each choice
    choice       │
    lark        ─┘

Compiled grammars are cached for each tenant and cache_salt (`paceline.request.cache_scope`): the time that a grammar takes
tells another tenant nothing. Any thread. llguidance is imported when the first grammar is compiled; making its trie of a large
vocabulary takes about a second.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final

from paceline import validation
from paceline.constraints.constraint import Constraint, PieceIndex, TokenTable
from paceline.constraints.grammar_constraint import (
    CallConstraint,
    CallTriggers,
    GrammarConstraint,
    JsonConstraint,
    JsonTokens,
    is_dead,
    short_message,
)
from paceline.constraints.llguidance_schemas import MAX_DIGITS, max_digits, place_of, prepared_schema
from paceline.constraints.schema_walk import (
    MAX_OPTIONAL,
    circles,
    is_too_large,
    longest_chain,
    num_optional,
    quoted_pattern,
    types_of,
)
from paceline.constraints.thinking import ThinkingConstraint, ThinkingTokens
from paceline.errors import GrammarError, InvalidParams, InvalidType, PacelineError
from paceline.params import CallGrammar, SamplingParams, ThinkingParams
from paceline.request import cached_in_scope, current_cache_scope

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Spec = tuple[str, str, bool]
"""The key of a compiled grammar: its kind, its text, and whether its JSON has fewer blanks."""

Scope = tuple[str, str]
"""Tenant and cache_salt of a request."""

_MAX_COMPILES = 2
_CACHED_GRAMMARS = 256
_CACHED_BYTES = 64 << 20  # of memory, for each vocabulary
_LONG_NUMBER = re.compile(rf"[0-9]{{{MAX_DIGITS}}}|[0-9][eE]")
_MAX_DIGIT_LIMITS = 4  # of which the tokens are kept
_MAX_TEXT_CHARS = 2**18  # of a regular expression, or of a request's Lark grammar
_MAX_GRAMMAR_CHARS = 2**20
_MAX_LARK_NESTING = 2000
_JSON_OPTIONS: Final[dict[str, Any]] = {  # all of them, so that a schema's own x-guidance changes nothing
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_flexible": True,
    "whitespace_pattern": r"\x20|\x0A{1,2}[\x20\x09]{0,16}",
    "item_separator": ",",
    "key_separator": ":",
    # One spelling of each character: a name could else be spelt so that its property's schema would not apply.
    "json_allowed_escapes": '"\\bfnrt',
    "json_allow_general_unicode_escapes": False,
}
_CALL_OPTIONS: Final[dict[str, Any]] = {  # of arguments of tools; no blanks that a bracket would have to follow
    **_JSON_OPTIONS,
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": f",(?:{_JSON_OPTIONS['whitespace_pattern']})?",
    "key_separator": f":(?:{_JSON_OPTIONS['whitespace_pattern']})?",
}
# What llguidance may spend, beyond which it refuses a grammar or ends a row with an error. Its fuel is counted in steps of its
# automata, not in time: a compile cannot be interrupted, so that a limit of time would leave its thread running.
_LIMITS: Final[dict[str, Any]] = {
    "max_grammar_size": 500_000,  # symbols of a compiled grammar
    "initial_lexer_fuel": 1_000_000,  # of compiling it
    "step_lexer_fuel": 200_000,  # of a mask
    "step_max_items": 50_000,  # of the parser for a mask
    "max_items_in_row": 8_000,  # of these for one lexeme
    "max_lexer_states": 100_000,  # of a cached grammar and its copies together; they take up to 700 bytes each
    "verbose_errors": False,
}


def check_constraint(params: SamplingParams) -> None:
    """Check the constraint of params as far as no vocabulary is needed.

    Raises:
        GrammarError: The grammar does not compile, is too large, or no text satisfies it. Names the field; for a schema the
            keyword and its JSON pointer as well.
    """
    spec = spec_of(params)
    if spec is not None:
        _bytes_compiler().matcher(spec)


def first_violation(schema: Mapping[str, Any], text: str) -> int | None:
    """Return the place of the first character of a JSON text that violates a schema; None if the text conforms.

    The text has no blanks, and the properties of objects in the order of the schema, as they are generated. Raises as
    `check_constraint`.
    """
    matcher = _bytes_compiler().matcher(("json_schema", json.dumps(schema), True))
    data = text.encode()
    num_allowed = matcher.try_consume_tokens(list(data))
    if num_allowed == len(data) and matcher.is_accepting():
        return None
    return len(data[:num_allowed].decode(errors="ignore"))


@dataclass(slots=True)
class _CachedGrammar:
    """A compiled grammar.

    Attributes:
        matcher: Stands at the beginning. Its copies share parts of it, which grow while a copy is followed.
        num_compiled_bytes: Its memory, as measured when it was compiled.
        num_used: How many tokens were followed by its copies.
    """

    matcher: LLMatcher
    num_compiled_bytes: int
    num_used: int = 0

    @property
    def num_bytes(self) -> int:
        return self.num_compiled_bytes + _BYTES_PER_USE * self.num_used

    def note_use(self) -> None:
        self.num_used += 1


class ConstraintCompiler:
    """Makes the constraints of requests; one for each vocabulary, with a cache of compiled grammars.

    Attributes:
        num_compiled: Grammars that were compiled so far.
    """

    def __init__(self, table: TokenTable) -> None:
        self.table = table
        self._lock = threading.Lock()
        self._compiles = threading.BoundedSemaphore(_MAX_COMPILES)
        self._cached: OrderedDict[tuple[Scope, Spec], _CachedGrammar] = OrderedDict()
        self._compiling: dict[tuple[Scope, Spec], Future[_CachedGrammar]] = {}
        self.num_compiled = 0
        self._json_tokens = lru_cache(_MAX_DIGIT_LIMITS)(lambda limit: JsonTokens(table, self._index, limit))
        self._triggers = cached_in_scope(_CACHED_GRAMMARS)(CallTriggers)
        self._thinking = cached_in_scope(_CACHED_GRAMMARS)(
            lambda start, ends, message: ThinkingTokens(start, ends, message, self._index)
        )

    def compile(self, params: SamplingParams) -> Constraint | None:
        """Return the constraint of one choice; None if the params have no constraint, or only a GBNF grammar.

        Raises:
            GrammarError: As `check_constraint`.
            InvalidType: The params' own constraint does not have the methods of `Constraint`.
        """
        spec = spec_of(params)
        inner: Constraint | None = None
        if spec is not None:
            kind, text, _ = spec
            matcher, note_use = self._found(spec)
            inner = (
                JsonConstraint(
                    matcher,
                    self._json_tokens(max_digits(json.loads(text)) if _LONG_NUMBER.search(text) else MAX_DIGITS),
                    note_use,
                )
                if kind == "json_schema"
                else GrammarConstraint(matcher, note_use)
            )
        elif params.constraint is not None:
            own = (
                validation.import_named(params.constraint) if isinstance(params.constraint, str) else params.constraint
            )
            is_object = not isinstance(own, type) and hasattr(own, "fill_mask")
            inner = _checked_own(own).copy() if is_object else _checked_own(own(self.table))
        calls: CallConstraint | None = None
        if isinstance(params.call_grammar, CallGrammar):
            # Kept here: the cache may drop the grammar before a call begins, and compiling it again would hold up an engine.
            lark, note_lark_use = self._found(("lark", params.call_grammar.lark, True))
            calls = CallConstraint(
                self._triggers(params.call_grammar.triggers),
                lambda: GrammarConstraint(lark.deep_copy(), note_lark_use),
                self.table,
                lambda data: self._index.split(data),  # noqa: PLW0108 - the index is made when it is needed
            )
        if isinstance(params.thinking, ThinkingParams):
            thinking = params.thinking
            tokens = self._thinking(thinking.start, thinking.ends, thinking.message)
            separates = params.grammar_lazy or calls is not None
            return ThinkingConstraint(params.thinking, tokens, inner, separates=separates, calls=calls)
        if inner is not None and calls is not None:
            raise InvalidParams("call_grammar: it holds beside a grammar, and beside no other constraint")
        return inner or calls

    def matcher(self, spec: Spec) -> LLMatcher:
        """Return a new matcher at the beginning of a grammar."""
        return self._found(spec)[0]

    @property
    def num_cached_bytes(self) -> int:
        """Memory of the cached grammars."""
        return sum(grammar.num_bytes for grammar in self._cached.values())

    def _found(self, spec: Spec) -> tuple[LLMatcher, Callable[[], None]]:
        """Return a new matcher at the beginning of a grammar, and a function to call after each token that it follows."""
        key = current_cache_scope(), spec
        with self._lock:
            self._evict()
            if key in self._cached:
                self._cached.move_to_end(key)
                return self._cached[key].matcher.deep_copy(), self._cached[key].note_use
            is_first = key not in self._compiling
            future = self._compiling.setdefault(key, Future())
        if is_first:
            try:
                with self._compiles:
                    future.set_result(self._compiled(spec))
            except BaseException as error:  # noqa: BLE001 - raised by all that wait for it
                future.set_exception(error)
            with self._lock:
                del self._compiling[key]
                if future.exception() is None:
                    self.num_compiled += 1
                    self._cached[key] = future.result()
                    self._evict()
        grammar = future.result()
        with self._lock:
            return grammar.matcher.deep_copy(), grammar.note_use

    def _evict(self) -> None:
        """Evict grammars until the others fit: the oldest of the scope with the most bytes, so that a flood evicts itself.

        A grammar that takes more than half of the room is evicted first.
        """
        for key in [key for key, grammar in self._cached.items() if grammar.num_bytes > _CACHED_BYTES // 2]:
            del self._cached[key]
        while len(self._cached) > _CACHED_GRAMMARS or self.num_cached_bytes > _CACHED_BYTES:
            sizes = Counter[Scope]()
            for (scope, _), grammar in self._cached.items():
                sizes[scope] += grammar.num_bytes
            largest = max(sizes, key=sizes.__getitem__)
            del self._cached[next(key for key in self._cached if key[0] == largest)]

    def _compiled(self, spec: Spec) -> _CachedGrammar:
        import llguidance

        kind, text, is_compact = spec
        if kind in ("regex", "lark") and not is_compact and len(text) > _MAX_TEXT_CHARS:
            raise GrammarError(f"{kind} has {len(text)} characters, and may have {_MAX_TEXT_CHARS}; shorten it")
        grammar = _grammar(kind, text, is_compact=is_compact)
        if len(grammar) > _MAX_GRAMMAR_CHARS:
            raise GrammarError(f"{kind} has {len(grammar)} characters as a grammar, and may have {_MAX_GRAMMAR_CHARS}")
        tokenizer, before = self._tokenizer, _num_allocated_bytes()
        found = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=llguidance.LLParserLimits(**_LIMITS))
        if found.is_error():
            raise _grammar_error(kind, text, found.get_error())
        first = found.deep_copy()
        is_empty = not any(first.compute_bitmask()) or is_dead(first)
        if first.is_error() and not is_dead(first):
            raise _grammar_error(kind, text, first.get_error())
        if is_empty:
            raise GrammarError(f"{kind}: no text satisfies it{': #' if kind == 'json_schema' else ''}")
        del first  # its first mask made parts that all copies share
        grown = _num_allocated_bytes() - before
        return _CachedGrammar(found, max(grown, _MIN_GRAMMAR_BYTES + _MIN_BYTES_PER_CHAR * len(grammar)))

    @cached_property
    def _index(self) -> PieceIndex:
        return PieceIndex(self.table)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        import llguidance

        vocabulary = _Vocabulary(self.table, lambda: self._index)
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(vocabulary),
            n_vocab=len(self.table.pieces),
            eos_token=sorted(self.table.eog_ids),
        )


class _Vocabulary:
    """A vocabulary as llguidance reads it: control tokens begin with the byte 0xFF, which no text has.

    If a grammar leaves one text, llguidance allows the tokens alone that `__call__` returns for it.
    """

    bos_token_id = None

    def __init__(self, table: TokenTable, index: Callable[[], PieceIndex]) -> None:
        special = table.control_ids | table.eog_ids
        self.eos_token_id = min(table.eog_ids)
        self.special_token_ids = sorted(special)
        self.tokens = [b"\xff" + piece if token in special else piece for token, piece in enumerate(table.pieces)]
        self._table, self._index = table, index

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        try:
            found = self._table.encode(data.decode())
        except (PacelineError, UnicodeDecodeError):
            found = []
        if b"".join(self._table.pieces[token] for token in found) == data:
            return found
        try:
            return self._index().split(data)
        except PacelineError:
            return []


def has_constraint(params: SamplingParams) -> bool:
    """Return whether the params have anything for `ConstraintCompiler.compile`."""
    others = (params.constraint, params.call_grammar, params.thinking)
    return spec_of(params) is not None or any(other is not None for other in others)


def spec_of(params: SamplingParams) -> Spec | None:
    """Return which grammar the params ask for; None if none that is compiled here."""
    if isinstance(params.json_schema, str):  # SamplingParams keeps it as text
        return "json_schema", params.json_schema, params.disable_any_whitespace
    if params.choice is not None:
        return "choice", json.dumps(params.choice), False
    for kind in ("regex", "lark"):
        text = getattr(params, kind)
        if text is not None:
            return kind, text, False
    return None


def _grammar(kind: str, text: str, *, is_compact: bool) -> str:
    from llguidance import LLMatcher

    if kind == "json_schema":
        options = _JSON_OPTIONS | ({"whitespace_flexible": False, "whitespace_pattern": None} if is_compact else {})
        return LLMatcher.grammar_from_json_schema(prepared_schema(text), overrides=options)  # type: ignore[arg-type]
    if kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(map(quoted_pattern, json.loads(text))))
    if kind == "regex" and is_too_large(text):
        raise GrammarError(
            f"regex: its counted repetitions are too large, or it has more than {MAX_OPTIONAL} groups and quantifiers; shorten it"
        )
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    return LLMatcher.grammar_from_lark(_with_schemas(text, _CALL_OPTIONS if is_compact else _JSON_OPTIONS))


_LARK_TOKEN: Final = re.compile(
    r"""(?P<ignored>//[^\n]*|\#[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/)"""
    r"|(?P<definition>^[ \t]*[?!]?[A-Za-z_][\w.-]*(?=[^\n:|\"]*:))|(?P<name>[A-Za-z_]\w*(?:-\w+)*)"
    r"|(?P<bracket>[()\[\]{}])|(?P<sign>[?*~])",
    re.MULTILINE,
)
_JSON_RULE = re.compile(r"""//[^\n]*|\#[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(?P<json>%json\s*)""")


# llguidance looks ahead for as long as one byte alone may follow, which is for ever in `/a+/ /a+/`: the first terminal takes
# all that the second one needs. The last of several options counts, and it counts for nested grammars, too.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'


def _with_schemas(lark: str, options: Mapping[str, Any]) -> str:
    nesting = lark_nesting(lark)
    if nesting > _MAX_LARK_NESTING:
        raise GrammarError(
            f"lark: rules and terminals nest {nesting} deep, and may {_MAX_LARK_NESTING}; shorten the chain of references"
        )
    if has_large_terminal(lark):
        raise GrammarError(
            f"lark: a terminal or regular expression has more than {MAX_OPTIONAL} groups and quantifiers, with those of the "
            "terminals that it refers to; shorten it, or write it as rules"
        )
    found, start = [], 0
    at = 0
    while match := _JSON_RULE.search(lark, at):
        at = match.end()
        if match["json"] is None:  # a string, a regular expression or a comment
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, match.end())
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"lark: the text after %json is not a JSON schema: {error}") from None
        prepared = json.loads(prepared_schema(json.dumps(schema)))
        found += [lark[start : match.end()], json.dumps({**prepared, "x-guidance": options})]
        start = at = end
    return "".join([*found, lark[start:], _NO_FORCING])


def lark_nesting(lark: str) -> int:
    """Return how deep the rules and terminals of a Lark grammar nest."""
    depths: dict[str, int] = {}
    references: dict[str, set[str]] = {}
    current, depth = "", 0
    for match in _LARK_TOKEN.finditer(lark):
        text = match[0].strip(" \t?!")
        match match.lastgroup:
            case "definition":
                current, depth = text.partition(".")[0], 0
                depths.setdefault(current, 1)
            case "name":
                references.setdefault(current, set()).add(text)
            case "bracket":
                depth = max(0, depth + (1 if text in "([{" else -1))
                depths[current] = max(depths.get(current, 1), depth + 1)
    return longest_chain({name: (depths[name], frozenset(references.get(name, ()))) for name in depths})


def has_large_terminal(lark: str) -> bool:
    """Return whether a terminal of a Lark grammar has more than `MAX_OPTIONAL` parts that may match nothing.

    It counts groups, quantifiers, and references to other terminals with the parts of these terminals.
    """
    own, references = Counter[str](), dict[str, Counter[str]]()
    current = ""  # the terminal whose definition it is; empty in a rule
    for match in _LARK_TOKEN.finditer(lark):
        text, kind = match[0].strip(" \t?!"), match.lastgroup
        if kind == "definition":
            name = text.partition(".")[0]
            current = name if _is_terminal(name) else ""
            if current:
                own[current] += 1
                references.setdefault(current, Counter())
        elif kind == "ignored" and text.startswith("/") and not text.startswith("//"):
            if not current and num_optional(text) > MAX_OPTIONAL:
                return True
            own[current] += num_optional(text)
        elif kind == "name" and current and _is_terminal(text):
            references[current][text] += 1
        elif kind == "sign" or match[0] in ("(", "[", "{"):
            own[current] += 1
    sizes: dict[str, int] = {}
    for circle in circles({name: counts.keys() & references.keys() for name, counts in references.items()}):
        size = sum(own[name] + sum(n * sizes.get(part, 0) for part, n in references[name].items()) for name in circle)
        if size > MAX_OPTIONAL:
            return True
        sizes.update(dict.fromkeys(circle, size))
    return False


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


# llguidance does not report the memory of a grammar. It is measured if the C library reports allocations, which includes those of
# other threads at the same time, and counts as at least these figures, which were measured with schemas.
_MIN_GRAMMAR_BYTES = 32 << 10
_MIN_BYTES_PER_CHAR = 100
_BYTES_PER_USE = 4 << 10  # a few states of the lexer for each token


class _MallocInfo(ctypes.Structure):
    """The record of glibc's `mallinfo2`: its fifth size is of blocks that are mapped, its eighth of blocks in use elsewhere."""

    _fields_ = (("sizes", ctypes.c_size_t * 10),)


@cache
def _malloc_info() -> Any:
    """Return glibc's function that reports allocated memory; None with another C library."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if function is not None:
        function.restype = _MallocInfo
    return function


def _num_allocated_bytes() -> int:
    """Return the bytes that the process has allocated; 0 if the C library does not report them."""
    function = _malloc_info()
    sizes = [0] * 10 if function is None else function().sizes
    return int(sizes[4]) + int(sizes[7])


def _grammar_error(kind: str, text: str, message: str) -> GrammarError:
    reason = short_message(message)
    if kind != "json_schema":
        return GrammarError(f"{kind}: {reason}")
    message = " ".join(message.split())
    for sign, keywords, concerns in _KEYWORD_HINTS:
        if sign in message:
            place = place_of(text, keywords, lambda node, keyword: concerns(node, keyword, message))  # noqa: B023 - called here
            if place != "#":
                return GrammarError(f"json_schema: {place}: {reason}")
    return GrammarError(f"json_schema: #: {reason}")


def _has_pattern(node: dict[str, Any], keyword: str, message: str) -> bool:
    patterns = node[keyword] if isinstance(node[keyword], dict) else [node[keyword]]
    return any(isinstance(text, str) and f" {' '.join(text.split())} " in message for text in patterns)


def _is_named(node: dict[str, Any], keyword: str, message: str) -> bool:
    names = node[keyword] if isinstance(node[keyword], list) else [node[keyword]]
    return any(str(name).lstrip("#") in message for name in names)


def _has_crossed_bounds(node: dict[str, Any], _: str, __: str) -> bool:
    low, high = (
        [float(node[name]) for name in names if isinstance(node.get(name), (int, float))] for names in (_LOW, _HIGH)
    )
    return bool(low and high) and max(low) >= min(high)


_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_Concerns = Callable[[dict[str, Any], str, str], bool]
_KEYWORD_HINTS: Final[tuple[tuple[str, tuple[str, ...], _Concerns], ...]] = (
    ("regex", ("pattern", "patternProperties"), _has_pattern),
    ("Properties", ("minProperties", "maxProperties"), lambda *_: True),
    ("Resource", ("$ref",), lambda node, keyword, _: not str(node[keyword]).startswith("#")),
    ("Pointer", ("$ref",), _is_named),
    ("required", ("required",), _is_named),
    ("minimum", _LOW, _has_crossed_bounds),
    ("range", (*_LOW, *_HIGH), _has_crossed_bounds),
    ("anyOf is empty", ("enum", "anyOf"), lambda node, keyword, _: bool(node[keyword] == [])),
    ("incompatible types", ("type",), lambda node, *_: not types_of([node])),
    ("multipleOf", ("multipleOf",), lambda *_: True),
    ("fuel exhausted", ("multipleOf", "pattern"), lambda *_: True),
)
"""Parts of llguidance's errors, the keywords that they are about, and whether a keyword of an object of the schema is meant."""


def _checked_own(given: Any) -> Constraint:
    methods = ("fill_mask", "accept", "rollback", "copy")
    missing = [name for name in methods if not callable(getattr(given, name, None))]
    missing += [name for name in ("is_complete", "may_end") if not hasattr(given, name)]
    if missing:
        raise InvalidType(
            f"constraint: {type(given).__name__} has no {missing[0]}; see paceline.constraints.Constraint"
        )
    own: Constraint = given
    return own


_bytes_lock = threading.Lock()
_bytes: list[ConstraintCompiler] = []


def _bytes_compiler() -> ConstraintCompiler:
    """Return the compiler of a vocabulary of single bytes, for checks; made once."""
    with _bytes_lock:
        if not _bytes:
            table = TokenTable(
                pieces=(*(bytes([byte]) for byte in range(256)), b"<eos>"),
                control_ids=frozenset({256}),
                eog_ids=frozenset({256}),
                encode=lambda text: list(text.encode()),
            )
            _bytes.append(ConstraintCompiler(table))
        return _bytes[0]
