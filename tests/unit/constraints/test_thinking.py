"""A constraint sleeps while the model thinks; tags cut anywhere; budgets that end thinking in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.constraints.byte_table import EOS, PIECES, TABLE, allowed, spell, take, token

from paceline.constraints import Constraint, ConstraintCompiler, ThinkingConstraint, TokenTable
from paceline.errors import InvalidParams
from paceline.params import SamplingParams

COMPILER = ConstraintCompiler(TABLE)
TAGS: dict[str, Any] = {"start": "<think>", "ends": ("</think>",)}


def make(regex: str | None = '\\{"a":true\\}', **thinking: Any) -> ThinkingConstraint:
    made = COMPILER.compile(SamplingParams(regex=regex, thinking={**TAGS, **thinking}))
    assert isinstance(made, ThinkingConstraint)
    return made


def forced_text(constraint: ThinkingConstraint) -> bytes:
    text = b""
    while (token_id := constraint.forced_token) is not None:
        assert allowed(constraint) == {token_id}
        constraint.accept(token_id)
        text += PIECES[token_id]
    return text


def test_before_thinking_only_the_start_and_the_content_may_come() -> None:
    """The text begins with the tag, as one token or spelt, or with tokens of the inner constraint."""
    constraint = make()
    assert allowed(constraint) == {token(b"<think>"), token(b"<"), token(b"{")}
    take(constraint, b"<")
    assert allowed(constraint) == {token(b"t")}


def test_while_thinking_everything_may_come_but_the_end_of_the_text_and_what_passes_the_tag() -> None:
    """No token may begin the content together with the end of thinking; an early end would leave no content."""
    constraint = make()
    take(constraint, b"<think>")
    assert constraint.is_thinking
    assert allowed(constraint) == set(range(len(PIECES))) - {EOS, token(b"</think>{")}
    spell(constraint, "x </think")
    found = allowed(constraint)
    assert found is not None
    assert token(b">{") not in found
    assert {token(b">"), token(b">\n\n")} <= found


@pytest.mark.parametrize(
    "pieces",
    [
        (b"</think>",),
        (b"</thi", b"nk>"),
        (b"<", b"/", b"t", b"h", b"i", b"n", b"k", b">\n\n"),
        (b"</thi", b"</thi", b"nk>"),
    ],
)
def test_the_end_is_found_wherever_tokens_cut_it(pieces: tuple[bytes, ...]) -> None:
    """After it the inner constraint holds, with blanks in front that it would refuse."""
    constraint = make()
    take(constraint, b"<think>", b" th", *pieces, b"\n", b" ")
    assert not constraint.is_thinking
    spell(constraint, '{"a":true')
    assert allowed(constraint) == {token(b"}")}
    take(constraint, b"}")
    assert constraint.is_complete
    assert constraint.may_end


def test_blanks_after_thinking_are_few() -> None:
    """Eight of them may come; then the content has to begin."""
    constraint = make(is_open=True)
    take(constraint, b"</think>", b"\n\n", b"\n\n", b"\n\n", b"\n\n")
    assert allowed(constraint) == {token(b"{")}


def test_text_that_might_be_the_start_is_content_as_well() -> None:
    """A content that begins like the tag stays possible until the tag is whole."""
    constraint = make("<t(hink>|x)y")
    spell(constraint, "<t")
    assert allowed(constraint) == {token(b"h"), token(b"x")}
    take(constraint, b"x", b"y")
    assert constraint.is_complete
    constraint = make("<t(hink>|x)y")
    spell(constraint, "<think>")
    assert constraint.is_thinking
    take(constraint, b"</think>")
    spell(constraint, "<txy")
    assert constraint.is_complete


def test_a_budget_of_none_at_all() -> None:
    """With an open tag the end is forced at once; without, the tag may not come."""
    constraint = make(is_open=True, budget=0)
    assert forced_text(constraint) == b"</think>"
    spell(constraint, '{"a":true}')
    assert constraint.is_complete
    assert allowed(make(budget=0)) == {token(b"{")}
    free = allowed(make(None, budget=0))
    assert free == set(range(len(PIECES))) - {token(b"<think>")}
    constraint = make(None, budget=0)
    spell(constraint, "<think")
    assert token(b">") not in (allowed(constraint) or set())


def test_the_budget_ends_thinking_with_a_message() -> None:
    """So many tokens, then message and tag, token by token."""
    constraint = make(budget=3, message="\nEnough.\n")
    take(constraint, b"<think>")
    spell(constraint, "abc")
    assert forced_text(constraint) == b"\nEnough.\n</think>"
    assert not constraint.is_thinking


def test_a_tag_that_has_begun_is_completed_at_the_budget() -> None:
    """Its rest is forced, not the whole again."""
    constraint = make(budget=2)
    take(constraint, b"<think>", b"a", b"</thi")
    assert forced_text(constraint) == b"nk>"
    assert not constraint.is_thinking


def test_characters_are_never_cut_at_the_budget() -> None:
    """Only bytes that complete the character may come, and then the end."""
    constraint = make(budget=2)
    take(constraint, b"<think>", b"a", b"\xe2")
    found = allowed(constraint)
    assert found is not None
    assert token(b"\x82\xac") in found
    assert all(0x80 <= PIECES[item][0] < 0xC0 for item in found)
    take(constraint, b"\x82")
    assert constraint.forced_token is None
    take(constraint, b"\xac")
    assert forced_text(constraint) == b"</think>"


def test_a_refused_message_gives_way_to_the_tag_and_that_to_free_thinking() -> None:
    """Other restrictions never fail the choice; a replay of the same tokens comes to the same state."""
    constraint = make(is_open=True, budget=0, message="Enough.")
    replayed = constraint.copy()
    constraint.refuse_forced()
    assert constraint.forced_token == token(b"<")
    constraint.refuse_forced()
    assert constraint.forced_token is None
    assert constraint.is_thinking
    for item in (constraint, replayed):
        item.accept(token(b"a"))
        item.accept(token(b"</think>"))
        assert not item.is_thinking


def test_without_an_inner_constraint_only_the_budget_counts() -> None:
    """Text is free, and never complete."""
    constraint = make(None, budget=2)
    assert allowed(constraint) is None
    take(constraint, b"\n\n", b"<think>", b"a")
    assert allowed(constraint) is None
    take(constraint, b"b")
    assert forced_text(constraint) == b"</think>"
    assert allowed(constraint) is None
    assert not constraint.is_complete
    assert constraint.may_end


def test_text_before_any_thinking_ends_the_chance_of_it() -> None:
    """A tag in the middle of the content is content."""
    constraint = make(None, budget=0)
    take(constraint, b"a")
    take(constraint, b"<think>")
    assert not constraint.is_thinking


@given(
    st.lists(
        st.sampled_from([b"<", b"t", b"<think>", b"a", b"</thi", b"nk>", b"\n", b"</think>", b"{", b"true", b'"', b"}"])
    ),
    st.integers(0, 12),
    st.integers(0, 3),
)
def test_rollback_and_copies_come_to_the_same_masks(pieces: list[bytes], back: int, budget: int) -> None:
    """The allowed tokens depend on the tokens so far alone."""
    constraint = make(budget=budget or None)
    history: list[tuple[int, set[int] | None]] = []
    for piece in pieces:
        may_come = allowed(constraint)
        token_id = next(iter(may_come)) if may_come and token(piece) not in may_come else token(piece)
        if constraint.is_complete or may_come == {EOS}:
            break
        history.append((token_id, may_come))
        constraint.accept(token_id)
    twin = constraint.copy()
    assert allowed(twin) == allowed(constraint)
    back = min(back, len(history))
    constraint.rollback(back)
    for token_id, may_come in history[len(history) - back :]:
        assert allowed(constraint) == may_come
        constraint.accept(token_id)
    assert allowed(constraint) == allowed(twin)


def test_rollback_past_the_beginning_is_refused() -> None:
    """And leaves it as it was."""
    constraint = make()
    take(constraint, b"<think>")
    with pytest.raises(InvalidParams, match="from 0 to 1"):
        constraint.rollback(2)
    assert constraint.is_thinking


class Odd:
    """A constraint of a user's own: only the letter a, three times."""

    is_complete = may_end = False

    def __init__(self) -> None:
        self.count = 0

    def fill_mask(self, words: Any) -> bool:
        words.fill(0)
        words[ord("a") >> 5] = 1 << (ord("a") & 31)
        return True

    def accept(self, token_id: int) -> None:
        self.count += 1
        self.is_complete = self.may_end = self.count == 3

    def rollback(self, num_tokens: int) -> None:
        self.count -= num_tokens

    def copy(self) -> Odd:
        return Odd()


