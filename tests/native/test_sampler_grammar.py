"""Grammars: their allowed tokens, token by token."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.native.grammars import LIST, OPEN, accept_all, bits, row, text_of

from paceline.errors import GrammarError, InvalidParams, SamplingError, Unsupported
from paceline.params import SamplingParams
from paceline.runtime import Model, Sampler


@pytest.mark.parametrize(
    "options", [{}, OPEN, {"temperature": 0}, {"top_k": 3}, {"mirostat": 2}, {"min_p": 0.3, "top_k": 0}]
)
def test_generated_text_follows_the_grammar(vocabulary: Model, options: dict[str, Any]) -> None:
    """Whatever the samplers, the text is one that the grammar makes, and it ends."""
    text = text_of(Sampler(SamplingParams(grammar=LIST, seed=4, **options), vocabulary), vocabulary)
    numbers = text.removeprefix("[").removesuffix("]").split(",")
    assert 1 <= len(numbers) <= 4
    assert all(number.isdigit() and len(number) <= 3 for number in numbers)
    assert text == f"[{','.join(numbers)}]"


@pytest.mark.parametrize(
    "options", [{}, OPEN, {"temperature": 0}, {"top_k": 0}, {"xtc_probability": 0.5}, {"mirostat": 1}]
)
@pytest.mark.parametrize(
    "grammar", [LIST, 'root ::= [^"]* "\\""', 'root ::= [^é]+ "x"', 'root ::= "a" | [^\\x00-\\x7F]+']
)
def test_a_grammar_draws_what_its_own_mask_draws(vocabulary: Model, grammar: str, options: dict[str, Any]) -> None:
    """The shortcuts around a grammar give the token that masking every forbidden token first gives."""
    guided = Sampler(SamplingParams(grammar=grammar, seed=9, **options), vocabulary)
    masked = Sampler(SamplingParams(seed=9, **options), vocabulary)
    for k in range(6):
        logits = row(k, guided.n_vocab)
        token = guided.sample(logits)
        assert masked.sample(logits, guided.allowed_mask()) == token
        guided.accept(token)
        masked.accept(token)
        if guided.is_eog(token):
            break


@pytest.mark.parametrize("grammar", [LIST, 'root ::= [^"]* "\\""', 'root ::= [^é]+ "x"', "root ::= [é-ü]+ | <[300]>"])
def test_the_mask_is_the_grammar_applied_to_each_token(vocabulary: Model, grammar: str) -> None:
    """The mask of a whole vocabulary agrees with asking about one token at a time."""
    sampler = Sampler(SamplingParams(grammar=grammar, temperature=0), vocabulary)
    allowed = bits(sampler.allowed_mask(), sampler.n_vocab)
    lone = np.full(sampler.n_vocab, -np.inf, dtype=np.float32)
    for token in range(0, sampler.n_vocab, 7):
        lone[token] = 0.0
        try:
            assert (sampler.sample(lone) == token) == (token in allowed)
        except SamplingError:
            assert token not in allowed
        lone[token] = -np.inf


def test_after_the_grammar_is_complete_only_the_end_can_come(vocabulary: Model) -> None:
    """A finished text is followed by an end-of-generation token and nothing else."""
    sampler = Sampler(SamplingParams(choice=("yes",), seed=1), vocabulary)
    yes = vocabulary.tokenizer.token_id("yes")
    assert yes is not None
    sampler.accept(yes)
    assert bits(sampler.allowed_mask(), sampler.n_vocab) == set(vocabulary.tokenizer.eog_ids)


def test_accept_moves_the_grammar_exactly_once(vocabulary: Model) -> None:
    """Sampling does not move the grammar, accepting moves it one token: "aa" and no more than that comes of two."""
    sampler = Sampler(SamplingParams(grammar='root ::= "a" "b" "a"', temperature=0), vocabulary)
    letters = {letter: vocabulary.tokenizer.token_id(letter) for letter in "ab"}
    logits = np.full(sampler.n_vocab, -np.inf, dtype=np.float32)
    logits[[letters["a"], letters["b"]]] = [1.0, 0.0]
    for letter in "aba":
        assert [sampler.sample(logits) for _ in range(3)] == [letters[letter]] * 3
        sampler.accept(letters[letter])
    with pytest.raises(SamplingError, match="no token is allowed"):
        sampler.sample(logits)


def test_a_token_that_the_grammar_forbids_is_refused_and_nothing_moves(vocabulary: Model) -> None:
    """Accepting a forbidden token, an early end among them, raises and leaves the sampler as it was."""
    sampler = Sampler(SamplingParams(grammar=LIST, seed=4), vocabulary)
    eos = vocabulary.tokenizer.eos
    assert eos is not None
    before = sampler.state()
    for token in (eos, 300, vocabulary.tokenizer.encode("x", add_special=False)[-1]):
        with pytest.raises(InvalidParams, match=f"does not allow token {token}"):
            sampler.accept(token)
    assert sampler.state() == before
    assert text_of(sampler, vocabulary).endswith("]")


def test_a_grammar_that_names_tokens_is_followed(vocabulary: Model) -> None:
    """A token named by id comes at its place in the grammar, and text around it goes on."""
    end = vocabulary.tokenizer.token_id("</s>")
    sampler = Sampler(SamplingParams(grammar='root ::= [a-c]{2} <[300]> "x"', temperature=0), vocabulary)
    ids = []
    while not ids or not sampler.is_eog(ids[-1]):
        ids.append(sampler.sample(row(len(ids), sampler.n_vocab)))
        sampler.accept(ids[-1])
    assert 300 in ids
    assert ids[-1] == end
    assert vocabulary.tokenizer.decode(ids[: ids.index(300)]).strip("abc") == ""


def test_a_drawn_token_can_always_be_accepted(vocabulary: Model) -> None:
    """If a grammar mixes characters and tokens, nothing is drawn that it would not go on with."""
    grammar = 'root ::= (ident "=" ident "\\n")+\nident ::= [a-z] [a-z0-9_]* ws\nws ::= !<[7]> [ \\t\\n]*'
    for seed in range(4):
        sampler = Sampler(SamplingParams(grammar=grammar, seed=seed, **OPEN), vocabulary)
        for k in range(12):
            sampler.accept(sampler.sample(row(100 * seed + k, sampler.n_vocab)))
        assert sampler.num_generated == 12


def test_deep_nesting_is_followed_and_left_again(vocabulary: Model) -> None:
    """Thousands of open brackets are remembered, and closed one by one."""
    sampler = Sampler(SamplingParams(grammar='root ::= "(" root ")" | "x"', temperature=0), vocabulary)
    tokens = {vocabulary.tokenizer.token_bytes(token): token for token in range(sampler.n_vocab)}
    ids = {text: tokens[text.encode()] for text in "(x)"}
    accept_all(sampler, [ids[text] for text in "(" * 3000 + "x" + ")" * 2999])
    copied = sampler.clone()
    with pytest.raises(InvalidParams, match="does not allow"):
        sampler.accept(ids["("])
    for item in (sampler, copied):
        item.accept(ids[")"])
        assert bits(item.allowed_mask(), item.n_vocab) == set(vocabulary.tokenizer.eog_ids)


def test_a_character_in_several_tokens_is_followed(vocabulary: Model) -> None:
    """A character that only byte tokens spell comes byte after byte, and nothing but its own bytes in between."""
    sampler = Sampler(SamplingParams(grammar='root ::= [\\U0001F600-\\U0001F601] "!"', temperature=0), vocabulary)
    tokens = {vocabulary.tokenizer.token_bytes(token): token for token in range(sampler.n_vocab)}
    pieces = [tokens[bytes([byte])] for byte in "😀".encode()]
    for piece in pieces[:-1]:
        assert piece in bits(sampler.allowed_mask(), sampler.n_vocab)
        sampler.accept(piece)
    last = bits(sampler.allowed_mask(), sampler.n_vocab)
    assert last == {tokens[b"\x80"], tokens[b"\x81"]}
    with pytest.raises(InvalidParams, match="does not allow"):
        sampler.accept(tokens[b"!"])
    sampler.accept(pieces[-1])
    sampler.accept(tokens[b"!"])
    assert bits(sampler.allowed_mask(), sampler.n_vocab) == set(vocabulary.tokenizer.eog_ids)


@pytest.mark.parametrize("text", ["yes", 'a "quoted" one', "line\nbreak", "\\back[slash]-", "日本 é 😀"])
def test_a_choice_makes_exactly_its_texts(vocabulary: Model, text: str) -> None:
    """Choices are literal text, with any characters."""
    assert text_of(Sampler(SamplingParams(choice=(text,), seed=3, **OPEN), vocabulary), vocabulary) == text


def test_a_json_schema_makes_json_that_fits(vocabulary: Model) -> None:
    """A schema is turned into a grammar of the JSON that it describes."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
    }
    text = text_of(Sampler(SamplingParams(json_schema=schema, temperature=0), vocabulary), vocabulary, 200)
    assert text.startswith("{")
    assert '"a"' in text


