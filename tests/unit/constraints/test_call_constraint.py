"""A constraint that sleeps until a tool call begins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline import SamplingParams
from paceline.constraints import ConstraintCompiler, TokenTable
from paceline.errors import GrammarError, InvalidParams
from paceline.params import CallGrammar, PatternTrigger

WORDS = (b"<call>", b"<", b"call", b">", b"x<call>7", b"call>4", b"<think>", b"</think>", b"Hm ", b"</think><call>")
LARK = 'start: "<call>" args "</call>"\nargs: %json {"type": "integer", "minimum": 3, "maximum": 6}\n'


def table() -> TokenTable:
    """Return a vocabulary of bytes, an end, and a few words."""
    pieces = (*(bytes([i]) for i in range(256)), b"<eos>", *WORDS)
    return TokenTable(
        pieces=pieces, control_ids=frozenset({256}), eog_ids=frozenset({256}), encode=lambda text: list(text.encode())
    )


TABLE = table()
COMPILER = ConstraintCompiler(TABLE)
EVERY_BYTE = "".join(map(chr, range(128)))


def constraint(*triggers: Any, **options: Any) -> Any:
    params = SamplingParams(call_grammar=CallGrammar(LARK, triggers or ("<call>",)), **options)
    made = COMPILER.compile(params)
    assert made is not None
    return made


def ids(*texts: str) -> list[int]:
    """Return a token for each text that is one, and the bytes of others."""
    return [
        item
        for text in texts
        for item in ([257 + WORDS.index(text.encode())] if text.encode() in WORDS else text.encode())
    ]


def allowed(made: Any) -> str | None:
    """Return the single bytes that may come next; None for all tokens."""
    words = np.zeros(TABLE.num_words, dtype=np.uint32)
    if not made.fill_mask(words):
        return None
    return "".join(chr(i) for i in range(128) if words[i >> 5] >> np.uint32(i & 31) & 1)


@pytest.mark.parametrize(
    "trigger", ["<call>", ids("<call>")[0], PatternTrigger("^[^<]*(<call>)"), {"pattern": "<call>$"}], ids=str
)
def test_text_is_free_until_a_call_begins_which_is_held(trigger: Any) -> None:
    """By a word, a token or a pattern; behind the call nothing comes."""
    made = constraint(trigger)
    for token in ids("Hello ", "Hm "):
        made.accept(token)
        assert (allowed(made), made.may_end, made.is_complete) == (None, True, False)
    made.accept(ids("<call>")[0])
    assert (allowed(made), made.may_end) == ("3456", False)
    with pytest.raises(InvalidParams, match="does not allow"):
        made.accept(ord("9"))
    for token in ids("5</call>"):
        made.accept(token)
    assert (made.may_end, made.is_complete) == (True, True)


def test_a_call_may_begin_and_go_on_within_tokens() -> None:
    """The grammar gets the text from the trigger on, whatever tokens it came in."""
    made = constraint()
    for token in ids("x", "<", "call>4"):
        made.accept(token)
    assert allowed(made) == "<"


def test_text_that_the_grammar_does_not_go_on_with_begins_no_call() -> None:
    """The native grammar of calls refuses this token at the beginning of a call."""
    made = constraint()
    made.accept(ids("x<call>7")[0])
    assert allowed(made) is None


def test_tokens_are_taken_back_in_the_call_and_before_it() -> None:
    """Also across its beginning."""
    made = constraint()
    for token in ids("x", "<call>", "5", "<"):
        made.accept(token)
    made.rollback(2)
    assert allowed(made) == "3456"
    made.rollback(1)
    assert allowed(made) is None
    made.accept(ids("<call>")[0])
    assert allowed(made) == "3456"
    made.rollback(2)
    with pytest.raises(InvalidParams, match="num_tokens"):
        made.rollback(1)


def test_a_copy_goes_on_by_itself() -> None:
    """Before a call and in it."""
    made = constraint()
    made.accept(ids("<")[0])
    ahead = made.copy()
    for token in ids("call", ">", "3"):
        ahead.accept(token)
    assert (allowed(made), allowed(ahead)) == (None, "<")
    again = ahead.copy()
    again.accept(ord("<"))
    assert (allowed(ahead), allowed(again)) == ("<", "/")


def test_no_call_begins_in_thinking() -> None:
    """With thinking in front, in one piece with the constraint that follows it."""
    made = constraint(thinking={"start": "<think>", "ends": ("</think>",)})
    for token in ids("<think>", "<call>", "Hm "):
        made.accept(token)
        assert (allowed(made), made.may_end) == (EVERY_BYTE, True)
    for token in ids("</think>", "Hm ", "<call>"):
        made.accept(token)
    assert (allowed(made), made.may_end, made.is_complete) == ("3456", False, False)
    made.rollback(1)
    assert allowed(made) is None
    made.accept(ids("<call>")[0])
    ahead = made.copy()
    for token in ids("5</call>"):
        ahead.accept(token)
    assert (ahead.is_complete, made.is_complete) == (True, False)


@pytest.mark.parametrize("is_lazy", [False, True])
def test_no_token_ends_thinking_and_begins_a_call(is_lazy: bool) -> None:
    """The constraint of calls would miss the beginning, and let the arguments violate their schema."""
    options: dict[str, Any] = {"grammar_lazy": True, "grammar_triggers": ("<call>",)} if is_lazy else {}
    thinking = {"start": "<think>", "ends": ("</think>",), "is_open": True}
    made = constraint(thinking=thinking, grammar='root ::= "<call>" [0-9]', **options)
    made.accept(ids("Hm ")[0])
    words = np.zeros(TABLE.num_words, dtype=np.uint32)
    assert made.fill_mask(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert (bits[ids("</think><call>")[0]], bits[ids("</think>")[0]]) == (0, 1)


def test_the_grammar_of_a_call_is_compiled_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the cache has dropped it since: the thread of an engine compiles nothing."""
    compiler = ConstraintCompiler(TABLE)
    made = compiler.compile(SamplingParams(call_grammar=CallGrammar(LARK, ("<call>",))))
    assert made is not None
    for number in range(70):
        compiler.compile(SamplingParams(choice=(f"{number}",)))

    def refuse(*_: object) -> None:
        pytest.fail("compiled within a request")

    monkeypatch.setattr(compiler, "_compiled", refuse)
    for _ in range(2):
        copied = made.copy()
        for token in ids("<call>", "5", "</call>"):
            copied.accept(token)
        assert copied.is_complete