def test_an_own_constraint_sleeps_as_well() -> None:
    """An object's copy follows the content behind the thinking."""
    made = COMPILER.compile(SamplingParams(constraint=Odd(), thinking={**TAGS, "is_open": True}))
    assert made is not None
    inner: Constraint = made
    take(inner, b"x", b"</think>", b"a", b"a", b"a")
    assert inner.is_complete


def test_a_lazy_grammar_gets_its_text_whole() -> None:
    """No token holds both the end of thinking and a trigger of the grammar; the text may end while thinking."""
    params = SamplingParams(grammar='root ::= "x"', grammar_lazy=True, grammar_triggers=("x",), thinking=TAGS)
    constraint = COMPILER.compile(params)
    assert constraint is not None
    take(constraint, b"<think>")
    assert allowed(constraint) == set(range(len(PIECES))) - {token(b"</think>{")}


BLANK_PIECES = (*(bytes([byte]) for byte in range(256)), b"\n<think>", b"\n<th", b"\n\n", b"<eos>")
BLANK_COMPILER = ConstraintCompiler(
    TokenTable(
        pieces=BLANK_PIECES,
        control_ids=frozenset({259}),
        eog_ids=frozenset({259}),
        encode=lambda text: [*text.encode()],
    )
)


def begun(budget: int | None) -> ThinkingConstraint:
    made = BLANK_COMPILER.compile(SamplingParams(thinking={**TAGS, "budget": budget}))
    assert isinstance(made, ThinkingConstraint)
    return made