def test_a_schema_that_cannot_be_translated_is_refused(vocabulary: Model) -> None:
    """A keyword unknown to the translation is an error and not ignored."""
    with pytest.raises(GrammarError, match="json_schema"):
        Sampler(SamplingParams(json_schema={"type": "nonsense"}), vocabulary)


def test_what_an_engine_alone_can_follow_is_named(vocabulary: Model) -> None:
    """A sampler without one refuses it instead of drawing freely."""
    with pytest.raises(Unsupported, match="a Sampler alone"):
        Sampler(SamplingParams(regex="a+"), vocabulary)
    assert Sampler(SamplingParams(regex="a+"), vocabulary, is_masked=True).is_complete is False


def test_a_grammar_that_allows_nothing_more_is_complete(vocabulary: Model) -> None:
    """Text that may end, and text that has to."""
    sampler = Sampler(SamplingParams(grammar='root ::= "1" ("2")?'), vocabulary)
    assert (sampler.may_end, sampler.is_complete) == (False, False)
    accept_all(sampler, vocabulary.tokenizer.encode("1", add_special=False)[-1:])
    assert (sampler.may_end, sampler.is_complete) == (True, False)
    accept_all(sampler, vocabulary.tokenizer.encode("2", add_special=False)[-1:])
    assert (sampler.may_end, sampler.is_complete) == (True, True)
    free = Sampler(SamplingParams(), vocabulary)
    assert (free.may_end, free.is_complete) == (True, False)


def test_grammars_after_the_first_read_no_vocabulary_again(llama_cpp_source: Path) -> None:
    """A vocabulary of 150,000 tokens takes a tenth of a second, and every request with tools has a grammar."""
    model = Model.load(llama_cpp_source / "models" / "ggml-vocab-qwen2.gguf", vocab_only=True)
    times = []
    for number in range(6):
        start = time.perf_counter()
        Sampler(SamplingParams(grammar=f'root ::= "{number}"'), model).close()
        times.append(time.perf_counter() - start)
    assert min(times[1:]) < times[0] / 5


def test_the_same_grammar_is_another_one_for_another_vocabulary(vocabulary: Model, llama_cpp_source: Path) -> None:
    """A text that names a token is read by the vocabulary at hand, also after another model has read it."""
    other = Model.load(llama_cpp_source / "models" / "ggml-vocab-qwen2.gguf", vocab_only=True)
    text = "root ::= <[40000]>"
    assert Sampler(SamplingParams(grammar=text, temperature=0), other).sample(row(0, other.n_vocab)) == 40000
    with pytest.raises(GrammarError, match="not in this model's vocabulary"):
        Sampler(SamplingParams(grammar=text), vocabulary)
