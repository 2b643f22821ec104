"""Triggers of lazy grammars that are regular expressions: their matches, and the cost of their search."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from tests.native.grammars import accept_all, bits

from paceline.errors import GrammarError, InvalidParams, SamplingError, StateError
from paceline.params import PatternTrigger, SamplingParams
from paceline.runtime import Model, Sampler

ALPHABET = b"ab<\n "
FREE = "root ::= [^\\x00]*"


def sampler_of(model: Model, *triggers: PatternTrigger | str | int, grammar: str = FREE, **options: object) -> Sampler:
    params = SamplingParams(
        grammar=grammar, grammar_lazy=True, grammar_triggers=triggers, **({"temperature": 0} | options)
    )
    return Sampler(params, model)


def literal(text: bytes) -> str:
    return "".join(f"\\x{byte:02X}" for byte in text)


@cache
def tokens_of(model: Model, alphabet: bytes = ALPHABET) -> dict[bytes, int]:
    """Return the tokens of some characters alone, by their bytes, without byte fallback."""
    tokenizer = model.tokenizer
    pieces = {tokenizer.token_bytes(token): token for token in reversed(range(tokenizer.n_vocab))}
    return {piece: token for piece, token in pieces.items() if piece and set(piece) <= set(alphabet)}


def first_match(pattern: str, pieces: Sequence[bytes]) -> tuple[int, int] | None:
    """Return the number of tokens before Python's `re` finds a match, and the start of its first non-empty group."""
    expression, text = re.compile(pattern.replace("$", "\\Z").encode()), b""
    for count, piece in enumerate(pieces, 1):
        text += piece
        if (match := expression.search(text)) is not None:
            groups = range(1, expression.groups + 1)
            starts = [match.start(group) for group in groups if match.start(group) < match.end(group)]
            return count, starts[0] if starts else match.start()
    return None


def check_against_re(model: Model, pattern: str, pieces: Sequence[bytes]) -> bool:
    """Check that the grammar begins with the token and at the place of `re`'s match; return whether it begins."""
    tokens, expected = tokens_of(model), first_match(pattern, pieces)
    count, start = expected or (len(pieces), 0)
    begun = b"".join(pieces[:count])[start:] if expected else b"never"
    with sampler_of(model, PatternTrigger(pattern), grammar=f'root ::= "{literal(begun)}" "!"') as sampler:
        for piece in pieces[: count - 1]:
            sampler.accept(tokens[piece])
        assert sampler.may_end
        sampler.accept(tokens[pieces[count - 1]])
        mask = bits(sampler.allowed_mask(), sampler.n_vocab)
        assert (len(mask) < 5) == (expected is not None), (pattern, pieces, expected)
        assert sampler.may_end == (expected is None)
    return expected is not None


def random_pattern(rng: random.Random, depth: int = 0) -> str:
    """Return a pattern without empty repeated parts, on which engines of expressions differ."""
    kind = rng.choice("ccccccss|*?(gn") if depth < 4 else "c"
    inner = depth + 1
    match kind:
        case "s":
            return random_pattern(rng, inner) + random_pattern(rng, inner)
        case "|":
            return f"(?:{random_pattern(rng, inner)}|{random_pattern(rng, inner)})"
        case "*":
            repeated = rng.choice(["a", "[ab]", "<a", ".", "[^<]", "(?:a|b<)", "(b|ab)", "\\s"])
            repetition = rng.choice(["*", "+", "*?", "+?", "{2}", "{1,3}", "{1,}?"])
            return f"(?:{repeated}){repetition}"
        case "?":
            return f"(?:{random_pattern(rng, inner)}){rng.choice(['?', '??'])}"
        case "(" | "g":
            return f"({random_pattern(rng, inner)})"
        case "n":
            return f"(?!{rng.choice(['a', 'ab', 'b*<', '[ab]+ ', 'a$', 'a|<'])})"
        case _:
            return rng.choice(["a", "b", "<", " ", "\\n", "[ab]", "[^a]", "^", "$", ".", "\\s", "\\S"])