def may_come(constraint: ThinkingConstraint, token_id: int) -> bool:
    words = np.zeros(BLANK_COMPILER.table.num_words, dtype=np.uint32)
    return not constraint.fill_mask(words) or bool(int(words[token_id >> 5]) >> (token_id & 31) & 1)


def test_white_space_in_the_token_of_the_start_tag_does_not_hide_it() -> None:
    """A budget holds, 0 included; also if the token begins the tag alone."""
    constraint = begun(2)
    constraint.accept(256)
    assert constraint.is_thinking
    assert not may_come(begun(0), 256)
    constraint = begun(0)
    for item in (258, 257, *b"ink"):
        assert may_come(constraint, item)
        constraint.accept(item)
    assert not may_come(constraint, ord(">"))


def test_an_end_that_is_refused_half_way_still_counts_what_has_come() -> None:
    """The rest of the tag ends thinking, although it was not forced."""
    constraint = begun(1)
    for item in (256, ord("x"), *b"</thi"):
        constraint.accept(item)
    constraint.refuse_forced()
    for item in b"nk>":
        assert constraint.is_thinking
        constraint.accept(item)
    assert not constraint.is_thinking


def test_json_in_strings_and_comments_of_lark_is_no_schema() -> None:
    """Only a rule's body is."""
    made = COMPILER.compile(SamplingParams(lark='// %json here\nstart: "%json " /%json/ a\na: %json {"const": 1}\n'))
    assert made is not None
    spell(made, "%json %json1")