def test_long_text_is_dropped_and_a_call_found_behind_it() -> None:
    """But for triggers that begin with ^, which count at the beginning alone."""
    word, first = constraint("<call>"), constraint(PatternTrigger("^x*(<call>)"), "^<call>")
    for token in [*ids("Hm ") * 100_000, *ids("<call>")]:
        word.accept(token)
        first.accept(token)
    assert (allowed(word), allowed(first)) == ("3456", None)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"call_grammar": {"lark": LARK, "triggers": ()}}, InvalidParams, "triggers must have at least one"),
        ({"call_grammar": {"lark": LARK, "triggers": ("",)}}, InvalidParams, r"triggers\[0\] must have 1 to 256"),
        ({"call_grammar": {"lark": LARK, "trigger": ("x",)}}, InvalidParams, "trigger"),
        ({"call_grammar": {"lark": "start: x", "triggers": ("x",)}}, GrammarError, "lark: "),
        ({"call_grammar": {"lark": LARK, "triggers": (PatternTrigger("("),)}}, GrammarError, "is malformed"),
        ({"call_grammar": {"lark": LARK, "triggers": ("x",)}, "regex": "a"}, InvalidParams, "no other constraint"),
    ],
)
def test_an_error_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    """With the field."""
    with pytest.raises(error, match=words):
        COMPILER.compile(SamplingParams(**options))