def test_a_pattern_matches_where_an_expression_does(vocabulary: Model) -> None:
    """With random patterns, texts and tokens: at the same token and the same place as in Python's `re` on the whole text."""
    rng = random.Random(5)
    tokens = tokens_of(vocabulary)
    assert len(tokens) > 10
    num_matches = num_tried = 0
    while num_tried < 3000:
        pattern = random_pattern(rng)
        if re.compile(pattern).groups > 8:
            continue
        num_tried += 1
        pieces = rng.choices(list(tokens), k=rng.randint(1, 12))
        num_matches += check_against_re(vocabulary, pattern, pieces)
    assert 500 < num_matches < 2900


GPT_OSS = "<\\|start\\|>assistant(<\\|channel\\|>(?:commentary|analysis)\\s+to)"
MUSE = "(?:^|<\\|start\\|>assistant)( to=(?!self<\\|message\\|>)(?!user<\\|message\\|>)[^<]*?<\\|message\\|>)"


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("^\\s+to$", " to"),
        ("^\\s+to$", "to"),
        ("^\\s+to$", "x to"),
        (GPT_OSS, "a<|start|>assistant<|channel|>final<|start|>assistant<|channel|>commentary to"),
        (MUSE, " to=self<|message|>Hm.<|start|>assistant to=weather<|message|>"),
        (MUSE, "Hm. to=weather<|message|>"),
        (MUSE, " to=weather<|message|>"),
        (MUSE, " to=user<|message|><|start|>assistant to=users<|message|>"),
        (">>>(?!all)", "all >>all >> >>>"),
        ("[\\s\\S]*?(<tool>)", "x" * 300 + "<tool>"),
        ("", "a"),
    ],
)
def test_patterns_of_chat_formats_match_in_every_cut(vocabulary: Model, pattern: str, text: str) -> None:
    """A text in tokens of one byte each, and in random longer tokens."""
    if not pattern:
        with pytest.raises(InvalidParams, match="1 to 16384 characters"):
            PatternTrigger(pattern)
        return
    rng, tokens = random.Random(7), tokens_of(vocabulary, bytes(range(256)))
    for longest in (1, 1, 3, 9, 9, 9):
        pieces, rest = [], text.encode()
        while rest:
            sizes = [size for size in range(1, 1 + longest) if rest[:size] in tokens]
            size = rng.choice(sizes)
            pieces.append(rest[:size])
            rest = rest[size:]
        expected = first_match(pattern, pieces)
        count, start = expected or (len(pieces), 0)
        begun = b"".join(pieces[:count])[start:] if expected else b"never"
        with sampler_of(vocabulary, PatternTrigger(pattern), grammar=f'root ::= "{literal(begun)}" "!"') as sampler:
            accept_all(sampler, [tokens[piece] for piece in pieces[:count]])
            assert sampler.may_end == (expected is None), (pieces, expected)


@pytest.mark.parametrize(("text", "is_begun"), [("a", True), ("b<", True), ("<a", False), ("b", False)])
def test_a_full_pattern_matches_the_whole_text_alone(vocabulary: Model, text: str, is_begun: bool) -> None:
    """Each of its alternatives does, and none of them matches a part."""
    tokens = tokens_of(vocabulary)
    with sampler_of(vocabulary, PatternTrigger("a|b<", is_full=True), grammar=f'root ::= "{text}" "!"') as sampler:
        accept_all(sampler, [tokens[byte.encode()] for byte in text])
        assert sampler.may_end != is_begun


@pytest.mark.parametrize("text", ["b", "<", "aa"])
def test_other_triggers_count_beside_patterns(vocabulary: Model, text: str) -> None:
    """A token, a text and a pattern: any of them begins the grammar."""
    tokens = tokens_of(vocabulary)
    triggers = (tokens[b"b"], "<", PatternTrigger("(aa)"))
    with sampler_of(vocabulary, *triggers, grammar=f'root ::= "{text}" "!"') as sampler:
        sampler.accept(tokens[b" "])
        assert sampler.may_end
        accept_all(sampler, [tokens[byte.encode()] for byte in text])
        assert not sampler.may_end


