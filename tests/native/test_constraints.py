"""Constraints on a real model: masks filled during the pass, in a process of its own as well, beside grammars and bans."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.constraints.test_engine import PERSON, Own

from paceline import LLM, Model, Sampler, demo_model_path
from paceline.constraints import ConstraintCompiler
from paceline.engine.llama_backend import ConstrainedSampler, token_table
from paceline.errors import GrammarError, PacelineError, Unsupported
from paceline.params import SamplingParams
from paceline.streaming import FinishReason

ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 300, "seed": 1}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(n_ctx=4096, num_slots=4) as made:
        yield made


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(token_table(Model.load(demo_model_path(), vocab_only=True).tokenizer))


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_schemas_hold_and_end_the_text(llm: LLM, temperature: float) -> None:
    """Several at once, between requests without one; every text is JSON by its schema and ends with STOP."""
    prompts = ["A fox", "Once", "The red", "He"]
    found = llm.generate(prompts, json_schema=PERSON, temperature=temperature, **ENDLESS)
    for completion in found:
        jsonschema.validate(json.loads(completion.text), PERSON)
        assert completion.choices[0].finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"regex": "[a-c]{2,4}x"}, "[a-c]{2,4}x"),
        ({"choice": ("first", "second choice", "dritte Wahl: ä/ö")}, "first|second choice|dritte Wahl: ä/ö"),
        ({"lark": 'start: "a" b+\nb: "b" "c"?\n', "temperature": 2.0}, "a(bc?)+"),
        ({"grammar": 'root ::= "x" [0-9]{3}'}, "x[0-9]{3}"),
    ],
)
def test_every_kind_is_followed_and_ends(llm: LLM, options: dict[str, Any], pattern: str) -> None:
    """STOP as soon as nothing may follow, with logprobs and several choices too."""
    completion = llm.generate("A", n=2, logprobs=1, **{**ENDLESS, **options})
    for choice in completion.choices:
        is_open = choice.finish_reason is FinishReason.LENGTH
        assert is_open == ("lark" in options) or choice.finish_reason is FinishReason.STOP
        assert re.fullmatch(pattern, choice.text) or is_open


def test_a_text_that_may_end_stops_where_bans_leave_nothing(llm: LLM) -> None:
    """By a constraint and by a GBNF grammar."""
    (letter,) = llm.tokenizer.encode("x", add_special=False)
    for options in ({"regex": "x(y[0-9])?"}, {"grammar": 'root ::= "x" ("y" [0-9])?'}):
        completion = llm.generate("A", allowed_token_ids=(letter,), **options, **ENDLESS)  # type: ignore[arg-type]
        assert (completion.text, completion.choices[0].finish_reason) == ("x", FinishReason.STOP)


def test_neighbours_are_not_changed(llm: LLM) -> None:
    """A greedy text is the same beside constrained texts."""
    alone = llm.generate("A fox", max_tokens=24, temperature=0, cache_prompt=False).text
    streams = [llm.stream("Once", json_schema=PERSON, **ENDLESS) for _ in range(2)]
    beside = llm.generate("A fox", max_tokens=24, temperature=0, cache_prompt=False).text
    for stream in streams:
        stream.close()
    assert beside[:8] == alone[:8]


def test_thinking_is_free_until_its_budget(llm: LLM) -> None:
    """Then message and end tag come, and the answer follows the schema."""
    thinking = {
        "start": "<think>",
        "ends": ["</think>"],
        "is_open": True,
        "budget": 12,
        "message": "\nThat is enough.\n",
    }
    completion = llm.generate("A", json_schema=PERSON, thinking=thinking, temperature=1, **ENDLESS)
    thought, _, answer = completion.text.partition("</think>")
    assert thought.endswith("\nThat is enough.\n")
    jsonschema.validate(json.loads(answer), PERSON)
    assert completion.choices[0].finish_reason is FinishReason.STOP


def test_a_grammar_that_forbids_the_message_wins(llm: LLM) -> None:
    """Forced tokens that the grammar refuses are left out: first the message, then the budget."""
    thinking = {"start": "<t>", "ends": ["</t>"], "is_open": True, "budget": 2, "message": "UPPER"}
    end = 'root ::= [a-z ]+ "</t>" "yes"'
    found = llm.generate("A", grammar=end, thinking=thinking, **ENDLESS)
    assert re.fullmatch("[a-z ]+</t>yes", found.text)
    without = llm.generate("A", grammar="root ::= [a-z]{9}", thinking=thinking, **ENDLESS)
    assert re.fullmatch("[a-z]{9}", without.text)


def test_a_constraint_of_the_user(llm: LLM, compiler: ConstraintCompiler) -> None:
    """One that raises, or never returns, ends its own request alone."""
    (letter,) = llm.tokenizer.encode("a", add_special=False)

    class Letters(Own):
        def fill_mask(self, words: Any) -> bool:
            if self.fails_at == -1:
                raise ZeroDivisionError("no mask")
            words.fill(0)
            words[letter >> 5] = np.uint32(1 << (letter & 31))
            return True

        def accept(self, token_id: int) -> None:
            super().accept(ord("a") if token_id == letter else token_id)

        def copy(self) -> Letters:
            return Letters(self.most, self.fails_at)

    assert llm.generate("A", constraint=Letters()).text == "aaaa"
    for fails_at in (-1, 2):
        with pytest.raises(PacelineError, match="ZeroDivisionError"):
            llm.generate("A", constraint=Letters(4, fails_at))
    assert llm.generate("A", constraint=Letters()).text == "aaaa"


def test_bad_constraints_leave_the_engine_working(llm: LLM) -> None:
    """A constraint that does not compile raises at the call."""
    for options in ({"regex": "("}, {"json_schema": {"not": {}}}, {"lark": "x"}, {"choice": ("\ud800",)}):
        with pytest.raises(PacelineError):
            llm.generate("A", **options)  # type: ignore[arg-type]
    assert llm.generate("A", choice=("yes",)).text == "yes"


def test_many_threads_compile_at_once(compiler: ConstraintCompiler) -> None:
    """The cache hands out copies; a copy does not move another."""
    found: list[bool] = []

    def work(number: int) -> None:
        for _ in range(20):
            constraint = compiler.compile(SamplingParams(regex=f"[ab]{{{number % 3 + 1}}}"))
            assert constraint is not None
            for token in compiler.table.encode("a") * (number % 3 + 1):
                constraint.accept(token)
            found.append(constraint.is_complete)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 120


VALUES = st.sampled_from(
    [
        {"type": "integer", "minimum": -3, "maximum": 99},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": 4},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
        {"type": "string", "format": "date"},
        {"enum": ["x", 1, None, {"a": [1]}]},
        {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 9},
    ]
)
SCHEMAS = st.recursive(
    VALUES,
    lambda inner: st.one_of(
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(
            lambda named, all_required: {
                "type": "object",
                "properties": named,
                "required": sorted(named) if all_required else [],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "b b", 'c"', "d/~"]), inner, max_size=3),
            st.booleans(),
        ),
        st.builds(lambda left, right: {"anyOf": [left, right]}, inner, inner),
    ),
    max_leaves=5,
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.integers(0, 2**31))
def test_texts_by_random_schemas_validate(compiler: ConstraintCompiler, schema: Any, seed: int) -> None:
    """Random walks along the masks, biased to the end, are valid by another library."""
    constraint = compiler.compile(SamplingParams(json_schema=schema))
    assert constraint is not None
    random = np.random.default_rng(seed)
    words = np.zeros(compiler.table.num_words, dtype=np.uint32)
    text = b""
    closing = [
        item for item, piece in enumerate(compiler.table.pieces) if piece in (b'"', b"}", b"]", b",", b"0", b"1")
    ]
    for _ in range(400):
        if constraint.is_complete:
            break
        assert constraint.fill_mask(words)
        may_come = set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())
        assert not may_come & compiler.table.eog_ids or constraint.may_end
        if constraint.may_end:
            break
        tokens = sorted(may_come - compiler.table.eog_ids)
        assert tokens
        preferred = [item for item in closing if item in may_come]
        token = int(random.choice(preferred if preferred and random.random() < 0.7 else tokens))
        constraint.accept(token)
        text += compiler.table.pieces[token]
    else:
        pytest.fail(f"no end after {text!r}")
    jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


def test_in_a_worker_process() -> None:
    """The front refuses constraints that do not compile or cannot cross; the worker follows the rest."""
    with LLM(n_ctx=1024, num_slots=2, isolation="process") as llm:
        completion = llm.generate("A", json_schema=PERSON, **ENDLESS)
        jsonschema.validate(json.loads(completion.text), PERSON)
        called = llm.generate(
            "A",
            grammar='root ::= "call" [0-9]',
            grammar_lazy=True,
            grammar_triggers=[{"pattern": "^(?!zz)"}],
            **ENDLESS,
        )
        assert re.fullmatch("call[0-9]", called.text)
        thinking = {"start": "<t>", "ends": ["</t>"], "is_open": True, "budget": 3}
        found = llm.generate("A", choice=("yes", "no"), thinking=thinking, **ENDLESS)
        assert found.text.partition("</t>")[2].strip() in ("yes", "no")
        with pytest.raises(GrammarError, match="#/not"):
            llm.generate("A", json_schema={"not": {}})
        with pytest.raises(Unsupported, match="module:attr"):
            llm.generate("A", constraint=Own())


def test_triggers_within_thinking_begin_no_grammar(llm: LLM) -> None:
    """A lazy grammar looks at later tokens; copies, saved states and replays do the same."""
    thinking = {"start": "<t>", "ends": ["</t>"], "is_open": True}
    params = SamplingParams(
        grammar='root ::= "call" [0-9]', grammar_lazy=True, grammar_triggers=("call",), thinking=thinking, mirostat=2
    )
    model = llm.model
    compiler = ConstraintCompiler(token_table(model.tokenizer))
    encode = compiler.table.encode

    def make() -> ConstrainedSampler:
        return ConstrainedSampler(Sampler(params, model, is_masked=True), compiler.compile(params))

    first = make()
    thought = encode("call me") + encode("</t>") + encode("\n")
    for token in thought:
        first.accept(token)
    restored = make()
    restored.sampler.restore(first.sampler.state())
    for token in thought:
        restored.follow(token)
    for item in (first, first.copy(1), restored):
        for token in encode("call"):
            item.accept(token)
        allowed = item.sampler.allowed_mask()
        pieces = [
            compiler.table.pieces[token]
            for token in np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little"))
        ]
        assert set(pieces) == {bytes([digit]) for digit in b"0123456789"}