def test_copies_and_saved_states_go_on_with_the_search(vocabulary: Model) -> None:
    """In the middle of a match; their original is not changed."""
    tokens = tokens_of(vocabulary)
    params = {"grammar": 'root ::= "<<" "!"'}
    trigger = PatternTrigger("^[ab]+(<<)")
    with sampler_of(vocabulary, trigger, **params) as sampler:
        accept_all(sampler, [tokens[b"a"], tokens[b"b"], tokens[b"<"]])
        copy, restored = sampler.clone(), sampler_of(vocabulary, trigger, **params)
        restored.restore(sampler.state())
        for item in (copy, restored):
            item.accept(tokens[b"<"])
            assert len(bits(item.allowed_mask(), item.n_vocab)) < 5
            item.close()
        sampler.accept(tokens[b"a"])
        accept_all(sampler, [tokens[b"<"], tokens[b"<"]])
        assert len(bits(sampler.allowed_mask(), sampler.n_vocab)) == sampler.n_vocab


def test_samplers_with_other_patterns_have_other_states(vocabulary: Model) -> None:
    """A saved state is refused by a sampler with another pattern, or the same one for the whole text."""
    with sampler_of(vocabulary, PatternTrigger("a<")) as sampler:
        state = sampler.state()
    for other in (PatternTrigger("a>"), PatternTrigger("a<", is_full=True)):
        with sampler_of(vocabulary, other) as sampler, pytest.raises(StateError, match="other parameters"):
            sampler.restore(state)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 0}])
def test_a_call_that_begins_wrongly_is_not_drawn(vocabulary: Model, options: dict[str, float]) -> None:
    """A token that completes a trigger, but not as the grammar wants, gives way to the next best; it is no error."""
    tokens = tokens_of(vocabulary, b"abx<")
    with sampler_of(vocabulary, PatternTrigger("<[a-z]"), grammar='root ::= "<b"', seed=3, **options) as sampler:
        sampler.accept(tokens[b"<"])
        logits = np.full(sampler.n_vocab, -20.0, dtype=np.float32)
        for piece, logit in ((b"a", 30.0), (b"x", 25.0), (b"b", 20.0)):
            logits[tokens[piece]] = logit
        assert sampler.sample(logits) == tokens[b"b"]
        for number in range(20):  # most of them are refused here, so that all tokens have to be checked
            flat = np.zeros(sampler.n_vocab, dtype=np.float32)
            flat[[tokens[bytes([letter])] for letter in b"abx"]] = 9 + number % 2
            one = sampler.clone(choice=number)
            one.accept(one.sample(flat))
            one.close()


def test_the_end_of_the_text_is_no_trigger(vocabulary: Model) -> None:
    """A model may end its message if a pattern would match anything."""
    end = vocabulary.tokenizer.special_tokens["eos"]
    with sampler_of(vocabulary, PatternTrigger("^(?!a)"), grammar='root ::= "b"') as sampler:
        assert sampler.may_end
        sampler.accept(end)
        assert sampler.may_end


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "a \\( without its \\)"), (")", "a \\) without a \\("), ("[a", "a \\[ without its \\]"), ("[]", "empty brackets"),
        ("a**", "a repeated repetition"), ("*", "nothing to repeat"), ("^*", "a repeated assertion"),
        ("a{2,1}", "no {n}, {n,} or {n,m}"), ("a{", "no {n}"), ("a{99999}", "more than 1000 repetitions"),
        ("\\", "a \\\\ at the end"), ("\\1", "\\\\1 at byte 2"), ("\\b", "\\\\b"), ("(?=a)", "other than"),
        ("(?!a(?!b))", "within a lookahead"), ("[b-a]", "a range"), ("[[:alpha:]]", "by its name"), ("\\u00e9", "beyond ASCII"),
        ("(?:" * 200, "nest more than 100 deep"), ("(a)" * 9, "more than 8 groups"), ("((a{1000}){1000}){1000}", "too large"),
        ("(?:" * 9 + "){1000}" * 9, "too large"), ("(?:" * 9 + "a{0}" + "){1000}" * 9, "too large"),
    ],
)  # fmt: skip
def test_patterns_that_are_malformed_or_too_large_are_refused(vocabulary: Model, pattern: str, reason: str) -> None:
    """With the error and its place."""
    with pytest.raises(GrammarError, match=f"grammar_triggers: .*{reason}"):
        sampler_of(vocabulary, PatternTrigger(pattern))


@pytest.mark.parametrize(
    "pattern", ["(a+)+x", "(a|a)*x", "(?:a*)*x", "([ab]|a)*<x", "(?:(?!ab<)a)*x", "^(?:.?){200}x", ".*.*.*x"]
)
def test_no_pattern_takes_exponential_time(vocabulary: Model, pattern: str) -> None:
    """If a backtracking search would not come to an end."""
    token = tokens_of(vocabulary)[b"a"]
    with sampler_of(vocabulary, PatternTrigger(pattern)) as sampler:
        started = time.perf_counter()
        for _ in range(500):
            sampler.accept(token)
        assert time.perf_counter() - started < 60
        assert sampler.may_end


def test_a_search_that_would_take_too_long_is_an_error(vocabulary: Model) -> None:
    """The work for a token is limited; the sampler is as it was before."""
    tokens = tokens_of(vocabulary)
    many = "|".join(f"(?!{'[ab]' * n}<)[ab]" for n in range(1, 60))
    with sampler_of(vocabulary, PatternTrigger(f"(?:{many})*x")) as sampler:
        started = time.perf_counter()
        with pytest.raises(SamplingError, match="too many ways"):
            accept_all(sampler, [tokens[b"a"]] * 300)
        assert time.perf_counter() - started < 60


@pytest.mark.parametrize("pattern", ["(?:(?:[\\s\\S]?){1000}){3}[\\s\\S]", "^([\\s\\S]*)a$"])
def test_tokens_that_all_begin_wrongly_take_bounded_time(vocabulary: Model, pattern: str) -> None:
    """A row of which nearly every token would begin the grammar at a text that it does not allow."""
    tokens = tokens_of(vocabulary)
    row = np.random.default_rng(0).standard_normal(vocabulary.tokenizer.n_vocab).astype(np.float32)
    with sampler_of(vocabulary, PatternTrigger(pattern), grammar='root ::= "\\x01"') as sampler:
        if pattern.startswith("^"):
            accept_all(sampler, [tokens[b"b"]] * 5000)
            for token in range(vocabulary.tokenizer.n_vocab):
                row[token] += 100 * vocabulary.tokenizer.token_bytes(token).endswith(b"a")
        started = time.perf_counter()
        try:
            drawn = sampler.sample(row)
        except SamplingError:  # with what is left over for the next token
            drawn = None
        assert time.perf_counter() - started < 60
        assert drawn is None or not vocabulary.tokenizer.token_bytes(drawn).endswith(b"a")
    with sampler_of(vocabulary, PatternTrigger("a"), grammar='root ::= "<" "!"') as sampler:
        row[tokens[b"a"]] = 200
        assert sampler.sample(row) != tokens[b"a"]


def test_a_long_text_before_a_match_stays_bounded(vocabulary: Model) -> None:
    """A pattern with a match that begins with the text is found after 100 KB; after 256 KiB if it may also begin later."""
    tokens = tokens_of(vocabulary, bytes(range(256)))
    for pattern, size, is_found in (
        ("^[\\s\\S]*?(<b)", 100_000, True),
        ("^[\\s\\S]*?(<b)", 300_000, False),
        ("[\\s\\S]*?(<b)", 300_000, True),
    ):
        long = max((piece for piece in tokens if piece.strip(b" ") == b""), key=len)
        with sampler_of(vocabulary, PatternTrigger(pattern), grammar='root ::= "<b" "!"') as sampler:
            for _ in range(size // len(long)):
                sampler.accept(tokens[long])
            accept_all(sampler, [tokens[b"<"], tokens[b"b"]])
            assert sampler.may_end != is_found
